"""Asynchronous 1F1B against a plain simulation of the same staleness on one device."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from balanced import forward_runs

from soapjax.api import soap_shard
from soapjax.errors import SoapjaxError
from soapjax.execute.compiled.stream_inspection import inspect_stream
from soapjax.execute.parts.microbatches import micro_step
from soapjax.execute.streams.pipedream import PipeDreamStep
from soapjax.execute.streams.stage_programs import places_of
from soapjax.graph.passes.build import build_graph
from soapjax.planning.pipelining.stage_strategies import plans_of_stages
from soapjax.strategy.held import in_flight
from soapjax.strategy.pipeline import Action, Pipeline, Stage
from soapjax.topology import load_topology

WIDTH, LAYERS, MINIBATCHES = 8, 4, 12
OPTIMIZER = optax.sgd(0.3, momentum=0.9)


def loss_fn(params, batch):
    x = batch["x"]
    for k in range(LAYERS):
        x = jnp.tanh(x @ params[f"w{k}"] + params[f"b{k}"])
    return ((x - batch["y"]) ** 2).mean()


@jax.jit
def updated(params, opt_state, grads):
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state


graded = jax.jit(jax.value_and_grad(loss_fn))


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state, "step": state["step"] + 1}, {
        "loss": loss
    }


def arguments():
    keys = iter(jax.random.split(jax.random.key(0), 20))
    params = {}
    for k in range(LAYERS):
        params[f"w{k}"] = jax.random.normal(next(keys), (WIDTH, WIDTH)) / WIDTH**0.5
        params[f"b{k}"] = 0.1 * jax.random.normal(next(keys), (WIDTH,))
    batch = {
        "x": jax.random.normal(next(keys), (4 * MINIBATCHES, WIDTH)),
        "y": jax.random.normal(next(keys), (4 * MINIBATCHES, WIDTH)),
    }
    assert batch["x"].dtype == jnp.result_type(float)
    return {"params": params, "opt_state": OPTIMIZER.init(params), "step": jnp.zeros((), jnp.int32)}, batch


def pipedream_step(replicas, devices_each, *, vertical_sync=False, step=train_step):
    state, batch = arguments()
    micro = micro_step(step, state, batch, num_microbatches=MINIBATCHES)
    graph, binding = build_graph(micro.step)
    stages, first = [], 0
    for names, r in zip(forward_runs(graph, [1.0] * graph.num_operators, len(replicas)), replicas, strict=True):
        stages.append(Stage(operators=names, devices=tuple(range(first, first + r * devices_each)), replicas=r))
        first += r * devices_each
    pipeline = Pipeline(schedule="pipedream", num_microbatches=MINIBATCHES, stages=tuple(stages), vertical_sync=vertical_sync)
    places = places_of(micro, graph, binding, pipeline, plans_of_stages(graph, pipeline, load_topology("cpu8")))
    return PipeDreamStep(micro, pipeline, places), micro, state, batch


def simulated(pipedream, state, batch):
    """One device: for every stage the list of its versions; which one a minibatch sees is counted out here."""
    pipeline, home = pipedream.pipeline, pipedream.cut.home
    paths = dict(zip(pipedream.program.inputs, pipedream.step.in_paths, strict=True))
    stage_of = {paths[v].split(".")[-1]: s for v, s in home.items() if paths[v].startswith("state.params.")}
    replicas = [s.replicas for s in pipeline.stages]
    num_stages = len(replicas)
    held = [0] * num_stages
    for i in reversed(range(num_stages)):  # minibatches that a stage admits before its first backward pass
        held[i] = replicas[i] * (-(-held[i + 1] // replicas[i]) + 1) if i + 1 < num_stages else replicas[i]
    versions = [[state["params"]] for _ in replicas]  # whole trees, of which a stage's own leaves count
    opt_states = [state["opt_state"] for _ in replicas]
    waiting = [[] for _ in replicas]
    losses, seen = [], {}
    for m in range(MINIBATCHES):
        own = [max(0, m - held[s] + 1) // replicas[s] for s in range(num_stages)]
        if pipeline.vertical_sync:
            own = [min(own[0] * replicas[0] // replicas[s], own[s]) for s in range(num_stages)]
        stale = {name: versions[s][own[s]][name] for name, s in stage_of.items()}
        seen.update({Action("forward", s, m): own[s] for s in range(num_stages)})
        minibatch = jax.tree.map(lambda x, m=m: x[4 * m : 4 * m + 4], batch)
        loss, grads = graded(stale, minibatch)
        losses.append(loss)
        for s in range(num_stages):
            waiting[s].append(grads)
            if len(waiting[s]) == replicas[s]:
                mean = jax.tree.map(lambda *g: sum(g) / len(g), *waiting[s])
                new, opt_states[s] = updated(versions[s][-1], opt_states[s], mean)
                versions[s].append(new)
                waiting[s] = []
    return {name: versions[s][-1][name] for name, s in stage_of.items()}, float(np.mean(losses)), seen


@pytest.mark.parametrize(
    "replicas, devices_each, vertical_sync",
    [
        ([1, 1], 2, False), ([1, 1, 1, 1], 1, False), ([1, 1, 1], 1, True), ([3, 1], 1, False), ([1, 2, 1], 2, False),
        ([2, 4], 1, True),
    ],
)  # fmt: skip
def test_the_staleness_of_the_paper(replicas, devices_each, vertical_sync):
    with jax.enable_x64(True):
        the_simulation_agrees(*pipedream_step(replicas, devices_each, vertical_sync=vertical_sync))


def the_simulation_agrees(pipedream, micro, state, batch):
    replicas = [s.replicas for s in pipedream.pipeline.stages]
    outputs, _ = pipedream.run(jax.tree_util.tree_leaves((state, batch)))
    batch = jax.tree.map(np.asarray, batch)
    new_state, metrics = micro.step.out_tree.unflatten(outputs)
    wanted, loss, seen = simulated(pipedream, state, batch)
    assert pipedream.versions == seen
    for name, value in wanted.items():
        np.testing.assert_allclose(new_state["params"][name], value, rtol=1e-12, atol=1e-13)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-13)
    assert int(new_state["step"]) == MINIBATCHES // replicas[pipedream.cut.home[pipedream.program.inputs[-3]]]
    synchronous = state["params"]
    opt_state = state["opt_state"]
    for m in range(MINIBATCHES):
        _, grads = graded(synchronous, jax.tree.map(lambda x, m=m: x[4 * m : 4 * m + 4], batch))
        synchronous, opt_state = updated(synchronous, opt_state, grads)
    assert np.abs(np.asarray(synchronous["w0"]) - np.asarray(new_state["params"]["w0"])).max() > 1e-3  # the staleness shows


@pytest.mark.parametrize("replicas, devices_each", [([3, 1], 1), ([2, 1], 2)])
def test_a_round_of_gradients_is_one_all_reduce(replicas, devices_each):
    pipedream, micro, state, batch = pipedream_step(replicas, devices_each)
    found = inspect_stream(pipedream)
    assert all(k.startswith("send") or size <= 16 for k, size in found.transfers.items())  # beside activations a counter's copies
    updates = {p.name: p for p in found.parts if p.name.startswith("update")}
    r = replicas[0]
    own = [v for s, v in pipedream.cut.gradients if s == 0]
    place = pipedream.places[0][0]
    sizes = [math.prod(place.sharding(v).shard_shape(micro.step.program.avals[v].shape)) * 4 for v in own]
    (one,) = updates["update 0"].collectives
    assert (one.kind, len(one.group), updates["update 0"].runs) == ("all-reduce", r, MINIBATCHES // r)
    assert one.sent_bytes == pytest.approx(2 * (r - 1) / r * sum(sizes))
    assert not updates["update 1"].collectives


def test_straight_pipelines_lag_by_the_stages_that_follow():
    pipedream, _, _, _ = pipedream_step([1, 1, 1, 1], 1)
    lag = {s: {m - pipedream.versions[Action("forward", s, m)] for m in range(4, MINIBATCHES)} for s in range(4)}
    assert lag == {0: {3}, 1: {2}, 2: {1}, 3: {0}}
    assert in_flight(pipedream.pipeline) == (4, 3, 2, 1)
    synced, _, _, _ = pipedream_step([1, 1, 1, 1], 1, vertical_sync=True)
    for m in range(MINIBATCHES):
        assert len({synced.versions[Action("forward", s, m)] for s in range(4)}) == 1


def test_an_update_that_mixes_stages_is_refused():
    def clipped(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        norm = optax.global_norm(grads)
        params = jax.tree.map(lambda p, g: p - 0.1 * g / jnp.maximum(norm, 1.0), state["params"], grads)
        return {**state, "params": params}, {"loss": loss}

    with pytest.raises(SoapjaxError, match="gradients of several stages.*1f1b"):
        pipedream_step([1, 1], 1, step=clipped)


@pytest.mark.parametrize("donate", [True, False])
def test_the_callers_state_is_given_away_where_that_is_asked(donate):
    state, batch = arguments()
    options = dict(topology="cpu8", pipeline="pipedream", stages=2, microbatches=4, proposals=5, donate=donate)
    sharded = soap_shard(train_step, **options).prepare(state, batch)
    given = sharded.shard(state)
    new, _ = sharded(given, batch)
    assert all(x.is_deleted() == donate for x in jax.tree.leaves(given["opt_state"]))
    again, _ = sharded(new if donate else given, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves(again))
