"""Ranks that tell each other, and notice a death: threads and sockets of this process. A rank dies where its sockets are closed."""

import socket
import threading
import time

import pytest

from soapjax.execute.processes.calls import Calls
from soapjax.execute.processes.channel import Channel, neighbours
from soapjax.execute.processes.keyed import MAX_STRANGER_BYTES, Session, StrangerError
from soapjax.execute.processes.relay import Relay
from soapjax.execute.processes.start_up import Peer
from soapjax.execute.processes.watch import Watch

KEY = b"the key of the job"


class Ranks:
    def __init__(self, count, timeout_s=5.0):
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        peers = [Peer("127.0.0.1", s.getsockname()[1], f"node{r}", r) for r, s in enumerate(listeners)]
        self.ended = {}  # rank -> when
        self.calls = [Calls() for _ in peers]
        self.channels = []
        for r, listener in enumerate(listeners):
            channel = Channel(Watch(r, peers, timeout_s, self.calls[r]), listener, KEY, lambda r=r: self.end(r))
            self.channels.append(channel)
        for c in self.channels:
            c.start()
        self.peers = peers

    def end(self, rank):
        self.ended[rank] = time.monotonic()
        self.die(rank)

    def die(self, rank):
        """As the operating system does it for a process."""
        channel = self.channels[rank]
        channel.is_over = True
        if threading.current_thread() is not channel._thread:
            channel._thread.join(5)  # a dead process does not go on: its thread would find its own sockets closed
        for s in [channel._listener, *(link.socket for link in channel._links.values())]:
            s.close()

    def wait_until(self, is_so, seconds=10.0):
        deadline = time.monotonic() + seconds
        while not is_so() and time.monotonic() < deadline:
            time.sleep(0.01)
        return is_so()

    def all_know(self):
        return all(len(c.watch._rows) == len(self.peers) for c in self.channels)


@pytest.fixture
def ranks(request):
    made = Ranks(request.param)
    yield made
    for r in range(len(made.peers)):
        made.die(r)


@pytest.mark.parametrize("count", [2, 3, 4, 7, 64, 1000])
def test_everybody_is_a_few_neighbours_away(count):
    reached, hops = {0}, 0
    while len(reached) < count:
        reached |= {n for r in reached for n in neighbours(r, count)}
        hops += 1
    assert hops <= count.bit_length() and all(len(neighbours(r, count)) <= 2 * count.bit_length() for r in (0, count // 2))
    assert all(r in neighbours(n, count) and n != r for r in range(min(count, 70)) for n in neighbours(r, count))


@pytest.mark.parametrize("ranks", [5], indirect=True)
def test_a_death_ends_all_within_seconds_and_a_beat_reaches_all(ranks, capfd):
    with ranks.calls[3].call("train_step"):
        pass
    assert ranks.wait_until(ranks.all_know)
    assert ranks.wait_until(lambda: all(c.watch._where(3).name == "train_step" for c in ranks.channels))
    begin = time.monotonic()
    ranks.die(3)
    assert ranks.wait_until(lambda: len(ranks.ended) == 4), ranks.ended
    assert max(ranks.ended.values()) - begin < 7  # rank 0 stays 5 s for others where their sockets stay open
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 4 and len(set(s.partition("last seen")[0] for s in said)) == 1
    assert "rank 3 (node3, process 3) has died" in said[0] and "after call 1 of train_step" in said[0]


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_strangers_change_nothing(ranks, capfd):
    assert ranks.wait_until(ranks.all_know)
    port = ranks.peers[0].port
    stopped = b'{"stopped": [["the job", "a lie", "x", "y"]]}\n'
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"soapjax " + b"1" * 32 + b"\n" + b"0" * 64 + b" " + stopped, b"x" * 10**6, b""):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            try:
                stranger.sendall(said)
            except ConnectionError:
                pass
    assert ranks.wait_until(lambda: ranks.channels[0].num_dropped == 4), ranks.channels[0].num_dropped
    time.sleep(0.6)
    assert not ranks.ended and "error" not in capfd.readouterr().err


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_connection_that_breaks_is_made_again(ranks):
    assert ranks.wait_until(ranks.all_know)
    old = ranks.channels[0]._links[1]
    old.socket.shutdown(socket.SHUT_RDWR)
    assert ranks.wait_until(lambda: ranks.channels[0]._links.get(1) not in (None, old))
    before = ranks.channels[0].watch._rows[1][0]
    assert ranks.wait_until(lambda: ranks.channels[0].watch._rows[1][0] > before + 2) and not ranks.ended


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_all_end_well_together(ranks):
    assert ranks.wait_until(ranks.all_know)
    for r in (0, 1):
        ranks.calls[r].end(0)
        ranks.channels[r].tell(1.0)
    time.sleep(0.3)
    assert not any(c.all_ended.is_set() for c in ranks.channels)
    ranks.calls[2].end(0)
    ranks.channels[2].tell(1.0)
    assert ranks.wait_until(lambda: all(c.all_ended.is_set() for c in ranks.channels)) and not ranks.ended


def sessions(key=KEY, other=KEY):
    caller, called = Session(key, is_caller=True), Session(other, is_caller=False)
    assert called.receive(caller.hello) == [] == caller.receive(called.hello)
    return caller, called


def test_what_is_sealed_is_opened():
    caller, called = sessions()
    lines = b"".join(caller.seal({"n": n}) for n in range(3))
    assert called.receive(lines[:50]) + called.receive(lines[50:]) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert caller.receive(called.seal({"ü": [1]})) == [{"ü": [1]}]


def test_what_is_not_sealed_with_this_key_for_this_connection_is_not():
    caller, called = sessions()
    line = caller.seal({"n": 1})
    for wrong in (line.replace(b"1}", b"2}"), b"0" * 64 + b" {}\n", b"{}\n", b"\n", b"\xff\xfe\n"):
        with pytest.raises(StrangerError):
            sessions()[1].receive(wrong)
    with pytest.raises(StrangerError):  # heard on another connection
        sessions()[1].receive(line)
    assert called.receive(line) == [{"n": 1}]
    with pytest.raises(StrangerError):  # said again
        called.receive(line)
    with pytest.raises(StrangerError):  # sent back to who said it
        caller.receive(line)
    with pytest.raises(StrangerError):
        called = sessions(other=b"another key")[1]
        called.receive(line)
    with pytest.raises(StrangerError):
        Session(KEY, is_caller=False).receive(b"x" * (MAX_STRANGER_BYTES + 1))


def test_the_relay_passes_on_and_stays_open_where_the_service_goes():
    with socket.create_server(("127.0.0.1", 0)) as service:
        relay = Relay(*service.getsockname()[:2])
        host, _, port = relay.address.rpartition(":")
        client = socket.create_connection((host, int(port)), timeout=5)
        there = service.accept()[0]
        client.sendall(b"a" * 10**6)
        received = b""
        while len(received) < 10**6:
            received += there.recv(2**20)
        there.sendall(b"answer")
        assert received == b"a" * 10**6 and client.recv(100) == b"answer"
        there.close()
    client.settimeout(0.5)
    with pytest.raises(TimeoutError):  # no end of the connection
        client.recv(100)
    with socket.create_connection((host, int(port)), timeout=5) as again:
        again.settimeout(0.5)
        with pytest.raises(TimeoutError):
            again.recv(100)
    client.close()
