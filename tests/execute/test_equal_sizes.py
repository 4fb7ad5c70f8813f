"""Plans of steps whose dims are all of one size compute what one device does (equal_sizes.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equal_sizes import OPERATIONS, language_model, step_of
from families import sampled
from planned import Case, data_parallel, leaf_errors, plain_leaves, rotated

from soapjax import soap_shard

DELICATE = ["set", "max_into", "unsort", "dslice", "ragged2", "moe_cap", "gram3", "scan_ys", "rfft"]  # what was wrong, or nearly


def check(case, seed=0):
    for strategy in (data_parallel(case.space), rotated(case.space, 0), case.space.random(np.random.default_rng(seed))):
        case.check(strategy, 1e-8)


@pytest.mark.parametrize("name", sampled(DELICATE, 2))
def test_delicate_operations(name):
    check(Case(*step_of(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in OPERATIONS if n not in DELICATE])
def test_every_operation(name):
    check(Case(*step_of(name)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_two_operations(seed):
    rng = np.random.default_rng(seed)
    check(Case(*step_of(*rng.choice(list(OPERATIONS), 2))), seed)


@pytest.mark.slow
def test_a_language_model():
    check(Case(*language_model()))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_a_language_model_in_stages(schedule):
    """What an earlier stage reads through a barrier, which stands between layers that are computed again, is not put off."""
    step, args = language_model()
    options = dict(topology="cpu8", pipeline=schedule, stages=2, microbatches=4, proposals=4, donate=False)
    found, wanted = (plain_leaves(run(*args)) for run in (soap_shard(step, **options), jax.jit(step)))
    assert max(leaf_errors(found, wanted)) < 1e-3  # in float32


@pytest.mark.parametrize("microbatches", [2, 4])
def test_a_micro_batch_as_large_as_a_width(microbatches):
    """Of a loss that is evaluated with the new parameters these are no cotangents, although they may have the shape of one."""

    def step(params, x):
        loss_fn = lambda p: ((jnp.tanh(x @ p["w"]) @ p["v"] - 1) ** 2).mean()  # noqa: E731
        loss, grads = jax.value_and_grad(loss_fn)(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, {"loss": loss, "after": loss_fn(params)}

    rng = np.random.default_rng(0)
    x, w, v = (np.float32(rng.standard_normal(shape)) for shape in ((64, 32), (32, 64), (64, 1)))
    params = {"w": 0.1 * w, "v": 0.1 * v}
    found = soap_shard(step, topology="cpu8", proposals=8, microbatches=microbatches)(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, jax.jit(step)(params, x))
