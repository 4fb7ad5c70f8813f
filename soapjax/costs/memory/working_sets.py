"""What a graph's tensors take of memory besides what the plan names: the rules of a compiler (costs/compilers), applied."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soapjax.costs.compilers.compiler_model import CompilerModel
from soapjax.graph.operators import OperatorGraph


class WorkingMemory(NamedTuple):
    """Of one graph on one kind of device."""

    waits: np.ndarray  # bool [T]: gradients that wait for nothing but their parameters' updates
    most_waiting: np.ndarray  # float32 [2]: how much waits for an all-reduce, and for a reduce-scatter, at the most
    operand_share: np.ndarray  # float32 [2]: of what waits; the other part are results, which come last
    merged_at: int  # the task behind the last gradient that waits
    # float32 [T]: how much more than once a tensor is kept: in the order of dims that its readers want, too, or twice as wide
    more: np.ndarray


def working_memory(graph: OperatorGraph, compiler: CompilerModel, first_parts: int) -> WorkingMemory:
    """`first_parts`: of the first of the mesh's axes."""
    waits, more = compiler.waits(graph), np.zeros(len(graph.tensors), np.float32)
    for rule in compiler.kept_more:
        more += rule(graph)
    merged_at = max((k + 1 for k, task in enumerate(graph.tasks) for a in task.writes if waits[a.tensor]), default=0)
    # Operands and results of one merged collective.
    both = np.array([2, 1 + first_parts], np.float32)
    share = np.array([1, first_parts], np.float32) / both
    return WorkingMemory(waits, both * np.float32(compiler.merged_bytes), share, merged_at, more)
