"""Which numbers can be reckoned with: those that float32 holds with room for products and sums of them.

Costs are products and quotients of a few figures. One beyond these bounds would overflow or vanish on the way, and the step time
with it, so it is refused where it is read, whether in a file or in an argument.
"""

from __future__ import annotations

LARGEST, SMALLEST = 1e30, 1e-37  # but for 0
MOST_DIGITS = 19  # of a whole number: 64 bits


def read_float(text: str) -> float:
    """For `json.loads(parse_float=)`. Raises: ValueError where the number is out of bounds."""
    value = float(text)
    if value and not SMALLEST <= abs(value) <= LARGEST:
        raise ValueError(f"{text[:40]}, a number outside {SMALLEST:g} to {LARGEST:g}")
    return value


def read_int(text: str) -> int:
    """For `json.loads(parse_int=)`. Raises: ValueError where the number does not fit 64 bits."""
    if len(text.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"{text[:40]}, a whole number of more than {MOST_DIGITS} digits")
    return int(text)
