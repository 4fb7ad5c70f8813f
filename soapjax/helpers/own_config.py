"""What the user's JAX configuration does to programs that are not the user's: nothing.

The planner's programs are traced and run under JAX's defaults: not under strict promotion, transfer guards, or checks for NaN,
which the user has switched on for the step. The step itself keeps all of these. Two things it cannot keep under a plan: a mesh of
`jax.set_mesh` other than the plan's, and `jax.disable_jit`, since what is split over devices is one compiled program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from soapjax.errors import Problem, SoapjaxError

NO_MESH = jax.sharding.AbstractMesh((), ())


@contextlib.contextmanager
def compiled_as_planned() -> Iterator[None]:
    """For the user's step once it has a plan: compiled, on the plan's mesh."""
    with contextlib.ExitStack() as stack:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]  # options are made at run time
            stack.enter_context(jax.disable_jit(False))
        if not jax.sharding.get_abstract_mesh().empty:
            stack.enter_context(without_mesh())
        yield


def without_mesh() -> contextlib.AbstractContextManager:
    """`jax.set_mesh` undone; inside `jax.jit`, where it cannot be, only what is traced sees no mesh."""
    try:
        return jax.set_mesh(None)
    except ValueError:
        mesh = jax.sharding.get_abstract_mesh()
    if mesh.explicit_axes:
        value, expected = f"a call inside jit under jax.set_mesh with the explicit axes {mesh.explicit_axes}", "the plan's own mesh"
        remedy = "call it outside of jit, leave set_mesh out, or make the mesh with axis_types=(AxisType.Auto, ...)"
        raise SoapjaxError(Problem("a planned step", value, expected, remedy))
    return jax.sharding.use_abstract_mesh(NO_MESH)


def has_explicit_axes() -> bool:
    """Whether `jax.set_mesh` gave a mesh of explicit axes, which puts layouts of its own into a program's types."""
    return bool(jax.sharding.get_abstract_mesh().explicit_axes)


def on_plans_mesh() -> contextlib.AbstractContextManager:
    """For an equation, which remembers the mesh that it was traced under; not inside `shard_map`, whose mesh it needs."""
    mesh = jax.sharding.get_abstract_mesh()
    return contextlib.nullcontext() if mesh.empty or mesh.manual_axes else jax.sharding.use_abstract_mesh(NO_MESH)


@contextlib.contextmanager
def own_configuration() -> Iterator[None]:
    """For programs of the planner."""
    with (
        compiled_as_planned(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"),
        jax.transfer_guard("allow"), jax.debug_nans(False), jax.debug_infs(False),
    ):  # fmt: skip
        yield


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Searches run on the CPU, since the accelerator's memory belongs to the training step, and under JAX's own configuration."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        device = None
    with own_configuration(), contextlib.nullcontext() if device is None else jax.default_device(device):
        yield
