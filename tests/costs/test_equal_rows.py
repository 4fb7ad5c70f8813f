"""Rows that cost the same are computed once: told apart exactly, whatever the hash says; figures are as if all were computed."""

import jax
import numpy as np
import pytest
from problems import case_with
from test_evaluate import call, of_the_problem

from soapjax.costs import equal_rows
from soapjax.costs.equal_rows import DistinctRows, distinct_rows, equal_layouts
from soapjax.costs.evaluate import LANES, Evaluator, figure_of_rows, forget_results
from soapjax.costs.whole import nothing_yet, rows_pass
from soapjax.strategy.configs import Strategy

CASES = [("lm", "2x4", False), ("lm", "2x4", True), ("mlp_of_sixes", "cpu8", False)]
of_cases = pytest.mark.parametrize("model, topology, pins", CASES)


def judged(model, topology, pins):
    """A problem, its evaluator, and what that found of strategies of which most operators agree, as in a descent."""
    c, rng = case_with(model, topology, pins=pins), np.random.default_rng(0)
    base = c.data_parallel()
    strategies = []
    for other in c.strategies(seed=5, count=LANES):
        is_other = rng.random(c.graph.num_operators) < 0.2
        axes = np.where(is_other[:, None], other.axes, base.axes)
        strategies.append(Strategy(axes.astype(np.int8), np.where(is_other, other.storage, base.storage).astype(np.int8)))
    evaluator = Evaluator(c.tables)
    return c, evaluator, call(evaluator, strategies)


def told_apart(evaluator, each):
    """`DistinctRows` of the slots' layouts that were found."""
    begun = nothing_yet(evaluator.bucket, LANES).per_record.equal
    return jax.jit(lambda p, r, x, y: distinct_rows(p, r, equal_layouts(p, x), y))(*evaluator._whole, each.layout, begun)


@of_cases
def test_figures_are_as_if_every_row_were_computed(model, topology, pins):
    c, evaluator, found = judged(model, topology, pins)
    each, count = found.per_record, int(evaluator.arrays.counts[5])
    nothing = nothing_yet(evaluator.bucket, LANES).per_record
    every = DistinctRows(nothing.equal.row, np.int32(count), nothing.equal)
    expected = nothing._replace(rows=jax.jit(rows_pass)(*evaluator._whole, every, each.layout, nothing.rows))
    for name in each.rows._fields:
        kind = len(c.tables.edge_task) if name in ("copy", "is_sent") else len(c.tables.tensor_bytes)
        number = count if name in ("full_s", "sent", "full_bytes", "on", "on_kept") else kind
        for lane in (0, 7, LANES - 1):
            got = figure_of_rows(each, name, lane)[:number]
            np.testing.assert_array_equal(got, figure_of_rows(expected, name, lane)[:number], err_msg=name)


@of_cases
@pytest.mark.parametrize("bits", [equal_rows.HASH_BITS, 1])
def test_equal_rows_have_equal_numbers_and_layouts(model, topology, pins, bits, monkeypatch):
    """Of a table of two places, too, where nearly every row finds another one in its place."""
    c, evaluator, found = judged(model, topology, pins)
    monkeypatch.setattr(equal_rows, "HASH_BITS", bits)
    each, count = found.per_record, int(evaluator.arrays.counts[5])
    apart, layout = told_apart(evaluator, each), np.asarray(each.layout)
    equal, record = np.asarray(apart.equal.row)[:count], np.asarray(evaluator.records.row)[:count]
    p = evaluator.arrays
    numbers = [np.asarray(x)[:count].reshape(count, -1) for x in (p.row_int, p.row_float, p.row_shape, p.row_fixed)]
    of_layouts = layout[record[:, 1:5]].reshape(count, -1)
    for x in (*numbers, of_layouts):
        np.testing.assert_array_equal(x[equal], x)
    distinct = np.asarray(apart.order)[: int(apart.number)]
    np.testing.assert_array_equal(distinct, np.flatnonzero(equal == np.arange(count)))
    differ = len(np.unique(np.concatenate([*(x.astype(np.float64) for x in numbers), of_layouts], 1), axis=0))
    assert differ <= len(distinct)
    if bits > 1:
        assert len(distinct) <= 1.05 * differ + 1  # few meet another in their place
    num_t, num_e = len(c.tables.tensor_bytes), len(c.tables.edge_task)
    np.testing.assert_array_equal(np.asarray(apart.equal.tensor)[:num_t], equal[:num_t])
    np.testing.assert_array_equal(np.asarray(apart.equal.edge)[:num_e] + num_t, equal[num_t : num_t + num_e])


def test_results_that_nobody_reads_are_written_over():
    """By the next call, and figures do not depend on what stood there."""
    c = case_with("mlp", "a100x8", pins=False)
    forget_results()
    evaluator, (one, other, *_) = Evaluator(c.tables), c.strategies(seed=1, count=2)
    first = call(evaluator, [one])
    expected = of_the_problem(c, first)
    place = first.per_record.layout.unsafe_buffer_pointer()
    kept = call(evaluator, [other])
    assert kept.per_record.layout.unsafe_buffer_pointer() != place
    evaluator.take_back(first)
    over = call(evaluator, [other])
    assert over.per_record.layout.unsafe_buffer_pointer() == place
    jax.tree.map(np.testing.assert_array_equal, of_the_problem(c, over), of_the_problem(c, kept))
    evaluator.take_back(over)
    jax.tree.map(np.testing.assert_array_equal, of_the_problem(c, call(evaluator, [one])), expected)
