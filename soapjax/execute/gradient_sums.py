"""Gradients of parameters that are used more than once: summands stay on their devices until the last one is added.

What graph/accumulation.py found, as the executor runs it: products leave their partial sums apart where the
plan's common layout says so, the additions work on these, and the total is summed over the devices once, after its loop.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from soapjax.execute.evaluate import task_mark
from soapjax.execute.heavy import contracted_axes, run_heavy, run_scatter_add
from soapjax.execute.partial import Partial, constrained, elementwise, resolved, split_off, summed_blocks
from soapjax.graph.accumulation import Accumulation
from soapjax.graph.build import Binding
from soapjax.graph.operators import OperatorGraph, Task
from soapjax.graph.program import FlatEqn
from soapjax.strategy.layout import Spec

if TYPE_CHECKING:
    from soapjax.execute.spmd import PlannedEvaluator


@dataclasses.dataclass(frozen=True)
class _Sum:
    """One gradient's chain under a plan."""

    chain: Accumulation
    axes: tuple[str, ...]  # over which every summand is a partial sum
    spec: Spec  # of the summands
    home: Spec  # of the total
    is_carried: bool
    task: int  # that makes the total


class GradientSums:
    """The evaluator's part that deals with summands of gradients."""

    def __init__(self, evaluator: PlannedEvaluator, binding: Binding, graph: OperatorGraph, home: dict[int, Spec]):
        self.evaluator, self.binding, self.mesh = evaluator, binding, evaluator.bound.mesh
        self.values = binding.values
        writer = {a.tensor: (k, a) for k, task in enumerate(graph.tasks) for a in task.writes}
        self._of_summand: dict[int, _Sum] = {}  # root of a summand
        self._of_start: dict[int, _Sum] = {}  # argument of a loop's body
        self._of_addition: dict[str, _Sum] = {}
        self._of_product: dict[str, _Sum] = {}  # the equation that a summand comes from, perhaps laid out anew
        self._of_total: dict[int, _Sum] = {}
        self._relayouts: set[str] = set()
        for found in graph.accumulations:
            chain = binding.sums[found.parameter]
            k, access = writer[found.layout_of]
            operator = graph.tasks[k].operator
            one = _Sum(
                chain, evaluator.axes_on(operator, access.reduced), evaluator.spec_from(operator, access.dims),
                home[found.total], found.is_carried, writer[found.total][0],
            )  # fmt: skip
            self._of_summand.update(dict.fromkeys(chain.summands, one))
            self._of_start.update(dict.fromkeys(chain.starts, one))
            self._of_addition.update(dict.fromkeys(chain.additions, one))
            self._of_product.update(dict.fromkeys(chain.relayouts.values(), one))
            self._of_product.update((binding.values.producer[r].key, one) for r in chain.summands)
            self._of_total[chain.total] = one
            self._relayouts |= chain.relayouts.keys()

    def is_summand(self, out: int) -> bool:
        return out in self._of_summand

    def is_on_way(self, eqn: FlatEqn, env: dict[int, Any]) -> bool:
        """Whether an equation adds summands, or lays out one that is a partial sum."""
        if eqn.key in self._of_addition:
            return True
        return eqn.key in self._relayouts and isinstance(env.get(eqn.inputs[0]), Partial)

    def run(self, eqn: FlatEqn, env: dict[int, Any]) -> list[Any]:
        """Such an equation."""
        out = elementwise(lambda *x: self.evaluator.bind(eqn, list(x), eqn.params)[0], *(env[a] for a in eqn.inputs))
        one = self._of_addition.get(eqn.key)
        if one is None:
            return [self.summand(eqn.outputs[0], out)]
        out = constrained(out, one.spec, self.mesh)
        is_total = eqn.outputs[0] == one.chain.total and not one.is_carried
        return [resolved(out, one.spec, one.home, self.mesh) if is_total else out]

    def heavy(self, eqn: FlatEqn, inputs: list[Any], in_specs: list[Spec], raw: Spec) -> Partial | None:
        """A dot or a convolution that a summand comes from, its partial sums left apart; None for another."""
        one = self._of_product.get(eqn.key)
        if one is None:
            return None
        contracted = contracted_axes(eqn, inputs, in_specs, raw)
        kept = tuple(n for n in one.axes if n in contracted)
        if not kept:
            return None
        blocks = run_heavy(eqn, inputs, in_specs, raw, raw, self.mesh, lambda x, p: self.evaluator.bind(eqn, x, p), kept)
        return constrained(Partial(blocks, kept), raw, self.mesh)

    def light(self, eqn: FlatEqn, task: Task, inputs: list[Any]) -> list[Partial] | None:
        """A sum, or a scatter-add into zeros, that a summand comes from; None for another equation."""
        one = self._of_product.get(eqn.key)
        if one is None:
            return None
        if eqn.key in self.binding.reductions and eqn.name == "reduce_sum":
            spec = self.evaluator.spec_from(task.operator, self.binding.reductions[eqn.key])
            kept = tuple(n for n in one.axes if any(n in spec[d] for d in eqn.params["axes"]))
            return [summed_blocks(inputs[0], eqn.params["axes"], spec, kept, self.mesh)] if kept else None
        if eqn.key == task.heavy and eqn.name == "scatter-add":
            specs = [self.evaluator.spec_from(task.operator, dims) for dims in task.operand_dims]
            into, *split = (({n for names in s for n in names}) for s in specs)
            kept = tuple(n for n in one.axes if n not in into and all(n in s for s in split))
            zeros = self.values.producer.get(self.values.of(eqn.inputs[0]).root)
            if kept and zeros is not None and not any(isinstance(a, int) for a in zeros.inputs):
                inputs = [self.evaluator.constrain(x, s) for x, s in zip(inputs, specs, strict=True)]
                blocks = run_scatter_add(eqn, inputs, specs, kept, self.mesh, lambda x, p: self.evaluator.bind(eqn, x, p))
                return [Partial(blocks, kept)]
        return None

    def summand(self, out: int, x: Any) -> Any:
        """A value that may be a summand, in the layout of all summands."""
        one = self._of_summand.get(out)
        return x if one is None else split_off(x, one.axes, one.spec, self.mesh)

    def start(self, argument: int, x: Any) -> Any:
        """The first value of a loop's running sum."""
        one = self._of_start.get(argument)
        return x if one is None else split_off(x, one.axes, one.spec, self.mesh)

    def after_loop(self, eqn: FlatEqn, out: int, x: Any) -> Any:
        """A loop's result: its running sum is summed over the devices, unless an outer loop goes on with it."""
        if not isinstance(x, Partial):
            return x
        one = self._of_total.get(self.values.of(out).root)
        outer = self.values.scope[eqn.key]
        if one is None or (outer and set(self.evaluator.bound.eqn(outer[-1]).body.inputs) & set(one.chain.starts)):
            return x
        with jax.named_scope(task_mark(one.task)):
            return resolved(x, one.spec, one.home, self.mesh)
