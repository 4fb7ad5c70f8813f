"""Exact minimisation of sums of small tables, by eliminating variables one after another.

    min over k0, k1, k2 of  f(k0, k1) + g(k1, k2)   =   min over k1 of (min over k0 of f) + (min over k2 of g)

Eliminating a variable with at most two neighbours is the node elimination of Jia et al. 2018 (section 5.1, theorem 1), adding up
tables over the same variables their edge elimination; more neighbours give tables of more dims. Where a joined table would
be larger than a limit, a variable must be given a value first (conditioning), or, for a lower bound, the tables are minimised
apart from each other in groups (mini-buckets: Dechter and Rish 2003).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from soapjax.search.relaxation.relaxed import Pairwise

MAX_ENTRIES = 3_000_000  # of a joined table


class Factor(NamedTuple):
    scope: tuple[int, ...]  # sorted variables
    table: np.ndarray  # one dim per variable


class Elimination(NamedTuple):
    """The way back from an elimination."""

    value: float  # the minimum, or a lower bound of it where buckets were split
    is_exact: bool
    steps: list[tuple[int, list[Factor]]]  # in order: variable, the factors that it was in, messages from before included
    messages: list[list[Factor]]  # per step: what was passed on
    constant: float  # of the factors given

    def choice(self, fixed: Mapping[int, int], count: int) -> np.ndarray:
        """A minimiser [count] (some assignment, if not exact)."""
        out = np.full(count, -1)
        for n, k in fixed.items():
            out[n] = k
        for n, factors in reversed(self.steps):
            total: np.ndarray | float = 0.0
            for scope, table in factors:
                total = total + table[tuple(slice(None) if v == n else out[v] for v in scope)]
            out[n] = int(np.argmin(total))
        return out

    def min_marginals(self) -> dict[int, np.ndarray]:
        """Per variable: the minimum with each of its values. Only of an exact elimination, whose messages form a tree."""
        place = {n: i for i, (n, _) in enumerate(self.steps)}
        roots = [float(m.table) for ms in self.messages for m in ms if not m.scope]
        down: dict[int, Factor] = {}
        found: dict[int, np.ndarray] = {}
        children: dict[int, list[int]] = {n: [] for n, _ in self.steps}
        for (n, _), ms in zip(self.steps, self.messages, strict=True):
            if ms and ms[0].scope:
                children[min(ms[0].scope, key=place.__getitem__)].append(n)
        for i in range(len(self.steps) - 1, -1, -1):
            n, factors = self.steps[i]
            mine = self.messages[i][0]
            if not mine.scope:
                # The minimum of everything that this tree does not contain.
                down[n] = Factor((), np.array(self.constant + sum(roots) - float(mine.table)))
            joined = [*factors, down[n]]
            scope = tuple(sorted({v for f in joined for v in f.scope}))
            total = functools.reduce(np.add, (_aligned(f, scope) for f in joined))
            axis = scope.index(n)
            found[n] = total.min(axis=tuple(k for k in range(len(scope)) if k != axis)).reshape(-1)
            for child in children[n]:
                message = self.messages[place[child]][0]
                rest = total - _aligned(message, scope)
                gone = tuple(k for k, v in enumerate(scope) if v not in message.scope)
                down[child] = Factor(message.scope, rest.min(axis=gone))
        return found


def factors_of(problem: Pairwise, fixed: Mapping[int, int] | None = None) -> list[Factor]:
    """The tables of a problem with the variables in `fixed` at their values."""
    fixed = fixed or {}
    costs = [c for c in problem.costs]
    constant, out = 0.0, []
    for (a, b), table in problem.tables.items():
        if a in fixed and b in fixed:
            constant += float(table[fixed[a], fixed[b]])
        elif a in fixed:
            costs[b] = costs[b] + table[fixed[a]]
        elif b in fixed:
            costs[a] = costs[a] + table[:, fixed[b]]
        else:
            out.append(Factor((a, b), table))
    for n, c in enumerate(costs):
        if n in fixed:
            constant += float(c[fixed[n]])
        else:
            out.append(Factor((n,), c))
    return [*out, Factor((), np.array(constant))]


def order_of(
    problem: Pairwise, *, max_entries: int = MAX_ENTRIES, rng: np.random.Generator | None = None
) -> tuple[list[int], list[int]]:
    """An elimination order by the smallest joined table first, and the variables to condition on so that none exceeds the limit.

    Where only larger ones are left, the variable with the most neighbours goes to the second list; with `rng`, one with many.
    """
    sizes = [len(c) for c in problem.costs]
    near: list[set[int]] = [set() for _ in sizes]
    for a, b in problem.tables:
        near[a].add(b)
        near[b].add(a)
    left, order, cut = set(range(len(sizes))), [], []

    def joined(n: int) -> float:
        return float(np.prod([float(sizes[v]) for v in near[n]])) * sizes[n]

    cost = {n: joined(n) for n in left}
    while left:
        n = min(left, key=lambda v: (cost[v], v))
        is_cut = cost[n] > max_entries
        if is_cut:
            luck = dict.fromkeys(left, 1.0) if rng is None else dict(zip(sorted(left), rng.random(len(left)), strict=True))
            n = max(left, key=lambda v: (len(near[v]) * luck[v], v))
            cut.append(n)
        else:
            order.append(n)
        left.discard(n)
        changed = set(near[n])
        for v in near[n]:
            near[v].discard(n)
            if not is_cut:
                near[v] |= near[n] - {v}
        for v in changed:
            cost[v] = joined(v)
    return order, cut


def eliminate(factors: list[Factor], order: list[int], *, max_entries: int = MAX_ENTRIES) -> Elimination:
    """Eliminates all variables in `order`; buckets whose joined table exceeds the limit are split."""
    buckets: dict[int, list[Factor]] = {n: [] for n in order}
    place = {n: i for i, n in enumerate(order)}
    constant, is_exact, steps, messages = 0.0, True, [], []

    def put(f: Factor) -> None:
        nonlocal constant
        if f.scope:
            buckets[min(f.scope, key=place.__getitem__)].append(f)
        else:
            constant += float(f.table)

    for f in factors:
        put(f)
    given = constant
    for n in order:
        mine = buckets.pop(n)
        steps.append((n, mine))
        groups = _groups(mine, max_entries)
        is_exact &= len(groups) <= 1
        messages.append([_minimised(group, n) for group in groups])
        for message in messages[-1]:
            put(message)
    return Elimination(constant, is_exact, steps, messages, given)


def _groups(factors: list[Factor], max_entries: int) -> list[list[Factor]]:
    """Factors in groups whose joined tables stay within the limit; one group if that does."""
    groups: list[tuple[dict[int, int], list[Factor]]] = []
    for f in sorted(factors, key=lambda f: -f.table.size):
        dims = dict(zip(f.scope, f.table.shape, strict=True))
        for have, members in groups:
            if np.prod([float(x) for x in (have | dims).values()]) <= max_entries:
                have.update(dims)
                members.append(f)
                break
        else:
            groups.append((dims, [f]))
    return [members for _, members in groups]


def _minimised(factors: list[Factor], n: int) -> Factor:
    """The minimum over variable `n` of the sum of `factors`."""
    scope = tuple(sorted({v for f in factors for v in f.scope}))
    axis = scope.index(n)
    pair = [f for f in factors if len(f.scope) == 2]
    if len(scope) == 3 and len(pair) == 2 and all(len(f.scope) < 3 for f in factors):
        return Factor(tuple(v for v in scope if v != n), _min_plus(factors, pair, scope, n))
    total = _aligned(factors[0], scope)
    for f in factors[1:]:
        total = total + _aligned(f, scope)
    shape = [1] * len(scope)
    for f in factors:
        for v, size in zip(f.scope, f.table.shape, strict=True):
            shape[scope.index(v)] = size
    return Factor(tuple(v for v in scope if v != n), np.broadcast_to(total, shape).min(axis=axis))


def _min_plus(factors: list[Factor], pair: list[Factor], scope: tuple[int, ...], n: int) -> np.ndarray:
    """Two tables that share `n` alone, as a min-plus product: row by row, to stay within the cache."""
    u, w = (v for v in scope if v != n)
    first, second = sorted(pair, key=lambda f: u not in f.scope)
    left = first.table if first.scope[0] == u else first.table.T  # [u, n]
    right = second.table if second.scope[0] == w else second.table.T  # [w, n]
    rest: dict[int, float | np.ndarray] = {f.scope[0]: 0.0 for f in factors if len(f.scope) == 1}
    for f in factors:
        if len(f.scope) == 1:
            rest[f.scope[0]] = rest[f.scope[0]] + f.table
    left = np.ascontiguousarray(left + rest.get(n, 0.0))
    out = np.empty((len(left), len(right)))
    for i, row in enumerate(left):
        (right + row).min(axis=1, out=out[i])
    return out


def _aligned(f: Factor, scope: tuple[int, ...]) -> np.ndarray:
    return f.table.reshape([f.table.shape[f.scope.index(v)] if v in f.scope else 1 for v in scope])
