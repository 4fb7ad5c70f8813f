"""What a process was told, beside code and arguments, that changes the numbers it computes or the programs it compiles.

Ranks compare it before they plan (jointly.py): x64 on one of them alone is named, where it would otherwise be a difference of
graphs, and a flag that only changes rounding would be no difference of programs at all.
"""

from __future__ import annotations

import os

import jax

# jax 0.10.2; what a version does not have is left out.
OPTIONS = (
    "jax_allow_f16_reductions", "jax_compiler_enable_remat_pass", "jax_custom_vjp3", "jax_debug_infs", "jax_debug_nans",
    "jax_default_matmul_precision", "jax_default_prng_impl", "jax_disable_jit", "jax_disable_most_optimizations",
    "jax_enable_custom_prng", "jax_enable_x64", "jax_exec_time_optimization_effort", "jax_explicit_x64_dtypes",
    "jax_high_dynamic_range_gumbel", "jax_memory_fitting_effort", "jax_memory_fitting_level", "jax_numpy_dtype_promotion",
    "jax_optimization_level", "jax_random_seed_offset", "jax_softmax_custom_jvp", "jax_threefry_gpu_kernel_lowering",
    "jax_threefry_partitionable", "jax_use_direct_linearize", "jax_use_shardy_partitioner",
)  # fmt: skip
VARIABLES = ("LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "TF_CUDNN_DETERMINISTIC", "XLA_FLAGS")
# Flags of one process' own: they say where to write, how many threads or fake devices there are.
OWN_FLAGS = ("xla_dump", "xla_force_host_platform_device_count", "intra_op_parallelism")


def settings_of_numbers() -> dict[str, str]:
    """Fields for `agreement.agree`: "settings.jax_enable_x64" -> "True", "settings.XLA_FLAGS.--xla_gpu_autotune_level" -> "0"."""
    values = {name: str(getattr(jax.config, name)) for name in OPTIONS if hasattr(jax.config, name)}
    for variable in VARIABLES:
        for flag in os.environ.get(variable, "").split():
            name, _, value = flag.partition("=")
            if not any(own in name for own in OWN_FLAGS):
                values[f"{variable}.{name}"] = value or "set"
    return {f"settings.{name}": value for name, value in values.items()}
