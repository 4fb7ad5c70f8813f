"""Plans that recompute operators: proven on eight devices, each repeated product found as planned in the compiled program."""

import jax
import numpy as np

from models import mlp
from soapjax.execute.compiled.proof import verify
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.graph.passes.phases import BACKWARD
from soapjax.graph.recompute import Recomputation
from soapjax.graph.trace.tracing import trace
from soapjax.planning.entry import plan_of_strategy, planning_problem
from soapjax.topology import load_topology


def test_a_random_plan_with_a_random_choice_is_proven():
    step, *arguments = mlp.make(batch=16, width=16, layers=6, classes=8, features=8)
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
