"""Forward, backward, update: the gradient boundary of a step, read off its name stacks and its data flow.

`jax.grad` leaves `jvp(...)` and `transpose(jvp(...))` in the name stacks; what
depends on a transposed equation and has neither mark is the update. Where the
stacks are no help (a hand-written backward pass), `soapjax.value_and_grad`
marks the gradients themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from soapjax.graph.operators import BACKWARD, FORWARD, UPDATE
from soapjax.graph.passes.forward_gradients import read_by_forward, updated_by
from soapjax.graph.passes.own_accumulation import own_additions
from soapjax.graph.passes.trained import TracedParameter, trained_state
from soapjax.graph.trace.program import FlatEqn
from soapjax.graph.trace.tracing import TracedStep, leaf_paths
from soapjax.graph.trace.values import Values

PHASE_NAMES = ("forward", "backward", "update")
MARK = "soapjax_gradient"
RECOMPUTED = "transpose(jvp())/rematted_computation"  # the name stack of what is recomputed by a plan's choice

_WRAPPED = re.compile(r"^((?:\w+\()+)(.*?)\)+$")
_NOISE = {"rematted_computation", "checkpoint", "while", "body", "scan", "closed_call", "jit", "pjit", "cond"}


def value_and_grad(fn: Callable[..., Any], argnums: int = 0, **kwargs: Any) -> Callable[..., Any]:
    """`jax.value_and_grad` whose gradients carry a mark, so that the gradient boundary is found in any step."""
    inner = jax.value_and_grad(fn, argnums, **kwargs)

    def wrapped(*args: Any, **kw: Any) -> Any:
        value, grads = inner(*args, **kw)
        return value, mark_gradients(grads)

    return wrapped


def mark_gradients(grads: Any) -> Any:
    """Marks every leaf of a tree as a gradient (an identity, free at run time)."""
    leaves, tree = jax.tree_util.tree_flatten(grads)
    names = leaf_paths(grads, "")
    return jax.tree.unflatten(tree, [checkpoint_name(g, f"{MARK}/{n}") for g, n in zip(leaves, names, strict=True)])


@functools.cache
def module_path(stack: str) -> str:
    """The readable module path of a name stack: transforms and loop words stripped.

    >>> module_path("transpose(jvp(T))/jvp(T)/rematted_computation/blk1/down")
    'blk1/down'
    >>> module_path("jvp()/blk1/vmap(attn)/wq")
    'blk1/attn/wq'
    """
    parts: list[str] = []
    for part in re.split(r"/(?![^(]*\))", stack):
        wrapped = _WRAPPED.match(part)
        if wrapped and "jvp(" in wrapped[1]:
            parts = []  # a gradient restarts the path; the wrapped root module adds nothing
        elif wrapped:  # other transforms stand where they are called
            parts += [name for name in wrapped[2].split("/") if name and name not in _NOISE and "<lambda>" not in name]
        elif part and part not in _NOISE and "<lambda>" not in part:
            parts.append(part)
    return "/".join(parts)


def is_recompute(eqn: FlatEqn) -> bool:
    return "rematted_computation" in eqn.stack


@dataclasses.dataclass(frozen=True)
class Phases:
    phase: dict[str, int]  # equation key -> phase
    parameters: tuple[TracedParameter, ...]
    followers: frozenset[int]  # positions among the step's inputs of weights that follow parameters (trained.py)
    own_additions: frozenset[str]  # keys of the equations with which the step itself adds up gradients (own_accumulation.py)
    # The first equation that reads what a later phase makes, and the one that makes it: of a second gradient, or one in a loop of
    # updates.
    late: tuple[FlatEqn, FlatEqn] | None

    @property
    def is_single_phase(self) -> bool:
        """More than one gradient cut: no barriers between the phases, tasks in program order."""
        return self.late is not None

    @property
    def lines_of_late(self) -> str:
        """Where the user's code goes on from an update, or from a gradient, to another gradient; "" where that is not known."""
        lines = [eqn.source for eqn in self.late or ()]
        return f"{lines[0]} reads what {lines[1]} makes" if lines and all(lines) else ""

    @functools.cached_property
    def trained(self) -> frozenset[int]:
        """The values of the parameters."""
        return frozenset(p.value for p in self.parameters)

    @functools.cached_property
    def by_gradient(self) -> dict[int, list[TracedParameter]]:
        """Parameters by the root of their gradient."""
        found: dict[int, list[TracedParameter]] = {}
        for p in self.parameters:
            found.setdefault(p.gradient, []).append(p)
        return found


def find_phases(step: TracedStep, values: Values) -> Phases:
    """Assigns every equation its phase and pairs parameters with gradients and optimizer state."""
    program = step.program
    marked = {
        a
        for eqn, _ in program.walk()
        if eqn.name == "name" and str(eqn.params.get("name", "")).startswith(MARK)
        for a in eqn.outputs
    }
    downstream: set[int] = set()  # values that depend on a backward equation or on a marked gradient
    phase: dict[str, int] = {}
    leaves = program.leaves
    for _ in range(2 if values.carries else 1):  # twice: the second time sees what flows round the loops
        for eqn in leaves:
            transform = _outermost_transform(eqn.stack)
            reads_later = not downstream.isdisjoint(values.sources(eqn))
            if transform == BACKWARD or not marked.isdisjoint(eqn.outputs):
                found = BACKWARD
            elif transform == FORWARD:
                found = FORWARD
            else:
                found = UPDATE if reads_later else FORWARD
            phase[eqn.key] = found
            if found == BACKWARD or reads_later:
                downstream.update(eqn.outputs)
    # What only the update reads (decayed moments, bias corrections) is update, although no gradient flows into it. New state
    # that nothing else reads is update too; a split key that the loss reads as well is not.
    moments = {values.of(program.outputs[o]).root for o in step.state_pairs.values() if isinstance(program.outputs[o], int)}
    returned = {values.of(o).root for o in program.outputs if isinstance(o, int)} - moments
    may_wait = {e.key for e in leaves if phase[e.key] == FORWARD and _outermost_transform(e.stack) is None and downstream}
    read_before = set(returned)
    known = -1
    while len(read_before) > known:  # what a loop hands on is read at its begin, in the trip behind
        known, waits = len(read_before), set(may_wait)
        for eqn, _ in reversed([*program.walk()]):
            if eqn.body is not None:  # behind its body; what it starts from may be read by no equation of it
                if any(phase[inner.key] != UPDATE and inner.key not in waits for inner in eqn.body.leaves):
                    read_before.update(values.of(a).root for a in eqn.read)
                continue
            if not read_before.isdisjoint(eqn.outputs):
                waits.discard(eqn.key)
            if phase[eqn.key] != UPDATE and eqn.key not in waits:
                read_before.update(values.sources(eqn))
    phase.update(dict.fromkeys(waits, UPDATE))
    phase.update(dict.fromkeys(_before_loops(step, values, phase), FORWARD))
    own = own_additions(program, values, phase)
    phase.update(dict.fromkeys(own, BACKWARD))
    parameters, followers = trained_state(step, values, phase, downstream)
    late = _first_late(leaves, values, phase)
    if late is not None:
        earlier = read_by_forward(leaves, values, {k for k, p in phase.items() if p == FORWARD})
        other = phase | dict.fromkeys(earlier, FORWARD)
        others, other_followers = trained_state(step, values, other, downstream)
        is_alike = [(p.leaf, p.gradient) for p in others] == [(p.leaf, p.gradient) for p in parameters]
        if is_alike and not updated_by(step, values, {k for k, p in other.items() if p == UPDATE}, earlier):
            return Phases(other, others, other_followers, own, _first_late(leaves, values, other))
    return Phases(phase, parameters, followers, own, late)


@functools.cache
def _outermost_transform(stack: str) -> int | None:
    """FORWARD, BACKWARD, or None where no gradient marks the equation.

    Of nested gradients the outermost decides: `jvp()/vmap(transpose(jvp()))` is forward work of the outer one.
    """
    transposed, differentiated = stack.find("transpose("), stack.find("jvp(")
    if transposed >= 0 and not 0 <= differentiated < transposed:
        return BACKWARD
    return FORWARD if differentiated >= 0 else None


def _before_loops(step: TracedStep, values: Values, phase: dict[str, int]) -> set[str]:
    """What of a gradient inside a loop of the loss JAX makes before the loop, and so without the loop's mark: the cotangent with
    which it begins, and what that makes of parameters and constants alone. By what is made of nothing else, and read in the forward
    pass.
    """
    program = step.program
    leaves, found = program.leaves, list[FlatEqn]()
    kept = {values.of(v).root for v in (*program.consts, *(program.inputs[i] for i in step.state_pairs))}
    early = kept.union(values.of(v).root for v in program.inputs)
    for eqn in leaves:
        if phase[eqn.key] == FORWARD and kept.issuperset(values.sources(eqn)):
            kept.update(eqn.outputs)
            early.update(eqn.outputs)
        elif phase[eqn.key] == BACKWARD and early.issuperset(values.sources(eqn)):
            early.update(eqn.outputs)
            found.append(eqn)
    if not found:
        return set()
    read, keys = {root for e in leaves if phase[e.key] == FORWARD for root in values.sources(e)}, set[str]()
    for eqn in reversed(found):
        if not read.isdisjoint(eqn.outputs):
            keys.add(eqn.key)
            read.update(values.sources(eqn))
    return keys


def _first_late(leaves: Sequence[FlatEqn], values: Values, phase: dict[str, int]) -> tuple[FlatEqn, FlatEqn] | None:
    """The first equation that reads what a later phase makes, and the one that makes it; of several, where the lines are known."""
    makers = {o: eqn for eqn in leaves for o in eqn.outputs}
    read = ((eqn, makers[root]) for eqn in leaves for root in values.sources(eqn) if root in makers)
    found = ((reader, maker) for reader, maker in read if phase[maker.key] > phase[reader.key])
    first = next(found, None)
    if first is None or all(eqn.source for eqn in first):
        return first
    return next((pair for pair in found if all(eqn.source for eqn in pair)), first)
