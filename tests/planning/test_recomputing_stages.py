"""Stages recompute some operators where whole stages would be computed again, or none would fit."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import pytest
from problems import topology_of

from models import transformer_lm
from soapjax.errors import SoapjaxError
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace
from soapjax.planning.pipelining import recomputing_stages, staging
from soapjax.planning.pipelining.pipelines import Beaten, FoundPipeline, NoneFits
from soapjax.planning.plan_files import opened_alone, recost
from soapjax.planning.request import PlanRequest
from soapjax.strategy.plan import Plan

ASKED = dict(pipeline="1f1b", stages=2, microbatches=4, proposals=8)
USABLE_BYTES = 2_950_000_000  # of 4.1 GB that the step needs where all is kept


@pytest.fixture(scope="module")
def step():
    made = []
    sizes = dict(batch=64, seq=1024, width=1024, layers=4, heads=16, vocab=1024)
    arguments = jax.eval_shape(lambda: made.append(transformer_lm.make(**sizes)) or made[0][1:])
    return jax.jit(made[0][0]), *arguments  # traced once for each size of its batch, however often it is planned


@pytest.fixture(scope="module")
def plan_on(step):
    """Plans for a topology; the step and its graph are the same for all."""
    traced = trace(*step)
    given = staging.Traced(traced, build_graph(traced)[0])

    def plan(topology):
        return staging.plan_staged(PlanRequest(topology=topology, **ASKED), *step, traced=given)[:2]

    return plan


@pytest.fixture(scope="module")
def place():
    base = topology_of("a100x8")
    return dataclasses.replace(
        base, device=dataclasses.replace(base.device, memory_bytes=int(USABLE_BYTES / base.device.memory_fraction))
    )


@pytest.fixture(scope="module")
def planned(plan_on, place):
    return plan_on(place)


@pytest.mark.slow
def test_it_fits_and_is_faster_than_whole_stages_again(plan_on, place, planned, monkeypatch):
    plan, found = planned
    assert plan.recomputed and plan.prediction.feasible and "operators computed again" in found.notes[0]
    monkeypatch.setattr(staging, "recomputation_of", lambda *_: None)
    whole, _ = plan_on(place)
    assert not whole.recomputed and any(s.rematerialise for s in whole.pipeline.stages)
    assert plan.prediction.step_time_s < whole.prediction.step_time_s


def test_equal_blocks_recompute_alike(planned):
    """But for the last segment, whose results are there when the backward pass begins."""
    kinds = [{name.removeprefix(f"blk{k}/") for name in planned[0].recomputed if name.startswith(f"blk{k}/")} for k in range(3)]
    assert kinds[0] and all(kind == kinds[0] for kind in kinds)


def test_its_file_is_predicted_anew(step, planned):
    plan = Plan.loads(planned[0].dumps())
    assert plan.dumps() == planned[0].dumps()
    assert recost(plan, trace(*step)).prediction == plan.prediction == opened_alone(plan).plan.prediction


def test_where_all_fits_nothing_is_recomputed(plan_on):
    plan, found = plan_on(topology_of("a100x8"))
    assert not plan.recomputed and not found.is_bound


@pytest.mark.slow
def test_what_fits_block_by_block_alone_is_found(plan_on, place, monkeypatch):
    """A stage that computes all of its own again holds all of it at once."""
    less = dataclasses.replace(place.device, memory_bytes=int(0.58 * place.device.memory_bytes))
    tight = dataclasses.replace(place, device=less)
    plan, _ = plan_on(tight)
    assert plan.recomputed and plan.prediction.feasible
    monkeypatch.setattr(staging, "recomputation_of", lambda *_: None)
    with pytest.raises(SoapjaxError, match="the nearest pipeline"):
        plan_on(tight)


class Options:
    """A choice of two steps; a step is known by its name."""

    traced, graph = "as it is", None


def found_in(step, step_s, *, is_bound=True, stopped_by="proposals"):
    times = SimpleNamespace(timeline=SimpleNamespace(step_time_s=step_s))
    graph = SimpleNamespace(recomputed=())
    return FoundPipeline(graph, times, {"of": step}, (step,), 10, 0.0, stopped_by, is_bound=is_bound)


def best_by(monkeypatch, outcomes):
    """What is best where the searches of "as it is", "some" and "most" end so; and what they were asked for."""
    monkeypatch.setattr(recomputing_stages, "_steps", lambda *_: ["some", "most"])
    asked = []

    def find(step, seconds, if_bound, share, slower_than_s):
        asked.append((step, slower_than_s))
        if isinstance(outcomes[step], BaseException):
            raise outcomes[step]
        return outcomes[step]

    return recomputing_stages.best_of_steps(Options(), None, None, math.inf, find), asked


BEATEN = Beaten("1f1b", SimpleNamespace(step_time_s=5.0), is_bound=True)


def test_the_fastest_is_taken_and_further_ones_are_to_beat_it(monkeypatch):
    outcomes = {"as it is": found_in("as it is", 3.0), "some": found_in("some", 2.0), "most": BEATEN}
    best, asked = best_by(monkeypatch, outcomes)
    assert best.notes[0].startswith("some") and best.baselines == {"of": "as it is"} and best.num_proposals == 20
    assert asked == [("as it is", math.inf), ("some", 3.0), ("most", 2.0)]


def test_what_is_not_bound_by_memory_is_searched_once(monkeypatch):
    best, asked = best_by(monkeypatch, {"as it is": found_in("as it is", 3.0, is_bound=False)})
    assert best.notes == ("as it is",) and len(asked) == 1


@pytest.mark.parametrize("refused", [BEATEN, NoneFits([]), SoapjaxError([])])
def test_the_step_as_it_is_stays_where_others_come_to_nothing(monkeypatch, refused):
    best, _ = best_by(monkeypatch, {"as it is": found_in("as it is", 3.0), "some": refused, "most": refused})
    assert best.notes == ("as it is",)


@pytest.mark.parametrize("refused", [BEATEN, NoneFits([])])
def test_where_nothing_is_found_the_step_as_it_is_says_why(monkeypatch, refused):
    with pytest.raises(type(refused)) as e:
        best_by(monkeypatch, {"as it is": refused, "some": SoapjaxError([]), "most": BEATEN})
    assert e.value is refused
    best, _ = best_by(monkeypatch, {"as it is": refused, "some": SoapjaxError([]), "most": found_in("most", 4.0)})
    assert best.notes[0].startswith("most")


def test_an_interrupt_keeps_the_best_so_far(monkeypatch):
    kept = found_in("as it is", 3.0)
    best, asked = best_by(monkeypatch, {"as it is": kept, "some": KeyboardInterrupt()})
    assert best.notes == ("as it is",) and best.stopped_by == "interrupted" and len(asked) == 2
    best, asked = best_by(monkeypatch, {"as it is": kept, "some": found_in("some", 2.0, stopped_by="interrupted")})
    assert best.notes[0].startswith("some") and best.stopped_by == "interrupted" and len(asked) == 2
    with pytest.raises(KeyboardInterrupt):
        best_by(monkeypatch, {"as it is": BEATEN, "some": KeyboardInterrupt()})
