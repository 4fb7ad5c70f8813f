"""Parameters in float32, products in bfloat16: what a task casts first is cast where it is kept, and sent as that."""

import functools
import re

import jax
import numpy as np
import pytest
from problems import casting_arguments, casting_step

import soapjax
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.planning.entry import plan_of_strategy, planning_problem
from soapjax.search.planners import get_planner
from soapjax.search.problem import Budget


@functools.cache
def planned(planner, topology="cpu8"):
    traced = soapjax.trace(casting_step, *casting_arguments())
    problem = planning_problem(traced, soapjax.load_topology(topology))
    return traced, problem, plan_of_strategy(problem, get_planner(planner)(jax.random.key(0), problem, Budget()).best.strategy)


def test_tasks_know_what_they_cast_first():
    graph = planned("fsdp")[1].graph
    paths = {p.tensor: p.path.rpartition(".")[2] for p in graph.parameters}
    cast = {(paths[t], dtype) for task in graph.tasks for t, dtype in task.casts if t in paths}
    assert {("w1", "bfloat16"), ("w2", "bfloat16")} <= cast
    for task in graph.tasks:
        for t, dtype in task.casts:
            assert np.dtype(dtype).itemsize < graph.tensors[t].itemsize and t in {a.tensor for a in task.reads}
    assert not any(task.casts for task in planned_in_float32().tasks)


def planned_in_float32():
    def plain(params, batch):
        grads = jax.grad(lambda p: ((batch["x"] @ p["w1"] @ p["w2"] @ p["w3"]) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return planning_problem(soapjax.trace(plain, *casting_arguments()), soapjax.load_topology("cpu8")).graph


def jitted(planner):
    traced, _, plan = planned(planner)
    program = bind_plan(traced, plan)
    return jax.jit(lambda *x: program.evaluator().run(list(x))[0], in_shardings=program.in_shardings())


@pytest.mark.parametrize("planner", ["fsdp", "tensor_parallel"])
def test_results_are_those_of_one_device(planner):
    found = jitted(planner)(*jax.tree.leaves(casting_arguments()))
    for a, b in zip(found, jax.tree.leaves(jax.jit(casting_step)(*casting_arguments())), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-3)  # products of bfloat16 are added up in another order


def test_what_is_gathered_is_narrow():
    """In the program before XLA: it also moves such casts by itself, but not all, and not on every backend."""
    lowered = jitted("fsdp").lower(*jax.tree.leaves(casting_arguments()))
    gathered = re.findall(r'"stablehlo.all_gather".*?-> tensor<[\dx]*x(\w+)>', lowered.as_text(), re.S)
    assert gathered.count("bf16") >= 2
    assert gathered.count("f32") <= 2, "w3, which is also read as it is"


@pytest.mark.parametrize(("topology", "times"), [("a100x8", 0.5), ("cpu8", 1.0)])  # CPUs send bfloat16 as float32
def test_costs_count_what_is_sent(topology, times):
    tables = planned("fsdp", topology)[1].simulator.tables
    graph, some = tables.graph, False
    for tensor, task, size, trips in zip(tables.edge_tensor, tables.edge_task, tables.edge_bytes, tables.edge_trips, strict=True):
        if task < len(graph.tasks) and tensor in dict(graph.tasks[task].casts):
            assert size == times * graph.tensors[tensor].size_bytes and trips == 1
            some = True
    assert some
