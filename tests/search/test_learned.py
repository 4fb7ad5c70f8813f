"""Learned placement: features, walks, networks, what is learned, and the planners."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_placement import KEY, RNNLM, one_device, problem_of, two_branches

from soapjax.search.experts.layers import layers_of, steps_of
from soapjax.search.experts.placement import operator_seconds, placed
from soapjax.search.learned import lstm, networks
from soapjax.search.learned.agent import AgentSizes, Learner, agent_of
from soapjax.search.learned.features import FIGURES, Features, colocated, features_of, result_elements
from soapjax.search.learned.learned_planners import (
    HIERARCHICAL,
    REINFORCE,
    TRINITY,
    batches_of,
    learned,
    placement_starts,
    reward_of,
)
from soapjax.search.learned.node_embedding import Walking, node2vec, pairs_of, random_walks
from soapjax.search.problem import Budget


def small(method):
    sizes = dict(partitions=2, placements=16, num_groups=32, learning_rate=0.01, minibatches=2)
    return method._replace(recipe=method.recipe._replace(**sizes))


LEARNED = tuple(map(small, (REINFORCE, HIERARCHICAL, TRINITY)))
PPO = LEARNED[-1]
STEPS = 8
# The programs of each take some ten seconds to compile.
methods = pytest.mark.parametrize(
    "method", [PPO, *(pytest.param(m, marks=pytest.mark.slow) for m in LEARNED[:-1])], ids=lambda m: m.name
)
SMALL = RNNLM | dict(seq=2)  # as small as the other problems here: one program serves them all


def rng(seed=0):
    return np.random.default_rng(seed)


# --- what networks are told


def test_walks_follow_edges_with_the_weights_of_node2vec():
    """From 0 to 1, whose neighbours are 0 (back, 1/p), 2 (a neighbour of 0, 1) and 3 (far, 1/q)."""
    edges = np.array([(0, 1), (0, 2), (1, 2), (1, 3), (3, 4)], np.int32)
    how = Walking(back=4.0, far=0.5, walks_per_node=4000, length=3)
    walks = random_walks(rng(), 6, edges, how)
    assert walks.shape == (5 * 4000, 3) and 5 not in walks, "what has no edge starts no walk"
    pairs = {(int(a), int(b)) for a, b in itertools.chain(walks[:, :2], walks[:, 1:])}
    assert pairs == {(a, b) for a, b in edges.tolist()} | {(b, a) for a, b in edges.tolist()}
    third = walks[(walks[:, 0] == 0) & (walks[:, 1] == 1), 2]
    share = np.bincount(third, minlength=4) / len(third)
    weights = np.array([1 / 4, 0, 1, 2])
    np.testing.assert_allclose(share, weights / weights.sum(), atol=4 * np.sqrt(0.25 / len(third)))


def test_pairs_stand_within_the_window():
    one, other = pairs_of(np.array([[5, 6, 7, 8]]), 2)
    assert sorted(zip(one.tolist(), other.tolist(), strict=True)) == sorted(
        [(5, 6), (6, 7), (7, 8), (5, 7), (6, 8), (6, 5), (7, 6), (8, 7), (7, 5), (8, 6)]
    )


def test_node2vec_puts_neighbours_together():
    """Two cliques of eight with one edge between them: a node's nearest ones are of its own."""
    clique = list(itertools.combinations(range(8), 2))
    edges = np.array(clique + [(a + 8, b + 8) for a, b in clique] + [(0, 8)], np.int32)
    vectors = node2vec(rng(), 17, edges)
    assert vectors.shape == (17, Walking().size) and vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, node2vec(rng(), 17, edges))
    unit = vectors[:16] / np.linalg.norm(vectors[:16], axis=1, keepdims=True)
    nearest = np.argsort(-(unit @ unit.T), axis=1)[:, 1:7]
    own = (nearest // 8 == np.arange(16)[:, None] // 8).mean()
    assert own > 0.95
    assert not node2vec(rng(), 3, np.zeros((0, 2), np.int32)).any()


@pytest.mark.parametrize("told", [pytest.param("trinity", marks=pytest.mark.slow), "hierarchical"])
def test_features(told):
    problem = problem_of("rnnlm", **RNNLM)
    graph, found = problem.graph, features_of(rng(), problem, told)
    assert found.figures.shape == (graph.num_operators, FIGURES) and np.isfinite(found.figures).all()
    assert (found.edges[:, 0] < found.edges[:, 1]).all() and len({tuple(e) for e in found.edges.tolist()}) == len(found.edges)
    for a, b in found.edges[:20].tolist():
        touched = []
        for n in (a, b):
            tasks = [graph.tasks[t] for t in graph.operators[n].tasks]
            touched.append({x.tensor for t in tasks for x in (*t.reads, *t.writes)})
        assert touched[0] & touched[1]
    by_kind = {}
    for n, op in enumerate(graph.operators):
        by_kind.setdefault(int(found.word[n]), set()).add(op.kind)
    assert all(len(kinds) == 1 for kinds in by_kind.values()), "a word is one kind of operator"
    elements = result_elements(graph)
    assert (np.argsort(found.size, kind="stable") == np.argsort(elements, kind="stable")).all()
    if told == "trinity":
        np.testing.assert_allclose([found.figures[:, 0].mean(), found.figures[:, 0].std()], [0, 1], atol=1e-4)


def test_colocated_operators():
    problem = problem_of("rnnlm", **RNNLM)
    graph, seconds = problem.graph, operator_seconds(problem)
    group = colocated(graph, seconds, 4, 200)
    keys, steps = steps_of(graph)
    cells = {(layer.name, steps[n]): group[n] for layer in layers_of(graph) if layer.is_recurrent for n in layer.operators}
    assert len(set(cells.values())) == len(cells) == 8, "a layer at a step is a group"
    assert all(group[n] == cells[layer.name, steps[n]] for layer in layers_of(graph) if layer.is_recurrent for n in layer.operators)
    for limit in (9, 3, 1):
        few = colocated(graph, seconds, 4, limit)
        assert set(few) == set(range(limit))
        assert len({(a, b) for a, b in zip(group, few, strict=True)}) == len(set(group)), "groups are merged whole"


# --- networks


def told_of(count=6, edges=((0, 1), (1, 2), (4, 5)), devices=3):
    features = Features(
        np.arange(count, dtype=np.int32), rng().normal(size=(count, FIGURES)).astype(np.float32),
        rng().normal(size=count).astype(np.float32), np.ones(count, np.float32), np.array(edges, np.int32),
    )  # fmt: skip
    sizes = AgentSizes.of(features, devices, is_grouped=False)
    return sizes, sizes.filled(features, devices)


def test_groups_stand_in_program_order_and_know_their_neighbours():
    sizes, told = told_of()
    number = np.full((1, sizes.operators), 9, np.int32)  # what fills up is in no group, whatever its number
    number[0, :6] = [7, 3, 7, 0, 3, 5]
    found = jax.jit(networks.groups_of, static_argnums=(2, 3))(jnp.asarray(number), told, 16, 32)
    assert int(found.used[0]) == 4
    assert found.slot[0, :6].tolist() == [0, 1, 0, 2, 1, 3]
    touches = {(int(a), int(b)) for a, b in zip(*np.nonzero(np.asarray(found.touches[0])), strict=True)}
    assert touches == {(0, 1), (1, 0), (1, 3), (3, 1)}


def test_an_lstm_is_the_scan_of_its_step_and_so_are_its_gradients():
    """Sequences of several lengths, of which no one is as long as the arrays; gradients of results and of last states."""
    steps, batch, hidden = 7, 3, lstm.HIDDEN
    used = jnp.array([3, 6, 5])

    def some(*shape: int):
        return jnp.asarray(rng(len(shape) + shape[0]).normal(size=shape, scale=0.3), jnp.float32)

    shapes = (hidden, 4 * hidden), (2 * hidden, 4 * hidden), (2, 4 * hidden)
    weights = lstm.Weights(jnp.zeros((1, 4 * hidden)), *(some(*s) / 5 for s in shapes))
    start = lstm.LstmState(*((some(batch, hidden), some(batch, hidden) / 2) for _ in range(2)))
    given, asked = some(steps, batch, 4 * hidden), some(steps, batch, hidden)

    def plainly(weights, start, given, used):
        def step(state, row):
            t, given = row
            after = lstm.lstm_step(weights, state, given)
            state = jax.tree.map(lambda new, old: jnp.where((t < used)[:, None], new, old), after, state)
            return state, jnp.where(t < used.max(), state.h[1], 0)

        last, h = jax.lax.scan(step, start, (jnp.arange(steps), given))
        return h, last

    def loss(run, *of):
        h, last = run(*of, used)
        return (h * asked).sum() + sum(i * x.sum() for i, x in enumerate(jax.tree.leaves(last)))

    ours, plain = (
        jax.jit(jax.value_and_grad(lambda *of, run=run: loss(run, *of), (0, 1, 2)))(weights, start, given)
        for run in (lstm.lstm_steps, plainly)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, plain)


def drawn(method):
    """An agent, what it is told, its learner and a draw, on a small problem."""
    sizes, told = told_of()
    sizes = sizes._replace(is_grouped=method.is_grouped)
    agent, fixed = agent_of(sizes, method.recipe), np.arange(sizes.operators, dtype=np.int32) % 4
    best = np.arange(sizes.operators, dtype=np.int32) % 3
    agent.prepare(KEY, told, fixed, best, learns=True)
    learner = agent.first(KEY, told, fixed)
    quiet = learner._replace(batches=jnp.int32(method.recipe.noisy_steps))
    return agent, told, quiet, *agent.draw(jax.random.key(1), told, fixed, best, quiet)


@pytest.mark.slow
@methods
def test_probabilities_are_those_that_devices_were_drawn_with(method):
    agent, told, learner, draw, device = drawn(method)
    groups = jax.jit(agent._groups)(draw.number, told)
    used, slots = np.asarray(groups.used), np.asarray(groups.slot)
    assert np.asarray(draw.device).max() < 3, "only devices that there are"
    log_probabilities = jax.jit(functools.partial(agent.policy.apply, method="log_probabilities"))
    again = log_probabilities(learner.params, told, groups, draw.device)
    for m, count in enumerate(used):
        np.testing.assert_allclose(np.exp(np.asarray(again[m, :, :count])).sum(-1), 1, rtol=1e-5)
        chosen = np.take_along_axis(np.asarray(again[m]), np.asarray(draw.device[m])[..., None], 2)[:, :count, 0]
        np.testing.assert_allclose(np.asarray(draw.log_device[m])[:, :count], chosen, atol=1e-4)
    assert device.shape == (method.recipe.partitions * method.recipe.placements, agent.sizes.operators)
    for b in (0, method.recipe.placements - 1, len(device) - 1):
        m, p = divmod(b, method.recipe.placements)
        np.testing.assert_array_equal(np.asarray(device[b])[:6], np.asarray(draw.device)[m, p, slots[m, :6]])


@pytest.mark.slow
@methods
def test_what_is_rewarded_gets_more_likely(method):
    """Placements that put operator 0 on device 1 are rewarded, and no others: a few steps, and most draws do.

    The best known placement, which one of each partition follows, does not.
    """
    agent, told, learner, draw, device = drawn(method)
    fixed, best = np.arange(agent.sizes.operators, dtype=np.int32) % 4, np.zeros(agent.sizes.operators, np.int32)
    learner = agent.first(KEY, told, fixed)
    shares = []
    for i in range(STEPS):
        draw, device = agent.draw(jax.random.key(i), told, fixed, best, learner)
        reward = (np.asarray(device)[:, 0] == 1).astype(np.float32)
        shares.append(reward.mean())
        learner = agent.learn(told, learner, draw, reward)
    assert isinstance(learner, Learner) and int(learner.batches) == STEPS
    assert shares[-1] > 0.8 > 0.5 > shares[0]
    # The moving average of equation 15, over mean rewards.
    n, average = method.recipe.period, shares[0]
    for mean in shares:
        average = (2 * mean + (n - 1) * average) / (n + 1)
    assert float(learner.baseline) == pytest.approx(average, rel=1e-4)


# --- planners


def test_rewards_grow_as_costs_fall():
    costs = np.array([0.5, 1.0, 2.0, np.inf])
    for method in LEARNED:
        rewards = reward_of(costs, 1.0, method)
        assert np.isfinite(rewards).all() and (np.diff(rewards) < 0).all()
    np.testing.assert_allclose(reward_of(costs[:3], 1.0, PPO), -np.log(costs[:3]))
    np.testing.assert_allclose(reward_of(costs[:3], 1.0, small(REINFORCE)), -np.sqrt(costs[:3]))


@pytest.mark.slow
@methods
def test_the_best_split_of_two_branches_is_found(method):
    problem = two_branches()
    every = [placed(problem, np.array(d)) for d in itertools.product(range(2), repeat=problem.graph.num_operators)]
    wanted = min(e.cost for e in problem.evaluate(every) if e.is_feasible)
    found = learned(method, KEY, problem, Budget(num_proposals=100, random_start=True))
    assert found.best.cost == pytest.approx(wanted, rel=1e-5)
    assert wanted < 0.7 * problem.evaluate([one_device(problem)])[0].cost
    proposals, times = [h[0] for h in found.history], [h[2] for h in found.history]
    assert proposals == sorted(proposals) and times == sorted(times, reverse=True) and times[-1] == found.best.step_time_s


@pytest.mark.slow
@methods
def test_a_batch_is_judged_as_it_is_placed_and_follows_the_best(method):
    problem = problem_of("rnnlm", **SMALL)
    starts = placement_starts(KEY, problem, Budget())
    best = min(starts, key=lambda e: e.rank)
    batches = list(itertools.islice(batches_of(KEY, problem, method, starts), 2))
    for b in batches:
        again = problem.evaluate([e.strategy for e in b.found[:3]])
        np.testing.assert_allclose([e.cost for e in again], [e.cost for e in b.found[:3]], rtol=1e-6)
        np.testing.assert_allclose(reward_of(np.array([e.cost for e in again]), starts[0].cost, method), b.rewards[:3], rtol=1e-5)
        assert all(problem.space.is_valid(e.strategy) for e in again)
    # The first one of a partition is the best start, as far as the groups allow: far from what is drawn at random.
    followed = [e.cost for e in batches[0].found[:: method.recipe.placements]]
    drawn_at_random = [e.cost for i, e in enumerate(batches[0].found) if i % method.recipe.placements]
    assert min(followed) < np.median(drawn_at_random) and min(followed) < 1.1 * best.cost


def test_the_partition_network_begins_with_what_is_colocated():
    problem = problem_of("rnnlm", **SMALL)
    features = features_of(rng(), problem, "trinity")
    sizes = AgentSizes.of(features, 4, is_grouped=False)
    agent, told, count = agent_of(sizes, PPO.recipe), sizes.filled(features, 4), len(features.word)
    fixed = np.zeros(sizes.operators, np.int32)
    fixed[:count] = colocated(problem.graph, operator_seconds(problem), 4, 32)
    partition_logits = jax.jit(functools.partial(agent.policy.apply, method="partition_logits"))
    logits = partition_logits(agent.first(KEY, told, fixed).params, told)
    assert (np.asarray(logits).argmax(1)[:count] == fixed[:count]).mean() > 0.9


@pytest.mark.slow
@methods
def test_it_is_decided_by_its_key_and_ends_by_its_budget(method):
    problem, planner = two_branches(), functools.partial(learned, method)
    first, again = (planner(jax.random.key(3), problem, Budget(num_proposals=80)) for _ in range(2))
    assert first.best.strategy.key() == again.best.strategy.key()
    assert first.num_proposals == 80 and first.stopped_by == "proposals" and "80 placements simulated" in first.notes[0]
    assert [h[0] for h in first.history] == [h[0] for h in again.history]
    starts = placement_starts(KEY, problem, Budget())
    timed = planner(KEY, problem, Budget(seconds=1e-9))
    assert timed.stopped_by == "seconds" and timed.num_proposals == len(starts) and "a start" in timed.notes[0]
    assert timed.best.cost == min(e.cost for e in starts)

    def interrupt(done, best_s, elapsed_s):
        raise KeyboardInterrupt

    assert planner(KEY, problem, Budget(num_proposals=640, progress=interrupt)).stopped_by == "interrupted"
