"""State that no tensor of the graph and no parameter has: every device keeps it whole, and predictions say so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import soapjax
from soapjax.execute.compiled.inspection import inspect
from soapjax.execute.compiled.stream_inspection import inspect_stream
from soapjax.execute.compiled.traffic import compare_by_kind
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.execute.streams.stage_programs import step_of_plan
from soapjax.graph.passes.build import build_graph

SHAPES = {"first": (16, 32), "last": (32, 8), "unread": (64, 64)}
UNREAD_BYTES = 2 * 64 * 64 * 4


def train_step(state, batch):
    """Momentum by hand, scaled by rows of squares as in Adafactor; and a parameter that the loss does not read, with its own."""

    def loss(params):
        return ((jnp.tanh(batch @ params["first"]) @ params["last"]) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(state["params"])
    rows = jax.tree.map(lambda r, g: 0.9 * r + (g**2).mean(1), state["rows"], gradients)
    momentum = jax.tree.map(lambda m, g, r: 0.9 * m + g / jnp.sqrt(1 + r)[:, None], state["momentum"], gradients, rows)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum, "rows": rows, "count": state["count"] + 1}, value


def arguments():
    params = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    rows = {name: jnp.ones(shape[0]) for name, shape in SHAPES.items()}
    state = {"params": params, "momentum": params, "rows": rows, "count": jnp.zeros((), int)}
    return state, jnp.ones((8, 16))


@pytest.mark.parametrize("planner", ["data_parallel", "fsdp"])
def test_what_is_stored_is_what_the_program_takes(planner):
    found = soapjax.plan(train_step, *arguments(), topology="cpu8", planner=planner)
    program = bind_plan(found.step, found.plan, devices=jax.devices()[:8])
    of_state = [
        (s.shard_shape(a.shape), a.dtype.itemsize)
        for i, (a, s) in enumerate(zip(found.step.in_avals, program.in_shardings(), strict=True))
        if i in found.step.state_pairs and a.size > 1
    ]
    kept = sum(np.prod(shape) * itemsize for shape, itemsize in of_state)
    assert found.plan.prediction.memory_parts_bytes["parameters_and_state"] == kept


def test_it_is_with_the_parameter_of_whose_gradient_it_is_made():
    graph, _ = build_graph(soapjax.trace(train_step, *arguments()))
    owner = {p.path.split(".")[-1]: p.owner for p in graph.parameters}
    found = {graph.in_paths[x.leaf]: x.operator for x in graph.unplaced}
    assert found.items() >= {f"state.rows.{name}": n for name, n in owner.items()}.items() and owner["last"] > owner["first"]


def test_a_pipeline_keeps_what_is_unread_in_its_first_stage():
    made = train_step, *arguments()
    plan, _ = soapjax.plan_pipeline(*made, pipeline="1f1b", topology="cpu8", stages=2, microbatches=2, proposals=1)
    compiled = inspect_stream(step_of_plan(*made, plan=plan).streamed).memory_bytes
    for i, stage in enumerate(plan.pipeline.stages):
        figures = plan.prediction.memory_parts_bytes[f"stage {i}"], max(compiled[d] for d in stage.devices)
        assert min(figures) > UNREAD_BYTES if i == 0 else max(figures) < UNREAD_BYTES


def mini_step(state, batch):
    """Second moments of one mean per row, kept in the parameter's shape, as in Adam-mini; gradients clipped by their norm."""

    def loss(params):
        return ((jnp.tanh(batch @ params["first"]) @ params["last"]) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(state["params"])
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradients)))
    gradients = jax.tree.map(lambda g: g / jnp.maximum(norm, 1), gradients)
    squares = jax.tree.map(lambda g: (g * g).mean(1, keepdims=True).repeat(g.shape[1], 1), gradients)
    second = jax.tree.map(lambda v, s: 0.9 * v + 0.1 * s, state["second"], squares)
    params = jax.tree.map(lambda p, g, v: p - 0.1 * g / jnp.sqrt(1 + v), state["params"], gradients, second)
    return {"params": params, "second": second}, value


def mini_arguments():
    params = {name: jnp.ones(SHAPES[name]) for name in ("first", "last")}
    return {"params": params, "second": params}, jnp.ones((8, 16))


def test_moments_of_means_in_the_shape_of_a_parameter_are_stored_as_it_is():
    graph, _ = build_graph(soapjax.trace(mini_step, *mini_arguments()))
    paths = {graph.in_paths[p.leaf]: [graph.in_paths[s] for s in p.state_leaves] for p in graph.parameters}
    assert paths == {f"state.params.{name}": [f"state.second.{name}"] for name in ("first", "last")} and not graph.unplaced


@pytest.mark.slow
def test_what_the_program_sends_for_such_moments_is_predicted():
    found = soapjax.plan(mini_step, *mini_arguments(), topology="cpu8", planner="fsdp")
    compiled = inspect(bind_plan(found.step, found.plan, devices=jax.devices()[:8]))
    figures = compare_by_kind(found.plan, compiled.collectives).values()
    predicted, sent = (sum(f[kind] for f in figures) for kind in ("predicted", "compiled"))
    assert abs(predicted - sent) < 0.02 * sent
