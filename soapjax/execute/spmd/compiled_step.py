"""A bound plan as a function that feels like `jax.jit`'s: pytrees in, pytrees out, state donated.

The step is compiled once, ahead of its first call, for its shapes alone. A function of `jax.jit` would be compiled again where a
leaf comes committed that came uncommitted before, or strongly typed that was a Python number: which is what the state, a random
key and a step count do at the second call.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.compiled.inspection import compiled_for, peak_memory_bytes
from soapjax.execute.spmd.planned_evaluator import BoundStep
from soapjax.execute.transfers.arrivals import place_all, require_arrays
from soapjax.graph.trace.tracing import check_leaves, signature
from soapjax.helpers.own_config import compiled_as_planned

_COMMITTED = operator.attrgetter("committed")  # of every leaf of the state at every call


class ShapesChanged(Exception):  # noqa: N818 - control flow, not an error for the user
    """The arguments have other shapes than the plan was made for."""


@functools.cache
def _is_array(kind: type) -> bool:
    return issubclass(kind, jax.Array)


def _takes_any(tree: Any, leaves: Sequence[Any]) -> bool:
    """Whether a tree holds anything in place of its arrays: some nodes look at what they are made of, some leave `None` out."""
    try:
        found = jax.tree_util.tree_leaves(tree.unflatten(leaves), is_leaf=lambda x: x is None)
    except Exception:  # noqa: BLE001 - whatever a node of the user's raises
        return False
    return len(found) == len(leaves) and all(a is b for a, b in zip(found, leaves, strict=True))


def _refuse_parts(leaves: list[Any]) -> None:
    """Raises: SoapjaxError inside `shard_map` and `pmap`, where a call is one device's, and a plan is for all of them; and for
    arguments whose types say how they are laid out.
    """
    meshes = [x.sharding.mesh for x in map(jax.typeof, leaves) if hasattr(x, "sharding")]
    if explicit := {a for mesh in meshes for a in mesh.explicit_axes}:
        value = f"arguments laid out over the explicit axes {tuple(sorted(explicit))}"
        expected = "arguments that a plan may lay out"
        remedy = "call it outside of jit, or make the mesh with axis_types=(AxisType.Auto, ...)"
        raise SoapjaxError(Problem("a planned step inside jit", value, expected, remedy))
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.manual_axes:
        value, expected = f"a call inside shard_map or pmap over {mesh.manual_axes}", "a call with the whole batch"
        remedy = "leave shard_map or pmap out, and pass axis_name= where the step has collectives: the plan splits the step"
        raise SoapjaxError(Problem("a planned step", value, expected, remedy))


class CompiledStep:
    """Calls cost what `jax.jit` costs: all that is looked at of the leaves is whether state is laid out, and, on several devices,
    whether any is used up.

    Args:
      program: the bound step and plan.
      donate: reuse the memory of state arguments (those that an output replaces) for the results, or of the arguments at
        these positions. Only of arrays that are laid out as planned, such as the step's own results: any other is copied, and
        stays the caller's.
    """

    def __init__(self, program: BoundStep, *, donate: bool | Sequence[int] = True):
        self.program = program
        step = program.step
        positional, named = step.in_tree.children()
        if named.num_leaves:
            raise TypeError("keyword arguments must be bound to positions before")
        ends = list(itertools.accumulate((a.num_leaves for a in positional.children()), initial=0))
        self._leaves_of = [range(a, b) for a, b in itertools.pairwise(ends)]
        self._donated = self._state() if donate is True else tuple(donate or ())
        self._donated_leaves = [k for i in self._donated for k in self._leaves_of[i]]
        in_shardings, out_shardings = program.in_shardings(), program.out_shardings()
        self.state_outputs = frozenset(step.leaf_pairs.values())  # leaves
        self._in_shardings = in_shardings
        # What the step does not read keeps the layout that it comes in.
        self._wanted = [s if is_read else None for s, is_read in zip(in_shardings, step.is_read, strict=True)]
        held = (step.in_tree, self._wanted), (step.out_tree, out_shardings)
        self._has_trees = all(_takes_any(tree, found) for tree, own in held for found in (own, [None] * len(own)))
        shardings = dict(in_shardings=self._arguments(self._wanted), out_shardings=self._results(out_shardings))
        if program.mesh.size == 1 and program.mesh.devices.flat[0] == jax.devices()[0]:
            shardings = {}  # exactly plain jax.jit
        self.spans_processes = any(d.process_index != jax.process_index() for d in program.mesh.devices.flat)
        self.jitted = jax.jit(self._run, donate_argnums=self._donated, **shardings)
        self._compiled: Any = None

    @property
    def in_shardings(self) -> Any:
        """Layouts of the arguments, in trees like theirs."""
        return self.program.step.in_tree.unflatten(self._in_shardings)[0]

    def _arguments(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """What the compiled function takes: the step's arguments, or lists of their leaves."""
        if self._has_trees:
            return tuple(self.program.step.in_tree.unflatten(leaves)[0])
        return tuple([leaves[k] for k in own] for own in self._leaves_of)

    def _results(self, leaves: Sequence[Any]) -> Any:
        """What it returns: the step's results, or a list of their leaves."""
        return self.program.step.out_tree.unflatten(leaves) if self._has_trees else list(leaves)

    def _call(self, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._has_trees:
            return run(*args)
        leaves, tree = jax.tree_util.tree_flatten((args, {}))
        if tree != self.program.step.in_tree:
            raise ShapesChanged
        return self.program.step.out_tree.unflatten(run(*self._arguments(leaves)))

    def _state(self) -> tuple[int, ...]:
        """Positions of training state: what holds a parameter or its optimizer state. Others may look like a result by chance."""
        trained, pairs = self.program.graph.trained_leaves, self.program.step.state_pairs
        return tuple(
            i for i, leaves in enumerate(self._leaves_of) if trained.intersection(leaves) and all(k in pairs for k in leaves)
        )

    def _run(self, *args: Any) -> Any:
        if self._has_trees:
            self._require_shapes(args)
        outputs, _ = self.program.evaluator().run(jax.tree_util.tree_leaves(args))
        return self._results(outputs)

    def _require_shapes(self, args: tuple[Any, ...]) -> None:
        if signature((args, {})) != (self.program.step.in_tree, self.program.step.leaf_shapes):
            raise ShapesChanged

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    def compile(self) -> None:
        """Compiles the step for its shapes; the first call does it where nobody did before."""
        if self._compiled is None:
            with compiled_as_planned():
                self._compiled = compiled_for(self.lower(), self._platform)

    @property
    def _platform(self) -> str:
        return self.program.mesh.devices.flat[0].platform

    def peak_memory_bytes(self) -> int:
        """Per device, as compiled."""
        self.compile()
        return peak_memory_bytes(self._compiled, self._platform)

    def as_text(self) -> str:
        """The compiled program, as optimised HLO."""
        self.compile()
        return self._compiled.as_text()

    def _structs(self) -> tuple[Any, ...]:
        structs = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=a.weak_type)
            for a, s in zip(self.program.step.in_avals, self._wanted, strict=True)
        ]
        return self._arguments(structs)

    def __call__(self, *args: Any) -> Any:
        leaves = jax.tree_util.tree_leaves(args)
        if self._may_take(leaves):
            try:
                return self._call(self._compiled, args)
            except (TypeError, ValueError, RuntimeError) as e:  # of what it was given: looked for leaf by leaf
                if isinstance(e, jax.errors.JaxRuntimeError):
                    raise
        return self._looked_at(leaves, args)

    def _may_take(self, leaves: list[Any]) -> bool:
        """Whether the compiled program can be given them as they are, as far as it does not find out by itself in time.

        What was used up one device refuses; of several, some have begun by then.
        """
        if self._compiled is None or self.spans_processes or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return False
        donated = self._donated_of(leaves)
        try:
            is_own = all(map(_COMMITTED, donated)) and len(set(map(id, donated))) == len(donated)
            arrays = (x for x in leaves if _is_array(type(x)))  # type: ignore[arg-type]  # types are hashable
            return is_own and (self.program.mesh.size == 1 or not any(x.is_deleted() for x in arrays))
        except (AttributeError, TypeError):  # no array of JAX, or one that is being traced
            return False

    def _looked_at(self, leaves: list[Any], args: tuple[Any, ...]) -> Any:
        """A call with any arguments: laid out where they have to be, or refused in words."""
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            self._require_shapes(args)
            _refuse_parts(leaves)
            with compiled_as_planned():
                return self._call(self.jitted, args)
        require_arrays(leaves, self.program.step.in_paths if len(leaves) == len(self._wanted) else ())
        check_leaves(args, self.program.step.in_names)
        self._require_shapes(args)
        args = self.place(*args) if self.spans_processes else self.place_state(*args)
        self.compile()
        try:
            with compiled_as_planned() if jax.config.jax_disable_jit else contextlib.nullcontext():  # type: ignore[attr-defined]
                return self._call(self._compiled, args)
        except (TypeError, ValueError) as e:
            if isinstance(e, SoapjaxError) or "sharding" not in str(e).lower() and "device" not in str(e).lower():
                raise
            # Committed to other devices (a data loader's device_put, say): place them, then run.
            return self._call(self._compiled, self.place(*args))

    def _donated_of(self, leaves: list[Any]) -> list[Any]:
        if len(leaves) != len(self._wanted):
            raise ShapesChanged
        return [leaves[k] for k in self._donated_leaves]

    def place_state(self, *args: Any) -> tuple[Any, ...]:
        """The arguments with the donated ones laid out as planned; the others go in as they come in every later call too."""
        donated = set(self._donated_leaves)
        return self._placed(args, [s if k in donated else None for k, s in enumerate(self._wanted)])

    def place(self, *args: Any) -> tuple[Any, ...]:
        """The arguments laid out as planned; those that the step does not read as they come."""
        return self._placed(args, self._wanted)

    def _placed(self, args: tuple[Any, ...], shardings: Sequence[Any]) -> tuple[Any, ...]:
        leaves, tree = jax.tree_util.tree_flatten(args)
        return jax.tree_util.tree_unflatten(tree, place_all(leaves, shardings))

    def lower(self, *_: Any) -> Any:
        """The program lowered for arguments laid out as planned, however any at hand lie."""
        with compiled_as_planned():
            return self.jitted.lower(*self._structs())

    def trace(self, *_: Any) -> Any:
        """As `lower`, traced."""
        with compiled_as_planned():
            return self.jitted.trace(*self._structs())

    def to_agree(self, *args: Any) -> tuple[dict[str, str], Callable[[], Any]]:
        """What all processes must have alike before any of them runs, and what compiles it here."""
        lowered = self.lower()

        def compile_here() -> None:
            self._compiled = lowered.compile()

        return {"program": lowered.as_text()}, compile_here
