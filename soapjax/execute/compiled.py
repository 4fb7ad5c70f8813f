"""A bound plan as a function that feels like `jax.jit`'s: pytrees in, pytrees out, state donated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from soapjax.errors import SoapjaxError
from soapjax.execute.pieces import piecewise
from soapjax.execute.spmd import Program
from soapjax.graph.trace import signature


class ShapesChanged(Exception):  # noqa: N818 - control flow, not an error for the user
    """The arguments have other shapes than the plan was made for."""


def place(x: Any, sharding: NamedSharding) -> Any:
    """`x` under `sharding`: itself where it is laid out so, else a copy (donation must not take the caller's buffer).

    Where `sharding` is of other processes too, each gives `x` in full, and keeps its own part; nothing is sent. What already is
    spread over processes in another way goes piece by piece.
    """
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        if x.committed and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        if x.is_fully_addressable and not sharding.is_fully_addressable:
            return _own_part(x, sharding)
        if not x.is_fully_addressable:
            return piecewise([x.sharding], [sharding])(x)[0]
        x = x.copy()
    elif not isinstance(x, jax.core.Tracer) and not sharding.is_fully_addressable:
        return _own_part(jax.numpy.asarray(x), sharding)
    return jax.device_put(x, sharding)


def _own_part(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = _own_part(jax.random.key_data(x), NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    whole = np.asarray(x)
    # A copy, which the step may use up: on CPUs an array may share its memory with what it was made from.
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: np.array(whole[index]), dtype=whole.dtype)


def _some_leaf(tree: Any) -> Any:
    """One leaf, without flattening a large tree where that can be helped: this runs at every call."""
    node = tree
    while not isinstance(node, jax.Array):
        if isinstance(node, dict) and node:
            node = next(iter(node.values()))
        elif isinstance(node, tuple | list) and node:
            node = node[0]
        else:
            return next(iter(jax.tree_util.tree_leaves(tree)), None)
    return node


class CompiledStep:
    """Calls cost what `jax.jit` costs: next to nothing is looked at in Python but by `jax.jit` itself.

    Args:
      program: the bound step and plan.
      donate: reuse the memory of state arguments (those that an output replaces) for the results. Only of state that is
        laid out as planned, such as the step's own results: any other is copied, and stays the caller's.
    """

    def __init__(self, program: Program, *, donate: bool = True):
        self.program = program
        step = program.step
        args, kwargs = step.in_tree.unflatten(range(step.in_tree.num_leaves))
        if kwargs:
            raise TypeError("keyword arguments must be bound to positions before")
        self._argument_leaves = [jax.tree_util.tree_leaves(a) for a in args]
        # Training state: what holds a parameter or its optimizer state. Other arguments may look like a result by chance.
        trained = {k for p in program.graph.parameters for k in (p.leaf, *p.state_leaves)}
        state = {
            i
            for i, leaves in enumerate(self._argument_leaves)
            if trained.intersection(leaves) and all(k in step.state_pairs for k in leaves)
        }
        self._donated = tuple(sorted(state)) if donate else ()
        in_shardings, out_shardings = program.in_shardings(), program.out_shardings()
        self._signature = step.in_tree, tuple((tuple(a.shape), str(a.dtype)) for a in step.in_avals)
        self.in_shardings = step.in_tree.unflatten(in_shardings)[0]
        self.out_shardings = step.out_tree.unflatten(out_shardings)
        shardings = dict(in_shardings=tuple(self.in_shardings), out_shardings=self.out_shardings)
        if program.mesh.size == 1 and program.mesh.devices.flat[0] == jax.devices()[0]:
            shardings = {}  # exactly plain jax.jit
        self.spans_processes = any(d.process_index != jax.process_index() for d in program.mesh.devices.flat)
        self.jitted = jax.jit(self._run, donate_argnums=self._donated, **shardings)

    def _run(self, *args: Any) -> Any:
        step = self.program.step
        self._require_shapes(args)
        outputs, _ = self.program.evaluator().run(jax.tree_util.tree_leaves(args))
        return step.out_tree.unflatten(outputs)

    def _require_shapes(self, args: tuple[Any, ...]) -> None:
        if signature((args, {})) != self._signature:
            raise ShapesChanged

    def _is_foreign(self, args: tuple[Any, ...]) -> bool:
        """Whether a state comes from elsewhere: the step's own results are arrays committed to devices. Looks at one leaf each."""
        for i in self._donated:
            leaf = _some_leaf(args[i]) if i < len(args) else None
            is_own = isinstance(leaf, jax.core.Tracer) or (isinstance(leaf, jax.Array) and leaf.committed)
            if leaf is not None and not is_own:
                return True
        return False

    def __call__(self, *args: Any) -> Any:
        if self._donated and self._is_foreign(args):
            self._require_shapes(args)
            args = self.place_state(*args)
        if self.spans_processes:
            self._require_shapes(args)
            args = self._place_others(args)
        try:
            return self.jitted(*args)
        except ValueError as e:
            if isinstance(e, SoapjaxError):
                raise
            self._require_shapes(args)  # another tree, or a size that its sharding does not divide
            if "sharding" not in str(e).lower():
                raise
            # Committed to other devices (a data loader's device_put, say): place them, then run.
            return self.jitted(*self.place(*args))

    def place_state(self, *args: Any) -> tuple[Any, ...]:
        """The arguments with the donated ones laid out as planned; the others go in as they come in every later call too."""
        return tuple(jax.tree.map(place, a, self.in_shardings[i]) if i in self._donated else a for i, a in enumerate(args))

    def _place_others(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """All but state laid out as planned: across processes `jax.jit` takes no host's arrays, such as a batch is."""
        return tuple(
            a if i in self._donated else jax.tree.map(place, a, self.in_shardings[i]) for i, a in enumerate(args)
        )  # fmt: skip

    def place(self, *args: Any) -> tuple[Any, ...]:
        """The arguments laid out as planned."""
        return tuple(jax.tree.map(place, a, s) for a, s in zip(args, self.in_shardings, strict=True))

    def lower(self, *args: Any) -> Any:
        return self.jitted.lower(*args)

    def to_agree(self, *args: Any) -> tuple[dict[str, str], Callable[[], Any]]:
        """What all processes must have alike before any of them runs, and what compiles it here."""
        lowered = self.lower(*self.place(*args))
        return {"program": lowered.as_text()}, lowered.compile  # jax.jit finds it again at the first call
