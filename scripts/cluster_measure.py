"""Measures the strategies of one model on the cluster that this process belongs to; cluster_table.py starts it on every host.

Three stages: `calibrate` (topology.json, profile.json), `plan` (strategies.json), `measure` (rows of the CSV, all strategies
timed in turn; then the factors of the calibration are fitted again, on the same plans as before, and all predicted with
them). A run that was broken off goes on with the stage that is missing. The second may run while the machine has other
work, the others should not.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # models/

import cluster_experts
import jax
import numpy as np
from cluster_calibration import measured_operators, measured_topology
from cluster_fit import Calibrated, Judged, fitted, judged, kept, refitted, strategy_of
from cluster_table import FITTED, STAGES
from cluster_timing import Timer, in_rounds, shared
from csv_files import read_table
from paper_tables import write_csv

import soapjax
import soapjax.distributed
from soapjax.costs.measured.profile import profile_of
from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.compiled.collectives import collectives_of
from soapjax.execute.processes.agreement import agree
from soapjax.execute.processes.coordination import store
from soapjax.execute.processes.jointly import agree_on_program
from soapjax.execute.spmd.compiled_step import CompiledStep
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.execute.transfers.arrivals import place
from soapjax.search.problem import PlanningProblem
from soapjax.steps.sourced_models import concrete_model
from soapjax.strategy.plan import ModelSource, Plan
from soapjax.topology import DeviceTopology

# Small enough for two cores; each has the property of its kind that decides between strategies.
MODELS: dict[str, ModelSource] = {
    "alexnet": ModelSource(  # nearly all parameters in wide dense layers
        path="models.alexnet", settings={"batch": 32, "image": 67, "width": 0.5, "classes": 1000, "dropout": 0.0}
    ),
    "lstm": ModelSource(  # nearly all parameters in the embedding and the softmax of 20,000 words
        path="models.rnnlm",
        settings={
            "batch": 16, "seq": 8, "hidden": 128, "layers": 1, "vocab": 20_000, "scan": True, "optimizer": "sgd",
            "learning_rate": 0.1,
        },
    ),
    "transformer": ModelSource(
        path="models.transformer_lm",
        settings={"batch": 8, "seq": 64, "width": 256, "layers": 2, "heads": 4, "vocab": 1024, "optimizer": "adam"},
    ),
    "resnet": ModelSource(  # few parameters, much arithmetic
        path="models.resnet", settings={"depth": "tiny", "batch": 32, "image": 64, "width": 32, "classes": 64}
    ),
}  # fmt: skip
FIELDS = (
    "model", "hosts", "rate", "strategy", "written_by", "predicted_s", "predicted_compute_s", "measured_s", "spread", "steps",
    "predicted_bytes", "compiled_bytes",
)  # fmt: skip


def key_of(options: argparse.Namespace) -> dict[str, str]:
    return {"model": options.model, "hosts": str(options.hosts), "rate": options.rate}


def read_rows(path: str, fields: Sequence[str] = FIELDS) -> list[dict[str, str]]:
    return read_table(path, tuple(fields)) if Path(path).exists() else []


def write_rows(path: str, rows: list[dict[str, Any]], fields: Sequence[str] = FIELDS) -> None:
    write_csv(Path(path), fields, rows)


class Recorder:
    """The CSV, on rank 0."""

    def __init__(self, options: argparse.Namespace, fields: Sequence[str] = FIELDS):
        self.options, self.fields = options, fields

    def done(self) -> set[str]:
        wanted = key_of(self.options)
        return {r["strategy"] for r in read_rows(self.options.output, self.fields) if all(r[k] == v for k, v in wanted.items())}

    def add(self, **row: Any) -> None:
        row = key_of(self.options) | row
        same = ("model", "hosts", "rate", "strategy")
        rows = [r for r in read_rows(self.options.output, self.fields) if any(r[k] != row[k] for k in same)]
        write_rows(self.options.output, [*rows, row], self.fields)
        predicted = f"predicted {float(row['predicted_s']):8.4f} s, " if row["predicted_s"] != "" else ""
        print(f"{row['strategy']:24s} {predicted}measured {row['measured_s']:8.4f} s (spread {row['spread']:.1%})", flush=True)


def sent_bytes(hlo: str, hosts: int) -> int:
    """Bytes that a device sends in the compiled program, an instruction in a loop counted as often as the loop runs."""
    return round(sum(c.step_bytes for c in collectives_of(hlo, hosts)))


def searched(problem: PlanningProblem, options: argparse.Namespace) -> Iterator[Judged]:
    """The baselines, what the searches find, and random points of the space whose predicted step is bearable."""
    names = [*FITTED, "optcnn", "mcmc"]
    if any(t.kind == "conv" for t in problem.graph.tasks):
        names.append("expert_cnn")
    for name in names:
        yield judged(problem, name, strategy_of(problem, name, options))
    rng = np.random.default_rng(options.seed)
    found = 0
    for _ in range(100 * options.random):
        strategy = problem.space.random(rng)
        if found < options.random and problem.simulator.step_times([strategy]).step_time_s[0] <= options.longest_step:
            yield judged(problem, f"random {found}", strategy)
            found += 1


def prepared(model: Any, step: Any, one: Judged) -> tuple[CompiledStep, tuple[Any, ...], str]:
    """The compiled step, its placed arguments, and the compiled program's text."""
    compiled = CompiledStep(bind_plan(step, Plan.loads(one.plan), devices=list(jax.devices())))
    placed = compiled.place(*model.arguments)
    agree_on_program(one.name, compiled, placed)
    return compiled, placed, compiled.lower(*placed).compile().as_text()


class Ready(NamedTuple):
    """A strategy that can be timed, and what its row says besides."""

    timer: Timer
    row: dict[str, Any]

    def measured(self) -> dict[str, Any]:
        timing = self.timer.timing()
        return self.row | dict(measured_s=timing.median_s, spread=timing.spread, steps=timing.steps)


def ready(model: Any, step: Any, one: Judged, options: argparse.Namespace) -> Ready:
    compiled, placed, hlo = prepared(model, step, one)
    prediction = Plan.loads(one.plan).prediction
    row = dict(
        strategy=one.name, written_by="soapjax", predicted_s=prediction.step_time_s, predicted_compute_s=one.compute_s,
        predicted_bytes=sum(prediction.bytes_by_collective.values()), compiled_bytes=sent_bytes(hlo, options.hosts),
    )  # fmt: skip
    return Ready(Timer(one.name, compiled, placed[0], placed[1:], options.steps), row)


def prepared_expert(name: str, expert: cluster_experts.Expert) -> tuple[tuple[Any, ...], str]:
    arguments = jax.tree.map(place, expert.arguments, expert.shardings)
    hlo = expert.step.lower(*arguments).compile().as_text()
    agree(store(), f"{name}/compiled", {}, timeout_s=300)
    return arguments, hlo


def ready_expert(name: str, expert: cluster_experts.Expert, options: argparse.Namespace) -> Ready:
    arguments, hlo = prepared_expert(name, expert)
    row = dict(
        strategy=name, written_by="hand", predicted_s="", predicted_compute_s="", predicted_bytes="",
        compiled_bytes=sent_bytes(hlo, options.hosts),
    )  # fmt: skip
    return Ready(Timer(name, expert.step, arguments[0], arguments[1:], options.steps), row)


def calibrated(model: Any, step: Any, options: argparse.Namespace, microbatches: Sequence[int] = ()) -> Calibrated:
    """This cluster's topology and operators as measured before, or now: with a factor each for compute and network.

    The factors are fitted on the plans of `FITTED`, and on nothing else.
    """
    files = [Path(options.work) / name for name in ("topology.json", "profile.json")]
    if not shared("calibrated before", lambda: all(f.exists() for f in files)):
        for path, data in zip(files, _measured_cluster(model, step, options, microbatches), strict=True):
            kept(path, f"new {path.stem}", lambda data=data: data)
    topology, profile = (kept(f, f.stem, dict) for f in files)
    return Calibrated(DeviceTopology.from_dict(topology), profile_of(profile))


def _measured_cluster(model: Any, step: Any, options: argparse.Namespace, microbatches: Sequence[int]) -> tuple[dict, dict]:
    topology = measured_topology(step, options.rate)
    topology = DeviceTopology.from_dict(shared("measured topology", topology.to_dict))
    operators, notes = measured_operators(
        step, topology, seconds=options.profile_seconds, seed=options.seed, microbatches=microbatches
    )
    profile = profile_of(shared("measured operators", lambda: operators.model_dump(mode="json")))
    plain = Calibrated(topology, profile)

    def provisional() -> list[Judged]:
        problem = plain.problem(step)
        return [judged(problem, f"{name}, to calibrate", strategy_of(problem, name, options)) for name in FITTED]

    ones = [Judged(*x) for x in shared("strategies to calibrate", provisional)]
    timers = [ready(model, step, one, options).timer for one in ones]
    in_rounds(timers)
    measured = [timer.timing().median_s for timer in timers]

    def fit() -> dict[str, Any]:
        print(topology.describe(), f"{len(profile.operators)} tasks", *notes[:3], flush=True)
        return fitted(plain, ones, measured).profile.model_dump(mode="json")

    return topology.to_dict(), shared("fitted profile", fit)


def run(options: argparse.Namespace) -> None:
    soapjax.distributed.initialize(timeout_s=120)
    stages = STAGES if options.stage == "all" else (options.stage,)
    work = Path(options.work)
    model = concrete_model(MODELS[options.model])
    step = soapjax.trace(model.step, *model.arguments)
    if "calibrate" not in stages and not shared("calibrated", (work / "profile.json").exists):
        raise SoapjaxError(Problem(str(work / "profile.json"), "missing", "a calibration", "run --stage calibrate first"))
    cluster = calibrated(model, step, options)
    if stages == ("calibrate",):
        return
    strategies = kept(work / "strategies.json", "strategies", lambda: list(searched(cluster.problem(step), options)))
    ones = [Judged(*entry) for entry in strategies]
    experts = cluster_experts.EXPERTS[options.model]
    if stages == ("plan",):
        for one in ones:  # into JAX's cache on disk, where there is one
            prepared(model, step, one)
        for name, make in experts.items():
            prepared_expert(name, make(MODELS[options.model].settings))
        return
    recorder = Recorder(options)
    done = set(shared("done", lambda: sorted(recorder.done())))
    todo = [ready(model, step, one, options) for one in ones if one.name not in done]
    settings = MODELS[options.model].settings
    todo += [ready_expert(name, make(settings), options) for name, make in experts.items() if name not in done]
    in_rounds([one.timer for one in todo])
    if jax.process_index() == 0:
        rows = [one.measured() for one in todo]
        again = refitted(cluster, ones, {r["strategy"]: r["measured_s"] for r in rows}, work)
        before, after = cluster.profile.calibration, again.profile.calibration
        c, k = after.compute_scale / before.compute_scale, after.network_scale / before.network_scale
        # A host computes or sends, never both: each factor scales its part of the step.
        parts = {one.name: (c * one.compute_s, k * one.network_s()) for one in ones}
        for row in rows:
            if row["strategy"] in parts:
                row |= dict(predicted_s=sum(parts[row["strategy"]]), predicted_compute_s=parts[row["strategy"]][0])
            recorder.add(**row)


def rank_parser(description: str, models: Iterable[str]) -> argparse.ArgumentParser:
    """Of a script that an emulated cluster runs on every host (cluster_table.py, on_hosts)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(models), required=True)
    parser.add_argument("--rate", required=True)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--work", required=True, help="the folder for what is kept: calibration, plans")
    parser.add_argument("--steps", type=int, default=120, help="timed steps per plan, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile-seconds", type=float, default=60.0, help="for measuring operators, where that is to be done")
    return parser


def run_as_rank(run: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> int:
    try:
        run(options)
    except SoapjaxError as e:
        soapjax.distributed.fail(e)
    return 0


def main() -> int:
    parser = rank_parser(__doc__, MODELS)
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all")
    parser.add_argument("--random", type=int, default=8)
    parser.add_argument("--proposals", type=int, default=4096)
    parser.add_argument("--longest-step", type=float, default=3.0, help="predicted seconds of a random plan, at most")
    return run_as_rank(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
