"""One process of a job that `faults.py` disturbs: plans, compiles, trains, saves and trains again, and prints which it does.

    JAX_COORDINATOR_ADDRESS=... JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 python scripts/fault_worker.py FAULT [AT_STEP]

SIGUSR1 and SIGUSR2 make it raise, or exit with 0, wherever it is; SIGHUP makes it sleep for ever.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
PHASES = ("start", "planning", "compiling", "running", "saving")
NUM_STEPS = 24
STEP_S = 0.05  # between steps: a step itself takes some milliseconds
SAVE_S = 1.0


_asked: list[int] = []  # signals


def disturb() -> None:
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, lambda n, _: (_asked.append(n), follow()))


def follow() -> None:
    """Does what the signal asks. In a finalizer exceptions are lost, so it is called once per step as well."""
    if _asked and _asked[-1] == signal.SIGUSR1:
        raise ValueError("the data ended")
    if _asked and _asked[-1] == signal.SIGUSR2:
        sys.exit(0)
    if _asked:
        time.sleep(1e9)


def say(phase: str) -> None:
    print(f"phase {phase} {time.time():.3f}", flush=True)


def say_phases() -> None:
    """Prints what the first call does, from a thread."""
    from soapjax.execute.processes.calls import HERE

    phase = "start"
    while phase != "running":
        where = HERE.where()
        doing = where.doing
        new = "planning" if "plan" in doing else "compiling" if doing in ("lowering", "compiling") else phase
        new = "running" if doing.startswith("running") or (where.num_calls > 0 and not where.is_inside) else new
        if new != phase:
            say(phase := new)
        time.sleep(0.05)  # more often would look like work


def main(fault: str, at: int) -> None:
    import jax
    import numpy as np

    import soapjax
    import soapjax.distributed
    from models import mlp

    timeout_s = float(os.environ["FAULTS_TIMEOUT_S"])
    say("joining")
    soapjax.distributed.initialize(timeout_s=timeout_s, silence_s=timeout_s)
    if fault == "x64":
        jax.config.update("jax_enable_x64", True)
    threading.Thread(target=say_phases, daemon=True).start()
    train, state, batch = mlp.make(batch=4, width=16, layers=1, features=8, classes=4)

    def train_step(state, batch):
        return train(state, batch)

    def evaluate(state, batch):
        return train(state, batch)

    first, second = (soapjax.soap_shard(f, planner="fsdp") for f in (train_step, evaluate))
    for i in range(NUM_STEPS):
        follow()
        if fault == "a step fewer" and i == at:
            continue
        step = second if i % 8 == 7 else first
        if fault == "another order" and i in (at, at + 1):
            step = second if step is first else first
        elif fault == "another function" and i == at:
            step = second if step is first else first
        state, metrics = step(state, batch)
        float(metrics["loss"])
        time.sleep(STEP_S)
        if i == NUM_STEPS // 2:
            say("saving")
            until = time.monotonic() + SAVE_S
            with tempfile.TemporaryDirectory() as folder:
                while time.monotonic() < until:
                    parts = [np.asarray(s.data) for x in jax.tree.leaves(state) for s in x.addressable_shards]
                    np.savez(Path(folder) / "state.npz", *parts)
            say("running")
    print("finished", flush=True)


if __name__ == "__main__":
    disturb()
    say("start")
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
