"""Plans of steps whose dims are all of one size compute what one device does (equal_sizes.py)."""

import numpy as np
import pytest
from equal_sizes import OPERATIONS, language_model, step_of
from planned import Case, data_parallel, leaf_errors, plain_leaves, rotated

from soapjax import soap_shard

DELICATE = ["set", "max_into", "unsort", "dslice", "ragged2", "moe_cap", "gram3", "scan_ys"]  # what was wrong, or nearly


def check(case, seed=0):
    for strategy in (data_parallel(case.space), rotated(case.space, 0), case.space.random(np.random.default_rng(seed))):
        case.check(strategy, 1e-8)


@pytest.mark.parametrize("name", DELICATE)
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


@pytest.mark.parametrize("schedule", ["zb-h1", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_a_language_model_in_stages(schedule):
    """What an earlier stage reads through a barrier, which stands between layers that are computed again, is not put off."""
    step, args = language_model()
    options = dict(topology="cpu8", pipeline=schedule, stages=2, microbatches=4, proposals=4, donate=False)
    assert max(leaf_errors(plain_leaves(soap_shard(step, **options)(*args)), plain_leaves(step(*args)))) < 1e-3  # in float32
