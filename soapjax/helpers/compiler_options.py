"""Options of XLA that are asked for, and not needed: a version that does not know one compiles without it."""

from __future__ import annotations

from collections.abc import Mapping

import jax

LEVEL = "xla_backend_optimization_level"  # of LLVM: the HLO is the same at every level
# XLA's older emitters of fused loops: a third less to compile, and some programs up to a fifth slower. 0.11 has them no longer.
OLDER_EMITTERS: Mapping[str, bool | int] = {"xla_cpu_use_fusion_emitters": False}


def compiled_with(lowered: jax.stages.Lowered, options: Mapping[str, bool | int]) -> jax.stages.Compiled:
    """The program compiled with those of the options that the compiler knows."""
    try:
        return lowered.compile(compiler_options=dict(options))  # type: ignore[arg-type]  # numbers are taken too
    except jax.errors.JaxRuntimeError as error:
        if not options or "option" not in str(error):
            raise
        # A version of XLA that does not know one of them, or another backend.
        known = {name: value for name, value in options.items() if name not in str(error)}
        return compiled_with(lowered, known if known != options else {})
