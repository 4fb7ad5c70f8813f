"""Sizes in bytes as text, and back: units are powers of 1000, as in datasheets; those with an i are powers of 1024.

>>> size(8.5e9), size_of("8.5 GB"), size_of("1GiB"), size_of("-3GB")
('8.5 GB', 8500000000.0, 1073741824.0, None)
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

_DECIMAL = {"": 1, "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4}
_BINARY = {"kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4}
_UNITS = _DECIMAL | _BINARY
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{0,18})?(?:e\+?[0-9]{1,2})?) *([a-z]*)", re.IGNORECASE)


def size(n: float) -> str:
    """Three digits and a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 999.5:  # else three digits of it are 1e+03
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"


def size_of(value: Any) -> float | None:
    """Bytes of a positive number, or of a text such as "8GB"; None of anything else."""
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        unit = _UNITS.get(match[2].lower()) if match else None
        value = float(match[1]) * unit if unit else None
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return None
    return float(value) if value > 0 else None
