"""A gradient of all samples from which a step goes on to another gradient, as sharpness-aware minimization (SAM) does.

It perturbs parameters along a first gradient, and takes the second there. Micro-batches that are passed one after the other would
each go on from a first gradient of their own, and perturb parameters otherwise than the whole batch does. (What one sample's
gradient makes of that sample, an adversarial example, is that sample's own.)
"""

from __future__ import annotations

from soapjax.graph.batch.growth_rules import is_backward
from soapjax.graph.batch.sample_mixing import SampleMixing
from soapjax.graph.trace.dataflow import follow
from soapjax.graph.trace.program import FlatEqn


def earlier_gradient(mixing: SampleMixing) -> FlatEqn | None:
    """The first equation outside every gradient that reads a sum over samples that a backward pass made, and of which samples are
    given something again; None where there is none."""
    is_sum = {o for e in mixing.needed if is_backward(e) for o in e.outputs if mixing.is_statistic(o)}
    for eqn in reversed(mixing.needed):
        if "jvp(" not in eqn.stack and not is_sum.isdisjoint(eqn.read):
            follow(mixing.small, made := set(eqn.outputs))
            if any(mixing.has_samples(v) for v in made):
                return eqn
    return None
