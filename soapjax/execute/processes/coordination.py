"""JAX's coordination service, as plain calls.

`jax.distributed` starts a service in process 0, with a key-value store that every process reads and writes. Its client
is not public, and nothing public does the same: `multihost_utils` needs device collectives, which is what must not run before
all processes agree, and which cannot say who is missing. Nor is there a public way to ask which processes a Slurm, Open MPI
or Kubernetes job has before they are connected, and JAX ends a process by SIGABRT when one does not come.
`tests/execute/test_agreement.py` fails, and says what is missing, when a new version of JAX has moved either.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.private_jax import clusters as _clusters
from soapjax.execute.private_jax import distributed as _distributed
from soapjax.execute.processes.relay import Relay

ANSWER_S = 60.0  # within which rank 0 answers; not more than `silence_s` of the job (soapjax.distributed)


class KeyValueStore:
    """The store of the job that this process belongs to: keys are paths, a key is written once.

    No call to it takes longer than `answer_s` seconds.
    """

    def __init__(self):
        state = _distributed.global_state
        if state.client is None:
            raise SoapjaxError(
                Problem(
                    "jax.distributed", "not initialized", "a connection between the processes",
                    "call soapjax.distributed.initialize() before anything else",
                )
            )  # fmt: skip
        self._client, self.answer_s = state.client, ANSWER_S
        self.rank: int = state.process_id
        self.num_ranks: int = state.num_processes
        self.coordinator_address: str = state.coordinator_address

    def put(self, key: str, data: bytes) -> None:
        self._ask(self._client.key_value_set_bytes, key, data, True)

    def items(self, folder: str) -> dict[str, bytes]:
        """The keys below `folder/`, without it, with their data."""
        found = self._ask(self._client.key_value_dir_get_bytes, folder + "/")
        return {k.removeprefix(folder + "/"): bytes(v) for k, v in found}

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Raises: SoapjaxError where the service does not answer; JAX's own calls would wait for a stopped rank 0 for ever."""
        outcome: list[Any] = []

        def ask() -> None:
            try:
                outcome.append((call(*arguments), None))
            except Exception as e:  # noqa: BLE001 - raised in the thread that asked
                outcome.append((None, e))

        asking = threading.Thread(target=ask, name="soapjax-store", daemon=True)
        asking.start()
        asking.join(self.answer_s)
        result, error = outcome[0] if outcome else (None, TimeoutError(f"no answer for {self.answer_s:g} s"))
        if error is None:
            return result
        if not isinstance(error, jax.errors.JaxRuntimeError | TimeoutError):
            raise error
        value, expected = str(error).split("\n")[0], f"an answer from rank 0, at {_distributed.global_state.coordinator_address}"
        remedy = "see what rank 0 printed: it has probably ended, or is stopped"
        raise SoapjaxError(Problem("the coordination service", value, expected, remedy))


@functools.cache
def store() -> KeyValueStore:
    """The store, once per process.

    Raises: SoapjaxError where no job was joined.
    """
    return KeyValueStore()


def connect(
    address: str, num_processes: int, process_id: int, local_device_ids: Any, *, initialization_timeout: int,
    heartbeat_timeout_seconds: int,
) -> None:  # fmt: skip
    """`jax.distributed.initialize`; on every rank but 0 through a relay (relay.py).

    Raises: RuntimeError as that does.
    """
    host, _, port = address.rpartition(":")
    near = address if process_id == 0 else Relay(host.strip("[]"), int(port)).address
    jax.distributed.initialize(
        near, num_processes, process_id, local_device_ids, cluster_detection_method="deactivate",
        initialization_timeout=initialization_timeout, heartbeat_timeout_seconds=heartbeat_timeout_seconds,
    )  # fmt: skip
    _distributed.global_state.coordinator_address = address


def is_joined() -> bool:
    """Whether this process belongs to a job of several."""
    return _distributed.global_state.client is not None


class Job(NamedTuple):
    """Who takes part; None where it cannot be told."""

    coordinator_address: str | None
    num_processes: int | None
    process_id: int | None
    local_device_ids: tuple[int, ...] | None


def job_of_environment(given: Job, *, timeout_s: float) -> Job:
    """`given`, completed from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, then from Slurm, Open MPI, ...

    Raises: SoapjaxError where a variable is no number.
    """
    address = given.coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    count = given.num_processes if given.num_processes is not None else _number("JAX_NUM_PROCESSES")
    rank = given.process_id if given.process_id is not None else _number("JAX_PROCESS_ID")
    local: Sequence[int] | None = given.local_device_ids
    if None in (address, count, rank):
        address, count, rank, local = _clusters.ClusterEnv.auto_detect_unset_distributed_params(
            address, count, rank, local, None, int(timeout_s)
        )
    return Job(address, count, rank, None if local is None else tuple(local))


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit():
        raise SoapjaxError(Problem(name, repr(text), "a number, 0 or more", "correct the environment variable"))
    return int(text)
