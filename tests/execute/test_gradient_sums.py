"""Gradients of parameters that are used more than once: one sum over the devices, in the plan and in the program."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from planned import Case, data_parallel, rotated

import soapjax
from soapjax import soap_shard
from soapjax.execute.compiled.collectives import collectives_of
from soapjax.execute.compiled.stream_inspection import inspect_stream
from soapjax.execute.spmd.partial import Partial, elementwise, resolved, split_off
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.planning import choosing
from soapjax.planning.pipelining.given_pipeline import planned_pipeline
from soapjax.planning.request import PlanRequest

STEPS, WIDTH, BATCH, WORDS = 5, 16, 32, 24


def shared_weights(is_loop):
    """A recurrent step whose weight and bias are used at every time, and whose table embeds and predicts."""

    def loss(params, tokens):
        x = params["table"][tokens]  # [BATCH, STEPS, WIDTH]

        def cell(h, xt):
            return jnp.tanh(xt + h @ params["w"] + params["b"]), None

        h = jnp.zeros((len(tokens), WIDTH))
        if is_loop:
            h, _ = jax.lax.scan(cell, h, x.swapaxes(0, 1))
        else:
            for t in range(STEPS):
                h, _ = cell(h, x[:, t])
        return -jax.nn.log_softmax(h @ params["table"].T)[:, 0].mean()

    def step(params, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "w": jax.random.normal(keys[0], (WIDTH, WIDTH)) / 4, "b": jax.random.normal(keys[1], (WIDTH,)),
        "table": jax.random.normal(keys[2], (WORDS, WIDTH)),
    }  # fmt: skip
    return step, (params, jax.random.randint(keys[3], (BATCH, STEPS), 0, WORDS))


@functools.cache
def case(is_loop):
    return Case(*shared_weights(is_loop))


@pytest.mark.parametrize("is_loop", [False, True])
def test_every_use_is_a_summand(is_loop):
    graph = case(is_loop).graph
    found = {graph.parameters[a.parameter].path.rpartition(".")[2]: a for a in graph.accumulations}
    # The first step has no gradient of the recurrent weight: it starts from zeros, which the loop does not know.
    uses = {"w": 1, "b": 1, "table": 2} if is_loop else {"w": STEPS, "b": STEPS, "table": 2}
    short = {name: next(a for path, a in found.items() if name in path) for name in uses}
    assert {name: len(a.summands) for name, a in short.items()} == uses
    assert {name: a.is_carried for name, a in short.items()} == {"w": is_loop, "b": is_loop, "table": False}
    if not is_loop:
        assert all(len(a.running) == len(a.summands) - 2 for a in short.values())


@pytest.mark.parametrize("is_loop", [False, True])
def test_summed_once_as_predicted(is_loop):
    """Data parallelism sends every gradient once, however often its parameter is used: the sizes of the parameters."""
    made = case(is_loop)
    plan = made.plan(data_parallel(made.space))
    found = sent_bytes(bind_plan(made.step, plan), made.leaves)
    assert set(found) == {"all-reduce"}
    (sent,) = found.values()
    whole = sum(x.nbytes for x in jax.tree.leaves(made.args[0]))
    assert sent == pytest.approx(2 * 7 / 8 * whole, rel=0.01)  # and the loss
    assert plan.prediction.bytes_by_collective["all-reduce"] == pytest.approx(sent, rel=0.01)


def sent_bytes(bound, leaves):
    """By kind, per device and step, as compiled."""
    run = jax.jit(lambda *a: bound.evaluator().run(list(a))[0], in_shardings=bound.in_shardings())
    found = {}
    for c in collectives_of(run.lower(*leaves).compile().as_text(), 8):
        found[c.kind] = found.get(c.kind, 0) + c.step_bytes
    return found


@pytest.mark.parametrize("is_loop", [False, True])
def test_stored_in_parts_it_is_scattered_once(is_loop):
    """Fully sharded: gathered for the forward and backward pass together, and its gradient scattered after the last use."""
    made = case(is_loop)
    found = soapjax.plan(made.fn, *made.args, topology="cpu8", planner="fsdp")
    sent = sent_bytes(bind_plan(found.step, found.plan), made.leaves)
    whole = sum(x.nbytes for x in jax.tree.leaves(made.args[0]))
    assert sent["reduce-scatter"] == pytest.approx(7 / 8 * whole, rel=0.01)
    predicted = found.plan.prediction.bytes_by_collective
    assert {k: n for k, n in predicted.items() if n} == {k: pytest.approx(n, rel=0.01) for k, n in sent.items() if n}


def cast_weights():
    """Weights in float32, their products and gradients in float16, which are cast to float32 for the update."""

    def step(params, x):
        def loss(p):
            w, v = (a.astype("float16") for a in p)
            return (jnp.tanh(x.astype("float16") @ w) @ v).astype("float32").mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda key, *shape: jax.random.normal(key, shape) / 4  # noqa: E731
    return step, ([draw(keys[0], WIDTH, 24), draw(keys[1], 24, WIDTH)], draw(keys[2], 4 * BATCH, WIDTH))


@pytest.mark.parametrize("make", [lambda: shared_weights(is_loop=True), cast_weights], ids=["shared", "cast"])
def test_micro_batches_sum_over_the_devices_once(make):
    """With the update, as predicted: of a weight that a loop uses, and of a table that is used twice; as what they are cast to."""
    fn, args = make()
    plan = choosing.as_asked(PlanRequest(topology="cpu8", planner="fsdp", microbatches=4), fn, *args).plan
    made = planned_pipeline(fn, *args, plan=plan, donate=False).streamed
    parts = {p.name: {k: n for k, n in p.bytes_by_collective.items() if n} for p in inspect_stream(made).parts}
    whole = sum(x.nbytes for x in jax.tree.leaves(args[0]))
    assert parts["update 0"] == {"reduce-scatter": 7 / 8 * whole} and not parts["backward 0"].get("reduce-scatter")
    for kind in ("all-reduce", "reduce-scatter"):
        assert plan.prediction.bytes_by_collective[kind] == sum(sent.get(kind, 0) for sent in parts.values())
    rounding = 1e-3 if make is cast_weights else 1e-4
    for found, wanted in zip(jax.tree.leaves(soap_shard(fn, plan=plan)(*args)), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=rounding, atol=rounding / 100)


def test_what_is_broadcast_along_the_batch_is_scattered_as_it_is_summed():
    """The derivative of `x @ w + b` sums over the batch, and then once more over a dim of one element (jax 0.10)."""

    def step(params, x):
        def loss(p):
            return (jnp.tanh(x @ p["w"] + p["b"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {"w": jnp.ones((8, WIDTH)), "b": jnp.ones(WIDTH)}
    found = soapjax.plan(step, params, jnp.ones((BATCH, 8)), topology="cpu8", planner="fsdp")
    sent = sent_bytes(bind_plan(found.step, found.plan), [*jax.tree.leaves(params), jnp.ones((BATCH, 8))])
    whole = sum(x.nbytes for x in jax.tree.leaves(params))
    assert sent["all-gather"] == sent["reduce-scatter"] == 7 / 8 * whole
    assert {k: n for k, n in found.plan.prediction.bytes_by_collective.items() if n} == sent


def test_what_a_loop_stacks_is_resharded_whole():
    """A reader after the loop that is split in another way needs the values of all trips."""

    def step(w, x):
        def loss(w):
            _, h = jax.lax.scan(lambda c, x: (c, jnp.tanh(x @ w)), None, x)
            return (jnp.exp(h) * jnp.arange(WIDTH)).mean()

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    rng = np.random.default_rng(0)
    made = Case(step, (rng.standard_normal((WIDTH, WIDTH)).astype("f"), rng.standard_normal((STEPS, BATCH, WIDTH)).astype("f")))
    strategy = data_parallel(made.space)
    whole = [n for n, op in enumerate(made.graph.operators) if not any(made.graph.tasks[t].trip_count > 1 for t in op.tasks)]
    strategy.axes[whole] = -1
    plan = made.plan(strategy)
    sent = sent_bytes(bind_plan(made.step, plan), made.leaves)["all-gather"]
    assert sent == pytest.approx(7 / 8 * made.args[1].nbytes, rel=0.01)
    assert plan.prediction.bytes_by_collective["all-gather"] == pytest.approx(sent, rel=0.01)


@pytest.mark.parametrize("is_loop", [False, True])
@pytest.mark.parametrize("start", [None, 0, 1])
def test_gradients_are_right(is_loop, start):
    made = case(is_loop)
    made.check(data_parallel(made.space) if start is None else rotated(made.space, start))


def test_uses_may_differ():
    """Each use of a parameter has a config of its own; the summands meet in the layout of the owner's."""
    made = case(False)
    rng = np.random.default_rng(3)
    for _ in range(2):
        made.check(made.space.random(rng))


AXES = ("a", "b", "c")


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), AXES)


SPECS = [((), ()), (("a",), ()), ((), ("b", "c")), (("c",), ("a",))]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_partial_values(mesh, spec):
    """Whole values and sums, split off, added and resolved to any home, give what NumPy gives."""
    rng = np.random.default_rng(0)
    free = tuple(n for n in AXES if not any(n in names for names in spec))
    x, y = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 8), (2, 8, 8)))

    def run(home, x, y):
        partial = split_off(Partial(y, free[:1]), free, spec, mesh)
        total = elementwise(jnp.add, partial, split_off(x, free, spec, mesh))
        assert total.axes == free and total.blocks.shape == (2,) * len(free) + x.shape
        return resolved(total, spec, home, mesh)

    more = [tuple((*names, *free) if k == d else names for k, names in enumerate(spec)) for d in range(2)]
    homes = [spec, *(h for h in more if all(list(names) == sorted(names) for names in h))]
    assert len(homes) > 1
    for home in homes:
        out = jax.jit(functools.partial(run, home))(x, y)
        wanted = NamedSharding(mesh, PartitionSpec(*(names or None for names in home)))
        assert out.sharding.is_equivalent_to(wanted, 2), (out.sharding, home)
        np.testing.assert_allclose(out, x + y.sum(0), rtol=1e-5, atol=1e-5)


def test_a_summand_may_be_gathered():
    """The derivative of rows that are put at places: what is picked from a split table stays apart like a product."""
    order = np.random.default_rng(0).permutation(WIDTH)

    def step(w, x):
        def loss(w):
            placed = jnp.zeros_like(w).at[order].set(w, unique_indices=True)
            return (jnp.tanh(x @ placed) * jnp.tanh(x @ w)).mean()

        return w - 0.1 * jax.grad(loss)(w)

    c = Case(step, (jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)), jax.random.normal(jax.random.key(1), (BATCH, WIDTH))))
    (summed,) = c.graph.accumulations
    assert len(summed.summands) == 2
    for start in range(3):
        c.check(rotated(c.space, start))
