"""Several processes, one job: start-up and ending. `soap_shard` does the rest by itself.

>>> import soapjax.distributed
>>> soapjax.distributed.initialize()  # first of all; under Slurm, Open MPI or Kubernetes nothing more is needed

Then every process calls the same step with the same global arguments. Process 0 plans, the others take its plan, and all
check that they are about to run the same program (soapjax/execute/agreement.py).
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

import jax

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute import agreement, watch
from soapjax.execute.coordination import Job, is_joined, job_of_environment, store
from soapjax.execute.roll_call import roll_call

log = logging.getLogger("soapjax")
DEFAULT_TIMEOUT_S = 300.0
DEFAULT_SILENCE_S = 60.0


def initialize(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None, *,
    local_device_ids: Sequence[int] | None = None, timeout_s: float = DEFAULT_TIMEOUT_S, silence_s: float = DEFAULT_SILENCE_S,
) -> None:  # fmt: skip
    """Joins this process to its job, before JAX is used for anything else.

    Args:
      coordinator_address: "host:port" of process 0, the same on all. What is left out is read from JAX_COORDINATOR_ADDRESS,
        JAX_NUM_PROCESSES and JAX_PROCESS_ID, else found by JAX (Slurm, Open MPI, Kubernetes, Cloud TPU).
      num_processes, process_id: how many there are, and which one this is.
      local_device_ids: accelerators of the host that this process uses; all by default, or as the job's launcher says.
      timeout_s: to wait for the other processes here.
      silence_s: a process that gives no sign of life for so long counts as dead: the others end, and name it (execute/watch.py).
    Raises: SoapjaxError where it cannot be told who takes part, and on every process where some did not come: it names them.
    """
    times = {"timeout_s": timeout_s, "silence_s": silence_s}
    if wrong := [(name, value) for name, value in times.items() if not value > 0]:
        raise SoapjaxError([Problem(n, str(v), "a positive number of seconds", "leave it out") for n, v in wrong])
    if is_joined():
        raise SoapjaxError(Problem("soapjax.distributed.initialize", "a second call", "one call", "remove one of them"))
    local = None if local_device_ids is None else tuple(local_device_ids)
    job = job_of_environment(Job(coordinator_address, num_processes, process_id, local), timeout_s=timeout_s)
    _check(job)
    roll_call(job.coordinator_address, job.num_processes, job.process_id, timeout_s=timeout_s)
    _open_transfers(job, timeout_s)
    _spare_threads(job)
    try:
        jax.distributed.initialize(
            job.coordinator_address, job.num_processes, job.process_id, job.local_device_ids,
            initialization_timeout=max(1, int(timeout_s)), cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=int(3 * silence_s) + 100,  # later than ours: JAX ends a process without a name
        )  # fmt: skip
    except RuntimeError as e:
        place, value = "jax.distributed.initialize", str(e).split("\n")[0]
        remedy = "call soapjax.distributed.initialize() before anything else of JAX"
        raise SoapjaxError(Problem(place, value, "a JAX that is not in use yet", remedy)) from None
    _warn_of_loopback(job)
    if job.num_processes > 1:
        watch.start(store(), silence_s)
    jax.devices()  # tells the others: at its first use JAX would wait minutes for a process that has ended meanwhile


def _check(job: Job) -> None:
    problems = []
    for name in ("coordinator_address", "num_processes", "process_id"):
        if getattr(job, name) is None:
            remedy = f"pass it, set JAX_{name.upper()}, or start with srun, mpirun, or a Kubernetes job"
            problems.append(Problem(name, "nothing", "a value on every process", remedy))
    if job.num_processes is not None and job.num_processes < 1:
        problems.append(Problem("num_processes", str(job.num_processes), "1 or more", "give the number of processes"))
    elif job.process_id is not None and not 0 <= job.process_id < (job.num_processes or 2**31):
        expected = f"0 to {job.num_processes - 1}" if job.num_processes else "0 or more"
        problems.append(Problem("process_id", str(job.process_id), expected, "number the processes from 0"))
    if problems:
        raise SoapjaxError(problems)


def _open_transfers(job: Job, timeout_s: float) -> None:
    """Lets pipelines and pinned plans send arrays to other processes: JAX wants an address of this host, and a port.

    Where the user has set `jax_cross_host_transfer_socket_address` it stays. Backends that send by themselves do not use it.
    """
    if jax.config.values["jax_cross_host_transfer_socket_address"] or job.num_processes == 1:
        return
    host, _, port = job.coordinator_address.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as towards:
            towards.connect(address)  # sends nothing; tells which of this host's addresses the others see
            own = towards.getsockname()[0]
        with socket.socket(family) as probe:
            probe.bind((own, 0))
            free = probe.getsockname()[1]
    except OSError as e:
        log.warning("soapjax: %s: pipelines over processes cannot send (%s)", job.coordinator_address, e.strerror or e)
        return
    own = f"[{own}]" if ":" in own else own
    jax.config.update("jax_cross_host_transfer_socket_address", f"{own}:{free}")
    jax.config.update("jax_cross_host_transport_addresses", f"{own}:0")
    jax.config.update("jax_cross_host_transfer_timeout_seconds", max(1, int(timeout_s)))


def _spare_threads(job: Job) -> None:
    """Makes JAX's pool of threads on CPUs larger than what collectives can hold.

    A collective between processes holds one thread per device until the others have come. The pool has as many as there are
    cores or devices: held by them all, nothing would send what the others wait for. NPROC, where it is set, stays.
    """
    if job.num_processes > 1 and jax.config.jax_platforms == "cpu":
        flag = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
        devices = int(flag[1]) if flag else max(1, jax.config.jax_num_cpu_devices)
        os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 2 * devices + 2)))


def _warn_of_loopback(job: Job) -> None:
    """Gloo, JAX's collectives on CPUs, listens where the host's own name points: that must not be the loopback."""
    if jax.config.jax_platforms != "cpu" or job.num_processes == 1:
        return
    try:
        own, coordinator = (socket.gethostbyname(h) for h in (socket.gethostname(), job.coordinator_address.rpartition(":")[0]))
    except OSError:
        return
    if own.startswith("127.") and not coordinator.startswith("127."):
        log.warning(
            "soapjax: this host's name %s resolves to %s; processes on other hosts cannot reach that. Correct /etc/hosts.",
            socket.gethostname(), own,
        )  # fmt: skip


def fail(error: SoapjaxError) -> NoReturn:
    """Prints every problem of `error`, and ends this process with status 2 as `leave` does."""
    for problem in error.problems:
        print(f"error: {problem}", file=sys.stderr)
    leave(2)


def leave(status: int) -> NoReturn:
    """Ends this process with `status` at once, after an error say, and lets the others know (agreement.py)."""
    agreement.leave(store() if is_joined() else None, status)
