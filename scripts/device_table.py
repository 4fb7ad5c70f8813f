"""Steps of one device, predicted and measured on the device at hand.

    python scripts/device_table.py --minutes 5
    python scripts/device_table.py --models resnet50 --profile-seconds 60 --profile h100.json

One row per step in results/device_steps.csv, written as it goes; rows that are there are kept. Each step is planned for one
device, compiled, and timed beside plain `jax.jit`; then its tasks are timed alone (`--profile-seconds`). What was measured of
all steps is kept as one profile where `--profile` says so. Steps are predicted from the topology file, from that profile, and
from the roofline alone that is fitted to it; `--predict h200x1` does this anew for the rows that are there, without the device.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from paper_tables import ROOT, Rows, guarded, markdown, note, show

sys.path.insert(0, str(ROOT))  # models/

from soapjax.costs.measured.profile import Profile, load_profile, merged
from soapjax.execute.compiled.device_times import seconds_of_calls
from soapjax.execute.compiled.timing import example_arguments, time_steps, training
from soapjax.execute.spmd.compiled_step import CompiledStep
from soapjax.execute.spmd.planned_evaluator import BoundStep, bind_plan
from soapjax.graph.trace.tracing import TracedStep, trace
from soapjax.helpers.files import write_text_atomic
from soapjax.planning.entry import plan_of_strategy, planning_problem
from soapjax.planning.profiling import measure_profile
from soapjax.search.experts.baselines import data_parallel_strategy
from soapjax.search.problem import Evaluation, PlanningProblem
from soapjax.steps.sourced_models import abstract_model, concrete_model
from soapjax.strategy.plan import ModelSource
from soapjax.topology import DeviceTopology, load_topology, local_topology

GPT = {"seq": 1024, "vocab": 51_200, "dtype": "bfloat16"}
STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt3 350M 6 layers bfloat16": ("gpt3", {"size": "350M", "layers": 6, "batch": 16, **GPT}),
    "gpt3 1.3B 4 layers remat bfloat16": ("gpt3", {"size": "1.3B", "layers": 4, "batch": 16, "remat": True, **GPT}),
    "transformer_lm": ("transformer_lm", {"batch": 32, "seq": 512, "width": 768, "layers": 6, "heads": 12, "vocab": 32_768}),
    "llama bfloat16": (
        "llama",
        {"batch": 4, "seq": 2048, "width": 2048, "hidden": 5504, "layers": 4, "heads": 16, "vocab": 32_000, "dtype": "bfloat16"},
    ),
    "resnet50": ("resnet", {"depth": 50, "batch": 64}),
    "bert bfloat16": (
        "bert", {"batch": 32, "seq": 512, "width": 1024, "layers": 6, "heads": 16, "vocab": 30_528, "dtype": "bfloat16"},
    ),
    "vgg": ("vgg", {"batch": 64, "image": 224, "classes": 1000, "depth": 16, "width": 1.0}),
    "unet": ("unet", {"batch": 8, "image": 256, "channels": 4, "classes": 4, "width": 64, "levels": 4}),
    "moe": ("moe", {"batch": 16, "seq": 512, "width": 768, "layers": 4, "heads": 12, "vocab": 32_768, "experts": 8, "top": 2}),
    "alexnet": ("alexnet", {"batch": 256}),
    "rnnlm": ("rnnlm", {"batch": 64, "seq": 10, "hidden": 2048}),
    "mlp": ("mlp", {"batch": 4096, "width": 4096, "layers": 6, "features": 4096}),
    "lenet": ("lenet", {"batch": 256}),
    # Measured after all rates were set: nothing was fitted to these.
    "gpt3 6.7B 2 layers bfloat16": ("gpt3", {"size": "6.7B", "layers": 2, "batch": 4, **GPT, "seq": 2048}),
    "llama 7B 2 layers bfloat16": (
        "llama",
        {"batch": 2, "seq": 4096, "width": 4096, "hidden": 11_008, "layers": 2, "heads": 32, "vocab": 32_000, "dtype": "bfloat16"},
    ),
    "transformer_nnx bfloat16": (
        "transformer_nnx",
        {"batch": 16, "seq": 1024, "width": 1024, "layers": 6, "heads": 16, "vocab": 32_768, "dtype": "bfloat16"},
    ),
    "bert base": ("bert", {"batch": 64, "seq": 128, "width": 768, "layers": 12, "heads": 12, "vocab": 30_528}),
    "moe of 16 experts": (
        "moe", {"batch": 8, "seq": 1024, "width": 1024, "layers": 4, "heads": 16, "vocab": 32_768, "experts": 16, "top": 2},
    ),
    "resnet101 bfloat16": ("resnet", {"depth": 101, "batch": 128, "dtype": "bfloat16"}),
    "inception_v3": ("inception_v3", {"batch": 64, "image": 299, "width": 1.0, "classes": 1000}),
    "rnntc, scanned": ("rnntc", {"batch": 64, "seq": 40, "hidden": 1024, "layers": 4, "vocab": 18_768, "scan": True}),
}  # fmt: skip
COLUMNS = ["step", "data_sheet_s", "roofline_s", "profile_s", "measured_s", "busy_s", "jit_s", "predicted_memory",
           "compiled_memory", "compile_s", "tasks"]  # fmt: skip
ROUNDS, RUNS = 3, 5


class Case(NamedTuple):
    """A step on one device."""

    step: TracedStep
    model: Any
    batch: Any
    topology: DeviceTopology


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no further step after so long")
    parser.add_argument("--profile-seconds", type=float, default=0, help="of timing each step's tasks alone; 0: none are")
    parser.add_argument("--profile", type=Path, help="a profile file that what is measured is added to (no hash in its name)")
    parser.add_argument("--predict", metavar="TOPOLOGY", help="predict the rows that are there of its device anew; measure nothing")
    parser.add_argument("--again", action="store_true", help="measure also what the CSV has already")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the CSV and of the page")
    return guarded(run, parser.parse_args())


def run(options: argparse.Namespace) -> None:
    rows = Rows(options.results / "device_steps.csv", ["device", "step"], again=options.again)
    if options.predict:
        topology = load_topology(options.predict)
        device = next(r["device"] for r in rows.rows if re.search(rf"\b{topology.device.name}\b", r["device"]))
    else:
        topology, device = local_topology(jax.devices()[:1]), jax.devices()[0].device_kind
        until = time.monotonic() + 60 * options.minutes
        for name in options.models:
            found = rows.find(key := dict(device=device, step=name))
            if time.monotonic() < until and not (found or {}).get("measured_s"):
                note(f"measuring {name}")
                rows.add(key | measured(name, topology, options))
                jax.clear_caches()
    kept = load_profile(options.profile) if options.profile is not None and options.profile.exists() else None
    for row in [r for r in rows.rows if r["device"] == device]:
        rows.add(row | predictions(case_of(row["step"], topology), kept))
    found = [r for r in rows.rows if r["device"] == device]
    show(f"steps on one {device}", COLUMNS, found)
    lines = [f"# Steps of one {device}, predicted and measured", "", markdown(COLUMNS, found), *summary(found)]
    write_text_atomic(options.results / "device_steps.md", "\n".join(lines) + "\n")


def predictions(case: Case, profile: Profile | None) -> dict[str, Any]:
    """From the topology file; from a profile of many steps, and from its rates alone."""
    sources = {"data_sheet_s": None}
    if profile is not None:
        sources |= {"profile_s": profile, "roofline_s": profile.model_copy(update={"operators": ()})}
    found = {column: predicted(case, source)[0] for column, source in sources.items()}
    return {c: e.step_time_s for c, e in found.items()} | dict(predicted_memory=round(found["data_sheet_s"].memory_bytes))


def case_of(name: str, topology: DeviceTopology) -> Case:
    module, settings = STEPS[name]
    source = ModelSource(path=f"models.{module}", settings=settings)
    with jax.default_device(jax.devices("cpu")[0]):
        model = abstract_model(source)
        batch = jax.jit(lambda: concrete_model(source).arguments[1])()  # the state is not made
        step = trace(model.step, *model.arguments)
    return Case(step, model, any_tokens(jax.device_get(batch), settings), topology)


def any_tokens(batch: Any, settings: dict[str, Any]) -> Any:
    """Words of the whole vocabulary: the models' own text has 256, whose rows of the gradient thousands of positions add to."""
    if "vocab" not in settings:
        return batch
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.integers(0, settings["vocab"], x.shape, x.dtype) if x.dtype == np.int32 else x, batch)


def predicted(case: Case, profile: Profile | None = None) -> tuple[Evaluation, PlanningProblem]:
    """The one plan that there is."""
    problem = planning_problem(case.step, case.topology, profile=profile)
    return problem.evaluate([data_parallel_strategy(problem)[0]])[0], problem


def measured(name: str, topology: DeviceTopology, options: argparse.Namespace) -> dict[str, Any]:
    case = case_of(name, topology)
    only, problem = predicted(case)
    program = bind_plan(case.step, plan_of_strategy(problem, only.strategy), devices=jax.devices()[:1])
    leaves = arguments_of(program, case)
    planned, start = CompiledStep(program), time.monotonic()
    planned.compile()
    compile_s = time.monotonic() - start
    sides = {"measured_s": planned, "jit_s": jax.jit(case.model.step, donate_argnums=0)}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(ROUNDS):  # in turn: what comes first finds a cooler device
        for side, compiled in sides.items():
            times[side].append(time_steps(program, leaves, num_steps=RUNS, compiled=compiled))
    row: dict[str, Any] = dict(
        **{side: statistics.median(found) for side, found in times.items()},
        busy_s=busy(program, leaves, planned), compiled_memory=planned.peak_memory_bytes(), compile_s=round(compile_s, 1),
    )  # fmt: skip
    note(f"{name}: {row} {times}")
    if options.profile_seconds:
        profile, notes = measure_profile(case.step, topology, seconds=options.profile_seconds, search=False)
        profile = profile.model_copy(update={"commands": (f"scripts/device_table.py --models {shlex.quote(name)}",)})
        note("; ".join(notes))
        row["tasks"] = len(profile.operators)
        if options.profile is not None:
            kept = [load_profile(options.profile)] if options.profile.exists() else []
            options.profile.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(options.profile, merged([*kept, profile]).to_text())
    return row


def busy(program: BoundStep, leaves: list[Any], planned: CompiledStep) -> float | None:
    """Seconds of a step that the device was busy, where its profiler tells."""
    step = training(program, leaves, planned)
    jax.block_until_ready(step())
    found = seconds_of_calls(lambda: jax.block_until_ready(step()), 1)
    return found[0] if found else None


def arguments_of(program: BoundStep, case: Case) -> list[Any]:
    """State of ordinary numbers, and the model's own batch."""
    leaves = example_arguments(program)
    batch = jax.tree.leaves(case.batch)
    leaves[len(leaves) - len(batch) :] = batch
    return leaves


def summary(rows: list[dict[str, str]]) -> list[str]:
    lines = []
    sources = {"data_sheet_s": "the data sheet", "roofline_s": "the fitted roofline", "profile_s": "tasks timed alone"}
    for column, of in sources.items():
        errors = [float(r[column]) / float(r["measured_s"]) - 1 for r in rows if r.get(column) and r.get("measured_s")]
        if errors:
            lines.append(f"- From {of}: median {statistics.median(errors):+.0%}, from {min(errors):+.0%} to {max(errors):+.0%} "
                         f"({len(errors)} steps).")  # fmt: skip
    ratios = [float(r["measured_s"]) / float(r["jit_s"]) for r in rows if r.get("jit_s")]
    if ratios:
        lines.append(f"- Beside plain `jax.jit`: median {statistics.median(ratios):.3f}, worst {max(ratios):.3f}.")
    memory = [float(r["predicted_memory"]) / float(r["compiled_memory"]) - 1 for r in rows]
    if memory:
        lines.append(f"- Memory: median {statistics.median(memory):+.1%}, from {min(memory):+.1%} to {max(memory):+.1%} "
                     f"({len(memory)} steps).")  # fmt: skip
    return lines


if __name__ == "__main__":
    sys.exit(main())
