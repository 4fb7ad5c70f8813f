"""Who is there? Asked on the coordinator's port before JAX's own service uses it.

JAX ends every process by SIGABRT, without a name, when one of them does not come. So rank 0 listens first, the others
report, and rank 0 answers all of them: everybody is here, or who is not. Then the port is JAX's.

One line of JSON each way: {"rank": 1, "num_ranks": 4} and {"problems": []}.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time

from soapjax.errors import Problem, SoapjaxError

MAX_LINE_BYTES = 2**16
RETRY_S = 0.1
ANSWER_S = 15.0  # that rank 0's answer may be late


def roll_call(address: str, num_ranks: int, rank: int, *, timeout_s: float) -> None:
    """Returns when all ranks have reported within `timeout_s`.

    Raises: SoapjaxError, on every rank that came, naming those that did not, or that came twice or count otherwise.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise SoapjaxError(Problem("coordinator_address", repr(address), "host:port", 'write for instance "10.0.0.1:1234"'))
    host = host.strip("[]")
    if rank == 0:
        _ask(int(port), num_ranks, timeout_s)
    else:
        _report(host, int(port), num_ranks, rank, timeout_s)


def _ask(port: int, num_ranks: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    came: dict[int, socket.socket] = {}
    problems: list[Problem] = []
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listener(port))
        while len(came) < num_ranks - 1 and not problems and (left_s := deadline - time.monotonic()) > 0:
            listener.settimeout(left_s)
            try:
                connection = stack.enter_context(listener.accept()[0])
            except TimeoutError:
                break
            said = _line(connection, min(5.0, left_s))
            rank, count = said.get("rank"), said.get("num_ranks")
            if not isinstance(rank, int) or not isinstance(count, int):
                continue  # not one of ours
            if count != num_ranks:
                value = f"{count} on rank {rank}, {num_ranks} on rank 0"
                problems.append(Problem("num_processes", value, "one number", "start all processes with the same"))
            elif not 0 < rank < num_ranks or rank in came:
                value = "two processes" if rank in came or rank == 0 else "a process"
                remedy = "give every process its own process_id"
                problems.append(Problem(f"rank {rank}", value, f"one process for each of ranks 0 to {num_ranks - 1}", remedy))
            came.setdefault(rank, connection)
        missing = sorted(set(range(1, num_ranks)) - came.keys())
        if missing and not problems:
            problems.append(missing_ranks("the start", missing, num_ranks, timeout_s))
        answer = json.dumps({"problems": problems}).encode() + b"\n"
        for connection in came.values():
            with contextlib.suppress(OSError):
                connection.settimeout(5.0)
                connection.sendall(answer)
    if problems:
        raise SoapjaxError(problems)


def _listener(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as e:
        remedy = "end the process that has the port, or choose another"
        raise SoapjaxError(Problem(f"coordinator_address: port {port}", e.strerror or str(e), "a free port", remedy)) from None


def _report(host: str, port: int, num_ranks: int, rank: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    why = "no answer"
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left_s) as connection:
                connection.sendall(json.dumps({"rank": rank, "num_ranks": num_ranks}).encode() + b"\n")
                answer = _line(connection, timeout_s + ANSWER_S)
        except OSError as e:
            why = e.strerror or str(e)
            time.sleep(RETRY_S)
            continue
        if not isinstance(answer.get("problems"), list):
            why = "a connection that gave no answer"  # rank 0 ended, or another program listens there
            time.sleep(RETRY_S)
            continue
        if answer["problems"]:
            raise SoapjaxError(Problem(*map(str, p)) for p in answer["problems"])
        return
    value = f"rank 0 missing after {timeout_s:g} s ({why})"
    remedy = f"start rank 0, or correct coordinator_address; rank {rank} looked for it at {host}:{port}"
    raise SoapjaxError(Problem("the start", value, f"all {num_ranks} ranks", remedy))


def _line(connection: socket.socket, timeout_s: float) -> dict:
    """One line of JSON; {} for anything else."""
    data = b""
    deadline = time.monotonic() + timeout_s
    while not data.endswith(b"\n") and len(data) < MAX_LINE_BYTES and (left_s := deadline - time.monotonic()) > 0:
        connection.settimeout(left_s)
        try:
            part = connection.recv(4096)
        except OSError:
            break
        if not part:
            break
        data += part
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def missing_ranks(place: str, missing: list[int], num_ranks: int, timeout_s: float) -> Problem:
    """The problem that names ranks which never came."""
    names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    remedy = f"see what {names} printed; start all {num_ranks} processes, or wait longer (timeout_s)"
    return Problem(place, f"{names} missing after {timeout_s:g} s", f"all {num_ranks} ranks", remedy)
