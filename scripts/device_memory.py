"""Less and less memory on one device: what is planned, predicted, and measured on the device at hand.

    python scripts/device_memory.py --seconds 20
    python scripts/device_memory.py --models "gpt3 350M, 6 layers" --limits 1 0.6 --results /tmp/out

Each step runs first as it is. Then its device is said to have a part of the memory that this takes, and `soap_shard` plans it as
anybody's step: what it keeps, recomputes or adds up over micro-batches is its own choice. Beside it the same step with
`jax.checkpoint` around every layer. One row per step and limit in results/device_memory.csv, kept where it is there.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
from device_table import any_tokens
from paper_tables import ROOT, Rows, guarded, markdown, note, show

sys.path.insert(0, str(ROOT))  # models/

import soapjax
from soapjax.errors import SoapjaxError
from soapjax.execute.compiled.inspection import peak_memory_bytes
from soapjax.helpers.files import write_text_atomic
from soapjax.steps.sourced_models import concrete_model
from soapjax.strategy.plan import ModelSource, Plan
from soapjax.topology.local import local_topology

STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, 4 layers of 2048": (
        "llama",
        {"batch": 8, "seq": 2048, "width": 2048, "hidden": 5504, "layers": 4, "heads": 16, "vocab": 32_000, "dtype": "bfloat16"},
    ),
    "gpt3 350M, 6 layers": ("gpt3", {"size": "350M", "layers": 6, "batch": 32, "seq": 1024, "vocab": 51_200, "dtype": "bfloat16"}),
}  # fmt: skip
COLUMNS = [
    "step", "limit", "planned", "predicted_s", "measured_s", "available", "predicted_memory", "compiled_memory", "first_call_s",
]  # fmt: skip
RUNS, QUEUED = 5, 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=STEPS, default=list(STEPS))
    of_whole = "parts of the memory that the step as it is takes"
    parser.add_argument("--limits", nargs="+", type=float, default=[1, 0.75, 0.5, 0.35], help=of_whole)
    parser.add_argument("--seconds", type=float, default=20, help="of every plan")
    parser.add_argument("--again", action="store_true", help="measure also what the CSV has already")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the CSV and of the page")
    return guarded(run, parser.parse_args())


def run(options: argparse.Namespace) -> None:
    device = jax.devices()[0].device_kind
    rows = Rows(options.results / "device_memory.csv", ["device", "step", "limit"], again=options.again)
    for name in options.models:
        whole = rows.get(dict(device=device, step=name, limit="jit"), lambda name=name: by_hand(name, {}))
        rows.get(dict(device=device, step=name, limit="jit, every layer again"), lambda name=name: by_hand(name, {"remat": True}))
        for limit in options.limits:
            available = limit * float(whole["compiled_memory"])
            rows.get(dict(device=device, step=name, limit=limit), lambda n=name, a=available: planned(n, a, options.seconds))
    found = [r for r in rows.rows if r["device"] == device]
    show(f"steps on one {device}", COLUMNS, found)
    title = f"# Less and less memory of one {device}"
    write_text_atomic(options.results / "device_memory.md", "\n".join([title, "", markdown(COLUMNS, found)]) + "\n")


def model_of(name: str, **settings: Any) -> Any:
    """A step, its state and its batch, with words of the whole vocabulary."""
    module, of_step = STEPS[name]
    made = concrete_model(ModelSource(path=f"models.{module}", settings=of_step | settings))
    state, batch = made.arguments
    return made.step, state, any_tokens(jax.device_get(batch), of_step)


def by_hand(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    step, state, batch = model_of(name, **settings)
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    memory = peak_memory_bytes(compiled, jax.devices()[0].platform)
    return dict(measured_s=seconds_of(compiled, state, batch), compiled_memory=memory)


def planned(name: str, available: float, seconds: float) -> dict[str, Any]:
    """What `soap_shard` makes of a step on a device with so many bytes for programs."""
    step, state, batch = model_of(name)
    topology = local_topology(jax.devices()[:1])
    kind = dataclasses.replace(topology.device, memory_bytes=int(available), memory_fraction=1.0)
    sharded = soapjax.soap_shard(step, topology=dataclasses.replace(topology, device=kind), seconds=seconds)
    start = time.monotonic()
    try:
        state, _ = sharded(state, batch)
        first_call_s = time.monotonic() - start
    except SoapjaxError as e:
        note(f"{name}: {e}")
        return dict(planned=f"none: {type(e).__name__}", available=round(available))
    measured = seconds_of(sharded, state, batch)
    plan = sharded.plan
    last = plan.provenance.compiled[-1] if plan.provenance.compiled else None
    note(f"{name}: {plan.provenance}")
    return dict(
        planned=said(plan), predicted_s=plan.prediction.step_time_s, measured_s=measured, available=round(available),
        predicted_memory=round(plan.prediction.memory_bytes_per_device), first_call_s=round(first_call_s, 1),
        compiled_memory=None if last is None else round(last.compiled_memory_bytes),
    )  # fmt: skip


def said(plan: Plan) -> str:
    """Which of its means against lack of memory a plan takes."""
    again = len(plan.recomputed) if plan.pipeline is None else sum(s.rematerialise for s in plan.pipeline.stages)
    micro = f"{plan.pipeline.num_microbatches} micro-batches" if plan.pipeline is not None else ""
    recomputed = f"{again} of {len(plan.operators)} operators computed again" if again else ""
    return ", ".join(filter(None, [micro, recomputed])) or "as it is"


def seconds_of(step: Any, state: Any, batch: Any) -> float:
    """Median seconds of a step of a training loop, of which a few are queued."""
    for _ in range(2):
        state, metrics = step(state, batch)
    jax.block_until_ready(metrics)
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        for _ in range(QUEUED):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        times.append((time.perf_counter() - start) / QUEUED)
    del state, metrics
    gc.collect()
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
