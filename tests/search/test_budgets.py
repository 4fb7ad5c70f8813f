"""Budgets: the same seed and proposals give the same file, whoever plans; seconds end every planner."""

import dataclasses
import time

import jax
import pytest
from problems import case

from soapjax.planning import entry
from soapjax.search.chain.compiling import COMPILING, OF_A_DESCENT, chain_programs
from soapjax.search.chain.engine import Engine, engine_of
from soapjax.search.chain.mcmc_planner import mcmc
from soapjax.search.experts.baselines import BASELINES
from soapjax.search.planners import PLACEMENT_PLANNERS, PLANNERS
from soapjax.search.problem import Budget, PlanningProblem
from soapjax.strategy.plan import Plan


def step(weights, x):
    loss, gradients = jax.value_and_grad(lambda w: ((x @ w[0]) @ w[1]).mean())(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], loss


def planned(name):
    shapes = [jax.ShapeDtypeStruct((32, 32), "float32")] * 2, jax.ShapeDtypeStruct((64, 32), "float32")
    return entry.plan(step, *shapes, topology="a100x8", planner=name, proposals=200, seed=3).plan


@pytest.mark.parametrize("name", sorted(set(PLANNERS) - set(PLACEMENT_PLANNERS)))
def test_the_same_seed_and_proposals_give_the_same_file(name, monkeypatch):
    first = planned(name).dumps()
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: 7 * clock() + 1e5)  # a machine of another speed
    again = planned(name)
    assert again.dumps() == first and "search_s" not in first
    assert Plan.loads(first) == again


def test_a_file_of_an_older_version_says_how_long_it_took():
    text = planned("data_parallel").dumps().replace('"provenance": {', '"provenance": {\n  "search_s": 1.5,')
    assert Plan.loads(text).provenance.search_s == 1.5


@pytest.fixture(scope="module")
def problem():
    found = case("lm", "a100x8")
    return PlanningProblem(found.graph, found.space, found.simulator)


class Ticking:
    """A clock that stands still until it is read for the `after`th time, and is far ahead from then on."""

    def __init__(self, after):
        self.after, self.read, self.begin = after, 0, time.monotonic()

    def __call__(self):
        self.read += 1
        return self.begin if self.read <= self.after else self.begin + 1e6


@pytest.mark.parametrize("name", ["optcnn", "ilp", "exhaustive", "mcmc_paper"])
@pytest.mark.parametrize("after", [1, 3, 12, 60])
def test_when_time_ends_a_planner_returns_what_it_has(problem, name, after, monkeypatch):
    """Whenever that is: while costs are tabulated, between two solutions, or in the middle of a proof."""
    fresh = dataclasses.replace(problem)  # whose relaxation nobody has made yet
    known = [run(jax.random.key(0), problem, Budget()).best for run in BASELINES.values()]
    clock = Ticking(after)
    monkeypatch.setattr(time, "monotonic", clock)
    found = PLANNERS[name](jax.random.key(0), fresh, Budget(seconds=5.0, baselines=tuple(e.strategy for e in known)))
    assert clock.read < after + 40  # it looks again soon, and then does little more
    assert found.best.is_feasible and problem.space.is_valid(found.best.strategy)
    if found.stopped_by == "seconds" and name != "mcmc_paper":
        assert found.best.cost <= min(e.cost for e in known) * (1 + 1e-6) or found.num_proposals < 3


@pytest.mark.slow
def test_a_search_too_short_to_compile_chains_compiles_none(problem, monkeypatch):
    """It goes on with descents and perturbations to its end; so does one of few proposals."""
    prepared = []
    monkeypatch.setattr(Engine, "prepare", prepared.append)
    problem.simulator.prepare()
    monkeypatch.setattr(Engine, "is_at_hand", lambda self: False)  # as on a machine that is new to the programs
    short = mcmc(jax.random.key(0), problem, Budget(seconds=2.0))
    assert not prepared and short.stopped_by == "seconds" and short.num_proposals > 100
    start = min(run(jax.random.key(0), problem, Budget()).best.cost for run in BASELINES.values())
    assert short.best.is_feasible and short.best.cost < start
    few = mcmc(jax.random.key(0), problem, Budget(seconds=20.0, num_proposals=300))
    assert not prepared and few.num_proposals <= 300 and few.best.cost < start


@pytest.mark.slow
def test_chains_are_compiled_beside_descents_or_after_them(problem, monkeypatch):
    """At once where a number of proposals ends the search; where time does, they would keep it from being good soon."""
    told, prepared = [], []
    monkeypatch.setattr(Engine, "prepare", lambda self: prepared.append(len(told)))
    monkeypatch.setattr(Engine, "is_at_hand", lambda self: False)

    def progress(done, best, elapsed_s):
        told.append(done)
        if prepared:
            raise KeyboardInterrupt

    for budget, is_late in ((Budget(num_proposals=10**6), False), (Budget(seconds=1e9), True)):
        told.clear(), prepared.clear()
        found = mcmc(jax.random.key(0), problem, budget._replace(progress=progress))
        assert found.stopped_by == "interrupted" and len(prepared) == 1
        assert (prepared[0] > 10) == is_late


@pytest.mark.parametrize("budget, latest", [
    (Budget(), 0.0), (Budget(num_proposals=10**5, seconds=1.0), 0.0), (Budget(seconds=1e9), 0.7), (Budget(seconds=40.0), 0.45),
    (Budget(seconds=15.0), None),
])  # fmt: skip
def test_chains_are_compiled_at_the_latest_when_they_still_have_their_share(problem, budget, latest, monkeypatch):
    monkeypatch.setattr(Engine, "is_at_hand", lambda self: False)
    problem.simulator.prepare()
    monkeypatch.setattr(problem.simulator, "compile_s", 10.0 / COMPILING)
    programs = chain_programs(engine_of(problem), budget)
    assert programs is latest is None or programs.latest == pytest.approx(latest)
    monkeypatch.setattr(Engine, "is_at_hand", lambda self: True)
    assert latest is not None or chain_programs(engine_of(problem), budget).latest == 0.0
    assert chain_programs(engine_of(problem), budget._replace(num_proposals=OF_A_DESCENT - 1)) is None
    assert chain_programs(engine_of(problem), budget._replace(num_proposals=OF_A_DESCENT)).latest == 0.0
