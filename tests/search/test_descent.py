"""Descents against enumeration, and what their moves may touch."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import graph_of, topology_of

import soapjax
from soapjax.planning.entry import planning_problem
from soapjax.search.chain.descents import PERTURBATIONS
from soapjax.search.descent.assignments import NOT_CARRIED, Assignments, carried_values, look_alikes, modules_of
from soapjax.search.descent.descending import Descent, Perturbations
from soapjax.search.descent.leaner import LEANER, SLOWER, Leaner
from soapjax.search.descent.trades import traded
from soapjax.search.problem import Evaluation, PlanningProblem
from soapjax.strategy.configs import Strategy
from soapjax.strategy.space import search_space
from soapjax.topology import factor_mesh, load_topology


@pytest.fixture(scope="module")
def layers():
    """Five equal layers on four devices: 4^10 strategies, and few in which all layers are alike."""

    def forward(ws, x):
        for i in range(5):
            x = jnp.tanh(x @ ws[f"w{i}"])
        return x

    ws = {f"w{i}": jax.ShapeDtypeStruct((512, 512), "float32") for i in range(5)}
    topology = load_topology("cpu8")
    topology = dataclasses.replace(topology, levels=(*topology.levels[:-1], dataclasses.replace(topology.levels[-1], size=4)))
    return planning_problem(soapjax.trace(forward, ws, jax.ShapeDtypeStruct((64, 512), "float32")), topology)


CASES = (("mlp_of_sixes", "2x6", False), ("lm_scan", "cpu8", False), ("mlp", "2x4", True))


@pytest.mark.parametrize("model, topology, pins", CASES)
def test_every_draw_is_in_the_space(model, topology, pins):
    graph, place = graph_of(model), topology_of(topology)
    space = search_space(graph, factor_mesh(place), pins=pins)
    rng = np.random.default_rng(1)
    moves, now = Assignments(space), [space.random(rng) for _ in range(20)]
    changed = 0
    for _ in range(20):
        drawn = moves.draw(rng, now)
        for before, after in zip(now, drawn, strict=True):
            assert space.is_valid(after), space.violations(after)[:1]
            changed += after.key() != before.key()
        now = drawn
    assert changed > 100


def test_look_alikes_offer_the_same(layers):
    space, alike = layers.space, look_alikes(layers.space)
    assert len(set(alike)) < len(alike)
    for n, m in itertools.combinations(range(len(alike)), 2):
        if alike[n] == alike[m]:
            assert (space.allowed[n] == space.allowed[m]).all()
            assert (space.divisors[n] == space.divisors[m]).all()


def test_descends_to_the_best_of_all_that_are_alike(layers):
    """From a random strategy to the optimum, by enumeration, of those in which operators that look alike have one config."""
    space = layers.space
    alike = look_alikes(space)
    kinds = [np.flatnonzero(alike == k) for k in range(alike.max() + 1)]
    options = [list(space.configs(int(members[0]))) for members in kinds]
    every = []
    for chosen in itertools.product(*options):
        axes = np.zeros((len(alike), space.num_axes), np.int8)
        for members, config in zip(kinds, chosen, strict=True):
            axes[members] = config
        every.append(Strategy(axes, np.zeros(len(alike), np.int8)))
    assert len(every) < 3000
    tied_best = min(e.cost for e in layers.evaluate(every))
    rng = np.random.default_rng(3)
    start = layers.evaluate([space.random(rng)])[0]
    descent = Descent(layers, start, np.random.default_rng(0), Assignments(layers.space))
    costs, judged = [start.cost], 0
    while not descent.is_over:
        judged += descent.round()
        costs.append(descent.best.cost)
    assert (np.diff(costs) <= 0).all() and costs[-1] < costs[0]
    assert descent.best.cost <= tied_best * (1 + 1e-6)
    assert judged == len(descent.seen) - 1, "nothing is judged twice"
    assert layers.evaluate([descent.best.strategy])[0].cost == pytest.approx(descent.best.cost, rel=1e-6)


@pytest.mark.parametrize("model, topology, pins", CASES)
def test_where_a_descent_ends_no_single_move_helps(model, topology, pins):
    graph, place = graph_of(model), topology_of(topology)
    space = search_space(graph, factor_mesh(place), pins=pins)
    problem, moves = PlanningProblem.make(graph, space, place), Assignments(space)
    start = problem.evaluate([space.random(np.random.default_rng(2))])[0]
    descent = Descent(problem, start, np.random.default_rng(3), moves)
    while not descent.is_over:
        descent.round()
    best = descent.best
    count = len(moves.values_of_sets) + len(moves.storages_of_sets) + len(moves.dims_of_modules)
    singles = moves.single(best.strategy, np.arange(count))
    assert all(space.is_valid(s) for s in singles)
    changed = [s for s in singles if s.key() != best.strategy.key()]
    assert changed and best.cost < start.cost
    assert min(e.cost for e in problem.evaluate(changed)) >= best.cost
    # All of a set at once: what it does not offer stays, and nothing outside of it moves.
    for which, s in zip(range(len(moves.values_of_sets)), singles, strict=False):
        members, span, value = moves.values_of_sets[which]
        moved = (s.axes != best.strategy.axes).any(axis=1)
        assert not (moved & ~moves.movable[members]).any()
        assert (s.axes[moved][:, moves.spans[span]] == value + moves.lowest).all()


def test_the_same_seed_is_the_same_descent():
    graph = graph_of("mlp_of_sixes")
    place = topology_of("2x6")
    space = search_space(graph, factor_mesh(place))
    problem = PlanningProblem.make(graph, space, place)
    rng = np.random.default_rng(0)
    begun = problem.evaluate([space.random(rng)])[0]
    first, second = (Descent(problem, begun, np.random.default_rng(5), Assignments(space)) for _ in range(2))
    counts = [(first.round(8), second.round(8)) for _ in range(3)]
    assert all(a == b <= 8 for a, b in counts)
    assert first.best.strategy.key() == second.best.strategy.key(), "a descent is its seed's"


def test_all_that_is_judged_is_in_the_space():
    """Also what several moves make together: each splits a width of 4 two ways, all of them eight ways."""

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    shapes = (jax.ShapeDtypeStruct(s, "float32") for s in ((6, 4), (4, 6)))
    problem = planning_problem(soapjax.trace(step, *shapes), load_topology("cpu8"))
    judged = []

    class Judging:
        usable_memory_bytes = 1e9

        def evaluate(self, strategies):  # the more axes split the width, the better
            judged.extend(strategies)
            costs = [10.0 - (s.axes[0] == 1).sum() for s in strategies]
            return [Evaluation(s, c, 0.5, True, c) for s, c in zip(strategies, costs, strict=True)]

    whole = Strategy(np.full((problem.graph.num_operators, 3), -1, np.int8), np.zeros(problem.graph.num_operators, np.int8))
    for seed in range(3):
        descent = Descent(Judging(), Judging().evaluate([whole])[0], np.random.default_rng(seed), Assignments(problem.space))
        while not descent.is_over:
            descent.round()
        assert descent.best.cost == 8.0
    assert all(map(problem.space.is_valid, judged))


class _Ridge:
    """Of one operator: on some of the axes of the last level its dim 0 is slower, on all of them twice as fast."""

    usable_memory_bytes = 1.0

    def __init__(self, n, axes):
        self.n, self.last = n, axes

    def evaluate(self, strategies):
        split = [int((s.axes[self.n, self.last] == 0).sum()) for s in strategies]
        costs = [0.5 if k == len(self.last) else 1 + 0.1 * k for k in split]
        return [Evaluation(s, c, 0.5, True, c) for s, c in zip(strategies, costs, strict=True)]


@pytest.mark.parametrize("seed", range(4))
def test_a_sweep_takes_all_axes_of_a_level_at_once(seed):
    """Where every axis alone is slower, and all of them together are faster."""
    graph, place = graph_of("mlp"), topology_of("a100x64")
    mesh = factor_mesh(place)
    space = search_space(graph, mesh)
    last = np.flatnonzero(np.array(mesh.axis_levels) == mesh.axis_levels[-1])
    n = next(n for n, op in enumerate(graph.operators) if space.allowed[n, last, 1].all() and op.kind == "dot")
    judging = _Ridge(n, last)
    whole = Strategy(np.full((graph.num_operators, space.num_axes), -1, np.int8), np.zeros(graph.num_operators, np.int8))
    descent = Descent(judging, judging.evaluate([whole])[0], np.random.default_rng(seed), Assignments(space))
    while not descent.is_over:
        descent.round()
    assert len(last) > 2 and descent.best.cost == 0.5


class _Stored:
    """Faster by another storage only where all of some operators have it."""

    usable_memory_bytes = 1.0

    def __init__(self, members, k):
        self.members, self.k = members, k

    def evaluate(self, strategies):
        shares = [float((s.storage[self.members] == self.k).mean()) for s in strategies]
        costs = [0.5 if share == 1 else 1 + share for share in shares]
        return [Evaluation(s, c, 0.5, True, c) for s, c in zip(strategies, costs, strict=True)]


@pytest.mark.parametrize("path", ("blk[0-9]+/attn", "blk", ""))
def test_a_sweep_stores_a_module_alike(path):
    """All parameters of one that repeats, or of the whole step, where storing only some of them otherwise is slower."""
    graph, place = graph_of("lm"), topology_of("a100x8")
    space = search_space(graph, factor_mesh(place))
    members = np.array([n for n, op in enumerate(graph.operators) if re.match(path, op.name) and space.owns_parameters[n]])
    judging = _Stored(members, 1)
    whole = Strategy(np.full((graph.num_operators, space.num_axes), -1, np.int8), np.zeros(graph.num_operators, np.int8))
    descent = Descent(judging, judging.evaluate([whole])[0], np.random.default_rng(0), Assignments(space))
    while not descent.is_over:
        descent.round()
    assert len(set(np.array([op.group for op in graph.operators])[members])) > 1 and descent.best.cost == 0.5


@pytest.mark.parametrize("kinds", (("moved",), ("reranked",), ("exchanged",), PERTURBATIONS[1]), ids=" then ".join)
def test_perturbations_find_what_descents_find_and_count_what_they_judge(layers, kinds):
    """From a random strategy: never worse, within the limit of every round, the same again, and as low as a descent ends."""
    start = layers.evaluate([layers.space.random(np.random.default_rng(11))])[0]
    moves = Assignments(layers.space)
    descent = Descent(layers, start, np.random.default_rng(1), moves)
    while not descent.is_over:
        descent.round()
    found = []
    for _ in range(2):
        perturbations, costs = Perturbations(layers, start, np.random.default_rng(0), moves, kinds), [start.cost]
        while perturbations.failed < 6:
            assert perturbations.round(0) == 0
            assert 0 <= perturbations.round(7) <= 7
            costs.append(perturbations.best.cost)
        assert costs == sorted(costs, reverse=True)
        found.append(perturbations.best)
    assert found[0].strategy.key() == found[1].strategy.key()
    assert found[0].cost <= descent.best.cost * (1 + 1e-6) < start.cost


def test_perturbations_take_what_others_found(layers):
    start, other = sorted(layers.evaluate([layers.space.random(np.random.default_rng(k)) for k in (11, 12)]), key=lambda e: -e.cost)
    perturbations = Perturbations(layers, start, np.random.default_rng(0), Assignments(layers.space), ("moved",))
    perturbations.failed = 3
    perturbations.offer(other)
    assert perturbations.best is other and perturbations.failed == 0
    perturbations.offer(start)
    assert perturbations.best is other


class _Tight:
    """Four operators on two axes. All but the first are a tenth faster by the second value, for a unit of memory each; the first
    takes two units less for a thousandth of the time. Three units fit. With `depends` others are faster with that first only."""

    usable_memory_bytes = 3.0
    num_single = 8

    def __init__(self, depends):
        self.depends = depends

    def start(self):
        return self.evaluate([Strategy(np.zeros((4, 2), np.int8), np.zeros(4, np.int8))])[0]

    def evaluate(self, strategies):
        found = []
        for s in strategies:
            first, *others = s.axes[:, 0].tolist()
            gain = 0.1 if first or not self.depends else -0.1
            time_s, memory = 1.0 + 0.001 * first - gain * sum(others), 3 - 2 * first + sum(others)
            fits = memory <= self.usable_memory_bytes
            found.append(Evaluation(s, time_s, memory, fits, time_s if fits else 3 * time_s))
        return found

    def swept(self, rng):
        return rng.permutation(self.num_single), np.zeros(0, int)

    def divided(self, before, strategies):
        return strategies

    def single(self, strategy, which):
        moved = [Strategy(strategy.axes.copy(), strategy.storage) for _ in which]
        for s, k in zip(moved, which, strict=True):
            s.axes[k // 2, 0] = k % 2
        return moved

    def draw(self, rng, strategies):
        return [self.single(s, rng.integers(self.num_single, size=1))[0] for s in strategies]


def test_where_memory_is_full_moves_are_traded():
    """No single move is faster and fits: one that frees memory, and as many as that is enough for, are made together."""
    tight = _Tight(depends=False)
    descent = Descent(tight, tight.start(), np.random.default_rng(0), tight)
    while not descent.is_over:
        descent.round()
    assert descent.best.strategy.axes[:, 0].tolist().count(1) == 3 and descent.best.cost == pytest.approx(0.801)


def test_trades_are_those_that_add_up():
    """Against all sets of moves of one operator each: none that is slower or does not fit by the sums, the best nearly."""
    rng, shares = np.random.default_rng(3), []
    for _ in range(20):
        base = Strategy(np.zeros((6, 1), np.int8), np.zeros(6, np.int8))
        best = Evaluation(base, 1.0, 10.0, True, 1.0)
        seconds, bytes_ = rng.choice([-0.03, -0.02, 0.005, 0.01], 6), rng.choice([-2.0, -1.0, 1.0, 2.0], 6)

        def moved(some, base=base):
            axes = base.axes.copy()
            axes[list(some)] = 1
            return Strategy(axes, base.storage)

        more = enumerate(zip(seconds, bytes_, strict=True))
        around = [Evaluation(moved([k]), 1 + t, 10 + m, m <= 0, 1 + t) for k, (t, m) in more]
        around = [e for e in around if e.step_time_s >= 1 or e.memory_bytes > 10]  # a descent has taken the others
        moves = [int(e.strategy.axes.argmax()) for e in around]
        sets = [c for n in range(2, len(moves) + 1) for c in itertools.combinations(moves, n)]
        pays = {moved(c).key(): seconds[list(c)].sum() for c in sets if bytes_[list(c)].sum() <= 0 and seconds[list(c)].sum() < 0}
        found = [s.key() for s in traded(best, around, 10.0, 100)]
        assert set(found) <= set(pays) and len(found) == len(set(found))
        assert [pays[k] for k in found] == sorted(pays[k] for k in found)
        assert bool(found) == bool(pays)
        shares += [pays[found[0]] / min(pays.values())] if pays else []
    assert len(shares) > 5 and min(shares) > 0.3 and np.mean(shares) > 0.8
    assert traded(best, [], 10.0, 5) == []


def test_a_split_and_a_storage_of_one_operator_are_traded():
    base = Strategy(np.zeros((2, 1), np.int8), np.zeros(2, np.int8))
    best = Evaluation(base, 1.0, 10.0, True, 1.0)
    faster = Evaluation(Strategy(np.array([[1], [0]], np.int8), base.storage), 0.9, 12.0, False, 2.0)
    leaner = Evaluation(Strategy(base.axes, np.array([2, 0], np.int8)), 1.01, 7.0, True, 1.01)
    (both,) = traded(best, [faster, leaner], 10.0, 5)
    assert both.axes.tolist() == [[1], [0]] and both.storage.tolist() == [2, 0]


def test_where_memory_is_full_something_leaner_leads_on():
    tight = _Tight(depends=True)
    start = tight.start()
    descent = Descent(tight, start, np.random.default_rng(0), tight)
    while not descent.is_over:
        descent.round()
    assert descent.best is start, "no move is faster"
    perturbations = Perturbations(tight, start, np.random.default_rng(0), tight, ("leaner", "moved"), descent.leaner.front)
    perturbations.round()  # begins with what is leaner
    while perturbations.descent is not None:
        perturbations.round()
    assert perturbations.best.strategy.axes[:, 0].tolist().count(1) == 3 and perturbations.best.cost == pytest.approx(0.801)


def test_what_is_leaner_is_the_front_and_given_once():
    rng = np.random.default_rng(5)
    some = [
        Evaluation(Strategy(np.array([[k]], np.int16), np.zeros(1, np.int8)), t, m, True, t)
        for k, (t, m) in enumerate(zip(1 + 0.05 * rng.random(300), 100 * rng.random(300), strict=True))
    ]
    leaner = Leaner()
    for k in range(0, 300, 32):
        leaner.offer(some[k : k + 32])
    costs, memory = ([getattr(e, name) for e in leaner.front] for name in ("cost", "memory_bytes"))
    assert costs == sorted(costs) and memory == sorted(memory, reverse=True)
    for e in some:  # nothing is as fast and takes less than what is there, but for little
        as_fast = [f.memory_bytes for f in leaner.front if f.cost <= e.cost]
        assert as_fast and (1 - LEANER) * min(as_fast) <= e.memory_bytes
    best = leaner.front[0]._replace(cost=1.01, memory_bytes=95.0)
    assert leaner.next(best, 120.0) is None, "there is memory for anything"
    given = list(iter(lambda: leaner.next(best, 100.0), None))
    assert given == [e for e in leaner.front if e.cost <= 1.01 * (1 + SLOWER) and e.memory_bytes < 95.0 * (1 - LEANER)]
    assert len(given) > 1


def test_a_dim_is_carried_through_a_module_and_its_repetitions():
    """Two blocks of three operators, and one more; dim 1 is everywhere, 2 in blocks, 3 in one operator of each, 0 replicates."""
    flow = np.array([[0, 1, 2], [0, 2, 1], [0, 1, 3]] * 2 + [[0, 1, -1]])
    groups = np.array([0, 1, 2, 0, 1, 2, 3])
    names = [f"blk{b}/{name}" for b in range(2) for name in ("a", "b", "c")] + ["head"]
    sets = np.array([groups == g for g in range(4)])
    found = {tuple(v) for v in carried_values(flow, groups, modules_of(names)[0], sets).tolist()}
    n = NOT_CARRIED
    through_blocks = {(-1, -1, -1, -1, -1, -1, n), (0, 1, 0, 0, 1, 0, n), (1, 0, n, 1, 0, n, n)}
    assert found == through_blocks | {(-1,) * 7, (0, 1, 0, 0, 1, 0, 0)}  # dim 3 is one group's, "blk0" alone would part the blocks


def test_modules_are_paths_and_paths_of_any_number():
    names = ["embed", "step0/lstm0/input", "step0/lstm1/input", "step1/lstm0/input", "step1/lstm1/input", "step1/lstm1", "head"]
    members, holding = modules_of(names)
    sets = {tuple(np.flatnonzero(m)) for m in members}
    layer0, layer1 = (1, 3), (2, 4, 5)  # in all time steps
    assert sets == {layer0, layer1, (2, 4), (1, 2), (3, 4), (3, 4, 5), (4, 5), (1, 2, 3, 4, 5)}
    assert all(members[m, n] for n, of in enumerate(holding) for m in of)
    assert [len(of) for of in holding] == members.sum(axis=0).tolist()
    assert not holding[0] and modules_of([])[0].shape == (0, 0)


@pytest.mark.parametrize("model, topology, pins", CASES)
def test_exchanged_axes_are_all_pairs_of_one_size_that_differ(model, topology, pins):
    graph, place = graph_of(model), topology_of(topology)
    space = search_space(graph, factor_mesh(place), pins=pins)
    moves, before = Assignments(space), space.random(np.random.default_rng(3))
    found = {after.key(): after for after in moves.exchanged(np.random.default_rng(4), before)}
    expected = set()
    for a, b in itertools.combinations(range(space.num_axes), 2):
        axes = before.axes.copy()
        axes[:, [a, b]] = axes[:, [b, a]]
        for n, row in enumerate(axes):  # what an axis does not offer an operator stays as it was
            if any(v not in {c[k] for c in space.configs(n)} for k, v in enumerate(row)):
                offers = [{c[k] for c in space.configs(n)} for k in (a, b)]
                for k, offer in zip((a, b), offers, strict=True):
                    row[k] = row[k] if row[k] in offer else before.axes[n, k]
        same_size = space.mesh.axis_sizes[a] == space.mesh.axis_sizes[b]
        if same_size and (before.axes[:, a] != before.axes[:, b]).any():
            expected.add(Strategy(axes, before.storage).key())
    assert set(found) == expected and all(space.is_valid(s) for s in found.values())
    assert [s.key() for s in moves.exchanged(np.random.default_rng(4), before)] == list(found), "a seed's"


@pytest.mark.parametrize("model, topology, pins", CASES)
def test_reranked_axes_follow_one_order_in_the_whole_graph(model, topology, pins):
    """Where two operators both offer two dims of the same kind, neither takes one and the other the other."""
    graph, place = graph_of(model), topology_of(topology)
    space = search_space(graph, factor_mesh(place), pins=pins)
    moves, before = Assignments(space), space.random(np.random.default_rng(3))
    flow = moves.flows[1]
    some = False
    for after in moves.reranked(np.random.default_rng(4), before, 24):
        assert space.is_valid(after), space.violations(after)[:1]
        assert (after.storage == before.storage).all()
        changed = [a for a in range(space.num_axes) if (after.axes[:, a] != before.axes[:, a]).any()]
        some |= len(changed) > 0
        for a in changed:
            # Those that moved; others keep what they had where degrees do not divide, or no choice is offered.
            rows = [n for n in range(len(flow)) if after.axes[n, a] != before.axes[n, a]]
            chosen = {n: flow[n, after.axes[n, a] + 1] for n in rows}
            offered = {n: {flow[n, v] for v in np.flatnonzero(space.allowed[n, a])} for n in rows}
            for n, m in itertools.combinations(rows, 2):
                assert chosen[n] == chosen[m] or not {chosen[n], chosen[m]} <= (offered[n] & offered[m])
    assert some
