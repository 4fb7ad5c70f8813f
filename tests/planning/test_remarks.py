"""What a plan says of the work that it repeats."""

import jax
import jax.numpy as jnp
import pytest

import soapjax

WIDTH = 16


def step(weights, x, y):
    def loss(w):
        return jnp.mean((jnp.tanh(x @ w[0]) @ w[1] - y) ** 2)

    gradients = jax.grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]


def without_a_batch(weights):
    """The data is a constant: nothing that goes in has a batch."""
    x = jnp.sin(jnp.arange(24 * WIDTH, dtype=jnp.float32)).reshape(24, WIDTH)
    return step(weights, x, x)


def weights():
    return [jnp.ones((WIDTH, WIDTH)), jnp.ones((WIDTH, WIDTH))]


def repeated(fn, *args, planner):
    """The plan's share of FLOPs split, and its remarks on the rest."""
    plan = soapjax.plan(fn, *args, topology="cpu8", planner=planner).plan
    return plan, [n for n in plan.provenance.notes if "done alike" in n]


@pytest.mark.parametrize("rows, expected", [(64, None), (12, "split 4 ways"), (7, "no degree divides")])
def test_what_is_repeated_is_named_with_its_cause(rows, expected):
    batch = jnp.ones((rows, WIDTH))
    if rows == 7:  # nor does any other dim divide
        plan, notes = repeated(lambda x: jnp.tanh(x).sum(), jnp.ones((7, 5)), planner="fsdp")
    else:
        plan, notes = repeated(step, weights(), batch, batch, planner="fsdp")
    assert (plan.prediction.split_flops_share >= 0.95) == (expected is None) == (not notes)
    if expected is not None:
        (note,) = notes
        most = max(plan.operators, key=lambda n: plan.operators[n].cost.flops * (1 - plan.operators[n].cost.split_flops_share))
        assert f"alike on several devices: {most} ({expected}" in note


def test_a_step_without_a_batch_says_so_where_only_batches_are_split():
    plan, notes = repeated(without_a_batch, weights(), planner="data_parallel")
    wanted = "whole: none of the dims that may be split, attr0, param0, param1_in, comes from the batch"
    assert plan.prediction.split_flops_share == 0 and wanted in notes[0]


def test_what_has_no_dims_says_so():
    _, notes = repeated(lambda a, b: a - 0.1 * jnp.tanh(a * b), jnp.float32(1), jnp.float32(2), planner="fsdp")
    assert "100 % of the FLOPs" in notes[0] and "(no dim to split)" in notes[0]


def test_a_plan_of_several_programs_says_what_starting_them_takes():
    """Where that is no small part of the step; nothing without pins."""
    batch = jnp.ones((64, WIDTH))
    asked = {"topology": "cpu8", "planner": "model_parallel", "space": "paper"}
    plan = soapjax.plan(step, weights(), batch, batch, **asked).plan
    (note,) = [n for n in plan.provenance.notes if "programs a step" in n]
    assert plan.pinned and f"beside {plan.prediction.step_time_s * 1e3:.3g} ms of a step" in note
    long = jax.ShapeDtypeStruct((1 << 24, WIDTH), "float32")
    notes = [*soapjax.plan(step, weights(), long, long, **asked).plan.provenance.notes]
    notes += soapjax.plan(step, weights(), batch, batch, topology="cpu8", planner="fsdp").plan.provenance.notes
    assert not [n for n in notes if "programs a step" in n]
