"""Stages recompute some operators where whole stages would be computed again, or none would fit."""

import dataclasses

import jax
import pytest
from problems import topology_of

import soapjax
from models import transformer_lm
from soapjax.errors import SoapjaxError
from soapjax.graph.trace.tracing import trace
from soapjax.planning import staging
from soapjax.planning.plan_files import opened_alone, recost
from soapjax.strategy.plan import Plan

ASKED = dict(pipeline="1f1b", stages=2, microbatches=4, proposals=20)
USABLE_BYTES = 3_700_000_000  # 70 % of what the step needs where all is kept


@pytest.fixture(scope="module")
def step():
    made = []
    sizes = dict(batch=64, seq=1024, width=1024, layers=6, heads=16, vocab=1024)
    arguments = jax.eval_shape(lambda: made.append(transformer_lm.make(**sizes)) or made[0][1:])
    return made[0][0], *arguments


@pytest.fixture(scope="module")
def place():
    base = topology_of("a100x8")
    return dataclasses.replace(
        base, device=dataclasses.replace(base.device, memory_bytes=int(USABLE_BYTES / base.device.memory_fraction))
    )


@pytest.fixture(scope="module")
def planned(step, place):
    return soapjax.plan_pipeline(*step, topology=place, **ASKED)


def test_it_fits_and_is_faster_than_whole_stages_again(step, place, planned, monkeypatch):
    plan, found = planned
    assert plan.recomputed and plan.prediction.feasible and "operators computed again" in found.notes[0]
    monkeypatch.setattr(staging, "recomputation_of", lambda *_: None)
    whole, _ = soapjax.plan_pipeline(*step, topology=place, **ASKED)
    assert not whole.recomputed and any(s.rematerialise for s in whole.pipeline.stages)
    assert plan.prediction.step_time_s < whole.prediction.step_time_s


def test_equal_blocks_recompute_alike(planned):
    """But for the last segment, whose results are there when the backward pass begins."""
    kinds = [{name.removeprefix(f"blk{k}/") for name in planned[0].recomputed if name.startswith(f"blk{k}/")} for k in range(5)]
    assert kinds[0] and all(kind == kinds[0] for kind in kinds)


def test_its_file_is_predicted_anew(step, planned):
    plan = Plan.loads(planned[0].dumps())
    assert plan.dumps() == planned[0].dumps()
    assert recost(plan, trace(*step)).prediction == plan.prediction == opened_alone(plan).plan.prediction


def test_where_all_fits_nothing_is_recomputed(step):
    plan, found = soapjax.plan_pipeline(*step, topology=topology_of("a100x8"), **ASKED)
    assert not plan.recomputed and not found.is_bound


def test_what_fits_block_by_block_alone_is_found(step, place, monkeypatch):
    """A stage that computes all of its own again holds all of it at once."""
    tight = dataclasses.replace(place, device=dataclasses.replace(place.device, memory_bytes=int(0.72 * place.device.memory_bytes)))
    plan, _ = soapjax.plan_pipeline(*step, topology=tight, **ASKED)
    assert plan.recomputed and plan.prediction.feasible
    monkeypatch.setattr(staging, "recomputation_of", lambda *_: None)
    with pytest.raises(SoapjaxError, match="the nearest pipeline"):
        soapjax.plan_pipeline(*step, topology=tight, **ASKED)
