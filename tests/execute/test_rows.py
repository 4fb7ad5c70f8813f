"""Rows that an FFT or `top_k` treats by themselves stay where they are: nothing is gathered that the plan does not gather."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from planned import Case, data_parallel, rotated

from soapjax.execute.compiled.inspection import inspect
from soapjax.execute.compiled.traffic import compare_by_kind
from soapjax.execute.spmd.planned_evaluator import bind_plan

MAKES = {
    "a filter": lambda h, w: jnp.fft.irfft(jnp.fft.rfft(h, axis=1) * jnp.fft.rfft(w, axis=0)[:, 0, None], axis=1),
    "a spectrum": lambda h, w: jnp.abs(jnp.fft.fft(h.mT)) + 1,
    "the largest": lambda h, w: lax.top_k(h, 2)[0],
    "their places": lambda h, w: jnp.take_along_axis(h, lax.top_k(h, 2)[1], -1) * jnp.arange(1.0, 3.0),
    "the largest in a loop": lambda h, w: lax.scan(lambda c, x: (c + lax.top_k(x, 2)[0], None), h[:, 0, :2], h.swapaxes(0, 1))[0],
}


@pytest.mark.parametrize("name", MAKES)
def test_rows_stay_where_they_are(name):
    def step(w, x):
        def loss(w):
            return (MAKES[name](jnp.tanh(x @ w), w) ** 2).mean()

        return w - 0.1 * jax.grad(loss)(w)

    w, x = (jax.random.normal(jax.random.key(k), s) for k, s in enumerate([(6, 4), (16, 6, 6)]))
    case = Case(step, (w, x))
    strategy = data_parallel(case.space)
    case.check(strategy)
    case.check(rotated(case.space, 1))
    plan = case.plan(strategy)
    found = compare_by_kind(plan, inspect(bind_plan(case.step, plan, devices=jax.devices()[:8])).collectives)
    assert found["all-reduce"]["compiled"] > 0
    assert {k: n["compiled"] for k, n in found.items()} == {k: int(n["predicted"]) for k, n in found.items()}
