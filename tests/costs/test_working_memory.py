"""What GPU compilers keep besides what the plan names: which tensors, and how much, against counts by hand."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import soapjax
from soapjax.costs.compilers.compiler_model import Reshards, none
from soapjax.costs.compilers.gpu import GPU
from soapjax.costs.compilers.gpu_order import late_products
from soapjax.costs.compilers.of_backend import compiler_of
from soapjax.costs.memory.memory_order import MemoryOrder
from soapjax.costs.memory.working_sets import working_memory
from soapjax.graph.passes.build import build_graph
from soapjax.planning.entry import planning_problem
from soapjax.search.planners import get_planner
from soapjax.search.problem import Budget
from soapjax.steps.sourced_models import abstract_model
from soapjax.strategy.plan import ModelSource

LIMIT = 1000.0


@functools.cache
def graph_of(model: str, **sizes):
    found = abstract_model(ModelSource(path=f"models.{model}", settings=sizes))
    return build_graph(soapjax.trace(found.step, *found.arguments))[0]


def lenet():
    return graph_of("lenet", batch=4)


def alexnet():
    return graph_of("alexnet", batch=4, image=67, width=0.0625, classes=8)


@pytest.mark.parametrize("platform", ["cuda", "rocm", "cpu", "tpu"])
def test_only_gpus_need_it(platform):
    topology = soapjax.load_topology("a100x8")
    compiler = compiler_of(dataclasses.replace(topology, device=dataclasses.replace(topology.device, platform=platform)))
    is_gpu = platform in ("cuda", "rocm")
    compiler = compiler._replace(merged_bytes=LIMIT * bool(compiler.merged_bytes))
    found = working_memory(alexnet(), compiler, 2)
    assert compiler.sums_in_place == found.waits.any() == found.more.any() == is_gpu
    assert found.most_waiting.tolist() == ([2 * LIMIT, 3 * LIMIT] if is_gpu else [0, 0])
    assert compiler.read_on == ("" if compiler == none() else "0.10.2") and (compiler == none()) == (platform == "tpu")


def test_every_gradient_waits_for_its_update_alone():
    graph = lenet()
    found = working_memory(graph, GPU, 2)
    assert {i for i, on in enumerate(found.waits) if on} == {p.gradient for p in graph.parameters}


def test_gradients_that_a_loop_makes_are_read_after_it():
    graph = graph_of("transformer_lm", batch=4, seq=8, width=16, layers=2, heads=2, vocab=32, scan=True)
    found = working_memory(graph, GPU, 2)
    in_loop = {a.tensor for t in graph.tasks if t.trip_count > 1 for a in t.writes}
    gradients = {p.gradient for p in graph.parameters}
    assert gradients & in_loop and gradients - in_loop
    assert {i for i, on in enumerate(found.waits) if on} == gradients - in_loop


def test_images_exist_in_two_orders_of_their_dims():
    graph = alexnet()
    found = working_memory(graph, GPU, 2)
    twice = [i for i, n in enumerate(found.more) if n]
    assert [graph.in_paths[graph.tensors[i].input_leaf].rsplit(".")[-1] for i in twice] == ["image"]
    assert not working_memory(lenet(), GPU, 2).more.any()  # one channel


@pytest.mark.parametrize(("topology", "times"), [("a100x8", 0.5), ("cpu8", 1)])  # CPUs send bfloat16 as float32
def test_gradients_are_added_up_before_they_are_cast(topology, times):
    """Parameters in float32, products in bfloat16: the sums over devices are of bfloat16."""
    topology = soapjax.load_topology(topology)

    def summed_bytes(dtype):
        found = abstract_model(ModelSource(path="models.mlp", settings=dict(dtype=dtype)))
        problem = planning_problem(soapjax.trace(found.step, *found.arguments), topology)
        strategy = get_planner("data_parallel")(jax.random.key(0), problem, Budget()).best.strategy
        return problem.simulator.prediction(strategy).bytes_by_collective["all-reduce"]

    scalars = 1000  # loss and metrics, in float32 either way
    assert summed_bytes("bfloat16") == pytest.approx(times * summed_bytes("float32"), abs=scalars)


def test_a_block_s_input_is_kept_for_every_layer_of_a_loop():
    """With rematerialisation nothing else is: the loop's carried value, stacked, though it is read as the body's argument."""
    layers, sizes = 6, dict(batch=4, seq=8, width=16, heads=2, vocab=32, scan=True, remat=True)
    graph = graph_of("transformer_lm", layers=layers, **sizes)
    kept = [t for t in graph.tensors if t.copies > 1 and t.input_leaf < 0 and t.shape == (4, 8, 16)]
    assert [t.copies for t in kept] == [layers]
    passed_on = {a.tensor for k in graph.tasks for a in k.writes if k.phase == 0 and k.trip_count == layers}
    assert [t.copies for i, t in enumerate(graph.tensors) if i in passed_on and t.copies > 1] == [layers]


def test_products_of_one_sum_are_made_right_before_it():
    graph = graph_of("rnnlm", batch=8, seq=3, hidden=32, layers=2, vocab=64)
    maker = {a.tensor: k for k, task in enumerate(graph.tasks) for a in task.writes}
    birth = np.array([maker.get(i, 0) for i in range(len(graph.tensors))])
    readers = {i: [k for k, task in enumerate(graph.tasks) for a in task.reads if a.tensor == i] for i in range(len(birth))}
    death = np.array([max(readers[i], default=birth[i]) for i in range(len(birth))])
    reshards = Reshards(*(np.array(x) for x in zip(*[(i, k) for i, ks in readers.items() for k in ks], strict=True)))
    order = MemoryOrder(birth, death, reshards.read_at, reshards.read_at, death)
    found = late_products(graph, order, reshards)
    since, until = found.since, found.until
    late = {i for chain in graph.accumulations for i in chain.summands if graph.tasks[maker[i]].is_heavy}
    assert {k for k, at in zip(reshards.read_at, found.read_at, strict=True) if at != k} <= {maker[i] for i in late}
    assert len(late) > 3 and (since >= birth).all() and (until >= death).all()
    assert {i for i in range(len(birth)) if since[i] != birth[i]} <= late
    sums = {death[i] for i in late}
    for i in late:
        assert since[i] in {birth[i], *sums} and since[i] <= max(birth[i], death[i])
        assert all(until[a.tensor] >= since[i] for a in graph.tasks[maker[i]].reads)

    def most_alive(start):
        return max(sum(start[i] <= k <= death[i] for i in late) for k in range(len(graph.tasks)))

    assert most_alive(since) < most_alive(birth)  # fewer at once than in program order


def test_what_is_bfloat16_between_light_equations_is_kept_as_float32():
    graph = graph_of("bert", batch=4, seq=8, width=16, layers=1, heads=2, vocab=32, dtype="bfloat16")
    more = working_memory(graph, GPU, 2).more
    wide = {i for i, n in enumerate(more) if n}
    made = {a.tensor: task for task in graph.tasks for a in task.writes}
    assert wide and all(graph.tensors[i].dtype == "bfloat16" and not graph.tensors[i].output_leaves for i in wide)
    for task in graph.tasks:
        assert all(a.operand < 0 and task.parameter < 0 for a in task.reads if a.tensor in wide)
    products = {a.tensor for t in graph.tasks if t.is_heavy for a in t.reads if a.operand >= 0}
    assert not wide & products and wide <= made.keys()
    assert not working_memory(graph_of("bert", batch=4, seq=8, width=16, layers=1, heads=2, vocab=32), GPU, 2).more.any()
