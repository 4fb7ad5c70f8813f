"""The proof of a plan: its numbers are the single-device step's, and the compiled program does what it says.

Loss and gradients are compared leaf by leaf, ||g - g1|| / max(||g1||, 1e-6 ||all gradients||), in float64 (bound 1e-9)
and in the step's own precision (bound: 1e-5, or three times the single-device step's own distance from float64).
Gradients, never updated parameters: where a gradient is exactly zero, Adam turns rounding noise into steps.

A value that lies within rounding of where relu or a maximum switches may fall to either side, which moves gradients at once
(one unit of eight behind a batch norm: by 9 times their own size). One run shows that by chance: where the numbers in the
step's precision are all that is wrong, its distance from float64 is measured on arguments moved by rounding too.

A metric may be nothing but rounding (the mean of what a layer norm has centred): it has no digit to compare, and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from soapjax.execute.compiled.hlo import OpsCheck, check_ops
from soapjax.execute.compiled.proof_programs import Numbers, OneDevice, PlannedRun, as_numpy, in_precision, side_by_side
from soapjax.execute.compiled.stream_inspection import inspect_stream
from soapjax.execute.spmd.planned_evaluator import BoundStep
from soapjax.execute.spmd.promotion import in_type_of
from soapjax.execute.streams.placed_step import PlacedStep
from soapjax.execute.streams.stream import Streamed
from soapjax.execute.transfers.stacked_state import as_pieces, as_rows
from soapjax.graph.passes.build import Binding
from soapjax.graph.trace.tracing import TracedStep

FLOAT64_BOUND = 1e-9
OWN_BOUND, OWN_FACTOR = 1e-5, 3
NUM_MOVED = 8  # runs on moved arguments
NO_DIGIT = 0.1  # of an output in float64 that arguments moved by rounding change by so much
MOVED_BY = 4  # units of the precision, at most: sums in another order lose as much


class Verification(NamedTuple):
    loss_rel_error: float
    loss_rel_bound: float
    gradient_rel_error: float
    gradient_rel_bound: float
    loss_rel_error_float64: float
    gradient_rel_error_float64: float
    planned_ops: int
    ops_as_planned: int
    ops_unchecked: int
    num_gradients: int
    num_outputs: int  # that were compared: floating-point numbers that are no state
    worst_leaf: str
    differences: tuple[str, ...]

    @property
    def is_proven(self) -> bool:
        """Never where nothing was compared."""
        return (
            self.num_gradients + self.num_outputs > 0
            and self.loss_rel_error <= self.loss_rel_bound
            and self.gradient_rel_error <= self.gradient_rel_bound
            and self.is_proven_in_float64
            and self.ops_as_planned == self.planned_ops - self.ops_unchecked
        )

    @property
    def is_proven_in_float64(self) -> bool:
        return self.gradient_rel_error_float64 <= FLOAT64_BOUND and self.loss_rel_error_float64 <= FLOAT64_BOUND


class Reference(NamedTuple):
    """What the step gives on one device, in its own precision and in float64; `run` gives either for other arguments."""

    own: Numbers
    float64: Numbers
    run: Callable[..., Numbers]  # (arguments, is_float64=False)
    arguments: list[Any]


def reference(program: BoundStep, arguments: list[Any]) -> Reference:
    """Runs the step on one device; one reference serves every plan of the same step and arguments."""
    return reference_of(program.step, arguments, gradient_ids(program.step, program.binding))


def verify(program: BoundStep, arguments: list[Any], single: Reference | None = None) -> Verification:
    """Runs the step under the plan, in its own precision and in float64, on flat `arguments`, and compares."""
    step = program.step
    gradients = gradient_ids(program.step, program.binding)
    if program.plan.pinned:
        single = reference(program, arguments) if single is None else single
        placed = PlacedStep(program, donate=False)
        planned = run_stream(placed, arguments, is_float64=False)
        planned64 = run_stream(PlacedStep(program, donate=False, is_float64=True), arguments, is_float64=True)
        check = inspect_stream(placed).ops
    else:
        with side_by_side() as compiling:
            one = OneDevice(step, gradients)
            if single is None:
                one.prepare(arguments, compiling)
            own = PlannedRun(program.evaluator(), program, arguments, gradients, compiling)
            wide = PlannedRun(program.evaluator(is_float64=True), program, arguments, gradients, compiling)
            single = single_device(one, arguments) if single is None else single
            planned, planned64 = own(arguments), wide(arguments)
        check = check_ops(program, own.text())
    names = [p.path for p in program.graph.trained] or list(step.out_paths)
    losses = outputs_compared(step)
    return compared(planned, planned64, single, names, losses, check)


def compared(
    planned: Numbers, planned64: Numbers, single: Reference, names: list[str], losses: list[int], check: OpsCheck
) -> Verification:
    """What a plan gave, in the step's precision and in float64, beside what one device gives.

    Args:
      names: of the gradients. `losses`: which outputs are compared.
    """

    if not planned[1] and not any(is_compared(single.own[0][i]) for i in losses):  # a step that trains nothing: its state, then
        losses = list(range(len(single.own[0])))
    if not _output_error(planned64[0], single.float64[0], losses) <= FLOAT64_BOUND:
        losses = _with_digits(single, losses)
    num_outputs = sum(is_compared(single.own[0][i]) for i in losses)

    def errors(found: Numbers, wanted: Numbers) -> tuple[float, float, str]:
        gradient, name = _gradient_error(found[1], wanted[1], names)
        return _output_error(found[0], wanted[0], losses), gradient, name

    def verification(rounding: list[tuple[float, float, str]]) -> Verification:
        loss_bound = max(OWN_BOUND, *(OWN_FACTOR * r[0] for r in rounding))
        gradient_bound = max(OWN_BOUND, *(OWN_FACTOR * r[1] for r in rounding))
        return Verification(
            loss_rel_error=loss, loss_rel_bound=loss_bound, gradient_rel_error=gradient, gradient_rel_bound=gradient_bound,
            loss_rel_error_float64=loss64, gradient_rel_error_float64=gradient64, planned_ops=check.planned_ops,
            ops_as_planned=check.ops_as_planned, ops_unchecked=check.ops_unchecked, num_gradients=len(planned[1]),
            num_outputs=num_outputs, worst_leaf=worst64 if gradient64 > FLOAT64_BOUND else worst, differences=check.differences,
        )  # fmt: skip

    loss, gradient, worst = errors(planned, single.own)
    loss64, gradient64, worst64 = errors(planned64, single.float64)
    rounding = [errors(single.own, single.float64)]
    found = verification(rounding)
    if found.is_proven or not found.is_proven_in_float64:
        return found
    rounding += [errors(single.run(moved), single.float64) for moved in _moved(single.arguments, NUM_MOVED)]
    return verification(rounding)


def _with_digits(single: Reference, outputs: list[int]) -> list[int]:
    """Those of the outputs that have digits in float64: what rounding alone makes of them is little."""
    (moved,) = _moved(single.arguments, 1, np.dtype("float64"))
    again = single.run(moved, is_float64=True)
    return [i for i in outputs if _output_error(again[0], single.float64[0], [i]) < NO_DIGIT]


def _moved(arguments: list[Any], count: int, dtype: Any = None) -> Iterator[list[Any]]:
    """Arguments that differ from the given ones by rounding, some times; of `dtype` instead of their own."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        moved = []
        for x in arguments:
            if hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, np.floating):
                own = x.dtype if dtype is None else dtype
                by = MOVED_BY * float(jnp.finfo(own).eps) * rng.integers(-1, 2, x.shape)
                x = (np.asarray(x, np.float64) * (1 + by)).astype(own)
            moved.append(x)
        yield moved


def gradient_ids(step: TracedStep, binding: Binding) -> tuple[int, ...]:
    """Value ids of the gradients at the outermost level, in the order of the graph's parameters.

    A gradient that stays inside a loop of updates is proven by the parameter that the loop returns.
    """
    level = [o for eqn in step.program.eqns for o in eqn.outputs]
    at = {binding.values.of(o).root: o for o in reversed(level)}
    updated: dict[int, Any] = {p.leaf: step.program.outputs[step.state_pairs[p.leaf]] for p in binding.phases.parameters}
    return tuple(at.get(p.gradient, updated[p.leaf]) for p in binding.phases.parameters)


def reference_of(step: TracedStep, arguments: list[Any], gradients: tuple[int, ...]) -> Reference:
    """Outputs and values `gradients` of a step on one device."""
    one = OneDevice(step, gradients)
    with side_by_side() as compiling:
        one.prepare(arguments, compiling)
        return single_device(one, arguments)


def single_device(one: OneDevice, arguments: list[Any]) -> Reference:
    return Reference(one(arguments), one(arguments, is_float64=True), one, arguments)


def run_stream(step: Streamed, arguments: list[Any], *, is_float64: bool) -> Numbers:
    """Outputs and gradients of a step of several programs."""
    with in_precision(step.step.program, is_float64):
        pieces = step.pieces
        if is_float64:  # whose integers have 64 bits, unless they were traced with fewer
            traced = (step.step.program.avals[i] for i in step.step.program.inputs)
            arguments = [in_type_of(t, x) for t, x in zip(traced, arguments, strict=True)]
        outputs, gradients = step.run(arguments if pieces is None else as_pieces(arguments, pieces), with_gradients=True)
        outputs = outputs if pieces is None else as_rows(outputs, pieces)
        return list(map(as_numpy, outputs)), list(map(as_numpy, gradients))


def outputs_compared(step: TracedStep) -> list[int]:
    """The outputs that are no state: loss and metrics."""
    state = set(step.state_pairs.values())
    return [i for i in range(len(step.out_paths)) if i not in state] or list(range(len(step.out_paths)))


def _gradient_error(found: list, wanted: list, names: list[str]) -> tuple[float, str]:
    """The largest relative error of any leaf, and its name."""
    norms = [float(np.linalg.norm(_wide(g))) for g in wanted]
    everything = float(np.sqrt(sum(n * n for n in norms)))
    worst, name = 0.0, ""
    for g, g1, norm, path in zip(found, wanted, norms, names, strict=False):
        distance = float(np.linalg.norm(_wide(g) - _wide(g1)))
        error = distance / max(norm, 1e-6 * everything, np.finfo(np.float64).tiny)
        if not error <= worst:  # a NaN counts as the worst
            worst, name = error, path
    return worst, name


def is_compared(output: np.ndarray | None) -> bool:
    """Whether an output has numbers that rounding may change."""
    return output is not None and output.size > 0 and np.issubdtype(output.dtype, np.inexact)


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)


def _output_error(found: list, wanted: list, which: Any) -> float:
    """The largest relative error among the floating-point outputs that are no state (the loss, metrics, predictions)."""
    worst = 0.0
    for i in which:
        if is_compared(wanted[i]):
            a, b = _wide(found[i]), _wide(wanted[i])
            error = float(np.linalg.norm(a - b) / max(np.linalg.norm(b), np.finfo(np.float64).tiny))
            worst = error if not error <= worst else worst
    return worst
