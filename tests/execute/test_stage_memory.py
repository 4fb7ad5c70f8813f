"""What stages hold: micro-batches in flight, and bytes, as compiled beside as predicted."""

import jax
import jax.numpy as jnp
import pytest
from problems import abstract

from soapjax.execute.compiled.stream_inspection import inspect_stream
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace
from soapjax.planning.pipelining.given_pipeline import pipelined
from soapjax.search.stages.choices import Choice
from soapjax.search.stages.stage_problem import StageProblem
from soapjax.topology import load_topology

NUM, WIDTH, LAYERS, BATCH = 4, 16, 6, 1024


def step(params, x):
    """A wide batch and small weights: memory is activations."""

    def loss_fn(params):
        h = x
        for w in params:
            h = jax.nn.relu(h @ w)
        return (h**2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}


def arguments():
    return [jnp.ones((WIDTH, WIDTH))] * LAYERS, jnp.ones((BATCH, WIDTH))


@pytest.fixture(scope="module")
def problem():
    graph, _ = build_graph(trace(step, *arguments()))
    return StageProblem(graph, load_topology("cpu8"), num_stages=2, num_microbatches=NUM)


def memory(problem, schedule, again):
    """(predicted, compiled) bytes of the devices of two stages of one device each."""
    end = len(problem.forward)
    choice = Choice(schedule, NUM, (0, end // 2, end), (1, 1), (0, 0), (again, again))
    timeline = problem.price(choice).timeline
    run = pipelined(step, *arguments(), pipeline=problem.pipeline(choice), topology=problem.topology).streamed
    compiled = inspect_stream(run).memory_bytes
    return timeline.memory_bytes, [compiled[p.mesh.devices.flat[0].id] for p in run.places]


def test_memory_is_as_predicted_and_rematerialisation_lowers_it_as_predicted(problem):
    found = {(s, again): memory(problem, s, again) for s in ("1f1b", "gpipe") for again in (False, True)}
    for predicted, compiled in found.values():
        assert predicted == pytest.approx(compiled, rel=0.15)
    for schedule in ("1f1b", "gpipe"):
        (kept, kept_compiled), (again, again_compiled) = found[schedule, False], found[schedule, True]
        assert again_compiled[0] < kept_compiled[0]
        assert again[0] / kept[0] == pytest.approx(again_compiled[0] / kept_compiled[0], rel=0.15)
    # GPipe holds all micro-batches on every stage, 1F1B one on the last.
    assert found["gpipe", False][1][1] > found["1f1b", False][1][1]


@pytest.mark.slow
def test_a_stage_holds_copies_of_tied_parameters_and_its_sums_of_their_gradients():
    """The head reads the table, most of all memory, that the first stage holds: no less is predicted than is compiled."""
    made = abstract("transformer_lm", batch=16, seq=16, width=64, layers=1, heads=4, vocab=8192, tie=True)
    problem = StageProblem(build_graph(trace(*made))[0], load_topology("cpu8"), num_stages=2, num_microbatches=NUM)
    end = len(problem.forward)
    choice = Choice("1f1b", NUM, (0, end // 2, end), (1, 1), (0, 0), (False, False))
    predicted = problem.price(choice).timeline.memory_bytes
    run = pipelined(*made, pipeline=problem.pipeline(choice), topology=problem.topology).streamed
    compiled = inspect_stream(run).memory_bytes
    last = compiled[run.places[1].mesh.devices.flat[0].id]
    assert last <= predicted[1] <= 1.25 * last
