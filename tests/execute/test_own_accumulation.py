"""Gradients that a step adds up itself, of parts of the batch: one sum over the devices, or sums in parts, as the plan says."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import family
from planned import Case

from soapjax.execute.compiled.inspection import inspect
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.strategy.configs import replicated

PARTS, BATCH, WIDTH, HIDDEN = 4, 64, 16, 32


def loss(params, x):
    return ((jnp.tanh(x @ params["w1"] + params["b"]) @ params["w2"]) ** 2).mean()


def add(a, b):
    return jax.tree.map(jnp.add, a, b)


def in_a_scan(params, x):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(lambda total, x: (add(total, jax.grad(loss)(params, x)), None), zeros, x)[0]


def first_part_before_the_loop(params, x):
    def one(i, total):
        return add(total, jax.grad(loss)(params, jax.lax.dynamic_index_in_dim(x, i, keepdims=False)))

    return jax.lax.fori_loop(1, PARTS, one, jax.grad(loss)(params, x[0]))


def one_after_another(params, x):
    return functools.reduce(add, [jax.grad(loss)(params, x[i]) for i in range(PARTS)])


def weighted(params, x):
    """By a number, and by how many samples of the part count."""

    def one(total, x):
        count = (x[:, 0] > 0).sum().astype("float32")
        return jax.tree.map(lambda t, g: t + g * count / 4, total, jax.grad(loss)(params, x)), None

    return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), x)[0]


def as_float32(params, x):
    """Of parameters in float16."""

    def one(total, x):
        half = jax.tree.map(lambda p: p.astype("float16"), params)
        return add(total, jax.tree.map(lambda g: g.astype("float32"), jax.grad(loss)(half, x.astype("float16")))), None

    return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), x)[0]


@functools.cache
def case(gradients):
    def step(params, x):
        total = gradients(params, x.reshape(PARTS, -1, WIDTH))
        return jax.tree.map(lambda p, g: p - 0.1 / PARTS * g, params, total)

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "w1": jax.random.normal(keys[0], (WIDTH, HIDDEN)) / 4, "w2": jax.random.normal(keys[1], (HIDDEN, WIDTH)) / 4,
        "b": jnp.zeros(HIDDEN),
    }  # fmt: skip
    return Case(step, (params, jax.random.normal(keys[2], (BATCH, WIDTH))))


def data_parallel(space):
    """Every part of the batch is split over all devices."""
    strategy = replicated(space.graph, space.mesh)
    for n, op in enumerate(space.graph.operators):
        strategy.axes[n] = next((k for k, d in enumerate(op.dims) if d.kind == "S" and d.divisor % 8 == 0), -1)
    return strategy


def storage_of(space, **wanted):
    return next(k for k, s in enumerate(space.storages) if all(bool(np.any(getattr(s, n))) == w for n, w in wanted.items()))


def planned(made, **storage):
    strategy = data_parallel(made.space)
    strategy.storage[:] = np.where(made.space.owns_parameters, storage_of(made.space, **storage), 0)
    return strategy, made.plan(strategy)


WAYS = [in_a_scan, first_part_before_the_loop, one_after_another, weighted, as_float32]
STORAGES = {
    "whole": {"axes": False}, "kept": {"axes": True, "regathers": False, "scatters": False}, "regathered": {"regathers": True},
    "gradients sharded": {"scatters": True},
}  # fmt: skip
OFTEN = [(in_a_scan, "whole"), (weighted, "kept"), (in_a_scan, "regathered"), (one_after_another, "gradients sharded")]


def every(*storages):
    pairs = [(way, storage) for way in WAYS for storage in storages]
    return pytest.mark.parametrize("gradients, storage", family(pairs, slow=[p for p in pairs if p not in OFTEN]))


@every("whole", "kept")
def test_gradients_are_summed_over_the_devices_once(gradients, storage):
    made = case(gradients)
    strategy, plan = planned(made, **STORAGES[storage])
    whole = sum(x.nbytes for x in jax.tree.leaves(made.args[0]))
    sent = bytes_by_kind(made, plan)
    if storage == "kept":
        assert sent["reduce-scatter"] == pytest.approx(7 / 8 * whole, rel=0.02)
    else:
        assert sent["all-reduce"] == pytest.approx(2 * 7 / 8 * whole, rel=0.02)
    made.check(strategy)


@every("regathered", "gradients sharded")
def test_gradients_are_scattered_part_by_part(gradients, storage):
    """No device then holds a whole sum; of parameters that a loop reads the loop holds one copy for both passes."""
    made = case(gradients)
    strategy, plan = planned(made, **STORAGES[storage])
    kept = planned(made, **STORAGES["kept"])[1]
    whole = sum(x.nbytes for x in jax.tree.leaves(made.args[0]))
    sent = bytes_by_kind(made, plan)
    assert sent["reduce-scatter"] == pytest.approx(PARTS * 7 / 8 * whole, rel=0.02)
    gathered = whole / 2 if gradients is as_float32 else whole  # cast before it is sent
    assert sent["all-gather"] == pytest.approx(7 / 8 * gathered, rel=0.02)
    if gradients is in_a_scan:
        less = kept.prediction.memory_bytes_per_device - plan.prediction.memory_bytes_per_device
        assert whole / 4 < less <= (1 - 1 / 8) * whole
    made.check(strategy)


def bytes_by_kind(made, plan):
    """As compiled, which is as predicted."""
    compiled = inspect(bind_plan(made.step, plan)).bytes_by_collective
    predicted = plan.prediction.bytes_by_collective
    for kind in ("all-reduce", "reduce-scatter", "all-gather"):
        assert predicted[kind] == pytest.approx(compiled.get(kind, 0), rel=0.02, abs=64), kind
    return predicted


def test_what_is_no_sum_of_gradients_is_none():
    """Of a running mean, and of a sum whose norm every trip reads, every trip needs the sum; what is added to state is no sum."""

    def mean(params, x):
        def one(carry, x):
            i, total = carry
            return (i + 1, jax.tree.map(lambda m, g: m + (g - m) / (i + 1), total, jax.grad(loss)(params, x))), None

        return jax.lax.scan(one, (0, jax.tree.map(jnp.zeros_like, params)), x)[0][1]

    def measured(params, x):
        def one(total, x):
            total = add(total, jax.grad(loss)(params, x))
            return total, sum((t**2).sum() for t in jax.tree.leaves(total))

        total, norms = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), x)
        return jax.tree.map(lambda t: t / norms.max(), total)

    def doubled(params, x):
        return jax.tree.map(lambda p, g: g + p, params, jax.grad(loss)(params, x.reshape(-1, WIDTH)))

    def cast_before(params, x):  # the operator that casts owns the parameters
        half = jax.tree.map(lambda p: p.astype("float16"), params)
        return jax.tree.map(lambda g: g.astype("float32"), in_a_scan(half, x.astype("float16")))

    for gradients in (mean, measured, doubled, cast_before):
        made = case(gradients)
        assert not any(chain.follows_storage for chain in made.graph.accumulations)
        made.check(data_parallel(made.space))
