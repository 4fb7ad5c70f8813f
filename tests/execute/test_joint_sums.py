"""Products that are added up: one sum over the devices where a plan makes them partial sums in one layout."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planned import Case, data_parallel, plain_leaves

from soapjax.costs.tables.problem_tables import cost_tables
from soapjax.execute.compiled.collectives import collectives_of
from soapjax.execute.parts.cut import make_part
from soapjax.execute.parts.part_program import Place, jit_part
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace
from soapjax.simulate.simulator import Simulator
from soapjax.strategy.layout import PARTIAL

BATCH, WIDTH = 16, 32


def projections(post_norm=False, dtype=jnp.float32):
    """Attention without heads: the gradients of three projections of one value meet, `post_norm` with the shortcut's."""

    def loss(params, x):
        h = jnp.tanh(x @ params["in"])
        q, k, v = (jnp.tanh(h @ params[n]) for n in "qkv")
        out = jax.nn.softmax(q * k) * v @ params["out"]
        return ((out + h if post_norm else out).astype(jnp.float32) ** 2).mean()

    return step_of(loss, ["in", *"qkv", "out"], dtype)


def parallel_branches():
    """Two branches, each ending in a product, are added up in the forward pass."""

    def loss(params, x):
        left, right = (jnp.tanh(x @ params[n]) for n in ("l1", "r1"))
        return ((x + left @ params["l2"] + right @ params["r2"]) ** 2).mean()

    return step_of(loss, ["l1", "l2", "r1", "r2"])


def stacked_in_a_loop():
    """The same in the body of a scan, for each of two layers."""

    def loss(params, x):
        def layer(h, w):
            n = h - h.mean(-1, keepdims=True)
            left, right = (jnp.tanh(n @ w[i]) for i in ("l1", "r1"))
            return h + left @ w["l2"] + right @ w["r2"], None

        return (jax.lax.scan(layer, x, params)[0] ** 2).mean()

    step, (params, x) = step_of(loss, ["l1", "l2", "r1", "r2"])
    return step, ({n: jnp.stack([w, w.T]) for n, w in params.items()}, x)


def step_of(loss, names, dtype=jnp.float32):
    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    keys = jax.random.split(jax.random.key(0), len(names) + 1)
    params = {n: (jax.random.normal(k, (WIDTH, WIDTH)) / 4).astype(dtype) for n, k in zip(names, keys, strict=False)}
    return step, (params, jax.random.normal(keys[-1], (BATCH, WIDTH)).astype(dtype))


STEPS = {
    "projections": projections,
    "post-norm": functools.partial(projections, post_norm=True),
    "bfloat16": functools.partial(projections, dtype=jnp.bfloat16),
    "branches": parallel_branches,
    "loop": stacked_in_a_loop,
}


@functools.cache
def case(name):
    return Case(*STEPS[name]())


def contracted(made):
    """A strategy under which the products of joint sums are partial sums, all over the same axes; the rest is replicated."""
    graph, strategy = made.graph, data_parallel(made.space)
    strategy.axes[:] = -1
    maker = {a.tensor: (t.operator, a) for t in graph.tasks for a in t.writes}
    for joint in graph.joint_sums:
        for n, access in (maker[s] for s in joint.summands):
            strategy.axes[n] = access.reduced[0]
    assert made.space.is_valid(strategy)
    return strategy


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [("projections", [], [(3, 0)]), ("post-norm", [], [(3, 1)]), ("bfloat16", [], [(3, 0)]), ("branches", [(2, 1)], []),
     ("loop", [(2, 1)], [(2, 0)])],
)  # fmt: skip
def test_what_belongs_to_a_sum(name, forward, backward):
    """Numbers of products and of other terms, by phase. The step's input has no gradient: `branches` has none to add up."""
    graph, binding = case(name).graph, case(name).binding
    found = {0: [], 1: []}
    for joint, traced in zip(graph.joint_sums, binding.joint_sums, strict=True):
        assert len(joint.summands) == len(traced.summands)
        reader = graph.tasks[binding.task_of[traced.last]]
        assert {*joint.summands} <= {a.tensor for a in reader.reads} and traced.additions <= {*reader.equations.keys}
        found[reader.phase].append((len(traced.summands), len(traced.others)))
    assert found == {0: forward, 1: backward}


def test_what_others_read_is_not_added_up():
    """A product that is also an output, one that is added twice, and a cast on the way: none of them may wait."""

    def step(params, x):
        a, b, c = (jnp.tanh(x) @ params[n] for n in "abc")
        d = (jnp.tanh(x).astype(jnp.bfloat16) @ params["d"].astype(jnp.bfloat16)).astype(jnp.float32)
        return params, (a + b, a, c + c, (x @ params["c"] + d).sum())

    params = {n: jnp.eye(WIDTH) for n in "abcd"}
    graph, _ = build_graph(trace(step, params, jnp.ones((BATCH, WIDTH))))
    assert not graph.joint_sums


@pytest.mark.parametrize("name", ["projections", "post-norm", "branches", "loop"])
def test_summed_once_as_predicted(name):
    """The compiled program sums each joint sum once; as predicted, and as many bytes less as products wait."""
    made = case(name)
    strategy = contracted(made)
    plan = made.plan(strategy)
    bound = bind_plan(made.step, plan)
    run = jax.jit(lambda *a: bound.evaluator().run(list(a))[0], in_shardings=bound.in_shardings())
    text = run.lower(*made.leaves).compile().as_text()
    sent = sum(c.step_bytes for c in collectives_of(text, 8) if c.kind == "all-reduce")
    assert plan.prediction.bytes_by_collective["all-reduce"] == pytest.approx(sent, rel=0.01)
    apart = dataclasses.replace(made.graph, joint_sums=())
    each = Simulator(cost_tables(apart, made.space, made.topology)).prediction(strategy)
    trips = 2 if name == "loop" else 1
    saved = sum(len(j.summands) - 1 for j in made.graph.joint_sums) * trips * (2 * 7 / 8 * BATCH * WIDTH * 4)
    assert each.bytes_by_collective["all-reduce"] - sent == pytest.approx(saved, rel=0.01)
    made.check(strategy)


@pytest.mark.parametrize("name", ["projections", "post-norm", "branches", "loop"])
def test_mixed_layouts_are_right(name):
    """Some products wait, others do not: changes of one operator of the strategy above, and random strategies."""
    made, rng = case(name), np.random.default_rng(0)
    for k in range(4):
        strategy = contracted(made)
        n = rng.integers(made.graph.num_operators)
        strategy.axes[n] = made.space.random(rng).axes[n]
        made.check(strategy if k else made.space.random(rng))


@pytest.mark.parametrize("name", STEPS)
def test_never_more_than_apart(name):
    """Of random strategies, joint sums make communication cheaper or leave it as it is, and only products that wait differ."""
    made, rng = case(name), np.random.default_rng(1)
    apart = Simulator(cost_tables(dataclasses.replace(made.graph, joint_sums=()), made.space, made.topology))
    cheaper = 0
    for k in range(40):
        strategy = contracted(made) if k % 2 else made.space.random(rng)
        if k > 1:
            strategy.axes[rng.integers(made.graph.num_operators)] = -1
        one, each = made.simulator.costs(strategy), apart.costs(strategy)
        seconds = [np.sum([x.sum() for x in c.durations[1:]]) for c in (one, each)]
        waits = (np.asarray(one.layouts.home) == PARTIAL).any(1) & (made.tables.is_joint | (made.tables.tensor_sum < 0))
        if waits.any():
            cheaper += seconds[0] < seconds[1] * (1 - 1e-6)
        else:
            assert seconds[0] == pytest.approx(seconds[1], rel=1e-6)
        assert seconds[0] <= seconds[1] * (1 + 1e-6)
    assert cheaper > 10


def test_a_product_that_crosses_programs_is_summed_up():
    """A pipeline may cut between two products of one sum: what leaves a program is whole, and the other adds it as such."""
    made = case("projections")
    strategy = contracted(made)
    bound = bind_plan(made.step, made.plan(strategy))
    (traced,) = made.binding.joint_sums
    program = made.step.program
    cut = 1 + [e.key for e in program.eqns].index(traced.products[traced.summands[0]])
    halves = program.eqns[:cut], program.eqns[cut:]
    made_by = [{o for e in half for o in e.outputs} for half in halves]
    outer = {o for o in program.outputs if isinstance(o, int)}
    wanted = [made_by[0] & (outer | {a for e in halves[1] for a in e.inputs if isinstance(a, int)}), made_by[1] & outer]
    assert traced.summands[0] in wanted[0]
    values = dict(zip(program.inputs, made.leaves, strict=True))
    with made.float64():
        place = Place(bound, is_float64=True)
        for half, out in zip(halves, wanted, strict=True):
            part = make_part("half", 0, program, {e.key for e in half}, (), sorted(out))
            part = dataclasses.replace(part, outputs=tuple(sorted(out)))
            found = jit_part(place, part)(*(jax.device_put(values[v], place.sharding(v)) for v in part.inputs))
            values.update(zip(part.outputs, found, strict=True))
        found = plain_leaves([values[o] for o in program.outputs])
    for a, b in zip(found, made.expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
