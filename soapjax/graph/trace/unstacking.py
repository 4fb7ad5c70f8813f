"""Stacked values taken apart into their rows: an unrolled loop over layers becomes what one writes without a loop.

A scan over layers has the weights of all of them in one array, a row per layer. Unrolled, every layer still reads a slice of that
array, its gradient is put together of all layers' gradients, and one update moves all. Here each row becomes a value of its own:

    w [4, n, m]                                      w0, w1, w2, w3 [n, m]
    a = slice(w, 2)                                  a = w2
    g = stack(g0, g1, g2, g3)           ->
    u = w - 0.1 * g                                  u0 = w0 - 0.1 * g0, u1 = ...

so that a layer can be placed, sharded and updated apart from the others. Values are taken apart together: those that equations tie
row by row are one group, and a group stays as it is where something reads all of it at once in a way that is not known here.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from soapjax.graph.trace.trips import Trip
from soapjax.graph.trace.union_find import UnionFind

_FOLDED = {
    "reduce_sum": jax.lax.add, "reduce_max": jax.lax.max, "reduce_min": jax.lax.min, "reduce_and": jax.lax.bitwise_and,
    "reduce_or": jax.lax.bitwise_or,
}  # fmt: skip
_SHARDINGS = "sharding", "out_sharding"  # parameters of some primitives: of a result, which loses its leading dim
Record = dict[str, Any]  # an equation before it has an address (program.py)
Traced = Callable[[Callable[..., Any], list[Any], str, list[Record]], list[Any]]


class Unstacked(NamedTuple):
    """A program whose stacked state is given row by row; where nothing is taken apart, every leaf is its own one row."""

    records: list[Record]
    inputs: list[tuple[int, ...]]  # of every input leaf
    outputs: list[tuple[Any, ...]]  # of every output leaf


class _RowWise(NamedTuple):
    """An equation that does the same to every row of some operands, and makes rows (or, of `folds`, one value of all rows)."""

    params: dict[str, Any]  # for one row
    length: int
    has_rows: tuple[bool, ...]  # by operand, whether every row has its own; the others are read whole
    folds: Callable[..., Any] | None = None


class Unstacking:
    """Takes state apart that is read row by row.

    Args:
      records: equations in order, loops unrolled.
      state: input leaf -> the output leaf that it becomes: what may be taken apart.
      avals: of every value; those of new values are added.
      elementwise: names of primitives whose operands have the shape of the result, or none.
      traced: appends the equations of a small function of atoms to a list of records (`_Flattener`).
    """

    def __init__(
        self, records: list[Record], inputs: Sequence[int], outputs: Sequence[Any], state: Mapping[int, int], *,
        avals: dict[int, Any], elementwise: Container[str], traced: Traced,
    ):  # fmt: skip
        self.records, self.inputs, self.outputs, self.state = records, inputs, outputs, state
        self.avals, self.elementwise, self.traced = avals, elementwise, traced
        self.may_be_apart = {inputs[k] for k in state}
        self.rows: dict[int, list[Any]] = {}  # of every value that was taken apart
        self.unit: dict[int, Any] = {}  # value [1, ...] -> the row that it is
        self.same: dict[int, Any] = {}  # value -> the row that stands for it
        self.zeros: set[int] = set()  # values that are known to be
        self.out: list[Record] = []
        self._marked: collections.Counter[tuple[int, int]] = collections.Counter()  # by record and row

    def run(self) -> Unstacked:
        self.taken = self._groups()
        inputs: list[tuple[int, ...]] = []
        for v in self.inputs:
            if v in self.taken and v in self.may_be_apart:
                self.rows[v] = [self._fresh(self._row_aval(v)) for _ in range(self._length(v))]
            inputs.append(tuple(self.rows.get(v, [v])))
        for self._at, r in enumerate(self.records):
            if "const" in r:
                self.out.append(r)
            else:
                self._rewrite(dict(r, inputs=tuple(self._atom(a) for a in r["inputs"])))
        of_state = {o: self.inputs[k] for k, o in self.state.items()}
        outputs = [self._output(o, of_state.get(k)) for k, o in enumerate(self.outputs)]
        return Unstacked(self.out, inputs, outputs)

    # Which values.

    def _groups(self) -> set[int]:
        """Values whose group has state that is read row by row, or consists of stacks that are; nothing reads it whole."""
        groups, tied_values = UnionFind(), set[int]()
        read_rows: dict[int, set[int]] = {}
        whole: set[int] = set()  # what is read, or computed, in a way that is not row by row
        made_of_rows: set[int] = set()
        for r in (r for r in self.records if "const" not in r):
            if self._stacked(r) is not None or self._padded(r) is not None:
                made_of_rows.update(r["outputs"])
            elif (at := self._row_read(r)) is not None:
                read_rows.setdefault(r["inputs"][0], set()).add(at)
            elif (tied := self._tied(r)) is None:
                whole.update(_values(r["inputs"]), r["outputs"] if _values(r["inputs"]) else ())
            else:
                made_of_rows.update(r["outputs"])
                whole.update(set(_values(r["inputs"])) - {a for pair in tied for a in pair})
                for a, b in tied:
                    groups.union(a, b)
                    tied_values |= {a, b}
        members: dict[Any, set[int]] = {}
        for v in tied_values | read_rows.keys():
            members.setdefault(groups.find(v), set()).add(v)
        taken: set[int] = set()
        for group in members.values():
            length = self._length(next(iter(group)))
            reads = set().union(*(read_rows.get(v, ()) for v in group))
            is_worth_it = bool(group & self.may_be_apart) or group <= made_of_rows
            if length > 1 and reads == set(range(length)) and is_worth_it and not group & whole:
                taken |= group
        return taken

    def _tied(self, r: Record) -> list[tuple[int, int]] | None:
        """Pairs of values that an equation ties row by row; None where it does not work by rows."""
        if r["primitive"].name == "optimization_barrier":
            return [(a, o) for a, o in zip(r["inputs"], r["outputs"], strict=True) if isinstance(a, int)]
        found = self._row_wise(r)
        if found is None:
            return None
        mine = [a for a, own in zip(r["inputs"], found.has_rows, strict=True) if own and isinstance(a, int)]
        mine += () if found.folds is not None else r["outputs"]
        return [(mine[0], a) for a in mine]

    def _stacked(self, r: Record) -> list[Any] | None:
        """The operands of an equation that stacks them: each a row, or [1, row]."""
        if r["primitive"].name == "stack" and r["params"].get("axis") == 0:
            return list(r["inputs"])
        if r["primitive"].name == "concatenate" and r["params"]["dimension"] == 0 and len(r["inputs"]) > 1:
            return list(r["inputs"]) if all(self._length(a) == 1 for a in r["inputs"]) else None
        return None

    def _padded(self, r: Record) -> int | None:
        """Of an equation that puts one row among rows of zeros (the gradient of reading it) which one it is."""
        if r["primitive"].name != "pad" or self._length(r["inputs"][0]) != 1:
            return None
        (low, high, inner), *others = (tuple(map(int, dim)) for dim in r["params"]["padding_config"])
        is_row = _is_zero(r["inputs"][1]) and not any(map(any, others))
        return low if is_row and low >= 0 and high >= 0 and not inner else None

    def _row_read(self, r: Record) -> int | None:
        """The row that an equation takes out of its operand."""
        if r["primitive"].name != "slice" or not isinstance(r["inputs"][0], int) or r["params"]["strides"] is not None:
            return None
        start, limit, shape = r["params"]["start_indices"], r["params"]["limit_indices"], self._shape(r["inputs"][0])
        is_row = limit[0] - start[0] == 1 and not any(start[1:]) and tuple(limit[1:]) == shape[1:]
        return start[0] if is_row and shape[0] > 1 else None

    def _row_wise(self, r: Record) -> _RowWise | None:
        """What an equation does to every row; None where rows mix, or where it is not known."""
        name, p, shapes = r["primitive"].name, r["params"], [self._shape(a) for a in r["inputs"]]
        out = self._shape(r["outputs"][0]) if len(r["outputs"]) == 1 else ()
        first = shapes[0] if shapes else ()
        if r["body"] is not None or r["effects"] or any(_is_split(p.get(k)) for k in _SHARDINGS):
            return None
        p = {k: None if k in _SHARDINGS else v for k, v in p.items()}
        if name in _FOLDED and len(first) and first[0] > 1:
            inner = dict(p, axes=tuple(d - 1 for d in p["axes"] if d > 0))
            return _RowWise(inner, first[0], (True,), _FOLDED[name] if 0 in p["axes"] else None)
        length = out[0] if out else 0
        if length < 2:
            return None
        if name in self.elementwise:
            fits = all(not s or (len(s) == len(out) and s[0] in (1, length)) for s in shapes)
            return _RowWise(p, length, tuple(s[:1] == (length,) for s in shapes)) if fits else None
        if len(shapes) != 1:
            return None
        if name == "broadcast_in_dim":
            dims = p["broadcast_dimensions"]
            inner = dict(p, shape=tuple(p["shape"][1:]), broadcast_dimensions=tuple(d - 1 for d in dims if d > 0))
            return _RowWise(inner, length, (0 in dims and first[0] == length,))
        if first[:1] != (length,):
            return None
        if name == "reshape" and p.get("dimensions") is None:
            return _RowWise(dict(p, new_sizes=tuple(p["new_sizes"][1:])), length, (True,))
        if name == "transpose" and p["permutation"][0] == 0:
            return _RowWise(dict(p, permutation=tuple(d - 1 for d in p["permutation"][1:])), length, (True,))
        if name == "squeeze" and 0 not in p["dimensions"]:
            return _RowWise(dict(p, dimensions=tuple(d - 1 for d in p["dimensions"])), length, (True,))
        return None

    # What becomes of them.

    def _rewrite(self, r: Record) -> None:
        name, outputs, read = r["primitive"].name, r["outputs"], _values(r["inputs"])
        if (stacked := self._stacked(r)) is not None and outputs[0] in self.taken:
            self.rows[outputs[0]] = stacked if name == "stack" else [self._first(a, r, t) for t, a in enumerate(stacked)]
        elif (at := self._padded(r)) is not None and outputs[0] in self.taken:
            (zeros,) = self._trace(lambda x: jax.numpy.zeros_like(x[0]), [r["inputs"][0]], r)
            self.zeros.update(_values([zeros]))
            self.rows[outputs[0]] = [zeros] * self._length(outputs[0])
            self.rows[outputs[0]][at] = self._first(r["inputs"][0], r)
        elif (at := self._row_read(r)) is not None and read[0] in self.rows:
            self._read_row(r, self.rows[read[0]][at])
        elif name in ("squeeze", "reshape") and read and read[0] in self.unit and self._is_row(outputs[0], read[0]):
            self.same[outputs[0]] = self.unit[read[0]]
        elif name == "optimization_barrier" and any(a in self.rows for a in read):
            self._barrier(r)
        elif self._has_rows(read, outputs) and (found := self._row_wise(r)) is not None:
            self._by_row(r, found)
        elif name == "add_any" and (rest := self._without_zeros(r["inputs"], self._aval(outputs[0]))) is not None:
            self.same[outputs[0]] = rest  # what all layers add to starts as zeros
        else:
            if name == "broadcast_in_dim" and _is_zero(r["inputs"][0]):
                self.zeros.update(outputs)
            self.out.append(r)

    def _read_row(self, r: Record, row: Any) -> None:
        """A row as what a slice makes of it, [1, row], for readers that want it so."""
        (o,), shape = r["outputs"], self._shape(row)
        self.unit[o] = row
        params = dict(shape=(1, *shape), broadcast_dimensions=tuple(range(1, len(shape) + 1)), sharding=None)
        self.out.append(dict(r, primitive=jax.lax.broadcast_in_dim_p, params=params, inputs=(row,)))

    def _by_row(self, r: Record, found: _RowWise) -> None:
        operands = [self._per_row(a, own, found.length, r) for a, own in zip(r["inputs"], found.has_rows, strict=True)]
        inputs = list(zip(*operands, strict=True))
        if found.folds is None:
            aval = self._row_aval(r["outputs"][0])
            self.rows[r["outputs"][0]] = [self._row(r, found.params, row, aval, t) for t, row in enumerate(inputs)]
            return
        aval = self._aval(r["outputs"][0])
        parts = [self._emit(r, found.params, row, aval, t) if found.params["axes"] else row[0] for t, row in enumerate(inputs)]
        (self.same[r["outputs"][0]],) = self._trace(lambda *xs: functools.reduce(found.folds, xs), parts, r)

    def _emit(self, r: Record, params: dict[str, Any], inputs: Sequence[Any], aval: Any, row: int) -> int:
        o = self._fresh(aval)
        self.out.append(dict(r, params=params, inputs=tuple(inputs), outputs=(o,), trip=self._trip(row)))
        return o

    def _row(self, r: Record, params: dict[str, Any], inputs: Sequence[Any], aval: Any, row: int) -> Any:
        """One row of a result; of a sum with a row of zeros, the other one."""
        rest = self._without_zeros(inputs, aval) if r["primitive"].name in ("add", "add_any") else None
        return self._emit(r, params, inputs, aval, row) if rest is None else rest

    def _without_zeros(self, terms: Sequence[Any], aval: Any) -> Any:
        """What a sum of two, of type `aval`, is where one of them is known to be zeros; None where none is."""
        rest = [a for a in terms if not isinstance(a, int) or a not in self.zeros]
        other = (rest or terms)[0]
        is_it = len(rest) < len(terms) and (self._shape(other), self._aval(other).dtype) == (tuple(aval.shape), aval.dtype)
        return other if is_it else None

    def _per_row(self, a: Any, has_rows: bool, length: int, r: Record) -> list[Any]:
        """An operand, row by row."""
        if has_rows:
            if isinstance(a, int) and a in self.rows:
                return self.rows[a]
            return [self._trace(lambda x, t=t: x[t], [a], r, t)[0] for t in range(length)]
        shape = self._shape(a)
        reads_first = shape[:1] == (1,) and 0 in r["params"].get("broadcast_dimensions", (0,))
        return (self._trace(lambda x: x[0], [a], r) if reads_first else [a]) * length

    def _barrier(self, r: Record) -> None:
        """All rows of an operand stand in its place."""
        inputs: list[Any] = []
        outputs: list[int] = []
        for a, o in zip(r["inputs"], r["outputs"], strict=True):
            mine = self.rows.get(a) if isinstance(a, int) else None
            if mine is None:
                inputs.append(a)
                outputs.append(o)
            else:
                self.rows[o] = [self._fresh(self._row_aval(o)) for _ in mine]
                inputs += mine
                outputs += self.rows[o]
        self.out.append(dict(r, inputs=tuple(inputs), outputs=tuple(outputs)))

    def _output(self, o: Any, leaf: int | None) -> tuple[Any, ...]:
        """An output leaf: row by row where the state that it becomes is."""
        o = self._atom(o)
        is_apart = leaf is not None and leaf in self.rows
        if isinstance(o, int) and o in self.rows:
            rows = self.rows[o]
            return tuple(rows) if is_apart else (self._trace(lambda *xs: jax.numpy.stack(xs), list(rows))[0],)
        if is_apart:
            return tuple(self._trace(lambda x, t=t: x[t], [o])[0] for t in range(len(self.rows[leaf])))
        return (o,)

    # Small help.

    def _has_rows(self, read: Sequence[int], made: Sequence[int]) -> bool:
        return not self.rows.keys().isdisjoint(read) or not self.taken.isdisjoint(made)

    def _atom(self, a: Any) -> Any:
        return self.same.get(a, a) if isinstance(a, int) else a

    def _first(self, a: Any, r: Record, row: int | None = None) -> Any:
        return self.unit[a] if isinstance(a, int) and a in self.unit else self._trace(lambda x: x[0], [a], r, row)[0]

    def _is_row(self, o: int, unit: int) -> bool:
        return self._shape(o) == self._shape(unit)[1:]

    def _trace(self, fn: Callable[..., Any], atoms: list[Any], r: Record | None = None, row: int | None = None) -> list[Any]:
        """What a small function makes; of `row`, or where the record `r` comes from."""
        begin, trip = len(self.out), None if r is None else r.get("trip")
        found = self.traced(fn, atoms, "" if r is None else r["stack"], self.out)
        for e in self.out[begin:]:
            if "const" not in e and (row is not None or trip is not None):
                e["trip"] = self._trip(row) if trip is None else Trip((*self._trip(trip.row).of, *trip.of), trip.row)
        return found

    def _trip(self, row: int) -> Trip:
        """Of the next equation that is made of a record for a row."""
        self._marked[self._at, row] += 1
        return Trip(("rows", self._at, self._marked[self._at, row]), row)

    def _fresh(self, aval: Any) -> int:
        self.avals[len(self.avals)] = aval
        return len(self.avals) - 1

    def _aval(self, a: Any) -> Any:
        return self.avals[a] if isinstance(a, int) else a.aval

    def _shape(self, a: Any) -> tuple[int, ...]:
        return tuple(getattr(self._aval(a), "shape", ()))

    def _length(self, a: Any) -> int:
        return next(iter(self._shape(a)), 0)

    def _row_aval(self, v: int) -> Any:
        return self.avals[v].update(shape=self.avals[v].shape[1:])


def _is_zero(a: Any) -> bool:
    return not isinstance(a, int) and not np.any(a.val)


def _is_split(sharding: Any) -> bool:
    return sharding is not None and any(sharding.spec)


def _values(atoms: Sequence[Any]) -> list[int]:
    return [a for a in atoms if isinstance(a, int)]
