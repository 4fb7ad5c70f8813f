"""How `--pipeline auto` divides the seconds between one program and pipelines."""

import pytest
from problems import MODELS

from soapjax.planning import choosing, entry
from soapjax.planning.pipelines import Beaten
from soapjax.planning.request import PlanRequest
from soapjax.sourced_models import abstract_model
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
    monkeypatch.setattr(entry, "plan_staged", of_pipelines)
    request = PlanRequest(topology="cpu8", planner="fsdp", pipeline="auto", seconds=SECONDS)
    found = choosing.as_asked(request, made.step, *made.arguments)
    assert asked == [SECONDS / 2, given_s]
    assert "no pipeline is faster" in found.plan.provenance.notes
    assert found.plan.provenance.baselines["pipeline 1f1b"] == figures.step_time_s
