"""What is sent of a loop's values, where the stages behind it read the last one, or all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import soapjax
from soapjax.execute.compiled.stream_inspection import inspect_stream
from soapjax.execute.streams.stage_programs import step_of_plan
from soapjax.graph.passes.build import build_graph
from soapjax.search.stages.stage_flows import flows_between

BATCH, LENGTH, WIDTH, CLASSES = 8, 6, 16, 256


def recurrent(what):
    """A loop over time, and a wide head over its last state, all its states, or both."""

    def step(params, x, y):
        def loss_fn(w):
            def move(h, x):
                h = jnp.tanh(x @ w["in"] + h @ w["own"])
                return h, h

            last, every = jax.lax.scan(move, jnp.zeros((x.shape[0], WIDTH)), x.swapaxes(0, 1))
            read = {"last": last, "all": every.mean(0), "both": every.mean(0) + jnp.sin(last)}[what]
            return ((jnp.tanh(read @ w["a"]) @ w["b"] - y[:, None]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    shapes = {"in": (WIDTH, WIDTH), "own": (WIDTH, WIDTH), "a": (WIDTH, CLASSES), "b": (CLASSES, CLASSES)}
    params = {name: jnp.full(shape, 0.1) for name, shape in shapes.items()}
    return step, params, jnp.ones((BATCH, LENGTH, WIDTH)), jnp.ones(BATCH)


def test_of_a_loops_last_value_one_is_sent_and_its_gradient_comes_back():
    graph, _ = build_graph(soapjax.trace(*recurrent("last")))
    loop = {task.operator for task in graph.tasks if task.scope}
    stage = np.array([int(n > max(loop)) for n in range(graph.num_operators)])
    found = {f.kind: f for f in flows_between(graph, stage)}
    assert found.keys() == {"forward", "backward"}
    sent = {k: f.share * graph.tensors[f.tensor].size_bytes * graph.tensors[f.tensor].copies for k, f in found.items()}
    assert sent == dict.fromkeys(found, BATCH * WIDTH * 4)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["last", "all", "both"])
def test_transfers_are_those_of_the_compiled_programs(what):
    made = recurrent(what)
    plan, _ = soapjax.plan_pipeline(*made, pipeline="1f1b", topology="cpu8", stages=2, microbatches=2, proposals=1)
    compiled = inspect_stream(step_of_plan(*made, plan=plan).streamed).transfers
    predicted = {}
    for part in plan.prediction.sends:
        if "transfer" in part.bytes:
            predicted[part.program] = predicted.get(part.program, 0) + part.bytes["transfer"]
    assert predicted.keys() == {"send 0 to 1", "send 1 to 0"} == compiled.keys()
    for name, size in predicted.items():
        assert abs(size - compiled[name]) <= 0.02 * compiled[name] + 64
