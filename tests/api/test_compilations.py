"""As many compilations as plain `jax.jit`, call by call: whatever comes back in another guise than it went in."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

from soapjax import soap_shard
from soapjax.execute.transfers.arrivals import place_all

pytestmark = pytest.mark.usefixtures("no_search")
TX = optax.adam(1e-2)
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.standard_normal((16, 8)).astype(np.float32), "y": RNG.standard_normal((16, 4)).astype(np.float32)}


@contextlib.contextmanager
def compilations():
    """Gives a list that grows by the name of every program that XLA compiles."""
    found = []

    def listen(event, duration, fun_name="", **_):
        if event == "/jax/core/compile/backend_compile_duration" and fun_name:
            found.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def apply(params, x):
    return jnp.tanh(x @ params["w1"]) @ params["w2"]


def params():
    return {"w1": 0.1 * jnp.ones((8, 16)), "w2": 0.1 * jnp.ones((16, 4))}


def updated(params, opt_state, batch):
    loss, grads = jax.value_and_grad(lambda p: ((apply(p, batch["x"]) - batch["y"]) ** 2).mean())(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def train_state():
    """Flax's: its step count begins as a Python int."""

    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda p: ((state.apply_fn(p, batch["x"]) - batch["y"]) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads), loss

    def run(f):
        state = TrainState.create(apply_fn=apply, params=params(), tx=TX)
        while True:
            state, loss = f(state, BATCH)
            yield loss

    return step, run


def keys(make):
    """A key that goes in and comes back."""

    def step(params, opt_state, key, batch):
        key, own = jax.random.split(key)
        noisy = batch | {"x": batch["x"] + 0.1 * jax.random.normal(own, batch["x"].shape)}
        params, opt_state, loss = updated(params, opt_state, noisy)
        return params, opt_state, key, loss

    def run(f):
        p = params()
        state = p, TX.init(p), make(0)
        while True:
            *state, loss = f(*state, BATCH)
            yield loss

    return step, run


def state_without_parameters():
    """As haiku's: statistics and a count, beside the parameters."""

    def step(params, statistics, opt_state, batch):
        params, opt_state, loss = updated(params, opt_state, batch)
        mean = 0.9 * statistics["mean"] + 0.1 * batch["x"].mean(0)
        return params, {"mean": mean, "count": statistics["count"] + 1}, opt_state, loss

    def run(f):
        p = params()
        state = p, {"mean": jnp.zeros(8), "count": 0}, TX.init(p)
        while True:
            *state, loss = f(*state, BATCH)
            yield loss

    return step, run


def loss_first():
    def step(state, batch):
        *state, loss = updated(*state, batch)
        return loss, tuple(state)

    def run(f):
        p = params()
        state = p, TX.init(p)
        while True:
            loss, state = f(state, BATCH)
            yield loss

    return step, run


def scalars():
    """Python numbers: another one at every call, and one that comes back as an array."""

    def step(state, batch, rate, count):
        *state, loss = updated(*state, batch)
        return tuple(state), loss * rate, count + 1

    def run(f):
        p = params()
        state, count = (p, TX.init(p)), 0
        for k in range(9):
            state, loss, count = f(state, BATCH, 0.1 * (k + 1), count)
            yield loss

    return step, run


CASES = {
    "train state": train_state, "new keys": lambda: keys(jax.random.key), "old keys": lambda: keys(jax.random.PRNGKey),
    "state without parameters": state_without_parameters, "loss first": loss_first, "scalars": scalars,
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_as_many_compilations_as_jit_call_by_call(case):
    step, run = CASES[case]()
    counts, losses = {}, {}
    sharded = soap_shard(step, planner="fsdp", proposals=1)
    for name, f in (("soap_shard", sharded), ("jit", jax.jit(step))):
        losses[name], counts[name] = [], []
        with compilations() as compiled:
            for loss, _ in zip(run(f), range(4), strict=False):
                losses[name].append(float(loss))
                counts[name].append(sum(n in ("jit(_run)", "jit(step)") for n in compiled))
                others = [n for n in compiled if n not in ("jit(_run)", "jit(step)")]
                if len(losses[name]) > 1:  # the first call plans, and planning compiles programs of its own
                    assert not others
                compiled.clear()
    assert counts["soap_shard"] == counts["jit"] == [1, 0, 0, 0]
    assert sharded._cache_size() == 1
    np.testing.assert_allclose(losses["soap_shard"], losses["jit"], rtol=1e-5)


def test_types_that_come_back_are_those_of_jit():
    """Weak ones too: what the caller makes of them is compiled for one type."""

    def step(state, rate, table):
        steps, first = state
        last, _ = jax.lax.scan(lambda c, x: (c + 1, x), 0, table)
        return (steps + 1, first * 2.0), rate, 5, last, jnp.sum(table) * rate, 2.5 + jnp.float32(1)

    args = (0, np.float32(1.5)), 0.1, np.ones((8, 4), np.float32)
    found, expected = soap_shard(step, planner="fsdp")(*args), jax.jit(step)(*args)
    types = [[(x.dtype, x.aval.weak_type) for x in jax.tree.leaves(t)] for t in (found, expected)]
    assert types[0] == types[1] and {weak for _, weak in types[1]} == {True, False}
    jax.tree.map(np.testing.assert_allclose, found, expected)


def test_arguments_are_laid_out_in_one_transfer_that_compiles_nothing():
    step, _ = train_state()
    state = TrainState.create(apply_fn=apply, params=params(), tx=TX)
    sharded = soap_shard(step, planner="fsdp").prepare(state, BATCH)
    with compilations() as compiled:
        placed = sharded.shard(state)
        sharded(state, BATCH)
    assert compiled == ["jit(_run)"]
    for x, s in zip(jax.tree.leaves(placed), jax.tree.leaves(sharded.shardings()[0]), strict=True):
        assert x.committed and x.sharding.is_equivalent_to(s, x.ndim)


@pytest.mark.parametrize("planner", ["fsdp", "data_parallel"])
def test_a_state_from_elsewhere_stays_the_callers(planner):
    """Also where the planned layout is whole on every device, which could share the caller's memory; and NumPy's own arrays."""
    step, _ = loss_first()
    sharded = soap_shard(step, planner=planner)
    p = params()
    on_device, on_host = (p, TX.init(p)), jax.tree.map(np.array, (p, TX.init(p)))
    before = jax.tree.map(np.array, on_host)
    for state in (on_device, on_host, on_device):
        _, new = sharded(state, BATCH)
        sharded(new, BATCH)  # uses its memory up, and writes over it
        jax.tree.map(np.testing.assert_array_equal, state, before)
    assert not any(x.is_deleted() for x in jax.tree.leaves(on_device))
    assert all(x.is_deleted() for x in jax.tree.leaves(new))


def test_keys_are_laid_out_without_a_program():
    """One key, and one per example, as nnx and equinox keep them in states; both stay the caller's."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    key = jax.random.key(1)
    keys = jax.random.split(key, (16, 2))
    shardings = [NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("d"))]
    jax.block_until_ready((keys, key))
    with compilations() as found:
        placed = place_all([key, keys], shardings)
    assert not found
    for x, given, sharding in zip(placed, (key, keys), shardings, strict=True):
        assert x.committed and x.dtype == given.dtype and x.sharding.is_equivalent_to(sharding, x.ndim)
        np.testing.assert_array_equal(jax.random.key_data(x), jax.random.key_data(given))
        x.delete()
        assert not given.is_deleted()
