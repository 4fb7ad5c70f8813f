"""The terms of the additive relaxation: every duration as a table over the candidates of one operator or of two.

See relaxation.py for what they are and what they leave out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soapjax.costs.tables import CostTables
from soapjax.search.own_rows import OwnRows
from soapjax.search.sharing import sharing_of
from soapjax.strategy.layout import PARTIAL, REPLICATED


class Term(NamedTuple):
    """One duration as a function of the candidates of one operator or two; U distinct rows per side, L link levels."""

    kind: str  # the field of Durations
    index: int
    a: int  # operator
    b: int  # second operator, or -1
    seconds: np.ndarray  # float32 [Ua, Ub, L] (L = 1 for compute)
    of_a: np.ndarray  # int32 [Ka]: row by candidate
    of_b: np.ndarray  # int32 [Kb]; [0] without b
    payers: tuple[int, ...] = ()  # conversions that may have paid for this one, itself included


def home_layout(raw: np.ndarray, reader: np.ndarray, shape: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Layouts [..., A] as tensors are kept: partial sums scattered as the first reader wants them, where that divides."""
    num_axes = len(sizes)
    out_of_order = np.stack([(raw[..., a + 1 :] == reader[..., a : a + 1]).any(-1) for a in range(num_axes)], axis=-1)
    scattered = np.where((raw == PARTIAL) & (reader >= 0) & ~out_of_order, reader, raw)
    fits = np.ones(raw.shape[:-1], bool)
    for d, size in enumerate(shape):
        fits &= size % np.where(scattered == d, sizes, 1).prod(-1) == 0
    home = np.where(fits[..., None], scattered, raw)
    return np.where(home == PARTIAL, np.int8(REPLICATED), home)


def terms_of(tables: CostTables, rows: OwnRows) -> list[Term]:
    sizes = np.array(tables.links.axis_sizes)
    made: dict[object, np.ndarray] = {}
    distinct: dict[object, tuple[np.ndarray, np.ndarray]] = {}
    terms: list[Term] = []

    def unique(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Distinct rows of arrays side by side, and which row each candidate has; equal inputs give the same arrays."""
        joined = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
        key = (joined.shape, joined.tobytes())
        if key not in distinct:
            packed = np.ascontiguousarray(joined).view(np.dtype((np.void, joined.shape[1] * joined.itemsize))).reshape(-1)
            _, first, index = np.unique(packed, return_index=True, return_inverse=True)
            distinct[key] = (joined[first], index.astype(np.int32))
        return distinct[key]

    def alone(kind: str, index: int, n: int, seconds: np.ndarray) -> None:
        values, of_a = unique([np.ascontiguousarray(seconds, np.float32)])
        terms.append(Term(kind, index, n, -1, values[:, None, :], of_a, np.zeros(1, np.int32)))

    for k, n in enumerate(tables.task_op):
        alone("compute_s", k, int(n), rows.compute_s[rows.index[n], k : k + 1])
    for s, k in enumerate(tables.sum_task):
        n = int(tables.task_op[k])
        alone("sum_s", s, n, rows.sum_s[rows.index[n], s])

    def term(
        kind: str, index: int, t: int, target: int | None, *, size: float, share: float, times: float, sharing=None, payers=()
    ) -> None:  # fmt: skip
        """A change of layout: from the tensor's home (raw layout for a resolution) to slot `target` (home).

        A summand of a gradient is resolved to the slot that all of them share, where it may stay a partial sum.
        """
        is_summand = tables.tensor_sum[t] >= 0
        p, raw = rows.raw(t)
        is_partial = tables.may_be_partial[t] and not is_summand and (raw == PARTIAL).any()
        q, first = rows.slot(int(tables.tensor_reader[t])) if is_partial else (-1, raw[:1])
        r, wanted = rows.slot(target) if target is not None else (q, first)
        again_of, twins = sharing if sharing else ((), [])
        # Ingredients: name -> (operator, rows). An unrelated first reader is minimised over.
        ingredients = {"raw": (p, raw), "wanted": (r, wanted)}
        if is_partial:
            ingredients["first"] = (q, first)
        if sharing:
            ingredients["again"] = again_of
            ingredients["equal"] = (r, twins.equal)
            ingredients["sharers"] = (r, twins.sharers)
        third = is_partial and q >= 0 and q not in (p, r)
        operators = [n for n in dict.fromkeys((p, r)) if n >= 0]
        if not operators:
            return
        a, b = operators[0], operators[1] if len(operators) > 1 else -1
        sides: tuple[list[str], list[str]] = ([], [])
        for name, (n, x) in ingredients.items():
            if n in (a, b) and not (third and name == "first"):
                sides[n != a].append(name)
        keys = [unique([ingredients[name][1].astype(np.int16) for name in side]) if side else None for side in sides]
        constants = tuple((name, x.tobytes()) for name, (n, x) in ingredients.items() if n < 0)
        others = np.unique(first, axis=0) if third else first[:1]
        shape = tables.tensor_shape[t]
        signature = (
            kind, tuple(sides[0]), tuple(sides[1]), *((None if k is None else (k[0].shape, k[0].tobytes())) for k in keys),
            constants, others.tobytes() if third else b"", shape.tobytes(), float(size), float(share), float(times),
            twins.crosses if sharing else (), is_summand,
        )  # fmt: skip
        if signature not in made:
            counts = [1 if k is None else len(k[0]) for k in keys]
            at = np.indices(counts).reshape(2, -1)
            values = {}
            for name, (n, x) in ingredients.items():
                values[name] = np.broadcast_to(x[:1], (at.shape[1], x.shape[1]))
            for side, key, index_ in zip(sides, keys, at, strict=True):
                start = 0
                for name in side:
                    width = ingredients[name][1].shape[1]
                    values[name] = key[0][index_, start : start + width]
                    start += width
            best = None
            for other in others if third else [None]:
                reader = np.broadcast_to(other, values["raw"].shape) if third else values.get("first", values["wanted"])
                home = home_layout(values["raw"], reader, shape, sizes) if is_partial else values["raw"]
                if target is None:
                    found = rows.convert(values["raw"], np.where(values["raw"] == PARTIAL, home, values["raw"]), size, share, shape)
                else:
                    wanted = values["wanted"]
                    if is_summand:
                        goal = np.where((wanted == PARTIAL) & (home != PARTIAL), np.int8(REPLICATED), wanted)
                    else:
                        goal = np.where(wanted == PARTIAL, home, wanted)
                    found = rows.convert(home, goal, size, share, shape)
                best = found if best is None else np.minimum(best, found)
            if sharing:
                best = best * twins.charged(values["again"][:, 0], values["equal"].astype(bool), values["sharers"])[:, None]
            made[signature] = (best * times).astype(np.float32).reshape(*counts, -1)
        seconds = made[signature]
        if seconds.any():
            zero = np.zeros(1, np.int32)
            of = [zero if k is None else k[1] for k in keys]
            if keys[0] is None:
                of[0] = np.zeros(rows.counts[a], np.int32)
            terms.append(Term(kind, index, a, b, seconds, of[0], of[1], payers))

    for t in np.flatnonzero(tables.may_be_partial & (tables.tensor_trips > 0)):
        common = int(tables.tensor_sum[t]) if tables.tensor_sum[t] >= 0 else None
        figures = {"size": tables.resolve_bytes[t], "share": tables.resolve_share[t], "times": tables.tensor_trips[t]}
        term("resolve_s", int(t), int(t), common, **figures)
    shared = sharing_of(tables, rows)
    for e, t in enumerate(tables.edge_tensor):
        sharing, payers, size, times = shared.get(e, (None, (), tables.edge_bytes[e], tables.edge_trips[e]))
        share = min((tables.edge_share[x] for x in payers), default=tables.edge_share[e])
        term("convert_s", e, int(t), int(tables.edge_slot[e]), size=size, share=share, times=times, sharing=sharing, payers=payers)
    return terms
