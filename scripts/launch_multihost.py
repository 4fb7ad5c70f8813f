"""Trains a model over several processes with `soap_shard`: process 0 plans, all check that they run the same program.

On one machine, four processes of one CPU device each:

    python scripts/launch_multihost.py --processes 4 models.mlp --steps 5

As a job of a cluster, one process per host or per device; who takes part is found by itself:

    srun --ntasks 16 python scripts/launch_multihost.py models.transformer_lm --set width=1024 --steps 20
    mpirun -n 16 python scripts/launch_multihost.py models.transformer_lm --planner fsdp
    python scripts/emulated_cluster.py --hosts 2 --rate 200mbit -- python scripts/launch_multihost.py models.mlp

Exit status 2 on every process, without a traceback, where they do not agree, or one does not come, dies, stops or does something
else: within --timeout seconds, with a line that names it. --processes draws the job's key (SOAPJAX_JOB_KEY) and ends those that
do not end by themselves; as a job of a cluster, set the variable for all.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax

import soapjax
import soapjax.distributed
from soapjax.errors import Problem, SoapjaxError
from soapjax.steps.sourced_models import concrete_model, parse_settings
from soapjax.strategy.plan import ModelSource

TERM_S = 5.0
GRACE_S = 6.0  # after one has failed, for the others to say why and end


def parse(argv: list[str] | None) -> argparse.Namespace:
    # Names in full: --processes is taken out of what each process is given.
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("model", help="package.module (its make) or package.module:factory")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the model")
    parser.add_argument("--processes", type=int, default=None, help="start so many on this machine; by default, be one of a job")
    parser.add_argument("--plan", default=None, help="a plan file that every process reads, instead of a search by process 0")
    parser.add_argument("--topology", default="local")
    parser.add_argument("--planner", default="mcmc")
    parser.add_argument("--pipeline", default=None, help="gpipe, 1f1b, ...: stages on the processes' devices instead of a plan")
    parser.add_argument("--microbatches", type=int, default=None)
    parser.add_argument("--stages", type=int, default=None)
    parser.add_argument("--proposals", type=int, default=2048, help="of the search")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--timeout", type=float, default=60.0,
        help="seconds after which the job ends where a process does not come, is silent, or is in no call while others are",
    )  # fmt: skip
    return parser.parse_args(argv)


def launch(count: int, arguments: list[str]) -> int:
    """Runs this script `count` times on this machine, with one CPU device each; the first bad exit status, or 0."""
    if count < 1:
        raise SoapjaxError(Problem("--processes", str(count), "1 or more", "write e.g. --processes 2"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
    common = os.environ | {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count), "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": " ".join(flags),
        soapjax.distributed.KEY_VARIABLE: os.environ.get(soapjax.distributed.KEY_VARIABLE, secrets.token_hex(16)),
    }  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`
    processes: list[subprocess.Popen] = []
    try:
        for rank in range(count):
            environment = common | {"JAX_PROCESS_ID": str(rank)}
            processes.append(subprocess.Popen([sys.executable, __file__, *arguments], env=environment))
        _wait(processes)
    finally:
        _end([p for p in processes if p.poll() is None])
    statuses = [p.wait() for p in processes]
    return next((128 - s if s < 0 else s for s in statuses if s), 0)


def _wait(processes: list[subprocess.Popen]) -> None:
    """Until all have ended, or some time after one has failed: one that is stopped never ends by itself."""
    failed_at = None
    while any(p.poll() is None for p in processes):
        if failed_at is None and any(p.poll() for p in processes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + GRACE_S:
            late = ", ".join(str(r) for r, p in enumerate(processes) if p.poll() is None)
            print(f"ending rank {late}: another failed {GRACE_S:g} s ago", file=sys.stderr, flush=True)
            return
        time.sleep(0.05)


def _end(processes: list[subprocess.Popen]) -> None:
    for p in processes:
        p.terminate()
        p.send_signal(signal.SIGCONT)  # one that is stopped would not notice
    deadline = time.monotonic() + TERM_S
    for p in processes:
        try:
            p.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            p.kill()


def train(options: argparse.Namespace) -> None:
    """What every process does: the same calls, with the same global arguments."""
    soapjax.distributed.initialize(timeout_s=options.timeout, silence_s=options.timeout)
    source = ModelSource(path=options.model, settings=parse_settings(options.set))
    model = concrete_model(source)
    chosen = dict(plan=options.plan) if options.plan else dict(planner=options.planner, proposals=options.proposals)
    if options.pipeline:
        chosen = dict(pipeline=options.pipeline, microbatches=options.microbatches, stages=options.stages, devices=jax.devices())
    step = soapjax.soap_shard(model.step, topology=options.topology, **chosen)
    state, *rest = model.arguments
    for i in range(options.steps):
        start = time.perf_counter()
        state, metrics = step(state, *rest)
        loss = float(metrics["loss"])  # the same on all processes
        if jax.process_index() == 0:
            what = "plan, compile and run" if i == 0 else "run"
            print(f"step {i + 1}: loss {loss:.6g}, {time.perf_counter() - start:.3g} s ({what})", flush=True)
    if jax.process_index() == 0:
        made = f"{len(step.pipeline.stages)} stages" if step.pipeline else f"plan {step.plan.plan_sha256[:12]}"
        print(f"{jax.process_count()} processes, {jax.device_count()} devices, {made}", flush=True)


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    options = parse(arguments)
    try:
        if options.processes is not None:
            k = arguments.index("--processes") if "--processes" in arguments else -1
            rest = arguments[:k] + arguments[k + 2 :] if k >= 0 else [a for a in arguments if not a.startswith("--processes=")]
            return launch(options.processes, rest)
        train(options)
    except SoapjaxError as e:
        soapjax.distributed.fail(e)
    return 0


if __name__ == "__main__":
    sys.exit(main())
