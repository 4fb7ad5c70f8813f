"""What the compiled program does not do: lay tensors out anew around collectives, or make whole what is planned in parts."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from planned import Case
from problems import abstract

import soapjax
from soapjax.execute.spmd.planned_evaluator import bind_plan, mesh_of
from soapjax.execute.spmd.resharder import reshard
from soapjax.planning.entry import plan_of_strategy, planning_problem
from soapjax.search.planners import get_planner
from soapjax.search.problem import Budget
from soapjax.strategy.configs import replicated
from soapjax.topology import load_topology

BATCH, WIDTH, WORDS = 16, 24, 56


def sgd(loss):
    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def picked_log_probability(params, batch):
    logits = batch["x"] @ params["head"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["word"][:, None], -1).mean()


@pytest.fixture(scope="module")
def case():
    """Words of a vocabulary predicted: a product, a softmax, and the picking of one word's probability."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"head": jax.random.normal(keys[0], (WIDTH, WORDS))}
    batch = {"x": jax.random.normal(keys[1], (BATCH, WIDTH)), "word": jax.random.randint(keys[2], (BATCH,), 0, WORDS)}
    return Case(sgd(picked_log_probability), (params, batch))


def split(case, sizes):
    """Every axis goes to the dim of one of `sizes`, in operators that have one."""
    strategy = replicated(case.graph, case.space.mesh)
    for n, op in enumerate(case.graph.operators):
        k = next((k for k, d in enumerate(op.dims) if d.size in sizes and d.divisor % 8 == 0), None)
        if k is not None and case.space.allowed[n, :, k + 1].all():
            strategy.axes[n] = k
    assert case.space.is_valid(strategy)
    return strategy


def compiled(case, strategy):
    bound = bind_plan(case.step, case.plan(strategy))
    evaluate = lambda *leaves: bound.evaluator().run(list(leaves))[0]  # noqa: E731
    run = jax.jit(evaluate, in_shardings=bound.in_shardings(), out_shardings=bound.out_shardings())
    return run.lower(*case.leaves).compile().as_text()


def test_a_gradient_is_summed_in_the_order_of_its_parameter(case):
    """`jax.grad` makes a dense layer's gradient as [out, in] and transposes it: that is one with the product, before the sum."""
    strategy = split(case, [BATCH])
    case.check(strategy)
    reduced = " ".join(re.findall(r"= (.*) all-reduce\(", compiled(case, strategy)))
    assert f"f32[{WIDTH},{WORDS}]" in reduced and f"f32[{WORDS},{WIDTH}]" not in reduced


def test_rows_that_are_scattered_into_are_made_in_parts(case):
    """The gradient of picked logits: a device of eight makes its own eighth of the vocabulary only."""
    strategy = split(case, [WORDS])
    assert any("gather" in op.kind for n, op in enumerate(case.graph.operators) if (strategy.axes[n] >= 0).all())
    case.check(strategy)
    text = compiled(case, strategy)
    assert f"[{BATCH},{WORDS // 8}]" in text
    assert f"[{BATCH},{WORDS}]" not in text


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gathering_any_dim_keeps_the_order_in_memory(case, dim):
    """XLA would transpose the whole, twice, to gather another dim than the first."""
    mesh = mesh_of(case.plan(replicated(case.graph, case.space.mesh)))
    spec = tuple(mesh.axis_names if d == dim else () for d in range(3))
    x = np.arange(16 * 8 * 24, dtype=np.float32).reshape(16, 8, 24)
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*(names or None for names in spec))))
    run = jax.jit(lambda x: reshard(x, spec, ((),) * 3, mesh))
    np.testing.assert_array_equal(run(placed), x)
    (gather,) = re.findall(r"= f32\[[\d,]*\]\{([\d,]*)\} all-gather", run.lower(placed).compile().as_text())
    order = [int(d) for d in gather.split(",")]
    assert order == sorted(order, reverse=True)


def lowered(planner, **sizes):
    """A Transformer's step under a planner's strategy on CPUs, as it is given to XLA."""
    step, *arguments = abstract("transformer_lm", batch=8, seq=8, width=16, layers=1, heads=2, vocab=32, **sizes)
    traced = soapjax.trace(step, *arguments)
    problem = planning_problem(traced, load_topology("cpu8"))
    strategy = get_planner(planner)(jax.random.key(0), problem, Budget()).best.strategy
    bound = bind_plan(traced, plan_of_strategy(problem, strategy))
    run = jax.jit(lambda *leaves: bound.evaluator().run(list(leaves))[0], in_shardings=tuple(bound.in_shardings()))
    return run.lower(*jax.tree.leaves(arguments)).as_text()


def test_rematerialisation_gathers_no_parameter_again():
    """Behind the barrier stands the same parameter; CPUs take barriers out before they merge gathers, GPUs do not."""

    def num_gathers(remat):
        text = lowered("fsdp", remat=remat)
        assert ("optimization_barrier" in text) == remat
        return text.count('all_gather"')

    assert num_gathers(True) == num_gathers(False) > 5


def test_both_uses_of_a_tied_weight_are_added_up_before_they_are_summed_over_devices():
    """The embedding's rows are made in bfloat16: the cast belongs to them, so that they stay apart until the head's are added."""
    text = lowered("data_parallel", tie=True, dtype="bfloat16")
    sums = re.findall(r"\}\) : \(tensor<(?:32x16|16x32)x(\w+)>\) -> tensor<(?:32x16|16x32)x\w+>", text)
    assert sums == ["f32"]
