"""Several processes, one job: start-up and ending. `soap_shard` does the rest by itself.

>>> import soapjax.distributed
>>> soapjax.distributed.initialize()  # doctest: +SKIP

That comes first of all; under Slurm, Open MPI or Kubernetes nothing more is needed. Then every process calls the same step with
the same global arguments. Process 0 plans, the others take its plan, and all check that they are about to run the same program
(soapjax/execute/processes/agreement.py). Where one dies, stops or does something else, all end within `silence_s` and say which
it was (soapjax/execute/processes/watch.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

import jax

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.processes import membership
from soapjax.execute.processes.calls import HERE
from soapjax.execute.processes.channel import ends_within
from soapjax.execute.processes.coordination import ANSWER_S, Job, connect, is_joined, job_of_environment, store
from soapjax.execute.processes.keyed import KEY_VARIABLE
from soapjax.execute.processes.keyed import job_key as _job_key
from soapjax.execute.processes.start_up import OVER_S, listen, roll_call

log = logging.getLogger("soapjax")
DEFAULT_TIMEOUT_S = 300.0
DEFAULT_SILENCE_S = 60.0


def initialize(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None, *,
    local_device_ids: Sequence[int] | None = None, timeout_s: float = DEFAULT_TIMEOUT_S, silence_s: float = DEFAULT_SILENCE_S,
    job_key: str | None = None,
) -> None:  # fmt: skip
    """Joins this process to its job, before JAX is used for anything else.

    Args:
      coordinator_address: "host:port" of process 0, the same on all. What is left out is read from JAX_COORDINATOR_ADDRESS,
        JAX_NUM_PROCESSES and JAX_PROCESS_ID, else found by JAX (Slurm, Open MPI, Kubernetes, Cloud TPU).
      num_processes, process_id: how many there are, and which one this is.
      local_device_ids: accelerators of the host that this process uses; all by default, or as the job's launcher says.
      timeout_s: to wait for the other processes here.
      silence_s: where a process gives no sign of life for so long, or is in no call of a step while others are in the next one,
        all end, and name it (execute/processes/watch.py). A process that dies is named within seconds; one that compiles gives
        signs of life.
      job_key: a secret of 16 characters or more, the same on all processes, drawn for this job; by default SOAPJAX_JOB_KEY. What
        comes to the job's ports without it is dropped. Without a secret one is made of the address: it keeps accidents away.
    Raises: SoapjaxError where it cannot be told who takes part, and on every process where some did not come: it names them.
    """
    _check_times(timeout_s=timeout_s, silence_s=silence_s)
    if is_joined():
        raise SoapjaxError(Problem("soapjax.distributed.initialize", "a second call", "one call", "remove one of them"))
    local = None if local_device_ids is None else tuple(local_device_ids)
    job = job_of_environment(Job(coordinator_address, num_processes, process_id, local), timeout_s=timeout_s)
    _check(job)
    key, is_secret = _job_key(job_key, job.coordinator_address)
    HERE.count_from(-1)  # two calls of all ranks, before the first of the program
    with ends_within(timeout_s + OVER_S, lambda: _stays_behind(job, timeout_s)), contextlib.ExitStack() as until_watched:
        listener = until_watched.enter_context(listen(0))
        port = listener.getsockname()[1]
        came = roll_call(job.coordinator_address, job.num_processes, job.process_id, key=key, timeout_s=timeout_s, port=port)
        if job.num_processes > 1:
            if job.process_id == 0:
                _say_at_the_start(job, silence_s, is_secret=is_secret, num_dropped=came.num_dropped)
            membership.start(job.process_id, came.peers, listener, key, silence_s)
            until_watched.pop_all()
    _open_transfers(job, timeout_s)
    _spare_threads(job)
    # Accelerators may take minutes to start, without processor time.
    on_cpu = jax.config.jax_platforms == "cpu"  # type: ignore[attr-defined]  # options are made at run time
    with HERE.call("the connection to rank 0"):
        HERE.run(on_cpu=on_cpu)
        _connect(job, silence_s)
    _warn_of_loopback(job)
    store().answer_s = min(ANSWER_S, silence_s)
    with HERE.call("the exchange of devices"):  # JAX, at its first use, would wait minutes for a process that has ended meanwhile
        HERE.run(on_cpu=on_cpu)
        jax.devices()


def watch(*, silence_s: float = DEFAULT_SILENCE_S, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Watches the other processes of a job that `jax.distributed.initialize` has started; all call it, right after that.

    `initialize` of this module does it by itself, and the first call of a step over several processes does, with these defaults.

    Args:
      silence_s: as for `initialize`.
      timeout_s: to wait for the other processes here.
    Raises: SoapjaxError on every process where one does not come, naming it.
    """
    _check_times(timeout_s=timeout_s, silence_s=silence_s)
    membership.start_by_store(silence_s, timeout_s)


@contextlib.contextmanager
def busy(what: str, *, at_most_s: float) -> Iterator[None]:
    """Around what one process does alone for longer than `silence_s`, while others may wait in their next call.

    >>> with soapjax.distributed.busy("saving a checkpoint", at_most_s=1800):
    ...     np.savez("checkpoint.npz", *jax.tree.leaves(state))
    """
    _check_times(at_most_s=at_most_s)
    with HERE.busy(what, at_most_s):
        yield


def _check_times(**times: float) -> None:
    if wrong := [(name, value) for name, value in times.items() if not 0 < value < float("inf")]:
        raise SoapjaxError([Problem(n, str(v), "a positive number of seconds", "leave it out") for n, v in wrong])


def _say_at_the_start(job: Job, silence_s: float, *, is_secret: bool, num_dropped: int) -> None:
    key = "" if is_secret else f" No job key was given ({KEY_VARIABLE}): programs that know soapjax could disturb its ports."
    dropped = f" {num_dropped} messages that did not carry the job's key were dropped." if num_dropped else ""
    print(
        f"soapjax: {job.num_processes} processes; the job ends when one dies, is silent for {silence_s:g} s, or is that long in no "
        f"call while others are (silence_s).{key}{dropped}", file=sys.stderr, flush=True,
    )  # fmt: skip


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


def _connect(job: Job, silence_s: float) -> None:
    """All ranks have come, and the watch sees to it that they stay: JAX, which aborts without a name, has more time than it."""
    enough_s = int(3 * silence_s) + 100
    try:
        connect(
            job.coordinator_address, job.num_processes, job.process_id, job.local_device_ids,
            initialization_timeout=enough_s, heartbeat_timeout_seconds=enough_s,
        )  # fmt: skip
    except RuntimeError as e:
        place, value = "jax.distributed.initialize", str(e).split("\n")[0]
        remedy = "call soapjax.distributed.initialize() before anything else of JAX"
        raise SoapjaxError(Problem(place, value, "a JAX that is not in use yet", remedy)) from None


def _stays_behind(job: Job, timeout_s: float) -> Problem:
    value = f"rank {job.process_id}, this process, {HERE.where()} after {timeout_s:g} s"
    return Problem("the start", value, f"all {job.num_processes} ranks in the job", "see what holds it up, and start all again")


def _open_transfers(job: Job, timeout_s: float) -> None:
    """Lets pipelines and pinned plans send arrays to other processes: JAX wants an address of this host, and a port.

    Where the user has set `jax_cross_host_transfer_socket_address` it stays. Backends that send by themselves do not use it.
    """
    if jax.config.values["jax_cross_host_transfer_socket_address"] or job.num_processes == 1:
        return
    try:
        own = membership.own_address(job.coordinator_address)
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
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
    if job.num_processes > 1 and jax.config.jax_platforms == "cpu":  # type: ignore[attr-defined]  # options are made at run time
        flag = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
        count = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]  # options are made at run time
        devices = int(flag[1]) if flag else max(1, count)
        os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 2 * devices + 2)))


def _warn_of_loopback(job: Job) -> None:
    """Gloo, JAX's collectives on CPUs, listens where the host's own name points: that must not be the loopback."""
    if jax.config.jax_platforms != "cpu" or job.num_processes == 1:  # type: ignore[attr-defined]  # options are made at run time
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
    membership.leave(2, str(error.problems[0])[:150])


def leave(status: int) -> NoReturn:
    """Ends this process with `status` at once, after an error say, and lets the others know (execute/processes/membership.py)."""
    membership.leave(status)
