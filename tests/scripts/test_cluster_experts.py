"""The hand-written strategies compute what the models compute: losses over three steps, all parameters trained."""


import cluster_experts
import jax
import numpy as np
import pytest

from models import alexnet, rnnlm, transformer_lm
from soapjax.execute.transfers.arrivals import place

SMALL = {
    "alexnet": (alexnet, {"batch": 8, "image": 67, "width": 0.0625, "classes": 16, "dropout": 0.0}),
    "lstm": (
        rnnlm,
        {"batch": 8, "seq": 4, "hidden": 16, "layers": 2, "vocab": 64, "scan": True, "optimizer": "sgd", "learning_rate": 0.1},
    ),
    "transformer": (transformer_lm, {"batch": 8, "seq": 8, "width": 32, "layers": 2, "heads": 8, "vocab": 64, "optimizer": "adam"}),
}  # fmt: skip
# What is the same for all models takes long and can break in one place only: by default the special ones are enough.
CASES = [
    pytest.param(name, label, marks=[pytest.mark.slow] if label in ("hand: data parallelism", "hand: fully sharded") else [])
    for name in SMALL
    for label in cluster_experts.EXPERTS[name]
]


def losses(step, state, batch):
    found = []
    for _ in range(4):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.parametrize("name, label", CASES)
def test_a_hand_written_step_trains_as_the_model(name, label):
    module, settings = SMALL[name]
    step, state, batch = module.make(**settings)
    expected = losses(jax.jit(step), state, batch)
    assert expected[-1] != pytest.approx(expected[0], rel=1e-4)  # else nothing would have been trained
    expert = cluster_experts.EXPERTS[name][label](settings)
    placed = jax.tree.map(place, expert.arguments, expert.shardings)
    np.testing.assert_allclose(losses(expert.step, *placed), expected, rtol=2e-5)


@pytest.mark.slow
def test_a_hand_written_resnet_runs():
    """Its batch statistics are each device's own, as usual, so that only the first losses are alike."""
    settings = {"depth": "tiny", "batch": 8, "image": 32, "width": 8, "classes": 8}
    found = []
    for make in cluster_experts.EXPERTS["resnet"].values():
        expert = make(settings)
        found.append(losses(expert.step, *jax.tree.map(place, expert.arguments, expert.shardings)))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-3)
