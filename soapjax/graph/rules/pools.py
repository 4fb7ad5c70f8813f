"""The gradient of max-pooling, which the executor makes of choices: which element of its window was the largest (max_pool.py).

Compilers make the choices with the pooling itself, in one pass over the image, so that the image itself need not
be kept for the backward pass.
"""

from __future__ import annotations

import math

from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.phases import FORWARD
from soapjax.graph.trace.program import FlatEqn

IMAGE = 1  # which operand of the equation is the image
_MOST_ELEMENTS = 64  # of a window; for larger ones (pooling whole images) so many arrays are no gain


def is_made_of_choices(eqn: FlatEqn) -> bool:
    """Whether an equation is the gradient of a pooling, of windows that are not too large."""
    return eqn.name == "select_and_scatter_add" and math.prod(eqn.params["window_dimensions"]) <= _MOST_ELEMENTS


def needed_at(graph: OperatorGraph) -> dict[tuple[int, int], int]:
    """(task, tensor) -> the task at which it is really needed, of images that a pooling's gradient reads: at the pooling."""
    pools: dict[int, int] = {}
    for k, task in enumerate(graph.tasks):
        if task.phase == FORWARD and task.is_heavy:
            pools.update((a.tensor, k) for a in task.reads if a.operand >= 0)
    chosen = [(k, task.memory.choices_of) for k, task in enumerate(graph.tasks) if task.memory.choices_of in pools]
    return {(k, image): pools[image] for k, image in chosen}
