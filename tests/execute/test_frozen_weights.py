"""Weights that adapters are trained beside are stored as parameters are, and split as by Megatron; they come back as they were."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import sampled

import soapjax
from soapjax.execute.compiled.inspection import inspect
from soapjax.execute.compiled.proof import verify
from soapjax.execute.compiled.traffic import compare_by_kind
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.graph.passes.build import build_graph

LAYERS, WIDTH, RANK, BATCH = 2, 16, 2, 16
OPTIMIZER = optax.adam(1e-2)
TRAINED = optax.multi_transform({"adapters": OPTIMIZER, "base": optax.set_to_zero()}, {"adapters": "adapters", "base": "base"})


def loss_of(adapters, base, batch):
    x = batch["x"]
    for a, w in zip(adapters, base, strict=True):
        x = x + jnp.tanh(x @ w["up"] + x @ a["down"] @ a["up"]) @ w["down"]
    return ((x - batch["y"]) ** 2).mean()


def updated(optimizer, state, value_and_gradient):
    value, gradient = value_and_gradient
    updates, inner = optimizer.update(gradient, state["optimizer"], state["params"])
    return {**state, "params": optax.apply_updates(state["params"], updates), "optimizer": inner}, value


def returned(state, batch):
    return updated(OPTIMIZER, state, jax.value_and_grad(loss_of)(state["params"], state["base"], batch))


def given(state, base, batch):
    return updated(OPTIMIZER, state, jax.value_and_grad(loss_of)(state["params"], base, batch))


def updated_by_zeros(state, batch):
    return updated(TRAINED, state, jax.value_and_grad(lambda p: loss_of(p["adapters"], p["base"], batch))(state["params"]))


def learned_by_differences(state, batch):
    """Of a target network, which takes over the parameters now and then."""

    def loss(params):
        value, target = (h[:, 0] for h in (network(params, batch["x"]), network(state["base"], batch["y"])))
        return ((value - jax.lax.stop_gradient(1 + target)) ** 2).mean()

    def network(params, x):
        for w in params:
            x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        return x

    new, value = updated(OPTIMIZER, state, jax.value_and_grad(loss)(state["params"]))
    return {**new, "base": optax.periodic_update(new["params"], state["base"], state["optimizer"][0].count, 2)}, value


def arguments(step):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    base = [{"up": normal(WIDTH, 4 * WIDTH), "down": normal(4 * WIDTH, WIDTH)} for _ in range(LAYERS)]
    params = [{"down": normal(WIDTH, RANK), "up": normal(RANK, 4 * WIDTH)} for _ in range(LAYERS)]
    batch = {"x": normal(BATCH, WIDTH), "y": normal(BATCH, WIDTH)}
    if step is learned_by_differences:
        return {"params": base, "base": jax.tree.map(lambda w: w / 2, base), "optimizer": OPTIMIZER.init(base)}, batch
    if step is updated_by_zeros:
        params = {"adapters": params, "base": base}
        return {"params": params, "optimizer": TRAINED.init(params)}, batch
    state = {"params": params, "optimizer": OPTIMIZER.init(params)}
    return (state, base, batch) if step is given else (state | {"base": base}, batch)


STEPS = [returned, updated_by_zeros, given, learned_by_differences]
CASES = sampled([(step, planner) for planner in ("fsdp", "tensor_parallel") for step in STEPS], 3)


def is_base(path):
    return "base" in path


@pytest.mark.parametrize("step, planner", CASES)
def test_they_are_stored_and_split_as_parameters(step, planner):
    args = arguments(step)
    found = soapjax.plan(step, *args, topology="cpu8", planner=planner)
    program = bind_plan(found.step, found.plan, devices=jax.devices()[:8])
    assert verify(program, jax.tree.leaves(args)).is_proven
    by_kind = compare_by_kind(found.plan, inspect(program).collectives)
    assert all(kind["predicted"] == kind["compiled"] for kind in by_kind.values()), by_kind
    base = {path: spec for path, spec in found.plan.arguments.items() if is_base(path)}
    assert len(base) == 2 * LAYERS and all("d" in spec for spec in base.values()), base


@pytest.mark.parametrize("how", sampled([{"pipeline": "1f1b", "stages": 2}, {"planner": "fsdp"}], 2), ids=str)
@pytest.mark.parametrize("step", sampled(STEPS[1:], 2))
def test_with_micro_batches_too(step, how):
    args = arguments(step)
    want, value = jax.jit(step)(*args)
    planned = soapjax.soap_shard(step, topology="cpu8", microbatches=2, proposals=4, check="none", donate=False, **how)
    got, found = planned(*args)
    np.testing.assert_allclose(found, value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def test_a_target_network_has_no_gradient_and_no_moments_of_its_own():
    step = learned_by_differences
    found = soapjax.trace(step, *arguments(step))
    graph, _ = build_graph(found)
    assert [p.path.split(".")[1] for p in graph.trained] == ["params"] * 2 * LAYERS
    assert [p.path.split(".")[1] for p in graph.parameters[2 * LAYERS :]] == ["base"] * 2 * LAYERS
    assert all(len(p.state_leaves) == 2 for p in graph.trained) and not graph.unplaced
    assert "cond" not in {eqn.name for eqn in found.program.leaves}  # one for all would read all of both networks whole


def test_which_are_known_as_such():
    """Not what the step changes, nor random keys, nor what only updates read."""

    def step(state, table, batch):
        def loss(w):
            mask = jax.random.bernoulli(jax.random.wrap_key_data(state["key"]), 0.5, (8,))
            h = (batch @ w) * mask * state["scale"] + state["mean"]
            return ((h @ table.astype(jnp.float32)) ** 2).mean(), h.mean(0)

        (value, mean), gradient = jax.value_and_grad(loss, has_aux=True)(state["w"])
        return {**state, "w": state["w"] - state["rates"] * gradient, "mean": mean}, value

    state = {"w": jnp.ones((4, 8)), "scale": jnp.ones(8), "mean": jnp.zeros(8), "rates": jnp.ones((4, 8))}
    state["key"] = jax.random.key_data(jax.random.key(0))
    graph, _ = build_graph(soapjax.trace(step, state, jnp.ones((8, 3), jnp.int8), jnp.ones((16, 4))))
    assert [p.path for p in graph.trained] == ["state.w"]
    assert [p.path for p in graph.parameters[1:]] == ["state.scale", "table"]
