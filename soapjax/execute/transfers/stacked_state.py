"""Stacked state of a step whose stages hold its rows: one array for the user, many for the stages.

A step that loops over its layers has their weights in one array, a row per layer, and a pipeline cuts that array between the stages
(graph/trace/unstacking.py). Between steps it is one array again. Where every stage has as many rows, on a mesh of one shape, that
array lies on all stages at once, and each device holds what it works with; taking it apart moves nothing between devices:

    w [4, n, m] on 2 stages of 2 devices, mesh (stage=2, d=2), spec (stage, d, -)
    stage 0: w0, w1 [n, m] on its own mesh (d=2), spec (d, -)          stage 1: w2, w3

Else JAX has no name for where the parts are (its shards are of one size): the array lies where the first row does, and the other
rows go to their stages and back in every step.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from soapjax.execute.transfers.arrivals import place
from soapjax.execute.transfers.on_meshes import blocks_as, together
from soapjax.execute.transfers.transfer import mover


class Pieces(NamedTuple):
    """How a program takes and returns the user's leaves: of every piece, the rows of an array; 0: one row, or the leaf."""

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]

    @staticmethod
    def figure_of_rows(rows: tuple[Sequence[int], Sequence[int]]) -> Pieces:
        """Every row by itself; `rows`: of each input and output leaf how many."""
        return Pieces(*(tuple((0,) * n for n in leaves) for leaves in rows))


class _Run(NamedTuple):
    """Pieces that lie on one mesh, one after the other."""

    rows: tuple[int, ...]  # of each piece; 0: one, without a dim for it
    shardings: tuple[NamedSharding, ...]

    @property
    def mesh(self) -> Any:
        return self.shardings[0].mesh

    @property
    def num_rows(self) -> int:
        return sum(max(n, 1) for n in self.rows)

    def is_one(self, whole: NamedSharding) -> bool:
        """Whether they are one array already, laid out as that is to be."""
        return len(self.rows) == 1 and self.rows[0] > 0 and _dims(self.shardings[0]) == _dims(whole)

    def stacked(self, row: PartitionSpec) -> NamedSharding:
        """Of all of them as one array, every row split alike."""
        return NamedSharding(self.mesh, PartitionSpec(None, *row))


class Stack:
    """One leaf: its pieces, and where it lies as a whole.

    Args:
      rows: of every piece, as in `Pieces`.
      shardings: of every piece on its stage's mesh.
    """

    def __init__(self, rows: Sequence[int], shardings: Sequence[NamedSharding]):
        self.rows, self.shardings = tuple(rows), tuple(shardings)
        each = zip(rows, shardings, strict=True)
        groups = [list(run) for _, run in itertools.groupby(each, key=lambda piece: piece[1].mesh)]
        runs = [_Run(*map(tuple, zip(*run, strict=True))) for run in groups]
        row = PartitionSpec(*shardings[0].spec[1:]) if rows[0] else shardings[0].spec
        self.is_even = _is_even(runs)
        # Where the array is taken apart: on every stage; or on the first one, from where other stages' pieces go on.
        begins = runs[0].stacked(row), NamedSharding(runs[0].mesh, row)
        here = [s if s.mesh == runs[0].mesh else begins[not n] for n, s in zip(rows, shardings, strict=True)]
        self._parts = runs if self.is_even else [_Run(self.rows, tuple(here))]
        self._sent = [] if self.is_even else runs[1:]
        self._kept = len(shardings) - sum(len(run.rows) for run in self._sent)
        self._wholes = [part.stacked(row) for part in self._parts]
        self._is_one = [part.is_one(whole) for part, whole in zip(self._parts, self._wholes, strict=True)]
        self.sharding = _on_all(runs, row) if self.is_even else self._wholes[0]
        self._take = [_taking(part.rows, part.shardings) for part in self._parts]
        self._put = [_putting(part.rows, whole) for part, whole in zip(self._parts, self._wholes, strict=True)]
        rest = self._parts[0].shardings[self._kept :]
        ends = list(itertools.accumulate(len(run.rows) for run in self._sent))
        spans = [(end - len(run.rows), end, run) for end, run in zip(ends, self._sent, strict=True)]
        self._send = [mover(rest[a:b], run.shardings) for a, b, run in spans]
        self._fetch = [mover(run.shardings, rest[a:b]) for a, b, run in spans]

    def lowered(self, row: tuple[int, ...], dtype: Any) -> Iterator[jax.stages.Lowered]:
        """The programs of this process' devices for rows of such a shape."""
        programs = zip(self._parts, self._wholes, self._is_one, self._take, self._put, strict=True)
        for part, whole, is_one, take, put in programs:
            if whole.has_addressable_devices and not is_one:
                yield take.lower(jax.ShapeDtypeStruct((part.num_rows, *row), dtype, sharding=whole))
                shapes = [(n, *row) if n else row for n in part.rows]
                yield put.lower(*(jax.ShapeDtypeStruct(x, dtype, sharding=s) for x, s in zip(shapes, part.shardings, strict=True)))

    def apart(self, x: Any, *, give: bool) -> list[jax.Array]:
        """The pieces, each on its stage; with `give` the memory of `x` is let go, or is theirs."""
        x = place(x, self.sharding)
        pieces: list[jax.Array] = []
        for part, whole, is_one, take in zip(self._parts, self._wholes, self._is_one, self._take, strict=True):
            mine = blocks_as([x], (part.num_rows, *x.shape[1:]), whole)
            pieces += [mine] if is_one else take(mine)
        if give and not any(self._is_one):
            x.delete()
        return self._moved(pieces, self._send)

    def together(self, pieces: Sequence[jax.Array], keep: Sequence[bool]) -> jax.Array:
        """Pieces, which are used up but for those to `keep`, as one array."""
        here = iter(self._moved(pieces, self._fetch))
        stacked, num = [], 0
        for part, is_one, put in zip(self._parts, self._is_one, self._put, strict=True):
            mine = list(itertools.islice(here, len(part.rows)))
            stacked.append(mine[0] if is_one else put(*mine))
            num += part.num_rows
        row = pieces[0].shape[1:] if self.rows[0] else pieces[0].shape
        goes_on = [is_one for part, is_one in zip(self._parts, self._is_one, strict=True) for _ in part.rows]
        # JAX does not wait for what is sent to another process.
        for x, is_kept, is_one in zip(pieces[: self._kept], keep, goes_on, strict=False):
            if not (is_kept or is_one):
                x.delete()
        return blocks_as(stacked, (num, *row), self.sharding)

    def _moved(self, pieces: Sequence[jax.Array], moves: Sequence[Callable[..., Sequence[Any]]]) -> list[jax.Array]:
        """The pieces, those of other stages moved."""
        found, rest = list(pieces[: self._kept]), iter(pieces[self._kept :])
        for move, run in zip(moves, self._sent, strict=True):
            found += move(*itertools.islice(rest, len(run.rows)))
        return found


class StackedState:
    """All leaves of a step: those of the user, and those of the program.

    Args:
      pieces: what the program has for every leaf.
      state: output leaf -> the input leaf that it becomes.
      shardings: of the program's inputs.
      donate: whether results may take the memory of state.
    """

    def __init__(self, pieces: Pieces, state: dict[int, int], shardings: Sequence[Any], *, donate: bool):
        self._pieces, self._state, self._donate = pieces, state, donate
        of_leaves = _split(shardings, pieces.inputs)
        self._stacks = {
            k: Stack(rows, s) for k, (rows, s) in enumerate(zip(pieces.inputs, of_leaves, strict=True)) if rows not in ((0,), ())
        }
        self.in_shardings = [self._stacks[k].sharding if k in self._stacks else s[0] for k, s in enumerate(of_leaves)]

    def lowered(self, leaves: Sequence[tuple[tuple[int, ...], str]], given: Sequence[Any]) -> Iterator[jax.stages.Lowered]:
        """The programs of this process' devices for leaves of such shapes and dtypes; once, where several leaves have one.

        Args:
          given: the types of the program's inputs: that of random keys has no name by which it can be made again.
        """
        types = _split(given, self._pieces.inputs)
        alike = {(*leaves[k], stack.rows, stack.shardings): (stack, types[k][0].dtype) for k, stack in self._stacks.items()}
        for (shape, *_), (stack, dtype) in alike.items():
            yield from stack.lowered(shape[1:], dtype)

    def apart(self, leaves: Sequence[Any], *, give: bool = False) -> list[Any]:
        """The program's inputs."""
        give = give and self._donate
        found = ([x] if k not in self._stacks else self._stacks[k].apart(x, give=give) for k, x in enumerate(leaves))
        return [x for pieces in found for x in pieces]

    def together(self, values: Sequence[Any]) -> list[Any]:
        """The user's results of the program's outputs."""
        uses = collections.Counter(map(id, values))  # the user may return a row, or the same state twice
        found: list[Any] = []
        for rows, mine in zip(self._pieces.outputs, _split(values, self._pieces.outputs), strict=True):
            if rows != (0,):
                whole = self._stacks[self._state[len(found)]].together(mine, keep=[uses[id(x)] > 1 for x in mine])
                found.append(whole)
            else:
                found += mine
        return found


def as_pieces(rows: Sequence[Any], pieces: Pieces) -> list[Any]:
    """Rows (of leaves, one after the other) as the program takes them."""
    rest = iter(rows)
    return [jax.numpy.stack([next(rest) for _ in range(n)]) if n else next(rest) for leaf in pieces.inputs for n in leaf]


def as_rows(values: Sequence[Any], pieces: Pieces) -> list[Any]:
    """What a program returns, row by row."""
    rest = iter(values)
    found = ((n, next(rest)) for leaf in pieces.outputs for n in leaf)
    return [row for n, x in found for row in ([x[t] for t in range(n)] if n else [x])]


def _split(values: Sequence[Any], pieces: Sequence[Sequence[int]]) -> list[list[Any]]:
    rest = iter(values)
    return [list(itertools.islice(rest, len(rows))) for rows in pieces]


def _dims(sharding: NamedSharding) -> tuple[Any, ...]:
    """By which axes the dims are split, without those at the end that are not."""
    names = list(sharding.spec)
    while names and names[-1] is None:
        names.pop()
    return tuple(names)


def _is_even(runs: Sequence[_Run]) -> bool:
    """Whether the runs are shards of one size, on devices of their own."""
    devices = [d for run in runs for d in run.mesh.devices.flat]
    alike = {(run.mesh.devices.shape, run.mesh.axis_names, run.num_rows) for run in runs}
    return len(alike) == 1 and len(set(devices)) == len(devices)


def _on_all(runs: Sequence[_Run], row: PartitionSpec) -> NamedSharding:
    """Of an array whose rows lie on several meshes of one shape."""
    if len(runs) == 1:
        return runs[0].stacked(row)
    mesh = together([run.mesh for run in runs], "stage")
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names[0], *row))


@functools.lru_cache(maxsize=4096)
def _taking(rows: tuple[int, ...], shardings: tuple[NamedSharding, ...]) -> jax.stages.Wrapped:
    """One for all stacks that are laid out alike: compiled once per shape."""
    begins = list(itertools.accumulate((max(n, 1) for n in rows), initial=0))

    def take(x: Any) -> tuple[Any, ...]:
        return tuple(x[t : t + n] if n else x[t] for t, n in zip(begins, rows, strict=False))

    return jax.jit(take, out_shardings=shardings)


@functools.lru_cache(maxsize=4096)
def _putting(rows: tuple[int, ...], whole: NamedSharding) -> jax.stages.Wrapped:
    def put(*pieces: Any) -> Any:
        return jax.numpy.concatenate([x if n else x[None] for x, n in zip(pieces, rows, strict=True)])

    return jax.jit(put, out_shardings=whole)
