"""The Markov chain against enumeration, its moves' symmetry, and its independence of the batch size."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import soapjax
from soapjax.api import planning_problem
from soapjax.search.baselines import BASELINES
from soapjax.search.mcmc import Chains, exchange, kernel, mcmc
from soapjax.search.moves import State, proposal
from soapjax.search.problem import Budget
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


@pytest.fixture(scope="module")
def step_problem():
    def train(params, x):
        loss = lambda p: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)  # noqa: E731
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    topology = load_topology("cpu8")
    params = {"a": jax.ShapeDtypeStruct((64, 256), "float32"), "b": jax.ShapeDtypeStruct((256, 64), "float32")}
    return planning_problem(soapjax.trace(train, params, jax.ShapeDtypeStruct((64, 64), "float32")), topology)


def chains_at(problem, strategies, reference_s: float) -> Chains:
    state = State(jnp.stack([jnp.asarray(s.axes) for s in strategies]), jnp.stack([jnp.asarray(s.storage) for s in strategies]))
    cost = jnp.asarray([e.cost / reference_s for e in problem.evaluate(strategies)], jnp.float32)
    zeros = jnp.zeros(len(strategies), jnp.int32)
    return Chains(state, cost, zeros, zeros, state, cost)


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


def test_moves_are_symmetric(tiny):
    """The density of going from a to b equals that of going back, estimated over many draws for every pair of states."""
    states = enumerate_states(tiny)
    index = {s.axes.tobytes(): i for i, s in enumerate(states)}
    propose = jax.jit(jax.vmap(proposal(tiny.space), (0, None)))
    draws = 20_000
    density = np.zeros((len(states), len(states)))
    for i, s in enumerate(states):
        keys = jax.random.split(jax.random.key(i), draws)
        proposed = np.asarray(propose(keys, State(jnp.asarray(s.axes), jnp.asarray(s.storage))).axes)
        assert all(x.tobytes() in index for x in proposed)
        density[i] = np.bincount([index[x.tobytes()] for x in proposed], minlength=len(states)) / draws
    error = np.abs(density - density.T)
    assert error.max() < 6 * np.sqrt(0.25 / draws)
    assert (np.linalg.matrix_power(density + 1e-12, 20) > 1e-6).all(), "every state is reached"


def test_chain_has_the_boltzmann_distribution(tiny):
    """Detailed balance by enumeration: visit frequencies of the kernel against exp(-beta cost), normalised."""
    states = enumerate_states(tiny)
    from soapjax.strategy.strategy import Strategy

    strategies = [Strategy(s.axes, s.storage) for s in states]
    cost = np.array([e.cost for e in tiny.evaluate(strategies)])
    reference_s = float(cost.min())
    spread = (cost.max() - cost.min()) / reference_s
    beta = 2.0 / spread
    wanted = np.exp(-beta * (cost - cost.min()) / reference_s)
    wanted /= wanted.sum()
    num_chains, thinning, samples = 64, 16, 60
    walk = kernel(tiny, reference_s, 4)
    keys = jax.random.split(jax.random.key(3), num_chains)
    chains = chains_at(tiny, [strategies[0]] * num_chains, reference_s)
    index = {s.axes.tobytes(): i for i, s in enumerate(states)}
    counts = np.zeros(len(states))
    for k in range(samples):
        chains = walk(keys, chains, jnp.full(num_chains, beta), jnp.int32((k + 1) * thinning))
        if k >= 4:
            counts += np.bincount([index[np.asarray(a).tobytes()] for a in chains.state.axes], minlength=len(states))
    found = counts / counts.sum()
    assert np.abs(found - wanted).sum() / 2 < 0.05, (found, wanted)
    assert wanted.max() > 1.5 * wanted.min(), "the costs differ enough for the test to say anything"


@pytest.mark.parametrize("batch", [3, 16])
def test_chain_does_not_depend_on_the_batch(step_problem, batch):
    base = BASELINES["data_parallel"](jax.random.key(0), step_problem, Budget()).best
    keys = jax.random.split(jax.random.key(5), 3)
    betas = jnp.array([500.0, 100.0, 20.0])

    def end(size: int) -> Chains:
        chains = chains_at(step_problem, [base.strategy] * 3, base.cost)
        return kernel(step_problem, base.cost, size)(keys, chains, betas, jnp.int32(40))

    one, many = end(1), end(batch)
    np.testing.assert_array_equal(one.state.axes, many.state.axes)
    np.testing.assert_array_equal(one.state.storage, many.state.storage)
    np.testing.assert_array_equal(one.best.axes, many.best.axes)
    assert (np.asarray(one.step) == 40).all() and (np.asarray(many.step) == 40).all()
    assert int(one.accepted.sum()) == int(many.accepted.sum()) > 0


def test_exchange_is_metropolis():
    """Swaps of neighbours happen with min(1, exp((b_i - b_j)(c_i - c_j))), and carry the costs along."""
    betas = np.array([10.0, 1.0])
    state = State(jnp.zeros((2, 1, 1), jnp.int8).at[1].set(1), jnp.zeros((2, 1), jnp.int8))
    zeros = jnp.zeros(2, jnp.int32)
    swapped = 0
    for k in range(400):
        chains = Chains(state, jnp.array([1.0, 1.1]), zeros, zeros, state, jnp.array([1.0, 1.1]))
        after = exchange(jax.random.key(k), chains, betas, 0)
        moved = bool(after.cost[0] > 1.05)
        assert int(after.state.axes[0, 0, 0]) == int(moved)
        swapped += moved
    assert abs(swapped / 400 - np.exp(-9 * 0.1)) < 0.1


def test_never_worse_than_baselines_and_deterministic(step_problem):
    key = jax.random.key(11)
    first = mcmc(key, step_problem, Budget(num_proposals=256))
    again = mcmc(key, step_problem, Budget(num_proposals=256))
    assert first.best.strategy.key() == again.best.strategy.key()
    assert first.num_proposals == 256
    for planner in BASELINES.values():
        found = planner(key, step_problem, Budget()).best
        assert first.best.cost <= found.cost * (1 + 1e-6)
    assert step_problem.space.is_valid(first.best.strategy)


def test_time_stops_the_same_sequence(step_problem):
    """What a run ended by time found is what its number of proposals finds."""
    key = jax.random.key(2)
    timed = mcmc(key, step_problem, Budget(seconds=6.0))
    assert timed.stopped_by in ("seconds", "converged") and timed.num_proposals > 0
    replayed = mcmc(key, step_problem, Budget(num_proposals=timed.num_proposals))
    assert timed.best.strategy.key() == replayed.best.strategy.key()
