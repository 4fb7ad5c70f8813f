"""The programs of a proof: a step on one device and under its plan, in its own precision and in float64.

Compiling them is nearly all the time that a proof takes, each as long as `jax.jit` takes for the step. They know nothing of
one another: on CPUs all are compiled on as many cores as there are while further ones are traced, and each runs when it is asked.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from soapjax.execute.spmd.evaluator import OfMicroBatch, ProgramEvaluator
from soapjax.execute.spmd.planned_evaluator import BoundStep
from soapjax.execute.spmd.promotion import high, is_low
from soapjax.execute.transfers.arrivals import place_all
from soapjax.graph.trace.program import Program
from soapjax.graph.trace.tracing import TracedStep
from soapjax.helpers.compiler_options import LEVEL, OLDER_EMITTERS, compiled_with

# Machine code that is run once or twice needs no polishing: the dots, convolutions and collectives that are read are the same.
_QUICKLY = {**OLDER_EMITTERS, LEVEL: 0}
MOST_AT_ONCE = 4  # the programs of one proof
_OF_64_BITS = {"float64", "int64", "uint64", "complex128"}

Numbers = tuple[list, list]  # outputs and gradients, as NumPy arrays
Compiling = Callable[[Any], Callable[[], Any]]  # a lowered program -> waits for it to be compiled


@contextlib.contextmanager
def side_by_side() -> Iterator[Compiling]:
    """Compiles while others are traced. On other devices than CPUs one after the other: compilers try kernels out on them."""
    if jax.default_backend() != "cpu":
        yield one_by_one
        return
    with ThreadPoolExecutor(min(MOST_AT_ONCE, os.cpu_count() or 1), thread_name_prefix="proof") as pool:
        waiting: list[Future[Any]] = []

        def begin(lowered: Any) -> Callable[[], Any]:
            waiting.append(pool.submit(compiled_with, lowered, _QUICKLY))
            return waiting[-1].result

        try:
            yield begin
        finally:
            for each in waiting:  # after an error nobody asks for the others
                each.cancel()


def one_by_one(lowered: Any) -> Callable[[], Any]:
    """Compiles when the program is asked for."""
    return functools.cache(lambda: compiled_with(lowered, _QUICKLY if jax.default_backend() == "cpu" else {}))


def in_precision(program: Program, is_float64: bool) -> contextlib.AbstractContextManager:
    """For a step in its own precision, which has 64 bits where it was traced with them, or in float64."""
    has_64_bits = any(getattr(getattr(a, "dtype", None), "name", "") in _OF_64_BITS for a in program.avals.values())
    return jax.enable_x64(is_float64 or has_64_bits)


class OneDevice:
    """A step on one device, compiled once for each precision: arguments -> outputs and the values `gradients`.

    Args:
      draws: equations that draw for the micro-batch whose number the call is given.
    """

    def __init__(self, step: TracedStep, gradients: tuple[int, ...], draws: frozenset[str] = frozenset()):
        self._step, self._gradients, self._draws = step, gradients, draws
        self._compiled: dict[bool, Callable[[], Any]] = {}

    def prepare(self, arguments: list[Any], compiling: Compiling) -> None:
        """Begins to compile for both precisions."""
        for is_float64 in (False, True):
            with in_precision(self._step.program, is_float64):
                self._prepare(_own(arguments, is_float64, 0, {}), is_float64, compiling)

    def __call__(
        self, arguments: list[Any], *, is_float64: bool = False, number: int = 0, whole: Mapping[str, Any] | None = None
    ) -> Numbers:
        """`number`, `whole`: of a micro-batch, as in `OfMicroBatch`."""
        with in_precision(self._step.program, is_float64):
            given = _own(arguments, is_float64, number, whole or {})
            self._prepare(given, is_float64, one_by_one)
            return _as_numbers(self._compiled[is_float64]()(*given))

    def _prepare(self, given: list[Any], is_float64: bool, compiling: Compiling) -> None:
        if is_float64 not in self._compiled:
            evaluator = ProgramEvaluator(self._step.traced_program or self._step.program, is_float64=is_float64)

            def run(own: tuple[Any, Mapping[str, Any]], *leaves: Any) -> tuple[list[Any], list[Any]]:
                with evaluator.of_micro_batch(OfMicroBatch(self._draws, *own)):
                    return evaluator.run(list(leaves), self._gradients)

            self._compiled[is_float64] = compiling(jax.jit(run).lower(*given))


def _own(arguments: list[Any], is_float64: bool, number: int, whole: Mapping[str, Any]) -> list[Any]:
    """What a program on one device is called with: what a micro-batch has of its own, and the arguments in the precision."""
    leaves = [_on_host(x) for x in arguments] if is_float64 else arguments
    return [(np.uint32(number), dict(whole)), *leaves]


def _on_host(x: Any) -> Any:
    """In float64; JAX would compile a program for every shape."""
    return np.asarray(x).astype(high(x.dtype)) if hasattr(x, "dtype") and is_low(x.dtype) else x


class PlannedRun:
    """A step under a plan, in one precision: arguments -> outputs and the values `also`. Compiled from when it is made."""

    def __init__(
        self, evaluator: ProgramEvaluator, program: BoundStep, arguments: list[Any], also: tuple[int, ...], compiling: Compiling
    ):
        self._is_float64, self._shardings = evaluator.is_float64, tuple(program.in_shardings())
        self._precision = functools.partial(in_precision, program.step.program, self._is_float64)
        with self._precision():
            jitted = jax.jit(lambda *leaves: evaluator.run(list(leaves), also), in_shardings=self._shardings)
            # Their shapes alone: placed on the devices are only those of the program that runs.
            self._compiled = compiling(jitted.lower(*jax.eval_shape(lambda *leaves: leaves, *arguments)))

    def __call__(self, arguments: list[Any]) -> Numbers:
        with self._precision():
            return _as_numbers(self._compiled()(*place_all(arguments, self._shardings)))

    def text(self) -> str:
        return self._compiled().as_text()


def _as_numbers(found: tuple[list[Any], list[Any]]) -> Numbers:
    outputs, extra = found
    return list(map(as_numpy, outputs)), list(map(as_numpy, extra))


def as_numpy(x: Any) -> np.ndarray | None:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return None
    return np.asarray(x.astype("float32") if str(x.dtype) == "bfloat16" else x)
