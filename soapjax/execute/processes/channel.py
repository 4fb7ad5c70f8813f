"""What the ranks of a job tell each other beside JAX's service: beats, over plain sockets between neighbours, in one thread.

Rank r is connected to r ± 1, 2, 4, 8, ... (round the ring), so that what one knows is everywhere after a few beats and no rank is
needed for it. The operating system closes the sockets of a process that dies: its neighbours look whether it still listens, and
name it within a second. Every line carries the job's key (keyed.py).

A rank that finds another stopped prints which, tells the neighbours, and ends with status 2; so do they.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from soapjax.errors import Problem
from soapjax.execute.processes.keyed import Session, StrangerError
from soapjax.execute.processes.watch import Watch

CONNECT_S = 0.5
MAX_TRIES = 3  # to reach a rank whose connection has ended before it has said a word
MAX_PENDING_BYTES = 2**22  # to a rank that does not read
MAX_STRANGERS = 256
SPEAK_S = 5.0  # within which a connection says who it is
OWN_REASON_S = 3.0  # what ended one rank with an error may be about to end this one too, which then says why
FAREWELL_S = 0.5  # for the last words to arrive
HOST_FAREWELL_S = 5.0  # on rank 0: JAX aborts the others when its service goes


def neighbours(rank: int, num_ranks: int) -> set[int]:
    steps = [2**k for k in range(num_ranks.bit_length()) if 2**k < num_ranks]
    return {(rank + s) % num_ranks for s in steps} | {(rank - s) % num_ranks for s in steps}


class PeerLink:
    """A connection to a rank; `rank` is None until it has said who it is."""

    def __init__(self, connection: socket.socket, key: bytes, rank: int | None):
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.rank, self.is_caller = connection, rank, rank is not None
        self.session = Session(key, is_caller=self.is_caller)
        self.pending = bytearray(self.session.hello)
        self.since_s = time.monotonic()

    def flush(self) -> None:
        with contextlib.suppress(OSError):  # one that has ended is noticed where it is read
            while self.pending:
                del self.pending[: self.socket.send(self.pending)]


class Channel:
    """The thread that beats, listens and judges.

    Args:
      listener: a socket that listens at this rank's port.
      end: called when something has stopped and all have been told; ends the process.
    """

    def __init__(self, watch: Watch, listener: socket.socket, key: bytes, end: Callable[[], None]):
        self.watch, self._listener, self._key, self._end = watch, listener, key, end
        self._neighbours = neighbours(watch.rank, len(watch.peers))
        self._links: dict[int, PeerLink] = {}
        self._strangers: list[PeerLink] = []
        self._tries: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._told, self.all_ended = threading.Event(), threading.Event()
        self.num_dropped = 0  # connections that did not carry the key
        self.is_stopping = self.is_over = False  # something has stopped: this process is being ended, or all is said
        self._has_news = False  # that cannot wait for the next beat
        self._close_by_s: float | None = None
        for s in (listener, self._woken):
            s.setblocking(False)
            self._selector.register(s, selectors.EVENT_READ)
        os.register_at_fork(after_in_child=self._close_all)  # a child would hold the connections of a dead parent open
        self._thread = threading.Thread(target=self._run, name="soapjax-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tell(self, timeout_s: float) -> None:
        """Beats now; returns when the neighbours' sockets have it, or after `timeout_s`."""
        self._told.clear()
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._told.wait(timeout_s)

    def wait_until_alone(self, timeout_s: float) -> None:
        """Returns when no neighbour is connected any more, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._links and time.monotonic() < deadline:
            time.sleep(0.02)

    def wait_until_all_end(self) -> None:
        while not self.all_ended.wait(1.0) and self._thread.is_alive():
            pass

    def close_within(self, timeout_s: float) -> None:
        """From now on this process is at its end, and is ended where that takes longer."""
        self._close_by_s = time.monotonic() + timeout_s

    def _run(self) -> None:
        for rank in self._neighbours:
            if rank > self.watch.rank:
                self._dial(rank)
        next_beat = time.monotonic()
        while not self.is_over:
            for ready, _ in self._selector.select(max(0.0, next_beat - time.monotonic())):
                if ready.fileobj is self._listener:
                    self._admit()
                elif ready.fileobj is self._woken:
                    self._woken.recv(64)
                    next_beat = 0.0
                elif ready.data is not None:
                    self._read(ready.data)
            is_due = time.monotonic() >= next_beat
            if is_due:
                next_beat = time.monotonic() + self.watch.beat_s
                self._beat()
            if is_due or self._has_news:
                self._has_news = False
                self._judge()

    def _judge(self) -> None:
        if self.watch.all_have_ended and not self.all_ended.is_set():
            self._say(self.watch.table())  # this rank may be the only one that tells a neighbour
            self.all_ended.set()
        if self.watch.calls.status:
            return  # it is about to end by itself
        if problems := self.watch.look():
            self._stop(problems)
        if self._close_by_s is not None and time.monotonic() > self._close_by_s:
            self._stop(self.watch.without_end())

    def _stop(self, problems: list[Problem]) -> None:
        self.is_stopping = True
        if not self.watch.has_left:
            say(problems)  # at once: JAX may be about to abort this process
        self._say({"stopped": [list(p) for p in problems]})
        if self.watch.has_left:
            time.sleep(OWN_REASON_S)
            if self.watch.calls.status:
                return  # it was, and is ending by itself
            say(problems)
        self._farewell()
        self.is_over = True
        self._end()

    def _farewell(self) -> None:
        """Closes this side, and reads on: a socket closed with unread data would lose what was said last."""
        for link in self._links.values():
            link.flush()
            with contextlib.suppress(OSError):
                link.socket.shutdown(socket.SHUT_WR)
        open_links = [link for rank, link in self._links.items() if self.watch.is_fresh(rank)]
        deadline = time.monotonic() + (HOST_FAREWELL_S if self.watch.rank == 0 else FAREWELL_S)
        while open_links and time.monotonic() < deadline:
            for link in list(open_links):
                with contextlib.suppress(BlockingIOError):
                    try:
                        if not link.socket.recv(2**16):
                            open_links.remove(link)
                    except ConnectionError:
                        open_links.remove(link)
            time.sleep(0.02)

    def _beat(self) -> None:
        for link in [v for v in self._strangers if time.monotonic() > v.since_s + SPEAK_S]:
            self._drop(link)
        for rank in self._neighbours - self._links.keys():
            if rank > self.watch.rank or self._tries.get(rank):
                self._dial(rank)
        self._say(self.watch.table())
        self._told.set()

    def _say(self, message: dict) -> None:
        for link in self._links.values():
            if link.session.can_seal and len(link.pending) < MAX_PENDING_BYTES:
                link.pending += link.session.seal(message)
            link.flush()

    def _dial(self, rank: int) -> None:
        """Connects to a neighbour, or finds that nobody is there any more."""
        if self.watch.has_ended(rank):
            return
        peer = self.watch.peers[rank]
        try:
            connection = socket.create_connection((peer.address, peer.port), timeout=CONNECT_S)
        except ConnectionError:
            self._died(rank)
            return
        except OSError:
            return  # its host or the network is gone, or slow: silence tells
        self._keep(PeerLink(connection, self._key, rank))

    def _keep(self, link: PeerLink) -> None:
        if link.rank is None:
            self._strangers.append(link)
            if len(self._strangers) > MAX_STRANGERS:
                self._drop(self._strangers[0])
        else:
            self._replace(link)
        self._selector.register(link.socket, selectors.EVENT_READ, link)
        link.flush()

    def _replace(self, link: PeerLink) -> None:
        """From now on this is the one connection to its rank."""
        if (old := self._links.pop(link.rank, None)) is not None:
            self._close(old)
        self._links[link.rank] = link

    def _admit(self) -> None:
        with contextlib.suppress(OSError):
            self._keep(PeerLink(self._listener.accept()[0], self._key, None))

    def _drop(self, link: PeerLink) -> None:
        self.num_dropped += 1
        self._strangers.remove(link)
        self._close(link)

    def _close(self, link: PeerLink) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.socket.close()

    def _read(self, link: PeerLink) -> None:
        if link not in self._strangers and self._links.get(link.rank) is not link:
            return  # closed meanwhile
        could_seal = link.session.can_seal
        try:
            data = link.socket.recv(2**20)
            messages = link.session.receive(data)
        except BlockingIOError:
            return
        except (StrangerError, OSError):
            data, messages = b"", []
        if link.session.can_seal and not could_seal and link.is_caller:
            link.pending += link.session.seal({"rank": self.watch.rank})
            link.pending += link.session.seal(self.watch.table())
            link.flush()
        for message in messages:
            self._tries.pop(link.rank, None)
            if link in self._strangers:
                self._strangers.remove(link)
                link.rank = message["rank"]
                self._replace(link)
                self._say(self.watch.table())
            self.watch.hear(message)
            self._has_news = self._has_news or "stopped" in message
        if not data:
            self._lost(link)

    def _lost(self, link: PeerLink) -> None:
        if link in self._strangers:
            self._drop(link)
            return
        self._close(link)
        if self._links.get(link.rank) is link:
            del self._links[link.rank]
            tries = self._tries[link.rank] = self._tries.get(link.rank, 0) + 1
            if tries > MAX_TRIES:
                self._died(link.rank)
            elif not self.watch.has_ended(link.rank) and not self.watch.look():
                time.sleep(0.01 * (tries - 1))
                self._dial(link.rank)

    def _died(self, rank: int) -> None:
        self.watch.died(rank)
        self._has_news = True

    def _close_all(self) -> None:
        for s in (self._listener, self._wake, self._woken, *(v.socket for v in (*self._links.values(), *self._strangers))):
            s.close()


def say(problems: list[Problem]) -> None:
    with contextlib.suppress(Exception):  # standard error may be gone
        # At once, and from a line's beginning: the program's own thread may be in the middle of a traceback.
        sys.stderr.write("\n" + "".join(f"error: {p}\n" for p in problems))
        sys.stderr.flush()


@contextlib.contextmanager
def ends_within(seconds: float, problem: Callable[[], Problem]) -> Iterator[None]:
    """Ends this process where what is inside takes longer: from a thread, whatever the main thread does."""

    def give_up() -> None:
        say([problem()])
        end()

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end() -> NoReturn:
    """Ends this process: its own ending would wait for the ranks that have stopped."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(2)
