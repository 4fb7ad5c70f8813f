"""The proof of a plan: its numbers are the single-device step's, and the compiled program does what it says.

Loss and gradients are compared leaf by leaf, ||g - g1|| / max(||g1||, 1e-6 ||all gradients||), in float64 (bound 1e-9)
and in the step's own precision (bound: 1e-5, or three times the single-device step's own distance from float64).
Gradients, never updated parameters: where a gradient is exactly zero, Adam turns rounding noise into steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from soapjax.execute.evaluate import Evaluator
from soapjax.execute.hlo import OpsCheck, check_ops
from soapjax.execute.inspect_stream import inspect_stream
from soapjax.execute.placement import PlacedStep
from soapjax.execute.spmd import Program
from soapjax.graph.build import Binding
from soapjax.graph.trace import TracedStep

FLOAT64_BOUND = 1e-9


# Machine code that is run twice needs no polishing; the HLO, which is what is read, is the same.
_COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}


class Verification(NamedTuple):
    loss_rel_error: float
    gradient_rel_error: float
    gradient_rel_bound: float
    loss_rel_error_float64: float
    gradient_rel_error_float64: float
    planned_ops: int
    ops_as_planned: int
    ops_unchecked: int
    num_gradients: int
    worst_leaf: str
    differences: tuple[str, ...]

    @property
    def is_proven(self) -> bool:
        return (
            self.gradient_rel_error <= self.gradient_rel_bound
            and self.gradient_rel_error_float64 <= FLOAT64_BOUND
            and self.loss_rel_error_float64 <= FLOAT64_BOUND
            and self.ops_as_planned == self.planned_ops - self.ops_unchecked
        )


class Reference(NamedTuple):
    """What the step gives on one device: outputs and gradients, in its own precision and in float64."""

    own: tuple[list, list]
    float64: tuple[list, list]


def reference(program: Program, arguments: list[Any]) -> Reference:
    """Runs the step on one device; one reference serves every plan of the same step and arguments."""
    return reference_of(program.step, arguments, gradient_ids(program.step, program.binding))


def verify(program: Program, arguments: list[Any], single: Reference | None = None) -> Verification:
    """Runs the step under the plan, in its own precision and in float64, on flat `arguments`, and compares."""
    step = program.step
    gradients = gradient_ids(program.step, program.binding)
    single = reference(program, arguments) if single is None else single
    if program.plan.pinned:
        placed = PlacedStep(program, donate=False)
        planned = run_stream(placed, arguments, is_float64=False)
        planned64 = run_stream(PlacedStep(program, donate=False, is_float64=True), arguments, is_float64=True)
        check = inspect_stream(placed.dispatches(), placed.argument_structs()).ops
    else:
        planned, text = _run(program.evaluator(), program, arguments, gradients)
        planned64, _ = _run(program.evaluator(is_float64=True), program, arguments, gradients)
        check = check_ops(program, text)
    names = [p.path for p in program.graph.parameters] or list(step.out_paths)
    losses = outputs_compared(step)
    return compared(planned, planned64, single, names, losses, check)


def compared(
    planned: tuple[list, list], planned64: tuple[list, list], single: Reference, names: list[str], losses: list[int],
    check: OpsCheck,
) -> Verification:  # fmt: skip
    """(outputs, gradients) under a plan, in the step's precision and in float64, beside those of one device.

    Args:
      names: of the gradients. `losses`: which outputs are compared.
    """
    own, worst = _gradient_error(planned[1], single.own[1], names)
    rounding, _ = _gradient_error(single.own[1], single.float64[1], names)
    error64, worst64 = _gradient_error(planned64[1], single.float64[1], names)
    return Verification(
        _output_error(planned[0], single.own[0], losses),
        own,
        max(1e-5, 3 * rounding),
        _output_error(planned64[0], single.float64[0], losses),
        error64,
        check.planned_ops,
        check.ops_as_planned,
        check.ops_unchecked,
        len(planned[1]),
        worst64 or worst,
        check.differences,
    )


def gradient_ids(step: TracedStep, binding: Binding) -> tuple[int, ...]:
    """Value ids of the gradients at the outermost level, in the order of the graph's parameters."""
    level = [o for eqn in step.program.eqns for o in eqn.outputs]
    at = {binding.values.of(o).root: o for o in reversed(level)}
    return tuple(at[p.gradient] for p in binding.phases.parameters)


def reference_of(step: TracedStep, arguments: list[Any], gradients: tuple[int, ...]) -> Reference:
    """Outputs and values `gradients` of a step on one device."""
    return Reference(*(_run(Evaluator(step.program, is_float64=x), None, arguments, gradients)[0] for x in (False, True)))


def _run(evaluator: Evaluator, program: Program | None, arguments: list[Any], also: tuple[int, ...]) -> tuple[tuple, str]:
    """(outputs, extra values) as NumPy arrays, and the compiled text of a planned program."""

    def fn(*leaves: Any) -> Any:
        return evaluator.run(list(leaves), also)

    with jax.enable_x64(evaluator.is_float64):
        jitted = jax.jit(fn) if program is None else jax.jit(fn, in_shardings=tuple(program.in_shardings()))
        if program is not None:
            shardings = program.in_shardings()
            arguments = [jax.device_put(a, s) for a, s in zip(arguments, shardings, strict=True)]
        compiled = jitted.lower(*arguments).compile(_COMPILER_OPTIONS if jax.default_backend() == "cpu" else None)
        outputs, extra = compiled(*arguments)
        return (list(map(_numpy, outputs)), list(map(_numpy, extra))), compiled.as_text() if program is not None else ""


def run_stream(step: Any, arguments: list[Any], *, is_float64: bool) -> tuple[list, list]:
    """As `_run`, of a `PlacedStep` or `PipelineStep`."""
    with jax.enable_x64(is_float64):
        outputs, gradients = step.run(arguments, with_gradients=True)
        return list(map(_numpy, outputs)), list(map(_numpy, gradients))


def outputs_compared(step: TracedStep) -> list[int]:
    """The outputs that are no state: loss and metrics."""
    state = set(step.state_pairs.values())
    return [i for i in range(len(step.out_paths)) if i not in state] or list(range(len(step.out_paths)))


def _numpy(x: Any) -> np.ndarray | None:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return None
    return np.asarray(x.astype("float32") if str(x.dtype) == "bfloat16" else x)


def _gradient_error(found: list, wanted: list, names: list[str]) -> tuple[float, str]:
    """The largest relative error of any leaf, and its name."""
    norms = [float(np.linalg.norm(np.asarray(g, np.float64))) for g in wanted]
    everything = float(np.sqrt(sum(n * n for n in norms)))
    worst, name = 0.0, ""
    for g, g1, norm, path in zip(found, wanted, norms, names, strict=False):
        distance = float(np.linalg.norm(np.asarray(g, np.float64) - np.asarray(g1, np.float64)))
        error = distance / max(norm, 1e-6 * everything, np.finfo(np.float64).tiny)
        if not error <= worst:  # a NaN counts as the worst
            worst, name = error, path
    return worst, name


def _output_error(found: list, wanted: list, which: Any) -> float:
    """The largest relative error among the floating-point outputs that are no state (the loss, metrics, predictions)."""
    worst = 0.0
    for i in which:
        if wanted[i] is not None and np.issubdtype(wanted[i].dtype, np.floating):
            a, b = np.asarray(found[i], np.float64), np.asarray(wanted[i], np.float64)
            error = float(np.linalg.norm(a - b) / max(np.linalg.norm(b), np.finfo(np.float64).tiny))
            worst = error if not error <= worst else worst
    return worst
