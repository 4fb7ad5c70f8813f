"""What stands behind an equation by which micro-batches are refused: the user wrote no such equation.

The derivative of the largest of all samples divides by how many are as large; a quantile reads two places of what was sorted.
"""

from __future__ import annotations

from soapjax.graph.batch.sample_mixing import SampleMixing
from soapjax.graph.trace.program import FlatEqn

_CARRIED = {
    "reshape", "broadcast_in_dim", "squeeze", "expand_dims", "stop_gradient", "convert_element_type", "reduce_sum", "transpose",
    "copy", "select_n",
}  # fmt: skip
_LARGEST = {"reduce_max", "reduce_min"}


def largest_behind(mixing: SampleMixing, divisor: FlatEqn) -> FlatEqn | None:
    """The largest or least of all samples, where what is divided by counts those that are equal to it; or None."""
    equal = _behind(mixing, divisor.inputs[1:], {"eq"})
    found = None if equal is None else _behind(mixing, equal.inputs, _LARGEST)
    return found if found is not None and not any(map(mixing.has_samples, found.outputs)) else None


def sort_behind(mixing: SampleMixing, read: FlatEqn) -> FlatEqn | None:
    """The sort of which an equation reads samples at a place; None where it reads them as they came."""
    return _behind(mixing, read.inputs[:1], {"sort"})


def _behind(mixing: SampleMixing, atoms: tuple, names: set[str]) -> FlatEqn | None:
    """The equation of one of `names` whose result values are, but for their shape and type, or sums of it."""
    left = [a for a in atoms if isinstance(a, int)]
    while left:
        eqn = mixing.producer.get(left.pop())
        if eqn is not None and eqn.name in names:
            return eqn
        if eqn is not None and eqn.name in _CARRIED:
            left += eqn.read
    return None
