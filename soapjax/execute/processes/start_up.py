"""Who is there? Asked on the coordinator's port before JAX's own service uses it.

JAX ends every process by SIGABRT, without a name, when one of them does not come. So rank 0 listens first, the others
report, and rank 0 answers all of them: everybody is here, and where to reach them (channel.py), or who is not. Then the port is
JAX's. What does not carry the job's key (keyed.py) is dropped and counted; it takes nobody's place and holds nobody up.

    rank 1: {"rank": 1, "num_ranks": 2, "port": 4711, "host": "b", "pid": 99}
    rank 0: {"host": "a", "pid": 88}, and when all have come {"problems": [], "peers": [["10.0.0.1", 4700, "a", 88], ...]}
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.processes.keyed import KEY_VARIABLE, Session, StrangerError

RETRY_S = 0.1
ANSWER_S = 5.0  # that rank 0's answer may be late
OVER_S = ANSWER_S + 2.0  # so long after its time-out it is over, one way or another
SPEAK_S = 5.0  # within which a connection says who it is
MAX_SILENT = 1024  # connections that have not said it yet
SEND_S = 5.0


class Peer(NamedTuple):
    """Where a rank of the job can be reached, and what it is."""

    address: str
    port: int
    host: str
    pid: int


class RollCall(NamedTuple):
    peers: list[Peer]  # by rank
    num_dropped: int  # messages that did not carry the key


def this_process(port: int = 0) -> Peer:
    return Peer("", port, socket.gethostname(), os.getpid())


def roll_call(address: str, num_ranks: int, rank: int, *, key: bytes, timeout_s: float, port: int = 0) -> RollCall:
    """Returns when all ranks have reported within `timeout_s`.

    Args:
      port: where this rank listens for the others later.
    Raises: SoapjaxError, on every rank that came, naming those that did not, or that came twice, count otherwise or have ended.
    """
    host, _, number = address.rpartition(":")
    if not host or not number.isascii() or not number.isdigit() or not 0 < int(number) < 2**16:
        raise SoapjaxError(Problem("coordinator_address", repr(address), "host:port", 'write for instance "10.0.0.1:1234"'))
    host = host.strip("[]")
    if rank == 0:
        with _Desk(int(number), num_ranks, key) as desk:
            return desk.asked(this_process(port)._replace(address=host), timeout_s)
    return _reported(host, int(number), this_process(port), num_ranks=num_ranks, rank=rank, key=key, timeout_s=timeout_s)


class _Visitor:
    """A connection to rank 0."""

    def __init__(self, connection: socket.socket, key: bytes):
        self.socket, self.session, self.since_s = connection, Session(key, is_caller=False), time.monotonic()
        self.rank: int | None = None

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # one that has ended is noticed where it is read
            self.socket.settimeout(SEND_S)
            self.socket.sendall(data)
            self.socket.setblocking(False)


class _Desk:
    """Rank 0's side."""

    def __init__(self, port: int, num_ranks: int, key: bytes):
        self._num_ranks, self._key, self.num_dropped = num_ranks, key, 0
        self._came: dict[int, tuple[_Visitor, Peer]] = {}
        self._visitors: list[_Visitor] = []
        self._problems: list[Problem] = []
        self._selector = selectors.DefaultSelector()
        self._listener = listen(port)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    def __enter__(self) -> _Desk:
        return self

    def __exit__(self, *_: Any) -> None:
        for visitor in self._visitors:
            visitor.socket.close()
        self._listener.close()
        self._selector.close()

    def asked(self, first: Peer, timeout_s: float) -> RollCall:
        deadline = time.monotonic() + timeout_s
        while len(self._came) < self._num_ranks - 1 and not self._problems and (left_s := deadline - time.monotonic()) > 0:
            for ready, _ in self._selector.select(min(left_s, 1.0)):
                if ready.data is None:
                    self._admit(first)
                elif ready.data in self._visitors:
                    self._hear(ready.data, first)
            for visitor in [v for v in self._visitors if v.rank is None and time.monotonic() > v.since_s + SPEAK_S]:
                self._drop(visitor)
        missing = sorted(set(range(1, self._num_ranks)) - self._came.keys())
        if missing and not self._problems:
            problem = missing_ranks("the start", missing, self._num_ranks, timeout_s)
            if self.num_dropped:
                value = f"{problem.value}, {self.num_dropped} messages dropped that did not carry the job's key"
                problem = problem._replace(value=value, remedy=f"{problem.remedy}; {KEY_VARIABLE} must be the same everywhere")
            self._problems.append(problem)
        peers = [first, *(peer for _, (_, peer) in sorted(self._came.items()))]
        for visitor in [v for v in self._visitors if v.rank is not None]:
            visitor.send(visitor.session.seal({"problems": self._problems, "peers": peers}))
        if self._problems:
            raise SoapjaxError(self._problems)
        return RollCall(peers, self.num_dropped)

    def _admit(self, first: Peer) -> None:
        with contextlib.suppress(OSError):
            visitor = _Visitor(self._listener.accept()[0], self._key)
            visitor.send(visitor.session.hello)
            self._visitors.append(visitor)
            self._selector.register(visitor.socket, selectors.EVENT_READ, visitor)
        silent = [v for v in self._visitors if v.rank is None]
        if len(silent) > MAX_SILENT:
            self._drop(silent[0])

    def _drop(self, visitor: _Visitor) -> None:
        self.num_dropped += 1
        self._close(visitor)

    def _close(self, visitor: _Visitor) -> None:
        self._selector.unregister(visitor.socket)
        visitor.socket.close()
        self._visitors.remove(visitor)

    def _hear(self, visitor: _Visitor, first: Peer) -> None:
        try:
            data = visitor.socket.recv(2**16)
            messages = visitor.session.receive(data)
        except BlockingIOError:
            return
        except OSError:
            data, messages = b"", []
        except StrangerError:
            self._drop(visitor)
            return
        for said in messages:
            self._enter(visitor, said, first)
        if not data:
            if visitor.rank is None:  # a knock and no word
                self._drop(visitor)
                return
            self._close(visitor)
            if self._came.get(visitor.rank, (None,))[0] is visitor:
                value = f"{named(visitor.rank, self._came.pop(visitor.rank)[1])} has ended while it waited for the others"
                remedy = f"see what rank {visitor.rank} printed, and start all processes again"
                self._problems.append(Problem("the start", value, f"all {self._num_ranks} ranks", remedy))

    def _enter(self, visitor: _Visitor, said: dict[str, Any], first: Peer) -> None:
        rank, count = said["rank"], said["num_ranks"]
        peer = Peer(visitor.socket.getpeername()[0], said["port"], said["host"], said["pid"])
        visitor.rank = rank
        if count != self._num_ranks:
            value = f"{count} on rank {rank}, {self._num_ranks} on rank 0"
            self._problems.append(Problem("num_processes", value, "one number", "start all processes with the same"))
        elif not 0 < rank < self._num_ranks or rank in self._came:
            twice = rank in self._came or rank == 0
            value = f"two processes, one on {peer.host} (process {peer.pid})" if twice else f"a process, on {peer.host}"
            remedy = "give every process its own process_id"
            self._problems.append(Problem(f"rank {rank}", value, f"one process for each of 0 to {self._num_ranks - 1}", remedy))
        self._came.setdefault(rank, (visitor, peer))
        visitor.send(visitor.session.seal({"host": first.host, "pid": first.pid}))


def listen(port: int) -> socket.socket:
    """On all addresses of this host.

    Raises: SoapjaxError where the port is in use.
    """
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as e:
        remedy = "end the process that has the port, or choose another"
        raise SoapjaxError(Problem(f"coordinator_address: port {port}", e.strerror or str(e), "a free port", remedy)) from None


def _reported(host: str, port: int, own: Peer, *, num_ranks: int, rank: int, key: bytes, timeout_s: float) -> RollCall:
    deadline = time.monotonic() + timeout_s
    why, first, hint = "no answer", None, ""
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left_s) as connection:
                session = Session(key, is_caller=True)
                connection.sendall(session.hello)
                greeting = _messages(connection, session, min(deadline, time.monotonic() + SPEAK_S))
                while not session.can_seal:
                    next(greeting)
                about = {"rank": rank, "num_ranks": num_ranks, "port": own.port, "host": own.host, "pid": own.pid}
                connection.sendall(session.seal(about))
                hint = f"; it has closed the connection: is {KEY_VARIABLE} the same on all ranks?"
                for said in _messages(connection, session, deadline + ANSWER_S):
                    if said and "problems" not in said:
                        first = Peer(host, port, said["host"], said["pid"])
                    elif said.get("problems"):
                        raise SoapjaxError(Problem(*map(str, p)) for p in said["problems"])
                    elif said:
                        return RollCall([Peer(*p) for p in said["peers"]], 0)
        except TimeoutError:
            why = "it does not answer" if first is None else "it has not said that all are here"
        except StrangerError as e:
            hint = f"; another program listens there, or another job: it said {e}"
        except ConnectionError as e:
            why = e.strerror or str(e) or why
        except OSError as e:
            why = e.strerror or str(e)
        if first is not None and time.monotonic() < deadline:
            value = f"{named(0, first)} has ended while rank {rank} waited for the others"
            remedy = "see what rank 0 printed, and start all processes again"
            raise SoapjaxError(Problem("the start", value, f"all {num_ranks} ranks", remedy))
        time.sleep(RETRY_S)
    value = f"rank 0 missing after {timeout_s:g} s ({why}{hint})"
    remedy = f"start rank 0, or correct coordinator_address; rank {rank} looked for it at {host}:{port}"
    raise SoapjaxError(Problem("the start", value, f"all {num_ranks} ranks", remedy))


def _messages(connection: socket.socket, session: Session, deadline: float) -> Iterator[dict[str, Any]]:
    """What the other side says, and {} after what was no message.

    Raises: TimeoutError; ConnectionError at the end of the connection; StrangerError.
    """
    while (left_s := deadline - time.monotonic()) > 0:
        connection.settimeout(left_s)
        data = connection.recv(2**16)
        if not data:
            raise ConnectionError
        yield from session.receive(data) or [{}]
    raise TimeoutError


def named(rank: int, peer: Peer) -> str:
    """As in "rank 1 (gpu-07, process 4242)"."""
    return f"rank {rank} ({peer.host}, process {peer.pid})"


def missing_ranks(place: str, missing: list[int], num_ranks: int, timeout_s: float) -> Problem:
    """The problem that names ranks which never came."""
    names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    remedy = f"see what {names} printed; start all {num_ranks} processes, or wait longer (timeout_s)"
    return Problem(place, f"{names} missing after {timeout_s:g} s", f"all {num_ranks} ranks", remedy)
