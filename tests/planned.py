"""Running a step under a plan against the same step on one device, in float64: the oracle of the executor's tests."""

import contextlib
from dataclasses import dataclass, replace

import jax
import numpy as np

from soapjax.costs.tables.problem_tables import cost_tables
from soapjax.execute.spmd.evaluator import ProgramEvaluator
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.graph.batch.draws import is_key
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace
from soapjax.simulate.simulator import Simulator
from soapjax.strategy.configs import replicated
from soapjax.strategy.plan_strategy import make_plan, mesh_plan
from soapjax.strategy.space import search_space
from soapjax.topology import factor_mesh, load_topology

# These programs run once each: compiling is all that takes time.
QUICK = {"xla_backend_optimization_level": 0}


def topology_with(devices=8, hosts=1):
    """The shipped topology of eight CPU devices, or one level of another number of them; several hosts are a slower level."""
    topology = load_topology("cpu8")
    inside = replace(topology.levels[-1], size=devices // hosts)
    if hosts == 1:
        return replace(topology, levels=(*topology.levels[:-1], inside))
    slow = replace(inside, name="host", size=hosts, bandwidth_bytes_per_s=inside.bandwidth_bytes_per_s / 10)
    return replace(topology, levels=(slow, inside))


def data_parallel(space):
    """Every axis that divides goes to the sample dim."""
    strategy = replicated(space.graph, space.mesh)
    for n, op in enumerate(space.graph.operators):
        k = next((k for k, d in enumerate(op.dims) if d.kind == "S" and d.divisor % 2 == 0), None)
        split = 1
        for a, size in enumerate(space.mesh.axis_sizes):
            if k is not None and space.allowed[n, a, k + 1] and op.dims[k].divisor % (split * size) == 0:
                strategy.axes[n, a] = k
                split *= size
    assert space.is_valid(strategy)
    return strategy


def rotated(space, start, axes=None):
    """Axis a of each operator goes to its (start + a)-th choice, among the dims that it divides and replication."""
    strategy = replicated(space.graph, space.mesh)
    for n, op in enumerate(space.graph.operators):
        left = [d.divisor for d in op.dims]
        for a, size in enumerate(space.mesh.axis_sizes):
            choices = [k for k in range(len(op.dims)) if space.allowed[n, a, k + 1] and left[k] % size == 0] + [-1]
            k = choices[(start + a) % len(choices)] if axes is None or a in axes else -1
            strategy.axes[n, a] = k
            if k >= 0:
                left[k] //= size
    assert space.is_valid(strategy)
    return strategy


def leaf_errors(found, expected):
    """‖a - b‖ / max(‖b‖, 1e-6 ‖all‖) per floating-point leaf; other leaves must be equal."""
    floats = [b for b in expected if b.dtype.kind == "f"]
    floor = 1e-6 * np.sqrt(sum(float(np.linalg.norm(b)) ** 2 for b in floats))
    errors = []
    for a, b in zip(found, expected, strict=True):
        if b.dtype.kind == "f":
            assert a.dtype == b.dtype and a.shape == b.shape
            scale = max(float(np.linalg.norm(b)), floor)
            distance = float(np.linalg.norm(a - b))
            errors.append(distance / scale if scale else distance)
        else:
            np.testing.assert_array_equal(a, b)
            errors.append(0.0)
    return errors


def plain_leaves(tree):
    """Leaves as NumPy arrays, keys as their bits."""
    leaves = jax.tree.leaves(tree)
    is_key = [isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    return [np.asarray(jax.random.key_data(x) if k else x) for x, k in zip(leaves, is_key, strict=True)]


@dataclass
class Case:
    """A step on `devices` devices, and what it computes on one in float64."""

    fn: object
    args: tuple
    devices: int = 8
    hosts: int = 1

    def __post_init__(self):
        self.step = trace(self.fn, *self.args)
        self.graph, self.binding = build_graph(self.step)
        self.topology = topology_with(self.devices, self.hosts)
        self.space = search_space(self.graph, factor_mesh(self.topology))
        tables = cost_tables(self.graph, self.space, self.topology)
        self.tables, self.simulator = tables, Simulator(tables)
        # On the host: to cut up what lies on one device, JAX compiles a program for every shape and sharding.
        self.leaves = [x if is_key(x) or not hasattr(x, "dtype") else np.asarray(x) for x in jax.tree.leaves(self.args)]
        with self.float64():
            run = jax.jit(lambda *a: ProgramEvaluator(self.step.program, is_float64=True).run(list(a))[0], compiler_options=QUICK)
            self.expected = plain_leaves(run(*self.leaves))

    @contextlib.contextmanager
    def float64(self):
        with jax.enable_x64(True):
            yield

    def check_plain(self, tolerance):
        """The flat program computes what the function does, as far as the function's own precision shows it."""
        plain = plain_leaves(jax.jit(self.fn, compiler_options=QUICK)(*self.args))
        assert len(plain) == len(self.expected)
        plain = [np.asarray(a, np.float64) if b.dtype.kind == "f" else a for a, b in zip(plain, self.expected, strict=True)]
        worst = max(leaf_errors(plain, self.expected))
        assert worst <= tolerance, f"flat program against plain function: {worst:.2g}"

    def plan(self, strategy):
        prediction = self.simulator.prediction(strategy)
        layouts = self.simulator.costs(strategy).layouts
        on_mesh = mesh_plan(self.space, strategy, layouts.slots, layouts.home)
        return make_plan(self.space, self.topology, strategy, on_mesh, prediction)

    def run(self, strategy):
        """The step's output leaves under a plan, in float64."""
        bound = bind_plan(self.step, self.plan(strategy), devices=jax.devices()[: self.devices])
        with self.float64():
            run = jax.jit(
                lambda *a: bound.evaluator(is_float64=True).run(list(a))[0],
                in_shardings=bound.in_shardings(),
                out_shardings=bound.out_shardings(),
                compiler_options=QUICK,
            )
            return plain_leaves(run(*self.leaves))

    def check(self, strategy, tolerance=1e-9):
        errors = leaf_errors(self.run(strategy), self.expected)
        wrong = {p: f"{e:.2g}" for p, e in zip(self.step.out_paths, errors, strict=True) if not e <= tolerance}
        shown = {
            op.name: [op.dims[v].name if v >= 0 else "-" for v in strategy.axes[n]] for n, op in enumerate(self.graph.operators)
        }
        assert not wrong, f"{wrong} under {shown}"
