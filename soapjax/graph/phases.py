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
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from soapjax.graph.program import FlatEqn, Program
from soapjax.graph.trace import TracedStep, leaf_paths
from soapjax.graph.values import Values

FORWARD, BACKWARD, UPDATE = 0, 1, 2
PHASE_NAMES = ("forward", "backward", "update")
MARK = "soapjax_gradient"

_WRAPPED = re.compile(r"^(?:\w+\()+(.*?)\)+$")
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
    return tree.unflatten([checkpoint_name(g, f"{MARK}/{n}") for g, n in zip(leaves, names, strict=True)])


@functools.cache
def module_path(stack: str) -> str:
    """The readable module path of a name stack: transforms and loop words stripped.

    >>> module_path("transpose(jvp(T))/jvp(T)/rematted_computation/blk1/down")
    'blk1/down'
    """
    parts: list[str] = []
    for part in re.split(r"/(?![^(]*\))", stack):
        if _WRAPPED.match(part):
            parts = []  # a transform restarts the path; the wrapped root module adds nothing
        elif part and part not in _NOISE and "<lambda>" not in part:
            parts.append(part)
    return "/".join(parts)


def is_recompute(eqn: FlatEqn) -> bool:
    return "rematted_computation" in eqn.stack


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A trained leaf: its value, its gradient (a root of the program), and the state that is updated with it."""

    path: str
    leaf: int  # position among the step's inputs
    value: int
    gradient: int
    state_leaves: tuple[int, ...]  # optimizer state of the same shape, input positions


@dataclasses.dataclass(frozen=True)
class Phases:
    phase: dict[str, int]  # equation key -> phase
    parameters: tuple[Parameter, ...]
    is_single_phase: bool  # more than one gradient cut: no barriers between the phases


def find_phases(step: TracedStep, values: Values) -> Phases:
    """Assigns every equation its phase and pairs parameters with gradients and optimizer state."""
    program = step.program
    marked = {
        a
        for eqn, _ in program.walk()
        if eqn.name == "name" and str(eqn.params.get("name", "")).startswith(MARK)
        for a in eqn.outputs
    }
    has_stacks = any("transpose(" in eqn.stack for eqn, _ in program.walk())
    downstream: set[int] = set()  # values that depend on a backward equation or on a marked gradient
    updated: set[int] = set()
    phase: dict[str, int] = {}
    is_single = False
    leaves = [eqn for eqn, _ in program.walk() if eqn.body is None]
    for _ in range(2):  # twice: the second time sees what flows round the loops
        for eqn in leaves:
            inputs = values.sources(eqn)
            if "transpose(" in eqn.stack or (marked & set(eqn.outputs)):
                found = BACKWARD
            elif "jvp(" in eqn.stack:
                found = FORWARD
            else:
                found = UPDATE if inputs & downstream else FORWARD
            if found == FORWARD and inputs & updated:
                is_single = True
            phase[eqn.key] = found
            if found == BACKWARD or inputs & downstream:
                downstream.update(eqn.outputs)
            if found == UPDATE:
                updated.update(eqn.outputs)
    # What only the update reads (decayed moments, bias corrections) is update, although no gradient flows into it.
    read_before: set[int] = {values.of(o).root for o in program.outputs if isinstance(o, int)} - updated
    moments = {values.of(program.outputs[o]).root for o in step.state_pairs.values() if isinstance(program.outputs[o], int)}
    for eqn in reversed(leaves):
        if phase[eqn.key] == FORWARD and "jvp(" not in eqn.stack and downstream:
            if not any(o in read_before and o not in moments for o in eqn.outputs):
                phase[eqn.key] = UPDATE
        if phase[eqn.key] != UPDATE:
            read_before |= values.sources(eqn)
    if marked and not has_stacks:
        # No transposes to be seen: all that the gradients need is one phase, the rest stays update.
        is_single = False
    parameters = _parameters(step, values, phase)
    return Phases(phase, parameters, is_single)


def _parameters(step: TracedStep, values: Values, phase: dict[str, int]) -> tuple[Parameter, ...]:
    """Walks from each state output back through update equations of the same shape to its gradient."""
    program = step.program
    gradients: dict[int, int] = {}  # input position -> root of its gradient
    in_avals = step.in_avals
    for i, o in step.state_pairs.items():
        out = program.outputs[o]
        gradient = _gradient_of(program, values, phase, out, in_avals[i].shape) if isinstance(out, int) else None
        if gradient is not None:
            gradients[i] = gradient
    used = {
        values.of(a).root
        for eqn, _ in program.walk()
        if eqn.body is None and phase[eqn.key] != UPDATE
        for a in eqn.inputs
        if isinstance(a, int)
    }
    used |= {values.of(c.init).root for c in values.carries.values() if isinstance(c.init, int)}  # a trained first state
    trained = [i for i in gradients if program.inputs[i] in used]
    state: dict[int, list[int]] = {}  # gradient -> what else is updated from it
    for j in sorted(set(gradients) - set(trained)):
        state.setdefault(gradients[j], []).append(j)
    return tuple(
        Parameter(
            step.in_paths[i],
            i,
            program.inputs[i],
            gradients[i],
            tuple(state.get(gradients[i], ())),
        )
        for i in trained
    )


def _gradient_of(program: Program, values: Values, phase: dict[str, int], out: int, shape) -> int | None:
    """The nearest backward-phase root of `shape` that `out` is computed from, through update equations of that shape."""
    queue, seen = [out], {out}
    while queue:
        root = values.of(queue.pop(0)).root
        producer = values.producer.get(root)
        if producer is None:
            continue
        if phase[producer.key] == BACKWARD:
            return root
        if phase[producer.key] == UPDATE:
            fresh = [a for a in producer.inputs if isinstance(a, int) and a not in seen]
            fresh = [a for a in fresh if tuple(program.avals[a].shape) == tuple(shape)]
            seen.update(fresh)
            queue.extend(fresh)
    return None
