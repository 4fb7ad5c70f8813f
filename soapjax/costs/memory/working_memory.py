"""What a backend's compiler keeps in memory besides what the plan names, or does not keep.

Read off the memory plans of compiled programs (scripts/verify_bytes.py). GPUs: a parameter is updated as soon as its gradient is
summed, so that only those gradients wait that XLA merges into one collective; an all-reduce writes over its operand; float32
convolutions want channels before pixels, so that images that come as arguments exist twice; bfloat16 that only light
equations make and read is not rounded, and kept as float32. CPUs: all gradients are summed in one
instruction; what is bfloat16 in the step is float32 in between, in collectives too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from soapjax.graph.operators import OperatorGraph

GPUS = ("cuda", "rocm")


class WorkingMemory(NamedTuple):
    """Of one graph on one kind of device."""

    waits: np.ndarray  # bool [T]: gradients that wait for nothing but their parameters' updates
    combine_bytes: float  # collectives of gradients are merged up to so many bytes of results
    most_waiting: np.ndarray  # float32 [2]: how much waits for an all-reduce, and for a reduce-scatter, at the most
    operand_share: np.ndarray  # float32 [2]: of what waits; the other part are results, which come last
    merged_at: int  # the task behind the last gradient that waits
    sums_in_place: bool
    # float32 [T]: how much more than once a tensor is kept: in the order of dims that its readers want, too, or twice as wide
    more: np.ndarray


def widening(platform: str, dtypes: Iterable[str]) -> np.ndarray:
    """How many times as large values of these types are inside a program as in its arguments and results."""
    return np.array([2 if platform == "cpu" and dtype == "bfloat16" else 1 for dtype in dtypes], np.float32)


def working_memory(graph: OperatorGraph, platform: str, combine_bytes: float, first_parts: int) -> WorkingMemory:
    """`combine_bytes`: up to which size the compiler merges collectives; `first_parts`: of the first of the mesh's axes."""
    num = len(graph.tensors)
    waits, more = np.zeros(num, bool), np.zeros(num, np.float32)
    if platform not in GPUS:
        return WorkingMemory(waits, 0.0, np.zeros(2, np.float32), np.ones(2, np.float32), 0, False, more)
    readers: dict[int, set[int]] = {}
    for k, task in enumerate(graph.tasks):
        for access in task.reads:
            readers.setdefault(access.tensor, set()).add(k)
            tensor = graph.tensors[access.tensor]
            is_image = task.kind == "conv" and task.dtype == "float32" and access.operand >= 0 and tensor.input_leaf >= 0
            if is_image and 1 not in tensor.shape:  # with one channel both orders are the same
                more[access.tensor] = 1
    more[[p.tensor for p in graph.parameters]] = 0  # small, and gathered for every use
    made_light = {
        a.tensor for task in graph.tasks for a, sources in zip(task.writes, task.recomputed_from, strict=False)
        if sources is not None or not task.heavy
    }  # fmt: skip
    for i in made_light:
        tensor, by = graph.tensors[i], [graph.tasks[k] for k in readers.get(i, ())]
        is_read_light = all(a.operand < 0 and task.parameter < 0 for task in by for a in task.reads if a.tensor == i)
        if tensor.dtype == "bfloat16" and by and is_read_light and not tensor.output_leaves:
            more[i] += 1
    made_by = {a.tensor: task for task in graph.tasks for a in task.writes}
    for p, parameter in enumerate(graph.parameters):
        gradient = parameter.gradient
        others = [k for k in readers.get(gradient, ()) if graph.tasks[k].parameter != p]
        in_loop = gradient in made_by and made_by[gradient].trip_count > 1
        waits[gradient] = not (others or in_loop or graph.tensors[gradient].output_leaves)
    merged_at = max((k + 1 for k, task in enumerate(graph.tasks) for a in task.writes if waits[a.tensor]), default=0)
    # Operands and results of one merged collective.
    both = np.array([2, 1 + first_parts], np.float32)
    share = np.array([1, first_parts], np.float32) / both
    return WorkingMemory(waits, combine_bytes, both * np.float32(combine_bytes), share, merged_at, True, more)
