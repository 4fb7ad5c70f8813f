"""Objectives: the formula, what is wrong with one, planners that search by it, and the front of what they saw."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from families import family
from test_planners import make
from test_stage_search import graph_of, topology_of

import soapjax
from soapjax.costs.itemize import sent_items
from soapjax.errors import SoapjaxError
from soapjax.planning.pipelining.pipelines import times_as_it_runs
from soapjax.search.chain.mcmc_planner import mcmc
from soapjax.search.experts.placement import placed
from soapjax.search.front import Front, joined
from soapjax.search.objective import TIME, Objective, objective_of
from soapjax.search.planners import PLACEMENT_PLANNERS, PLANNERS, get_planner
from soapjax.search.problem import Budget, PlanningProblem
from soapjax.search.proofs.branch_and_bound import exhaustive
from soapjax.search.stages.choices import Choice
from soapjax.search.stages.joint_search import search_stages
from soapjax.search.stages.stage_problem import StageProblem
from soapjax.simulate.simulator import Scores
from soapjax.strategy.configs import Strategy
from soapjax.strategy.layout import PINNED

KEY = jax.random.key(0)


def scores_of(rows):
    """Of rows (seconds, bytes sent, memory)."""
    x = np.array(rows, np.float64).reshape(-1, 3)
    return Scores(x[:, 0], x[:, 2], np.zeros(len(x), int), x[:, 1])


def under(problem: PlanningProblem, objective: Objective) -> PlanningProblem:
    return dataclasses.replace(problem, objective=objective)


def everything(problem: PlanningProblem) -> list[Strategy]:
    """Every strategy without pins."""
    space, options = problem.without_pins().space, []
    for n in range(problem.graph.num_operators):
        storages = range(len(space.storages)) if space.owns_parameters[n] else (0,)
        options.append([(axes, s) for axes in space.configs(n) for s in storages])
    return [
        Strategy(np.array([a for a, _ in picked], np.int8), np.array([s for _, s in picked], np.int8))
        for picked in itertools.product(*options)
    ]


def test_mdpe_is_the_formula():
    rng = np.random.default_rng(0)
    alpha, beta, gamma = 0.5, 0.3, 0.2
    usable, most, memory = 50.0, 8.0, 20.0
    objective = Objective("mdpe", max_bytes=most, max_memory=memory, weights=(alpha, beta, gamma))
    rows = np.exp(rng.uniform(0, 5, (200, 3)))
    cost, reward = objective.cost(scores_of(rows), usable), objective.reward(scores_of(rows), usable)
    for (f, c, m), found, r in zip(rows.tolist(), cost, reward, strict=True):
        inside = alpha * f + beta * (f * c / most if c > most else 0) + gamma * (f * m / memory if m > memory else 0)
        if m > usable:
            inside *= 2 + 8 * (m / usable - 1)
        assert found == pytest.approx(inside / alpha) and r == pytest.approx(-math.log(inside))
        assert found >= f, "so that bounds of time hold"
    assert TIME.cost(scores_of([(3.0, 1e9, 10.0), (3.0, 0.0, 60.0)]), usable).tolist() == pytest.approx([3.0, 3 * (2 + 8 * 0.2)])


def test_what_meets_the_limits_goes_first_and_then_what_violates_them_least():
    problem = under(make(2), Objective("mdpe", max_bytes=10.0, max_memory=100.0, weights=(0.5, 0.5, 0.0)))
    rows = [(1.0, 40.0, 50.0), (9.0, 10.0, 100.0), (2.0, 11.0, 50.0), (0.1, 1.0, 1e30), (8.0, 5.0, 101.0)]
    plans = [make(2).space.random(np.random.default_rng(i)) for i in range(5)]
    found = problem.judged(plans, scores_of(rows))
    assert [e.is_feasible for e in found] == [False, True, False, False, False]
    order = sorted(range(5), key=lambda i: found[i].rank)
    assert order == [1, 4, 2, 0, 3], "a limit without a weight counts least, what does not fit the device comes last"


WRONG = [
    (dict(name="mdpo"), "objective: got 'mdpo'; expected time or mdpe. Remedy: did you mean 'mdpe'"),
    (dict(name=3), "objective: got 3"),
    (dict(name="mdpe"), "mdpe without a limit"),
    (dict(name="time", max_memory="10GB"), "time with a limit"),
    (dict(max_bytes=-1.0), "max_bytes: got -1.0; expected a positive size"),
    (dict(max_bytes="8 apples"), "max_bytes"),
    (dict(max_memory=0), "max_memory: got 0"),
    (dict(max_memory=math.nan), "max_memory: got nan"),
    (dict(max_memory=None), "max_memory: got None"),
    (dict(weights=(0.5, 0.3, 0.3)), "which sum to 1.1"),
    (dict(weights=(1.2, -0.1, -0.1)), "three numbers from 0 to 1"),
    (dict(weights=(0.0, 0.5, 0.5)), "of time (above 0)"),
    (dict(weights=(0.5, 0.5)), "three numbers"),
    (dict(weights=(math.nan, 0.5, 0.5)), "three numbers"),
    (dict(weights="0.5,0.3,0.2"), "three numbers"),
    (dict(weights=(0.5, True, -0.5)), "three numbers"),
]


@pytest.mark.parametrize("given, words", WRONG)
def test_a_wrong_objective_is_refused(given, words):
    with pytest.raises(SoapjaxError) as e:
        Objective(**{"name": "mdpe", **given} if "name" in given else {"name": "mdpe", "max_bytes": 1.0, **given})
    assert words in str(e.value) and len(e.value.problems) == 1


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(SoapjaxError) as e:
        Objective("mdpo", max_bytes=-1, max_memory="x", weights=(1, 1, 1))
    assert [p.place for p in e.value.problems] == ["objective", "max_bytes", "max_memory", "weights"]
    found, problems = objective_of("time", "8GB", None, "0.5,0.5,0")
    assert [p.place for p in problems] == ["--max-bytes", "--weights"] and found is TIME
    found, problems = objective_of("mdpe", "8GB", "1.5 GiB", "0.6, 0.3, 0.1")
    assert not problems and found == Objective("mdpe", 8e9, 1.5 * 2**30, (0.6, 0.3, 0.1))
    assert Objective("mdpe", max_bytes="8GB", max_memory="40GB").max_memory == 40e9


@pytest.mark.parametrize("space", family(["soap", "paper"], slow=["soap"]))
def test_exhaustive_finds_the_fastest_within_the_limits(space):
    """By brute force, in both spaces of plans without pins; where nothing meets them, the least violating one."""
    plain = make(2, space=space)
    every = plain.evaluate(everything(plain))
    sent, memory = (sorted({getattr(e, k) for e in every}) for k in ("sent_bytes", "memory_bytes"))
    limits = [(sent[len(sent) // 8], memory[len(memory) // 3]), (sent[0] + 1.0, memory[0] - 1.0)]
    for max_bytes, max_memory in limits:
        problem = under(plain, Objective("mdpe", max_bytes=max_bytes, max_memory=max_memory))
        wanted = min(problem.evaluate([e.strategy for e in every]), key=lambda e: e.rank)
        found = exhaustive(KEY, problem, Budget())
        assert found.stopped_by == "complete" and found.best.rank == pytest.approx(wanted.rank, rel=2e-5)
        assert ("without pins" in found.notes[0]) == (space == "paper")
        assert ("no plan" in found.notes[0]) == (not wanted.is_feasible)


@pytest.mark.slow
def test_the_chain_finds_what_meets_the_limits():
    plain = make(2)
    every = plain.evaluate(everything(plain))
    fastest = min(every, key=lambda e: e.rank)
    max_bytes = 0.75 * fastest.sent_bytes
    problem = under(plain, Objective("mdpe", max_bytes=max_bytes)).keeping_front()
    wanted = min(e.cost for e in every if e.sent_bytes <= max_bytes)
    found = mcmc(KEY, problem, Budget(num_proposals=2048))
    assert found.best.is_feasible and found.best.sent_bytes <= max_bytes
    assert found.best.cost == pytest.approx(wanted, rel=1e-6) and found.best.cost > fastest.cost
    assert problem.best_seen().rank <= found.best.rank


NAMES = [n for n in PLANNERS if n != "exhaustive"]


@pytest.mark.parametrize("name", family(NAMES, slow=[n for n in NAMES if n not in ("optcnn", "model_parallel")]))
def test_every_planner_judges_by_the_objective(name):
    """What it returns is the best of all that it evaluated."""
    problem = make(4, space="paper" if name in PLACEMENT_PLANNERS else "soap")
    found = get_planner(name)(KEY, problem, Budget(num_proposals=64))
    objective = Objective("mdpe", max_bytes=max(0.6 * found.best.sent_bytes, 1.0), max_memory=1.2 * found.best.memory_bytes)
    limited = under(problem, objective).keeping_front()
    best = get_planner(name)(KEY, limited, Budget(num_proposals=64)).best
    own = limited.evaluate([best.strategy])[0]
    assert own.rank == pytest.approx(best.rank, rel=1e-6)
    if name != "reinforce":  # which takes the lowest cost, as it learns from costs; `soapjax.plan` takes the best that was seen
        assert best.rank <= limited.best_seen().rank


def test_a_front_is_all_that_nothing_beats_in_any_order():
    rng = np.random.default_rng(1)
    rows = rng.integers(1, 9, (300, 3)).astype(float)
    plans = rng.permutation(300).tolist()
    wanted = {
        (tuple(r), min(p for q, p in zip(rows.tolist(), plans, strict=True) if q == r.tolist()))
        for r in rows if not any((q <= r).all() and (q < r).any() for q in rows if q[2] <= 7) and r[2] <= 7
    }  # fmt: skip
    fronts = []
    for _ in range(3):
        front, order = Front(usable_bytes=7.0, key=lambda p: p), rng.permutation(300)
        for some in np.array_split(order, 11):
            front.offer(scores_of(rows[some]), [plans[i] for i in some])
        fronts.append(front.points())
    assert fronts[0] == fronts[1] == fronts[2] and list(fronts[0]) == sorted(fronts[0])
    assert {((p.step_time_s, p.sent_bytes, p.memory_bytes), p.plan) for p in fronts[0]} == wanted
    assert joined(fronts[0][::2], fronts[0][1::2], fronts[0]) == fronts[0]


def test_the_device_that_sends_most_by_adding_up_messages():
    """Of placements on single devices every message is its sender's."""
    problem = make(4, space="paper")
    simulator, rng = problem.simulator, np.random.default_rng(2)
    seen = 0
    for _ in range(6):
        strategy = placed(problem, rng.integers(0, 4, problem.graph.num_operators))
        costs, total = simulator.costs(strategy), np.zeros(problem.space.mesh.axis_sizes)
        for item in sent_items(simulator.tables, costs.layouts, strategy):
            assert max(item.source) <= PINNED
            total[tuple(PINNED - s for s in item.source)] += sum(item.bytes.values())
            seen += 1
        assert float(costs.sent_bytes) == pytest.approx(total.max(), rel=1e-5)
        assert costs.sent_bytes <= costs.bytes_by_collective.sum() * (1 + 1e-6)
    assert seen


def test_what_a_pipeline_sends_is_what_its_plan_lists():
    problem = StageProblem(graph_of("lm"), topology_of("cpu8"), objective=Objective("mdpe", max_bytes=1e4))
    n = len(problem.forward)
    for schedule, bounds, inner, again in (("gpipe", (0, n // 2, n), 0, False), ("1f1b", (0, n // 3, n), 1, True)):
        choice = Choice(schedule, 4, bounds, (4, 4), (inner,) * 2, (again,) * 2)
        priced = problem.price(choice)
        times = times_as_it_runs(problem, priced)
        assert priced.sent_bytes == pytest.approx(times.peak_sent_bytes, rel=1e-3) and priced.sent_bytes > 0
        assert not priced.is_feasible and priced.cost > times.timeline.step_time_s


def test_a_search_of_pipelines_keeps_to_the_limits():
    graph, topology = graph_of("mlp"), topology_of("2x2")
    asked = dict(num_stages=2, num_microbatches=2, schedules=("gpipe",), keeps_front=True)
    plain = StageProblem(graph, topology, **asked)
    best = search_stages(plain, num_proposals=30).best
    by_hand = [
        p for p in plain._priced.values()
        if all(plain.loads.fabric(*p.choice.group(g)[:2], 2).choices[i].is_by_hand for g, i in enumerate(p.choice.inner))
    ]  # fmt: skip
    fastest = min(by_hand, key=lambda p: p.cost)
    low, high = min(p.sent_bytes for p in by_hand), fastest.sent_bytes
    assert low < high
    limited = StageProblem(graph, topology, objective=Objective("mdpe", max_bytes=(low + high) / 2), **asked)
    found = search_stages(limited, num_proposals=30).best
    assert found.is_feasible and found.sent_bytes <= (low + high) / 2 and found.timeline.step_time_s >= best.timeline.step_time_s
    within = [p.step_time_s for p in limited.front.points() if p.sent_bytes <= (low + high) / 2]
    assert found.timeline.step_time_s <= min(within) * (1 + 1e-6)  # scores are float32


def test_plan_takes_an_objective():
    args = {"a": jax.ShapeDtypeStruct((32, 64), "float32")}, jax.ShapeDtypeStruct((32, 32), "float32")

    def step(p, x):
        loss, grads = jax.value_and_grad(lambda p: ((x @ p["a"]) ** 2).mean())(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), loss

    plain = soapjax.plan(step, *args, topology="cpu8", planner="data_parallel", pareto=True)
    assert plan_of(plain).peak_sent_bytes == sum(plan_of(plain).bytes_by_collective.values()) and len(plain.front) >= 1
    limited = soapjax.plan(step, *args, topology="cpu8", planner="data_parallel", objective=Objective("mdpe", max_bytes=1.0))
    notes = limited.plan.provenance.notes
    assert limited.plan.provenance.objective.startswith("mdpe: at most 1 B sent") and not limited.front
    # Nothing that data parallelism evaluates meets it, and of the baselines the one that sends least is returned.
    assert any("violates them least" in n for n in notes)
    assert plan_of(limited).peak_sent_bytes == min(f.peak_sent_bytes for f in limited.plan.provenance.baseline_figures.values())
    with pytest.raises(SoapjaxError, match=r"seed: got -1(.|\n)*objective: got mdpe without a limit"):
        soapjax.plan(step, *args, topology="cpu8", objective="mdpe", seed=-1)


def plan_of(planned):
    return planned.plan.prediction
