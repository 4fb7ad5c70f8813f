"""What the planner's programs are given, for annotations: NumPy makes it on the host, JAX inside a program and as its result."""

from __future__ import annotations

import jax
import numpy as np

Array = jax.Array | np.ndarray
Scalar = jax.Array | np.number | np.bool_  # no dims
