"""Weights of no inputs, as of a state-space model that nothing controls: no sum over the batch is made for their gradient."""

import jax
import jax.numpy as jnp
import numpy as np
from planned import Case, data_parallel, rotated

from soapjax.execute.compiled.inspection import inspect
from soapjax.execute.compiled.traffic import compare_by_kind
from soapjax.execute.spmd.planned_evaluator import bind_plan


def step(p, x):
    def loss(p):
        def walk(h, seen):
            h = jnp.tanh(h @ p["w"] + seen + p["control"] @ jnp.zeros(0, jnp.float32))
            return h, (h**2).mean()

        return jax.lax.scan(walk, jnp.zeros((16, 4), jnp.float32), x)[1].mean() + p["control"][0] @ p["control"][1]

    value, grads = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value


def test_nothing_is_summed_up_for_them():
    rng = np.random.default_rng(0)
    p = {"w": rng.normal(size=(4, 4)).astype(np.float32), "control": np.zeros((4, 0), np.float32)}
    case = Case(step, (p, rng.normal(size=(3, 16, 4)).astype(np.float32)))
    for strategy in (data_parallel(case.space), rotated(case.space, 1)):
        case.check(strategy)
        plan = case.plan(strategy)
        found = compare_by_kind(plan, inspect(bind_plan(case.step, plan, devices=jax.devices()[:8])).collectives)
        assert {k: n["compiled"] for k, n in found.items()} == {k: int(n["predicted"]) for k, n in found.items()}
