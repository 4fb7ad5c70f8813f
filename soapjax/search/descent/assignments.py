"""Moves of a descent: each assigns something to many operators at once.

Repeated operators (forty time steps of a recurrent layer, the blocks of a residual net) are best off alike, and a
chain that moves one of them at a time crosses a ridge for every one. So these moves *assign*:

* together: some axes of one operator, in all members of its group; and their storage;
* carried: a dim on an axis, in all operators to which tensors carry that dim, in one layer or in all that repeat it, in the
  whole graph or in a stretch of it;
* ranked: on an axis, dims in random order of rank, and every operator takes the first that it has: whole layers go over
  from one dim to a chain of others, as from the batch to Megatron's columns and rows; in a stretch of the graph, or in a module
  as the names of operators tell it, once or wherever it repeats (one layer of a recurrent net, in all time steps);
* alike: an axis takes what another axis has, in a group, a stretch or the whole graph;
* stored: one storage, in a group or in the whole graph;
* single: one value on one axis or on several of a level in a group, one dim on such axes in all operators of a module to which
  tensors carry it, or one storage in a group or a module: all of these are numbered, and a sweep tries one after the other;
* exchanged: two axes of one size change places in the whole graph;
* reranked: some axes are ranked anew in the whole graph, all at once: another way to split the step, from which to descend again.

They have no reverse, so no Markov chain is asked to balance them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import numpy as np

from soapjax.search.chain.moves import choices_of, dim_flows
from soapjax.strategy.configs import Strategy
from soapjax.strategy.space import SearchSpace
from soapjax.topology import FactorMesh

WEIGHTS = (0.35, 0.25, 0.15, 0.1, 0.15)  # of together, carried, ranked, alike, stored
MAX_AXES = 3  # that one move of a group changes
NOT_CARRIED = -2  # by a move of one dim: no value of a config


def look_alikes(space: SearchSpace) -> np.ndarray:
    """int32 [N]: a number for each set of operators with the same dims and choices.

    Wider than the groups of repeated operators: the ends of a chain of time steps have other neighbours, and so are
    groups of their own, but they use the same parameter and want the same split.
    """
    ids: dict[object, int] = {}
    keys = (
        (tuple((d.size, d.kind, d.is_reduced) for d in op.dims), space.allowed[n].tobytes(), space.divisors[n].tobytes())
        for n, op in enumerate(space.graph.operators)
    )
    return np.array([ids.setdefault(key, len(ids)) for key in keys], np.int32)


def modules_of(names: Sequence[str]) -> tuple[np.ndarray, list[list[int]]]:
    """Sets of operators bool [M, N] that belong together by their `names`, paths of modules; and which of them hold each operator.

    All below one path, and all below one path whose number in one component may be any: "blk3/attn", "blk#/attn". None of one
    operator, none twice.
    """
    found: dict[str, set[int]] = {}
    for n, name in enumerate(names):
        path = name.split("/")
        for depth in range(1, len(path) + 1):
            found.setdefault("/".join(path[:depth]), set()).add(n)
            for i in range(depth):
                any_number = re.sub(r"[0-9]+", "#", path[i])
                if any_number != path[i]:
                    found.setdefault("/".join((*path[:i], any_number, *path[i + 1 : depth])), set()).add(n)
    sets = sorted({tuple(sorted(some)) for some in found.values() if len(some) > 1})
    members = np.zeros((len(sets), len(names)), bool)
    holding: list[list[int]] = [[] for _ in names]
    for m, some in enumerate(sets):
        members[m, list(some)] = True
        for n in some:
            holding[n].append(m)
    return members, holding


def whole_modules(modules: np.ndarray, groups: np.ndarray) -> list[np.ndarray]:
    """Those that have all members of the groups that they have any of: modules that repeat are taken together."""
    return [m for m in modules if not np.isin(groups[~m], groups[m]).any()]


def owning_sets(movable: np.ndarray, modules: np.ndarray, groups: np.ndarray, owns: np.ndarray) -> list[np.ndarray]:
    """Sets of operators bool [N] that own parameters, of `movable` ones and modules; and all that do. None twice."""
    wanted = [*movable, *whole_modules(modules, groups), owns]
    found = {(m & owns).tobytes(): m for m in reversed(wanted) if (m & owns).any()}
    return list(reversed(found.values()))


def carried_values(flow: np.ndarray, groups: np.ndarray, modules: np.ndarray, sets: np.ndarray) -> np.ndarray:
    """Values int8 [C, N] that carry one dim through a module, or through the whole graph; NOT_CARRIED elsewhere.

    Modules that repeat are taken together. What moves one of `sets` alone is left out.

    Args:
      flow: the class of every dim [N, D + 1], as `dim_flows` gives it.
      groups: of operators [N].
      modules, sets: of operators, bool [M, N].
    """
    whole = whole_modules(modules, groups)
    known = {s.tobytes() for s in sets}
    found: dict[bytes, np.ndarray] = {}
    for m in (*whole, np.ones(len(flow), bool)):
        for of in np.unique(flow[m][flow[m] >= 0]).tolist():
            has = flow == of
            taking = m & has.any(axis=1)
            if taking.tobytes() not in known:
                values = np.where(taking, has.argmax(axis=1) - 1, NOT_CARRIED).astype(np.int8)
                found[values.tobytes()] = values
    return np.array(list(found.values()), np.int8).reshape(-1, len(flow))


def spans_of(mesh: FactorMesh) -> np.ndarray:
    """Sets of axes bool [S, A] that take one value together: each alone, the last 2, 3, ... of a level, and all of a mesh.

    Axes of a level have links alike, so that which of them are taken is of little consequence, but how many is: what splits a layer
    two ways may be slower, and eight ways faster, than what does not.
    """
    levels = np.array(mesh.axis_levels)
    own = [np.flatnonzero(levels == level) for level in np.unique(levels)]
    taken = [*np.arange(len(levels))[:, None], *(of[-k:] for of in own for k in range(2, len(of) + 1))]
    if len(own) > 1:
        taken.append(np.arange(len(levels)))
    spans = np.zeros((len(taken), len(levels)), bool)
    for row, axes in zip(spans, taken, strict=True):
        row[axes] = True
    return spans


class Assignments:
    """Draws of the moves above on one space, one in each of B strategies side by side."""

    def __init__(self, space: SearchSpace):
        self.space = space
        self.values, self.counts = choices_of(space)
        num_ops, num_axes = self.counts.shape
        is_choice = np.arange(self.values.shape[2]) < self.counts[..., None]
        self.lowest = int(self.values.min())
        # By value - lowest: of every dim, though nothing may split the last of them.
        self.offers = np.zeros((num_ops, num_axes, space.allowed.shape[2] - 1 - self.lowest), bool)
        n, a, v = np.nonzero(is_choice)
        self.offers[n, a, self.values[n, a, v] - self.lowest] = True
        # Every set is as likely as any other: what repeats often is one choice.
        free = (self.counts > 1).any(axis=1) | space.owns_parameters
        self.groups, alike = np.array([o.group for o in space.graph.operators]), look_alikes(space)
        movable = [free & (of == k) for of in (self.groups, alike) for k in np.unique(of[free])]
        self.movable = np.array(movable, bool).reshape(-1, num_ops)
        self.owning = np.flatnonzero((self.movable & space.owns_parameters).any(axis=1))  # of those
        self.flows = dim_flows(space)
        self.modules, self.modules_of_op = modules_of([o.name for o in space.graph.operators])
        self.sizes = np.array(space.mesh.axis_sizes)
        moves = (self._together, self._carried, self._ranked, self._alike, self._stored)
        weights = np.array(WEIGHTS) * [True, True, True, space.num_axes > 1, len(self.owning) > 0 and len(space.storages) > 1]
        self.moves, self.weights = moves, weights / weights.sum()
        self.spans = spans_of(space.mesh)
        self.offers_on_spans = np.stack([self.offers[:, span].all(axis=1) for span in self.spans], axis=1)  # as `offers`
        self.offers_on_spans[:, self.spans.sum(axis=1) > 1, : -1 - self.lowest] = False  # no pins
        offered = np.einsum("gn,nsw->gsw", self.movable.astype(np.float32), self.offers_on_spans.astype(np.float32)) > 0
        self.values_of_sets = np.argwhere(offered)  # (set, span, value - lowest)
        self.storing = np.array(owning_sets(self.movable, self.modules, self.groups, space.owns_parameters)).reshape(-1, num_ops)
        self.storages_of_sets = np.argwhere(np.ones((len(self.storing) * (len(space.storages) > 1), len(space.storages)), bool))
        self.through_modules = carried_values(self.flows[1], self.groups, self.modules, self.movable)
        carries = self.through_modules > NOT_CARRIED
        at = np.where(carries, self.through_modules, -1) - self.lowest
        may = self.offers_on_spans[np.arange(num_ops), :, at] & carries[..., None]
        self.dims_of_modules = np.argwhere(may.any(axis=1))  # (which of `through_modules`, span)

    def swept(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Moves of `single` on one axis or of a storage, and those on several axes; each in random order.

        Those of one set or one module come one after the other: strategies that are judged together then differ in few operators,
        and more rows cost the same in all of them (equal_rows.py).
        """
        firsts = self.values_of_sets[:, 0], self.storages_of_sets[:, 0], self.dims_of_modules[:, 0] + len(self.movable)
        spans = self.values_of_sets[:, 1], np.zeros(len(self.storages_of_sets), int), self.dims_of_modules[:, 1]
        of, is_wide = np.concatenate(firsts), np.concatenate(spans) >= len(self.sizes)
        place = rng.permutation(of.max(initial=0) + 1)[of]
        order = np.lexsort([rng.random(len(of)), place])
        return order[~is_wide[order]], order[is_wide[order]]

    def single(self, strategy: Strategy, which: np.ndarray) -> list[Strategy]:
        """`strategy` after each of these moves, by number: of values, of storages, and of dims of modules, one after the other."""
        before = np.broadcast_to(strategy.axes, (len(which), *strategy.axes.shape))
        axes, storage = before.copy(), np.repeat(strategy.storage[None], len(which), axis=0)
        firsts = np.cumsum([0, len(self.values_of_sets), len(self.storages_of_sets)])
        kind = np.searchsorted(firsts, which, side="right") - 1
        values, storages, dims = (np.flatnonzero(kind == k) for k in range(3))
        numbers = which - firsts[kind]
        g, span, value = self.values_of_sets[numbers[values]].T
        takes = (self.movable[g] & self.offers_on_spans[:, span, value].T)[..., None] & self.spans[span][:, None]
        axes[values] = np.where(takes, (value + self.lowest)[:, None, None], axes[values])
        g, k = self.storages_of_sets[numbers[storages]].T
        storage[storages] = np.where(self.storing[g], k[:, None], storage[storages])
        c, span = self.dims_of_modules[numbers[dims]].T
        is_carried = self.through_modules[c] > NOT_CARRIED
        carried = np.where(is_carried, self.through_modules[c], -1)
        takes = is_carried & self.offers_on_spans[np.arange(len(self.groups)), span[:, None], carried - self.lowest]
        axes[dims] = np.where(takes[..., None] & self.spans[span][:, None], carried[..., None], axes[dims])
        return self._divided(before, axes, storage)

    def reranked(
        self, rng: np.random.Generator, strategy: Strategy, count: int, *, every_axis: bool = False
    ) -> list[Strategy]:
        """`count` strategies that have one to all of the axes of `strategy` ranked anew."""
        num_ops, num_axes = strategy.axes.shape
        before = np.broadcast_to(strategy.axes, (count, num_ops, num_axes))
        axes = before.copy()
        how_many = rng.integers(num_axes if every_axis else 1, num_axes + 1, size=count)
        is_new = rng.random((count, num_axes)).argsort(axis=1) < how_many[:, None]
        for a in range(num_axes):
            members = np.broadcast_to(is_new[:, a, None], (count, num_ops))
            axes[:, :, a] = self._first_ranks(rng, axes[:, :, a], np.full(count, a), members)
        return self._divided(before, axes, np.repeat(strategy.storage[None], count, axis=0))

    def exchanged(self, rng: np.random.Generator, strategy: Strategy) -> list[Strategy]:
        """`strategy` with two axes of one size exchanged in the whole graph: every pair that differs, in random order."""
        pairs = [
            (a, b) for a, b in itertools.combinations(range(len(self.sizes)), 2)
            if self.sizes[a] == self.sizes[b] and (strategy.axes[:, a] != strategy.axes[:, b]).any()
        ]  # fmt: skip
        order = np.tile(np.arange(len(self.sizes)), (len(pairs), 1))
        for row, (a, b) in zip(order, rng.permutation(pairs), strict=True):
            row[[a, b]] = b, a
        before = np.broadcast_to(strategy.axes, (len(pairs), *strategy.axes.shape))
        axes = strategy.axes[:, order].transpose(1, 0, 2)
        return self._divided(before, self._offered(before, axes), np.repeat(strategy.storage[None], len(pairs), axis=0))

    def _offered(self, before: np.ndarray, axes: np.ndarray) -> np.ndarray:
        """Strategies' `axes` [B, N, A], values that are not offered on an axis as they were `before`."""
        num_ops, num_axes = axes.shape[1:]
        may = self.offers[np.arange(num_ops)[:, None], np.arange(num_axes), axes - self.lowest]
        return np.where(may, axes, before)

    def draw(self, rng: np.random.Generator, strategies: list[Strategy]) -> list[Strategy]:
        """A move from each; operators whose degrees would not divide stay as they are."""
        if not strategies:
            return []
        before = np.stack([s.axes for s in strategies])
        axes, storage = before.copy(), np.stack([s.storage for s in strategies])
        kinds = rng.choice(len(self.moves), size=len(strategies), p=self.weights)
        for k, move in enumerate(self.moves):
            at = np.flatnonzero(kinds == k)
            if len(at):
                axes[at], storage[at] = move(rng, axes[at], storage[at])
        return self._divided(before, axes, storage)

    def divided(self, before: Strategy, strategies: list[Strategy]) -> list[Strategy]:
        """Strategies that several moves from `before` make together; operators whose degrees do not divide are as they were."""
        if not strategies:
            return []
        axes, storage = (np.stack([getattr(s, name) for s in strategies]) for name in ("axes", "storage"))
        return self._divided(np.broadcast_to(before.axes, axes.shape), axes, storage)

    def _divided(self, before: np.ndarray, axes: np.ndarray, storage: np.ndarray) -> list[Strategy]:
        """The strategies [B, N, A] and [B, N]; operators whose degrees do not divide are as they were `before`."""
        lane, n = np.nonzero((axes != before).any(axis=2))
        changed = axes[lane, n]
        split = np.ones((len(n), self.space.divisors.shape[1]), np.int64)
        for a, size in enumerate(self.sizes):
            at = np.flatnonzero(changed[:, a] >= 0)
            split[at, changed[at, a]] *= size
        wrong = (self.space.divisors[n] % split != 0).any(axis=1)
        axes[lane[wrong], n[wrong]] = before[lane[wrong], n[wrong]]
        return [Strategy(*one) for one in zip(axes, storage, strict=True)]

    def _some_of(self, rng: np.random.Generator, members: np.ndarray) -> np.ndarray:
        """int [B]: one of each set, bool [B, N]."""
        return np.where(members, rng.random(members.shape), -1.0).argmax(axis=1)

    def _stretch(self, rng: np.random.Generator, n: np.ndarray) -> np.ndarray:
        """bool [B, N]: consecutive operators around `n` [B], few to many; half of the time all there are."""
        count, num_ops = len(n), len(self.groups)
        before, after = num_ops ** rng.random((2, count)) * np.where(rng.random(count) < 0.5, 1, num_ops)
        ahead = np.arange(num_ops) - n[:, None]
        return (ahead > -before[:, None]) & (ahead < after[:, None])

    def _may_take(self, a: np.ndarray, values: np.ndarray) -> np.ndarray:
        """bool [B, N]: which operators offer `values` [B, N] on axes `a` [B]."""
        return self.offers[np.arange(values.shape[1]), a[:, None], values - self.lowest]

    def _chosen(self, rng: np.random.Generator, n: np.ndarray, a: np.ndarray) -> np.ndarray:
        """A value of operators `n` on axes `a`, of the same shape."""
        return self.values[n, a, rng.integers(self.counts[n, a])]

    def _together(self, rng: np.random.Generator, axes: np.ndarray, storage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count, num_axes = len(axes), len(self.sizes)
        lanes = np.arange(count)
        members = self.movable[rng.integers(len(self.movable), size=count)]
        model = self._some_of(rng, members)
        # All that the group's model has, with new values on some axes: members that had drifted apart come together.
        order = rng.random((count, num_axes)).argsort(axis=1)
        is_new = order < rng.integers(1, MAX_AXES + 1, size=count)[:, None]
        drawn = self._chosen(rng, model[:, None], np.arange(num_axes)[None])
        rows = np.where(is_new, drawn, axes[lanes, model])
        for a in range(num_axes):
            values = np.broadcast_to(rows[:, a, None], members.shape)
            takes = members & self._may_take(np.full(count, a), values)
            axes[:, :, a] = np.where(takes, values, axes[:, :, a])
        too = members & (rng.random(count) < 0.3)[:, None]
        return axes, np.where(too, storage[lanes, model][:, None], storage)

    def _carried(self, rng: np.random.Generator, axes: np.ndarray, storage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count = len(axes)
        n = self._some_of(rng, self.movable[rng.integers(len(self.movable), size=count)])
        a = rng.integers(len(self.sizes), size=count)
        value = np.maximum(self._chosen(rng, n, a), -1)
        is_tied = rng.random(count) < 0.7
        in_group = (value < 0) & (rng.random(count) < 0.5)
        stretch = self._stretch(rng, n)
        for flow, here in zip(self.flows, (~is_tied, is_tied), strict=True):
            at = np.flatnonzero(here)
            has = flow == flow[n[at], value[at] + 1][:, None, None]  # [b, N, D + 1]
            members = stretch[at] & has.any(axis=2) & (~in_group[at, None] | (self.groups == self.groups[n[at], None]))
            dims = (has.argmax(axis=2) - 1).astype(np.int8)
            now = axes[at, :, a[at]]
            axes[at, :, a[at]] = np.where(members & self._may_take(a[at], dims), dims, now)
        return axes, storage

    def _ranked(self, rng: np.random.Generator, axes: np.ndarray, storage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count, num_ops = len(axes), len(axes[0])
        n = rng.integers(num_ops, size=count)
        members = self._stretch(rng, n)
        for lane in np.flatnonzero(rng.random(count) < 0.5):
            if held_by := self.modules_of_op[n[lane]]:
                members[lane] = self.modules[held_by[rng.integers(len(held_by))]]
        a = rng.integers(len(self.sizes), size=count)
        lanes = np.arange(count)
        axes[lanes, :, a] = self._first_ranks(rng, axes[lanes, :, a], a, members)
        return axes, storage

    def _first_ranks(self, rng: np.random.Generator, now: np.ndarray, a: np.ndarray, members: np.ndarray) -> np.ndarray:
        """Values [B, N] of axes `a` [B]: `members` [B, N] take the first that they have of a random order, others stay at `now`."""
        flow = self.flows[1]  # -1 where an operator has no such dim: never offered
        rank = rng.random((len(a), flow.max() + 1))
        offered = self.offers[:, a, -1 - self.lowest :].transpose(1, 0, 2)  # [B, N, D + 1], no pins
        best = np.where(offered, rank[:, flow[:, : offered.shape[2]]], -1.0)
        dims = (best.argmax(axis=2) - 1).astype(np.int8)
        return np.where(members & offered.any(axis=2), dims, now)

    def _alike(self, rng: np.random.Generator, axes: np.ndarray, storage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count, num_axes = len(axes), len(self.sizes)
        lanes, a = np.arange(count), rng.integers(num_axes, size=count)
        b = (a + rng.integers(1, num_axes, size=count)) % num_axes
        members = self.movable[rng.integers(len(self.movable), size=count)]
        stretch = self._stretch(rng, rng.integers(members.shape[1], size=count))
        members = np.where((rng.random(count) < 0.5)[:, None], stretch, members)
        values = axes[lanes, :, b]
        axes[lanes, :, a] = np.where(members & self._may_take(a, values), values, axes[lanes, :, a])
        return axes, storage

    def _stored(self, rng: np.random.Generator, axes: np.ndarray, storage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count = len(axes)
        members = self.movable[self.owning[rng.integers(len(self.owning), size=count)]]
        members = np.where((rng.random(count) < 0.3)[:, None], self.space.owns_parameters, members)
        return axes, np.where(members, rng.integers(len(self.space.storages), size=(count, 1)), storage).astype(np.int8)
