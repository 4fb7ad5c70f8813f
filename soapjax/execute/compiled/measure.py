"""Tasks of a step, timed alone on one device at the shapes that a split leaves them.

What is timed is what the executor runs: the task's own equations (its heavy one with the fused neighbours, so that elementwise
work is not counted twice), evaluated by the same `ProgramEvaluator`, their shapes made local. Values from
outside are arguments; those that every device makes for itself (masks, iotas) are made inside.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from soapjax.execute.compiled.device_times import seconds_of_calls
from soapjax.execute.spmd.evaluator import ProgramEvaluator
from soapjax.execute.spmd.heavy import with_local_groups
from soapjax.graph.operators import NOT_SPLIT, OperatorGraph, Task
from soapjax.graph.passes.build import Binding
from soapjax.graph.passes.units import generated_values
from soapjax.graph.trace.program import FlatEqn
from soapjax.graph.trace.tracing import TracedStep

REPEATS = 7
MIN_BATCH_S = 2e-3  # calls are timed in batches of at least this long
MAX_CALLS = 2000
TRACED_CALLS = 15  # where the device itself tells
LARGE_BYTES = 2**20  # arguments from here on are out of the caches when a step comes to them again, weights above all
COLD_BYTES = 2**27  # passes before a large argument is read a second time
MAX_COPIES = 64

Shapes = list[tuple[int, ...]]


class Unmeasurable(Exception):  # noqa: N818 - the caller keeps the roofline, and says so
    """A task that has no local form on one device (its blocks need their neighbours, say)."""


class Timing(NamedTuple):
    seconds: float  # of one run, median
    spread: float  # (upper - lower quartile) / median
    num_runs: int


class LocalStep:
    """Makes single-device functions of a step's tasks."""

    def __init__(self, step: TracedStep, graph: OperatorGraph, binding: Binding):
        self.step, self.graph, self.binding = step, graph, binding
        self.by_key = {e.key: e for e, _ in step.program.walk()}
        self.evaluator = ProgramEvaluator(step.program)

    def task(self, k: int, degrees: Sequence[int]) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
        """A function of local blocks, and their types. `degrees` per dim of the operator; of an update, the shards.

        Raises: Unmeasurable where the task cannot be run on a block of its own.
        """
        task = self.graph.tasks[k]
        eqns = [self.by_key[key] for key in task.equations.keys]
        program, values = self.step.program, self.binding.values
        if any(e.body is not None for e in eqns) or not eqns:
            raise Unmeasurable("no equations of its own")
        local = self._local_shapes(task, eqns, degrees)
        made = {values.of(o).root for e in eqns for o in e.outputs}
        types: dict[tuple[int, tuple[int, ...]], jax.ShapeDtypeStruct] = {}  # of what comes from outside
        inner: dict[tuple[int, tuple[int, ...]], Any] = {}
        generated = self._generated
        for e in eqns:
            for a, shape in zip(e.inputs, local[e.key][0], strict=True):
                if not isinstance(a, int) or (root := values.of(a).root) in made:
                    continue
                key, aval = (a, shape), program.aval(a)
                if root in generated and not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
                    inner[key] = aval.dtype
                else:
                    types[key] = jax.ShapeDtypeStruct(shape, aval.dtype)
        read_outside = self._read_outside(k, eqns)

        def run(*blocks: Any) -> list[Any]:
            env: dict[Any, Any] = dict(zip(types, blocks, strict=True))
            env.update({key: _generated_block(key[1], dtype) for key, dtype in inner.items()})
            for e in eqns:
                inputs = []
                for a, shape in zip(e.inputs, local[e.key][0], strict=True):
                    if not isinstance(a, int):
                        inputs.append(self.evaluator.read(a, {}))
                    elif (root := values.of(a).root) in made:
                        inputs.append(env[root])
                    else:
                        inputs.append(env[a, shape])
                    if jnp.shape(inputs[-1]) != shape:
                        raise Unmeasurable(f"{e.name}: a block of {jnp.shape(inputs[-1])} where {shape} is wanted")
                with e.ctx.manager:
                    results = self.evaluator.bind(e, inputs, _local_params(e, program, *local[e.key]))
                for o, x, shape in zip(e.outputs, results, local[e.key][1], strict=True):
                    if x.shape != shape:
                        raise Unmeasurable(f"{e.name}: makes {x.shape} where {shape} is planned")
                    env[values.of(o).root] = x
            return [env[values.of(o).root] for o in read_outside]

        return run, list(types.values())

    def _local_shapes(self, task: Task, eqns: Sequence[FlatEqn], degrees: Sequence[int]) -> dict[str, tuple[Shapes, Shapes]]:
        """Of what each equation reads, and of what it makes."""
        program, found = self.step.program, {}
        whole = max((program.aval(o).shape for e in eqns for o in e.outputs), key=math.prod)
        for eqn in eqns:
            shapes = [tuple(program.aval(a).shape) for a in (*eqn.inputs, *eqn.outputs)]
            if task.parameter >= 0:
                local = [_divided(s, degrees[0]) if s == whole else s for s in shapes]
            else:
                ins, outs = self.binding.local_dims(task, eqn)
                local = [
                    tuple(n if d == NOT_SPLIT else n // degrees[d] for n, d in zip(s, dims, strict=True))
                    for s, dims in zip(shapes, (*ins, *outs), strict=True)
                ]
            found[eqn.key] = local[: len(eqn.inputs)], local[len(eqn.inputs) :]
        return found

    @functools.cached_property
    def _generated(self) -> set[int]:
        """Roots that no input of the step flows into."""
        return generated_values(self.step.program, self.binding.values, self.binding.phases.by_gradient.keys())

    def _read_outside(self, k: int, eqns: list[FlatEqn]) -> list[int]:
        """Results of the task: what its own equations do not consume, what the step returns (an optimizer's state), and what the
        graph says it writes, less what a compiler computes anew where it is read."""
        values, task = self.binding.values, self.graph.tasks[k]
        consumed = {values.of(a).root for e in eqns for a in e.read}
        written = {
            root for a, sources in zip(task.writes, task.memory.recomputed_from, strict=True)
            if (root := self.graph.tensors[a.tensor].value) in self._read_by_heavy or sources is None
        }  # fmt: skip
        found = {values.of(o).root: o for e in eqns for o in e.outputs}
        outside = written | self._returned
        return [o for root, o in found.items() if root not in consumed or root in outside] or [*found.values()]

    @functools.cached_property
    def _read_by_heavy(self) -> set[int]:
        """Roots that stand in memory as a heavy equation's operands."""
        heavy = [self.by_key[t.equations.heavy] for t in self.graph.tasks if t.is_heavy]
        return {self.binding.values.of(a).root for e in heavy for a in e.read}

    @functools.cached_property
    def _returned(self) -> set[int]:
        return {self.binding.values.of(o).root for o in self.step.program.outputs if isinstance(o, int)}

    def ready(self, k: int, degrees: Sequence[int], device: Any) -> Callable[[], Timing]:
        """Compiles task `k` for one device by a first call; what is returned times it.

        Raises, now or then: Unmeasurable where it has no local form, or does not fit the device.
        """
        run, types = self.task(k, degrees)
        fn = jax.jit(run)
        with _refusals(), jax.default_device(device):
            blocks = [_block(t, i) for i, t in enumerate(types)]
            jax.block_until_ready(fn(*blocks))

        def timed() -> Timing:
            with _refusals(), jax.default_device(device):
                return time_calls(fn, *_cold(blocks))

        return timed


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raises: Unmeasurable for whatever XLA refuses."""
    try:
        yield
    except Unmeasurable:
        raise
    except Exception as e:  # noqa: BLE001 - whatever XLA refuses at these shapes
        raise Unmeasurable(f"{type(e).__name__}: {str(e).strip().splitlines()[0][:120]}") from None


def _cold(blocks: Sequence[Any]) -> list[list[Any]]:
    """The arguments of call after call: large ones are other arrays each time, so that none is found in a cache."""
    large = {i: x.nbytes for i, x in enumerate(blocks) if x.nbytes >= LARGE_BYTES}
    if not large or sum(large.values()) >= COLD_BYTES:
        return [list(blocks)]
    count = min(MAX_COPIES, 1 + COLD_BYTES // sum(large.values()))
    others = [[jnp.copy(x) if i in large else x for i, x in enumerate(blocks)] for _ in range(count - 1)]
    return [list(blocks), *others]


def time_calls(fn: Callable[..., Any], *arguments: Sequence[Any], repeats: int = REPEATS) -> Timing:
    """Seconds of one call in a program: as the device tells, or by batches of calls, less what dispatching a call that does nothing
    takes.

    Args:
      arguments: of one call; where there are several, calls take them in turn.
    """
    turn = itertools.cycle(arguments)
    jax.block_until_ready(fn(*next(turn)))

    def batch(f: Callable[..., Any], count: int) -> float:
        start = time.perf_counter()
        out = None
        for _ in range(count):
            out = f(*next(turn))
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / count

    if found := seconds_of_calls(lambda: batch(fn, TRACED_CALLS), TRACED_CALLS):
        return _timing(found, TRACED_CALLS)
    empty = jax.jit(lambda *x: jnp.int32(0))
    jax.block_until_ready(empty(*next(turn)))
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        once = min(batch(fn, 1) for _ in range(2))
        count = int(min(max(MIN_BATCH_S / max(once, 1e-7), 1), MAX_CALLS))
        times = [batch(fn, count) for _ in range(repeats)]
        # Calls of a program that does nothing return as soon as it is queued: what a call costs at least.
        overhead = min(batch(empty, max(count, 20)) for _ in range(3))
    finally:
        if was_enabled:
            gc.enable()
    return _timing(times, repeats * count, overhead)


def _timing(times: Sequence[float], num_runs: int, overhead: float = 0.0) -> Timing:
    low, median, high = np.quantile(times, (0.25, 0.5, 0.75))
    return Timing(float(max(median - overhead, median * 0.05)), float((high - low) / median), num_runs)


def _divided(shape: tuple[int, ...], shards: int) -> tuple[int, ...]:
    """A shape with `shards` times fewer elements: elementwise work does not see which dim is split.

    Raises: Unmeasurable where no dims divide so.
    """
    out, left = list(shape), shards
    for d, n in enumerate(shape):
        split = math.gcd(n, left)
        out[d], left = n // split, left // split
    if left != 1:
        raise Unmeasurable(f"{shape} in {shards} shards")
    return tuple(out)


def _block(t: jax.ShapeDtypeStruct, seed: int) -> Any:
    """Ordinary values: normal floats, small indices, both truth values."""
    if jax.dtypes.issubdtype(t.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(seed), t.shape)
    rng = np.random.default_rng(seed)
    if jnp.issubdtype(t.dtype, jnp.bool_):
        return jnp.asarray(rng.random(t.shape) < 0.5)
    if jnp.issubdtype(t.dtype, jnp.inexact):
        return jnp.asarray(rng.standard_normal(t.shape, np.float32)).astype(t.dtype)
    return jnp.asarray(rng.integers(0, 2 if t.dtype == jnp.int8 else 64, t.shape)).astype(t.dtype)


def _generated_block(shape: tuple[int, ...], dtype: Any) -> Any:
    """A block that is made on the device, cheap, and nothing that a compiler could simplify by."""
    if not shape:
        return jnp.ones(shape, dtype)
    index = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    return (index & 1).astype(dtype) if jnp.issubdtype(dtype, jnp.bool_) else (index & 15).astype(dtype)


def _local_params(eqn: FlatEqn, program: Any, ins: list[tuple[int, ...]], outs: list[tuple[int, ...]]) -> dict[str, Any]:
    """An equation's parameters where they repeat shapes, or counts of groups, for local ones."""
    p = dict(eqn.params)
    full = [tuple(program.aval(a).shape) for a in eqn.inputs]
    if eqn.name in ("broadcast_in_dim", "iota", "random_bits", "empty"):
        p["shape"] = outs[0][len(ins[0]) :] if eqn.name == "random_bits" else outs[0]
    elif eqn.name == "reshape":
        p["new_sizes"] = outs[0]
    elif eqn.name == "slice":
        limits = zip(p["start_indices"], p["limit_indices"], ins[0], full[0], strict=True)
        p["limit_indices"] = tuple(n if n != f else hi for _, hi, n, f in limits)
    elif eqn.name == "dynamic_slice":
        p["slice_sizes"] = outs[0]
    elif eqn.name == "gather":
        p["slice_sizes"] = tuple(n if s == f else s for s, n, f in zip(p["slice_sizes"], ins[0], full[0], strict=True))
    elif eqn.name == "conv_general_dilated":
        p = with_local_groups(p, [f // n for f, n in zip(full[0], ins[0], strict=True)])
    return p
