"""What is kept from one call to the next: strategies that are alike, lane by lane, are judged as if anew, with less work."""

import jax
import numpy as np
import pytest
from problems import case_with
from test_evaluate import call, of_the_problem

from soapjax.costs.evaluate import LANES, Evaluator, forget_results
from soapjax.strategy.configs import Strategy


def neighbours(c, begun, rng, most):
    """Every lane with up to `most` operators as in another random strategy."""
    others = c.strategies(seed=int(rng.integers(2**31)), count=len(begun))
    found = []
    for one, other in zip(begun, others, strict=True):
        some = rng.permutation(c.graph.num_operators)[: rng.integers(0, most + 1)]
        axes, storage = one.axes.copy(), one.storage.copy()
        axes[some], storage[some] = other.axes[some], other.storage[some]
        found.append(Strategy(axes, storage))
    return found


@pytest.mark.parametrize("model, topology, pins", [("lm", "2x4", False), ("lm", "2x4", True), ("mlp_of_sixes", "cpu8", False)])
def test_neighbours_are_judged_as_if_anew(model, topology, pins):
    """Exactly, after many changes of few operators; of storages too, which updates of parameters by other operators depend on."""
    c, rng = case_with(model, topology, pins=pins), np.random.default_rng(0)
    forget_results()
    kept, judged = Evaluator(c.tables), c.strategies(seed=5, count=LANES)
    for most in (1, 0, 2, 1, 4, 1):
        judged = neighbours(c, judged, rng, most)
        found = call(kept, judged)
        expected = call(Evaluator(c.tables), judged)  # another problem to what is kept: all of it is computed
        jax.tree.map(np.testing.assert_array_equal, of_the_problem(c, found), of_the_problem(c, expected))
        kept.take_back(found)


def test_only_what_depends_on_what_changed_is_computed():
    c = case_with("lm", "2x4", pins=False)
    evaluator = Evaluator(c.tables)
    dependents = evaluator._whole.dependents
    num_ops = c.graph.num_operators
    everything = dependents.everything()
    rows = []
    for n in range(num_ops):
        changed = np.zeros(evaluator.bucket.operators, bool)
        changed[n] = True
        todo = dependents.todo(changed)
        assert n in todo.operators.order[: todo.operators.number]
        rows.append(set(todo.rows.order[: todo.rows.number].tolist()))
    assert set.union(*rows) == set(range(int(everything.rows.number)))
    assert np.mean([len(x) for x in rows]) < everything.rows.number / 4
    nothing = dependents.todo(np.zeros(evaluator.bucket.operators, bool))
    assert all(x.number == 0 for x in nothing)


def test_results_most_like_what_is_asked_are_written_over():
    c = case_with("mlp", "a100x8", pins=False)
    forget_results()
    evaluator, (one, other, *_) = Evaluator(c.tables), c.strategies(seed=1, count=2)
    first, second = call(evaluator, [one]), call(evaluator, [other])
    places = [x.per_record.layout.unsafe_buffer_pointer() for x in (first, second)]
    evaluator.take_back(first)
    evaluator.take_back(second)
    assert call(evaluator, [one]).per_record.layout.unsafe_buffer_pointer() == places[0]
    assert call(evaluator, [other]).per_record.layout.unsafe_buffer_pointer() == places[1]
