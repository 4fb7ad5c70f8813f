"""GPipe's partition: consecutive layers into K stages so that the slowest computes as little as possible.

Huang et al. 2019, section 2.2: the partition minimises the variance of the stages' estimated cost; the largest cost is what a
pipeline waits for, and is minimised here exactly.
"""

from __future__ import annotations

import numpy as np

from soapjax.costs.measured.layer_graph import LayerGraph, cuts
from soapjax.errors import Problem, SoapjaxError


def balanced_partition(
    graph: LayerGraph, num_stages: int, allowed: np.ndarray | None = None
) -> tuple[tuple[int, ...], ...]:  # fmt: skip
    """Layers of each stage.

    Args:
      allowed: [cuts, cuts] which runs of layers may be a stage; all by default.
    Raises: SoapjaxError where there are fewer layers to cut between than stages.
    """
    found = cuts(graph)
    s = found.num_cuts
    is_stage = found.is_inside if allowed is None else found.is_inside & allowed
    seconds = np.where(is_stage, found.compute_s[None, :] - found.compute_s[:, None], np.inf)
    if not 1 <= num_stages:
        raise SoapjaxError(Problem("stages", str(num_stages), "at least 1", "ask for one stage or more"))
    best = np.full(s, np.inf)
    best[0] = 0.0
    came = []
    for _ in range(num_stages):
        candidates = np.maximum(best[:, None], seconds)
        came.append(candidates.argmin(0))
        best = candidates.min(0)
    if not np.isfinite(best[-1]):
        most = max_stages(is_stage)
        raise SoapjaxError(
            Problem("stages", str(num_stages), f"1 to {most}: so many times can this model be cut", "ask for fewer stages")
        )
    stages = []
    j = s - 1
    for row in reversed(came):
        k = int(row[j])
        stages.append(tuple(np.flatnonzero(found.members[j] & ~found.members[k]).tolist()))
        j = k
    return tuple(reversed(stages))


def max_stages(is_inside: np.ndarray) -> int:
    """The most stages that cuts [S, S] allow: the longest chain of prefixes."""
    longest = np.zeros(len(is_inside), int)
    for j in range(1, len(is_inside)):
        longest[j] = 1 + longest[:j][is_inside[:j, j]].max(initial=-len(is_inside))
    return max(int(longest[-1]), 0)
