"""The terms of the additive relaxation: every duration as a table over the candidates of one operator or of two.

See relaxed.py for what they are and what they leave out.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from soapjax.costs.tables.arrays import distinct
from soapjax.costs.tables.problem_tables import CostTables
from soapjax.search.relaxation.own_rows import OwnRows, layout_names
from soapjax.search.relaxation.sharing import Twins, sharing_of
from soapjax.strategy.layout import PARTIAL, REPLICATED


class Term(NamedTuple):
    """One duration as a function of the candidates of one operator or two; U distinct rows per side, L link levels."""

    kind: str  # the field of Durations
    place: int
    a: int  # operator
    b: int  # second operator, or -1
    seconds: np.ndarray  # float32 [Ua, Ub, L] (L = 1 for compute)
    of_a: np.ndarray  # int32 [Ka]: row by candidate
    of_b: np.ndarray  # int32 [Kb]; [0] without b
    payers: tuple[int, ...] = ()  # reshards that may have paid for this one, itself included


def home_layout(raw: np.ndarray, reader: np.ndarray, shape: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Layouts [..., A] as tensors are kept: partial sums scattered as the first reader wants them, where that divides."""
    num_axes = len(sizes)
    out_of_order = np.stack([(raw[..., a + 1 :] == reader[..., a : a + 1]).any(-1) for a in range(num_axes)], axis=-1)
    scattered = np.where((raw == PARTIAL) & (reader >= 0) & ~out_of_order, reader, raw)
    fits = np.ones(scattered.shape[:-1], bool)
    for d, size in enumerate(shape):
        fits &= size % np.where(scattered == d, sizes, 1).prod(-1) == 0
    home = np.where(fits[..., None], scattered, raw)
    return np.where(home == PARTIAL, np.int8(REPLICATED), home)


class Picked(NamedTuple):
    """Layouts that occur, and which of them each of n combinations of candidates has."""

    rows: np.ndarray  # int8 [D, A], distinct
    of: np.ndarray  # int [n]


def picked(rows: np.ndarray, of: np.ndarray) -> Picked:
    distinct, index = distinct_layouts(rows)
    return Picked(distinct, index[of])


def distinct_layouts(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows of layouts [n, A], and which one each row is."""
    _, first, index = np.unique(layout_names(rows), return_index=True, return_inverse=True)
    return rows[first], index


def _least(
    reshard_s: Callable[[np.ndarray, np.ndarray], np.ndarray], raw: Picked, homes: np.ndarray, reader: np.ndarray | None,
    wanted: Picked | None, *, is_summand: bool,
) -> np.ndarray:  # fmt: skip
    """Seconds [n, L] of a change of layout, each pair of layouts that is asked for priced once.

    Args:
      reshard_s: (from layouts int8 [m, A], to layouts [m, A]) -> seconds [m, L].
      homes: int8 [D, R, A], where a tensor made as `raw.rows[d]` is kept for the sake of reader r.
      reader: int [n], which r it is; None takes the one that makes the change cheapest.
      wanted: what it is resharded to; None asks for its resolution, from `raw` to its home.
    """
    if wanted is None:
        made = np.broadcast_to(raw.rows[:, None], homes.shape).reshape(-1, homes.shape[2])
        goal = np.where(made == PARTIAL, homes.reshape(made.shape), made)
        table = reshard_s(made, goal).reshape(*homes.shape[:2], -1)  # by raw and reader
        return table.min(axis=1)[raw.of] if reader is None else table[raw.of, reader]
    kept, home_of = distinct_layouts(homes.reshape(-1, homes.shape[2]))
    home_of = home_of.reshape(homes.shape[:2])
    if reader is not None:
        ways = [home_of[raw.of, reader]]
    else:
        ways = [way[raw.of] for way in {way.tobytes(): way for way in home_of.T}.values()]  # of readers that differ
    pairs = [way * len(wanted.rows) + wanted.of for way in ways]
    is_asked = np.zeros(len(kept) * len(wanted.rows), bool)
    for pair in pairs:
        is_asked[pair] = True
    of_home, of_wanted = np.divmod(np.flatnonzero(is_asked), len(wanted.rows))
    home, target = kept[of_home], wanted.rows[of_wanted]
    # What stays a partial sum is no change; a whole summand is masked.
    unchanged = np.where(home == PARTIAL, home, np.int8(REPLICATED)) if is_summand else home
    seconds = reshard_s(home, np.where(target == PARTIAL, unchanged, target))
    place = np.cumsum(is_asked) - 1
    return functools.reduce(np.minimum, (seconds[place[pair]] for pair in pairs))


Rows = tuple[int, np.ndarray]  # an operator, or -1, and what there is of each of its candidates [K, n]


class _Change(NamedTuple):
    """A change of layout, and what its seconds follow from."""

    tensor: int
    is_resolution: bool
    is_summand: bool
    ingredients: dict[str, Rows]
    operators: list[int]  # one or two that decide it
    others: np.ndarray | None  # int8 [R, A]: as unrelated first readers may want it, over which it is minimised
    is_joint: bool
    may_wait: np.ndarray | None  # int8 [R, A]: layouts of the last product, where its operator is none of the two
    size: float
    share: float
    times: float
    twins: Twins | None

    @property
    def is_partial(self) -> bool:
        """Whether it may be a partial sum that is not left apart."""
        return "first" in self.ingredients


class _Terms:
    """The terms found so far; equal tables are one array."""

    def __init__(self, tables: CostTables, rows: OwnRows, deadline: float):
        self.tables, self.rows, self.deadline = tables, rows, deadline
        self.sizes = np.array(tables.links.axis_sizes)
        self.made: dict[object, np.ndarray] = {}
        self.distinct: dict[object, tuple[np.ndarray, np.ndarray]] = {}
        self.found: list[Term] = []

    def unique(self, parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Distinct rows of arrays side by side, and which row each candidate has; equal inputs give the same arrays."""
        joined = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
        key = (joined.shape, joined.tobytes())
        if key not in self.distinct:
            first, index = distinct(joined)
            self.distinct[key] = (joined[first], index.astype(np.int32))
        return self.distinct[key]

    def alone(self, kind: str, index: int, n: int, seconds: np.ndarray) -> None:
        """A duration [K, L] that operator `n` decides."""
        values, of_a = self.unique([np.ascontiguousarray(seconds, np.float32)])
        self.found.append(Term(
            kind=kind, place=index, a=n, b=-1, seconds=values[:, None, :], of_a=of_a, of_b=np.zeros(1, np.int32),
        ))  # fmt: skip

    def of_change(
        self, kind: str, index: int, t: int, target: int | None, made: Rows, *, size: float, share: float, times: float,
        sharing=None, payers=(),
    ) -> None:  # fmt: skip
        """A change of layout: from the tensor's home (raw layout for a resolution) to slot `target` (home); `made` is the raw one.

        A summand of a gradient is resolved to the slot that all of them share, where it may stay a partial sum. A product of
        a joint sum costs nothing where it waits for the last one; its reader does not know whether it does, only whether it can.
        """
        change = self._change(t, target, made, sharing, size=size, share=share, times=times)
        if not change.operators:
            return
        a, b = change.operators[0], change.operators[1] if len(change.operators) > 1 else -1
        sides: tuple[list[str], list[str]] = ([], [])
        for name, (n, _) in change.ingredients.items():
            if n in (a, b) and not (change.others is not None and name == "first"):
                sides[n != a].append(name)
        keys = [self.unique([change.ingredients[name][1].astype(np.int16) for name in side]) if side else None for side in sides]
        signature = self._signature(kind, change, sides, keys)
        if signature not in self.made:
            if time.monotonic() > self.deadline:
                raise TimeoutError("the relaxation was not done in time")
            self.made[signature] = self._seconds(change, sides, keys)
        seconds = self.made[signature]
        if seconds.any():
            of = [np.zeros(1, np.int32) if k is None else k[1] for k in keys]
            if keys[0] is None:
                of[0] = np.zeros(self.rows.counts[a], np.int32)
            self.found.append(Term(kind=kind, place=index, a=a, b=b, seconds=seconds, of_a=of[0], of_b=of[1], payers=payers))

    def _change(
        self, t: int, target: int | None, made: Rows, sharing: tuple[Rows, Twins] | None, *, size: float, share: float, times: float
    ) -> _Change:  # fmt: skip
        tables, rows = self.tables, self.rows
        is_summand = tables.tensor_sum[t] >= 0 and not tables.is_joint[t]
        p, raw = made
        is_partial = tables.may_be_partial[t] and not is_summand and (raw == PARTIAL).any()
        q, first = rows.slot(int(tables.tensor_reader[t])) if is_partial else (-1, raw[:1])
        r, wanted = rows.slot(target) if target is not None else (q, first)
        last = rows.slot(int(tables.tensor_sum[t])) if tables.is_joint[t] else None
        may_wait = twins = None
        ingredients = {"raw": (p, raw), "wanted": (r, wanted)}
        if is_partial:
            ingredients["first"] = (q, first)
        if sharing:
            ingredients["again"], twins = sharing
            ingredients["equal"] = (r, twins.equal)
            ingredients["sharers"] = (r, twins.sharers)
        if last is not None and (target is None or last[0] in (p, r)):
            ingredients["last"] = last
            r = last[0] if target is None else r
        elif last is not None:
            may_wait = distinct_layouts(last[1])[0]
        operators = [n for n in dict.fromkeys((p, r)) if n >= 0]
        is_unrelated = is_partial and q >= 0 and q not in (p, r)
        others = distinct_layouts(first)[0] if is_unrelated else None
        return _Change(
            tensor=t, is_resolution=target is None, is_summand=bool(is_summand), ingredients=ingredients, operators=operators,
            others=others, is_joint=last is not None, may_wait=may_wait, size=size, share=share, times=times, twins=twins,
        )  # fmt: skip

    def _signature(self, kind: str, change: _Change, sides: tuple[list[str], list[str]], keys: list) -> tuple[object, ...]:
        """Of all that the seconds follow from."""
        constants = tuple((name, x.tobytes()) for name, (n, x) in change.ingredients.items() if n < 0)
        return (
            kind, tuple(sides[0]), tuple(sides[1]), *((None if k is None else (k[0].shape, k[0].tobytes())) for k in keys),
            constants, b"" if change.others is None else change.others.tobytes(), self.tables.tensor_shape[change.tensor].tobytes(),
            float(change.size), float(change.share), float(change.times), () if change.twins is None else change.twins.crosses,
            change.is_summand, change.is_joint, b"" if change.may_wait is None else change.may_wait.tobytes(),
        )  # fmt: skip

    def _seconds(self, change: _Change, sides: tuple[list[str], list[str]], keys: list) -> np.ndarray:
        """float32 [Ua, Ub, L]."""
        counts = [1 if k is None else len(k[0]) for k in keys]
        at = np.indices(counts).reshape(2, -1)
        found = {name: (x[:1], np.zeros(at.shape[1], np.int64)) for name, (_, x) in change.ingredients.items()}
        for side, key, index in zip(sides, keys, at, strict=True):
            start = 0
            for name in side:
                width = change.ingredients[name][1].shape[1]
                found[name] = (key[0][:, start : start + width], index)
                start += width
        made_as, asked_for = picked(*found["raw"]), picked(*found["wanted"])
        shape = self.tables.tensor_shape[change.tensor]
        if change.is_partial:
            readers, reader = picked(*found["first"]) if change.others is None else (change.others, None)
            homes = home_layout(made_as.rows[:, None], readers[None], shape, self.sizes)  # [raw, reader, A]
        else:
            homes, reader = made_as.rows[:, None], np.zeros(at.shape[1], np.int64)

        def reshard_s(source: np.ndarray, goal: np.ndarray) -> np.ndarray:
            return self.rows.reshard_s(source, goal, change.size, change.share, shape)

        wanted = None if change.is_resolution else asked_for
        best = _least(reshard_s, made_as, homes, reader, wanted, is_summand=change.is_summand)
        if change.is_joint:
            best = np.where(_waits(found, change.may_wait)[:, None], 0.0, best)
        if change.twins is not None:
            again, equal, sharers = (x[of] for x, of in (found[name] for name in ("again", "equal", "sharers")))
            best = best * change.twins.charged(again[:, 0], equal.astype(bool), sharers)[:, None]
        return (best * change.times).astype(np.float32).reshape(*counts, -1)


def _waits(found: dict[str, tuple[np.ndarray, np.ndarray]], may_wait: np.ndarray | None) -> np.ndarray:
    """bool [n]: whether a product of a joint sum waits for the last one: a partial sum in its layout."""
    made, of = found["raw"]
    if may_wait is None:
        last, of_last = found["last"]
        waits = (made[of] == last[of_last]).all(-1)
    else:
        waits = np.isin(layout_names(made), layout_names(may_wait))[of]
    return waits & (made == PARTIAL).any(-1)[of]


def terms_of(tables: CostTables, rows: OwnRows, deadline: float = math.inf) -> list[Term]:
    """All terms.

    Raises: TimeoutError where they were not done by `deadline`, of `time.monotonic`.
    """
    terms = _Terms(tables, rows, deadline)
    for k, n in enumerate(tables.task_op):
        terms.alone("compute_s", k, int(n), rows.compute_s[rows.index[n], k : k + 1])
    for s, k in enumerate(tables.sum_task):
        n = int(tables.task_op[k])
        terms.alone("sum_s", s, n, rows.sum_s[rows.index[n], s])
    for t in np.flatnonzero(tables.may_be_partial & (tables.tensor_trips > 0)):
        common = int(tables.tensor_sum[t]) if tables.tensor_sum[t] >= 0 and not tables.is_joint[t] else None
        figures = {"size": tables.resolve_bytes[t], "share": tables.resolve_share[t], "times": tables.tensor_trips[t]}
        terms.of_change("resolve_s", int(t), int(t), common, rows.raw(int(t)), **figures)
    shared = sharing_of(tables, rows)
    for e, t in enumerate(tables.edge_tensor):
        sharing, payers, size, times = shared.get(e, (None, (), tables.edge_bytes[e], tables.edge_trips[e]))
        figures = {"size": size, "share": min((tables.edge_share[x] for x in payers), default=tables.edge_share[e]), "times": times}
        terms.of_change("reshard_s", e, int(t), int(tables.edge_slot[e]), rows.source(e), sharing=sharing, payers=payers, **figures)
    return terms.found
