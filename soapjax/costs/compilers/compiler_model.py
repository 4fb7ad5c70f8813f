"""`CompilerModel`: what a backend's compiler does with memory and collectives beyond what a plan says.

A value per backend (cpu.py, gpu.py), `none()` where nobody read what the compiler does, or where there is none: tables of other
systems. Its rules only say how long tensors are alive, how much of them is kept, and which collectives are merged; its flags and
constants are read by the rules of costs. That results of light equations are fused into their readers every compiler of JAX does
(graph/lifespans.py).

What XLA made of a few plans is data in tests/costs/compiled: a version that does otherwise fails there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from soapjax.costs.memory.memory_order import MemoryOrder
from soapjax.graph.operators import OperatorGraph


class Reshards(NamedTuple):
    """The readers' reshards of a graph in program order."""

    tensor: np.ndarray  # int32 [E]
    read_at: np.ndarray  # int32 [E]: the task that reads it


OrderRule = Callable[[OperatorGraph, MemoryOrder, Reshards], MemoryOrder]
TensorRule = Callable[[OperatorGraph], np.ndarray]  # -> [T]
ReadRule = Callable[[OperatorGraph], list[tuple[int, int]]]  # -> (task, tensor that it reads)


def of_no_tensor(graph: OperatorGraph) -> np.ndarray:
    """bool [T]."""
    return np.zeros(len(graph.tensors), bool)


def of_no_read(graph: OperatorGraph) -> list[tuple[int, int]]:
    return []


class CompilerModel(NamedTuple):
    name: str
    read_on: str  # the version of jaxlib whose programs its rules were read off; "" without rules
    # All-reduces, all-gathers and reduce-scatters of parameters and gradients that do not depend on one another are merged up to
    # so many bytes, and pay one latency; 0: they are not.
    merged_bytes: float = 0.0
    waits: TensorRule = of_no_tensor  # bool: gradients that wait for nothing but their update, where they are not merged
    sums_in_place: bool = False  # a sum over devices is written over its operand
    adds_in_place: bool = True  # a product adds to the running sum of a gradient in place
    keeps_barriers: bool = True  # so that what the backward pass gathers, or computes, again is not merged with the first time
    widened: frozenset[str] = frozenset()  # dtypes that are twice as wide inside a program, in collectives too
    kept_more: tuple[TensorRule, ...] = ()  # float32: how much more than once a tensor is kept
    order: tuple[OrderRule, ...] = ()  # in which order tasks run, where it is not the program's
    copied_first: ReadRule = of_no_read  # for which reads a program that is given the tensor copies it before all else

    def widening(self, dtypes: Iterable[str]) -> np.ndarray:
        """How many times as large values of these types are inside a program as in its arguments and results."""
        return np.array([2 if dtype in self.widened else 1 for dtype in dtypes], np.float32)

    def ordered(self, graph: OperatorGraph, birth: np.ndarray, death: np.ndarray, reshards: Reshards) -> MemoryOrder:
        """`birth`, `death`: the task that makes a tensor, and the last that needs it, in program order, int32 [T]."""
        found = MemoryOrder(birth, death, reshards.read_at, made_at=reshards.read_at, at_least=death)
        for rule in self.order:
            found = rule(graph, found, reshards)
        return found


def none() -> CompilerModel:
    """A compiler, or a system, that does what the plan says and nothing else."""
    return CompilerModel(name="none", read_on="")
