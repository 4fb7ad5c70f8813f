"""How `--pipeline auto`, and plans that do not fit, divide the budget between one program and micro-batches."""

import jax
import numpy as np
import pytest
from problems import MODELS

from soapjax.errors import InfeasibleError, Problem, SoapjaxError
from soapjax.planning import choosing, entry
from soapjax.planning.pipelining import staging
from soapjax.planning.pipelining.pipelines import Beaten
from soapjax.planning.request import PlanRequest
from soapjax.search.stages.joint_search import DEFAULT_PROPOSALS
from soapjax.steps.sourced_models import abstract_model
from soapjax.strategy.plan import ModelSource

SECONDS = 40.0


@pytest.mark.parametrize("left_s, given_s", [(0.0, 20.0), (-4.0, 16.0), (-300.0, 10.0), (18.0, 38.0)])
def test_pipelines_get_what_one_program_leaves_of_the_seconds(left_s, given_s, monkeypatch):
    """At least half of their half; so all of planning ends in time, or a quarter of it later than one program."""
    module, sizes = MODELS["mlp"]
    made = abstract_model(ModelSource(path=f"models.{module}", settings=sizes))
    figures = entry.plan(made.step, *made.arguments, topology="cpu8", planner="fsdp").plan.provenance.baseline_figures["fsdp"]
    asked = []
    plan_one_program = entry.plan_one_program

    def of_one_program(request, fn, *args):
        asked.append(request.seconds)
        return plan_one_program(request.but(seconds=None), fn, *args)._replace(left_s=left_s)

    def of_pipelines(request, fn, *args, slower_than_s, **_):
        asked.append(request.seconds)
        raise Beaten("1f1b", figures)

    monkeypatch.setattr(entry, "plan_one_program", of_one_program)
    monkeypatch.setattr(staging, "plan_staged", of_pipelines)
    request = PlanRequest(topology="cpu8", planner="fsdp", pipeline="auto", seconds=SECONDS)
    found = choosing.as_asked(request, made.step, *made.arguments)
    assert asked == [SECONDS / 2, given_s]
    assert "no pipeline is faster" in found.plan.provenance.notes
    assert found.plan.provenance.baselines["pipeline 1f1b"] == figures.step_time_s


@pytest.fixture
def mlp():
    module, sizes = MODELS["mlp"]
    return abstract_model(ModelSource(path=f"models.{module}", settings=sizes))


def unfit(made):
    """What planning one program gives, as if it did not fit."""
    found = entry.plan_one_program(PlanRequest(topology="cpu8", proposals=50), made.step, *made.arguments)
    prediction = found.plan.prediction.model_copy(update={"feasible": False})
    return found._replace(plan=found.plan.model_copy(update={"prediction": prediction}))


@pytest.mark.parametrize("proposals, given", [(None, None), (100, 100), (4096, DEFAULT_PROPOSALS)])
def test_micro_batches_get_the_budget_of_pipelines(proposals, given, mlp, monkeypatch):
    found, asked = unfit(mlp), []
    monkeypatch.setattr(entry, "plan_one_program", lambda request, fn, *args, kept: found)
    plan_staged = staging.plan_staged

    def staged(request, fn, *args, **how):
        asked.append(request)
        return plan_staged(request.but(proposals=1), fn, *args, **how)

    monkeypatch.setattr(staging, "plan_staged", staged)
    request = PlanRequest(topology="cpu8", proposals=proposals, seconds=None if proposals else SECONDS)
    chosen = choosing.as_asked(request, mlp.step, *mlp.arguments)
    assert asked[0].proposals == given and (proposals is not None or SECONDS / 2 < asked[0].seconds <= SECONDS)
    assert {"one program (mcmc)", "fsdp"} <= set(chosen.plan.provenance.baseline_figures)
    assert chosen.plan.pipeline.num_microbatches > 1


def test_what_does_not_fit_as_compiled_gets_micro_batches_or_stays_an_error(mlp, monkeypatch):
    problem = Problem("the plan", "80 GB", "at most 60 GB", "use more devices")

    def infeasible(request, fn, *args, kept):
        raise InfeasibleError(problem)

    monkeypatch.setattr(entry, "plan_one_program", infeasible)
    request = PlanRequest(topology="cpu8", check="compile", proposals=1)
    chosen = choosing.as_asked(request, mlp.step, *mlp.arguments)
    assert any("does not fit as compiled: gradients are added up" in note for note in chosen.plan.provenance.notes)
    assert chosen.plan.provenance.compiled[-1].fits and chosen.program is not None

    def refused(*args, **how):
        raise SoapjaxError(problem._replace(place="stage 0"))

    monkeypatch.setattr(staging, "plan_staged", refused)
    with pytest.raises(InfeasibleError, match="the plan: got 80 GB"):
        choosing.as_asked(request, mlp.step, *mlp.arguments)


def test_an_interrupt_keeps_the_plan_that_does_not_fit(mlp, monkeypatch):
    found = unfit(mlp)

    def interrupted(*args, **how):
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "plan_one_program", lambda request, fn, *args, kept: found)
    monkeypatch.setattr(staging, "plan_staged", interrupted)
    chosen = choosing.as_asked(PlanRequest(topology="cpu8"), mlp.step, *mlp.arguments)
    assert chosen.stopped_by == "interrupted" and chosen.plan.pipeline is None


@pytest.mark.parametrize("batch", [1, 7])
def test_a_batch_that_has_no_parts_keeps_its_plan(batch, mlp, monkeypatch):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), mlp.arguments[1])
    found = entry.plan_one_program(PlanRequest(topology="cpu8", proposals=50), mlp.step, mlp.arguments[0], shapes)
    prediction = found.plan.prediction.model_copy(update={"feasible": False})
    found = found._replace(plan=found.plan.model_copy(update={"prediction": prediction}))
    monkeypatch.setattr(entry, "plan_one_program", lambda request, fn, *args, kept: found)
    chosen = choosing.as_asked(PlanRequest(topology="cpu8", proposals=1), mlp.step, mlp.arguments[0], shapes)
    if batch == 1:
        assert chosen.plan.pipeline is None and any("micro-batches do not help" in n for n in chosen.plan.provenance.notes)
    else:
        assert chosen.plan.pipeline is None or chosen.plan.pipeline.num_microbatches == 7


def test_pipelines_are_tried_where_one_program_does_not_fit_as_compiled(mlp, monkeypatch):
    problem = Problem("memory", "80 GB", "at most 60 GB", "use more devices")

    def infeasible(request, fn, *args):
        raise InfeasibleError(problem)

    monkeypatch.setattr(entry, "plan_one_program", infeasible)
    request = PlanRequest(topology="cpu8", pipeline="auto", check="compile", proposals=1)
    chosen = choosing.as_asked(request, mlp.step, *mlp.arguments)
    assert chosen.plan.pipeline is not None and "one program does not fit as compiled" in chosen.plan.provenance.notes

    def refused(*args, **how):
        raise SoapjaxError(problem._replace(place="stage 0"))

    monkeypatch.setattr(staging, "plan_staged", refused)
    with pytest.raises(InfeasibleError, match="memory: got 80 GB"):
        choosing.as_asked(request, mlp.step, *mlp.arguments)
    with pytest.raises(SoapjaxError, match="stage 0: got 80 GB"):
        choosing.as_asked(request.but(stages=2), mlp.step, *mlp.arguments)


def test_a_numpy_number_of_micro_batches_counts(mlp):
    request = PlanRequest(topology="cpu8", microbatches=np.int64(2), seed=np.int64(1), proposals=np.int32(1))
    plan = choosing.as_asked(request, mlp.step, *mlp.arguments).plan
    assert plan.pipeline.num_microbatches == 2 and plan.provenance.seed == 1
