"""Of strategies equal within the error the one that sends less is taken, and never one slower than a baseline."""

import dataclasses

import jax
import pytest
from problems import case

from soapjax.search.baselines import BASELINES
from soapjax.search.plainest import EQUAL, candidates_of, sends_less
from soapjax.search.problem import Budget, PlanningProblem, SearchResult


@pytest.fixture(scope="module")
def problem():
    found = case("lm", "a100x8")
    return PlanningProblem(found.graph, found.space, found.simulator)


@pytest.fixture(scope="module")
def baselines(problem):
    return [run(jax.random.key(0), problem, Budget()).best for run in BASELINES.values()]


def result_of(problem, strategy, **others):
    (best,) = problem.evaluate([strategy])
    return SearchResult(best, 1, 0.0, "proposals", **others)


def test_a_strategy_with_conversions_that_buy_nothing_loses_them(problem, baselines):
    """The best of the baselines, one operator of it made worse by less than the error."""
    start = min(baselines, key=lambda e: e.cost).strategy
    worse = None
    for n in range(problem.graph.num_operators):
        for axes in problem.space.configs(n):
            changed = dataclasses.replace(start, axes=start.axes.copy())
            changed.axes[n] = axes
            before, after = candidates_of(problem, [start, changed])
            step_s = before.evaluation.step_time_s
            if 0 < after.sent_bytes - before.sent_bytes and abs(after.evaluation.step_time_s / step_s - 1) < EQUAL / 2:
                worse = changed
                break
        if worse is not None:
            break
    assert worse is not None, "no such operator: choose another problem"
    result, notes = sends_less(problem, result_of(problem, worse), baselines)
    before, after = candidates_of(problem, [worse, result.best.strategy])
    assert after.sends_less_than(before) and len(notes) == 1 and "the one that sends least" in notes[0]
    assert after.evaluation.step_time_s <= before.evaluation.step_time_s * (1 + EQUAL)
    assert result.candidates[0] is not None and result.candidates[0].strategy is worse


def test_nothing_is_taken_that_is_slower_than_a_baseline(problem, baselines):
    for e in baselines:
        result, _ = sends_less(problem, result_of(problem, e.strategy), baselines)
        assert result.best.is_feasible
        for other in baselines:
            if other.step_time_s >= e.step_time_s:
                assert result.best.step_time_s <= other.step_time_s


def test_work_is_not_repeated_to_send_nothing(problem, baselines):
    """On a machine that takes long to start anything, the whole step on every device is as fast, and sends nothing."""
    found = case("lm", "a100x8")
    device = dataclasses.replace(found.topology.device, launch_s=1.0)
    slow = PlanningProblem.make(found.graph, found.space, dataclasses.replace(found.topology, device=device))
    start = result_of(slow, baselines[0].strategy)
    replicated, before = candidates_of(slow, [found.replicated(), start.best.strategy])
    assert replicated.evaluation.step_time_s < before.evaluation.step_time_s * (1 + EQUAL), "not launch-bound"
    assert replicated.sends_less_than(before) and replicated.split_flops_share == 0
    result, _ = sends_less(slow, start, slow.evaluate([e.strategy for e in baselines]))
    (after,) = candidates_of(slow, [result.best.strategy])
    assert after.split_flops_share >= before.split_flops_share - EQUAL


def test_the_same_again_gives_the_same(problem, baselines):
    strategy = case("lm", "a100x8").strategies(3, 1)[0]
    first, again = (sends_less(problem, result_of(problem, strategy), baselines)[0].best for _ in range(2))
    assert first.strategy.key() == again.strategy.key() and problem.space.is_valid(first.strategy)


def test_what_does_not_fit_stays(problem, baselines):
    result = result_of(problem, baselines[0].strategy)
    result = result._replace(best=result.best._replace(is_feasible=False))
    assert sends_less(problem, result, baselines) == (result, ())
