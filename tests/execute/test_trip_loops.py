"""Stages run their layers as loops: the numbers, the bytes sent and the memory are those of layers one after the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from planned import topology_with

import soapjax
from soapjax.execute.compiled.pipeline_proof import verify_pipeline
from soapjax.execute.compiled.stream_inspection import inspect_stream
from soapjax.execute.parts import rolled_cut
from soapjax.execute.parts.cut import Part, make_part
from soapjax.execute.parts.stacked_rows import RowsAndStacks, StackedRows
from soapjax.execute.parts.trip_families import runs_of_rows
from soapjax.execute.parts.trip_loops import Rolled, TripLoop
from soapjax.execute.parts.trip_order import Irregular
from soapjax.execute.spmd.evaluator import ProgramEvaluator
from soapjax.execute.streams.stage_programs import step_of_plan
from soapjax.graph.trace.tracing import trace


@pytest.fixture
def short_loops(monkeypatch):
    monkeypatch.setattr(rolled_cut, "MIN_TRIPS", 2)


# One part.


def looping(kind):
    """Small steps, unrolled: what loops carry, read and make is told apart."""
    w = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4, 4)) / 2, jnp.float32)
    x = jnp.ones((3, 4), jnp.float32)

    def layer(h, w):
        a = jnp.tanh(h @ w)
        return h + a, (a * 2, h)

    def two_carries(carry, w):
        h, total = carry
        h = jnp.sin(h @ w) + h
        return (h, total + h.sum()), h[0]

    steps = {
        "one carry": lambda w, x: jax.lax.scan(layer, x, w),
        "two carries": lambda w, x: jax.lax.scan(two_carries, (x, 0.0), w),
        "there and back": lambda w, x: jax.lax.scan(layer, jax.lax.scan(layer, x, w)[0], w, reverse=True),
        "gradients": jax.grad(lambda w, x: (jax.lax.scan(layer, x, w)[0] ** 2).sum(), (0, 1)),
        "recomputed": jax.grad(lambda w, x: (jax.lax.scan(jax.checkpoint(layer), x, w)[0] ** 2).sum(), (0, 1)),
        "no carry": lambda w, x: jax.lax.scan(lambda c, w: (c, jnp.cos(w) @ x.T), 0.0, w),
        "of the one before": lambda w, x: jax.lax.scan(lambda c, w: (w, jnp.tanh(c) @ w), jnp.eye(4), w),
    }
    return steps[kind], (w, x)


KINDS = ("one carry", "two carries", "there and back", "gradients", "recomputed", "no carry", "of the one before")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [1, 2, 3], [0, 1], [3, 4]])
def test_a_part_makes_the_same_values_in_loops(kind, rows):
    fn, args = looping(kind)
    program = trace(fn, *args, unroll=True).program
    values = [o for o in program.outputs if isinstance(o, int)]
    part = make_part("part", 0, program, {e.key for e in program.eqns}, (), values)
    rolled = Rolled(part, program, rows, lambda e: None)
    assert rolled.loops and len(rolled.items) < len(part.eqns)
    for v in values:
        rolled.give_one(v)
    rolled.settle(())
    stacks = StackedRows(dict(program.avals))
    eqns = rolled.equations(stacks)
    assert [type(i) is TripLoop for i in rolled.items] == [e.body is not None for e in eqns]
    evaluator = ProgramEvaluator(program)

    def run(eqns, *args):
        env = RowsAndStacks({**program.consts, **dict(zip(program.inputs, args, strict=True))}, stacks)
        evaluator.block(Part("part", 0, eqns, frozenset(), ()), env)
        return [env[v] for v in values]

    for a, b in zip(jax.jit(run, static_argnums=0)(eqns, *args), run(part.eqns, *args), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_what_a_backward_pass_makes_again_cheaply_it_does_in_the_loop_that_reads_it():
    fn, args = looping("recomputed")
    program = trace(fn, *args, unroll=True).program
    part = make_part("part", 0, program, {e.key for e in program.eqns}, (), [o for o in program.outputs if isinstance(o, int)])
    forward, backward = Rolled(part, program, range(5), lambda e: None).loops
    assert forward.order == [0, 1, 2, 3, 4] and backward.order == [4, 3, 2, 1, 0]
    assert [e.name for e in backward.eqns].count("tanh") == 1  # its result is not handed from loop to loop


def test_trips_that_differ_are_no_loop():
    def step(w, x):
        for t in range(4):
            x = jnp.tanh(x @ w[t]) if t != 2 else jnp.sin(x @ w[t])
        return x

    fn, args = looping("one carry")
    program = trace(fn, *args, unroll=True).program
    part = make_part("part", 0, program, {e.key for e in program.eqns}, (), program.outputs)
    one = next(e for e in part.eqns if e.name == "tanh" and e.trip.row == 2)
    runs = runs_of_rows([part], lambda e: e is one, 2)
    assert not Rolled(part, program).loops
    for run in runs:
        if 2 in run:
            with pytest.raises(Irregular):
                Rolled(part, program, run, lambda e: e is one)
    assert [0, 1] in runs and [3, 4] in runs
    flat = trace(step, *args).program  # a Python loop is not told
    assert not runs_of_rows([make_part("part", 0, flat, {e.key for e in flat.eqns}, (), flat.outputs)], lambda e: None, 2)


# Whole steps.

FOUR = topology_with(4)  # two stages of two devices: what is split within a stage, and sent between stages, is there


def transformer(layers=5, *, tied=False, dropout=False, checkpointed=False, dtype=jnp.float32):
    """A scanned language model with norms, heads, and gradients clipped by their norm."""
    width, optimizer = 16, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def norm(x, s):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * s

    def block(carry, p):
        x, key = carry
        p = jax.tree.map(lambda a: a.astype(dtype), p)
        q, k, v = jnp.split(norm(x, p["s1"]) @ p["qkv"], 3, -1)
        x = x + jax.nn.softmax(q @ k.swapaxes(-1, -2) / 4) @ v @ p["out"]
        if dropout:
            key, own = jax.random.split(key)
            x = jnp.where(jax.random.bernoulli(own, 0.9, x.shape), x, 0)
        return (x + jax.nn.silu(norm(x, p["s2"]) @ p["up"]) @ p["down"], key), None

    def loss(params, tokens, key):
        x = params["embed"][tokens[:, :-1]].astype(dtype)
        (x, _), _ = jax.lax.scan(jax.checkpoint(block) if checkpointed else block, (x, key), params["blocks"])
        logits = x @ (params["embed"].T if tied else params["head"]).astype(dtype)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()

    def step(state, tokens):
        value, grads = jax.value_and_grad(loss)(state["params"], tokens, jax.random.key(7))
        updates, inner = optimizer.update(grads, state["inner"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "inner": inner}, {"loss": value}

    rng = np.random.default_rng(0)
    shapes = {"qkv": (width, 48), "out": (width, width), "up": (width, 32), "down": (32, width)}
    blocks = {k: jnp.asarray(rng.normal(size=(layers, *s)) * 0.2, jnp.float32) for k, s in shapes.items()}
    blocks |= {"s1": jnp.ones((layers, width)), "s2": jnp.ones((layers, width))}
    params = {"embed": jnp.asarray(rng.normal(size=(40, width)) * 0.2, jnp.float32), "blocks": blocks}
    params |= {} if tied else {"head": jnp.asarray(rng.normal(size=(width, 40)) * 0.2, jnp.float32)}
    tokens = jnp.asarray(rng.integers(0, 40, (16, 9)))
    return step, ({"params": params, "inner": optimizer.init(params)}, tokens)


CASES = [
    ("1f1b", {"dropout": True, "checkpointed": True}), ("gpipe", {"tied": True}), ("zb-h1", {}), ("1f1b", {}),
    ("1f1b", {"checkpointed": True, "layers": 6}), ("gpipe", {"layers": 7}), ("interleaved", {"layers": 12}),
    ("zb-h1", {"dtype": jnp.bfloat16, "checkpointed": True}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "how"), CASES)
def test_a_pipeline_in_loops_is_the_same_without(schedule, how, monkeypatch):
    step, (state, tokens) = transformer(**how)
    plan, found = soapjax.plan_pipeline(
        step, state, tokens, pipeline=schedule, stages=2, microbatches=4, proposals=10, topology=FOUR
    )  # fmt: skip
    seen = {}
    for trips in (2, 1000):
        monkeypatch.setattr(rolled_cut, "MIN_TRIPS", trips)
        run = step_of_plan(step, state, tokens, plan=plan, donate=False, of_micro=found.of_micro)
        stream = run.streamed
        looped = [p for p in (*stream.cut.passes, *stream.cut.update) if any(e.body is not None for e in p.eqns)]
        assert (len(looped) >= 2) == (trips == 2)
        inspected = inspect_stream(stream)
        now, metrics = state, []
        for _ in range(2):
            now, metric = run(now, tokens)
            metrics.append(metric["loss"])
        sent = sum(sum(p.bytes_by_collective.values()) * p.num_devices for p in inspected.parts)
        seen[trips] = now, metrics, sent, sum(inspected.memory_bytes.values())
    (now, metrics, sent, memory), (wanted, expected, sent_alone, memory_alone) = seen.values()
    tolerance = 2e-2 if how.get("dtype") == jnp.bfloat16 else 2e-5
    np.testing.assert_allclose(metrics, expected, rtol=tolerance)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), now, wanted)
    for a, b in zip(*map(jax.tree.leaves, (now, wanted)), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    assert sent == pytest.approx(sent_alone, rel=0.1)
    assert memory <= 1.6 * memory_alone  # of so few and small layers; of twelve and more per stage it is 0 to 3 % more


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_pipeline_in_loops_is_proven(schedule, short_loops):
    step, args = transformer(checkpointed=True)
    plan, planned = soapjax.plan_pipeline(step, *args, pipeline=schedule, stages=2, microbatches=4, proposals=10, topology=FOUR)
    leaves = planned.of_micro.micro.full.rows_of(jax.tree.leaves(args))

    @functools.cache  # one step is inspected and run: its programs are compiled once
    def of_precision(is_float64):
        return step_of_plan(step, *args, plan=plan, donate=False, is_float64=is_float64, of_micro=planned.of_micro).streamed

    made = of_precision(False)
    inspected = inspect_stream(made)
    found = verify_pipeline(of_precision, leaves, inspected.ops)
    assert made.pieces is not None and found.numbers.is_proven and inspected.ops.planned_ops > 0, found


@pytest.mark.slow
def test_the_size_of_the_batch_is_the_whole_ones_in_loops_too(short_loops):
    step, args = transformer()

    def sized(state, tokens):
        state, metrics = step(state, tokens)
        return state, metrics | {"size": tokens.shape[0]}

    plan, planned = soapjax.plan_pipeline(sized, *args, pipeline="gpipe", stages=2, microbatches=4, proposals=5, topology=FOUR)
    run = step_of_plan(sized, *args, plan=plan, donate=False, of_micro=planned.of_micro)
    assert run.streamed.pieces is not None and run(*args)[1]["size"] == 16
