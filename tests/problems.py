"""Small planning problems for tests: a model's graph, a topology, and all that costs and simulators need of them.

Everything is cached, so that the tests of one run trace each model once.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from soapjax.costs.evaluate import Costs
from soapjax.costs.tables.problem_tables import CostTables, cost_tables
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.build import build_graph
from soapjax.graph.recompute import Recomputation
from soapjax.graph.trace.tracing import trace
from soapjax.simulate.simulator import Simulator
from soapjax.strategy.configs import Strategy, replicated
from soapjax.strategy.space import SearchSpace, search_space
from soapjax.topology import DeviceTopology, factor_mesh, load_topology

BATCH = 16
TINY_LM = dict(batch=8, seq=16, width=32, heads=4, vocab=64)
MODELS = {
    "mlp": ("mlp", dict(batch=64, width=64, layers=2, classes=64, features=64)),
    "mlp_deep": ("mlp", dict(batch=64, width=64, layers=5, classes=64, features=64)),
    "mlp_of_sixes": ("mlp", dict(batch=24, width=36, layers=2, classes=42, features=6)),
    "lm": ("transformer_lm", dict(layers=1, **TINY_LM)),
    "lm_recomputed": ("transformer_lm", dict(layers=2, **TINY_LM)),
    "lm_scan": ("transformer_lm", dict(layers=2, scan=True, **TINY_LM)),
    "lm_tied_scan_remat": ("transformer_lm", dict(layers=3, scan=True, remat=True, tie=True, **TINY_LM)),
    "resnet": ("resnet", dict(batch=8, image=32, width=8, classes=8, depth="tiny")),
    "lenet": ("lenet", dict(batch=8, image=28, classes=8)),
    "rnnlm": ("rnnlm", dict(batch=8, seq=3, hidden=32, layers=1, vocab=64)),
    "moe": ("moe", dict(batch=8, seq=16, width=32, layers=1, every=1, experts=8, top=2, vocab=64)),
}

# (model, topology): one and two levels, two and three as prime factors, with overlap and without.
PROBLEMS = (
    ("mlp", "a100x64"),
    ("mlp_of_sixes", "2x6"),
    ("lm", "a100x8"),
    ("lm_recomputed", "a100x8"),
    ("lm_scan", "2x4"),
    ("lm_tied_scan_remat", "cpu8"),
    ("lenet", "dgx1_v100x8"),
    ("resnet", "dgx1_v100x8"),
    ("rnnlm", "2x4"),
    ("moe", "a100x64"),
    ("casts", "a100x8"),
    ("adding_up", "2x4"),
)
# To trace and to compile.
SLOW = (("moe", "a100x64"), ("mlp", "a100x64"), ("lm_scan", "2x4"), ("resnet", "dgx1_v100x8"), ("rnnlm", "2x4"))


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One problem, ready to be asked."""

    graph: OperatorGraph
    topology: DeviceTopology
    space: SearchSpace
    tables: CostTables
    simulator: Simulator

    def figures(self, strategies: list[Strategy]) -> tuple[Costs, np.ndarray]:
        """Costs [B, ...] and step times [B]."""
        batch = self.simulator.batch(np.stack([s.axes for s in strategies]), np.stack([s.storage for s in strategies]))
        return jax.tree.map(lambda *x: np.stack(x), *map(batch.costs, range(len(strategies)))), batch.scores.step_time_s

    def strategies(self, seed: int, count: int) -> list[Strategy]:
        rng = np.random.default_rng(seed)
        return [self.space.random(rng) for _ in range(count)]

    def replicated(self) -> Strategy:
        return replicated(self.graph, self.space.mesh)

    def data_parallel(self) -> Strategy:
        """Every axis on the first sample dim of every operator that has one."""
        strategy = self.replicated()
        for n, op in enumerate(self.graph.operators):
            sample = [d for d, dim in enumerate(op.dims) if dim.kind == "S"]
            if sample:
                strategy.axes[n] = sample[0]
        return strategy

    def leaf(self, path: str) -> int:
        return self.graph.in_paths.index(path)


def casting_step(params, batch):
    """Parameters in float32, products in bfloat16; w3 is read in both."""

    def loss(params):
        x = batch["x"].astype(jnp.bfloat16)
        x = jnp.tanh(x @ params["w1"].astype(jnp.bfloat16))
        x = jnp.tanh(x @ params["w2"].astype(jnp.bfloat16))
        # Also read as it is: not cast before any other use.
        wide = x.astype(jnp.float32) @ params["w3"] + (x @ params["w3"].astype(jnp.bfloat16)).astype(jnp.float32)
        return (wide**2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@functools.cache
def casting_arguments(batch: int = 32, width: int = 64):
    keys = jax.random.split(jax.random.key(0), 4)
    params = {f"w{i}": jax.random.normal(keys[i], (width, width)) / 8 for i in (1, 2, 3)}
    return params, {"x": jax.random.normal(keys[0], (batch, width))}


def adding_up(params, batch, parts: int = 4):
    """Adds up gradients itself: of the first part of the batch, and in a loop of the others; one weight is used twice."""

    def loss(params, x):
        x = jnp.tanh(x @ params["w1"] + params["b"])
        return (jnp.tanh(x @ params["w2"]) @ params["w2"]).mean()

    def one(total, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(jnp.add, total, (value, grads)), None

    x = batch["x"].reshape(parts, -1, *batch["x"].shape[1:])
    (value, grads), _ = jax.lax.scan(one, jax.value_and_grad(loss)(params, x[0]), x[1:])
    return jax.tree.map(lambda p, g: p - 0.1 / parts * g, params, grads), value / parts


@functools.cache
def adding_up_arguments(batch: int = 64, width: int = 32):
    params, x = casting_arguments(batch, width)
    return {"w1": params["w1"], "w2": params["w2"], "b": params["w3"][0]}, x


def abstract(module: str, **sizes: Any) -> tuple[Callable, Any, Any]:
    """A model's step, and shapes in place of its state and batch: nothing is allocated, and nothing compiled."""
    made = importlib.import_module(f"models.{module}")
    steps = []

    def arguments():
        step, state, batch = made.make(**sizes)
        steps.append(step)
        return state, batch

    state, batch = jax.eval_shape(arguments)
    return steps[0], state, batch


@functools.cache
def graph_of(model: str) -> OperatorGraph:
    """The operator graph of a small model; nothing is allocated."""
    return graph_with(model)


@functools.cache
def graph_with(model: str, **changes: int) -> OperatorGraph:
    """As `graph_of`, with other sizes."""
    if model == "casts":
        return build_graph(trace(casting_step, *casting_arguments(**changes)))[0]
    if model == "adding_up":
        return build_graph(trace(adding_up, *adding_up_arguments(**changes)))[0]
    module, sizes = MODELS[model]
    sizes = {**sizes, **changes}
    step = trace(*abstract(module, **sizes))
    if model == "lm_recomputed":  # some operators, the others are kept
        options = Recomputation(step)
        step = options.step([name for i, name in enumerate(options.parts) if i % 4])
    return build_graph(step)[0]


@functools.cache
def topology_of(name: str) -> DeviceTopology:
    """A shipped topology, or "HxD": H hosts of D GPUs with the figures of a100x64."""
    if "x" not in name or not name[0].isdigit():
        return load_topology(name)
    base = load_topology("a100x64")
    sizes = [int(n) for n in name.split("x")]
    levels = tuple(dataclasses.replace(lv, size=n) for lv, n in zip(base.levels, sizes, strict=True))
    return dataclasses.replace(base, name=name, levels=levels)


def total_flops(graph: OperatorGraph) -> float:
    """FLOPs of one step on one device, loops counted with their trips."""
    return float(np.sum([w.flops * t.trip_count for t in graph.tasks for w in t.work]))


@functools.cache
def case(model: str, topology: str) -> Case:
    return case_with(model, topology)


def case_with(model: str, topology: str, *, overlap: bool | None = None, fixed=None, pins: bool = False) -> Case:
    """As `case`, with the overlap of communication switched, with layouts fixed or with pins."""
    graph, place = graph_of(model), topology_of(topology)
    if overlap is not None:
        place = dataclasses.replace(place, device=dataclasses.replace(place.device, overlap=overlap))
    space = search_space(graph, factor_mesh(place), fixed=fixed, pins=pins)
    tables = cost_tables(graph, space, place)
    return Case(graph, place, space, tables, Simulator(tables))
