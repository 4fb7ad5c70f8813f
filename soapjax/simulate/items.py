"""The schedule as the jitted simulators read it: one *item* per task, each with at most one predecessor.

What a graph task waits for is gathered in an accumulator by the *links* before it: a reshard, or a plain wait for an
input that is never resharded. So an item is

    link       end = when its predecessor ended (+ its duration); folded into the accumulator
    compute    starts when the accumulator is there; empties it
    follower   an inner collective or the resolution of a result: starts when its predecessor ended

and a step of the simulation reads one end time, whatever the fan-in. An item has a duration per stream: 0 computes,
1 + l communicates over link level l, one after the other. An item of duration zero occupies no stream.

Forward, backward and update are phases, separated by a barrier item on all streams; so no item needs a predecessor
in another phase.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soapjax.costs.tables.problem_tables import CostTables
from soapjax.simulate.schedule import BARRIER, COMPUTE, RESHARD, RESOLVE, SUM, Schedule

LINK = 5  # a wait for an input that is never resharded
NONE = -1


class Items(NamedTuple):
    """T items in schedule order; F phases."""

    kind: np.ndarray  # int32 [T]
    source: np.ndarray  # int32 [T]: index among what `kind` counts, the reading task for LINK
    predecessor: np.ndarray  # int32 [T], NONE where there is none in the same phase
    is_link: np.ndarray  # bool [T]
    is_compute: np.ndarray  # bool [T]
    of_compute: np.ndarray  # int32 [K]: the item of a task, of a reshard, of a resolution (T where it has none), of a sum
    of_reshard: np.ndarray  # int32 [E]
    of_resolve: np.ndarray  # int32 [T']
    of_sum: np.ndarray  # int32 [S]

    @property
    def num_items(self) -> int:
        return len(self.kind)

    @property
    def is_barrier(self) -> np.ndarray:
        return self.kind == BARRIER


def items_of(tables: CostTables, schedule: Schedule) -> Items:
    """The items of a schedule: one for the levels of a communication together, and a link for every plain wait."""
    rows: list[tuple[int, int, int]] = []  # kind, source, predecessor
    item_of: list[int] = []  # by scheduled task
    start = 0  # of the phase

    def add(kind: int, source: int, predecessor: int = NONE) -> int:
        rows.append((kind, source, predecessor if predecessor >= start else NONE))
        return len(rows) - 1

    columns = (schedule.kind.tolist(), schedule.source.tolist(), schedule.level.tolist(), schedule.needs())
    for kind, source, level, needs in zip(*columns, strict=True):
        inputs = [item_of[p] for p in needs]
        if level > 0:
            item_of.append(item_of[-1])  # goes on with the item of the level before
        elif kind == BARRIER:
            item_of.append(add(kind, source))
            start = len(rows)
        elif kind == COMPUTE:
            # Its reshards stand before it, and are links themselves.
            for wait in sorted(i for i in inputs if i >= start and rows[i][0] != RESHARD):
                add(LINK, source, wait)
            item_of.append(add(kind, source))
        else:
            item_of.append(add(kind, source, *inputs))
    kind, source, predecessor = (np.array([r[i] for r in rows], np.int32).reshape(-1) for i in range(3))

    def index(wanted: int, count: int) -> np.ndarray:
        found = np.full(count, len(rows), np.int32)
        where = np.flatnonzero(kind == wanted)
        found[source[where]] = where
        return found

    return Items(
        kind=kind, source=source, predecessor=predecessor, is_link=np.isin(kind, (RESHARD, LINK)), is_compute=kind == COMPUTE,
        of_compute=index(COMPUTE, tables.num_tasks), of_reshard=index(RESHARD, len(tables.edge_task)),
        of_resolve=index(RESOLVE, len(tables.tensor_bytes)), of_sum=index(SUM, len(tables.sum_task)),
    )  # fmt: skip
