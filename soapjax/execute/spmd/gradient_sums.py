"""Gradients of parameters that are used more than once: summands stay on their devices until the last one is added.

What graph/passes/accumulation.py found, as the executor runs it: products leave their partial sums apart where the
plan's common layout says so, the additions work on these, and the total is summed over the devices once, after its loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from soapjax.execute.spmd.evaluator import Env, task_mark
from soapjax.execute.spmd.on_blocks import partition_spec
from soapjax.execute.spmd.partial import Partial, constrained, elementwise, resolved, split_off
from soapjax.execute.spmd.plan_layouts import PlanLayouts
from soapjax.graph.operators import Accumulation
from soapjax.graph.passes.accumulation import TracedAccumulation, summand_alone
from soapjax.graph.trace.program import FlatEqn
from soapjax.strategy.layout import Spec


@dataclasses.dataclass(frozen=True)
class DeferredSum:
    """A gradient, or what a stage adds to one, that is a sum over `axes` of a stage's mesh, made by another program."""

    axes: tuple[str, ...]
    spec: Spec  # of what each device adds up
    home: Spec  # of the sum over devices

    def shape(self, mesh: Mesh, shape: Sequence[int]) -> tuple[int, ...]:
        """Of the running sum: a leading dim per axis, over which it is split."""
        return (*(mesh.shape[n] for n in self.axes), *shape)

    def sharding(self, mesh: Mesh) -> NamedSharding:
        return NamedSharding(mesh, partition_spec((*((n,) for n in self.axes), *self.spec)))

    def total(self, blocks: Any, mesh: Mesh, *, has_rows: bool = False) -> Any:
        """The sum over the devices: scattered over axes of the sum that split its home, in the order that scattering gives.

        Args:
          has_rows: of several values alike, in a leading dim before all others.
        """
        spec, home = self.spec, (*self.home, *((),) * (len(self.spec) - len(self.home)))
        if has_rows:
            blocks, spec, home = jnp.moveaxis(blocks, 0, len(self.axes)), ((), *spec), ((), *home)
        pairs = zip(spec, home, strict=True)
        scattered = tuple((*own, *(n for n in names if n in self.axes and n not in own)) for own, names in pairs)
        found = resolved(Partial(blocks, self.axes), spec, scattered, mesh)
        return found if scattered == home else jax.lax.with_sharding_constraint(found, NamedSharding(mesh, partition_spec(home)))


@dataclasses.dataclass(frozen=True)
class _Sum:
    """One gradient's chain under a plan."""

    chain: TracedAccumulation
    axes: tuple[str, ...]  # over which every summand is kept as a partial sum
    spec: Spec  # of the summands
    home: Spec  # of the total
    is_carried: bool
    task: int  # that makes the total


class GradientSums:
    """The evaluator's part that deals with summands of gradients.

    Args:
      bind, read: the evaluator's, which run an equation, and give the value of an operand.
    """

    def __init__(
        self, layouts: PlanLayouts, bind: Callable[..., list[Any]], read: Callable[..., Any],
        accumulations: Sequence[Accumulation],
    ):  # fmt: skip
        binding = layouts.binding
        self.layouts, self.bind, self.read, self.binding, self.mesh = layouts, bind, read, binding, layouts.mesh
        self.values = binding.values
        self._loops = {e.key: e for e, _ in layouts.program.walk() if e.body is not None}
        self._of_summand: dict[int, _Sum] = {}  # root of a summand
        self._made_as: dict[int, tuple[Spec, tuple[str, ...]]] = {}  # root of a summand -> as `PlanLayouts.made_as`
        self._of_start: dict[int, _Sum] = {}  # argument of a loop's body
        self._of_addition: dict[str, _Sum] = {}
        self._of_product: dict[str, _Sum] = {}  # the equation that a summand comes from, perhaps laid out anew
        self._of_total: dict[int, _Sum] = {}
        self._relayouts: set[str] = set()
        self._left: set[int] = set()  # totals that another program sums over the devices
        for found in accumulations:
            chain = binding.sums[found.parameter]
            spec, axes = layouts.summed_as(found)
            task, _ = layouts.writer[found.total]
            one = _Sum(chain, axes, spec, layouts.home[found.total], found.is_carried, task)
            self._of_summand.update(dict.fromkeys(chain.summands, one))
            self._made_as.update((root, layouts.made_as(binding.tensor_of[root])) for root in chain.summands)
            self._of_start.update(dict.fromkeys(chain.starts, one))
            self._of_addition.update(dict.fromkeys(chain.additions, one))
            self._of_product.update(dict.fromkeys(chain.relayouts.values(), one))
            self._of_product.update((binding.values.producer[r].key, one) for r in chain.summands)
            self._of_total[chain.total] = one
            self._relayouts |= chain.relayouts.keys()

    def defer(self, value: int, deferred: DeferredSum) -> None:
        """Leaves a gradient apart, or what a stage adds to one: its total over the devices is made by another program."""
        if (root := self.values.of(value).root) in self._of_total:
            self._left.add(root)
            return
        chain = summand_alone(value, self.layouts.program, self.values, self.binding.phases)
        one = _Sum(chain, deferred.axes, deferred.spec, deferred.home, is_carried=True, task=-1)
        self._of_summand[value] = one
        self._made_as[value] = deferred.spec, deferred.axes
        self._of_product.update(dict.fromkeys((self.values.producer[value].key, *chain.relayouts.values()), one))
        self._relayouts |= chain.relayouts.keys()

    def is_summand(self, out: int) -> bool:
        return out in self._of_summand

    def is_on_way(self, eqn: FlatEqn, env: Env) -> bool:
        """Whether an equation adds summands, or lays out, casts or scales one that is a partial sum."""
        if eqn.key in self._of_addition:
            return True
        return eqn.key in self._relayouts and any(isinstance(env.get(a), Partial) for a in eqn.read)

    def run(self, eqn: FlatEqn, env: Env) -> list[Any]:
        """Such an equation."""
        partial = {a: x for a in eqn.read if isinstance(x := env[a], Partial)}

        def of_blocks(*blocks: Any) -> Any:
            given = dict(zip(partial, blocks, strict=True))
            inputs = [given[a] if isinstance(a, int) and a in given else self.read(a, env) for a in eqn.inputs]
            return self.bind(eqn, inputs, eqn.params)[0]

        out = elementwise(of_blocks, *partial.values())
        one = self._of_addition.get(eqn.key)
        if one is None:
            return [self.summand(eqn.outputs[0], out)]
        out = constrained(out, one.spec, self.mesh)
        is_total = eqn.outputs[0] == one.chain.total and not one.is_carried and one.chain.total not in self._left
        return [resolved(out, one.spec, one.home, self.mesh) if is_total else out]

    def kept(self, eqn: FlatEqn, partial: set[str]) -> tuple[str, ...]:
        """Over which of the axes in `partial` an equation's sums stay apart: all or, where no summand comes from it, none.

        Some of them may be summed in the layout of all summands, which is that of the value after its relayouts: `summand` does.
        """
        if eqn.key not in self._of_product or eqn.name in ("reduce_max", "reduce_min"):
            return ()
        return tuple(n for n in self.mesh.axis_names if n in partial)

    def made(self, result: Any, kept: tuple[str, ...], spec: Spec) -> Any:
        """What such an equation made, its `kept` sums in leading dims."""
        return constrained(Partial(result, kept), spec, self.mesh) if kept else self.layouts.constrain(result, spec)

    def summand(self, out: int, x: Any) -> Any:
        """A value that may be a summand, in the layout of all summands."""
        one = self._of_summand.get(out)
        if one is None:
            return x
        source, sums = self._made_as[out]
        is_resolved = bool(sums) and not isinstance(x, Partial)  # towards the common layout already
        return split_off(x, one.axes, one.spec, self.mesh, None if is_resolved else source)

    def start(self, argument: int, x: Any) -> Any:
        """The first value of a loop's running sum."""
        one = self._of_start.get(argument)
        return x if one is None else split_off(x, one.axes, one.spec, self.mesh)

    def after_loop(self, eqn: FlatEqn, out: int, x: Any) -> Any:
        """A loop's result: its running sum is summed over the devices, unless an outer loop goes on with it."""
        if not isinstance(x, Partial):
            return x
        one = self._of_total.get(root := self.values.of(out).root)
        outer = self.values.scope.get(eqn.key)  # of a loop that trips were put into: none
        if one is None or root in self._left or (outer and set(self._loops[outer[-1]].body.inputs) & set(one.chain.starts)):
            return x
        with jax.named_scope(task_mark(one.task)):
            return resolved(x, one.spec, one.home, self.mesh)
