"""What is recomputed makes a faster strategy fit, is no more than that needs, and is a plan's per operator."""

import dataclasses
import json
import math
import time

import jax
import pytest
from problems import topology_of

import soapjax
from models import llama
from soapjax.errors import SoapjaxError
from soapjax.graph.recompute import Recomputation
from soapjax.graph.trace.tracing import trace
from soapjax.planning.entry import planning_problem
from soapjax.planning.plan_files import opened_alone, recost
from soapjax.search.chain.record import TIME_DECIDED
from soapjax.search.front import Front
from soapjax.search.planners import BASELINES
from soapjax.search.problem import Budget, SearchResult
from soapjax.search.recomputation import Recomputing, may_recompute, searched
from soapjax.strategy.configs import Strategy
from soapjax.strategy.plan import Plan

SIZES = dict(batch=32, seq=64, width=64, layers=3, heads=4, vocab=64)


@pytest.fixture(scope="module")
def step():
    made = []
    arguments = jax.eval_shape(lambda: made.append(llama.make(**SIZES)) or made[0][1:])
    return made[0][0], tuple(arguments)


@pytest.fixture(scope="module")
def traced(step):
    fn, arguments = step
    return trace(fn, *arguments)


def problem_with(traced, usable_bytes, recomputed=()):
    """On eight A100s with so much memory."""
    place = topology_of("a100x8")
    device = dataclasses.replace(place.device, memory_bytes=int(usable_bytes / place.device.memory_fraction))
    return planning_problem(Recomputation(traced).step(recomputed), dataclasses.replace(place, device=device))


def baselines_of(problem):
    return {name: run(jax.random.key(0), problem, Budget()) for name, run in BASELINES.items()}


@pytest.fixture(scope="module")
def kept(traced):
    """The baselines where memory has no limit, and the bytes that the one that needs least needs."""
    found = baselines_of(problem_with(traced, 2**40))
    return found, min(b.best.memory_bytes for b in found.values())


def choice_of(traced, usable_bytes):
    problem, front = problem_with(traced, usable_bytes), Front(math.inf, Strategy.key)
    baselines_of(dataclasses.replace(problem, front=front))
    options = Recomputation(traced)
    return Recomputing(problem, options, lambda names: problem_with(traced, usable_bytes, names), front.points()), problem


def test_what_fits_as_it_is_is_kept(traced, kept):
    choice, problem = choice_of(traced, 2**40)
    assert choice.start(min(b.best.cost for b in baselines_of(problem).values())) is None
    assert choice.fitted(kept[0]["fsdp"].best.strategy).recomputed == frozenset()


def test_as_much_is_recomputed_as_a_strategy_needs(traced, kept):
    """More where memory is less; none where nothing is enough; and the prediction is that of the step with it."""
    found, least = kept
    strategy = found["fsdp"].best.strategy
    counts = []
    for share in (0.9, 0.6):
        choice, problem = choice_of(traced, share * least)
        assert not any(b.best.is_feasible for b in baselines_of(problem).values())
        fitted = choice.fitted(strategy)
        assert fitted.best.is_feasible and fitted.best.memory_bytes <= share * least
        (again,) = problem_with(traced, share * least, fitted.recomputed).evaluate([strategy])
        assert again == fitted.best or again.step_time_s == fitted.best.step_time_s
        assert again.step_time_s >= found["fsdp"].best.step_time_s
        everything = choice.of(Recomputation(traced).offered).evaluate([strategy])[0]
        assert fitted.best.step_time_s <= everything.step_time_s
        counts.append(len(fitted.recomputed))
    assert 0 < counts[0] <= counts[1]
    choice, _ = choice_of(traced, 0.01 * least)
    assert choice.fitted(strategy) is None and choice.start(math.inf) is None


def test_no_problem_is_made_that_would_be_late(traced, kept):
    """But where nothing fits as it is, something that does is found, however late."""
    choice, _ = choice_of(traced, 0.6 * kept[1])
    choice.making_s, late = 1e9, time.monotonic() + 1e6
    assert choice.start(1e9, late) is None and len(choice.made) == 1
    found = choice.start(math.inf, late)
    assert found.best.is_feasible
    made = len(choice.made)
    result = SearchResult(found.best, 1, 0.0, "proposals")
    assert choice.again(result, found.problem, late) == (result, found.problem) and len(choice.made) == made
    fewer, _ = choice_of(traced, 0.6 * kept[1])
    fewer.start(math.inf)
    assert made <= len(fewer.made)


def test_dear_operators_come_last(traced, kept):
    """Seconds per byte rise along the ranking, group by group."""
    choice, _ = choice_of(traced, 2**40)
    ranking = choice.ranking(kept[0]["fsdp"].best.strategy)
    half = len(ranking.names) // 2
    first = ranking.seconds[half] / ranking.saved_bytes[half]
    rest = (ranking.seconds[-1] - ranking.seconds[half]) / (ranking.saved_bytes[-1] - ranking.saved_bytes[half])
    assert first < rest and set(ranking.names) < Recomputation(traced).offered


@pytest.fixture(scope="module")
def planned(step, kept):
    fn, arguments = step
    place = topology_of("a100x8")
    device = dataclasses.replace(place.device, memory_bytes=int(0.8 * kept[1] / place.device.memory_fraction))
    return soapjax.plan(fn, *arguments, topology=dataclasses.replace(place, device=device), planner="optcnn")


def test_a_plan_says_what_it_recomputes_and_is_read_again(planned, tmp_path):
    plan = planned.plan
    assert plan.prediction.feasible and plan.recomputed and not any(b.best.is_feasible for b in planned.baselines.values())
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert {name for name, part in data["operators"].items() if part.get("recompute")} == plan.recomputed
    assert all(part["recompute"] for part in data["operators"].values() if "recompute" in part)
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and opened_alone(loaded).plan.prediction == plan.prediction
    assert recost(loaded, planned.step).prediction == plan.prediction


def test_an_edited_choice_counts_with_its_step_and_is_refused_without(planned):
    plan, name = planned.plan, min(planned.plan.recomputed)
    operators = plan.operators | {name: plan.operators[name].model_copy(update={"recompute": False})}
    edited = plan.model_copy(update={"operators": operators})
    assert recost(edited, planned.step).prediction.memory_bytes_per_device > plan.prediction.memory_bytes_per_device
    with pytest.raises(SoapjaxError, match=rf"operators.{name}.recompute: got false; expected true.*--model"):
        opened_alone(edited)


def test_it_is_not_offered_where_it_would_not_hold(traced, kept):
    cpu = planning_problem(traced, topology_of("cpu8"))
    gpu = problem_with(traced, 2**40)
    found = baselines_of(gpu)
    assert may_recompute(gpu, "mcmc", found) and not may_recompute(gpu, "fsdp", found) and not may_recompute(cpu, "mcmc", found)
    assert not may_recompute(gpu.keeping_front(), "mcmc", found)


class Scripted:
    """A planner that takes what it is told to, and notes what it was given."""

    def __init__(self, *stops, late_gain=math.inf):
        self.stops, self.asked, self.late_gain = list(stops), [], late_gain

    def __call__(self, key, problem, budget):
        self.asked.append(budget)
        stop = self.stops.pop(0)
        if stop is KeyboardInterrupt:
            raise stop
        best = min(problem.evaluate(list(budget.baselines)), key=lambda e: e.rank)
        count, notes = budget.num_proposals, (TIME_DECIDED,) if stop == "seconds" else ()
        history = (0.1 * count, 0.0, best.step_time_s * (1 + self.late_gain)), (0.9 * count, 0.1, best.step_time_s)
        return SearchResult(best, count, 0.1, stop, history, notes)


class Choice:
    """A choice that may pay, and gives what it is told to."""

    def __init__(self, given):
        self.given, self.limits = given, []

    def paying(self, limit_s):
        return [limit_s]

    def start(self, limit_s, until):
        self.limits.append(limit_s)
        if self.given is KeyboardInterrupt:
            raise self.given
        return self.given

    def again(self, result, problem, until):
        return result, problem


def searched_by(planner, choice, traced, *, goes_on=True, seconds=None):
    problem = problem_with(traced, 2**40)
    found = baselines_of(problem)
    budget = Budget(num_proposals=100, seconds=seconds, baselines=tuple(b.best.strategy for b in found.values()))
    return searched(planner, jax.random.key(0), problem, budget, found, choice, goes_on=goes_on), found


def test_the_step_as_it_is_gets_the_other_half_where_recomputing_does_not_pay(traced):
    planner, choice = Scripted("seconds", "converged"), Choice(None)
    (result, _), found = searched_by(planner, choice, traced)
    assert [b.num_proposals for b in planner.asked] == [50, 50] and result.num_proposals == 100
    assert choice.limits == [min(b.best.cost for b in found.values())], "recomputing is to beat what was found"
    assert result.stopped_by == "converged" and result.notes == (TIME_DECIDED,)
    assert len(planner.asked[1].baselines) == len(planner.asked[0].baselines) + 1


@pytest.mark.parametrize("late_gain, seconds, stops", [(0.001, None, 1), (0.02, None, 2), (0.001, 1000.0, 2)])
def test_proposals_are_not_spent_to_the_end_where_later_ones_gained_nothing(late_gain, seconds, stops, traced):
    planner = Scripted("proposals", "proposals", late_gain=late_gain)
    (result, _), _ = searched_by(planner, Choice(None), traced, seconds=seconds)
    assert len(planner.asked) == stops and result.num_proposals == 50 * stops
    assert result.stopped_by == ("converged" if stops == 1 else "proposals")


def test_a_planner_that_does_not_go_on_gets_its_whole_budget(traced):
    planner = Scripted("complete")
    searched_by(planner, Choice(None), traced, goes_on=False)
    assert [b.num_proposals for b in planner.asked] == [100]


@pytest.mark.parametrize("stops, given", [(("proposals", KeyboardInterrupt), None), (("proposals",), KeyboardInterrupt),
                                          (("proposals", "interrupted"), None), (("interrupted",), None)])  # fmt: skip
def test_an_interrupt_keeps_what_the_first_half_found(stops, given, traced):
    (result, _), _ = searched_by(Scripted(*stops), Choice(given), traced)
    assert result.stopped_by == "interrupted" and result.num_proposals >= 50


def test_an_interrupt_before_anything_was_found_is_the_callers(traced):
    with pytest.raises(KeyboardInterrupt):
        searched_by(Scripted(KeyboardInterrupt), Choice(None), traced)
