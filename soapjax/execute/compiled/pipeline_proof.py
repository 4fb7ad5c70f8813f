"""The proof of a synchronous pipeline: loss and gradients are the single-device step's, on the whole batch.

A step whose samples see each other (batch norm's statistics) or that draws random numbers differs between the whole batch and
its micro-batches, pipeline or not. Such a pipeline is held against what one device gives for the same micro-batches, put
together as the pipeline does; which reference it was is said.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from soapjax.execute.compiled.hlo import OpsCheck
from soapjax.execute.compiled.proof import (
    Reference,
    Verification,
    compared,
    gradient_ids,
    outputs_compared,
    reference_of,
    run_stream,
)
from soapjax.execute.compiled.proof_programs import Numbers, OneDevice, in_precision
from soapjax.execute.parts.batch_statistics import BatchStatistics
from soapjax.execute.parts.joinings import Joining, joining
from soapjax.execute.streams.pipelined_step import PipelineStep
from soapjax.graph.passes.build import build_graph


class PipelineVerification(NamedTuple):
    numbers: Verification
    reference: str  # "the whole batch", or "its micro-batches": what one device was given


def verify_pipeline(make: Callable[[bool], PipelineStep], arguments: list[Any], check: OpsCheck) -> PipelineVerification:
    """Runs a pipeline in its own precision and in float64 on flat `arguments`, and compares.

    Args:
      make: whether in float64 -> the step, nothing donated.
      check: the planned dots and convolutions, as compiled.
    """
    own, wide = make(False), make(True)
    planned = run_stream(own, arguments, is_float64=False)
    planned64 = run_stream(wide, arguments, is_float64=True)
    micro, names = own.micro, list(own.gradient_paths)
    losses = outputs_compared(micro.full)
    state = set(micro.full.state_pairs.values())
    _, binding = build_graph(micro.full)
    single = reference_of(micro.full, arguments, gradient_ids(micro.full, binding))
    found = compared(planned, planned64, single, names, losses, check)
    if found.is_proven or micro.num_microbatches == 1:
        return PipelineVerification(found, "the whole batch")
    single = _by_micro_batch(own, arguments)
    # No state: an update of the whole gradient is not the mean of the micro-batches' updates.
    joined = [k for k in losses if k not in state]
    again = compared(planned, planned64, single, names, joined, check)
    if not again.is_proven:
        # Nor what else is made once, of what all micro-batches gave: the norm of the gradient is not the mean of theirs.
        made_once = {v for part in own.cut.updates for v in part.outputs}
        joined = [k for k in joined if micro.step.program.outputs[k] not in made_once]
        again = compared(planned, planned64, single, names, joined, check)
    return PipelineVerification(again, "its micro-batches") if again.is_proven else PipelineVerification(found, "the whole batch")


def _by_micro_batch(step: PipelineStep, arguments: list[Any]) -> Reference:
    """One device's outputs and gradients for every micro-batch, put together as the pipeline does."""
    micro = step.micro
    _, binding = build_graph(micro.step)
    # What is recomputed has equations of its own, and so do these draw and divide.
    gradients = gradient_ids(micro.step, binding)
    one = OneDevice(dataclasses.replace(micro.step, traced_program=None), gradients, micro.draws)
    outputs = micro.step.program.outputs
    hows = [joining(micro, v, step.reduction) if isinstance(v, int) else None for v in outputs]

    def run(arguments: list[Any], *, is_float64: bool = False) -> Numbers:
        parts, statistics = [], BatchStatistics(micro, [*micro.whole], is_float64=is_float64)
        with in_precision(micro.step.program, is_float64):
            found = jax.jit(statistics.of_batch)({k: arguments[k] for k in (*statistics.leaves, *statistics.state)})
        whole = dict(zip(statistics.keys, found, strict=True))
        for m in range(micro.num_microbatches):
            mine = list(arguments)
            for k, d in zip(micro.batch_leaves, micro.batch_dims, strict=True):
                mine[k] = np.split(np.asarray(arguments[k]), micro.num_microbatches, axis=d)[m]
            parts.append(one(mine, is_float64=is_float64, number=m, whole=whole))
        return _joined(parts, hows, [joining(micro, v, step.reduction, is_gradient=True) for v in gradients])

    return Reference(run(arguments), run(arguments, is_float64=True), run, arguments)


def _joined(parts: list[Numbers], hows: list[Joining | None], of_gradients: list[Joining | None]) -> Numbers:
    def join(values: list[Any], how: Joining | None) -> Any:
        return values[-1] if how is None or values[0] is None else how.of(values, np)

    outputs = [join([p[0][k] for p in parts], how) for k, how in enumerate(hows)]
    return outputs, [join([p[1][k] for p in parts], how) for k, how in enumerate(of_gradients)]
