"""XLA's compiler for GPUs, as read off the memory plans of jaxlib 0.10.2 for CUDA (scripts/verify_bytes.py).

A parameter is updated as soon as its gradient is summed, so that only those gradients wait that XLA merges into one collective. In
which order it makes things is in gpu_order.py.
"""

from __future__ import annotations

import numpy as np

from soapjax.costs.compilers.compiler_model import CompilerModel
from soapjax.costs.compilers.gpu_order import inputs_first, late_products
from soapjax.graph.operators import HEAVY_RESULT, NOT_SPLIT, OperatorGraph

MERGED_BYTES = 30.0 * 2**20  # xla_gpu_all_reduce_combine_threshold_bytes and its siblings (0.10.2)


def waits_for_its_update(graph: OperatorGraph) -> np.ndarray:
    """bool [T]: gradients that nothing but their own parameter's update reads (0.10.2)."""
    found = np.zeros(len(graph.tensors), bool)
    readers = _readers(graph)
    made_by = {a.tensor: task for task in graph.tasks for a in task.writes}
    for p, parameter in enumerate(graph.trained):
        gradient = parameter.gradient
        others = [k for k in readers.get(gradient, ()) if graph.tasks[k].parameter != p]
        in_loop = gradient in made_by and made_by[gradient].trip_count > 1
        found[gradient] = not (others or in_loop or graph.tensors[gradient].output_leaves)
    return found


def images_in_both_orders(graph: OperatorGraph) -> np.ndarray:
    """float32 [T]: float32 convolutions want channels before pixels: images that come as arguments exist twice (0.10.2)."""
    more = np.zeros(len(graph.tensors), np.float32)
    for task in graph.tasks:
        for access in task.reads if task.kind == "conv" and task.dtype == "float32" else ():
            tensor = graph.tensors[access.tensor]
            if access.operand >= 0 and tensor.input_leaf >= 0 and 1 not in tensor.shape:  # of one channel both orders are the same
                more[access.tensor] = 1
    more[[p.tensor for p in graph.parameters]] = 0  # small, and gathered for every use
    return more


def light_bfloat16_unrounded(graph: OperatorGraph) -> np.ndarray:
    """float32 [T]: bfloat16 that only light equations make and read is not rounded, and kept as float32 (0.10.2).

    But for what is computed from a heavy result and what is kept beside it (`TaskMemory.costly_bytes`).
    """
    more = np.zeros(len(graph.tensors), np.float32)
    readers = _readers(graph)
    made_light = {
        a.tensor for task in graph.tasks for a, sources in zip(task.writes, task.memory.recomputed_from, strict=False)
        if (sources is not None or not task.is_heavy) and not (task.memory.costly_bytes and HEAVY_RESULT in (sources or ()))
    }  # fmt: skip
    for i in made_light:
        tensor, by = graph.tensors[i], [graph.tasks[k] for k in readers.get(i, ())]
        is_read_light = all(a.operand < 0 and task.parameter < 0 for task in by for a in task.reads if a.tensor == i)
        more[i] = tensor.dtype == "bfloat16" and bool(by) and is_read_light and not tensor.output_leaves
    return more


def operands_with_inner_batch_dims(graph: OperatorGraph) -> list[tuple[int, int]]:
    """Batched products want their batch dims first. What is given with them further inside (heads, behind the sequence) is
    transposed for them, all of it at the beginning of the program, long before the product (0.10.2)."""
    found = []
    for k, task in enumerate(graph.tasks):
        operands = task.equations.operand_dims if task.kind == "dot" else ()
        batch = set(task.equations.result_dims).intersection(*operands) - {NOT_SPLIT} if operands else set()
        for access in task.reads if batch else ():
            dims = operands[access.operand] if 0 <= access.operand < len(operands) else ()
            if not batch.issuperset(dims[: len(batch)]):
                found.append((k, access.tensor))
    return found


def _readers(graph: OperatorGraph) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for k, task in enumerate(graph.tasks):
        for access in task.reads:
            found.setdefault(access.tensor, set()).add(k)
    return found


GPU = CompilerModel(
    name="XLA for GPUs", read_on="0.10.2", merged_bytes=MERGED_BYTES, waits=waits_for_its_update, sums_in_place=True,
    kept_more=(images_in_both_orders, light_bfloat16_unrounded), order=(inputs_first, late_products),
    copied_first=operands_with_inner_batch_dims,
)  # fmt: skip
