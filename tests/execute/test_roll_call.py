"""Who is there, before JAX starts: ranks are threads here, the sockets are real."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import soapjax.distributed
from soapjax.errors import SoapjaxError
from soapjax.execute.processes.keyed import Session
from soapjax.execute.processes.start_up import roll_call

KEY = b"the key of the job"


def outcomes(port, calls, timeout_s=20.0, keys={}):
    """Of `calls`, pairs of (number of ranks, rank) in order: None where the call returned, else its error."""

    def guarded(call):
        num_ranks, rank = call
        time.sleep(0.1 * calls.index(call))
        try:
            roll_call(f"127.0.0.1:{port}", num_ranks, rank, key=keys.get(rank, KEY), timeout_s=timeout_s)
            return None
        except SoapjaxError as e:
            return e

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(guarded, calls))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_all_are_here_in_any_order(free_port, order):
    assert outcomes(free_port, [(3, r) for r in order]) == [None] * 3


def test_the_port_is_free_afterwards(free_port):
    assert outcomes(free_port, [(2, 0), (2, 1)]) == [None] * 2
    assert outcomes(free_port, [(2, 0), (2, 1)]) == [None] * 2


def test_who_does_not_come_is_named_by_all_that_did(free_port):
    for error in outcomes(free_port, [(4, 0), (4, 3)], timeout_s=1.0):
        assert "ranks 1, 2 missing after 1 s" in str(error)


def test_the_first_rank_is_named_where_it_does_not_come(free_port):
    (error,) = outcomes(free_port, [(2, 1)], timeout_s=0.5)
    assert "rank 0 missing after 0.5 s" in str(error) and f"127.0.0.1:{free_port}" in str(error)


def test_two_processes_of_one_rank(free_port):
    first, *_ = outcomes(free_port, [(3, 0), (3, 1), (3, 1)], timeout_s=5.0)
    assert "rank 1: got two processes" in str(first)


def test_processes_that_count_otherwise(free_port):
    for error in outcomes(free_port, [(2, 0), (3, 1)]):
        assert "3 on rank 1, 2 on rank 0" in str(error)


STRANGERS = [
    b"GET / HTTP/1.1\r\n\r\n\n",
    b'{"rank": 1, "num_ranks": 2}\n',  # what a rank says, without a key
    b'{"rank": "x"}\n',
    b"[" * 10_000 + b"\n",
    b"soapjax " + b"0" * 32 + b"\n" + b"0" * 64 + b' {"rank": 1, "num_ranks": 2, "port": 1, "host": "h", "pid": 1}\n',
    b"",
]


def persistently_connected(port):
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except OSError:
            time.sleep(0.02)


def test_strangers_change_nothing_and_are_counted(free_port):
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(roll_call, f"127.0.0.1:{free_port}", 2, 0, key=KEY, timeout_s=20)
        for said in STRANGERS:
            with persistently_connected(free_port) as stranger:
                stranger.sendall(said)
        silent = persistently_connected(free_port)  # and stays
        begin = time.monotonic()
        second = roll_call(f"127.0.0.1:{free_port}", 2, 1, key=KEY, timeout_s=20, port=4711)
        silent.close()
    assert time.monotonic() - begin < 4
    assert first.result().num_dropped == len(STRANGERS)
    assert first.result().peers == second.peers and second.peers[1].port == 4711 and second.peers[1].pid == os.getpid()


def test_another_job_at_the_same_port(free_port):
    """Its rank 1 is told that this is not its job; this one waits for its own."""
    first, second = outcomes(free_port, [(2, 0), (2, 1)], timeout_s=1.0, keys={1: b"another key"})
    assert "rank 1 missing after 1 s" in str(first) and "dropped" in str(first) and "SOAPJAX_JOB_KEY" in str(first)
    assert "rank 0 missing" in str(second) and "SOAPJAX_JOB_KEY" in str(second)


def test_who_ends_while_it_waits_for_the_others_is_named_at_once(free_port):
    session = Session(KEY, is_caller=True)
    with ThreadPoolExecutor(1) as pool:
        begin = time.monotonic()
        first = pool.submit(outcomes, free_port, [(4, 0), (4, 1)])
        with persistently_connected(free_port) as leaving:
            leaving.sendall(session.hello)
            while not session.can_seal:
                session.receive(leaving.recv(100))
            leaving.sendall(session.seal({"rank": 2, "num_ranks": 4, "port": 1, "host": "node7", "pid": 42}))
            leaving.recv(1000)
            time.sleep(0.3)
        for error in first.result():
            assert "rank 2 (node7, process 42) has ended while it waited" in str(error)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("key", ["", "short"])
def test_a_key_that_is_none(monkeypatch, key):
    with pytest.raises(SoapjaxError, match="job_key"):
        soapjax.distributed.initialize("h:1", 2, 0, job_key=key)
    monkeypatch.setenv("SOAPJAX_JOB_KEY", key)
    with pytest.raises(SoapjaxError, match="SOAPJAX_JOB_KEY"):
        soapjax.distributed.initialize("h:1", 2, 0)


def test_a_port_in_use(free_port):
    with socket.create_server(("", free_port)), pytest.raises(SoapjaxError, match=f"port {free_port}"):
        roll_call(f"127.0.0.1:{free_port}", 2, 0, key=KEY, timeout_s=1)


@pytest.mark.parametrize("address", ["", "localhost", "localhost:", ":1234", "host:port", "host:70000", "host:0"])
def test_an_address_that_is_none(address):
    with pytest.raises(SoapjaxError, match="coordinator_address"):
        roll_call(address, 2, 0, key=KEY, timeout_s=1)


@pytest.mark.parametrize(
    "arguments, place",
    [
        ((None, None, None), "coordinator_address"),
        (("h:1", None, 0), "num_processes"),
        (("h:1", 2, None), "process_id"),
        (("h:1", 0, 0), "num_processes"),
        (("h:1", 2, 2), "process_id"),
        (("h:1", 2, -1), "process_id"),
    ],
)
def test_initialize_says_what_it_lacks(monkeypatch, arguments, place):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SoapjaxError) as e:
        soapjax.distributed.initialize(*arguments)
    assert place in [p.place for p in e.value.problems]


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_time_that_is_none(timeout_s):
    with pytest.raises(SoapjaxError, match="timeout_s"):
        soapjax.distributed.initialize("h:1", 2, 0, timeout_s=timeout_s)
