"""Plans that recompute operators: proven on eight devices, each repeated product found as planned in the compiled program."""

import functools

import jax
import numpy as np
import pytest
from families import sampled
from problems import abstract

from models import mlp
from soapjax.execute.compiled.pipeline_proof import verify_pipeline
from soapjax.execute.compiled.proof import verify
from soapjax.execute.compiled.stream_inspection import inspect_stream
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.execute.streams.stage_programs import step_of_plan
from soapjax.graph.passes.build import build_graph
from soapjax.graph.passes.phases import BACKWARD
from soapjax.graph.recompute import Recomputation
from soapjax.graph.trace.tracing import trace
from soapjax.planning.entry import plan_of_strategy, planning_problem
from soapjax.planning.pipelining.pipeline_files import pipeline_plan
from soapjax.planning.pipelining.pipelines import find_pipeline
from soapjax.planning.request import PlanRequest
from soapjax.topology import load_topology


def test_a_random_plan_with_a_random_choice_is_proven():
    step, *arguments = mlp.make(batch=16, width=16, layers=4, classes=8, features=8)
    traced, rng = trace(step, *arguments), np.random.default_rng(0)
    options = Recomputation(traced)
    names = [name for name in options.parts if rng.random() < 0.7]
    problem = planning_problem(options.step(names), load_topology("cpu8"))
    plan = plan_of_strategy(problem, problem.space.random(rng))
    assert plan.recomputed and plan.recomputed <= set(names)
    program = bind_plan(traced, plan)
    found = verify(program, jax.tree.leaves(arguments))
    assert found.is_proven_in_float64 and found.is_proven
    repeated = [t for t in program.graph.tasks if t.phase == BACKWARD and t.is_heavy and t.kind == "dot"]
    kept = [t for t in options.graph.tasks if t.phase == BACKWARD and t.is_heavy and t.kind == "dot"]
    assert len(repeated) > len(kept)


def pipeline_of(arguments, schedule, stages, num):
    """A planned pipeline that recomputes most operators."""
    traced, rng = trace(*arguments), np.random.default_rng(0)
    options, place = Recomputation(traced), load_topology("cpu8")
    graph, _ = build_graph(options.step([name for name in options.parts if rng.random() < 0.7]))
    asked, _ = PlanRequest(topology=place, pipeline=schedule, stages=stages, microbatches=num).understood(arguments[0])
    found = find_pipeline(graph, place, asked=asked, proposals=10)
    plan = pipeline_plan(graph, place, found.times)
    assert plan.recomputed == graph.recomputed != set()
    return plan


@pytest.mark.parametrize(("schedule", "stages", "num"), sampled([("zb-h1", 2, 4), ("1f1b", 2, 2), ("1f1b", 1, 2)], 3))
def test_stages_that_recompute_are_proven(schedule, stages, num):
    arguments = mlp.make(batch=24, width=24, layers=4, features=8, classes=4)
    plan = pipeline_of(arguments, schedule, stages, num)

    @functools.cache  # one step is inspected and run: its programs are compiled once
    def made(is_float64):
        return step_of_plan(*arguments, plan=plan, donate=False, is_float64=is_float64).streamed

    run = made(False)
    found = verify_pipeline(made, jax.tree.leaves(arguments[1:]), inspect_stream(run).ops)
    assert found.reference == "the whole batch" and found.numbers.is_proven, found.numbers


@pytest.mark.slow
def test_what_an_earlier_stage_waits_for_is_not_put_off():
    """Not through a barrier either, behind which cotangents wait for what is recomputed: every part reads what others have made."""
    arguments = abstract("transformer_lm", batch=8, seq=16, width=16, layers=4, heads=2, vocab=64)
    step_of_plan(*arguments, plan=pipeline_of(arguments, "zb-h1", 4, 4))
