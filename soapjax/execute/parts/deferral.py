"""Gradients of a stage that are summed over its devices once per step: until then every device keeps a running sum of its own.

A gradient is deferred unless its parameter is gathered for each pass, or its sums are to be sharded: the total is then summed over
devices with the update, or reduce-scattered to where a sharded parameter is stored (ZeRO-1). The others' gradients (ZeRO-2 and 3)
are reduce-scattered once per micro-batch, into a running sum that is sharded too.
"""

from __future__ import annotations

from soapjax.execute.parts.cut import Part, keys_of
from soapjax.execute.parts.part_program import Place
from soapjax.execute.spmd.gradient_sums import DeferredSum
from soapjax.execute.spmd.plan_layouts import axes_on, split_of
from soapjax.graph.operators import Accumulation
from soapjax.strategy.configs import StorageName


def sums_within(place: Place, part: Part) -> list[Accumulation]:
    """The gradients of parameters with several uses that a stage's part makes all of: summed over its devices once, not in each."""
    binding, mine = place.bound.binding, {k for e in part.eqns for k in keys_of(e)}
    found = []
    for one in place.bound.graph.accumulations if place.mesh.size > 1 else ():
        chain = binding.sums[one.parameter]
        products = (binding.values.producer[r].key for r in chain.summands)
        if mine.issuperset((*chain.additions, *chain.relayouts, *chain.relayouts.values(), *products)):
            found.append(one)
    return found


def deferred_sums(place: Place, part: Part, gradients: dict[int, int]) -> dict[int, DeferredSum]:
    """Which of the `gradients` (value -> parameter) that a stage's backward part makes wait for the update, by value."""
    bound, binding, graph = place.bound, place.bound.binding, place.bound.graph
    if place.mesh.size == 1:
        return {}
    read = {a for e in part.eqns for a in e.read}
    made = part.made
    writes = {a.tensor: (task, a) for task in graph.tasks for a in task.writes}
    laid_out_as = {binding.sums[a.parameter].total: a.layout_of for a in place.sums}  # a sum of several uses, as one summand
    found = {}
    for value, parameter in gradients.items():
        owner = bound.plan.operators[graph.operators[graph.parameters[parameter].owner].name]
        root = binding.values.of(value).root
        tensor = laid_out_as.get(root, binding.tensor_of.get(value, -1))
        is_alone = value in made and value not in read
        storage = StorageName.parse(owner.storage)
        if storage.is_scattering or not is_alone or tensor not in writes:
            continue
        if root not in laid_out_as and (root != value or writes[tensor][0].scope):
            continue
        task, access = writes[tensor]
        operator = graph.operators[task.operator]
        if axes := axes_on(bound.plan, operator, access.reduced):
            found[value] = DeferredSum(axes, split_of(bound.plan, operator, access.dims), place.spec(value))
    return found
