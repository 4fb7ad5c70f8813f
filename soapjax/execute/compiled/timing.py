"""Whole steps under a plan, timed on the devices at hand."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from soapjax.execute.compiled.measure_links import largest_of_processes
from soapjax.execute.spmd.compiled_step import CompiledStep
from soapjax.execute.spmd.planned_evaluator import BoundStep

WARM_UP_STEPS = 2
QUEUED_S, MOST_QUEUED = 0.1, 20  # of steps that are queued before the last is waited for
EXAMPLES = 2**20


def are_fake(devices: Sequence[Any]) -> bool:
    """Whether several devices share one process' cores, so that timings mean nothing."""
    local = [d for d in devices if d.process_index == jax.process_index()]
    return devices[0].platform == "cpu" and len(local) > 1


def processor_name() -> str:
    """The CPU of this process and how many of its cores it may use, as told by Linux; "" elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            names = [line.partition(":")[2].strip() for line in f if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else platform.machine()}, {num_cores()} cores"


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def example_arguments(program: BoundStep) -> list[Any]:
    """Arguments of the step's types where none are at hand: small numbers, none below zero in optimizer state (of which steps take
    roots), zero indices."""
    rng = np.random.default_rng(0)
    some = (0.02 * rng.standard_normal(EXAMPLES)).astype(np.float32)  # repeated: drawing billions takes minutes
    of_optimizer = {k for p in program.graph.parameters for k in p.state_leaves}
    made: list[Any] = []
    for i, aval in enumerate(program.step.in_avals):
        if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
            made.append(jax.random.key(0))
        elif jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact):
            numbers = np.abs(some) if i in of_optimizer else some
            made.append(np.resize(np.roll(numbers, i).astype(aval.dtype), aval.shape))
        else:
            made.append(np.zeros(aval.shape, aval.dtype))
    return made


def training(program: BoundStep, leaves: Sequence[Any], compiled: Callable[..., Any] | None = None) -> Callable[[], Any]:
    """A function of nothing that takes one step from flat arguments, then the next from the state that it made; `compiled` is what
    is called, where that is not to be compiled anew."""
    planned = compiled if isinstance(compiled, CompiledStep) else CompiledStep(program)
    tree, pairs = program.step.in_tree, program.step.state_pairs
    step, flat = compiled or planned, jax.tree_util.tree_leaves(planned.place(*tree.unflatten(list(leaves))[0]))

    def one_step() -> Any:
        out = step(*tree.unflatten(flat)[0])
        # The state was donated: the next step takes the new one.
        results = jax.tree_util.tree_leaves(out)
        for i, o in pairs.items():
            flat[i] = results[o]
        return out

    return one_step


def time_steps(
    program: BoundStep, leaves: Sequence[Any] | None = None, *, num_steps: int = 5, compiled: Callable[..., Any] | None = None
) -> float:  # fmt: skip
    """Median seconds of a step after warming up, the slowest process' where there are several.

    Short steps are queued and waited for together, as a training loop does: the host needs milliseconds to start one.

    Args:
      leaves: flat arguments; made up where there are none, or only their shapes.
      num_steps: how often is waited.
      compiled: what is called, where that is not to be compiled anew.
    """
    if leaves is None or any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        leaves = example_arguments(program)
    # The steps give their state's memory away: never the caller's.
    leaves = [x.copy() if isinstance(x, jax.Array) else x for x in leaves]
    step = training(program, leaves, compiled)

    def queue(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            out = step()
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / count

    once = min(queue(1) for _ in range(WARM_UP_STEPS))
    # As many in every process, which wait for each other.
    count = round(min(max(QUEUED_S / largest_of_processes(once), 1), MOST_QUEUED))
    return largest_of_processes(statistics.median(queue(count) for _ in range(num_steps)))
