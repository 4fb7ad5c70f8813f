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

from soapjax.execute.spmd.arrivals import place
from soapjax.execute.streams.replicas import blocks_as, together
from soapjax.execute.streams.transfer import mover


class _Rows(NamedTuple):
    """Rows that lie on one mesh, one after the other."""

    shardings: tuple[NamedSharding, ...]  # of each

    @property
    def mesh(self) -> Any:
        return self.shardings[0].mesh

    def stacked(self, row: PartitionSpec) -> NamedSharding:
        """Of all of them as one array, every row split alike."""
        return NamedSharding(self.mesh, PartitionSpec(None, *row))


class Stack:
    """One leaf: its rows, and where it lies as a whole.

    Args:
      shardings: of every row on its stage's mesh.
    """

    def __init__(self, shardings: Sequence[NamedSharding]):
        self.shardings = tuple(shardings)
        runs = [_Rows(tuple(run)) for _, run in itertools.groupby(shardings, key=lambda s: s.mesh)]
        self.is_even = _is_even(runs)
        # Where the array is taken apart: on every stage; or on the first one, from where other stages' rows go on.
        self._parts = runs if self.is_even else [_Rows(tuple(NamedSharding(runs[0].mesh, s.spec) for s in shardings))]
        self._sent = [] if self.is_even else runs[1:]
        self._kept = len(shardings) - sum(len(run.shardings) for run in self._sent)
        row = shardings[0].spec
        self._wholes = [part.stacked(row) for part in self._parts]
        self.sharding = _on_all(runs, row) if self.is_even else self._wholes[0]
        self._take = [_taking(part.shardings) for part in self._parts]
        self._put = [_putting(whole) for whole in self._wholes]
        here = self._parts[0].shardings[self._kept :]
        ends = list(itertools.accumulate(len(run.shardings) for run in self._sent))
        spans = [(end - len(run.shardings), end, run) for end, run in zip(ends, self._sent, strict=True)]
        self._send = [mover(here[a:b], run.shardings) for a, b, run in spans]
        self._fetch = [mover(run.shardings, here[a:b]) for a, b, run in spans]

    def lowered(self, row: tuple[int, ...], dtype: Any) -> Iterator[jax.stages.Lowered]:
        """The programs of this process' devices for rows of such a shape."""
        for part, whole, take, put in zip(self._parts, self._wholes, self._take, self._put, strict=True):
            if whole.has_addressable_devices:
                yield take.lower(jax.ShapeDtypeStruct((len(part.shardings), *row), dtype, sharding=whole))
                yield put.lower(*(jax.ShapeDtypeStruct(row, dtype, sharding=s) for s in part.shardings))

    def apart(self, x: Any, *, give: bool) -> list[jax.Array]:
        """The rows, each on its stage; with `give` the memory of `x` is let go."""
        x = place(x, self.sharding)
        rows: list[jax.Array] = []
        for part, whole, take in zip(self._parts, self._wholes, self._take, strict=True):
            rows += take(blocks_as([x], (len(part.shardings), *x.shape[1:]), whole))
        if give:
            x.delete()
        return self._moved(rows, self._send)

    def together(self, rows: Sequence[jax.Array], keep: Sequence[bool]) -> jax.Array:
        """Rows, which are used up but for those to `keep`, as one array."""
        here = iter(self._moved(rows, self._fetch))
        stacked = [
            put(*itertools.islice(here, len(part.shardings))) for part, put in zip(self._parts, self._put, strict=True)
        ]  # fmt: skip
        for row, is_kept in zip(rows[: self._kept], keep, strict=False):  # JAX does not wait for what is sent to another process
            if not is_kept:
                row.delete()
        return blocks_as(stacked, (len(rows), *rows[0].shape), self.sharding)

    def _moved(self, rows: Sequence[jax.Array], moves: Sequence[Callable[..., Sequence[Any]]]) -> list[jax.Array]:
        """The rows, those of other stages moved."""
        found, rest = list(rows[: self._kept]), iter(rows[self._kept :])
        for move, run in zip(moves, self._sent, strict=True):
            found += move(*itertools.islice(rest, len(run.shardings)))
        return found


class StackedState:
    """All leaves of a step: those of the user, and those of the program.

    Args:
      rows: how many rows every input leaf, and every output leaf, is taken apart into; 1: it is not.
      state: output leaf -> the input leaf that it becomes.
      shardings: of the program's inputs.
      donate: whether results may take the memory of state.
    """

    def __init__(self, rows: tuple[Sequence[int], Sequence[int]], state: dict[int, int], shardings: Sequence[Any], *, donate: bool):
        self._in_rows, self._out_rows, self._state, self._donate = *rows, state, donate
        of_leaves = _split(shardings, self._in_rows)
        self._stacks = {k: Stack(s) for k, s in enumerate(of_leaves) if len(s) > 1}
        self.in_shardings = [self._stacks[k].sharding if k in self._stacks else s[0] for k, s in enumerate(of_leaves)]

    def lowered(self, leaves: Sequence[tuple[tuple[int, ...], str]]) -> Iterator[jax.stages.Lowered]:
        """The programs of this process' devices for leaves of such shapes and dtypes; once, where several leaves have one."""
        alike = {(*leaves[k], stack.shardings): stack for k, stack in self._stacks.items()}
        for (shape, dtype, _), stack in alike.items():
            yield from stack.lowered(shape[1:], dtype)

    def apart(self, leaves: Sequence[Any], *, give: bool = False) -> list[Any]:
        """The program's inputs."""
        give = give and self._donate
        found = ([x] if k not in self._stacks else self._stacks[k].apart(x, give=give) for k, x in enumerate(leaves))
        return [x for rows in found for x in rows]

    def together(self, values: Sequence[Any]) -> list[Any]:
        """The user's results of the program's outputs."""
        uses = collections.Counter(map(id, values))  # the user may return a row, or the same state twice
        found = []
        for k, rows in enumerate(_split(values, self._out_rows)):
            if len(rows) > 1:
                whole = self._stacks[self._state[k]].together(rows, keep=[uses[id(row)] > 1 for row in rows])
                found.append(whole)
            else:
                found += rows
        return found


def _split(values: Sequence[Any], rows: Sequence[int]) -> list[list[Any]]:
    rest = iter(values)
    return [list(itertools.islice(rest, n)) for n in rows]


def _is_even(runs: Sequence[_Rows]) -> bool:
    """Whether the runs are shards of one size, on devices of their own."""
    devices = [d for run in runs for d in run.mesh.devices.flat]
    alike = {(run.mesh.devices.shape, run.mesh.axis_names, len(run.shardings)) for run in runs}
    return len(alike) == 1 and len(set(devices)) == len(devices)


def _on_all(runs: Sequence[_Rows], row: PartitionSpec) -> NamedSharding:
    """Of an array whose rows lie on several meshes of one shape."""
    if len(runs) == 1:
        return runs[0].stacked(row)
    mesh = together([run.mesh for run in runs], "stage")
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names[0], *row))


@functools.lru_cache(maxsize=4096)
def _taking(shardings: tuple[NamedSharding, ...]) -> jax.stages.Wrapped:
    """One for all stacks that are laid out alike: compiled once per shape."""
    return jax.jit(lambda x: tuple(x[t] for t in range(len(shardings))), out_shardings=shardings)


@functools.lru_cache(maxsize=4096)
def _putting(whole: NamedSharding) -> jax.stages.Wrapped:
    return jax.jit(lambda *rows: jax.numpy.stack(rows), out_shardings=whole)
