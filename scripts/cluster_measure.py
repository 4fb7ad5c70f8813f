"""Measures the strategies of one model on the cluster that this process belongs to; cluster_table.py starts it on every host.

Process 0 calibrates, plans and writes; all run. Rows go to a CSV as they are measured, and a run that was broken off goes on
with what is missing: the calibration is kept in a file beside it.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # models/

import cluster_experts
import jax
import numpy as np
from cluster_calibration import fitted, measured_topology

import soapjax
import soapjax.distributed
from soapjax.api import plan_of_strategy, planning_problem
from soapjax.errors import SoapjaxError
from soapjax.execute.agreement import agree, made_by_first
from soapjax.execute.compiled import CompiledStep, place
from soapjax.execute.coordination import store
from soapjax.execute.hlo import collective_bytes
from soapjax.execute.jointly import agree_on_program
from soapjax.execute.spmd import bind_plan
from soapjax.files import read_text, write_text_atomic
from soapjax.model_source import concrete_model
from soapjax.search.planners import get_planner
from soapjax.search.problem import Budget, PlanningProblem
from soapjax.strategy.plan import ModelSource, Plan
from soapjax.strategy.strategy import Strategy
from soapjax.topology import DeviceTopology

# Small enough for two cores; each has the property of its kind that decides between strategies.
MODELS: dict[str, ModelSource] = {
    "alexnet": ModelSource(  # nearly all parameters in wide dense layers
        path="models.alexnet", settings={"batch": 32, "image": 67, "width": 0.5, "classes": 1000, "dropout": 0.0}
    ),
    "lstm": ModelSource(  # nearly all parameters in the embedding and the softmax of 20,000 words
        path="models.rnnlm",
        settings={"batch": 16, "seq": 8, "hidden": 128, "layers": 1, "vocab": 20_000, "scan": True, "optimizer": "sgd", "learning_rate": 0.1},
    ),
    "transformer": ModelSource(
        path="models.transformer_lm",
        settings={"batch": 8, "seq": 64, "width": 256, "layers": 2, "heads": 4, "vocab": 1024, "optimizer": "adam"},
    ),
    "resnet": ModelSource(  # few parameters, much arithmetic
        path="models.resnet", settings={"depth": "tiny", "batch": 32, "image": 64, "width": 32, "classes": 64}
    ),
}  # fmt: skip
FITTED = ("data_parallel", "tensor_parallel")  # the two factors come from these; they count in no error
FIELDS = (
    "model", "hosts", "rate", "strategy", "written_by", "predicted_s", "predicted_compute_s", "measured_s", "spread", "steps",
    "predicted_bytes", "compiled_bytes",
)  # fmt: skip
TIMED_S = 8.0  # per strategy


class Timing(NamedTuple):
    median_s: float
    spread: float  # (largest - smallest) / median
    steps: int
    loss: float


def key_of(options: argparse.Namespace) -> dict[str, str]:
    return {"model": options.model, "hosts": str(options.hosts), "rate": options.rate}


def read_rows(path: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(read_text(path)))) if Path(path).exists() else []


def write_rows(path: str, rows: list[dict[str, Any]]) -> None:
    out = io.StringIO()
    writer = csv.DictWriter(out, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text_atomic(path, out.getvalue())


class Recorder:
    """The CSV, on rank 0."""

    def __init__(self, options: argparse.Namespace):
        self.options = options

    def done(self) -> set[str]:
        wanted = key_of(self.options)
        return {r["strategy"] for r in read_rows(self.options.output) if all(r[k] == v for k, v in wanted.items())}

    def add(self, **row: Any) -> None:
        row = key_of(self.options) | row
        rows = [r for r in read_rows(self.options.output) if any(r[k] != row[k] for k in ("model", "hosts", "rate", "strategy"))]
        write_rows(self.options.output, [*rows, row])
        predicted = f"predicted {float(row['predicted_s']):8.4f} s, " if row["predicted_s"] != "" else ""
        print(f"{row['strategy']:24s} {predicted}measured {row['measured_s']:8.4f} s (spread {row['spread']:.1%})", flush=True)


def shared(name: str, make: Callable[[], Any]) -> Any:
    """JSON data that rank 0 makes, on all ranks."""
    return json.loads(made_by_first(store(), name, lambda: json.dumps(make()), timeout_s=300, making_s=1800))


def timed(name: str, step: Callable[..., Any], state: Any, rest: tuple[Any, ...], most: int) -> Timing:
    """Steps of a compiled program; their number is the same on all ranks."""
    start = time.perf_counter()
    state, metrics = jax.block_until_ready(step(state, *rest))
    first_s = time.perf_counter() - start
    steps = shared(f"steps {name}", lambda: int(np.clip(TIMED_S / first_s, 3, most)))
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, *rest))
        times.append(time.perf_counter() - start)
    median = statistics.median(times)
    return Timing(median, (max(times) - min(times)) / median, steps, float(metrics["loss"]))


def sent_bytes(hlo: str, hosts: int) -> int:
    """Bytes that a device sends in the compiled program, an instruction in a loop counted as often as the loop runs."""
    total = 0.0
    for part, trips in _computations(hlo):
        for kind, size in collective_bytes(part).items():
            share = (hosts - 1) / hosts
            times = {"all-reduce": 2 * share, "collective-permute": 1.0, "reduce-scatter": hosts - 1.0}.get(kind, share)
            total += times * size * trips
    return int(total)


def _computations(hlo: str) -> Iterator[tuple[str, int]]:
    """The computations of HLO text with how often each runs in a step, by the trip counts of the loops around them."""
    bodies = {m[1]: m[2] for m in re.finditer(r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", hlo, re.MULTILINE | re.DOTALL)}
    trips = dict.fromkeys(bodies, 1)
    for _ in bodies:  # nested loops: until nothing changes
        before = dict(trips)
        for name, text in bodies.items():
            for line in text.splitlines():
                loop = re.search(r"body=%?([\w.\-]+)", line)
                count = re.search(r'known_trip_count\D*(\d+)', line)
                if loop and loop[1] in trips:
                    trips[loop[1]] = before[name] * (int(count[1]) if count else 1)
                for called in re.findall(r"(?:to_apply|calls)=%?([\w.\-]+)", line):
                    if called in trips:
                        trips[called] = max(trips[called], before[name])
        if trips == before:
            break
    return ((text, trips[name]) for name, text in bodies.items())


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


def searched(problem: PlanningProblem, options: argparse.Namespace) -> Iterator[Judged]:
    """The baselines, what the searches find, and random points of the space whose predicted step is bearable."""
    key = jax.random.key(options.seed)
    names = ["data_parallel", "fsdp", "tensor_parallel", "optcnn", "mcmc"]
    if any(t.kind == "conv" for t in problem.graph.tasks):
        names.insert(3, "expert_cnn")
    for name in names:
        yield judged(problem, name, get_planner(name)(key, problem, Budget(options.proposals)).best.strategy)
    rng = np.random.default_rng(options.seed)
    found = 0
    for _ in range(100 * options.random):
        strategy = problem.space.random(rng)
        if found < options.random and problem.simulator.step_times([strategy]).step_time_s[0] <= options.longest_step:
            yield judged(problem, f"random {found}", strategy)
            found += 1


def measure(model: Any, step: Any, one: Judged, options: argparse.Namespace) -> dict[str, Any]:
    plan = Plan.loads(one.plan)
    compiled = CompiledStep(bind_plan(step, plan, devices=list(jax.devices())))
    placed = compiled.place(*model.arguments)
    agree_on_program(one.name, compiled, placed)
    hlo = compiled.lower(*placed).compile().as_text()
    timing = timed(one.name, compiled, placed[0], placed[1:], options.steps)
    return dict(
        strategy=one.name, written_by="soapjax", predicted_s=plan.prediction.step_time_s, predicted_compute_s=one.compute_s,
        measured_s=timing.median_s, spread=timing.spread, steps=timing.steps,
        predicted_bytes=sum(plan.prediction.bytes_by_collective.values()), compiled_bytes=sent_bytes(hlo, options.hosts),
    )  # fmt: skip


def measure_expert(name: str, expert: cluster_experts.Expert, options: argparse.Namespace) -> dict[str, Any]:
    arguments = jax.tree.map(place, expert.arguments, expert.shardings)
    lowered = expert.step.lower(*arguments)
    executable = lowered.compile()
    agree(store(), f"{name}/compiled", {}, timeout_s=300)
    timing = timed(name, expert.step, arguments[0], arguments[1:], options.steps)
    return dict(
        strategy=name, written_by="hand", predicted_s="", predicted_compute_s="", measured_s=timing.median_s, spread=timing.spread,
        steps=timing.steps, predicted_bytes="", compiled_bytes=sent_bytes(executable.as_text(), options.hosts),
    )  # fmt: skip


def calibrated(model: Any, step: Any, options: argparse.Namespace, recorder: Recorder) -> DeviceTopology:
    """The topology of this cluster: from its file, or measured now, with both factors fitted on two measured strategies."""
    path = Path(options.topology)
    first = jax.process_index() == 0
    text = shared("calibration file", lambda: read_text(path) if path.exists() else "")
    if text:
        return DeviceTopology.from_dict(json.loads(text))
    topology = measured_topology(step, options.rate)
    topology = DeviceTopology.from_dict(shared("topology", topology.to_dict))

    def provisional() -> list[Judged]:
        problem = planning_problem(step, topology)
        key = jax.random.key(0)
        return [judged(problem, f"{n}, provisional", get_planner(n)(key, problem, Budget()).best.strategy) for n in FITTED]

    ones = [Judged(*x) for x in shared("provisional", provisional)]
    measured = [measure(model, step, one, options)["measured_s"] for one in ones]

    def fit() -> dict[str, Any]:
        made, c, k = fitted(topology, [o.compute_s for o in ones], [o.network_s() for o in ones], measured)
        print(f"factors from {' and '.join(FITTED)}: compute {c:.3f}, network {k:.3f}", flush=True)
        return made.to_dict()

    topology = DeviceTopology.from_dict(shared("fitted", fit))
    if first:
        print(topology.describe(), flush=True)
        write_text_atomic(path, json.dumps(topology.to_dict(), indent=1) + "\n")
    return topology


def run(options: argparse.Namespace) -> None:
    soapjax.distributed.initialize(timeout_s=120)
    recorder, first = Recorder(options), jax.process_index() == 0
    model = concrete_model(MODELS[options.model])
    step = soapjax.trace(model.step, *model.arguments)
    topology = calibrated(model, step, options, recorder)
    done = set(shared("done", lambda: sorted(recorder.done())))

    def todo() -> list[Judged]:
        return [one for one in searched(planning_problem(step, topology), options) if one.name not in done]

    for entry in shared("strategies", todo):
        row = measure(model, step, Judged(*entry), options)
        if first:
            recorder.add(**row)
    for name, make in cluster_experts.EXPERTS[options.model].items():
        if name not in done:
            row = measure_expert(name, make(MODELS[options.model].settings), options)
            if first:
                recorder.add(**row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), required=True)
    parser.add_argument("--rate", required=True)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--topology", required=True, help="where the calibration is kept")
    parser.add_argument("--random", type=int, default=8)
    parser.add_argument("--proposals", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=9, help="timed steps per strategy, at most")
    parser.add_argument("--longest-step", type=float, default=3.0, help="predicted seconds of a random plan, at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        run(options)
    except SoapjaxError as e:
        for problem in e.problems:
            print(f"error: {problem}", file=sys.stderr)
        soapjax.distributed.leave(2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
