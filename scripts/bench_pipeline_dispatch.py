"""Host time of dispatching one pipelined step: what the driver costs before any device has done anything.

    python scripts/bench_pipeline_dispatch.py --stages 4 --microbatches 32 --schedule 1f1b

A multilayer perceptron with one dense layer per stage, on fake CPU devices of this machine. Small programs run on the
dispatching thread of the CPU backend, so that the figure includes their (small) compute: it is an upper bound.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # models/


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--inside", type=int, default=1, help="devices per stage")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    devices = options.stages * options.inside
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={devices}")

    import jax

    from models import mlp
    from soapjax import soap_shard

    step, state, batch = mlp.make(batch=options.microbatches * options.inside, width=16, layers=options.stages, features=16)
    sharded = soap_shard(
        step, devices=jax.devices()[:devices], pipeline=options.schedule, stages=options.stages, microbatches=options.microbatches
    )
    for _ in range(3):
        state, metrics = sharded(state, batch)
    dispatch_s, step_s = [], []
    for _ in range(options.repeats):
        jax.block_until_ready(state)
        start = time.perf_counter()
        state, metrics = sharded(state, batch)
        dispatch_s.append(time.perf_counter() - start)
        jax.block_until_ready((state, metrics))
        step_s.append(time.perf_counter() - start)
    (state, metrics), events = sharded.traced(state, batch)
    print(f"{options.schedule}, {options.stages} stages of {options.inside}, {options.microbatches} micro-batches:", end=" ")
    print(
        f"{len(events)} dispatches, {1e3 * statistics.median(dispatch_s):.2f} ms of host time (median of {options.repeats},",
        end=" ",
    )
    print(f"best {1e3 * min(dispatch_s):.2f}), step {1e3 * statistics.median(step_s):.2f} ms")


if __name__ == "__main__":
    main()
