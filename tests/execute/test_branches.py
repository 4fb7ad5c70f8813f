"""Branches of a `cond` run with their operands' splits; what they sum up over these is predicted: gradients of their matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planned import Case, data_parallel, rotated

from soapjax.execute.compiled.inspection import inspect
from soapjax.execute.compiled.traffic import compare_by_kind
from soapjax.execute.spmd.planned_evaluator import bind_plan


def coupled(p, h):
    return jnp.tanh(h @ p["b"]) @ p["d"]


def normalised(p, h):
    z = h @ p["e"]
    return jnp.tanh((z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-5))


def passed_on(p, h):
    return h * p["b"].sum(1)


BRANCHES = {"products": (coupled, lambda p, h: h @ p["e"], "bde"), "statistics": (normalised, passed_on, "be")}


def case_of(kind):
    def step(p, x, flag):
        def loss(p):
            h = jax.lax.cond(flag > 0, one, other, {name: p[name] for name in read}, jnp.tanh(x @ p["a"]))
            return jax.lax.cond(flag > 1, lambda h: (h**2).mean(), lambda h: jnp.abs(h).mean(), h)

        value, grads = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value

    one, other, read = BRANCHES[kind]
    rng = np.random.default_rng(0)
    shapes = {"a": (4, 8)} | {name: {"b": (8, 16), "d": (16, 8), "e": (8, 8)}[name] for name in read}
    p = {name: rng.normal(size=shape).astype(np.float32) / 2 for name, shape in shapes.items()}
    return Case(step, (p, rng.normal(size=(16, 4)).astype(np.float32), np.float32(1)))


@pytest.mark.parametrize("kind", BRANCHES)
def test_branches_are_split_as_their_operands(kind):
    case = case_of(kind)
    for strategy in (data_parallel(case.space), rotated(case.space, 1), rotated(case.space, 2)):
        case.check(strategy)
        plan = case.plan(strategy)
        made = inspect(bind_plan(case.step, plan, devices=jax.devices()[:8]))
        found = compare_by_kind(plan, made.collectives)
        predicted, compiled = (sum(n[which] for n in found.values()) for which in ("predicted", "compiled"))
        assert predicted == pytest.approx(compiled, rel=0.005)
    samples = [dim.name for op in case.graph.operators for dim in op.dims if dim.kind == "S" and dim.size == 16]
    assert len(samples) == case.graph.num_operators  # backward too
    assert not case.plan(data_parallel(case.space)).prediction.bytes_by_collective.get("all-gather")  # nothing is gathered
