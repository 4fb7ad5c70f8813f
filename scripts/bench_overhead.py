"""What `soap_shard` costs beside plain `jax.jit` on one device: paired runs of the same step, in turn.

    python scripts/bench_overhead.py models.mlp --set batch=64 --pairs 200

Prints the median step times, their ratio pair by pair with its quartiles, and the host time per call
(time until the call returns, with the device idle).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time

import jax
from paper_tables import ROOT, guarded

sys.path.insert(0, str(ROOT))  # models/

import soapjax
from soapjax.steps.sourced_models import concrete_model, model_source


def one_device() -> soapjax.DeviceTopology:
    local = soapjax.load_topology("local")
    return dataclasses.replace(local, levels=(dataclasses.replace(local.levels[-1], size=1),), fake=False)


def _quartiles(ordered: list[float]) -> list[float]:
    return [ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    return guarded(run, parser.parse_args(argv))


def run(options: argparse.Namespace) -> None:
    source = model_source(options.model, options.set)
    model = concrete_model(source)
    state, batch = model.arguments
    # Data stays on the device: what is measured is the step and the call, not the transfer.
    batch = jax.device_put(batch, jax.devices()[0])
    sides = {
        "soap_shard": soapjax.soap_shard(model.step, topology=one_device(), planner="data_parallel", devices=jax.devices()[:1]),
        "jax.jit": jax.jit(model.step, donate_argnums=0),
    }
    states = {name: jax.device_put(jax.tree.map(lambda x: x.copy(), state), jax.devices()[0]) for name in sides}
    step_s: dict[str, list[float]] = {name: [] for name in sides}
    host_s: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(options.pairs + 5):
        order = list(sides) if pair % 2 else list(sides)[::-1]
        for name in order:
            start = time.perf_counter()
            states[name], metrics = sides[name](states[name], batch)
            returned = time.perf_counter()
            jax.block_until_ready((states[name], metrics))
            if pair >= 5:
                host_s[name].append(returned - start)
                step_s[name].append(time.perf_counter() - start)
    ratios = sorted(a / b for a, b in zip(step_s["soap_shard"], step_s["jax.jit"], strict=True))
    extra = sorted(a - b for a, b in zip(host_s["soap_shard"], host_s["jax.jit"], strict=True))
    result = {
        "model": options.model,
        "settings": source.settings,
        "pairs": options.pairs,
        "median_step_s": {name: statistics.median(times) for name, times in step_s.items()},
        "step_ratio": {"median": statistics.median(ratios), "quartiles": _quartiles(ratios)},
        "median_host_s": {name: statistics.median(times) for name, times in host_s.items()},
        "extra_host_s": {"median": statistics.median(extra), "quartiles": _quartiles(extra)},
    }
    if options.json:
        print(json.dumps(result))
    else:
        for name in sides:
            step, host = result["median_step_s"][name], result["median_host_s"][name]
            print(f"{name:12s} step {step * 1e3:.3f} ms   host {host * 1e6:.0f} µs")
        print("step ratio   {median:.3f}  quartiles {quartiles[0]:.3f} to {quartiles[1]:.3f}".format(**result["step_ratio"]))
        print(f"extra host   {result['extra_host_s']['median'] * 1e6:.1f} µs per call (CPU runs small steps within the call)")


if __name__ == "__main__":
    sys.exit(main())
