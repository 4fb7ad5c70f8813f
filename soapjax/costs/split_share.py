"""Which share of a step's FLOPs a strategy splits, and which it repeats on several devices.

Of D devices, r do a piece of work alike: r = D where it is replicated, 1 where it is split by all mesh axes. A pinned operator
is not repeated: r counts the devices that do the same. The share of FLOPs split is

    sum over work of  flops * (D - r) / (D - 1)    over    sum of flops

1 where no FLOP is done twice, 0 where every device does the whole step. It equals flops * (1 - 1/degree) / (1 - 1/D) with
degree = D / r. Work on one device counts as split, since nothing is repeated.

The FLOPs are those of the operator graph, trips of loops and updates of parameters included: data parallelism repeats the whole
optimizer on every device.
"""

from __future__ import annotations

import numpy as np

from soapjax.costs.tables.problem_tables import CostTables
from soapjax.strategy.configs import FIRST_PIN
from soapjax.strategy.layout import PINNED


def split_flops(
    tables: CostTables, axes: np.ndarray, stored: np.ndarray, *, num_devices: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """FLOPs of every operator, and those of them that are split, both float64 [N].

    Args:
      axes: int8 [N, A] of the strategy; `stored` int8 [P, A], the layouts in which it stores parameters.
      num_devices: D, where the mesh holds a part of the devices only (a stage of a pipeline); the mesh's by default.
    """
    sizes = np.array(tables.links.axis_sizes, np.float64)
    mesh_devices = float(sizes.prod())
    total = mesh_devices if num_devices is None else float(num_devices)
    done = tables.work_flops
    operator, parameter = tables.task_op[tables.work_task], tables.task_parameter[tables.work_task]
    rows = np.asarray(axes)[operator]  # [W, A]
    divided = np.take_along_axis(tables.work_split, np.maximum(rows, -1).astype(np.int64) + 1, axis=1) | (rows <= FIRST_PIN)
    if len(tables.parameter_op):
        of_parameter = stored[np.maximum(parameter, 0)]
        divided = np.where(parameter[:, None] >= 0, (of_parameter >= 0) | (of_parameter <= PINNED), divided)
    alike = mesh_devices / np.where(divided, sizes, 1.0).prod(1)
    part = done * ((total - alike) / (total - 1) if total > 1 else 1.0)
    count = tables.graph.num_operators
    return np.bincount(operator, done, count), np.bincount(operator, part, count)


def share_of(flops: np.ndarray, split: np.ndarray) -> float:
    """The share, 1 where there is nothing to split; rounded, so that a file is the same on every host."""
    whole = float(flops.sum())
    return round(float(split.sum()) / whole, 6) if whole else 1.0
