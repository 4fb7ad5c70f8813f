"""The static schedule: every task that a step may run, in program order.

What a strategy changes is durations only; a communication that a strategy does
not need has duration zero, and then starts when its inputs are there and occupies
no stream. Streams: 0 computes, 1 + l communicates over link level l. Per graph task:
reshards of what it reads, the task, its inner collectives, the resolution of what it wrote.
Phases end in a barrier.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from soapjax.costs.evaluate import Durations, Holders
from soapjax.costs.tables.problem_tables import CostTables

COMPUTE, SUM, RESOLVE, RESHARD, BARRIER = range(5)
KIND_NAMES = ("compute", "inner collective", "resolve", "reshard", "barrier")


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """T tasks; `predecessors` is padded with T (always ended at 0)."""

    kind: np.ndarray  # int32 [T]
    source: np.ndarray  # int32 [T]: index among what `kind` counts
    level: np.ndarray  # int32 [T]: link level of a communication, -1
    predecessors: np.ndarray  # int32 [T, P]
    occupies: np.ndarray  # bool [T, S]
    is_barrier: np.ndarray  # bool [T]

    @property
    def num_tasks(self) -> int:
        return len(self.kind)

    def needs(self) -> list[list[int]]:
        """The predecessors of every task, without padding."""
        return [row[row < self.num_tasks].tolist() for row in self.predecessors]

    def durations(self, d: Durations) -> np.ndarray:
        """Seconds of every scheduled task, [..., T], gathered from the cost model's figures."""
        found = np.zeros((*d.compute_s.shape[:-1], self.num_tasks))
        here = self.kind == COMPUTE
        found[..., here] = d.compute_s[..., self.source[here]]
        for kind, seconds in ((SUM, d.sum_s), (RESOLVE, d.resolve_s), (RESHARD, d.reshard_s)):
            here = self.kind == kind
            found[..., here] = seconds[..., self.source[here], self.level[here]]
        return found

    def without_overlap(self) -> Schedule:
        """The same where all communication occupies the compute stream too: a device does one thing at a time."""
        return dataclasses.replace(self, occupies=np.concatenate([np.ones_like(self.occupies[:, :1]), self.occupies[:, 1:]], 1))

    def without_barriers(self) -> Schedule:
        """The same where a task waits for its inputs only, whatever phase they are of."""
        return dataclasses.replace(self, is_barrier=np.zeros_like(self.is_barrier))

    @property
    def queues(self) -> np.ndarray:
        """bool [T, 2]: of operators to run, and of what is sent, over whatever links."""
        sends = self.occupies[:, 1:].any(1) & ~self.is_barrier
        return np.stack([self.occupies[:, 0] & ~self.is_barrier, sends], axis=1)

    def queues_of_groups(self, h: Holders, edge_tensor: np.ndarray, maker: np.ndarray) -> np.ndarray:
        """bool [T, 2 * G]: of every group of devices; what is sent waits where it is.

        `edge_tensor` int [E] says what is resharded, which waits where it is kept; `maker` int [T'] is the task that writes a
        tensor, or -1: there its resolution waits.
        """
        compute, made = np.asarray(h.compute), (maker >= 0)[:, None]
        senders = h._replace(
            reshard=np.asarray(h.home)[edge_tensor] & np.asarray(h.reshard),
            resolve=np.asarray(h.resolve) & (compute[np.maximum(maker, 0)] | ~made),
        )
        return (self.queues[:, :, None] & self._takes_part(senders)[:, None, :]).reshape(self.num_tasks, -1)

    def occupies_of_groups(self, h: Holders) -> np.ndarray:
        """bool [T, S * G]: streams of every group of devices that pins tell apart, under one strategy."""
        return (self.occupies[:, :, None] & self._takes_part(h)[:, None, :]).reshape(self.num_tasks, -1)

    def _takes_part(self, h: Holders) -> np.ndarray:
        """bool [T, G]"""
        groups = np.asarray(h.compute).shape[1]
        takes_part = np.ones((self.num_tasks, groups), bool)
        for kind, mask in ((COMPUTE, h.compute), (SUM, h.sum), (RESOLVE, h.resolve), (RESHARD, h.reshard)):
            where = self.kind == kind
            takes_part[where] = np.asarray(mask)[self.source[where]]
        return takes_part


def schedule_of(tables: CostTables) -> Schedule:
    """The schedule of a graph on a topology; independent of the strategy."""
    graph, num_levels = tables.graph, tables.links.num_levels
    overlap = tables.topology.device.overlap
    rows: list[tuple[int, int, int, list[int]]] = []
    ready: dict[int, int] = {}  # tensor -> scheduled task after which it is there
    edges_of: dict[int, list[int]] = {}
    sums_of: dict[int, list[int]] = {}
    for e, k in enumerate(tables.edge_task):
        edges_of.setdefault(int(k), []).append(e)
    for s, k in enumerate(tables.sum_task):
        sums_of.setdefault(int(k), []).append(s)

    def add(kind: int, source: int, level: int, needs: list[int]) -> int:
        rows.append((kind, source, level, needs))
        return len(rows) - 1

    def chain(kind: int, source: int, needs: list[int]) -> int:
        last = -1
        for level in range(num_levels):
            last = add(kind, source, level, needs if level == 0 else [last])
        return last

    phase = None
    for k, task in enumerate(graph.tasks):
        if phase is not None and task.phase != phase and not graph.is_single_phase:
            add(BARRIER, 0, -1, [])
        phase = task.phase
        resharded: dict[int, int] = {}
        needs = []
        for e in edges_of.get(k, []):
            tensor = int(tables.edge_tensor[e])
            end = chain(RESHARD, e, [ready[tensor]] if tensor in ready else [])
            resharded[tensor] = end
            needs.append(end)
        needs += [ready[a.tensor] for a in task.reads if a.tensor in ready and a.tensor not in resharded]
        end = add(COMPUTE, k, -1, sorted(set(needs)))
        for s in sums_of.get(k, []):
            end = chain(SUM, s, [end])
        for a in task.writes:
            ready[a.tensor] = chain(RESOLVE, a.tensor, [end]) if tables.may_be_partial[a.tensor] else end
    for e in edges_of.get(len(graph.tasks), []):
        tensor = int(tables.edge_tensor[e])
        chain(RESHARD, e, [ready[tensor]] if tensor in ready else [])
    return _arrays(rows, num_levels, overlap)


def _arrays(rows, num_levels: int, overlap: bool) -> Schedule:
    n = len(rows)
    width = max([len(r[3]) for r in rows], default=1) or 1
    predecessors = np.full((n, width), n, np.int32)
    occupies = np.zeros((n, 1 + num_levels), bool)
    for t, (kind, _, level, needs) in enumerate(rows):
        predecessors[t, : len(needs)] = needs
        if kind == BARRIER:
            occupies[t] = True
        elif kind == COMPUTE:
            occupies[t, 0] = True
        else:
            occupies[t, 1 + level] = True
            occupies[t, 0] = not overlap
    kind, source, level = (np.array([r[i] for r in rows], np.int32) for i in range(3))
    return Schedule(kind, source, level, predecessors, occupies, kind == BARRIER)
