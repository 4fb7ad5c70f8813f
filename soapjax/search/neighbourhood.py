"""All that can be asked about one operator's candidates beside one strategy, in one call.

`Neighbourhoods` is what the search walks on: `base_of` takes a strategy apart, `judge` gives the exact cost of
Q candidate configs of one operator, `judge_and_move` also takes one of them. All pure, for use inside jitted loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.costs.change import Arrays, Base, Change, apply, arrays_of, base_of, change
from soapjax.costs.evaluate import Costs
from soapjax.costs.indexing import row
from soapjax.costs.local import LocalTables, local_classes
from soapjax.costs.memory import Alive, alive, memory_after
from soapjax.costs.sent import sent_after, sent_now
from soapjax.search.problem import PlanningProblem
from soapjax.simulate.delta import step_times, trace_of
from soapjax.simulate.simulator import Scores
from soapjax.simulate.trace import ItemArrays, Trace

AT_ONCE = 64  # configs that are judged side by side


class Position(NamedTuple):
    """A strategy taken apart, what is alive under it, and how its step goes."""

    base: Base
    alive: Alive
    trace: Trace
    sent: Array  # [G]: bytes of a device of each group; [0] where the objective does not limit them


class Judged(NamedTuple):
    """Of Q candidates."""

    step_time_s: Array  # [Q]
    memory_bytes: Array  # [Q]
    sent_bytes: Array  # [Q]: by the device that sends most; 0 where the objective does not limit them
    cost_s: Array  # [Q]: the objective; inf where a degree does not divide


class Found(NamedTuple):
    """What the candidates make of the operator's entries, by distinct config."""

    change: Change  # [U, ...]
    place: Array  # int32 [Q]: the row of each candidate


class Tables(NamedTuple):
    """Everything on the device: arguments of the jitted loops, not constants of theirs."""

    arrays: Arrays
    items: ItemArrays
    classes: tuple[LocalTables, ...]
    class_of: Array  # int32 [N]
    position_of: Array  # int32 [N]
    divisors: Array  # int32 [N, K]
    usable_bytes: Array  # []
    exact_above: Array  # []: peaks of memory up to here need no exact figure


class Neighbourhoods:
    """The functions of one problem. The operators come in a few classes by the size of their neighbourhood."""

    def __init__(self, problem: PlanningProblem, *, at_once: int = AT_ONCE):
        cost_tables = problem.simulator.tables
        self.problem, self.cost_tables, self.at_once = problem, cost_tables, at_once
        objective = problem.objective
        arrays, self.machine = arrays_of(cost_tables, wants_bytes=objective.limits_bytes)
        classes = local_classes(cost_tables)
        self.sizes = [c.sizes for c in classes]
        self.num_heirs = [c.num_heirs for c in classes]
        n = problem.graph.num_operators
        class_of, position_of = np.zeros(n, np.int32), np.zeros(n, np.int32)
        for i, c in enumerate(classes):
            class_of[c.operators], position_of[c.operators] = i, np.arange(len(c.operators))
        self.tables = jax.device_put(
            Tables(
                arrays, problem.simulator.item_arrays, tuple(c.tables for c in classes), class_of, position_of,
                problem.space.divisors, np.float32(problem.usable_memory_bytes),
                np.float32(objective.memory_limit(problem.usable_memory_bytes)),
            )
        )  # fmt: skip
        self.overlap = cost_tables.topology.device.overlap

    def position(self, tables: Tables, costs: Costs, axes: Array, storage: Array) -> Position:
        return self._at(tables, base_of(self.cost_tables, costs, axes, storage, wants_bytes=self.machine.wants_bytes))

    def _at(self, tables: Tables, base: Base) -> Position:
        traced = trace_of(tables.items, base, overlap=self.overlap, pins=self.machine.pins)
        return Position(base, alive(tables.arrays, base), traced, sent_now(base))

    def _of_class(self, i: int, tables: Tables, at: Position, n: Array, axes: Array, storage: Array) -> tuple[Judged, Found]:
        """Draws repeat (256 on two axes are few configs): each config is judged once, in as many turns as it takes."""
        lists, q = self._row(i, tables, n), len(storage)
        width = min(self.at_once, q)
        config = jnp.concatenate([axes, storage[:, None]], 1)
        first = jnp.argmax((config[:, None] == config).all(-1), 1)  # [Q]: the first candidate of the same config
        is_first = first == jnp.arange(q)
        rank = jnp.cumsum(is_first) - 1
        (distinct,) = jnp.nonzero(is_first, size=-(-q // width) * width, fill_value=0)

        def judge_some(k: Array) -> tuple[Array, Array, Array, Change]:
            some = jax.lax.dynamic_slice_in_dim(distinct, k * width, width)
            found = jax.vmap(lambda a, s: change(tables.arrays, self.machine, self.sizes[i], lists, at.base, a, s))(
                axes[some], storage[some]
            )
            times = step_times(
                tables.items, at.trace, at.base, lists, found, overlap=self.overlap, pins=self.machine.pins,
                num_heirs=self.num_heirs[i],
            )  # fmt: skip
            memory = memory_after(tables.arrays, at.alive, at.base, lists, found, tables.exact_above)
            sent = sent_after(at.sent, at.base, lists, found) if self.machine.wants_bytes else jnp.zeros(width)
            return times, memory, sent, found

        def turn(k: Array, done: tuple[Array, Array, Array, Change]) -> tuple[Array, Array, Array, Change]:
            return jax.tree.map(
                lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, k * width, 0), done, judge_some(k)
            )  # fmt: skip

        shapes = jax.eval_shape(judge_some, jnp.int32(0))
        none = jax.tree.map(lambda x: jnp.zeros((len(distinct), *x.shape[1:]), x.dtype), shapes)
        turns = rank[-1] // width + 1
        times, memory, sent, found = jax.lax.fori_loop(0, turns, turn, none)
        place = rank[first]
        times, memory, sent = times[place], memory[place], sent[place]
        sizes = np.array(self.machine.links.axis_sizes)
        violations = jnp.zeros(q, jnp.int32)
        for d in range(tables.divisors.shape[1]):
            split = jnp.prod(jnp.where(axes == d, sizes, 1), axis=1)
            violations += tables.divisors[n, d] % split != 0
        cost = self.problem.objective.cost(Scores(times, memory, violations, sent), tables.usable_bytes)
        return Judged(times, memory, sent, cost), Found(found, place)

    def judge(self, tables: Tables, at: Position, n: Array, axes: Array, storage: Array) -> Judged:
        """Candidates (`axes` int8 [Q, A], `storage` int8 [Q]) of operator `n` beside the strategy at `at`."""
        return self._by_class(tables, n, lambda i: self._of_class(i, tables, at, n, axes, storage)[0])

    def judge_and_move(
        self, tables: Tables, at: Position, n: Array, axes: Array, storage: Array, choose: Callable[[Judged], tuple[Any, Array]]
    ) -> tuple[Any, Position]:
        """What `choose` makes of the judged candidates, and the position at the one it picks (-1: the present one)."""

        def of_class(i: int) -> tuple[Any, Position]:
            judged, found = self._of_class(i, tables, at, n, axes, storage)
            result, q = choose(judged)

            def moved() -> Position:
                one = jax.tree.map(lambda x: row(x, row(found.place, q)), found.change)
                base = apply(self._row(i, tables, n), self.sizes[i][1], n, axes[q], storage[q], at.base, one)
                return self._at(tables, base)

            return result, jax.lax.cond(q >= 0, moved, lambda: at)

        return self._by_class(tables, n, of_class)

    def _row(self, i: int, tables: Tables, n: Array) -> LocalTables:
        position = row(tables.position_of, n)
        return jax.tree.map(lambda x: row(x, position), tables.classes[i])

    def _by_class(self, tables: Tables, n: Array, of_class: Callable[[int], Any]) -> Any:
        branches = [lambda i=i: of_class(i) for i in range(len(tables.classes))]
        return jax.lax.switch(tables.class_of[n], branches) if len(branches) > 1 else branches[0]()
