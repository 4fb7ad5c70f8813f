"""A deep model's graph with few of its blocks, against the graph of the model written with so few."""

import itertools

import numpy as np
import pytest
from families import sampled
from problems import graph_with, topology_of

from soapjax.graph.condensing import MOST_KEPT, condense, forward_operators, prefix_crossing, repeated_blocks
from soapjax.search.stages.condensed_loads import CondensedLoads
from soapjax.search.stages.stage_loads import StageLoads

DEEP, FEW = 7, MOST_KEPT + 1  # one more is no block of the run: its first norm reads the embedding


def lm(layers, **options):
    return graph_with("lm", layers=layers, **options)


@pytest.mark.parametrize("options", sampled([dict(remat=True, tie=True), {}], 2), ids=["remat, tied", "plain"])
def test_it_is_the_graph_of_the_shallow_model(options):
    whole, few = lm(DEEP, **options), lm(FEW, **options)
    found = condense(whole, prefix_crossing(whole, forward_operators(whole)))
    assert found.blocks.num_blocks == DEEP - 1 and found.num_removed == DEEP - FEW
    for field in ("operators", "tasks", "tensors", "parameters", "accumulations"):
        assert len(getattr(found.graph, field)) == len(getattr(few, field))
    assert [o.group for o in few.operators] == pytest.approx([o.group for o in found.graph.operators])
    assert sorted(t.shape for t in found.graph.tensors) == sorted(t.shape for t in few.tensors)
    # Priced as stages they are the same, under every strategy that stages are offered.
    loads = [StageLoads(g, topology_of("2x4")) for g in (found.graph, few)]
    n = len(loads[0].forward)
    for bounds, inner in itertools.product([(0, n), (0, n // 2), (n // 2, n)], (0, 4, 8)):
        one, other = (np.array(x.load(bounds, 0, 8, 2, inner)) for x in loads)
        np.testing.assert_allclose(one, other, rtol=0.03, atol=1e-9)  # with remat some tasks stand in another order


@pytest.mark.slow
def test_a_stage_of_many_blocks_costs_what_the_whole_graph_says():
    whole = lm(DEEP)
    exact = StageLoads(whole, topology_of("2x4"))
    loads = CondensedLoads(exact, prefix_crossing(whole, exact.forward))
    blocks, n = loads.condensed.blocks, len(exact.forward)
    marks = [0, *range(blocks.first, blocks.end + 1, blocks.period), n]
    choices = loads.fabric(0, 8, 4).choices
    all_figures = [exact.fabric(0, 8, 4).figures(loads.strategy(inside.strategy)) for inside in choices]
    for (a, b), (k, inside) in itertools.product(itertools.combinations(sorted(set(marks)), 2), enumerate(choices)):
        found = loads.load((a, b), 0, 8, 4, k)
        wanted = exact.load_of((a, b), 0, 8, 4, all_figures[k])
        # Gradients that wait to be scattered in one collective are more in more blocks, up to what a collective takes.
        waits = inside.name.endswith(("regathered", "gradients"))
        rough = {name: getattr(wanted, name) for name in ("working_bytes", "split_working_bytes", "update_s")}
        for name, rel in (("working_bytes", 0.02), ("split_working_bytes", 0.035)):
            assert getattr(found, name) == pytest.approx(rough[name], rel=0.15 if waits else rel)
        assert found.update_s == pytest.approx(wanted.update_s, rel=4e-3)  # latency is shared with what is merged
        found = found._replace(**rough)
        np.testing.assert_allclose(np.array(found), np.array(wanted), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("layers", [1, 2, MOST_KEPT])
def test_a_shallow_model_stays_as_it_is(layers):
    graph = lm(layers)
    assert condense(graph, prefix_crossing(graph, forward_operators(graph))) is None


def test_blocks_begin_where_a_module_begins():
    graph = lm(4)
    blocks = repeated_blocks(graph, prefix_crossing(graph, forward_operators(graph)))
    names = [graph.operators[n].name for n in forward_operators(graph)]
    assert [names[blocks.first + k * blocks.period] for k in range(blocks.num_blocks)] == [f"blk{k}/norm1" for k in (1, 2, 3)]
