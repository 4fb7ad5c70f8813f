"""Reductions in the middle of light equations exactly as planned: on local blocks, then over the planned axes.

The partitioner is free to reduce over other axes than those that the operator splits, and on CPUs makes an
all-reduce and a slice of what is planned as a reduce-scatter.
"""

from __future__ import annotations

from typing import Any

import jax

from soapjax.execute.spmd.on_blocks import OnBlocks, combined, executes
from soapjax.graph.trace.program import FlatEqn

REDUCTIONS = {"reduce_sum": jax.lax.psum, "reduce_max": jax.lax.pmax, "reduce_min": jax.lax.pmin}


@executes(*REDUCTIONS)
def run_reduction(eqn: FlatEqn, inputs: list[Any], blocks: OnBlocks) -> Any:
    """One reduction; of sums, what `home_spec` splits is reduce-scattered."""
    if not blocks.contracted and not blocks.kept:
        return blocks.bind(blocks.constrained(inputs), eqn.params)[0]

    def body(block: Any) -> Any:
        out = blocks.bind([block], eqn.params)[0]
        return combined(out, blocks.contracted, blocks.home_spec, blocks.mesh, REDUCTIONS[eqn.name])

    return blocks.run(body, inputs)
