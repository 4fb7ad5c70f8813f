"""The kinds of files that fuzz.py damages: their good examples, how one is read, and the command that reads it."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz_mutants import dumped, mutated_bytes, mutated_tree
from hypothesis import strategies as st

TINY = {"batch": 4, "width": 16, "layers": 1, "features": 8, "classes": 4}


class Kind:
    suffix = ".json"

    def __init__(self, *, quick: bool = False):
        """With `quick` only the examples that are there at once."""
        self.quick = quick
        self.examples = self.made()

    def made(self) -> list[Any]:
        raise NotImplementedError

    def read(self, path: Path) -> None:
        """Raises: SoapjaxError where the file is refused, WrongStep where it is taken and should not be."""
        raise NotImplementedError

    def command(self, path: Path) -> list[str] | None:
        return None

    def mutant(self, draw: Callable[[Any], Any]) -> bytes:
        tree = draw(st.sampled_from(self.examples))
        if draw(st.booleans()):
            return mutated_bytes(draw, json.dumps(tree).encode())
        return dumped(mutated_tree(draw, tree))


class WrongStep(Exception):
    """A file is taken from which a time follows that is not finite and positive."""


def check_time(what: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise WrongStep(f"{what}: {seconds}")


class Plans(Kind):
    """Plans of one program; placed; pipelines; one with a profile."""

    def made(self) -> list[Any]:
        from soapjax.planning import entry
        from soapjax.planning.pipelining import staging
        from soapjax.steps.sourced_models import abstract_model
        from soapjax.strategy.plan import ModelSource

        model = abstract_model(ModelSource(path="soapjax.models.mlp", settings=TINY))
        options = dict(topology="cpu8", model=model.source)
        one = entry.plan(model.step, *model.arguments, planner="data_parallel", **options)
        self.step, self.space = one.step, one.problem.space
        plans = [one.plan]
        if not self.quick:
            deeper = abstract_model(ModelSource(path="soapjax.models.mlp", settings=TINY | {"layers": 3}))
            plans.append(
                entry.plan(deeper.step, *deeper.arguments, planner="model_parallel", space="paper", **options).plan
            )
            for schedule in ("gpipe", "interleaved"):
                plans.append(
                    staging.plan_pipeline(
                        deeper.step, *deeper.arguments, pipeline=schedule, stages=2, microbatches=2, proposals=8, **options
                    )[0]
                )
            plans.append(one.plan.model_copy(update={"profile": profile_data(self.step)}))
        return [json.loads(p.dumps()) for p in plans]

    def read(self, path: Path) -> None:
        import rich.console

        from soapjax.cli import arguments, commands
        from soapjax.strategy.plan import Plan
        from soapjax.strategy.plan_strategy import strategy_of, topology_of

        plan = Plan.load(str(path))
        name = str(path)
        which = path.stat().st_size % 3
        command = (
            arguments.ExplainCommand(plan=name, plan_only=True),
            arguments.DiffCommand(a=name, b=name, plan_only=True),
            arguments.ReportCommand(plan=name, plan_only=True, output=f"{name}.html"),
        )[which]
        result, text, status = commands.run(command, None)
        json.dumps(result)
        rich.console.Console(file=io.StringIO()).print(text)
        assert status == 0
        check_time("prediction", plan.prediction.step_time_s)
        topology, mesh = topology_of(plan, place=name)
        if plan.pipeline is None and not plan.pinned and mesh.axis_sizes == self.space.mesh.axis_sizes:
            strategy_of(plan, self.space, place=name)

    def command(self, path: Path) -> list[str]:
        return ["explain", "--plan-only", str(path)]


class Topologies(Kind):
    suffix = ".toml"

    def made(self) -> list[Any]:
        import importlib.resources

        from soapjax.topology import load_topology

        names = ("cpu8", "a100x64", "dgx_h100") if self.quick else ("cpu8", "a100x64", "dgx_h100", "dgx1_v100x8", "gh200", "k80x64")
        for name in names:
            load_topology(name)
        folder = importlib.resources.files("soapjax.topologies") if installed() else Path(__file__).parent.parent / "topologies"
        return [(folder / f"{name}.toml").read_bytes() for name in names]

    def mutant(self, draw: Callable[[Any], Any]) -> bytes:
        return mutated_bytes(draw, draw(st.sampled_from(self.examples)))

    def read(self, path: Path) -> None:
        from soapjax.topology import factor_mesh, load_topology

        topology = load_topology(str(path))
        factor_mesh(topology)
        topology.describe()
        json.dumps(topology.to_dict(), allow_nan=False)
        device = topology.device
        check_time("a byte of memory", 1 / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency))
        for dtype, rate in device.peak_flops_per_s.items():
            for kind, fraction in device.efficiency.items():
                check_time(f"a FLOP of {kind} in {dtype}", 1 / (rate * fraction))
        for level in topology.levels:
            check_time(f"a byte over {level.name}", level.latency_s + 1 / (level.bandwidth_bytes_per_s * level.efficiency))

    def command(self, path: Path) -> list[str]:
        return ["topologies", str(path)]


class Profiles(Kind):
    def made(self) -> list[Any]:
        from soapjax.graph.trace.tracing import trace
        from soapjax.steps.sourced_models import abstract_model
        from soapjax.strategy.plan import ModelSource

        model = abstract_model(ModelSource(path="soapjax.models.mlp", settings=TINY))
        return [profile_data(trace(model.step, *model.arguments))]

    def mutant(self, draw: Callable[[Any], Any]) -> bytes:
        """Half of them with the hash of what they hold, so that what they hold is looked at."""
        from soapjax.costs.measured.profile import Profile

        data = draw(st.sampled_from(self.examples))
        if draw(st.booleans()):
            data = mutated_tree(draw, data)
            with contextlib.suppress(Exception):
                return dumped({"sha256": Profile.model_validate(data).sha256, "profile": data})
        return mutated_bytes(draw, dumped({"sha256": Profile.model_validate(self.examples[0]).sha256, "profile": data}))

    def read(self, path: Path) -> None:
        from soapjax.costs.measured.fit import fitted_rates
        from soapjax.costs.measured.profile import load_profile

        profile = load_profile(path)
        for m in profile.operators:
            check_time(m.label, m.seconds)
        for link in profile.links:
            check_time(link.level, link.latency_s + 1 / link.bytes_per_s)
        if profile.calibration is not None:
            check_time("compute scale", profile.calibration.compute_scale)
            check_time("network scale", profile.calibration.network_scale)
        rates = profile.rates or fitted_rates(profile.operators)
        if rates is not None:
            for rate in (*rates.flops_per_s.values(), rates.memory_bytes_per_s):
                check_time("a FLOP or byte", rates.launch_s + 1 / rate)

    def command(self, path: Path) -> list[str]:
        settings = [x for k, v in TINY.items() for x in ("--set", f"{k}={v}")]
        plan = ["plan", "soapjax.models.mlp", "--topology", "a100x8", "--planner", "data_parallel", *settings]
        return [*plan, "--profile", str(path)]


class Problems(Kind):
    def made(self) -> list[Any]:
        nodes = {"intervals": [[30, 70], [40, 70], [40, 100], [0, 100]], "costs": [[15, 20], [10], [12, 4, 3], [0, 7]]}
        nodes["usages"] = [[10, 25], [20], [12, 15, 20], [1, 0]]
        edges = {"nodes": [[0, 1], [1, 2], [0, 3]], "costs": [[30, 40], [20, 15, 10], [1, 2, 3, 10**18]]}
        return [{"problem": {"name": "example", "usage_limit": 50, "nodes": nodes, "edges": edges}}]

    def mutant(self, draw: Callable[[Any], Any]) -> bytes:
        data = super().mutant(draw)
        how = draw(st.sampled_from(["plain", "plain", "gzip", "damaged gzip"]))
        if how == "plain":
            return data
        packed = gzip.compress(data, mtime=0)
        return packed if how == "gzip" else mutated_bytes(draw, packed)

    def read(self, path: Path) -> None:
        import numpy as np

        from soapjax.additive.iopddl import load_problem

        problem = load_problem(path)
        score = problem.score(np.zeros(problem.num_nodes, np.int64))
        if not (math.isfinite(score.cost) and score.cost >= 0):
            raise WrongStep(f"cost {score.cost}")


class Csvs(Kind):
    suffix = ".csv"

    def made(self) -> list[Any]:
        return [
            b"# published\nmodel,gpus,full_s,delta_s,note\nalexnet,4,0.11,0.04,\nresnet101,64,1.4,0.4,\"a, b\"\n",
            b"model,gpus,full_s,delta_s\r\nlstm,16,2.5e1,4\r\n\r\ninception,2,3,0.001\r\n",
        ]

    def mutant(self, draw: Callable[[Any], Any]) -> bytes:
        return mutated_bytes(draw, draw(st.sampled_from(self.examples)))

    def read(self, path: Path) -> None:
        from csv_files import Count, CsvRow, Name, Positive, read_rows, read_table

        class Published(CsvRow):
            model: Name
            gpus: Count
            full_s: Positive
            delta_s: Positive

        for row in read_rows(path, Published):
            check_time(row.model, row.full_s / row.gpus)
            check_time(row.model, row.delta_s)
        for row in read_table(path, ("model", "gpus")):
            if row["full_s"]:
                check_time(row["model"], float(row["full_s"]))


KINDS: dict[str, type[Kind]] = {
    "plan": Plans, "topology": Topologies, "profile": Profiles, "problem": Problems, "csv": Csvs,
}  # fmt: skip


def installed() -> bool:
    return not (Path(__file__).parent.parent / "topologies").is_dir()


def profile_data(step: Any) -> dict[str, Any]:
    """A profile of a step on an A100 that nobody measured."""
    from soapjax.costs.measured.fit import fitted_rates
    from soapjax.costs.measured.profile import Profile, installed_versions
    from soapjax.costs.measured.profile_parts import Calibration, Device, Link, Measurement
    from soapjax.graph.passes.build import build_graph

    graph, _ = build_graph(step)
    operators = tuple(
        Measurement(
            label=f"task {i}", structure=task.structure, kind=task.kind, dtype="float32", reads=((4, 16),), writes=((4, 16),),
            elements=64 + i, flops=1000.0 * (i + 1), moved_bytes=512.0, seconds=1e-6 * (i + 1), spread=0.01, num_runs=10,
        )
        for i, task in enumerate(graph.tasks)
    )  # fmt: skip
    profile = Profile(
        device=Device(name="A100", platform="cuda"), versions=installed_versions(), created="2026-01-01T00:00:00+00:00",
        commands=("none",), operators=operators, rates=fitted_rates(operators),
        links=(Link(level="device", latency_s=1e-5, bytes_per_s=1e11, fractions={"all-to-all": 0.5}),),
        calibration=Calibration(compute_scale=1.1, network_scale=0.9, residual=0.02, worst=0.1, steps=(("a.json", 1e-3, 1.1e-3),)),
    )  # fmt: skip
    return json.loads(profile.model_dump_json())
