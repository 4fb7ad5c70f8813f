"""Which cuts leave every stage as many rows of stacked state: against counting, and on a graph that is cut."""

import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace
from soapjax.search.stages.grid import Grid
from soapjax.search.stages.stacks import MOST_CROWDED, SMALL, Stacks, reaches
from soapjax.search.stages.stage_problem import StageProblem
from soapjax.topology import load_topology


def stacks_of(places, sizes):
    """Stacks whose rows are owned by the operators at `places` (of every stack a list), rows of `sizes` bytes."""
    rows = [(leaf, place) for leaf, mine in enumerate(places) for place in mine]
    parameters = [SimpleNamespace(owner=n, leaf=n, tensor=leaf) for n, (leaf, _) in enumerate(rows)]
    graph = SimpleNamespace(
        parameters=parameters, leaf_of=tuple(leaf for leaf, _ in rows), tensors=[SimpleNamespace(size_bytes=s) for s in sizes]
    )
    return Stacks(graph, np.array([place for _, place in rows], int))


@st.composite
def cuts(draw):
    num = draw(st.integers(2, 12))
    places = draw(st.lists(st.lists(st.integers(0, num - 1), min_size=2, max_size=6), min_size=1, max_size=3))
    inner = draw(st.sets(st.integers(1, num - 1), max_size=4))
    counts = draw(st.lists(st.integers(1, 2), min_size=1, max_size=len(inner) + 1))
    return places, (0, *sorted(inner), num), tuple(counts)


@given(cuts())
def test_even_is_what_counting_says(case):
    places, bounds, counts = case
    stacks = stacks_of(places, [1] * len(places))
    meshes = [(10 * (s % len(counts)), counts[s % len(counts)]) for s in range(len(bounds) - 1)]
    uneven, moved = 0, np.zeros((len(meshes),) * 2)
    for mine in places:
        stage = [max(s for s, b in enumerate(bounds) if b <= p) for p in mine]
        rows = {s: stage.count(s) for s in stage}
        used = [meshes[s] for s in rows]
        follow = "".join(str(s) for s in stage)
        is_even = (
            len(set(rows.values())) == 1 and len({first for first, _ in used}) == len(used) and len({n for _, n in used}) == 1
            and all(str(s) * n in follow for s, n in rows.items())
        )  # fmt: skip
        if not is_even:
            uneven += len(mine)
            for s in stage:
                moved[stage[0], s] += s != stage[0]
    total = sum(map(len, places))
    assert stacks.is_even(bounds, meshes) == (uneven / total <= SMALL)
    np.testing.assert_array_equal(stacks.elsewhere(bounds, meshes, np.ones(total)), moved)


@given(cuts(), st.integers(1, 5))
def test_runs_that_may_be_stages_lead_to_every_even_cut(case, stages):
    places, bounds, _ = case
    stacks, num = stacks_of(places, [1] * len(places)), bounds[-1]
    marks = tuple(range(num + 1))
    found = any(reaches(allowed, stages) for allowed in stacks.even_cuts(marks, stages))
    wanted = False
    for inner in itertools.combinations(range(1, num), stages - 1):
        rows = np.diff([[sum(p < b for p in mine) for b in (0, *inner, num)] for mine in places], axis=1)
        lengths, most = rows.sum(1), rows.max(1)
        fits = all(set(r) <= {0, m} for r, m in zip(rows, most, strict=True))
        # Loops of one length are dealt as many stages each, and none is crowded. Loops follow one another.
        loops, end = {}, -1
        for mine in sorted(map(sorted, places)):
            first = mine[0] if mine[0] > end else max(loops)
            loops[first] = max(loops.get(first, 0), len(mine))
            end = max(end, mine[-1])
        alike = all(len({m for m, n in zip(most, lengths, strict=True) if n == length}) == 1 for length in lengths)
        wanted |= fits and alike and bool((most <= MOST_CROWDED * -(-sum(loops.values()) // stages)).all())
    assert found == wanted


def scanning(layers):
    def step(w, x):
        value, gradients = jax.value_and_grad(
            lambda w: (jax.lax.scan(lambda h, v: (jax.nn.tanh(h @ v[0]) @ v[1], None), x, w)[0] ** 2).mean()
        )(w)
        return w - 0.1 * gradients, value

    shapes = jax.ShapeDtypeStruct((layers, 2, 16, 16), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
    return build_graph(trace(step, *shapes, unroll="rows"))[0]


@pytest.mark.parametrize(("layers", "stages", "even"), [(6, 3, True), (6, 4, True), (5, 3, False), (7, 2, False), (8, 8, True)])
def test_the_grid_cuts_loops_evenly_where_that_is_possible(layers, stages, even):
    """Six layers on four stages: two each on three of them."""
    graph = scanning(layers)
    problem = StageProblem(graph, load_topology("cpu8"), num_stages=stages, num_microbatches=4)
    assert problem.even_stages == ({stages} if even else set())
    choices = [choice for _, _, choice in Grid(problem).choices()]
    assert choices
    for choice in choices:
        owner = [int(np.searchsorted(choice.bounds, problem.exact.position[p.owner], side="right")) for p in graph.parameters]
        rows = {owner.count(s) for s in owner}
        assert len(rows) == 1 or not even


def test_other_numbers_of_stages_are_searched_too():
    """Seven layers are cut evenly for eight stages, and as it comes for two and four."""
    problem = StageProblem(scanning(7), load_topology("cpu8"), num_microbatches=4)
    assert problem.even_stages == {1, 8} and set(problem.stages) == {1, 2, 4, 8}
    assert {choice.num_stages for _, _, choice in Grid(problem).choices()} == {1, 2, 4, 8}
