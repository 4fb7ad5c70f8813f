"""Additive problems: reductions, elimination, messages and prices against enumeration; the solver against optima."""

import dataclasses
import gzip
import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soapjax.additive.additive_problem import FORBIDDEN, AdditiveProblem, Score
from soapjax.additive.blocks import Blocks
from soapjax.additive.core import Core
from soapjax.additive.dual import Dual
from soapjax.additive.improve import Improver
from soapjax.additive.iopddl import load_problem
from soapjax.additive.messages import Messages
from soapjax.additive.reduction import NoAllowedChoice, reduce_problem
from soapjax.additive.solver import Best, solve
from soapjax.errors import SoapjaxError

SCRIPT = Path(__file__).parents[2] / "scripts" / "solve_iopddl.py"
SHARED = Path(__file__).parents[3] / "shared" / "data" / "iopddl"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="the contest's problems are not part of the project")
quick = settings(max_examples=60)


def random_problem(seed, num_nodes=None, forbidden=0.2, density=0.45):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7)) if num_nodes is None else num_nodes
    sizes = rng.integers(1, 4, n)
    pairs = [(u, v) if rng.random() < 0.5 else (v, u) for u in range(n) for v in range(u, n) if rng.random() < density]
    edges = np.array(pairs, np.int64).reshape(-1, 2)
    tables = rng.integers(0, 10, int((sizes[edges[:, 0]] * sizes[edges[:, 1]]).sum()))
    tables[rng.random(len(tables)) < forbidden] = FORBIDDEN
    intervals = np.sort(rng.integers(0, 6, (n, 2)), axis=1)
    costs, usages = rng.integers(0, 10, sizes.sum()), rng.integers(0, 8, sizes.sum())
    return AdditiveProblem(sizes, costs, usages, intervals, edges, tables, int(rng.integers(3, 30)))


def plain_score(problem, s):
    """The definition, in loops."""
    at, tables = problem.node_offsets, problem.table_offsets
    costs = [int(problem.costs[at[v] + k]) for v, k in enumerate(s)]
    for e, (u, v) in enumerate(problem.edges.tolist()):
        costs.append(int(problem.tables[tables[e] + s[u] * problem.num_strategies[v] + s[v]]))
    peak = 0
    for t in range(int(problem.intervals.max()) + 1):
        peak = max(peak, sum(int(problem.usages[at[v] + k]) for v, k in enumerate(s) if t in range(*problem.intervals[v])))
    allowed = [c for c in costs if c < FORBIDDEN]
    return Score(len(costs) - len(allowed), max(0, peak - problem.usage_limit), sum(allowed))


def choices(sizes):
    return [np.array(s, np.int64) for s in itertools.product(*[range(k) for k in sizes])]


def optimum(problem):
    return min(problem.score(s) for s in choices(problem.num_strategies))


def core_of(seed, num_nodes=5):
    """A core to play with: nothing forbidden, dense enough that some is left; None where nothing is."""
    reduced = reduce_problem(random_problem(seed, num_nodes, forbidden=0.0, density=0.9))
    return Core(reduced) if len(reduced.costs) else None


seeds = st.integers(0, 10**6)


@quick
@given(seeds)
def test_the_score_is_the_definition(seed):
    problem = random_problem(seed)
    for s in choices(problem.num_strategies)[:50]:
        assert problem.score(s) == plain_score(problem, s)


def test_sums_beyond_64_bits_are_exact():
    n = 40
    one = np.ones(n, np.int64)
    pairs = np.stack([np.zeros(n - 1, np.int64), np.arange(1, n)], axis=1)
    huge = np.full(n, FORBIDDEN - 1)
    problem = AdditiveProblem(one, huge, one * 2**62, np.tile([0, 1], (n, 1)), pairs, np.full(n - 1, FORBIDDEN), 5)
    assert problem.score(np.zeros(n, np.int64)) == Score(n - 1, n * 2**62 - 5, n * (FORBIDDEN - 1))


@quick
@given(seeds)
def test_reductions_keep_the_optimum(seed):
    problem = random_problem(seed)
    expected = optimum(problem)
    if not expected.is_feasible:
        return
    reduced = reduce_problem(problem)
    core = Core(reduced)
    found = []
    for s in choices(core.sizes):
        score = problem.score(reduced.expand(s))
        cost = core.cost(s) + reduced.offset
        assert (cost >= FORBIDDEN) == (score.violations > 0)
        if not score.violations:
            assert score.cost == cost and (score.excess == 0) == core.fits(s)
            found.append(score)
    assert min(found) == expected


@quick
@given(seeds)
def test_a_reduction_cut_short_keeps_it_too(seed):
    problem = random_problem(seed)
    expected = optimum(problem)
    if expected.is_feasible:
        reduced = reduce_problem(problem, deadline=0.0)
        assert min(problem.score(reduced.expand(s)) for s in choices([len(c) for c in reduced.costs])) == expected


@quick
@given(seeds)
def test_a_block_is_the_best_of_its_choices(seed):
    core = core_of(seed)
    if core is None:
        return
    rng = np.random.default_rng(seed)
    blocks = Blocks(core)
    start = np.array([rng.integers(k) for k in core.sizes])
    unary = core.unary + rng.integers(0, 9, len(core.unary))
    free = rng.random(core.num_nodes) < 0.8

    def value(s):
        return core.cost(s) + (unary - core.unary)[core.offsets[:-1] + s].sum()

    for max_table in (2, 6, 1e6):
        plan = blocks.plan(rng, free, start, max_table)
        domain = {v: plan.domains.get(v, np.arange(core.sizes[v])) for v, _ in plan.order}
        inside = [s for s in choices(core.sizes) if all(k in domain.get(v, start[v : v + 1]) for v, k in enumerate(s))]
        found = blocks.solve(plan, start, unary)
        assert value(found) == min(map(value, inside)) <= value(start)
        if max_table == 1e6:
            assert not plan.domains and {v for v, _ in plan.order} == set(np.flatnonzero(free))


@quick
@given(seeds)
def test_bounds_bound(seed):
    core = core_of(seed)
    if core is None:
        return
    dual, messages = Dual(core), Messages(core)
    every = choices(core.sizes)
    least = min(map(core.cost, every))
    fitting = [core.cost(s) for s in every if core.fits(s)]
    for _ in range(12):
        messages.sweep(core.unary)
        assert messages.bound(core.unary) <= least + 1e-6
        choice = dual.step(0.0)
        assert dual.bound <= min(fitting, default=np.inf) + 1e-6
        assert (0 <= choice).all() and (choice < core.sizes).all()


def test_messages_solve_trees_exactly():
    rng = np.random.default_rng(0)
    n = 12
    sizes = np.full(n, 3)
    edges = np.array([(int(rng.integers(v)), v) for v in range(1, n)])
    problem = AdditiveProblem(
        sizes,
        rng.integers(0, 50, 3 * n),
        rng.integers(1, 9, 3 * n),
        np.tile([0, 2], (n, 1)),
        edges,
        rng.integers(0, 50, 9 * (n - 1)),
        10,
    )
    core = Core(reduce_problem(problem, deadline=0.0))  # not reduced: a tree
    messages = Messages(core)
    for _ in range(30):
        choice = messages.sweep(core.unary)
    best = Blocks(core).plan(rng, np.ones(n, bool), choice, 1e6)
    exact = core.cost(Blocks(core).solve(best, choice, core.unary))
    assert core.cost(choice) == exact
    assert messages.bound(core.unary) == pytest.approx(exact)


@quick
@given(seeds)
def test_improving_never_returns_what_does_not_fit(seed):
    core = core_of(seed)
    if core is None:
        return
    improver = Improver(core, np.random.default_rng(seed))
    start = improver.least_memory()
    if core.fits(start):
        for _ in range(5):
            found = improver.round(start, np.full(core.num_times, 0.5), None)
            assert found is None or core.fits(found)


@settings(max_examples=25)
@given(seeds)
def test_the_solver_finds_the_optimum(seed):
    problem = random_problem(seed)
    expected = optimum(problem)
    best = Best(problem)
    solve(best, 60, seed)  # all of so small a core is enumerated: it ends by itself
    if expected.is_feasible:
        assert best.score == expected
        assert best.bound == pytest.approx(expected.cost)
        assert best.infeasible is None
    else:
        assert not best.score.is_feasible and best.infeasible


def test_rounds_reach_an_optimum_that_is_best_at_no_price():
    """Seed 620's optimum lies inside the convex hull of the others: solving all of the core at any price misses it."""
    core = Core(reduce_problem(random_problem(620)))
    fitting = [core.cost(s) for s in choices(core.sizes) if core.fits(s)]
    improver = Improver(core, np.random.default_rng(0))
    dual = Dual(core)
    for _ in range(60):
        dual.step(0.0)
    choice = improver.least_memory()
    assert core.fits(choice)
    for _ in range(300):
        found = improver.round(choice, dual.best_prices, dual.best_beliefs)
        if found is not None and core.cost(found) < core.cost(choice):
            choice = found
    assert core.cost(choice) == min(fitting)


@pytest.mark.parametrize("rate", [1.0, 1e-300, 3e-323, 5e-324, 0.0])
def test_sizes_are_drawn_however_long_no_round_has_gained(rate):
    """Gains per second fall by a fifth with every round that brings nothing, down to what floats cannot tell from zero."""
    improver = Improver(Core(reduce_problem(random_problem(620))), np.random.default_rng(0))
    improver.region_sizes = [1, 2, 4, 8]
    improver.rates = rate * np.array([1.0, 0.6, 0.3, 0.9])
    drawn = [improver.draw_size() for _ in range(400)]
    assert set(drawn) == {0, 1, 2, 3}


def test_what_cannot_fit_is_said_with_the_least_excess():
    problem = random_problem(3, 5, forbidden=0.0)
    least = np.minimum.reduceat(problem.usages, problem.node_offsets[:-1])
    problem = dataclasses.replace(problem, usage_limit=problem.peak_usage(least) - 2)
    best = Best(problem)
    solve(best, 0.5)
    assert best.score.excess == 2 and "every choice uses at least" in best.infeasible


def test_no_allowed_choice_is_noticed():
    two = np.array([2, 2])
    none = AdditiveProblem(
        two, np.zeros(4, np.int64), np.ones(4, np.int64), np.tile([0, 1], (2, 1)), np.array([[0, 1]]), np.full(4, FORBIDDEN), 5
    )
    with pytest.raises(NoAllowedChoice):
        reduce_problem(none)
    best = Best(none)
    solve(best, 0.5)
    assert best.score == Score(1, 0, 0) and "forbidden" in best.infeasible


# --- the command


EXAMPLE = {
    "problem": {
        "name": "small",
        "nodes": {"intervals": [[0, 2], [1, 3]], "costs": [[3, 1], [2, 5]], "usages": [[1, 4], [1, 4]]},
        "edges": {"nodes": [[0, 1]], "costs": [[0, 1, 1, 0]]},
        "usage_limit": 5,
    }
}


def command(*argv):
    return subprocess.run([sys.executable, SCRIPT, *map(str, argv)], capture_output=True, text=True, timeout=60)


def written(tmp_path, edit):
    data = json.loads(json.dumps(EXAMPLE))
    edit(data["problem"])
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(data))
    return path


def test_the_command_prints_the_solution_last(tmp_path):
    ended = command(written(tmp_path, lambda p: None), "--seconds", 40)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == [1, 0]
    assert "cost 4" in ended.stderr


def test_an_infeasible_problem_ends_with_3_and_the_least_violating_solution(tmp_path):
    ended = command(written(tmp_path, lambda p: p.update(usage_limit=1)), "--seconds", 40)
    assert ended.returncode == 3
    assert json.loads(ended.stdout.splitlines()[-1]) == [0, 0]
    assert "infeasible: every choice uses at least 2 of 1" in ended.stderr


def _set(*path_and_value):
    *path, last, value = path_and_value

    def edit(problem):
        for key in path:
            problem = problem[key]
        problem[last] = value

    return edit


def _drop(key):
    return lambda problem: problem.pop(key)


BAD = [
    (_set("nodes", "costs", 0, [1, 2, 3]), "problem.nodes.usages[0]: got 2 entries; expected 3"),
    (_set("edges", "costs", 0, [1, 2, 3]), "problem.edges.costs[0]: got 3 entries; expected 2 x 2 = 4"),
    (_set("edges", "nodes", 0, [0, 2]), "problem.edges.nodes[0]: got [0, 2]; expected node numbers from 0 to 1"),
    (_set("edges", "nodes", 0, [-1, 0]), "problem.edges.nodes[0]: got [-1, 0]"),
    (_set("usage_limit", 0), "problem.usage_limit: got 0; expected a positive whole number"),
    (_set("usage_limit", -5), "problem.usage_limit: got -5"),
    (_drop("usage_limit"), "problem.usage_limit: got nothing"),
    (_drop("edges"), "problem.edges: got nothing"),
    (_set("nodes", {"intervals": [], "costs": [], "usages": []}), "problem.nodes.costs: got []; expected at least one node"),
    (_set("nodes", "costs", 1, [float("nan"), 1]), "problem.nodes.costs[1][0]: got nan"),
    (_set("edges", "costs", 0, [0, 1, 2, float("inf")]), "problem.edges.costs[0][3]: got inf"),
    (_set("nodes", "costs", 1, [-3, 1]), "problem.nodes.costs[1][0]: got -3"),
    (_set("nodes", "costs", 1, ["x", 1]), "problem.nodes.costs[1][0]: got 'x'"),
    (_set("nodes", "usages", 1, [1, 2.5]), "problem.nodes.usages[1][1]: got 2.5"),
    (_set("nodes", "intervals", 1, [3, 1]), "problem.nodes.intervals[1]: got [3, 1]; expected start <= end"),
    (_set("nodes", "intervals", 1, [3]), "problem.nodes.intervals[1]: got [3]; expected [start, end]"),
    (_set("nodes", "costs", 0, []), "problem.nodes.costs[0]: got []; expected at least one strategy"),
    (_set("nodes", "intervals", [[0, 1]]), "problem.nodes.intervals: got 1 entries; expected 2"),
]


@pytest.mark.parametrize("edit, message", BAD, ids=[m.split(":")[0] + str(i) for i, (_, m) in enumerate(BAD)])
def test_bad_problems_are_refused(tmp_path, edit, message):
    with pytest.raises(SoapjaxError) as raised:
        load_problem(written(tmp_path, edit))
    assert message in str(raised.value)


def test_all_failures_are_told_at_once_with_status_2(tmp_path):
    def edit(problem):
        problem["usage_limit"] = -1
        problem["nodes"] = 7

    ended = command(written(tmp_path, edit), "--seconds", 0, "--seed", "x")
    assert ended.returncode == 2 and ended.stdout == ""
    lines = ended.stderr.splitlines()
    assert len(lines) == 4 and all(line.startswith("error: ") and "Remedy: " in line for line in lines)
    assert "a budget of zero" in ended.stderr and "usage_limit" in ended.stderr and "--seed" in ended.stderr


@pytest.mark.parametrize("content", [b"{", b"\x1f\x8b broken", b"\xff\xfe\xff", b"[]", b"[" * 100_000, b'{"problem": {}}', b"NaN"])
def test_files_that_are_no_problem_are_refused(tmp_path, content):
    path = tmp_path / "problem.json.gz"
    path.write_bytes(content)
    with pytest.raises(SoapjaxError):
        load_problem(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(SoapjaxError, match="nothing there"):
        load_problem(tmp_path / "none.json")


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("soapjax.additive.iopddl.MAX_BYTES", 2**16)
    path = tmp_path / "problem.json.gz"
    path.write_bytes(gzip.compress(b" " * 2**20))
    with pytest.raises(SoapjaxError, match="at most 65536 bytes"):
        load_problem(path)


def test_costs_beyond_1e18_forbid_too(tmp_path):
    problem = load_problem(written(tmp_path, _set("nodes", "costs", 0, [10**30, 1])))
    assert problem.score(np.array([0, 0])).violations == 1


def hard_problem(tmp_path):
    """Large enough that the search does not end by itself."""
    rng = np.random.default_rng(0)
    n, k = 60, 6
    pairs = [(u, v) for u in range(n) for v in range(u + 1, n) if rng.random() < 0.3]
    data = {
        "nodes": {
            "intervals": [[int(a), int(a) + 30] for a in rng.integers(0, 60, n)],
            "costs": rng.integers(0, 1000, (n, k)).tolist(),
            "usages": rng.integers(1, 100, (n, k)).tolist(),
        },
        "edges": {"nodes": pairs, "costs": rng.integers(0, 1000, (len(pairs), k * k)).tolist()},
        "usage_limit": 1500,
    }
    path = tmp_path / "hard.json"
    path.write_text(json.dumps({"problem": data}))
    return path


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_search_with_the_best_so_far(tmp_path, name):
    path = hard_problem(tmp_path)
    process = subprocess.Popen(
        [sys.executable, SCRIPT, path, "--seconds", "50"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for _ in range(3):
        assert "cost" in process.stderr.readline()
    time.sleep(0.2)
    process.send_signal(getattr(signal, name))
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0 and "Traceback" not in err
    score = load_problem(path).score(np.array(json.loads(out.splitlines()[-1])))
    assert score.is_feasible and f"best: cost {score.cost}" in err


def test_an_interrupt_that_is_lost_comes_again(tmp_path):
    """As one is that comes in a finalizer: the search ends all the same, with what it has."""
    program = """
def deaf(*_, **__):
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(60)
"""
    ended = solved_by(program, "deaf", hard_problem(tmp_path))
    assert ended.returncode in (0, 3) and "Traceback" not in ended.stderr
    assert len(json.loads(ended.stdout.splitlines()[-1])) == load_problem(tmp_path / "hard.json").num_nodes


def test_a_solver_that_fails_says_so_and_keeps_its_best(tmp_path):
    program = """
def failing(best, *_, **__):
    best.offer(best.strategies + 1)
    raise ValueError("probabilities do not sum to 1")
"""
    ended = solved_by(program, "failing", hard_problem(tmp_path))
    assert ended.returncode == 1 and "probabilities do not sum to 1" in ended.stderr
    score = load_problem(tmp_path / "hard.json").score(np.array(json.loads(ended.stdout.splitlines()[-1])))
    assert f"best: cost {score.cost}" in ended.stderr


def solved_by(program: str, name: str, path: Path) -> subprocess.CompletedProcess:
    """The script, with another solver."""
    program = f"""
import sys, time
sys.path.insert(0, {str(SCRIPT.parent)!r})
import solve_iopddl
{program}
solve_iopddl.solve = {name}
sys.argv = ["solve_iopddl.py", {str(path)!r}, "--seconds", "1"]
sys.exit(solve_iopddl.main())
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)


@needs_data
def test_the_contests_example():
    problem = load_problem(SHARED / "example.json")
    best = Best(problem)
    solve(best, 1.0)
    assert best.score == Score(0, 0, 445) and best.strategies.tolist() == [0, 0, 2, 1, 0]


@needs_data
def test_instance_b_is_solved():
    problem = load_problem(SHARED / "asplos-2025-iopddl-B.json.gz")
    best = Best(problem)
    solve(best, 4.0)
    assert best.score.is_feasible and best.score.cost <= 1.25 * 532843
    assert best.bound <= 532843
