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
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from soapjax.graph.passes.flat_updates import gradient_in_pieces
from soapjax.graph.passes.forward_gradients import read_by_forward, updated_by
from soapjax.graph.passes.projected_updates import only_gradient
from soapjax.graph.passes.through_branches import ThroughBranches
from soapjax.graph.trace.program import FlatEqn, Program
from soapjax.graph.trace.tracing import TracedStep, leaf_paths
from soapjax.graph.trace.values import Values

FORWARD, BACKWARD, UPDATE = 0, 1, 2
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
class TracedParameter:
    """A trained leaf: its value, its gradient (a root of the program), and the state that is updated with it."""

    path: str
    leaf: int  # position among the step's inputs
    value: int
    gradient: int
    state_leaves: tuple[int, ...]  # optimizer state of the same shape, input positions

    @property
    def leaves(self) -> tuple[int, ...]:
        """Positions among the step's inputs of all that is updated together: the parameter, then its optimizer state."""
        return (self.leaf, *self.state_leaves)


@dataclasses.dataclass(frozen=True)
class Phases:
    phase: dict[str, int]  # equation key -> phase
    parameters: tuple[TracedParameter, ...]
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
    parameters = _parameters(step, values, phase, downstream)
    late = _first_late(leaves, values, phase)
    if late is not None:
        earlier = read_by_forward(leaves, values, {k for k, p in phase.items() if p == FORWARD})
        other = phase | dict.fromkeys(earlier, FORWARD)
        others = _parameters(step, values, other, downstream)
        is_alike = [(p.leaf, p.gradient) for p in others] == [(p.leaf, p.gradient) for p in parameters]
        if is_alike and not updated_by(step, values, {k for k, p in other.items() if p == UPDATE}, earlier):
            return Phases(other, others, _first_late(leaves, values, other))
    return Phases(phase, parameters, late)


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


def _parameters(step: TracedStep, values: Values, phase: dict[str, int], downstream: set[int]) -> tuple[TracedParameter, ...]:
    """Walks from each state output back through update equations of the same shape to its gradient.

    Where gradients of single examples are clipped and then summed, the gradient is their sum: `phase` gets what leads to it as
    backward work.
    """
    program = step.program
    read = {root for eqn in program.leaves if phase[eqn.key] != UPDATE for root in values.sources(eqn)}
    in_avals = step.in_avals
    gradients: dict[int, int] = {}  # input position -> root of its gradient
    inside = ThroughBranches()

    def is_backward(eqn: FlatEqn) -> bool:
        return phase[eqn.key] == BACKWARD

    def is_update(eqn: FlatEqn) -> bool:
        return phase[eqn.key] == UPDATE

    for i, o in step.state_pairs.items():
        out, shape = program.outputs[o], tuple(in_avals[i].shape)
        found, sums = _gradient_of(program, values, phase, inside, out, shape) if isinstance(out, int) else (None, [])
        sums = [root for root in sums if root in downstream]
        if found is None and sums and program.inputs[i] in read:
            found = sums[0]
            _make_backward(values, phase, found)
        if found is None and isinstance(out, int) and program.inputs[i] in read:
            looks = (look(program, values, inside, out, is_backward, is_update) for look in (gradient_in_pieces, only_gradient))
            found = next((root for root in looks if root is not None), None)
        if found is not None:
            gradients[i] = found
    trained = [i for i in gradients if program.inputs[i] in read]
    state: dict[int, list[int]] = {}  # gradient -> what else is updated from it
    averages = _averages_of_old(step, values, phase, inside, {program.inputs[i]: gradients[i] for i in trained}, gradients)
    of_gradient = gradients | averages
    for j in sorted(of_gradient.keys() - set(trained)):
        state.setdefault(of_gradient[j], []).append(j)
    return tuple(
        TracedParameter(step.in_paths[i], i, program.inputs[i], gradients[i], tuple(state.get(gradients[i], ()))) for i in trained
    )


def _averages_of_old(
    step: TracedStep, values: Values, phase: dict[str, int], inside: ThroughBranches, trained: dict[int, int],
    known: Collection[int],
) -> dict[int, int]:  # fmt: skip
    """State that is made of a parameter as it was before the update (an average that lags behind it, a copy), and that only updates
    read: input position -> the gradient of that parameter.

    Args:
      trained: gradient by the value of its parameter.
      known: input positions of state that a gradient is in.
    """
    program, found = step.program, dict[int, int]()
    read = {root for eqn in program.leaves if phase[eqn.key] != UPDATE for root in values.sources(eqn)}
    for i, o in step.state_pairs.items():
        shape = tuple(step.in_avals[i].shape)
        if i in known or program.inputs[i] in read or not isinstance(program.outputs[o], int) or not shape:
            continue
        queue = [values.of(program.outputs[o]).root]
        for root in queue:  # grows
            if root in trained:
                found[i] = trained[root]
                break
            producer = values.producer.get(root)
            if producer is not None and phase[producer.key] == UPDATE:
                operands = inside.operands(producer, root, shape.__eq__)
                alike = (values.of(a).root for a in operands if tuple(program.avals[a].shape) == shape)
                queue += [a for a in dict.fromkeys(alike) if a not in queue]
    return found


def _gradient_of(
    program: Program, values: Values, phase: dict[str, int], inside: ThroughBranches, out: int, shape: tuple[int, ...]
) -> tuple[int | None, list[int]]:
    """The nearest backward-phase root of `shape` that `out` is computed from, through update equations of that shape; where none
    leads to one, also through what is transposed, or has dims of one more or less (Muon iterates on stacks of matrices).

    Also the sums on the way whose operands have another shape and come from the backward phase.
    """
    found, sums = _followed(program, values, phase, inside, out, shape, is_alike=lambda other: other == shape)
    if found is None and not sums:
        dims = _dims(shape)
        found, _ = _followed(program, values, phase, inside, out, shape, is_alike=lambda other: _dims(other) == dims)
    return found, sums


def _dims(shape: tuple[int, ...]) -> list[int]:
    return sorted(n for n in shape if n > 1)


def _followed(
    program: Program, values: Values, phase: dict[str, int], inside: ThroughBranches, out: int, shape: tuple[int, ...],
    is_alike: Callable[[tuple[int, ...]], bool],
) -> tuple[int | None, list[int]]:  # fmt: skip
    """As `_gradient_of`, through update equations of shapes that are alike."""
    queue, seen = [out], {out}
    sums: list[int] = []
    while queue:
        value = queue.pop(0)
        root = values.of(value).root
        producer = values.producer.get(root)
        if producer is None:
            if (carry := values.carries.get(root)) is not None and isinstance(carry.init, int) and carry.init not in seen:
                seen.add(carry.init)  # of a loop over a memory of earlier gradients
                queue.append(carry.init)
            continue
        if phase[producer.key] == BACKWARD and tuple(program.avals[value].shape) == shape:
            return root, sums
        if phase[producer.key] == UPDATE:
            rank = max((len(program.aval(a).shape) for a in producer.inputs), default=0)
            if producer.name in ("reduce_sum", "dot_general") and rank > len(shape):
                sums.append(root)
            fresh = [a for a in inside.operands(producer, root, is_alike) if a not in seen]
            fresh = [a for a in fresh if is_alike(tuple(program.avals[a].shape))]
            seen.update(fresh)
            queue.extend(fresh)
    return None, sums


def _make_backward(values: Values, phase: dict[str, int], root: int) -> None:
    """Update equations that lead to `root` become backward work."""
    queue = [root]
    while queue:
        producer = values.producer.get(queue.pop())
        if producer is not None and phase[producer.key] == UPDATE:
            phase[producer.key] = BACKWARD
            queue += values.sources(producer)
