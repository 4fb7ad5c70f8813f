"""From strategies to their figures: the cost program (whole.py) on one problem, and what it found as plain arrays.

An `Evaluator` judges LANES strategies a call; of each of them `costs` gives everything.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

import jax
import numpy as np

from soapjax.costs.rules.sets import MAX_AXES, decoded
from soapjax.costs.tables.arrays import CostArrays, Records, cost_arrays, need_of, records_of
from soapjax.costs.tables.buckets import Bucket, bucket_for
from soapjax.costs.tables.problem_tables import CostTables
from soapjax.costs.whole import Evaluated, Over, PerRecord, evaluate, nothing_yet, standing
from soapjax.jit.programs import PlannerProgram
from soapjax.strategy.configs import REPLICATE

Array = np.ndarray
LANES = 32  # strategies per call: one size, so that it is traced and compiled once
OVER = 4  # the argument of `evaluate` that its results are written over
MOST_KEPT = 4  # results of a bucket that nobody reads any more


class Durations(NamedTuple):
    """What the simulators schedule; L link levels, slowest first."""

    compute_s: Array  # [K]
    resolve_s: Array  # [T, L]
    reshard_s: Array  # [E, L]
    sum_s: Array  # [S, L]


class Layouts(NamedTuple):
    """The layouts that a strategy implies; the executor's specs come from these."""

    slots: Array  # int8 [U + 3P + 1, A]: accesses; parameters stored, gradients, parameters left (problem_tables.py); replicated
    home: Array  # int8 [T, A]: of each tensor as it is kept; PARTIAL for summands only
    raw: Array  # int8 [T, A]: as its producer makes it, PARTIAL included
    resolved: Array  # int8 [T, A]: what its resolution costs the way to
    is_shared: Array  # bool [E]: the reshard was made before for another reader
    shared_with: Array  # int32 [E]: the last reader of that copy, -1 where it is not shared


class Parts(NamedTuple):
    """Of single records, for those who tell apart what a strategy's memory and seconds are made of."""

    reshard_s: Array  # [E, L]: as if no copy were shared
    held_bytes: Array  # [T]: of a tensor as it is kept, on a device that holds it
    copy_bytes: Array  # [E]: of a resharded copy, 0 where nothing is resharded
    transient_bytes: Array  # [T]: while it is made: of partial sums before they are resolved, and work space
    waiting_bytes: Array  # [T, 2]: of gradients that wait to be summed in one collective
    stored_bytes: Array  # [P]: of a parameter with its optimizer state
    is_sent: Array  # bool [E]: the reshard makes a copy of its own


class Holders(NamedTuple):
    """Which of the G device groups take part, where pins tell them apart."""

    compute: Array  # bool [K, G]
    resolve: Array  # bool [T, G]
    reshard: Array  # bool [E, G]
    sum: Array  # bool [S, G]
    home: Array  # bool [T, G]
    copy: Array  # bool [E, G]
    stored: Array  # bool [P, G]


class Outline(NamedTuple):
    """Of one strategy, as NumPy arrays: the little of its `Costs` by which many are compared."""

    durations: Durations
    stored: Array  # int8 [P, A]: the layouts in which parameters are stored
    bytes_by_collective: Array  # [6]
    holders: Holders | None


class Costs(NamedTuple):
    """Of one strategy, as NumPy arrays."""

    durations: Durations
    layouts: Layouts
    bytes_by_collective: Array  # [6] that each device sends in a step, by COLLECTIVES
    sent_bytes: Array  # []: in a step by the device that sends most; with pins devices differ, else the sum of the above
    memory_bytes: Array  # [4]: parameters and optimizer state; at the peak gradients and activations, and what is transient; total
    penalty: Array  # degree violations of the strategy (0 for a valid one)
    parts: Parts
    holders: Holders | None


@functools.cache
def program(b: Bucket) -> PlannerProgram:
    """The cost program of a bucket: one for all problems in it."""
    like = Evaluated._make([nothing_yet(b, 0), *[0] * (len(Evaluated._fields) - 1)])
    return PlannerProgram(evaluate, is_urgent=True, name=f"whole {b}", results=like, over=OVER)


class _DoneWith:
    """Results of a bucket that nobody reads any more: the next, of any of its problems, are written over these."""

    def __init__(self) -> None:
        self._kept: list[Over] = []
        self._lock = threading.Lock()

    def add(self, over: Over) -> None:
        with self._lock:
            if len(self._kept) < MOST_KEPT:
                self._kept.append(over)

    def take(self) -> Over | None:
        with self._lock:
            return self._kept.pop() if self._kept else None


@functools.cache
def _done_with(b: Bucket) -> _DoneWith:
    return _DoneWith()


def forget_results() -> None:
    """Frees results that nobody reads any more, up to 250 MB of large problems: nothing is to be planned for now."""
    _done_with.cache_clear()


class _Problem(NamedTuple):
    arrays: CostArrays
    records: Records


class Evaluator:
    """The cost model of one problem."""

    def __init__(self, tables: CostTables, bucket: Bucket | None = None):
        """`bucket` holds the problem; by default the smallest of the usual ones."""
        self.tables, self.bucket = tables, bucket or bucket_for(need_of(tables))
        self._whole = _Problem(*jax.device_put((cost_arrays(tables, self.bucket), records_of(tables, self.bucket))))
        self.arrays, self.records = self._whole
        self.program = program(self.bucket)

    def prepare(self) -> None:
        """Compiles, or loads, what is not there yet."""
        if self.program.is_compiled:
            return  # what it would be compiled for is large
        num_ops = self.tables.space.graph.num_operators
        none = np.full((1, num_ops, len(self.tables.links.axis_sizes)), REPLICATE, np.int8)
        strategies = self._lanes(none, np.zeros((1, num_ops), np.int8))
        self.program.prepare(*self._whole, *strategies, nothing_yet(self.bucket, LANES))

    def __call__(self, axes: Array, storage: Array) -> Evaluated:
        """Of up to LANES strategies int8 [B, N, A] and [B, N]; the last one fills the lanes."""
        return self._found(self._whole, axes, storage)

    def _found(self, of: _Problem, axes: Array, storage: Array) -> Evaluated:
        over = _done_with(self.bucket).take() or nothing_yet(self.bucket, LANES)
        return self.program(*of, *self._lanes(axes, storage), over)

    def take_back(self, of: Evaluated) -> None:
        """Nobody will read what a call found of single records."""
        _done_with(self.bucket).add(of.over)

    def _lanes(self, axes: Array, storage: Array) -> tuple[Array, Array]:
        b, (count, num_ops, num_axes) = self.bucket, axes.shape
        lanes = np.minimum(np.arange(LANES), count - 1)
        padded_axes = np.full((b.operators, MAX_AXES, LANES), REPLICATE, np.int8)
        padded_axes[:num_ops, :num_axes] = axes[lanes].transpose(1, 2, 0)
        padded_storage = np.zeros((b.operators, LANES), np.int8)
        padded_storage[:num_ops] = storage[lanes].T
        return padded_axes, padded_storage

    def costs(self, of: Evaluated, lane: int) -> Costs:
        """All figures of one of the strategies."""
        t, each = self.tables, of.per_record
        num_t, num_e, num_p = len(t.tensor_bytes), len(t.edge_task), len(t.parameter_op)
        previous = _own(each.previous, lane, num_e)
        of_slots = _own(each.layout, lane, t.replicated_slot + 1)

        def of_rows(name: str, count: int | None = None) -> Array:
            return figure_of_rows(each, name, lane)[:count]

        home, raw, resolved = (self._layouts(of_rows(name, num_t)) for name in ("home", "raw", "resolved"))
        found = Layouts(self._layouts(of_slots), home, raw, resolved, previous >= 0, previous)
        parts = Parts(
            reshard_s=self._seconds(of_rows("full_s"))[1], held_bytes=of_rows("held", num_t), copy_bytes=of_rows("copy", num_e),
            transient_bytes=of_rows("transient", num_t), waiting_bytes=of_rows("waiting", num_t),
            stored_bytes=_own(each.state_bytes, lane, num_p), is_sent=of_rows("is_sent", num_e),
        )  # fmt: skip
        return Costs(
            durations=self._durations(of, lane), layouts=found, bytes_by_collective=self._sent(of, lane),
            sent_bytes=np.asarray(of.sent_bytes)[lane], memory_bytes=np.asarray(of.memory_bytes)[:, lane],
            penalty=np.asarray(of.violations)[lane], parts=parts, holders=self._holders(of, lane),
        )  # fmt: skip

    def alone(self, axes: Array, storage: Array) -> Costs:
        """All figures of one strategy int8 [N, A] and [N]."""
        of = self(axes[None], storage[None])
        found = self.costs(of, 0)
        self.take_back(of)
        return found

    def outline(self, of: Evaluated, lane: int) -> Outline:
        """What is read quickly of one of the strategies."""
        stored = self.tables.stored(np.asarray(of.per_record.layout))
        layouts = self._layouts(_own(stored, lane, len(self.tables.parameter_op)))
        return Outline(self._durations(of, lane), layouts, self._sent(of, lane), self._holders(of, lane))

    def _sent(self, of: Evaluated, lane: int) -> Array:
        """Bytes [6] by collective."""
        each = of.per_record
        tensors, reshards, sums = self._by_kind(figure_of_rows(each, "sent", lane))
        pays = _own(each.previous, lane, len(reshards)) < 0
        return np.concatenate([tensors, reshards[pays], sums]).sum(axis=0, dtype=np.float64)

    def _layouts(self, sets: Array) -> Array:
        return decoded(sets, len(self.tables.links.axis_sizes), self.bucket.dims)

    def _durations(self, of: Evaluated, lane: int) -> Durations:
        each = of.per_record
        return Durations(_own(each.compute_s, lane, self.tables.num_tasks), *self._seconds(np.asarray(each.paid_s)[..., lane]))

    def _seconds(self, seconds: Array) -> list[Array]:
        """Of the topology's own levels, by kinds of rows."""
        missing = self.bucket.levels - self.tables.links.num_levels
        return [x[:, missing:] for x in self._by_kind(seconds)]

    def _by_kind(self, figures: Array) -> list[Array]:
        """Of tensors, reshards, and collectives inside tasks: copies, since what they are of may be written over."""
        t = self.tables
        ends = np.cumsum([len(t.tensor_bytes), len(t.edge_task), len(t.sum_task)])
        return np.split(np.array(figures[: ends[-1]]), ends[:-1])

    def _holders(self, of: Evaluated, lane: int) -> Holders | None:
        t, each = self.tables, of.per_record
        if not self.bucket.groups:
            return None
        groups = len(t.space.groups)
        (resolve, reshard, add), kept = (
            [x[:, :groups] for x in self._by_kind(figure_of_rows(each, name, lane))] for name in ("on", "on_kept")
        )  # fmt: skip
        compute = _own(each.on_compute, lane, t.num_tasks)[:, :groups]
        stored = _own(each.on_stored, lane, len(t.parameter_op))[:, :groups]
        return Holders(compute=compute, resolve=resolve, reshard=reshard, sum=add, home=kept[0], copy=kept[1], stored=stored)

    @functools.cached_property
    def _alone(self) -> _Problem:
        """The problem without tensors and reshards, so that of the rows the collectives inside tasks are left."""
        first, count = len(self.tables.tensor_bytes) + len(self.tables.edge_task), len(self.tables.sum_task)
        counts, row = np.array(self.arrays.counts), np.array(self.records.row)
        counts[3:6], row[:count] = (0, 0, count), row[first : first + count]
        return _Problem(*jax.device_put((self.arrays._replace(counts=counts), self.records._replace(row=row))))

    def by_operator(self, axes: Array, storage: Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What depends on one operator, of up to LANES strategies: slots' layouts int8 [B, U, A], seconds [B, K] and [B, S, L]."""
        t, b, count = self.tables, self.bucket, len(axes)
        of = self._found(self._alone, axes, storage)
        each, lanes = of.per_record, slice(count)
        of_lanes = (
            _own(each.layout, lanes, t.replicated_slot + 1), _own(each.compute_s, lanes, t.num_tasks),
            _own(each.paid_s, lanes, len(t.sum_task)),
        )  # fmt: skip
        self.take_back(of)
        sets, compute_s, sums_s = (np.moveaxis(x, -1, 0) for x in of_lanes)
        return decoded(sets, len(t.links.axis_sizes), b.dims), compute_s, sums_s[..., b.levels - t.links.num_levels :]


def figure_of_rows(each: PerRecord, name: str, lane: int) -> Array:
    """One of the figures `Rows` of all rows of one strategy, each row's in its own place: a copy."""
    figures, at = getattr(each.rows, name), getattr(standing(each.equal), name)
    return np.asarray(figures)[..., lane][np.asarray(at)]


def _own(x: Any, lane: int | slice, count: int) -> Array:
    """The first `count` of a lane, or of some: a copy, since what it is of may be written over."""
    return np.array(np.asarray(x)[:count, ..., lane])


def costs_of(tables: CostTables, axes: Array, storage: Array) -> Costs:
    """All figures of one strategy int8 [N, A] and [N]."""
    return Evaluator(tables).alone(axes, storage)


class Lifespans(NamedTuple):
    """Tasks from which on, and until which, something is alive, both included."""

    tensors: np.ndarray  # int [V]: those that are counted
    since: np.ndarray  # int32 [V]
    until: Array  # int32 [V]; gradients that wait to be summed in one collective wait beside this (`waiting_spans`)
    copy_since: Array  # int32 [E]: of resharded copies
    copy_until: np.ndarray  # int32 [E]


def lifespans(tables: CostTables, found: Layouts, sent: Array) -> Lifespans:
    """Of tensors and copies under a strategy."""
    birth, death, read_at, made_at, at_least = tables.order
    alive = np.flatnonzero(death >= 0)
    needed = np.where(sent, np.where(found.shared_with >= 0, -1, made_at), read_at)
    last = np.full(len(death), -1, np.int32)
    np.maximum.at(last, tables.edge_tensor, needed)
    until = np.clip(last, at_least, death)
    task = np.minimum(read_at, tables.num_tasks - 1)
    made, handed_on = np.minimum(made_at, task), tables.edge_handed_on[found.shared_with]
    has_it = (handed_on > task) & (made[found.shared_with] <= task)  # as `held_since` in peak_memory.py
    copy_since = np.where(found.is_shared, np.where(has_it, task + 1, np.minimum(handed_on, task)), made)
    return Lifespans(alive, birth[alive], np.where(tables.working.waits, birth, until)[alive], copy_since, task)


