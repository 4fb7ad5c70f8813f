"""The exact delta: candidates of one operator cost what the full and the event-driven simulation say of the whole strategy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import family
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import PROBLEMS, graph_of, topology_of

from soapjax.costs.evaluate import evaluator
from soapjax.search.neighbourhood import Neighbourhoods
from soapjax.search.objective import Objective
from soapjax.search.problem import PlanningProblem
from soapjax.strategy.space import search_space
from soapjax.strategy.strategy import Strategy
from soapjax.topology import factor_mesh

Q = 32
LIMITED = Objective("mdpe", max_bytes=1.0)  # so that bytes are part of what is judged
AT_ONCE = 12  # several turns, the last one not full
FLOAT32_ERROR = 1e-5  # the contract; 9e-7 was the largest seen
PINNED = (("mlp", "2x4"), ("lm_scan", "cpu8"))
UNPINNED = [p for p in PROBLEMS if p[0] in ("mlp_of_sixes", "lm", "lm_scan", "lenet", "resnet", "casts")]
CASES = [(*p, False) for p in UNPINNED] + [(*p, True) for p in PINNED]
QUICK = (("mlp", "2x4", True), ("casts", "a100x8", False))  # compiling is what takes time
every_case = pytest.mark.parametrize("model, topology, pins", family(CASES, slow=set(CASES) - set(QUICK)))


class Judge:
    """One problem and its compiled functions."""

    def __init__(self, model: str, topology: str, pins: bool):
        graph, place = graph_of(model), topology_of(topology)
        space = search_space(graph, factor_mesh(place), pins=pins)
        self.problem = PlanningProblem.make(graph, space, place, objective=LIMITED)
        self.near = Neighbourhoods(self.problem, at_once=AT_ONCE)
        evaluate = evaluator(self.problem.simulator.tables)
        self.position = jax.jit(lambda t, axes, storage: self.near.position(t, evaluate(axes, storage), axes, storage))

        def judge_and_move(t, at, n, axes, storage, q):
            return self.near.judge_and_move(t, at, n, axes, storage, lambda judged: (judged, q))

        self.judge_and_move = jax.jit(judge_and_move)

    def tables(self, *, is_tight: bool):
        """With almost no memory every candidate's peak is added up exactly; else a bound may do."""
        least = jnp.float32(1.0)
        return self.near.tables._replace(usable_bytes=least, exact_above=least) if is_tight else self.near.tables

    def candidates(self, rng: np.random.Generator, base: Strategy, n: int) -> list[Strategy]:
        out = []
        for _ in range(Q):
            drawn = self.problem.space.random(rng)
            one = Strategy(base.axes.copy(), base.storage.copy())
            moves = rng.random(base.axes.shape[1]) < rng.choice([0.4, 1.0])
            mixed = np.where(moves, drawn.axes[n], base.axes[n])
            is_valid = self.problem.space.is_valid(Strategy(_with(base.axes, n, mixed), base.storage))
            one.axes[n] = mixed if is_valid else drawn.axes[n]
            one.storage[n] = drawn.storage[n]
            out.append(one)
        return out


def _with(axes: np.ndarray, n: int, row: np.ndarray) -> np.ndarray:
    out = axes.copy()
    out[n] = row
    return out


@functools.cache
def judge_of(model: str, topology: str, pins: bool) -> Judge:
    return Judge(model, topology, pins)


@every_case
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_candidates_cost_what_the_full_simulation_says(model, topology, pins, seed):
    """32 candidates per example, walked to one of them and asked again: position, time and memory stay exact."""
    judge, rng = judge_of(model, topology, pins), np.random.default_rng(seed)
    tables = judge.tables(is_tight=True)
    now = judge.problem.space.random(rng)
    at = judge.position(tables, now.axes, now.storage)
    for _ in range(2):
        n = int(rng.integers(judge.problem.graph.num_operators))
        found = judge.candidates(rng, now, n)
        axes, storage = np.stack([s.axes[n] for s in found]), np.stack([s.storage[n] for s in found])
        q = int(rng.integers(Q))
        judged, at = judge.judge_and_move(tables, at, n, axes, storage, q)
        scores = judge.problem.simulator.step_times(found)
        np.testing.assert_allclose(judged.step_time_s, scores.step_time_s, rtol=FLOAT32_ERROR)
        np.testing.assert_allclose(judged.memory_bytes, scores.memory_bytes, rtol=FLOAT32_ERROR)
        atol = FLOAT32_ERROR * float(at.sent.max())  # a difference of sums
        np.testing.assert_allclose(judged.sent_bytes, scores.sent_bytes, rtol=FLOAT32_ERROR, atol=atol)
        now = found[q]
        fresh = judge.position(tables, now.axes, now.storage)
        np.testing.assert_allclose(at.sent, fresh.sent, rtol=FLOAT32_ERROR, atol=FLOAT32_ERROR * float(fresh.sent.max()))
        for a, b in zip(jax.tree.leaves(at.alive), jax.tree.leaves(fresh.alive), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4 * float(np.abs(b).max(initial=1.0)))


@every_case
def test_candidates_take_the_time_of_the_event_driven_simulation(model, topology, pins):
    judge, rng = judge_of(model, topology, pins), np.random.default_rng(4)
    tables = judge.tables(is_tight=False)
    now = judge.problem.space.random(rng)
    n = int(rng.integers(judge.problem.graph.num_operators))
    found = judge.candidates(rng, now, n)
    axes, storage = np.stack([s.axes[n] for s in found]), np.stack([s.storage[n] for s in found])
    at = judge.position(tables, now.axes, now.storage)
    judged, _ = judge.judge_and_move(tables, at, n, axes, storage, -1)
    for time, strategy in list(zip(judged.step_time_s, found, strict=True))[:4]:
        assert float(time) == pytest.approx(judge.problem.simulator.timeline(strategy).makespan_s, rel=FLOAT32_ERROR)


@every_case
def test_a_memory_bound_gives_the_same_cost(model, topology, pins):
    """Where everything fits the memory is an upper bound only; the cost is the same as with the exact peak."""
    judge, rng = judge_of(model, topology, pins), np.random.default_rng(5)
    now = judge.problem.space.random(rng)
    n = int(rng.integers(judge.problem.graph.num_operators))
    found = judge.candidates(rng, now, n)
    axes, storage = np.stack([s.axes[n] for s in found]), np.stack([s.storage[n] for s in found])
    tables = judge.tables(is_tight=False)
    at = judge.position(tables, now.axes, now.storage)
    judged, _ = judge.judge_and_move(tables, at, n, axes, storage, -1)
    scores = judge.problem.simulator.step_times(found)
    assert (np.asarray(judged.memory_bytes) >= scores.memory_bytes * (1 - 1e-5)).all()
    np.testing.assert_allclose(judged.cost_s, [e.cost for e in judge.problem.evaluate(found)], rtol=FLOAT32_ERROR)


@pytest.mark.slow
def test_a_degree_that_does_not_divide_costs_infinity():
    judge = judge_of("mlp_of_sixes", "2x6", False)
    now = judge.problem.space.random(np.random.default_rng(0))
    at = judge.position(judge.near.tables, now.axes, now.storage)
    n = next(n for n, op in enumerate(judge.problem.graph.operators) if any(d.divisor % 4 for d in op.dims))
    d = next(d for d, dim in enumerate(judge.problem.graph.operators[n].dims) if dim.divisor % 4)
    axes = np.full((Q, judge.problem.space.num_axes), -1, np.int8)
    axes[0] = d  # over all twelve devices
    judged, _ = judge.judge_and_move(judge.near.tables, at, n, axes, np.zeros(Q, np.int8), -1)
    assert np.isinf(judged.cost_s[0]) == bool(judge.problem.graph.operators[n].dims[d].divisor % 12)
    assert np.isfinite(judged.cost_s[1:]).all()
