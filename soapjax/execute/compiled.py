"""A bound plan as a function that feels like `jax.jit`'s: pytrees in, pytrees out, state donated."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from soapjax.errors import SoapjaxError
from soapjax.execute.spmd import Program


class ShapesChanged(Exception):  # noqa: N818 - control flow, not an error for the user
    """The arguments have other shapes than the plan was made for."""


def place(x: Any, sharding: NamedSharding) -> Any:
    """`x` under `sharding`: itself where it is laid out so, else a copy (donation must not take the caller's buffer)."""
    if isinstance(x, jax.Array):
        if x.committed and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        x = x.copy()
    return jax.device_put(x, sharding)


class CompiledStep:
    """Calls cost what `jax.jit` costs: nothing is looked at in Python but by `jax.jit` itself.

    Args:
      program: the bound step and plan.
      donate: reuse the memory of state arguments (those that an output replaces) for the results.
    """

    def __init__(self, program: Program, *, donate: bool = True):
        self.program = program
        step = program.step
        args, kwargs = step.in_tree.unflatten(range(step.in_tree.num_leaves))
        if kwargs:
            raise TypeError("keyword arguments must be bound to positions before")
        self._argument_leaves = [jax.tree_util.tree_leaves(a) for a in args]
        state = {i for i, leaves in enumerate(self._argument_leaves) if leaves and all(k in step.state_pairs for k in leaves)}
        in_shardings, out_shardings = program.in_shardings(), program.out_shardings()
        self.in_shardings = step.in_tree.unflatten(in_shardings)[0]
        self.out_shardings = step.out_tree.unflatten(out_shardings)
        self.jitted = jax.jit(
            self._run,
            in_shardings=tuple(self.in_shardings),
            out_shardings=self.out_shardings,
            donate_argnums=tuple(sorted(state)) if donate else (),
        )

    def _run(self, *args: Any) -> Any:
        step = self.program.step
        leaves, tree = jax.tree_util.tree_flatten((args, {}))
        wanted = step.in_avals
        if tree != step.in_tree or any(
            tuple(x.shape) != tuple(w.shape) or x.dtype != w.dtype for x, w in zip(leaves, wanted, strict=False)
        ):
            raise ShapesChanged
        outputs, _ = self.program.evaluator().run(leaves)
        return step.out_tree.unflatten(outputs)

    def __call__(self, *args: Any) -> Any:
        try:
            return self.jitted(*args)
        except ValueError as e:
            if isinstance(e, SoapjaxError) or "sharding" not in str(e).lower():
                raise
            # Committed to other devices (a data loader's device_put, say): place them, then run.
            return self.jitted(*self.place(*args))

    def place(self, *args: Any) -> tuple[Any, ...]:
        """The arguments laid out as planned."""
        return tuple(jax.tree.map(place, a, s) for a, s in zip(args, self.in_shardings, strict=True))

    def lower(self, *args: Any) -> Any:
        return self.jitted.lower(*args)
