"""Steps written for something else: evaluation, `jax.pmap`, a mesh of their own."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from soapjax import SoapjaxError, soap_shard
from soapjax.graph.trace.one_program import for_one_program
from soapjax.graph.trace.tracing import trace

FSDP = dict(planner="fsdp")
TX = optax.sgd(0.1, momentum=0.9)  # Adam makes steps of the rounding of gradients that are zero
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.standard_normal((16, 8)).astype(np.float32), "y": RNG.standard_normal((16, 4)).astype(np.float32)}


class Net(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)(nn.Dense(16)(x))
        return nn.Dense(4)(nn.relu(x))


@functools.cache
def begun():
    def begin(key):
        variables = Net().init(key, BATCH["x"])
        return {"params": variables["params"], "stats": variables["batch_stats"], "opt_state": TX.init(variables["params"])}

    return jax.tree.map(np.asarray, jax.jit(begin)(jax.random.key(0)))


def new_state():
    return jax.tree.map(jnp.array, begun())


def train_step(model, axis_name=None):
    def mean(tree):
        return tree if axis_name is None else jax.lax.pmean(tree, axis_name)

    def step(state, batch):
        def loss_fn(params):
            out, new = model.apply({"params": params, "batch_stats": state["stats"]}, batch["x"], mutable=["batch_stats"])
            return ((out - batch["y"]) ** 2).mean(), new["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt_state = TX.update(mean(grads), state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "stats": mean(stats), "opt_state": opt_state}, mean(loss)

    return step


def losses(f, state, count=3):
    found = []
    for _ in range(count):
        state, loss = f(state, BATCH)
        found.append(float(loss))
    return found, state


@functools.cache
def expected_losses():
    """Of the plain step on one device, and its state afterwards."""
    return losses(jax.jit(train_step(Net())), new_state())


def test_a_pmap_step_is_that_over_the_whole_batch():
    expected, state = expected_losses()
    step = train_step(Net(axis_name="batch"), axis_name="batch")
    sharded = soap_shard(step, axis_name="batch", **FSDP)
    found, new = losses(sharded, new_state())
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), new["stats"], state["stats"])
    # The batch is split, as without the collectives.
    assert sharded.plan.arguments["batch.x"].startswith("d0+d1+d2")
    with pytest.raises(SoapjaxError, match="pass axis_name='batch'") as error:
        soap_shard(step, **FSDP)(new_state(), BATCH)
    assert "test_other_steps.py:" in str(error.value) and isinstance(error.value.__cause__, NameError)


def collectives(x, key):
    lax, i = jax.lax, jax.lax.axis_index("b")
    key = jax.random.fold_in(key, i)
    gathered = lax.all_gather(x, "b"), lax.all_gather(x, "b", axis=1), lax.all_gather(x, "b", tiled=True)
    scattered = lax.psum_scatter(x, "b", tiled=True), lax.psum_scatter(x[None], "b"), lax.all_to_all(x, "b", 0, 1, tiled=True)
    sums = lax.psum(x, "b"), lax.pmean({"a": x}, "b"), lax.pmax(x, "b"), lax.pmin(x, "b"), lax.psum(1, "b")
    branch = lax.cond(x[0, 0] > 0, lambda: lax.pmean(x, "b"), lambda: 2 * x)
    looped = lax.scan(lambda c, row: (lax.psum(c + row.sum(), "b"), lax.axis_index("b") + row), 0.0, x)
    rolled = lax.ppermute(x, "b", [(0, 0)]), jax.grad(lambda v: (lax.pmean(v, "b") ** 2).sum())(x)
    return i, jax.random.normal(key, (2,)), gathered, scattered, sums, branch, looped, rolled, lax.axis_size("b")


def test_collectives_of_one_member_are_those_of_jax():
    """Against `shard_map` over one device, where the axis is real."""
    x, key = jnp.arange(12.0).reshape(4, 3) - 2, jax.random.key(1)
    mesh = Mesh(np.array(jax.devices()[:1]), "b")
    expected = jax.jit(jax.shard_map(collectives, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))(x, key)
    closed = jax.make_jaxpr(jax.jit(collectives), axis_env=[("b", 1)])(x, key)
    rewritten = for_one_program(closed, ["b"])
    found = jax.jit(jaxpr_as_fun(rewritten))(x, key)
    for a, b in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert trace(collectives, x, key, axis_name="b").out_avals[0].shape == ()
    text = str(rewritten)
    assert not any(word in text for word in ("psum", "pmax", "all_gather", "axis_index", "reduce_scatter", "NamedAxis"))


def test_who_asks_for_the_number_of_devices_under_an_axis_is_told(caplog):
    """`loss / jax.device_count()` and a psum: right under pmap; the axis has one member here."""

    def step(w, x):
        grad = jax.grad(lambda w: (x @ w).mean() / jax.device_count())(w)
        return w - jax.lax.psum(grad, "batch")

    before = jax.device_count
    trace(step, jnp.ones(8), jnp.ones((16, 8)), axis_name="batch")
    (record,) = caplog.records
    said = r"test_other_steps.py:\d+ in <lambda>: asks jax.device_count\(\) \(8\); under axis_name='batch'.*jax.lax.axis_size"
    assert re.search(said, record.getMessage()) and jax.device_count is before


def test_an_axis_and_a_mesh_of_explicit_axes_go_together():
    step = train_step(Net(axis_name="batch"), axis_name="batch")
    expected = expected_losses()[0]
    with jax.set_mesh(jax.make_mesh((8,), ("devices",), axis_types=(AxisType.Explicit,))):
        found, _ = losses(soap_shard(step, axis_name="batch", **FSDP), new_state())
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def on_explicit_axes(state, batch):
    """Asks for layouts as one does under such a mesh: of products, gathers and values, in loops and in what is computed again."""

    def layer(h, w):
        return jnp.tanh(jnp.dot(h, w, out_sharding=P("data", "model")) @ w.T), None

    def loss(params):
        h = params["embedding"].at[batch["tokens"]].get(out_sharding=P("data"))
        h = h + jnp.einsum("bi,io->bo", batch["x"], params["kernel"], out_sharding=P("data", None))
        h = jax.checkpoint(lambda h: jax.lax.scan(layer, h, params["layers"])[0])(h)
        h = jax.lax.cond(h.sum() > 0, lambda h: h * 2, lambda h: h * 3, jax.sharding.reshard(h, P("data", None)))
        h = jax.sharding.auto_axes(lambda h: jnp.cumsum(h, 1), axes="model", out_sharding=P("data", None))(h)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda a, b: a - 0.1 * b, state, grads), value


@pytest.mark.parametrize("strip", [False, True])
def test_a_step_that_asks_for_layouts_under_a_mesh_of_explicit_axes(strip):
    shapes = {"kernel": (8, 16), "embedding": (9, 16), "layers": (3, 16, 16)}
    state = {k: (RNG.standard_normal(s) / 4).astype(np.float32) for k, s in shapes.items()}
    batch = {"x": BATCH["x"], "tokens": np.arange(16) % 9}
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)):
        wanted = jax.jit(on_explicit_axes)(state, batch)
        planned = soap_shard(on_explicit_axes, donate=False, strip_constraints=strip, proposals=200)
        found = planned(state, batch)
        assert bool(found[1] < 1e6) and float(found[1] + jnp.ones(())) > 1  # as one does with a loss outside of the step
        assert float(planned(found[0], batch)[1] - found[1]) != 0
        traced = trace(on_explicit_axes, state, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-6), found, wanted)
    asked = [o for o in planned.plan.operators.values() if o.kind == "constraint"]
    assert not strip or not asked
    assert strip or {sum(v != "replicate" for v in o.axes.values()) for o in asked} == {2, 3}  # 4 x 1 and 4 x 2 of 2 x 2 x 2
    assert all(getattr(a, "sharding", None) is None or a.sharding.mesh.empty for a in traced.program.avals.values())


def test_what_is_wrong_under_a_mesh_of_explicit_axes_is_told_in_its_own_words():
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))):
        step = soap_shard(lambda w, x: (w, jax.sharding.reshard(x @ w, P("model")).sum()), **FSDP)
        with pytest.raises(SoapjaxError, match=r"test_other_steps.py:\d+ in <lambda>.*model"):
            step(jnp.ones((8, 8)), jnp.ones((16, 8)))


def test_mutable_arrays_are_refused_by_name():
    with pytest.raises(SoapjaxError, match=r"argument state.w: got a mutable array \(jax.Ref\).*x\[...\]"):
        soap_shard(lambda state, x: (x @ state["w"][...]).sum(), **FSDP)({"w": jax.new_ref(jnp.ones((8, 8)))}, jnp.ones((16, 8)))


def constrained(inner, mesh, spec):
    def step(state, batch):
        x = jax.lax.with_sharding_constraint(batch["x"], NamedSharding(mesh, spec))
        return inner(state, batch | {"x": x})

    return step


@pytest.mark.parametrize("sizes", [(8,), (4, 2), (2, 4), (8, 1)])
def test_constraints_on_a_mesh_of_its_own_hold(sizes):
    """Its axes are products of the plan's, in order."""
    mesh = jax.make_mesh(sizes, ("data", "model")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))
    planned = soap_shard(constrained(train_step(Net()), mesh, P("data")), **FSDP)
    found, _ = losses(planned, new_state())
    np.testing.assert_allclose(found, expected_losses()[0], rtol=1e-5)
    (axes,) = [o.axes for o in planned.plan.operators.values() if o.kind == "constraint"]
    assert 2 ** sum(v != "replicate" for v in axes.values()) == sizes[0]


def test_constraints_on_another_mesh_can_be_left_out():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    step = constrained(train_step(Net()), mesh, P("data"))
    with pytest.raises(SoapjaxError, match=r"test_other_steps.py:\d+ in step.*'data' of size 4.*strip_constraints=True"):
        soap_shard(step, **FSDP)(new_state(), BATCH)
    found, _ = losses(soap_shard(step, strip_constraints=True, **FSDP), new_state())
    np.testing.assert_allclose(found, expected_losses()[0], rtol=1e-5)


def test_an_evaluation_step_takes_the_training_state_as_it_lies():
    train = soap_shard(train_step(Net()), **FSDP)
    state, _ = train(new_state(), BATCH)

    def evaluate(state, batch):
        out, _ = Net().apply({"params": state["params"], "batch_stats": state["stats"]}, batch["x"], mutable=["batch_stats"])
        return ((out - batch["y"]) ** 2).mean()

    expected = float(evaluate(jax.device_get(state), BATCH))
    fixed = soap_shard(evaluate, fixed={"state": train.shardings()[0]}, **FSDP)
    assert float(fixed(state, BATCH)) == pytest.approx(expected, rel=1e-5)
    assert jax.tree.map(lambda s: s.spec, fixed.shardings()[0]["params"]) == jax.tree.map(
        lambda s: s.spec, train.shardings()[0]["params"]
    )
    # The momentum, which it does not read, are neither moved nor part of the program.
    free = soap_shard(evaluate, **FSDP)
    assert float(free(state, BATCH)) == pytest.approx(expected, rel=1e-5)
    placed = free._last.place(state, BATCH)[0]
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (placed["opt_state"], state["opt_state"])), strict=True))
    compiled = free.lower(state, BATCH).compile()
    read = sum(x.nbytes for x in jax.tree.leaves((state["params"], BATCH)))
    assert compiled.memory_analysis().argument_size_in_bytes <= read < sum(x.nbytes for x in jax.tree.leaves((state, BATCH)))
    # A last batch that does not split over eight devices is planned anew.
    few = jax.tree.map(lambda x: x[:6], BATCH)
    assert float(free(state, few)) == pytest.approx(float(evaluate(jax.device_get(state), few)), rel=1e-5)
    assert free._cache_size() == 2
    train(state, BATCH)  # it has not been used up


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class AnyName:
    """A state that has a value for every name, as those that look theirs up elsewhere."""

    w: jax.Array

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


def test_a_state_that_answers_any_name():
    def step(state, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state.w)
        return AnyName(state.w - 0.1 * grad), loss

    args = AnyName(jnp.ones((8, 8))), BATCH["x"]
    np.testing.assert_allclose(soap_shard(step, donate=False, **FSDP)(*args)[1], step(*args)[1], rtol=1e-6)


def test_a_loop_that_carries_a_key_nobody_draws_with_is_cut():
    """As recurrent nets with burn-in do (R2D2): the key is the same for all micro-batches; every stage that reads it makes it."""
    rng = np.random.default_rng(0)
    w = {k: rng.normal(size=s).astype(np.float32) / 2 for k, s in (("in", (6, 20)), ("cell", (32, 12)), ("out", (12, 4)))}

    def unrolled(w, key, x, h):
        _, key = jax.random.split(key)

        def cell(carry, x):
            h, key = carry
            h = jnp.tanh(jnp.concatenate([x, h], -1) @ w["cell"])
            return (h, key), h

        (h, _), y = jax.lax.scan(cell, (h, key), jax.nn.relu(x @ w["in"]))
        return y @ w["out"], h

    def step(w, target, key, x, h):
        x = jnp.swapaxes(x, 0, 1)
        key, own = jax.random.split(key)

        def loss(w):
            again, first, second = jax.random.split(own, 3)
            states = unrolled(w, first, x[:2], h)[1], unrolled(target, second, x[:2], h)[1]
            first, second = jax.random.split(again)
            q, y = unrolled(w, first, x[2:], states[0])[0], unrolled(target, second, x[2:], states[1])[0]
            return ((q[:-1, :, 0] - jax.lax.stop_gradient(y[1:].max(-1))) ** 2).mean()

        value, gradient = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, gradient), target, key, value

    x, h = rng.normal(size=(8, 9, 6)).astype(np.float32), rng.normal(size=(8, 12)).astype(np.float32)
    args = (w, jax.tree.map(np.array, w), jax.random.PRNGKey(2), x, h)
    expected = jax.jit(step)(*args)
    found = soap_shard(step, pipeline="1f1b", stages=2, microbatches=2, proposals=8, donate=False)(*args)
    for a, b in zip(jax.tree.leaves((found[0], found[3])), jax.tree.leaves((expected[0], expected[3])), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", [dict(microbatches=2), dict(pipeline="1f1b", stages=2, microbatches=2)])
def test_a_gradient_inside_a_loop_of_the_loss_is_of_the_forward_pass(form):
    """Hamiltonian nets: JAX takes what is the same in every trip out of the loop, and the loop's mark from it."""
    strength = np.full(1, 1.5, np.float32)  # a constant of the step

    def energy(w, q, p):
        return (strength * jnp.exp(w["m"]) * (jnp.tanh(p @ w["k"]) @ w["l"]) + jnp.tanh(q @ w["u"]) @ w["v"]).sum()

    def step(w, x):
        def loss(w):
            def euler(qp, _):
                q, p = qp
                return (q + 0.1 * jax.grad(energy, 2)(w, q, p), p - 0.1 * jax.grad(energy, 1)(w, q, p)), None

            (q, p), _ = jax.lax.scan(euler, tuple(jnp.split(x @ w["in"], 2, -1)), None, length=3)
            return ((jnp.concatenate([q, p], -1) @ w["out"] - x) ** 2).mean()

        value, gradient = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, gradient), value

    shapes = {"k": (4, 10), "l": (10, 1), "u": (4, 6), "v": (6, 1), "m": (1,), "in": (12, 8), "out": (8, 12)}
    w = {k: RNG.standard_normal(s).astype(np.float32) / 3 for k, s in shapes.items()}
    x = RNG.standard_normal((16, 12)).astype(np.float32)
    found = soap_shard(step, donate=False, proposals=8, **form)(w, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(w, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
