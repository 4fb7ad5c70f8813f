"""Reads the contest's problem files (JSON, or JSON in gzip), and says everything that is wrong with one.

    {"problem": {"name": ..., "usage_limit": 50,
                 "nodes": {"intervals": [[30, 70], ...], "costs": [[15], ...], "usages": [[10], ...]},
                 "edges": {"nodes": [[0, 1], ...], "costs": [[30, 40], ...]}}}

An edge's costs are the table of (first node's, second node's) strategies, row by row.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import zlib
from typing import Any

import numpy as np

from soapjax.additive.additive_problem import FORBIDDEN, AdditiveProblem
from soapjax.errors import Problem, SoapjaxError
from soapjax.helpers.files import read_bytes, too_large
from soapjax.topology.table_reader import shown

MAX_BYTES = 256 * 2**20  # of a problem, unpacked: the contest's largest have 150 MB
MAX_PROBLEMS = 100  # more are counted, not listed
LARGEST = 2**62  # of a usage or a time: sums of a few stay within 64 bits


def load_problem(path: str | os.PathLike[str]) -> AdditiveProblem:
    """The problem in a file.

    Raises: SoapjaxError with every failure found.
    """
    place = str(path)
    raw = read_bytes(path, max_bytes=MAX_BYTES)
    if raw[:2] == b"\x1f\x8b":
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(raw)) as f:
                raw = f.read(MAX_BYTES + 1)
        except (OSError, EOFError, zlib.error, ValueError) as e:
            expected, remedy = "a readable .json or .json.gz file", "check that the file is whole"
            raise SoapjaxError(Problem(place, str(e) or type(e).__name__, expected, remedy)) from None
        if len(raw) > MAX_BYTES:
            raise SoapjaxError(too_large(place, f"more than {MAX_BYTES} bytes when unpacked", MAX_BYTES))
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise SoapjaxError(Problem(place, f"not JSON ({e})", "one JSON object", "check that the file is whole")) from None
    return _Reader(place).problem(data)


class _Reader:
    def __init__(self, place: str):
        self.place = place
        self.problems: list[Problem] = []
        self.left_out = 0

    def report(self, where: str, value: Any, expected: str, remedy: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(
                Problem(f"{self.place}: {where}", value if isinstance(value, str) else shown(value), expected, remedy)
            )
        else:
            self.left_out += 1

    def finish(self) -> None:
        if self.left_out:
            self.problems.append(Problem(self.place, f"{self.left_out} more failures", "none", "mend those above first"))
        if self.problems:
            raise SoapjaxError(self.problems)

    def table(self, parent: Any, key: str, where: str) -> dict:
        value = parent.get(key) if isinstance(parent, dict) else None
        if not isinstance(value, dict):
            self.report(where, "nothing" if value is None else shown(value), "a JSON object", f"add the object {key!r}")
            return {}
        return value

    def rows(self, parent: dict, key: str, where: str) -> list:
        """A list of lists."""
        value = parent.get(key)
        if not isinstance(value, list):
            self.report(where, "nothing" if value is None else shown(value), "a list of lists", f"add the list {key!r}")
            return []
        for i, row in enumerate(value):
            if not isinstance(row, list):
                self.report(f"{where}[{i}]", shown(row), "a list", "write a list")
        return [row if isinstance(row, list) else [] for row in value]

    def numbers(self, rows: list, where: str, what: str, largest: int) -> np.ndarray:
        """All entries end to end: int64, non-negative."""
        if set(map(type, itertools.chain.from_iterable(rows))) <= {int}:
            try:
                flat = np.fromiter(itertools.chain.from_iterable(rows), np.int64)
                if not len(flat) or (flat.min() >= 0 and flat.max() <= largest):
                    return flat
            except OverflowError:
                pass
        flat_list = []
        for i, row in enumerate(rows):
            for j, x in enumerate(row):
                is_number = isinstance(x, int | float) and not isinstance(x, bool)
                if not is_number or x != x or x < 0 or x in (float("inf"),) or int(x) != x:
                    self.report(f"{where}[{i}][{j}]", shown(x), f"a non-negative whole number ({what})", "correct the entry")
                    x = 0
                elif x > largest:
                    if largest < LARGEST:
                        x = largest  # any cost beyond forbids
                    else:
                        self.report(f"{where}[{i}][{j}]", x, f"at most {largest}", "use a larger unit for all usages and the limit")
                        x = 0
                flat_list.append(int(x))
        return np.array(flat_list, np.int64)

    def pairs(self, rows: list, where: str, what: str) -> np.ndarray:
        good = []
        for i, row in enumerate(rows):
            if len(row) == 2 and all(type(x) is int and abs(x) <= LARGEST for x in row):
                good.append(row)
            else:
                self.report(f"{where}[{i}]", row, what, "write two whole numbers")
                good.append([0, 0])
        return np.array(good, np.int64).reshape(-1, 2)

    def same_length(self, a: list, b: list, where: str, other: str) -> None:
        if len(a) != len(b):
            self.report(where, f"{len(a)} entries", f"{len(b)}, as many as {other}", "make them equally many")

    def problem(self, data: Any) -> AdditiveProblem:
        body = self.table(data, "problem", "problem")
        if not body:
            self.finish()
            self.report("problem", "{}", "nodes, edges and usage_limit", "write the problem")
            self.finish()
        nodes, edges = self.table(body, "nodes", "problem.nodes"), self.table(body, "edges", "problem.edges")
        limit = body.get("usage_limit")
        if type(limit) is float and limit.is_integer():
            limit = int(limit)
        if type(limit) is not int or limit <= 0:
            value = "nothing" if limit is None else shown(limit)
            self.report("problem.usage_limit", value, "a positive whole number", "give the memory that there is")
        self.finish()
        intervals, costs = (
            self.rows(nodes, "intervals", "problem.nodes.intervals"),
            self.rows(nodes, "costs", "problem.nodes.costs"),
        )
        usages = self.rows(nodes, "usages", "problem.nodes.usages")
        ends, tables = self.rows(edges, "nodes", "problem.edges.nodes"), self.rows(edges, "costs", "problem.edges.costs")
        self.finish()
        self.same_length(intervals, costs, "problem.nodes.intervals", "problem.nodes.costs")
        self.same_length(usages, costs, "problem.nodes.usages", "problem.nodes.costs")
        self.same_length(tables, ends, "problem.edges.costs", "problem.edges.nodes")
        if not costs:
            self.report("problem.nodes.costs", "[]", "at least one node", "an empty problem has no solution to find")
        for i, (c, u) in enumerate(zip(costs, usages, strict=False)):
            if not c:
                self.report(f"problem.nodes.costs[{i}]", "[]", "at least one strategy", "give the node a strategy")
            if len(u) != len(c):
                self.report(
                    f"problem.nodes.usages[{i}]", f"{len(u)} entries", f"{len(c)}, one per strategy", "make them equally many"
                )
        spans = self.pairs(intervals, "problem.nodes.intervals", "[start, end]")
        for i in np.flatnonzero(spans[:, 0] > spans[:, 1]).tolist():
            self.report(f"problem.nodes.intervals[{i}]", intervals[i], "start <= end", "exchange the two")
        links = self.pairs(ends, "problem.edges.nodes", "[first node, second node]")
        counts = np.array([len(c) for c in costs], np.int64)
        outside = set(np.flatnonzero(((links < 0) | (links >= len(costs))).any(axis=1)).tolist())
        for i in sorted(outside):
            self.report(f"problem.edges.nodes[{i}]", ends[i], f"node numbers from 0 to {len(costs) - 1}", "correct the index")
        for i, (row, (u, v)) in enumerate(zip(tables, links.tolist(), strict=False)):
            if i not in outside and len(row) != counts[u] * counts[v]:
                expected = f"{counts[u]} x {counts[v]} = {counts[u] * counts[v]}, one per pair of strategies"
                self.report(f"problem.edges.costs[{i}]", f"{len(row)} entries", expected, "write the table row by row")
        flat_costs = self.numbers(costs, "problem.nodes.costs", "a cost", FORBIDDEN)
        flat_usages = self.numbers(usages, "problem.nodes.usages", "a usage", LARGEST)
        flat_tables = self.numbers(tables, "problem.edges.costs", "a cost", FORBIDDEN)
        self.finish()
        # A cost above 1e18 forbids like 1e18 itself.
        return AdditiveProblem(
            num_strategies=counts, costs=flat_costs, usages=flat_usages, intervals=spans, edges=links, tables=flat_tables,
            usage_limit=limit, name=str(body.get("name", "problem")),
        )  # fmt: skip
