"""Who is there, before JAX starts: ranks are threads here, the sockets are real."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import soapjax.distributed
from soapjax.errors import SoapjaxError
from soapjax.execute.roll_call import roll_call


def outcomes(port, calls, timeout_s=20.0):
    """Of `calls`, pairs of (number of ranks, rank) in order: None where the call returned, else its error."""

    def guarded(call):
        num_ranks, rank = call
        time.sleep(0.1 * calls.index(call))
        try:
            return roll_call(f"127.0.0.1:{port}", num_ranks, rank, timeout_s=timeout_s)
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


def test_strangers_are_not_counted(free_port):
    def disturb():
        for said in (b"GET / HTTP/1.1\r\n\r\n\n", b'{"rank": "x"}\n', b"[" * 10_000 + b"\n"):
            for _ in range(50):
                try:
                    with socket.create_connection(("127.0.0.1", free_port), timeout=1) as s:
                        s.sendall(said)
                    break
                except OSError:
                    time.sleep(0.02)

    stranger = threading.Thread(target=disturb)
    stranger.start()
    found = outcomes(free_port, [(2, 0), (3, 2), (2, 1)][::2])
    stranger.join()
    assert found == [None] * 2


def test_a_port_in_use(free_port):
    with socket.create_server(("", free_port)), pytest.raises(SoapjaxError, match=f"port {free_port}"):
        roll_call(f"127.0.0.1:{free_port}", 2, 0, timeout_s=1)


@pytest.mark.parametrize("address", ["", "localhost", "localhost:", ":1234", "host:port", "host:70000", "host:0"])
def test_an_address_that_is_none(address):
    with pytest.raises(SoapjaxError, match="coordinator_address"):
        roll_call(address, 2, 0, timeout_s=1)


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
