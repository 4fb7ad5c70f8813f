"""What a step trains: parameters, each paired with its gradient and the optimizer state that is updated with it."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection

from soapjax.graph.operators import BACKWARD, UPDATE
from soapjax.graph.passes.flat_updates import gradient_in_pieces
from soapjax.graph.passes.projected_updates import only_gradient
from soapjax.graph.passes.through_branches import ThroughBranches
from soapjax.graph.trace.program import FlatEqn, Program
from soapjax.graph.trace.tracing import TracedStep
from soapjax.graph.trace.values import Values


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


def trained_state(
    step: TracedStep, values: Values, phase: dict[str, int], downstream: set[int]
) -> tuple[tuple[TracedParameter, ...], frozenset[int]]:
    """The parameters, and the input positions of weights that follow them: which passes read, and updates make of parameters alone.

    Walks from each state output back through update equations of the same shape to its gradient. Where gradients of single examples
    are clipped and then summed, the gradient is their sum: `phase` gets what leads to it as backward work.
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

    # Parameters first: which sums are their gradients is known when moments are looked at.
    for i, o in sorted(step.state_pairs.items(), key=lambda pair: program.inputs[pair[0]] not in read):
        out, shape = program.outputs[o], tuple(in_avals[i].shape)
        found, sums = _gradient_of(program, values, phase, inside, out, shape) if isinstance(out, int) else (None, [])
        sums = [root for root in sums if root in downstream]
        if found is None and sums and program.inputs[i] in read:
            found = sums[0]
            _make_backward(values, phase, found)
        if found is None and isinstance(out, int) and program.inputs[i] in read:
            looks = (look(program, values, inside, out, is_backward, is_update) for look in (gradient_in_pieces, only_gradient))
            found = next((root for root in looks if root is not None), None)
        if found is None and isinstance(out, int) and program.inputs[i] not in read:  # a moment of means over rows, as Adam-mini's
            found, _ = _followed(program, values, phase, inside, out, shape, is_alike=bool)
        if found is not None:
            gradients[i] = found
    trained = [i for i in gradients if program.inputs[i] in read]
    followers = _followers(step, values, phase, inside, {i: gradients[i] for i in trained}, read)
    gradients = {i: root for i, root in gradients.items() if i not in followers}
    trained = [i for i in trained if i not in followers]
    state: dict[int, list[int]] = {}  # gradient -> what else is updated from it
    averages = _averages_of_old(step, values, phase, inside, {program.inputs[i]: gradients[i] for i in trained}, gradients, read)
    of_gradient = gradients | averages
    for j in sorted(of_gradient.keys() - set(trained)):
        state.setdefault(of_gradient[j], []).append(j)
    parameters = tuple(
        TracedParameter(step.in_paths[i], i, program.inputs[i], gradients[i], tuple(state.get(gradients[i], ()))) for i in trained
    )
    return parameters, followers


def _followers(
    step: TracedStep, values: Values, phase: dict[str, int], inside: ThroughBranches, gradients: dict[int, int], read: set[int]
) -> frozenset[int]:
    """Of the state that passes `read`: what the update makes of a parameter (a target network), that is not made of it.

    Args:
      gradients: of what seems to be trained; a parameter's is a follower's, too, that is made of the new value.
    """
    inputs, outputs = step.program.inputs, step.program.outputs
    shared = collections.Counter(gradients.values())
    by_value = {inputs[i]: i for i in gradients}
    made_of = functools.cache(lambda i: set(_made_of(step, values, phase, inside, i)))
    found = set()
    for i, o in step.state_pairs.items():
        is_alone = i in gradients and shared[gradients[i]] == 1
        if not is_alone and inputs[i] in read and step.in_avals[i].shape and isinstance(outputs[o], int):
            others = [by_value[root] for root in made_of(i) if root in by_value and by_value[root] != i]
            if any(inputs[i] not in made_of(j) for j in others):
                found.add(i)
    return frozenset(found)


def _made_of(step: TracedStep, values: Values, phase: dict[str, int], inside: ThroughBranches, i: int) -> list[int]:
    """Roots that the new value of state `i` is made of, through update equations of its shape."""
    program, shape = step.program, tuple(step.in_avals[i].shape)
    queue = [values.of(program.outputs[step.state_pairs[i]]).root]
    seen = set(queue)
    for root in queue:  # grows
        producer = values.producer.get(root)
        if producer is not None and phase[producer.key] == UPDATE:
            operands = inside.operands(producer, root, shape.__eq__)
            fresh = [values.of(a).root for a in operands if tuple(program.avals[a].shape) == shape]
            queue += [a for a in dict.fromkeys(fresh) if a not in seen]
            seen.update(fresh)
    return queue


def _averages_of_old(
    step: TracedStep, values: Values, phase: dict[str, int], inside: ThroughBranches, trained: dict[int, int],
    known: Collection[int], read: set[int],
) -> dict[int, int]:  # fmt: skip
    """State that is made of a parameter as it was before the update (an average that lags behind it, a copy), and that only updates
    read (passes do what is in `read`): input position -> the gradient of that parameter.

    Args:
      trained: gradient by the value of its parameter.
      known: input positions of state that a gradient is in.
    """
    program, found = step.program, dict[int, int]()
    for i, o in step.state_pairs.items():
        shape = tuple(step.in_avals[i].shape)
        if i in known or program.inputs[i] in read or not isinstance(program.outputs[o], int) or not shape:
            continue
        made_of = (root for root in _made_of(step, values, phase, inside, i) if root in trained)
        if (root := next(made_of, None)) is not None:
            found[i] = trained[root]
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
