"""Weights that passes read in another type: cast once per step where the copies fit, in every pass where they do not."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import soapjax
from models import mlp
from soapjax.execute.compiled.pipeline_proof import verify_pipeline
from soapjax.execute.compiled.stream_inspection import inspect_stream
from soapjax.execute.parts.microbatches import micro_step
from soapjax.execute.streams.stage_programs import MicroGraph, step_of_plan
from soapjax.graph.passes.build import build_graph
from soapjax.planning.pipelining.given_pipeline import pipelined
from soapjax.planning.plan_files import recost
from soapjax.search.stages.choices import Choice
from soapjax.search.stages.stage_problem import StageProblem
from soapjax.strategy.plan import Plan
from soapjax.topology import load_topology

NUM, WIDTH, LAYERS = 4, 192, 4
SCHEDULES = {"1f1b": False, "zb-h1": False, "gpipe": True}  # and whether stages compute again


@functools.cache
def step():
    return mlp.make(batch=16, width=WIDTH, layers=LAYERS, features=WIDTH, classes=8, dtype="bfloat16")


@functools.cache
def traced():
    return soapjax.trace(*step())


@functools.cache
def of_micro():
    """The step with one micro-batch: whatever the schedule, the same."""
    micro = micro_step(*step(), num_microbatches=NUM, full=traced())
    return MicroGraph(micro, *build_graph(micro.step))


def topology(memory_bytes=None):
    """Two GPUs; of so much memory."""
    found = load_topology("a100x8")
    found = dataclasses.replace(found, levels=(found.levels[-1].part(0, 2),))
    device = dataclasses.replace(found.device, memory_fraction=1.0, memory_margin=0.0)
    if memory_bytes is not None:
        device = dataclasses.replace(device, memory_bytes=int(memory_bytes))
    return dataclasses.replace(found, device=device)


def chosen(schedule, memory_bytes=None):
    """Two stages of one device each: the problem, and the choice."""
    graph = build_graph(traced())[0]
    problem = StageProblem(graph, topology(memory_bytes), num_stages=2, num_microbatches=NUM)
    middle = len(problem.forward) // 2
    again = (SCHEDULES[schedule],) * 2
    return problem, Choice(schedule, NUM, (0, middle, len(problem.forward)), (1, 1), (0, 0), again)


def both(schedule):
    """(problem, priced, pipeline) with casts kept, and of devices whose memory the copies do not fit into."""
    problem, choice = chosen(schedule)
    kept = problem.price(choice)
    tight, _ = chosen(schedule, kept.memory_bytes - 1)
    return [(p, p.price(choice), p.pipeline(choice)) for p in (problem, tight)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_they_are_kept_where_they_fit(schedule):
    (_, kept, with_copies), (_, tight, without) = both(schedule)
    assert all(s.keeps_casts for s in with_copies.stages) and not all(s.keeps_casts for s in without.stages)
    assert kept.is_feasible and tight.is_feasible  # a choice that fits does not cease to
    assert kept.timeline.step_time_s < tight.timeline.step_time_s and kept.memory_bytes > tight.memory_bytes


def runs(schedule, **options):
    """The step with copies and without."""
    problem, choice = chosen(schedule)
    pipeline = problem.pipeline(choice)
    for keeps in (True, False):
        stages = tuple(s.model_copy(update={"keeps_casts": keeps}) for s in pipeline.stages)
        own = pipeline.model_copy(update={"stages": stages})
        yield keeps, pipelined(*step(), pipeline=own, topology=problem.topology, of_micro=of_micro(), **options).streamed


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_passes_read_the_copies_and_numbers_are_the_same(schedule):
    results, leaves = [], jax.tree.leaves(step()[1:])
    for keeps, run in runs(schedule, donate=False):
        stream = run.dispatches()
        kernels = {s for s, leaf in zip(stream.given, run.argument_structs(), strict=True) if leaf.shape == (WIDTH, WIDTH)}
        readers = {d.label.split()[0] for d in stream.dispatches if kernels & set(d.ins)}
        passes = {"forward", "backward"} | ({"recompute"} if SCHEDULES[schedule] else set())
        assert readers == ({"gather"} if keeps else passes) | {"update"}
        assert sum(d.label.startswith("gather") for d in stream.dispatches) == 2 * keeps
        results.append(jax.tree.leaves(run.run(leaves)))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_copies_take_the_memory_that_is_predicted():
    compiled, predicted = [], []
    for _, run in runs("1f1b"):
        found = inspect_stream(run).memory_bytes
        compiled.append([found[p.mesh.devices.flat[0].id] for p in run.places])
    for _, priced, _ in both("1f1b"):
        predicted.append(priced.timeline.memory_bytes)
    fullest = int(np.argmax(predicted[0]))
    copies = np.subtract(*predicted)[fullest]
    assert copies == pytest.approx(np.subtract(*compiled)[fullest], rel=0.05) and copies > WIDTH**2


@pytest.mark.slow
def test_a_plan_file_says_so_and_is_proven():
    """As planned on devices with room, as written, and predicted anew; files of before say nothing, and cast in every pass."""
    options = dict(pipeline="1f1b", stages=2, microbatches=NUM, proposals=16, topology=topology())
    plan = Plan.loads(soapjax.plan_pipeline(*step(), **options)[0].dumps())
    assert all(s.keeps_casts for s in plan.pipeline.stages)
    of_before = plan.dumps().replace('"keeps_casts": true', '"keeps_casts": false')
    assert recost(plan, traced()).prediction == plan.prediction
    before = recost(Plan.loads(of_before), traced()).prediction
    assert before.step_time_s > plan.prediction.step_time_s
    assert before.memory_bytes_per_device < plan.prediction.memory_bytes_per_device

    @functools.cache  # one step is inspected and run: its programs are compiled once
    def made(is_float64):
        return step_of_plan(*step(), plan=plan, donate=False, is_float64=is_float64, of_micro=of_micro()).streamed

    run = made(False)
    ops = inspect_stream(run).ops
    found = verify_pipeline(made, jax.tree.leaves(step()[1:]), ops)
    assert found.reference == "the whole batch" and found.numbers.is_proven, found.numbers
