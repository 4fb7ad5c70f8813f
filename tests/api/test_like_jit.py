"""What `jax.jit` takes, `soap_shard` takes: constants and donation by name, methods, nesting, some of the devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import soapjax
from soapjax import SoapjaxError, soap_shard

pytestmark = pytest.mark.usefixtures("no_search")
FSDP = dict(planner="fsdp")
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.standard_normal((16, 8)).astype(np.float32), "y": RNG.standard_normal((16, 4)).astype(np.float32)}


def new_state():
    return {"w1": 0.1 * jnp.ones((8, 16)), "w2": 0.1 * jnp.ones((16, 4))}


def loss_of(state, batch):
    return ((jnp.tanh(batch["x"] @ state["w1"]) @ state["w2"] - batch["y"]) ** 2).mean()


def step(state, batch, lr=0.1):
    loss, grads = jax.value_and_grad(loss_of)(state, batch)
    return jax.tree.map(lambda p, g: p - lr * g, state, grads), loss


EXPECTED = [float(x) for x in (lambda a: (a[1], step(a[0], BATCH)[1]))(step(new_state(), BATCH))]


def losses(f, count=2, **kwargs):
    state, found = new_state(), []
    for _ in range(count):
        state, loss = f(state, BATCH, **kwargs)
        found.append(float(loss))
    return found


@functools.cache
def planned():
    sharded = soap_shard(step, **FSDP)
    assert losses(sharded) == pytest.approx(EXPECTED, rel=1e-5)
    return sharded


def keyword_only(state, batch, *, lr, train=True):
    assert isinstance(train, bool)
    return step(state, batch, lr if train else 0.0)


def test_keyword_only_arguments_and_constants_by_name():
    sharded = soap_shard(keyword_only, static_argnames="train", **FSDP)
    assert losses(sharded, lr=0.1) == pytest.approx(EXPECTED, rel=1e-5)
    assert losses(sharded, lr=0.1, train=False) == pytest.approx([EXPECTED[0]] * 2, rel=1e-5)
    assert losses(sharded, lr=0.2)[1] != pytest.approx(EXPECTED[1], rel=1e-5)
    assert sharded._cache_size() == 2 and set(sharded.plan.arguments) == {
        "state.w1", "state.w2", "batch.x", "batch.y", "lr"
    }  # fmt: skip


def test_constants_by_name_are_those_by_position():
    def scaled(state, batch, times):
        assert isinstance(times, int)
        return step(state, batch, 0.1 * times)

    for options in (dict(static_argnames=["times"]), dict(static_argnums=2)):
        sharded = soap_shard(scaled, **options, **FSDP)
        assert losses(sharded, times=1) == pytest.approx(EXPECTED, rel=1e-5)
        assert float(sharded(new_state(), BATCH, 1)[1]) == pytest.approx(EXPECTED[0], rel=1e-5)
        assert sharded._cache_size() == 1
    with pytest.raises(SoapjaxError, match="'nothing'"):
        soap_shard(scaled, static_argnames="nothing")
    with pytest.raises(SoapjaxError, match="static argument times: got not hashable"):
        soap_shard(scaled, static_argnames="times", **FSDP)(new_state(), BATCH, [1])


@pytest.mark.parametrize(
    "options, taken",
    [
        ({}, (True, False)),
        (dict(donate=False), (False, False)),
        (dict(donate_argnums=()), (False, False)),
        (dict(donate_argnums=1), (False, True)),
        (dict(donate_argnames=("state", "batch")), (True, True)),
    ],
)
def test_what_is_given_away(options, taken):
    sharded = soap_shard(both, **options, **FSDP).prepare(new_state(), BATCH)
    state, batch = sharded.shard(new_state()), sharded.shard(BATCH, argument=1)
    sharded(state, batch)
    assert tuple(all(x.is_deleted() for x in jax.tree.leaves(t)) for t in (state, batch)) == taken
    assert not any(x.is_deleted() for t, gone in zip((state, batch), taken, strict=True) for x in jax.tree.leaves(t) if not gone)


def both(state, batch):
    new, _ = step(state, batch)
    return new, jax.tree.map(lambda x: 2 * x, batch)


def test_a_used_up_state_is_named():
    """JAX itself ends the process on some backends."""
    state, _ = planned()(new_state(), BATCH)
    kept, _ = planned()(state, BATCH)
    with pytest.raises(SoapjaxError, match=r"argument state.w1, state.w2: got used up by an earlier call"):
        planned()(state, BATCH)
    with pytest.raises(SoapjaxError, match="argument state.w2"):
        planned()({"w1": kept["w1"], "w2": state["w2"]}, BATCH)
    evaluate = soap_shard(loss_of, **FSDP)
    evaluate(kept, BATCH)
    with pytest.raises(SoapjaxError, match="go on with the state that the last call returned"):
        evaluate(state, BATCH)


class Trainer:
    def __init__(self, lr):
        self.lr = lr

    @soap_shard(**FSDP)
    def step(self, state, batch):
        return step(state, batch, self.lr)

    @soap_shard(static_argnums=(0, 3), **FSDP)
    def times(self, state, batch, n):
        assert isinstance(n, int)
        return step(state, batch, self.lr * n)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rate:
    lr: jax.Array

    @soap_shard(**FSDP)
    def step(self, state, batch):
        return step(state, batch, self.lr)


def test_methods():
    trainer, other = Trainer(0.1), Trainer(0.0)
    assert losses(trainer.step) == pytest.approx(EXPECTED, rel=1e-5)
    assert losses(other.step) == pytest.approx([EXPECTED[0]] * 2, rel=1e-5)
    assert trainer.step is trainer.step and trainer.step._cache_size() == 1 and trainer.step.plan.num_devices == 8
    state, loss = trainer.times(new_state(), BATCH, 1)
    assert float(trainer.times(state, BATCH, 1)[1]) == pytest.approx(EXPECTED[1], rel=1e-5)
    # An instance that is a pytree is an argument: its arrays are no constants.
    assert losses(Rate(jnp.float32(0.1)).step) == pytest.approx(EXPECTED, rel=1e-5)
    assert losses(Rate(jnp.float32(0.0)).step)[1] == pytest.approx(EXPECTED[0], rel=1e-5)
    assert Rate.step._cache_size() == 1


def test_inside_other_transformations_before_and_after_planning():
    sharded = soap_shard(step, **FSDP)
    stacked = jax.tree.map(lambda x: np.stack([x, x]), BATCH)
    scanned = jax.jit(lambda state, batches: jax.lax.scan(sharded, state, batches)[1])
    assert [float(x) for x in scanned(new_state(), stacked)] == pytest.approx(EXPECTED, rel=1e-5)
    fresh = soap_shard(step, **FSDP)
    state, loss = jax.eval_shape(fresh, new_state(), BATCH)
    assert loss == jax.ShapeDtypeStruct((), jnp.float32) and state["w1"].shape == (8, 16)
    assert losses(fresh) == pytest.approx(EXPECTED, rel=1e-5)
    assert fresh._cache_size() == 1 and len(fresh._by_shapes) == 1


def test_the_rest_of_jits_methods():
    fresh = soap_shard(step, **FSDP)
    assert fresh.eval_shape(new_state(), BATCH)[1].shape == () and fresh._cache_size() == 0
    assert [a.shape for a in fresh.trace(new_state(), BATCH).jaxpr.in_avals] == [(8, 16), (16, 4), (16, 8), (16, 4)]
    losses(fresh)
    fresh.clear_cache()
    assert fresh._cache_size() == 0
    with pytest.raises(SoapjaxError, match="not planned yet"):
        fresh.plan  # noqa: B018


def test_some_of_the_devices():
    chosen = jax.devices()[2:5]
    sharded = soap_shard(step, devices=chosen, **FSDP)
    assert losses(sharded) == pytest.approx(EXPECTED, rel=1e-5)
    assert sharded.plan.num_devices == 3
    assert set(jax.tree.leaves(sharded(new_state(), BATCH)[0])[0].devices()) == set(chosen)


def test_a_state_that_comes_back_in_another_type_is_named():
    """Parameters made in bfloat16 that the update returns in float32: a given plan is for the first."""

    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: (jnp.tanh(x @ w.astype(x.dtype)) ** 2).mean())(w)
        return w.astype(jnp.float32) - 0.1 * grad.astype(jnp.float32), loss

    w, x = jnp.ones((16, 32), jnp.bfloat16), jnp.ones((64, 16), jnp.bfloat16)
    sharded = soap_shard(step, plan=soapjax.plan(step, w, x, topology="cpu8", **FSDP).plan)
    new, _ = sharded(w, x)
    said = r"argument w: got float32\[16, 32\]; expected bfloat16\[16, 32\], as in the call before"
    with pytest.raises(SoapjaxError, match=said):
        sharded(new, x)


@dataclasses.dataclass
class Config:
    """Has no hash: `nnx.jit` takes a module that keeps one."""

    width: int = 16


class Net(nnx.Module):
    def __init__(self, rngs):
        self.config = Config()
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(self.norm(nnx.relu(self.up(x)))))


def nnx_step(model, optimizer, metrics, batch):
    """As Flax's own guide has it: everything is changed in place."""
    loss, grads = nnx.value_and_grad(lambda m: ((m(batch["x"]) - batch["y"]) ** 2).mean())(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return loss


def nnx_objects():
    import optax

    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


def test_nnx_steps_change_their_objects_in_place():
    import optax  # noqa: F401

    found = {}
    for name, f in (("jit", nnx.jit(nnx_step)), ("soap_shard", soap_shard(nnx_step, **FSDP))):
        objects = nnx_objects()
        values = [float(f(*objects, BATCH)) for _ in range(3)]
        found[name] = values, float(objects[2].compute()["loss"]), nnx.state(objects[0], nnx.BatchStat)
    for a, b in zip(*found.values(), strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), a, b)
    assert f._cache_size() == 1 and f.plan.num_devices == 8
    kernel = objects[0].up.kernel
    assert kernel.get_value().sharding.spec == f.shardings()[0].up.kernel.get_value().spec


def test_an_nnx_step_may_not_make_variables():
    def grows(model, batch):
        model.extra = nnx.Param(jnp.zeros(3))
        return (model(batch["x"]) ** 2).mean()

    with pytest.raises(SoapjaxError, match="other variables than before"):
        soap_shard(grows, **FSDP)(Net(nnx.Rngs(0)), BATCH)


@pytest.mark.parametrize("options", [dict(planner="data_parallel"), FSDP, dict(microbatches=2, proposals=16)], ids=str)
def test_a_state_that_holds_one_array_twice(options):
    """As where a target network is set to the network: an array's memory cannot be given away twice."""

    def learn(state, batch):
        loss, grads = jax.value_and_grad(loss_of)(state["net"], batch)
        loss += ((state["target"]["w1"] - state["net"]["w1"]) ** 2).sum()
        return {"net": jax.tree.map(lambda p, g: p - 0.1 * g, state["net"], grads), "target": state["target"]}, loss

    def trained(f):
        state, found = {"net": new_state(), "target": new_state()}, []
        for _ in range(3):
            state, loss = f(state, BATCH)
            state = {"net": state["net"], "target": state["net"]}
            found.append(float(loss))
        return found

    np.testing.assert_allclose(trained(soap_shard(learn, **options)), trained(jax.jit(learn)), rtol=1e-5)
