"""The Markov chain against enumeration and against a plain one, and its moves' symmetry."""

import dataclasses
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import soapjax
from soapjax.planning.entry import planning_problem
from soapjax.search.chain import descents, later_start
from soapjax.search.chain.block_steps import LANES, UNIFORMS, Walker, draws, exchange
from soapjax.search.chain.engine import Engine
from soapjax.search.chain.mcmc_planner import NUM_CHAINS, WITHOUT_PINS, mcmc
from soapjax.search.chain.moves import NUM_UNIFORMS, State, leap, move_tables
from soapjax.search.chain.record import TIME_DECIDED
from soapjax.search.experts.baselines import BASELINES
from soapjax.search.problem import Budget
from soapjax.search.relaxation.coarse_optimum import additive_start
from soapjax.strategy.configs import Strategy
from soapjax.topology import load_topology


def problem_of(fn, *shapes, devices: int = 2):
    topology = load_topology("cpu8")
    level = dataclasses.replace(topology.levels[-1], size=devices)
    topology = dataclasses.replace(topology, levels=(*topology.levels[:-1], level))
    arguments = [jax.ShapeDtypeStruct(s, "float32") for s in shapes]
    return planning_problem(soapjax.trace(fn, *arguments), topology)


@pytest.fixture(scope="module")
def tiny():
    """Two dots on two devices: few enough strategies to enumerate."""
    return problem_of(lambda w, v, x: jnp.tanh(x @ w) @ v, (64, 128), (128, 32), (16, 64))


def traced_step():
    def train(params, x):
        loss = lambda p: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)  # noqa: E731
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = {"a": jax.ShapeDtypeStruct((64, 256), "float32"), "b": jax.ShapeDtypeStruct((256, 64), "float32")}
    return soapjax.trace(train, params, jax.ShapeDtypeStruct((64, 64), "float32"))


@pytest.fixture(scope="module")
def step_problem():
    return planning_problem(traced_step(), load_topology("cpu8"))


def enumerate_states(problem) -> list[State]:
    """Every point of the raw product space (those whose degrees do not divide included: the chain never enters them)."""
    allowed = problem.space.allowed
    options = [
        [np.array([v], np.int8) for v in range(-1, allowed.shape[2] - 1) if allowed[n, 0, v + 1]] for n in range(allowed.shape[0])
    ]
    states = [[]]
    for choices in options:
        states = [[*s, c] for s in states for c in choices]
    return [State(np.stack(s), np.zeros(len(s), np.int8)) for s in states]


def test_leaps_are_symmetric(tiny):
    """The density of going from a to b equals that of going back, estimated over many draws for every pair of states."""
    states = enumerate_states(tiny)
    index = {s.axes.tobytes(): i for i, s in enumerate(states)}
    moves = move_tables(tiny.space, tiny.graph.num_operators, tiny.space.num_axes, tiny.space.allowed.shape[2] - 1, 16)
    propose = jax.jit(jax.vmap(lambda u, s: leap(moves, u, s, pins=False), (0, None)))
    moves = jax.device_put(moves)
    draws = 20_000
    density = np.zeros((len(states), len(states)))
    for i, s in enumerate(states):
        uniforms = jax.random.uniform(jax.random.key(i), (draws, NUM_UNIFORMS))
        proposed = np.asarray(propose(uniforms, State(jnp.asarray(s.axes), jnp.asarray(s.storage))).axes)
        assert all(x.tobytes() in index for x in proposed)
        density[i] = np.bincount([index[x.tobytes()] for x in proposed], minlength=len(states)) / draws
    error = np.abs(density - density.T)
    assert error.max() < 6 * np.sqrt(0.25 / draws)
    assert density.max() > 0.01


def test_chain_has_the_boltzmann_distribution(tiny):
    """Detailed balance by enumeration: visit frequencies of blocks and leaps against exp(-beta cost), normalised."""
    states = enumerate_states(tiny)
    strategies = [Strategy(s.axes, s.storage) for s in states]
    cost = np.array([e.cost for e in tiny.evaluate(strategies)])
    reference_s = float(cost.min())
    beta = 2.0 / ((cost.max() - cost.min()) / reference_s)
    wanted = np.exp(-beta * (cost - cost.min()) / reference_s)
    wanted /= wanted.sum()
    assert wanted.max() > 1.5 * wanted.min(), "the costs differ enough for the test to say anything"
    engine = Engine(tiny, reference_s)
    index = {s.axes.tobytes(): i for i, s in enumerate(states)}
    counts = np.zeros(len(states))
    walker, rng = engine.walker(strategies[0], cost[0] / reference_s), np.random.default_rng(3)
    for k in range(800):
        walker = engine.walk(rng, beta, walker, 3)
        if k % 2:
            walker = engine.leap(rng, beta, walker)
        now = index[engine.strategy(State(walker.at.base.axes, walker.at.base.storage)).axes.tobytes()]
        counts[now] += k >= 20
        assert float(walker.cost) == pytest.approx(cost[now] / reference_s, rel=1e-5)
    found = counts / counts.sum()
    assert np.abs(found - wanted).sum() / 2 < 0.08, (found, wanted)


def test_chain_is_the_plain_one(step_problem):
    """A block is so many Metropolis-Hastings steps, one strategy after the other in full: the same chain from the same draws."""
    base = BASELINES["data_parallel"](jax.random.key(0), step_problem, Budget()).best
    engine = Engine(step_problem, base.cost)
    walker = engine.walker(base.strategy, 1.0)
    beta, rng = 20.0, np.random.default_rng(7)
    uniforms = np.random.default_rng(7).random((12, UNIFORMS), np.float32)
    axes, storage, now, accepted, taken = base.strategy.axes.copy(), base.strategy.storage.copy(), 1.0, 0, 0
    num_ops, num_axes = axes.shape
    drawing = jax.jit(draws)
    for block in range(12):
        padded = walker.at.base.axes.at[:num_ops, :num_axes].set(axes), walker.at.base.storage.at[:num_ops].set(storage)
        drawn = jax.tree.map(np.asarray, drawing(engine.moves, uniforms[block], *padded))
        n, proposals = int(drawn.operator), []
        for a, s in zip(drawn.axes.T[: engine.steps], drawn.storage, strict=False):
            proposed = Strategy(axes.copy(), storage.copy())
            proposed.axes[n], proposed.storage[n] = a[:num_axes], s
            proposals.append(proposed)
        same = len({c: None for c in drawn.config[: engine.steps].tolist()})
        assert same == len({p.key() for p in proposals}) <= LANES, "one number for each distinct candidate"
        for e, u in zip(step_problem.evaluate(proposals), drawn.uniforms, strict=False):
            taken += 1
            if u < np.exp(min(beta * (now - e.cost / base.cost), 0.0)):
                axes, storage, now = e.strategy.axes, e.strategy.storage, e.cost / base.cost
                accepted += 1
    walker = engine.walk(rng, beta, walker, 12)
    found = engine.strategy(State(walker.at.base.axes, walker.at.base.storage))
    np.testing.assert_array_equal(found.axes, axes)
    np.testing.assert_array_equal(found.storage, storage)
    assert int(walker.accepted) == accepted > 0 and int(walker.steps) == taken
    assert float(walker.cost) == pytest.approx(now, rel=1e-5)
    best = engine.strategy(walker.best)
    assert step_problem.evaluate([best])[0].cost / base.cost == pytest.approx(float(walker.best_cost), rel=1e-5)


def test_exchange_is_metropolis():
    """Swaps of neighbours happen with min(1, exp((b_i - b_j)(c_i - c_j)))."""
    betas = np.array([10.0, 1.0])
    cold, hot = (Walker(None, cost, 0, 0, cost, None) for cost in (1.0, 1.1))
    swapped = sum(exchange(np.random.default_rng(k), [cold, hot], betas, 0)[0] is hot for k in range(400))
    assert abs(swapped / 400 - np.exp(-9 * 0.1)) < 0.1
    assert exchange(np.random.default_rng(0), [hot, cold], betas, 0) == [cold, hot], "what is better always gets colder"


def test_never_worse_than_baselines_and_deterministic(step_problem, monkeypatch):
    monkeypatch.setattr("soapjax.search.chain.compiling.OF_A_DESCENT", 0)
    monkeypatch.setattr("soapjax.search.chain.descents.MAX_FAILED", 1)  # the chains have their turn
    walks = []
    walk = Engine.walk
    monkeypatch.setattr(Engine, "walk", lambda self, *args: walks.append(args[-1]) or walk(self, *args))
    key = jax.random.key(11)
    first = mcmc(key, step_problem, Budget(num_proposals=2048))
    assert len(walks) >= NUM_CHAINS and sum(walks) > 0
    again = mcmc(key, step_problem, Budget(num_proposals=2048))
    assert first.best.strategy.key() == again.best.strategy.key()
    assert first.num_proposals == again.num_proposals <= 2048
    assert first.stopped_by in ("proposals", "converged")
    assert mcmc(key, step_problem, Budget(num_proposals=37)).num_proposals == 37
    for planner in BASELINES.values():
        found = planner(key, step_problem, Budget()).best
        assert first.best.cost <= found.cost * (1 + 1e-6)
    assert step_problem.space.is_valid(first.best.strategy)


def test_a_space_with_pins_is_searched_without_them_first():
    """So that the larger space has the better plan, as it should."""
    traced, topology = traced_step(), load_topology("cpu8")
    pinned = planning_problem(traced, topology, space="paper")
    plain = planning_problem(traced, topology)
    rng = np.random.default_rng(0)
    some = [plain.space.random(rng) for _ in range(8)]
    np.testing.assert_allclose([e.cost for e in pinned.evaluate(some)], [e.cost for e in plain.evaluate(some)], rtol=1e-5)
    key = jax.random.key(5)
    found = mcmc(key, pinned, Budget(num_proposals=1000))
    assert found.num_proposals <= 1000 and found.stopped_by in ("proposals", "converged")
    assert found.best.cost <= mcmc(key, plain, Budget(num_proposals=int(1000 * WITHOUT_PINS))).best.cost * (1 + 1e-5)


def test_time_stops_the_same_sequence(step_problem, monkeypatch):
    """What a run ended by time found is what its number of proposals finds, where time decided nothing before its end.

    It decides, and notes tell, whether the additive optimum is a start, and when perturbations had their share: neither is so here.
    """
    monkeypatch.setattr("soapjax.search.chain.descents.OF_SECONDS", (math.inf, math.inf))
    monkeypatch.setattr("soapjax.search.chain.mcmc_planner.OF_A_DESCENT", 0)
    monkeypatch.setattr("soapjax.search.chain.compiling.OF_A_DESCENT", 0)
    Engine(step_problem).prepare()
    key = jax.random.key(2)
    timed = mcmc(key, step_problem, Budget(seconds=1.0, random_start=True))
    assert timed.stopped_by in ("seconds", "converged") and not timed.notes
    replayed = mcmc(key, step_problem, Budget(num_proposals=timed.num_proposals, random_start=True))
    assert timed.best.strategy.key() == replayed.best.strategy.key()


@pytest.mark.slow
def test_perturbations_go_on_where_chains_would_come_too_late(step_problem, monkeypatch):
    """Time that chains cannot have is searched in all the same, for half of the budget at least (then nothing improves)."""
    monkeypatch.setattr(Engine, "prepare", lambda self: threading.Event().wait(3))
    monkeypatch.setattr("soapjax.search.chain.descents.MAX_FAILED", 1)
    found = mcmc(jax.random.key(2), step_problem, Budget(seconds=2.0, random_start=True))
    assert found.stopped_by in ("seconds", "converged") and found.search_s > 1.0
    assert found.num_proposals > 1000 and found.notes == (TIME_DECIDED,)
    assert found.best.cost <= mcmc(jax.random.key(2), step_problem, Budget(num_proposals=900, random_start=True)).best.cost


def test_the_additive_optimum_is_given_up_in_time(step_problem, monkeypatch):
    asked = []

    def late(problem, *, judging, deadline):
        asked.append(deadline)
        raise TimeoutError

    monkeypatch.setattr(later_start, "additive_start", late)
    monkeypatch.setattr(later_start, "additive_start_s", lambda problem: 0.2)
    for seconds, is_tried in ((1.5, True), (0.5, False)):
        found = mcmc(jax.random.key(2), step_problem, Budget(seconds=seconds))
        assert TIME_DECIDED in found.notes and found.best.is_feasible
        assert len(asked) == is_tried and all(d < float("inf") for d in asked)
        asked.clear()


@pytest.fixture
def begun(monkeypatch):
    """Where descents begin, one after the other."""
    found = []

    class Seen(descents.Descent):
        def __init__(self, problem, start, *args, **options):
            found.append(start.strategy.key())
            super().__init__(problem, start, *args, **options)

    monkeypatch.setattr(descents, "Descent", Seen)
    return found


@pytest.mark.parametrize("budget", [Budget(num_proposals=400), Budget(seconds=20.0)], ids=["proposals", "seconds"])
def test_a_descent_begins_at_the_additive_optimum(step_problem, begun, budget):
    """Found beside the others where time may end the search, before them where it may not; and never where starts are random."""
    optimum = additive_start(step_problem)

    def until_it_is(done, best_s, elapsed_s):
        if budget.seconds and optimum.key() in begun:
            raise KeyboardInterrupt

    found = mcmc(jax.random.key(2), step_problem, budget._replace(progress=until_it_is))
    assert optimum.key() in begun and found.best.cost <= step_problem.evaluate([optimum])[0].cost
    begun.clear()
    mcmc(jax.random.key(2), step_problem, budget._replace(random_start=True, seconds=budget.seconds and 1.0))
    assert begun and optimum.key() not in begun


def test_where_no_chains_follow_it_starts_once_more(step_problem, begun, monkeypatch):
    """From another random start, when perturbations of the first ends no longer help."""
    monkeypatch.setattr(descents, "MAX_FAILED", 1)
    found = mcmc(jax.random.key(2), step_problem, Budget(num_proposals=4000, random_start=True))
    assert found.stopped_by == "converged" and len(begun) == len(set(begun)) == 3


def test_of_three_descents_the_worst_ends_once_two_have_shown_what_they_come_to(step_problem, monkeypatch):
    monkeypatch.setattr(descents, "RACED", 64)
    rounds = []

    class Counted(descents.Descent):
        def round(self, limit):
            rounds.append(self)
            return super().round(limit)

    monkeypatch.setattr(descents, "Descent", Counted)
    mcmc(jax.random.key(2), step_problem, Budget(num_proposals=3000))
    first = list(dict.fromkeys(rounds))[:3]
    judged = sorted(d.judged for d in first)
    assert len(first) == 3 and judged[0] <= 128 < judged[1]
