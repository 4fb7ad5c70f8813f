"""Planners on small problems: baselines are what their names say, exhaustive search is the brute-force optimum."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import family
from problems import MODELS, graph_with

import soapjax
from soapjax.errors import SoapjaxError
from soapjax.planning.entry import planning_problem
from soapjax.search.chain.mcmc_planner import mcmc
from soapjax.search.experts.baselines import data_parallel_strategy, tensor_parallel_strategy
from soapjax.search.planners import PLACEMENT_PLANNERS, PLANNERS, get_planner
from soapjax.search.problem import Budget, PlanningProblem
from soapjax.search.proofs.branch_and_bound import exhaustive
from soapjax.strategy.configs import Strategy
from soapjax.strategy.space import search_space
from soapjax.topology import factor_mesh, load_topology


def topology_of(devices: int):
    topology = load_topology("cpu8")
    return dataclasses.replace(topology, levels=(dataclasses.replace(topology.levels[-1], size=devices),))


def trained(params, x):
    loss = lambda p: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)  # noqa: E731
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def make(devices: int, batch: int = 32, hidden: int = 64, space: str = "soap"):
    params = {"a": jax.ShapeDtypeStruct((32, hidden), "float32"), "b": jax.ShapeDtypeStruct((hidden, 16), "float32")}
    step = soapjax.trace(trained, params, jax.ShapeDtypeStruct((batch, 32), "float32"))
    return planning_problem(step, topology_of(devices), space=space)


def test_exhaustive_is_the_brute_force_optimum():
    problem = make(2)
    space = problem.space
    options = []
    for n in range(problem.graph.num_operators):
        storages = range(len(space.storages)) if space.owns_parameters[n] else (0,)
        options.append([(axes, s) for axes in space.configs(n) for s in storages])
    everything = [
        Strategy(np.array([a for a, _ in picked], np.int8), np.array([s for _, s in picked], np.int8))
        for picked in itertools.product(*options)
    ]
    wanted = min(e.cost for e in problem.evaluate(everything) if e.is_feasible)
    found = exhaustive(jax.random.key(0), problem, Budget())
    assert found.stopped_by == "complete" and "proven optimal" in found.notes[0]
    assert found.best.cost == pytest.approx(wanted, rel=1e-6)
    assert found.num_proposals < len(everything), "the bound prunes"
    searched = mcmc(jax.random.key(0), problem, Budget(num_proposals=512))
    assert searched.best.cost == pytest.approx(wanted, rel=1e-6), "and the chain finds it"


def test_data_parallel_splits_the_batch_only():
    problem = make(8)
    strategy, notes = data_parallel_strategy(problem)
    assert not notes
    for n, op in enumerate(problem.graph.operators):
        kinds = {op.dims[v].kind for v in strategy.axes[n] if v >= 0}
        assert kinds <= {"S"}
    assert (strategy.storage == 0).all()


@pytest.mark.parametrize("devices, batch, reached", [(8, 12, 4), (6, 10, 2), (7, 10, 1)])
def test_data_parallel_lowers_a_degree_that_does_not_divide(devices, batch, reached):
    problem = make(devices, batch=batch)
    strategy, notes = data_parallel_strategy(problem)
    assert notes == (f"a sample dim of {batch} does not split {devices} ways: {reached} used",)
    assert problem.space.is_valid(strategy)


def test_tensor_parallel_pairs_column_with_row():
    """Megatron: the first layer is split on its outputs, the second on what it sums over, with one sum after."""
    problem = make(4)
    strategy = tensor_parallel_strategy(problem, range(problem.space.num_axes))
    dots = [(n, o) for n, o in enumerate(problem.graph.operators) if o.kind == "dot"]
    (first, a), (second, b) = dots
    assert all(a.dims[v].kind == "P" and not a.dims[v].is_reduced for v in strategy.axes[first])
    assert all(b.dims[v].is_reduced for v in strategy.axes[second])
    assert problem.space.is_valid(strategy)


@pytest.mark.parametrize("tie", [True, False])
def test_tensor_parallel_splits_the_vocabulary(tie):
    """Megatron: the embedding's rows and the head's columns by the same axes, the loss with them; nothing of the table repeated."""
    graph, topology = graph_with("lm", tie=tie), load_topology("cpu8")
    problem = PlanningProblem.make(graph, search_space(graph, factor_mesh(topology)), topology)
    axes = range(problem.space.num_axes)
    strategy = tensor_parallel_strategy(problem, axes)
    index = {op.name: n for n, op in enumerate(graph.operators)}
    vocab = MODELS["lm"][1]["vocab"]
    for name in ("embed", "embed.attend" if tie else "head", "step"):
        op, chosen = graph.operators[index[name]], set(strategy.axes[index[name]].tolist())
        assert len(chosen) == 1 and op.dims[chosen.pop()].size == vocab
    assert problem.space.is_valid(strategy)
    plain = data_parallel_strategy(problem)[0]
    held = [problem.simulator.costs(s).memory_bytes[0] for s in (strategy, plain)]
    assert held[0] < held[1] / 2


def test_tensor_parallel_keeps_small_tables_whole():
    """A table with no more rows than a sample looks up, as of positions, costs less than the sum of the parts of its result."""
    def step(params, batch):
        def loss(p):
            x = p["words"][batch["tokens"]] + p["positions"][batch["places"]]
            return (x @ p["head"]).astype("float32").var()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda a, g: a - 0.1 * g, params, grads), value

    shape = jax.ShapeDtypeStruct
    params = {"words": shape((512, 32), "float32"), "positions": shape((16, 32), "float32"), "head": shape((32, 8), "float32")}
    batch = {k: shape((8, 16), "int32") for k in ("tokens", "places")}
    problem = planning_problem(soapjax.trace(step, params, batch), soapjax.load_topology("cpu8"))
    strategy = tensor_parallel_strategy(problem, range(problem.space.num_axes))
    owner = {p.path: p.owner for p in problem.graph.parameters}
    words, positions = (next(n for path, n in owner.items() if name in path) for name in ("words", "positions"))
    split = {n: {problem.graph.operators[n].dims[v].size for v in strategy.axes[n] if v >= 0} for n in (words, positions)}
    assert words != positions and split[words] == {512} and 16 not in split[positions]


ODD = [(n, k) for n in PLANNERS if n != "exhaustive" for k in (1, 7)]
SLOW = [odd for odd in ODD if odd[1] == 1 or odd[0] in ("reinforce", "hierarchical")]


@pytest.mark.parametrize("name, devices", family(ODD, slow=SLOW))
def test_every_planner_on_odd_devices(name, devices):
    problem = make(devices, batch=10, space="paper" if name in PLACEMENT_PLANNERS else "soap")
    found = get_planner(name)(jax.random.key(0), problem, Budget(num_proposals=64))
    assert problem.space.is_valid(found.best.strategy) and found.best.is_feasible


def test_memory_limit_is_respected():
    """Where data parallelism does not fit, the search returns something that does, and says so of the baseline."""
    problem = make(8, hidden=4096)
    plain = data_parallel_strategy(problem)[0]
    needed = problem.evaluate([plain])[0].memory_bytes
    device = problem.simulator.tables.topology.device
    small = dataclasses.replace(device, memory_bytes=int(0.6 * needed / device.memory_fraction), memory_margin=0.0)
    topology = dataclasses.replace(problem.simulator.tables.topology, device=small)
    params = {"a": jax.ShapeDtypeStruct((32, 4096), "float32"), "b": jax.ShapeDtypeStruct((4096, 16), "float32")}
    tight = planning_problem(soapjax.trace(trained, params, jax.ShapeDtypeStruct((32, 32), "float32")), topology)
    assert not tight.evaluate([plain])[0].is_feasible
    found = mcmc(jax.random.key(0), tight, Budget(num_proposals=256))
    assert found.best.is_feasible


def test_unknown_planner_lists_the_valid_ones():
    with pytest.raises(SoapjaxError, match="mcmc or data_parallel.*did you mean 'fsdp'"):
        get_planner("fspd")
