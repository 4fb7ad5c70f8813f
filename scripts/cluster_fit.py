"""Plans of a model on a cluster, as predicted with two factors for compute and network, and how these are fitted."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from cluster_calibration import fitted_factors
from cluster_table import FITTED
from cluster_timing import shared

from soapjax.costs.measured.profile import Profile
from soapjax.costs.measured.profile_parts import Calibration
from soapjax.helpers.files import read_text, write_text_atomic
from soapjax.planning.entry import plan_of_strategy, planning_problem
from soapjax.search.planners import get_planner
from soapjax.search.problem import Budget, PlanningProblem
from soapjax.strategy.configs import Strategy, replicated
from soapjax.strategy.plan import Plan
from soapjax.topology import DeviceTopology


class Judged(NamedTuple):
    """A strategy with its plan and prediction, as rank 0 publishes it."""

    name: str
    plan: str
    compute_s: float

    def network_s(self) -> float:
        return Plan.loads(self.plan).prediction.step_time_s - self.compute_s


def judged(problem: PlanningProblem, name: str, strategy: Strategy) -> Judged:
    plan = plan_of_strategy(problem, strategy)
    return Judged(name, plan.dumps(), float(problem.simulator.costs(strategy).durations.compute_s.sum()))


def strategy_of(problem: PlanningProblem, name: str, options: argparse.Namespace) -> Strategy:
    """The strategy of a planner, or "replicated": every host does all the work, and nothing is sent."""
    if name == "replicated":
        return replicated(problem.graph, problem.space.mesh)
    key = jax.random.key(options.seed)
    return get_planner(name)(key, problem, Budget(options.proposals)).best.strategy


class Calibrated(NamedTuple):
    topology: DeviceTopology
    profile: Profile

    def problem(self, step: Any, **options: Any) -> PlanningProblem:
        return planning_problem(step, self.topology, profile=self.profile, **options)


def fitted(cluster: Calibrated, ones: Sequence[Judged], measured_s: Sequence[float]) -> Calibrated:
    """The cluster with the two factors that bring the steps `ones`, as it predicts them, to what was measured."""
    compute_s, network_s = [o.compute_s for o in ones], [o.network_s() for o in ones]
    c, k = fitted_factors(compute_s, network_s, measured_s)
    predicted_s = [c * a + k * b for a, b in zip(compute_s, network_s, strict=True)]
    errors = [abs(p / m - 1) for p, m in zip(predicted_s, measured_s, strict=True)]
    before = cluster.profile.calibration or Calibration()
    calibration = Calibration(
        topology=cluster.topology.fingerprint(), compute_scale=before.compute_scale * c, network_scale=before.network_scale * k,
        residual=statistics.median(errors), worst=max(errors),
        steps=tuple(zip((o.name for o in ones), predicted_s, measured_s, strict=True)),
    )  # fmt: skip
    print(
        f"factors: compute {calibration.compute_scale:.3f}, network {calibration.network_scale:.3f}; "
        + ", ".join(f"{name} {p * 1e3:.1f} for {m * 1e3:.1f} ms" for name, p, m in calibration.steps), flush=True,
    )  # fmt: skip
    return cluster._replace(profile=cluster.profile.model_copy(update={"calibration": calibration}))


def refitted(
    cluster: Calibrated, ones: Sequence[Judged], measured_s: Mapping[str, float], work: Path, fitted_on: Sequence[str] = FITTED
) -> Calibrated:
    """The cluster with its factors fitted again, on the plans `fitted_on` as they were timed among the others.

    The speed of a virtual machine's memory, and of its TCP, drifts by a tenth within minutes. Where these plans were timed
    by an earlier run, the factors stay.
    """
    if not set(fitted_on) <= measured_s.keys():
        return cluster
    of_fit = [one for one in ones if one.name in fitted_on]
    again = fitted(cluster, of_fit, [measured_s[one.name] for one in of_fit])
    write_text_atomic(work / "profile_refitted.json", again.profile.model_dump_json(indent=1) + "\n")
    return again


def kept(path: Path, name: str, make: Callable[[], Any]) -> Any:
    """JSON data of a file on all ranks; where there is none, rank 0 makes it."""

    def read_or_make() -> Any:
        if not path.exists():
            write_text_atomic(path, json.dumps(make(), indent=1) + "\n")
        return json.loads(read_text(path))

    return shared(name, read_or_make)
