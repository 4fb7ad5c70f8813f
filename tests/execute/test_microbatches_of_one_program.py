"""Micro-batches without a pipeline: where memory asks for them, or by number; what comes out is the step's."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from families import sampled
from problems import MODELS, topology_of

import soapjax
from models import transformer_lm
from soapjax import soap_shard
from soapjax.errors import SoapjaxError
from soapjax.planning import choosing
from soapjax.planning.request import PlanRequest

SIZES = MODELS["lm"][1] | dict(batch=32)


@pytest.fixture(scope="module")
def step():
    return transformer_lm.make(**SIZES)


@pytest.fixture(scope="module")
def expected(step):
    fn, *arguments = step
    return jax.jit(fn)(*arguments)


@pytest.fixture(scope="module")
def too_small(step):
    """Eight devices, each with four fifths of the memory that the leanest plan of one program takes."""
    fn, *arguments = step
    place = topology_of("cpu8")
    free = dataclasses.replace(place, device=dataclasses.replace(place.device, memory_bytes=2**40))
    found = soapjax.plan(fn, *arguments, topology=free, planner="fsdp")
    least = min(b.best.memory_bytes for b in found.baselines.values())
    return dataclasses.replace(place, device=dataclasses.replace(place.device, memory_bytes=int(0.8 * least)))


def same(one, other):
    """The loss, and Adam's first moments: a tenth of the gradients."""
    found = [jax.tree.leaves([optax.tree.get(state["opt_state"], "mu"), metrics]) for state, metrics in (one, other)]
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)


def test_a_plan_that_does_not_fit_adds_up_micro_batches(step, expected, too_small):
    fn, *arguments = step
    chosen = choosing.as_asked(PlanRequest(topology=too_small, proposals=300), fn, *arguments)
    plan = chosen.plan
    assert plan.prediction.feasible and len(plan.pipeline.stages) == 1 and plan.pipeline.num_microbatches > 1
    (note,) = (n for n in plan.provenance.notes if "does not fit" in n and "micro-batches" in n)
    assert f"added up over {plan.pipeline.num_microbatches} micro-batches" in note
    assert not plan.provenance.baseline_figures["one program (mcmc)"].feasible
    same(soap_shard(fn, plan=plan)(*arguments), expected)


def test_nothing_is_cut_where_the_whole_batch_fits_or_a_baseline_is_asked_for(step, too_small):
    fn, *arguments = step
    fits = choosing.as_asked(PlanRequest(topology="cpu8", proposals=100), fn, *arguments)
    named = choosing.as_asked(PlanRequest(topology=too_small, planner="fsdp"), fn, *arguments)
    assert fits.plan.pipeline is None and named.plan.pipeline is None and not named.plan.prediction.feasible


def test_a_step_that_does_not_add_up_keeps_its_plan_and_says_why(too_small):
    def fn(w, x):
        """Pairs of samples: of parts of the batch there are fewer."""
        value, grads = jax.value_and_grad(lambda w: ((x @ w) @ (x @ w).T).mean())(w)
        return w - 0.1 * grads, value

    shapes = jax.ShapeDtypeStruct((64, 64), np.float32), jax.ShapeDtypeStruct((4096, 64), np.float32)
    small = dataclasses.replace(too_small, device=dataclasses.replace(too_small.device, memory_bytes=2**20))
    plan = choosing.as_asked(PlanRequest(topology=small, proposals=50), fn, *shapes).plan
    assert plan.pipeline is None and not plan.prediction.feasible
    assert any(n.startswith("micro-batches do not help: ") for n in plan.provenance.notes)


@pytest.mark.slow
def test_a_number_is_kept_to(step, expected):
    fn, *arguments = step
    same(soap_shard(fn, topology="cpu8", microbatches=4, proposals=100)(*arguments), expected)
    plan = choosing.as_asked(PlanRequest(topology="cpu8", microbatches=4, proposals=100), fn, *arguments).plan
    assert plan.pipeline.num_microbatches == 4 and len(plan.pipeline.stages) == 1
    with pytest.raises(SoapjaxError, match='stages: got given without a pipeline.*pipeline="1f1b"'):
        choosing.as_asked(PlanRequest(topology="cpu8", stages=2), fn, *arguments)


@pytest.mark.parametrize("planner, stages", sampled([("tensor_parallel", 2), ("data_parallel", 2), ("fsdp", 1)], 3))
def test_a_baseline_says_how_stages_are_split(step, expected, planner, stages):
    fn, *arguments = step
    how = dict(pipeline="1f1b", stages=stages) if stages > 1 else {}
    plan = choosing.as_asked(PlanRequest(topology="cpu8", planner=planner, microbatches=2, **how), fn, *arguments).plan
    assert planner in plan.provenance.planner and plan.provenance.num_proposals == 0
    parts = [part for stage in plan.pipeline.stages for name, part in plan.operators.items() if name in stage.operators]
    dims = {dim for part in parts for dim in part.axes.values()}
    assert (dims <= {"sample", "replicate"}) == (planner != "tensor_parallel")
    stored = {part.storage for part in parts}
    assert (stored == {"as used"}) == (planner == "data_parallel") or planner == "tensor_parallel"
    same(soap_shard(fn, plan=plan)(*arguments), expected)
