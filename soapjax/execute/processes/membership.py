"""This process as one of a job: the watch's channel from the start on, and its own ending, which the others get to know.

However a process ends, JAX's own ending would wait minutes for ranks that wait for this one, and abort:

    an exception      is printed; the others are told, and it ends with status 1. Where it comes from JAX it may be the echo of
                      another rank's death: then the watch has its time to find that out first.
    well, sys.exit    it waits until all ranks are at their end, while the watch goes on.
    leave(status)     at once.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import jax

from soapjax.execute.processes.agreement import LEAVE_S, gathered, leave_store
from soapjax.execute.processes.calls import HERE
from soapjax.execute.processes.channel import OWN_REASON_S, Channel, end
from soapjax.execute.processes.coordination import is_joined, store
from soapjax.execute.processes.start_up import Peer, listen
from soapjax.execute.processes.watch import BEAT_S, Watch

TELL_S = 1.0
_started: list[Channel] = []  # the one of this process, once it is a member


def start(rank: int, peers: Sequence[Peer], listener: socket.socket, key: bytes, silence_s: float) -> None:
    """Watches the others from now on, in a thread of its own, until this process ends."""
    channel = Channel(Watch(rank, peers, silence_s, HERE), listener, key, end)
    _started.append(channel)
    channel.start()
    own = os.getpid()

    def end_well() -> None:  # before JAX's own ending
        if os.getpid() == own:  # not a child that was forked
            HERE.end(0)
            channel.tell(TELL_S)
            channel.wait_until_all_end()
            channel.close_within(silence_s)

    atexit.register(end_well)
    before = sys.excepthook

    def end_badly(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        before(kind, error, trace)
        if os.getpid() != own:
            return
        sys.stderr.flush()
        if issubclass(kind, jax.errors.JaxRuntimeError):
            _let_the_watch_decide(channel)
        text = str(error).split("\n")[0]
        leave(130 if issubclass(kind, KeyboardInterrupt) else 1, f"{kind.__name__}: {text[:150]}" if text else kind.__name__)

    sys.excepthook = end_badly


def _let_the_watch_decide(channel: Channel) -> None:
    """The watch ends this process where another rank is the cause: soon where all beat, or when the time-out of one is over."""
    deadline = time.monotonic() + max(channel.watch.timeout_s, OWN_REASON_S) + 5 * BEAT_S
    time.sleep(OWN_REASON_S)
    while (channel.is_stopping or not channel.watch.all_are_fresh) and time.monotonic() < deadline:
        time.sleep(BEAT_S / 4)


def start_by_store(silence_s: float, timeout_s: float) -> None:
    """As `start`, where the job was started by `jax.distributed` alone: the ranks find each other in its store."""
    if _started or not is_joined() or store().num_ranks == 1:
        return
    mine = store()
    listener = listen(0)
    record = {
        "address": own_address(mine.coordinator_address), "port": listener.getsockname()[1], "host": socket.gethostname(),
        "pid": os.getpid(), "key": secrets.token_hex(16) if mine.rank == 0 else "",
    }  # fmt: skip
    mine.put(f"soapjax/agree/watch/{mine.rank}", json.dumps(record).encode())
    found = gathered(mine, "watch", timeout_s)
    records = [json.loads(found[str(r)]) for r in range(mine.num_ranks)]
    peers = [Peer(r["address"], r["port"], r["host"], r["pid"]) for r in records]
    start(mine.rank, peers, listener, records[0]["key"].encode(), silence_s)


def own_address(towards: str) -> str:
    """Which of this host's addresses a process at `towards` ("host:port") sees. Nothing is sent.

    Raises: OSError where the name is not known or there is no way to it.
    """
    host, _, port = towards.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def leave(status: int, why: str = "") -> NoReturn:
    """Ends this process with `status` at once, and lets the others know.

    Rank 0 stays a moment longer than the others, since JAX aborts those whose service has gone.
    """
    if not _started:
        leave_store(store() if is_joined() else None, status)
    channel = _started[0]
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    HERE.end(status, why)
    channel.tell(TELL_S)
    if channel.watch.rank == 0:
        channel.wait_until_alone(LEAVE_S)
    os._exit(status)
