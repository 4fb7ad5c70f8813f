"""Data that only begin a loop lie as the loop carries them on, and are the batch as other data are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from planned import Case, data_parallel, rotated

from soapjax import SoapjaxError, soap_shard
from soapjax.execute.compiled.inspection import inspect
from soapjax.execute.compiled.traffic import compare_by_kind
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.graph.microbatch import data_sizes, micro_batch
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace


def grown(w, x, target):
    """A loss of states [batch, width] that grow in a loop towards a target [3, width] that all share."""
    grow = lambda state, _: (state + 0.1 * jnp.tanh(state @ w), None)  # noqa: E731
    state, _ = lax.scan(grow, x, None, length=3)
    return ((state[:, None] - target) ** 2).mean()


def step(w, x, target):
    loss, gradient = jax.value_and_grad(grown)(w, x, target)
    return w - 0.1 * gradient, loss


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in [(4, 4), (16, 4), (3, 4)]]


def test_they_are_split_as_the_loop_is(arrays):
    case = Case(step, tuple(arrays))
    strategy = data_parallel(case.space)
    case.check(strategy)
    case.check(rotated(case.space, 1))
    plan = case.plan(strategy)
    assert plan.arguments["x"].split(", ")[0] == "d0+d1+d2"
    found = compare_by_kind(plan, inspect(bind_plan(case.step, plan, devices=jax.devices()[:8])).collectives)
    assert found["all-reduce"]["compiled"] > 0
    assert {k: n["compiled"] for k, n in found.items()} == {k: int(n["predicted"]) for k, n in found.items()}


def test_they_are_the_batch_that_micro_batches_cut(arrays):
    small, whole = (build_graph(trace(step, arrays[0], arrays[1][:n], arrays[2]))[0] for n in (4, 16))
    assert data_sizes(whole) == {i: 16 for i, t in enumerate(whole.tensors) if t.input_leaf == whole.in_paths.index("x")}
    assert [t.shape for t in micro_batch(whole, 4).tensors] == [t.shape for t in small.tensors]
    with pytest.raises(SoapjaxError, match=r"a divisor of the batch \(16\)"):
        soap_shard(step, planner="data_parallel", microbatches=5)(*arrays)
    cut = soap_shard(step, planner="data_parallel", microbatches=4)(*arrays)
    for found, expected in zip(cut, jax.jit(step)(*arrays), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
