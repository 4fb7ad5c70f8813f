"""Mutants of JSON trees and of bytes, drawn by hypothesis: see fuzz.py."""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 7, 8, 1e300, -1e300, 1e-300, 5e-324, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e9])
TEXTS = st.sampled_from(["", "x", "é", "\x1b[2J", "[red]", "\x00", "../..", "-1", "nan", "1e999", "pin(99)", "d0", "a" * 5000])
CONSTANTS = st.sampled_from([None, True, False, float("nan"), float("inf"), [], {}, [[]], {"a": 1}, [0] * 300])
VALUES = st.one_of(NUMBERS, TEXTS, CONSTANTS)


def places(tree: Any, at: tuple = ()) -> Iterator[tuple]:
    """Paths of all entries below the root."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*at, key)
        yield from places(value, (*at, key))


def entry(tree: Any, at: tuple) -> Any:
    for key in at:
        tree = tree[key]
    return tree


def mutated_tree(draw: Callable[[Any], Any], tree: Any) -> Any:
    """A copy of JSON data, changed in one to four places."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw(st.integers(1, 4))):
        found = list(places(tree))
        if not found:
            return copy.deepcopy(draw(VALUES))
        at = draw(st.sampled_from(found))
        parent, key = entry(tree, at[:-1]), at[-1]
        how = draw(st.sampled_from(["value", "value", "remove", "other", "rename", "double", "scale"]))
        if how == "value":
            parent[key] = copy.deepcopy(draw(VALUES))
        elif how == "remove":
            del parent[key]
        elif how == "other":
            parent[key] = json.loads(json.dumps(entry(tree, draw(st.sampled_from(found))), allow_nan=True))
        elif how == "scale" and isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
            with contextlib.suppress(OverflowError):
                parent[key] *= draw(st.sampled_from([-1, 2, 3, 0.5, 1e-9, 1e9, 1e150]))
        elif isinstance(parent, dict):
            name = draw(st.one_of(TEXTS, st.sampled_from([str(k) for *_, k in found])))
            parent[name] = copy.deepcopy(parent[key]) if how == "double" else parent.pop(key)
        else:
            parent.insert(draw(st.integers(0, len(parent))), copy.deepcopy(parent[key]))
    return tree


def mutated_bytes(draw: Callable[[Any], Any], data: bytes) -> bytes:
    """A copy of bytes, changed in one to four places."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        end = min(len(data), at + draw(st.integers(0, 40)))
        how = draw(st.sampled_from(["cut", "remove", "repeat", "byte", "text", "token", "token", "line"]))
        if how == "cut":
            data = data[:at]
        elif how == "remove":
            data = data[:at] + data[end:]
        elif how == "repeat":
            data = data[:at] + data[at:end] * draw(st.integers(2, 50)) + data[end:]
        elif how == "byte":
            data = data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]
        elif how == "text":
            data = data[:at] + draw(TEXTS).encode() + data[at:]
        elif how == "token":  # the word or number there, replaced
            begin, end = at, at
            while begin and chr(data[begin - 1]).isalnum():
                begin -= 1
            while end < len(data) and (chr(data[end]).isalnum() or data[end] in b".+-_"):
                end += 1
            with contextlib.suppress(ValueError):  # more digits than Python prints
                data = data[:begin] + str(draw(st.one_of(NUMBERS, TEXTS))).encode() + data[end:]
        else:
            lines = data.splitlines(keepends=True)
            if lines:
                k = draw(st.integers(0, len(lines) - 1))
                lines[k : k + 1] = draw(st.sampled_from([[], [lines[k]] * 2, [lines[-1]], lines[k : k + 1] + lines[:1]]))
            data = b"".join(lines)
    return data


def dumped(tree: Any) -> bytes:
    """JSON, with NaN, and integers as long as they are."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(tree).encode()
    finally:
        sys.set_int_max_str_digits(before)
