"""Products that are added up before they are summed over devices: the executor's part that graph/passes/joint_sums.py found.

Under a plan, those products of a sum that are partial sums in the layout of the last one stay apart on their devices;
the last addition adds them up there, sums the total over the devices once, and adds whatever else belongs to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from soapjax.execute.spmd.evaluator import Env, task_mark
from soapjax.execute.spmd.partial import Partial, elementwise, resolved
from soapjax.execute.spmd.plan_layouts import PlanLayouts
from soapjax.graph.passes.joint_sums import TracedJointSum
from soapjax.graph.trace.program import Atom, FlatEqn
from soapjax.strategy.layout import Spec


@dataclasses.dataclass(frozen=True)
class _Sum:
    """One sum under a plan."""

    traced: TracedJointSum
    joined: tuple[int, ...]  # the products that wait for the last one, and that one
    spec: Spec  # of these, without the sums
    tensor: int  # the last product
    task: int  # that makes it


class JointSums:
    """The sums of a plan in which products wait for each other.

    Args:
      bind: the evaluator's, which runs an equation.
      operand: the evaluator's, which gives a value as a task reads it.
    """

    def __init__(self, layouts: PlanLayouts, bind: Callable[..., list[Any]], operand: Callable[..., Any]):
        graph, binding = layouts.graph, layouts.binding
        self.layouts, self.bind, self.operand, self.mesh = layouts, bind, operand, layouts.mesh
        self._of_addition: dict[str, _Sum] = {}
        self._of_summand: dict[int, _Sum] = {}
        self._products: set[str] = set()
        self._relayouts: set[str] = set()
        for traced, tensors in zip(binding.joint_sums, graph.joint_sums, strict=True):
            made = [layouts.made_as(t) for t in tensors.summands]
            joined = tuple(s for s, m in zip(traced.summands, made, strict=True) if m == made[-1])
            if len(joined) > 1 and made[-1][1]:
                last = tensors.summands[-1]
                one = _Sum(traced, joined, made[-1][0], last, layouts.writer[last][0])
                self._of_addition.update(dict.fromkeys(traced.additions, one))
                self._of_summand.update(dict.fromkeys(joined, one))
                self._products.update(traced.products[s] for s in joined)
                self._relayouts |= traced.relayouts

    def is_on_way(self, eqn: FlatEqn, env: Env) -> bool:
        """Whether an equation adds such products up, or lays one out that is a partial sum."""
        if eqn.key in self._of_addition:
            return True
        return eqn.key in self._relayouts and isinstance(env.get(eqn.inputs[0]), Partial)

    def is_product(self, eqn: FlatEqn) -> bool:
        """Whether an equation's sums stay apart."""
        return eqn.key in self._products

    def run(self, eqn: FlatEqn, env: Env) -> list[Any]:
        """An equation on the way: the last addition does the work of all."""
        one = self._of_addition.get(eqn.key)
        if one is None:
            return [elementwise(lambda x: self.bind(eqn, [x], eqn.params)[0], env[eqn.inputs[0]])]
        if eqn.key != one.traced.last:
            return [None]
        # What another program made (a part of a pipeline, say) comes summed up.
        waiting = [env[s] for s in one.joined if isinstance(env[s], Partial)]
        terms = [self._summed(one, waiting)] if waiting else []
        terms += [self._term(one, a, env) for a in one.traced.others]
        terms += [self._term(one, s, env) for s in one.traced.summands if not isinstance(env[s], Partial)]
        total = terms[0]
        for x in terms[1:]:
            total = jax.lax.add(total, x)
        return [total]

    def _summed(self, one: _Sum, waiting: list[Partial]) -> Any:
        """The sum over the devices, as the region reads the last product."""
        total = waiting[0]
        for x in waiting[1:]:
            total = elementwise(jax.lax.add, total, x)
        layouts, last = self.layouts, one.joined[-1]
        home = layouts.home[one.tensor]
        with jax.named_scope(task_mark(one.task)):
            x = resolved(total, one.spec, home, self.mesh)
        reader = layouts.binding.task_of[one.traced.last]
        return layouts.resharded(last, x, home, layouts.used[reader].get((one.tensor, -1)) or home)

    def _term(self, one: _Sum, atom: Atom, env: Env) -> Any:
        reader = self.layouts.binding.task_of[one.traced.last]
        return self.operand(reader, atom, -1, env)

    def leave(self, value: int, x: Any) -> Any:
        """A value that another program goes on with."""
        if not isinstance(x, Partial):
            return x
        one = self._of_summand[value]
        return resolved(x, one.spec, self.layouts.home[self.layouts.binding.tensor_of[value]], self.mesh)
