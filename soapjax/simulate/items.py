"""The schedule as the jitted simulators read it: one *item* per task, each with at most one predecessor.

What a graph task waits for is gathered in an accumulator by the *links* before it: a conversion, or a plain wait for an
input that is never converted. So an item is

    link       end = when its predecessor ended (+ its duration); folded into the accumulator
    compute    starts when the accumulator is there; empties it
    follower   an inner sum or the resolution of a result: starts when its predecessor ended

and a step of the simulation reads one end time, whatever the fan-in. An item has a duration per stream: 0 computes,
1 + l communicates over link level l, one after the other. An item of duration zero occupies no stream.

Forward, backward and update are phases, separated by a barrier item on all streams; so no item needs a predecessor
in another phase.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from soapjax.costs.evaluate import Durations, Holders
from soapjax.costs.tables import CostTables
from soapjax.simulate.schedule import BARRIER, COMPUTE, CONVERT, RESOLVE, SUM

LINK = 5  # a wait for an input that is never converted
NONE = -1


class Items(NamedTuple):
    """T items in schedule order; F phases."""

    kind: np.ndarray  # int32 [T]
    source: np.ndarray  # int32 [T]: index among what `kind` counts, the reading task for LINK
    predecessor: np.ndarray  # int32 [T], NONE where there is none in the same phase
    is_link: np.ndarray  # bool [T]
    is_compute: np.ndarray  # bool [T]
    of_compute: np.ndarray  # int32 [K]: the item of a task, of a conversion, of a resolution (T where it has none), of a sum
    of_convert: np.ndarray  # int32 [E]
    of_resolve: np.ndarray  # int32 [T']
    of_sum: np.ndarray  # int32 [S]

    @property
    def num_items(self) -> int:
        return len(self.kind)

    @property
    def is_barrier(self) -> np.ndarray:
        return self.kind == BARRIER

    def index(self, num_k: int, num_s: int, num_t: int, num_e: int) -> np.ndarray:
        """Rows [T] of the figures of K tasks, S inner sums, T' resolutions, E conversions and a row of zeros, stacked."""
        first = np.zeros(6, np.int32)
        first[[COMPUTE, SUM, RESOLVE, CONVERT]] = np.cumsum([0, num_k, num_s, num_t])
        first[[BARRIER, LINK]] = num_k + num_s + num_t + num_e
        return (first[self.kind] + np.where(np.isin(self.kind, (BARRIER, LINK)), 0, self.source)).astype(np.int32)

    def durations(self, d: Durations):
        """Seconds [..., T, 1 + L] of every item on every stream, from the cost model's figures."""
        lead, levels = d.compute_s.shape[:-1], d.convert_s.shape[-1]
        compute = jnp.concatenate([d.compute_s[..., None], jnp.zeros((*d.compute_s.shape, levels), d.compute_s.dtype)], -1)
        sent = jnp.concatenate([d.sum_s, d.resolve_s, d.convert_s, jnp.zeros((*lead, 1, levels), d.sum_s.dtype)], -2)
        sent = jnp.concatenate([jnp.zeros((*sent.shape[:-1], 1), sent.dtype), sent], -1)
        sizes = (x.shape[-2] for x in (d.sum_s, d.resolve_s, d.convert_s))
        return jnp.concatenate([compute, sent], -2)[..., self.index(d.compute_s.shape[-1], *sizes), :]


    def holders(self, h: Holders):
        """bool [..., T, G]: which groups of devices take part in every item."""
        nobody = jnp.zeros((*h.compute.shape[:-2], 1, h.compute.shape[-1]), bool)
        every = jnp.concatenate([h.compute, h.sum, h.resolve, h.convert, nobody], -2)
        return every[..., self.index(*(x.shape[-2] for x in (h.compute, h.sum, h.resolve, h.convert))), :]


def items_of(tables: CostTables) -> Items:
    """The items of a graph on a topology; independent of the strategy."""
    graph = tables.graph
    rows: list[tuple[int, int, int]] = []  # kind, source, predecessor
    ready: dict[int, int] = {}  # tensor -> item after which it is there
    edges_of: dict[int, list[int]] = {}
    sums_of: dict[int, list[int]] = {}
    for e, k in enumerate(tables.edge_task.tolist()):
        edges_of.setdefault(k, []).append(e)
    for s, k in enumerate(tables.sum_task.tolist()):
        sums_of.setdefault(k, []).append(s)
    start = 0  # of the phase
    phase = graph.tasks[0].phase if graph.tasks else 0

    def add(kind: int, source: int, predecessor: int) -> int:
        rows.append((kind, source, predecessor if predecessor >= start else NONE))
        return len(rows) - 1

    for k, task in enumerate(graph.tasks):
        if task.phase != phase and not graph.is_single_phase:
            add(BARRIER, 0, NONE)
            start = len(rows)
        phase = task.phase
        converted = set()
        for e in edges_of.get(k, []):
            tensor = int(tables.edge_tensor[e])
            add(CONVERT, e, ready.get(tensor, NONE))
            converted.add(tensor)
        waits = {ready[a.tensor] for a in task.reads if a.tensor in ready and a.tensor not in converted}
        for wait in sorted(w for w in waits if w >= start):
            add(LINK, k, wait)
        end = add(COMPUTE, k, NONE)
        for s in sums_of.get(k, []):
            end = add(SUM, s, end)
        for a in task.writes:
            ready[a.tensor] = add(RESOLVE, a.tensor, end) if tables.may_be_partial[a.tensor] else end
    for e in edges_of.get(len(graph.tasks), []):
        add(CONVERT, e, ready.get(int(tables.edge_tensor[e]), NONE))
    kind, source, predecessor = (np.array([r[i] for r in rows], np.int32).reshape(-1) for i in range(3))

    def index(wanted: int, count: int) -> np.ndarray:
        found = np.full(count, len(rows), np.int32)
        where = np.flatnonzero(kind == wanted)
        found[source[where]] = where
        return found

    return Items(
        kind, source, predecessor, np.isin(kind, (CONVERT, LINK)), kind == COMPUTE,
        index(COMPUTE, len(graph.tasks)), index(CONVERT, len(tables.edge_task)),
        index(RESOLVE, len(graph.tensors)), index(SUM, len(tables.sum_task)),
    )  # fmt: skip
