"""What is compiled while a step is traced is what its problem needs afterwards."""

import jax
import pytest
from problems import case

from soapjax.planning.early_programs import problem_like
from soapjax.search.chain.engine import engine_of
from soapjax.search.problem import PlanningProblem


def shapes(tree):
    return jax.tree.map(lambda x: (jax.numpy.shape(x), str(jax.numpy.asarray(x).dtype)), tree)


@pytest.mark.parametrize("model", ["mlp", "lm", "resnet"])
@pytest.mark.parametrize("topology", ["a100x8", "a100x64", "p100x16"])
def test_it_is_the_program_of_a_step_with_so_many_leaves(model, topology):
    """The same buckets and the same shapes are the same executables."""
    found = case(model, topology)
    like = problem_like(len(found.graph.in_paths), found.topology)
    early = like.simulator
    assert early.evaluator.program is found.simulator.evaluator.program
    assert early.item_records[1] == found.simulator.item_records[1]
    assert engine_of(like).programs is engine_of(PlanningProblem(found.graph, found.space, found.simulator)).programs
    assert shapes((early.evaluator.arrays, early.evaluator.records, early.item_records[0])) == shapes(
        (found.simulator.evaluator.arrays, found.simulator.evaluator.records, found.simulator.item_records[0])
    )


@pytest.mark.parametrize(("leaves", "scale"), [(114, 0), (431, 0), (594, 0), (876, 1), (2322, 1), (4623, 2)])
def test_as_many_layouts_are_expected_as_models_have(leaves, scale):
    """Of 2 and 12 layers of a Transformer with Adam's state, ResNet-50, 32 layers of Llama, and Transformers of 48 and 96."""
    assert problem_like(leaves, case("mlp", "a100x8").topology).simulator.evaluator.bucket.scale == scale
