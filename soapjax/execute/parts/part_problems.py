"""What stands in the way of a part of the batch, where the step can be traced with all of it: what is as long, and is not cut."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from soapjax.errors import Problem
from soapjax.graph.trace.tracing import CORRECT, TracedStep


def problems_of_part(full: TracedStep, dims: Mapping[int, int], samples: int, problems: Sequence[Problem]) -> list[Problem]:
    """What is wrong with a part of the batch, although it is not with all of it."""
    size = next(full.in_avals[i].shape[d] for i, d in dims.items())
    cut = ", ".join(full.in_paths[i] for i in itertools.islice(dims, 4)) + (", ..." if len(dims) > 4 else "")
    found = [p._replace(value=f"traced with {samples} of {size} samples (of {cut}): {p.value}") for p in problems]
    constant = "take the batch's size of the batch itself there (x.shape[0]), where it is a constant"
    if rows := [full.in_paths[i] for i in full.state_pairs if full.in_avals[i].shape[:1] == (size,)]:
        may_be = f"state is not cut, and {rows[0]} has {size} rows: if they are the samples', pass it with the batch"
        return [p._replace(remedy=f"{constant}; {may_be}, and return it as a result; else correct the step") for p in found]
    remedy = f"{constant}; or use one micro-batch"
    if constants := [x for x in full.program.consts.values() if np.shape(x)[:1] == (size,)]:
        may_be = f"an array of {size} rows that the step closes over is not cut: if they are the samples', pass it with the batch"
        chosen = "; numbers that choose samples count those of the whole batch: pass the samples that they choose"
        is_number = any(jax.dtypes.issubdtype(x.dtype, np.integer) for x in constants)
        remedy = may_be + (chosen if is_number else "") + "; or use one micro-batch"
    return [p._replace(remedy=remedy) if p.remedy == CORRECT else p for p in found]
