"""What is compiled while a step is traced is what its search needs."""

import jax
import pytest
from problems import case_with

import soapjax
from soapjax.errors import SoapjaxError
from soapjax.planning import compile_ahead
from soapjax.planning.compile_ahead import Ahead, stand_in
from soapjax.search.chain.engine import Engine
from soapjax.search.problem import PlanningProblem
from soapjax.simulate.simulator import Simulator


@pytest.mark.parametrize("model, topology", [("mlp", "cpu8"), ("lm", "2x4"), ("resnet", "p100x16"), ("rnnlm", "a100x64")])
def test_small_models_need_the_programs_of_the_stand_in(model, topology):
    case = case_with(model, topology)
    problem, usual = PlanningProblem(case.graph, case.space, Simulator(case.tables)), stand_in(case.topology)
    assert problem.simulator.evaluator.program is usual.simulator.evaluator.program
    assert problem.simulator._walk[1] is usual.simulator._walk[1]
    assert Engine(problem).programs is Engine(usual).programs


def test_what_is_begun_for_another_size_or_no_problem_at_all_goes_no_further():
    case = case_with("mlp", "cpu8")
    ahead = Ahead(case.topology)
    ahead.done.result()
    problem = PlanningProblem(case.graph, case.space, Simulator(case.tables))
    ahead.found(problem)
    assert not ahead.is_in_vain.is_set()
    ahead.usual = ahead.usual._replace(operators=1)
    ahead.found(problem)
    assert ahead.is_in_vain.is_set()


def test_a_step_that_cannot_be_traced_is_searched_by_nobody(monkeypatch):
    made = []
    monkeypatch.setattr(compile_ahead, "Ahead", lambda topology: made.append(Ahead(topology)) or made[-1])
    with pytest.raises(SoapjaxError):
        soapjax.plan(lambda w: w.no_such_thing, jax.ShapeDtypeStruct((4,), "float32"), topology="cpu8")
    assert made[0].is_in_vain.is_set()
