"""A pipeline's plan says all that is needed to run it: no planner is asked, and every choice that is priced can be run."""

import collections
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from balanced import balanced_pipeline
from families import sampled

import soapjax
from models import mlp
from soapjax.errors import SoapjaxError
from soapjax.execute.compiled.pipeline_proof import verify_pipeline
from soapjax.execute.compiled.stream_inspection import inspect_stream
from soapjax.execute.parts.microbatches import micro_step
from soapjax.execute.streams.stage_programs import MicroGraph, step_of_plan
from soapjax.graph.microbatch import micro_batch
from soapjax.graph.passes.build import build_graph
from soapjax.planning.pipelining import staging
from soapjax.planning.pipelining.given_pipeline import planned_pipeline
from soapjax.planning.plan_files import recost
from soapjax.search.experts.baselines import data_parallel_strategy
from soapjax.search.problem import PlanningProblem
from soapjax.search.stages.stage_figures import part_of
from soapjax.search.stages.stage_problem import StageProblem
from soapjax.strategy.configs import stage_storages
from soapjax.strategy.plan import Plan
from soapjax.strategy.space import search_space
from soapjax.topology import factor_mesh, load_topology

NUM = 2
PLANNING = ("/soapjax/search/", "/soapjax/costs/", "/soapjax/simulate/")


@pytest.fixture(scope="module")
def step():
    return mlp.make(batch=24, width=24, layers=3, features=8, classes=4)


@pytest.fixture(scope="module")
def traced(step):
    return soapjax.trace(*step)


@pytest.fixture(scope="module")
def of_micro(step):
    """The step with one micro-batch: whatever the plan, the same."""
    micro = micro_step(*step, num_microbatches=NUM)
    return MicroGraph(micro, *build_graph(micro.step))


@pytest.fixture(scope="module")
def planned(step):
    return soapjax.plan_pipeline(*step, pipeline="1f1b", topology="cpu8", stages=2, microbatches=NUM, proposals=10)[0]


def random_plan(planned, traced, sizes, rng):
    """Stages on `sizes` devices; every operator and storage drawn from the space of its stage's mesh."""
    topology = load_topology("cpu8")
    graph = micro_batch(build_graph(traced)[0], NUM)
    pipeline = balanced_pipeline(graph, 8, num_microbatches=NUM, num_stages=len(sizes))
    first, stages, operators = 0, [], dict(planned.operators)
    for stage, size in zip(pipeline.stages, sizes, strict=True):
        mesh = factor_mesh(part_of(topology, first, size))
        space = search_space(graph, mesh, storages=stage_storages(mesh, adds_up=True))
        strategy = space.random(rng)
        for n, op in enumerate(graph.operators):
            if op.name in stage.operators:
                config = strategy.config(n, op, mesh, space.storages)
                update = {"axes": dict(config.axes), "storage": config.storage}
                operators[op.name] = operators[op.name].model_copy(update=update)
        named = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        update = {"devices": tuple(range(first, first + size)), "mesh": named, "rematerialise": bool(rng.random() < 0.5)}
        stages.append(stage.model_copy(update=update))
        first += size
    pipeline = pipeline.model_copy(update={"stages": tuple(stages)})
    return planned.model_copy(update={"pipeline": pipeline, "operators": operators})


@pytest.mark.parametrize("sizes", sampled([[1, 3, 4], [4, 4], [6, 2]], 3), ids=str)
def test_every_choice_that_is_priced_is_run_and_proven(planned, traced, of_micro, step, sizes):
    """Stages of equal and of different meshes: as written to a file, predicted anew, and read again."""
    plan = random_plan(planned, traced, sizes, np.random.default_rng(sum(sizes[:1])))
    plan = Plan.loads(recost(plan, traced).dumps())
    assert {p.mesh.axis_sizes for p in plan.elsewhere} == (
        {tuple(s.mesh.values()) for s in plan.pipeline.stages} if len(set(sizes)) > 1 else set()
    )

    @functools.cache  # one step is inspected and run: its programs are compiled once
    def made(is_float64):
        return step_of_plan(*step, plan=plan, donate=False, is_float64=is_float64, of_micro=of_micro).streamed

    run = made(False)
    ops = inspect_stream(run).ops
    found = verify_pipeline(made, jax.tree.leaves(step[1:]), ops)
    assert found.reference == "the whole batch" and found.numbers.is_proven, found.numbers


STORED = [("kept", False), ("regathered", False), ("kept, gradients sharded", False), ("regathered", True)]


@pytest.mark.parametrize("how, again", sampled(STORED, 2))
def test_what_is_kept_is_gathered_and_scattered_once_per_step(planned, traced, of_micro, step, how, again):
    """ZeRO-1: parameters are gathered, and gradients reduce-scattered, once per step. ZeRO-3: in every pass. ZeRO-2: both."""
    graph = micro_batch(build_graph(traced)[0], NUM)
    mesh = factor_mesh(part_of(load_topology("cpu8"), 0, 4))
    space = search_space(graph, mesh)
    strategy = data_parallel_strategy(PlanningProblem(graph, space, None))[0]
    operators = dict(planned.operators)
    for n, op in enumerate(graph.operators):
        storage = f"sharded({','.join(mesh.axis_names)}), {how}" if space.owns_parameters[n] else "as used"
        axes = dict(strategy.config(n, op, mesh, space.storages).axes)
        operators[op.name] = operators[op.name].model_copy(update={"axes": axes, "storage": storage})
    pipeline = balanced_pipeline(graph, 8, num_microbatches=NUM, num_stages=2)
    named = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    update = {"mesh": named, "rematerialise": again}
    pipeline = pipeline.model_copy(update={"stages": tuple(s.model_copy(update=update) for s in pipeline.stages)})
    plan = recost(planned.model_copy(update={"pipeline": pipeline, "operators": operators}), traced)

    @functools.cache  # one step is inspected and run: its programs are compiled once
    def made(is_float64):
        return step_of_plan(*step, plan=plan, donate=False, is_float64=is_float64, of_micro=of_micro).streamed

    run = made(False)
    found = inspect_stream(run)
    kinds = {p.name: {k for k, size in p.bytes_by_collective.items() if size} for p in found.parts}
    for part in found.parts:
        predicted = collections.Counter()
        for sent in plan.prediction.sends:
            predicted.update(sent.bytes if sent.program == part.name else {})
        compiled = {k: size for k, size in part.bytes_by_collective.items() if size}
        assert sum(predicted.values()) == pytest.approx(sum(compiled.values()), rel=0.02, abs=64), (part.name, predicted, compiled)
    for s in range(2):
        if how != "regathered":
            assert next(p for p in found.parts if p.name == f"gather {s}").runs == 1
            assert kinds[f"gather {s}"] == {"all-gather"} and not kinds[f"forward {s}"] & {"all-gather"}
        if how == "kept":
            assert "reduce-scatter" in kinds[f"update {s}"] and not kinds[f"backward {s}"] & {"all-gather", "reduce-scatter"}
        elif how != "regathered":
            assert "reduce-scatter" in kinds[f"backward {s}"] and not kinds[f"backward {s}"] & {"all-gather"}
            assert not kinds[f"update {s}"] & {"reduce-scatter"}
        else:
            assert f"gather {s}" not in kinds and "all-gather" in kinds[f"forward {s}"] & kinds[f"backward {s}"]
            assert kinds.get(f"recompute {s}", set()) == ({"all-gather"} if again else set())
            assert "reduce-scatter" in kinds[f"backward {s}"] and not kinds[f"update {s}"] & {"reduce-scatter"}
    proof = verify_pipeline(made, jax.tree.leaves(step[1:]), found.ops)
    assert proof.reference == "the whole batch" and proof.numbers.is_proven, proof.numbers


def test_running_a_plan_asks_no_planner(planned, step):
    called = set()

    def look(frame, event, argument):
        name = frame.f_code.co_filename.replace("\\", "/")
        if event == "call" and any(part in name for part in PLANNING):
            called.add(f"{name}:{frame.f_code.co_name}")

    sys.setprofile(look)
    try:
        step_of_plan(*step, plan=Plan.loads(planned.dumps()))(*step[1:])
    finally:
        sys.setprofile(None)
    assert not called


def test_micro_batches_of_one_sample_are_laid_out_anew():
    """JAX leaves dims of size 1 out: the traced micro-batch reads other operands than the whole batch scaled down."""
    step = mlp.make(batch=4, width=24, layers=3, features=8, classes=4)
    plan = soapjax.plan_pipeline(*step, pipeline="1f1b", topology="cpu8", stages=2, microbatches=4, proposals=10)[0]
    with pytest.raises(SoapjaxError, match="tasks: got specs of"):
        step_of_plan(*step, plan=plan)
    _, wanted = jax.jit(step[0])(*step[1:])
    _, found = planned_pipeline(*step, plan=plan, donate=False)(*step[1:])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, wanted)


def test_specs_that_are_not_there_are_named(planned, traced, step):
    """As in plans of older versions, which say of a pipeline how operators are split, and not how tensors lie."""
    name = next(iter(planned.operators))
    older = planned.operators | {name: planned.operators[name].model_copy(update={"tasks": ()})}
    with pytest.raises(SoapjaxError, match=rf"operators.{name}.tasks: got specs of 0 tasks.*expected.*load_plan"):
        step_of_plan(*step, plan=planned.model_copy(update={"operators": older}))
    again = recost(planned.model_copy(update={"operators": older}), traced)
    assert again.plan_sha256 == planned.plan_sha256


def test_a_device_that_is_not_there_is_named(planned, step):
    with pytest.raises(SoapjaxError, match="devices: got 3 devices; expected the 8 that the pipeline is for"):
        step_of_plan(*step, plan=planned, devices=jax.devices()[:3])


def scanning_step(weights, batch):
    """Four layers of a scan, each with a row of the stacked weights."""

    def loss(weights):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w[0]) @ w[1], None), batch, weights)
        return (h**2).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradients, value


def test_a_loop_over_layers_is_unrolled_to_be_cut():
    weights = jax.random.normal(jax.random.key(0), (4, 2, 16, 16)) / 4
    batch = jax.random.normal(jax.random.key(1), (32, 16))
    plan, _ = soapjax.plan_pipeline(
        scanning_step, weights, batch, pipeline="1f1b", topology="cpu8", stages=2, microbatches=4, proposals=20
    )  # fmt: skip
    assert plan.unroll and staging.UNROLLED in plan.provenance.notes
    wanted = jax.jit(scanning_step)(weights, batch)
    found = soapjax.soap_shard(scanning_step, plan=plan)(weights, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)


def test_no_loop_is_cut_that_is_not_unrolled():
    graph = build_graph(soapjax.trace(scanning_step, jnp.ones((4, 2, 16, 16)), jnp.ones((32, 16))))[0]
    problem = StageProblem(graph, load_topology("cpu8"))
    in_loop = [k for k, n in enumerate(problem.forward) if any(graph.tasks[t].scope for t in graph.operators[n].tasks)]
    assert in_loop and not set(problem.cuts) & set(range(min(in_loop) + 1, max(in_loop) + 1))
    with pytest.raises(SoapjaxError, match="of a loop all together.*unroll the loop"):
        StageProblem(graph, load_topology("cpu8"), num_stages=len(problem.forward) + 1)


def pairwise(w, x):
    """Every sample with every other."""
    return jnp.tanh(x @ w) @ jnp.tanh(x @ w).T


PAIRS = r"every sample with every other \(.* in pairwise: \[32, 32\]\)"
LOSSES = {
    "a mean": (lambda w, x: jnp.mean(jnp.tanh(x @ w) @ w), None),
    "a sum, which whoever runs it says": (lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w), None),
    "softmax over pairs, a mean": (lambda w, x: -jnp.mean(jnp.diag(jax.nn.log_softmax(pairwise(w, x)))), PAIRS),
    "a sum over pairs": (lambda w, x: jnp.sum(jax.nn.softplus(pairwise(w, x))) / len(x), PAIRS),
    "a mean with weights": (lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w) / jnp.sum(x > 0), None),
    "a ratio": (lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w) / jnp.sum(x @ w), "divided by a sum over the batch's results"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_stages_that_micro_batches_cannot_run_are_not_planned(name):
    loss, refused = LOSSES[name]

    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * gradient, value

    def planned():
        return soapjax.plan_pipeline(
            step, jnp.ones((24, 24)) / 100, jnp.ones((32, 24)), pipeline="1f1b", topology="cpu8", stages=2, microbatches=2,
            proposals=1,
        )  # fmt: skip

    if refused is None:
        assert planned()[0].pipeline.num_microbatches == 2
    else:
        with pytest.raises(SoapjaxError, match=refused):
            planned()


@pytest.mark.slow
def test_a_batch_whose_size_is_another_dims():
    """Of a batch of 24 the product of weights and samples is square, of its micro-batches it is not: that is the same step."""

    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: (jnp.tanh(w @ jnp.tanh(x @ w).T) ** 2).mean())(w)
        return w - 0.1 * gradient, value

    options = dict(pipeline="1f1b", topology="cpu8", stages=2, microbatches=2, proposals=1)
    plan, _ = soapjax.plan_pipeline(step, jnp.ones((24, 24)), jnp.ones((24, 24)), **options)
    assert plan.pipeline.num_microbatches == 2

    def over_samples(w, x):  # a loop that runs over as many samples as there are features
        value, gradient = jax.value_and_grad(lambda w: (jax.lax.map(lambda a: jnp.tanh(w @ a), jnp.tanh(x @ w)) ** 2).mean())(w)
        return w - 0.1 * gradient, value

    with pytest.raises(SoapjaxError, match="microbatches: got 2: the step with one of them has other operators.*choose another"):
        soapjax.plan_pipeline(over_samples, jnp.ones((24, 24)), jnp.ones((24, 24)), **options)
