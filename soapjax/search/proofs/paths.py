"""Critical paths as weights: the longest path through a step's tasks, and mixtures of such paths, bound its time from below.

A step takes at least the sum of durations along any chain of tasks that must follow each other: because one reads the
other's result, or because both occupy one stream, where they run in program order. For a unit of flow along such chains,
f_t of it through task t, the time of every strategy is at least the sum of f_t d_t. A strategy that does not need a
communication has no such task: its chain along the stream still holds (the task is skipped), and so does that along the data,
but no chain may come along the one and leave along the other, unless the task is active under all strategies considered.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy

from soapjax.costs.evaluate import Durations
from soapjax.costs.tables.problem_tables import CostTables
from soapjax.simulate.schedule import BARRIER, COMPUTE, RESHARD, RESOLVE, SUM, Schedule, schedule_of

_FIELDS = {COMPUTE: "compute_s", SUM: "sum_s", RESOLVE: "resolve_s", RESHARD: "reshard_s"}


class Chains(NamedTuple):
    """A graph of P phases whose source-to-sink paths are valid chains; V vertices in topological order, X arcs."""

    tail: np.ndarray  # int [X]
    head: np.ndarray  # int [X]
    duration: np.ndarray  # int [X]: the flat index of the duration that the arc takes, -1
    way: np.ndarray  # int [X]: 0 along data, 1 + s along stream s, -1 of a task itself, from the source or to the sink
    source: np.ndarray  # int [P]: vertex
    sink: np.ndarray  # int [P]
    num_vertices: int


def flat(d: Durations) -> np.ndarray:
    """All fields end to end, float64."""
    return np.concatenate([np.asarray(x, float).reshape(-1) for x in d])


def unflat(values: np.ndarray, like: Durations) -> Durations:
    """The inverse, in the shapes of `like`, float32."""
    parts = np.split(values, np.cumsum([x.size for x in like])[:-1])
    return Durations(*(p.reshape(x.shape).astype(np.float32) for p, x in zip(parts, like, strict=True)))


def chains_of(tables: CostTables, is_active: Durations) -> Chains:
    """The chains of a step; `is_active` tells the durations that are positive under every strategy considered."""
    schedule = schedule_of(tables)
    tail, head, duration, way = [], [], [], []
    vertex = 0

    def arc(u: int, v: int, d: int = -1, w: int = -1) -> None:
        tail.append(u)
        head.append(v)
        duration.append(d)
        way.append(w)

    active = flat(is_active) > 0
    place = _flat_indices(schedule, is_active)
    # Phases: tasks between barriers. Way of a task: 1 + stream, or 0 for its data; all the same where it is active.
    sources, sinks = [], []
    entry: dict[tuple[int, int], int] = {}
    leave: dict[tuple[int, int], int] = {}
    bounds = [0, *(np.flatnonzero(schedule.is_barrier) + 1), schedule.num_tasks]
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        members = [t for t in range(begin, end) if schedule.kind[t] != BARRIER]
        if not members:
            continue
        source = vertex
        vertex += 1
        last: dict[int, int] = {}
        ends: list[int] = []
        for t in members:
            streams = np.flatnonzero(schedule.occupies[t]).tolist()
            ways = [0, *(1 + s for s in streams)]
            is_one = bool(active[place[t]])
            for w in ways[:1] if is_one else ways:
                entry[t, w], leave[t, w] = vertex, vertex + 1
                arc(vertex, vertex + 1, int(place[t]))
                ends.append(vertex + 1)
                vertex += 2
            for w in ways:
                if is_one:
                    entry[t, w], leave[t, w] = entry[t, 0], leave[t, 0]
            needs = [int(p) for p in schedule.predecessors[t] if begin <= p < end]
            for p in needs:
                arc(leave[p, 0], entry[t, 0], w=0)
            for s in streams:
                if s in last:
                    arc(leave[last[s], 1 + s], entry[t, 1 + s], w=1 + s)
                last[s] = t
        has_in, has_out = set(head), set(tail)
        for v in sorted({entry[t, w] for (t, w) in entry if begin <= t < end}):
            if v not in has_in:
                arc(source, v)
        sink = vertex
        vertex += 1
        for v in ends:
            if v not in has_out:
                arc(v, sink)
        sources.append(source)
        sinks.append(sink)
    arrays = (np.array(x, int) for x in (tail, head, duration, way, sources, sinks))
    return Chains._make([*arrays, vertex])


def _flat_indices(schedule: Schedule, like: Durations) -> np.ndarray:
    """The place of each scheduled task's duration in the fields of Durations laid end to end; -1 for barriers."""
    start = dict(zip(like._fields, np.cumsum([0, *(x.size for x in like[:-1])]), strict=True))
    levels = like.reshard_s.shape[1]
    out = np.full(schedule.num_tasks, -1)
    for t, (kind, source, level) in enumerate(zip(schedule.kind, schedule.source, schedule.level, strict=True)):
        if kind != BARRIER:
            name = _FIELDS[int(kind)]
            out[t] = start[name] + (source if kind == COMPUTE else source * levels + level)
    return out


def longest_paths(chains: Chains, durations: np.ndarray) -> tuple[float, np.ndarray, list[int]]:
    """The sum over phases of the longest chain, the weights (flat) of the tasks on these chains, and the arcs of the chains.

    Vertices are numbered so that all arcs go upwards.
    """
    cost = np.where(chains.duration >= 0, durations[np.maximum(chains.duration, 0)], 0.0).tolist()
    begin = np.full(chains.num_vertices, -np.inf)
    begin[chains.source] = 0.0
    best, by = begin.tolist(), [-1] * chains.num_vertices
    tail, head = chains.tail.tolist(), chains.head.tolist()
    for x in np.argsort(chains.tail, kind="stable").tolist():
        value = best[tail[x]] + cost[x]
        if value > best[head[x]]:
            best[head[x]] = value
            by[head[x]] = x
    weights = np.zeros(len(durations))
    total, arcs = 0.0, []
    for source, sink in zip(chains.source.tolist(), chains.sink.tolist(), strict=True):
        total += best[sink]
        v = sink
        while v != source:
            arcs.append(by[v])
            if chains.duration[by[v]] >= 0:
                weights[chains.duration[by[v]]] += 1.0
            v = tail[by[v]]
    return float(total), weights, arcs[::-1]


def turning_tasks(chains: Chains, durations: np.ndarray) -> list[int]:
    """Flat indices of the durations at which the longest chains turn from data to a stream or from a stream to another way."""
    _, _, arcs = longest_paths(chains, durations)
    out = []
    for before, x, after in zip([-1, *arcs[:-1]], arcs, [*arcs[1:], -1], strict=True):
        if chains.duration[x] >= 0 and before >= 0 and after >= 0:
            ways = chains.way[before], chains.way[after]
            if min(ways) >= 0 and ways[0] != ways[1]:
                out.append(int(chains.duration[x]))
    return out


class FlowProgram:
    """max over unit flows f of min over the durations seen of f . d: a linear program that grows by one row per strategy seen."""

    def __init__(self, chains: Chains):
        self.chains = chains
        count = len(chains.tail)
        v = chains.num_vertices
        arcs = np.arange(count)
        ends = np.concatenate([chains.tail, chains.head]), np.tile(arcs, 2)
        self.conserve = scipy.sparse.csr_array(scipy.sparse.coo_array((np.repeat([1.0, -1.0], count), ends), shape=(v, count)))
        self.supply = np.zeros(v)
        self.supply[chains.source] = 1.0
        self.supply[chains.sink] = -1.0
        self.takes = chains.duration >= 0

    def best(self, seen: list[np.ndarray]) -> tuple[np.ndarray, float, np.ndarray]:
        """Weights (flat) of the best flow, its value over `seen` (flat durations), and the mixture of these it is up against."""
        c = self.chains
        d = np.array([np.where(self.takes, s[np.maximum(c.duration, 0)], 0.0) for s in seen])
        scale = max(float(s.max()) for s in d)
        cost = np.zeros(1 + d.shape[1])
        cost[0] = -1.0
        below = np.concatenate([np.ones((len(d), 1)), -d / scale], axis=1)
        zero = scipy.sparse.csr_array((self.conserve.shape[0], 1))
        found = scipy.optimize.linprog(
            cost, A_ub=below, b_ub=np.zeros(len(d)), A_eq=scipy.sparse.hstack([zero, self.conserve]), b_eq=self.supply,
            bounds=[(None, None)] + [(0.0, None)] * d.shape[1], method="highs",
        )  # fmt: skip
        weights = np.zeros(len(seen[0]))
        np.add.at(weights, c.duration[self.takes], np.maximum(found.x[1:][self.takes], 0.0))
        return weights, float(-found.fun) * scale, np.maximum(-found.ineqlin.marginals, 0.0)
