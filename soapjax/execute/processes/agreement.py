"""All processes of a job do the same, or all of them end and say why.

Every rank writes a record of what it is about to do (hashes of plan, graph, topology, versions, program) into the job's
key-value store, and reads those of the others: the barrier is that all records are there. What differs is named field by field
with the ranks; a rank whose record does not come in time is named too.

    agree(store, "train_step#1/plan", {"plan": "59c1...", "versions.jax": "0.10.2"}, timeout_s=300)

A rank that ends for a reason of its own says so by `leave` (membership.py), and nobody waits for it.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.processes.calls import HERE
from soapjax.execute.processes.coordination import KeyValueStore
from soapjax.execute.processes.start_up import missing_ranks

ROOT = "soapjax"
LEFT = f"{ROOT}/left"  # ranks that have ended, with their status
MAX_DIFFERENCES = 10
LEAVE_S = 5.0  # that rank 0, where the store lives, waits for the others
REMEDIES = {
    "plan": "give all processes one plan file, or none: then rank 0 plans",
    "graph": "run the same model, sizes and code on all ranks",
    "topology": "use one topology file",
    "devices": "start every process with the same kind and number of devices",
    "versions": "install the same versions on all hosts",
    "settings": "set the same on all ranks: environment variables (XLA_FLAGS, JAX_*) and jax.config",
    "program": "use the same code, versions, flags (XLA_FLAGS, JAX_*) and shapes of arguments on all ranks",
}


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def agree(
    store: KeyValueStore, name: str, fields: Mapping[str, str], *, timeout_s: float, details: Callable[[], Any] | None = None
) -> None:
    """A barrier of all ranks that checks that their `fields` are equal.

    Args:
      name: the same on all ranks, and used once.
      details: JSON data behind the fields, fetched and compared entry by entry where a field differs.
    Raises: SoapjaxError on all ranks, with the fields and ranks that differ, or the ranks that never came.
    """
    store.put(f"{ROOT}/agree/{name}/{store.rank}", json.dumps(dict(fields)).encode())
    records = gathered(store, name, timeout_s)
    problems = differences(name, [json.loads(records[str(r)]) for r in range(store.num_ranks)])
    if not problems:
        return
    if details is not None:
        store.put(f"{ROOT}/agree/{name}/details/{store.rank}", zlib.compress(json.dumps(details()).encode()))
        found = gathered(store, f"{name}/details", timeout_s)
        flat = [_flat(json.loads(zlib.decompress(found[str(r)]))) for r in range(store.num_ranks)]
        problems += differences(name, flat)[:MAX_DIFFERENCES]
    raise SoapjaxError(problems)


def differences(name: str, records: Sequence[Mapping[str, str]]) -> list[Problem]:
    """One problem per field that is not equal on all ranks; `records` by rank."""
    problems = []
    for field in dict.fromkeys(f for r in records for f in r):
        ranks: dict[str, list[int]] = collections.defaultdict(list)
        for rank, record in enumerate(records):
            ranks[record.get(field, "nothing")].append(rank)
        if len(ranks) > 1:
            value = "; ".join(f"{_shown(v)} on rank {_listed(r)}" for v, r in ranks.items())
            remedy = REMEDIES.get(field.partition(".")[0], REMEDIES["plan"])
            problems.append(Problem(f"{name}: {field}", value, f"the same on all {len(records)} ranks", remedy))
    return problems


def _shown(value: str) -> str:
    return value[:12] if len(value) == 64 and all(c in "0123456789abcdef" for c in value) else repr(value)[:60]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{', '.join(map(str, ranks[:7]))} and {len(ranks) - 7} more"


def _flat(data: Any, path: str = "") -> dict[str, str]:
    """Leaves of nested JSON data by dotted path."""
    if isinstance(data, dict | list) and data:
        entries = data.items() if isinstance(data, dict) else enumerate(data)
        return {k: v for key, x in entries for k, v in _flat(x, f"{path}.{key}" if path else str(key)).items()}
    return {path: json.dumps(data)}


def gathered(store: KeyValueStore, name: str, timeout_s: float) -> dict[str, bytes]:
    """The records of all ranks. The first rank whose time is up decides for all who is missing."""
    folder = f"{ROOT}/agree/{name}"

    def found() -> dict[str, bytes] | None:
        left = _left(store)
        records = store.items(folder)
        if "missing" in records:
            missing = [r for r in json.loads(records["missing"]) if r != store.rank]
            late = [store.rank] if not missing else missing  # this very rank came too late
            raise SoapjaxError(missing_ranks(name, late, store.num_ranks, timeout_s))
        if all(str(r) in records for r in range(store.num_ranks)):
            return records
        _raise_for_left(store, name, left - set(map(int, filter(str.isdigit, records))))
        return None

    records = _wait(found, timeout_s)
    if records is None:
        there = store.items(folder)
        missing = [r for r in range(store.num_ranks) if str(r) not in there]
        store.put(f"{folder}/missing", json.dumps(missing).encode())
        raise SoapjaxError(missing_ranks(name, missing, store.num_ranks, timeout_s))
    return records


def _left(store: KeyValueStore) -> set[int]:
    """Ranks that have ended. Asked before anything that they may have written before: else one could come and go in between."""
    return {int(r) for r in store.items(LEFT)}


def _raise_for_left(store: KeyValueStore, name: str, left: set[int]) -> None:
    """Ranks that left before they came here never will."""
    if left:
        ranks = _listed(sorted(left))
        remedy = f"see what rank {ranks} printed"
        raise SoapjaxError(Problem(name, f"rank {ranks} has ended", f"all {store.num_ranks} ranks", remedy))


def _wait(found: Callable[[], Any], timeout_s: float) -> Any:
    """What `found` gives as soon as it is not None, or None after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.005
    while True:
        HERE.num_looks += 1
        if (result := found()) is not None or time.monotonic() > deadline:
            return result
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.25)


def made_by_first(store: KeyValueStore, name: str, make: Callable[[], str], *, timeout_s: float, making_s: float) -> str:
    """The text that rank 0 makes, on all ranks.

    Others wait `timeout_s` for rank 0 to begin, and `making_s` for it to end. Where `make` raises SoapjaxError, all raise it.
    """
    folder = f"{ROOT}/made/{name}"
    if store.rank == 0:
        store.put(f"{folder}/begun", b"")
        result: dict[str, Any] = {"problems": [Problem(name, "rank 0 failed", "a result", "see what rank 0 printed")]}
        try:
            text = make()
            result = {"text": text}
            return text
        except SoapjaxError as e:
            result = {"problems": e.problems}
            raise
        except Exception as e:
            said = f"{type(e).__name__}: {e}".split("\n")[0][:150]
            result["problems"] = [Problem(name, f"rank 0 failed ({said})", "a result", "see what rank 0 printed")]
            raise
        finally:
            store.put(f"{folder}/done", zlib.compress(json.dumps(result).encode()))

    def found(key: str) -> bytes | None:
        left = _left(store)
        records = store.items(folder)
        if key not in records:
            _raise_for_left(store, name, left & {0})
        return records.get(key)

    if _wait(lambda: found("begun"), timeout_s) is None:
        raise SoapjaxError(missing_ranks(name, [0], store.num_ranks, timeout_s))
    data = _wait(lambda: found("done"), making_s)
    if data is None:
        remedy = "give the search on rank 0 less to do (seconds, proposals)"
        raise SoapjaxError(Problem(name, f"nothing from rank 0 after {making_s:g} s", "its plan", remedy))
    result = json.loads(zlib.decompress(data))
    if "text" not in result:
        raise SoapjaxError(Problem(*p) for p in result["problems"])
    return result["text"]


def leave_store(store: KeyValueStore | None, status: int) -> NoReturn:
    """Ends this process with `status` at once, and lets the other ranks know by the store alone.

    Rank 0 stays a moment longer than the others, since the store that tells them why lives in it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if store is not None:
        try:
            store.put(f"{LEFT}/{store.rank}", str(status).encode())
            if store.rank == 0:
                _wait(lambda: len(store.items(LEFT)) >= store.num_ranks or None, LEAVE_S)
        except Exception:  # noqa: BLE001 - the service may have gone, and this process goes anyway
            pass
    os._exit(status)
