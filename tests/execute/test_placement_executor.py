"""Plans with pins run, and are proven like others."""

import importlib

import jax
import numpy as np
import pytest
from families import family

import soapjax
from soapjax.errors import SoapjaxError
from soapjax.execute.compiled.proof import verify
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.execute.streams.placed_step import PlacedStep
from soapjax.planning.entry import plan_of_strategy, planning_problem
from soapjax.planning.plan_files import recost
from soapjax.planning.remarks import num_programs
from soapjax.search.experts.placement import model_parallel_strategy
from soapjax.strategy.configs import PIN
from soapjax.topology import load_topology

MODELS = {
    "mlp": ("mlp", dict(batch=16, width=16, layers=2, features=8)),
    "nmt": ("nmt", dict(batch=8, seq=2, hidden=8, layers=1, vocab=32)),
    "inception": ("inception_v3", dict(batch=8)),
    "lm_scan": ("transformer_lm", dict(batch=8, seq=8, width=16, layers=2, heads=2, vocab=32, scan=True)),
}


def made(name, *, topology="cpu8"):
    module, sizes = MODELS[name]
    step, state, batch = importlib.import_module(f"models.{module}").make(**sizes)
    traced = soapjax.trace(step, state, batch)
    return step, state, batch, traced, planning_problem(traced, load_topology(topology), space="paper")


@pytest.mark.parametrize("name", family(["mlp", "nmt", "inception"], slow=["nmt", "inception"]))
def test_random_pinned_plans_are_proven(name):
    _, state, batch, traced, problem = made(name)
    plan = plan_of_strategy(problem, problem.space.random(np.random.default_rng(0)))
    assert plan.executable and len(plan.pinned) > len(plan.operators) / 2
    program = bind_plan(traced, plan)
    found = verify(program, jax.tree_util.tree_leaves((state, batch)))
    assert found.is_proven, found
    assert found.num_gradients == len(problem.graph.parameters)
    assert found.ops_unchecked <= 0.2 * found.planned_ops  # tiny products lose their names


def test_layers_on_devices_train():
    """Model parallelism: every layer on one device; parameters and optimizer state live there."""
    step, state, batch, traced, problem = made("mlp")
    plan = plan_of_strategy(problem, model_parallel_strategy(problem)[0])
    sharded = soapjax.soap_shard(step, plan=plan)
    mine, theirs, plain = state, state, jax.jit(step)
    for _ in range(3):
        mine, metrics = sharded(mine, batch)
        theirs, wanted = plain(theirs, batch)
        assert float(metrics["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-5)
    layers = {name: mine["params"][name]["kernel"].sharding.device_set for name in ("dense0", "dense1", "head")}
    assert all(len(devices) == 1 for devices in layers.values()) and len(set(map(frozenset, layers.values()))) > 1
    for name, devices in layers.items():
        assert mine["opt_state"][0].mu[name]["kernel"].sharding.device_set == devices
    _, events = sharded.traced(mine, batch)
    assert {e.track for e in events if e.name.startswith("program")} >= {f"devices {next(iter(d)).id}" for d in layers.values()}


def test_parameters_live_where_their_owners_run():
    """Unrolled steps share their weights: others read them too, elsewhere."""
    _, _, _, traced, problem = made("nmt")
    apart = 0
    for seed in range(4):
        plan = plan_of_strategy(problem, problem.space.random(np.random.default_rng(seed)))
        placed = PlacedStep(bind_plan(traced, plan), donate=False)
        for p in problem.graph.parameters:
            place = placed.places[placed._place_of[p.owner]]
            for leaf in p.leaves:
                assert placed.in_shardings[leaf].device_set == set(place.mesh.devices.flat)
            readers = {placed._place_of[t.operator] for t in problem.graph.tasks for a in t.reads if a.tensor == p.tensor}
            apart += len(readers) > 1
    assert apart > 10


def test_a_part_runs_on_its_own_devices_alone():
    _, state, batch, traced, problem = made("mlp")
    plan = plan_of_strategy(problem, problem.space.random(np.random.default_rng(1)))
    placed = PlacedStep(bind_plan(traced, plan))
    for part in placed.parts:
        place = placed.places[part.place]
        for eqn in part.eqns:
            task = placed.program.binding.task_of.get(eqn.key)
            if task is not None and eqn.key in part.own:
                pins = placed._keys[placed._place_of[placed.program.graph.tasks[task].operator]]
                expected = placed.program.mesh.devices[tuple(slice(None) if p is None else p for p in pins)]
                assert set(place.mesh.devices.flat) == set(np.ravel(expected))
    assert sum(len(p.own) for p in placed.parts) == len({k for p in placed.parts for k in p.own})


@pytest.mark.parametrize("seed", range(3))
def test_a_remark_counts_the_programs(seed):
    """Those that run, but for what the order in which equations read changes, and some that do nothing of their own."""
    _, _, _, traced, problem = made("mlp")
    strategy = problem.space.random(np.random.default_rng(seed))
    placed = PlacedStep(bind_plan(traced, plan_of_strategy(problem, strategy)))
    assert len(placed.parts) > 3 and num_programs(problem.graph, strategy) == pytest.approx(len(placed.parts), rel=0.2)


def test_every_step_keeps_its_list_of_dispatches():
    """What was compiled ahead is what runs, also where several steps take turns."""
    _, _, _, traced, problem = made("mlp")
    plans = [plan_of_strategy(problem, problem.space.random(np.random.default_rng(seed))) for seed in range(3)]
    steps = [PlacedStep(bind_plan(traced, plan)) for plan in plans]
    before = [step.dispatches() for step in steps]
    assert [step.dispatches(with_gradients=False) for step in steps] == before
    assert all(step.dispatches(with_gradients=True) is not mine for step, mine in zip(steps, before, strict=True))
    assert [step.dispatches() for step in steps] == before


@pytest.mark.slow
def test_a_loop_is_on_one_set_of_devices():
    _, _, _, traced, problem = made("lm_scan")
    strategy = model_parallel_strategy(problem)[0]
    loops = {t.operator for t in problem.graph.tasks if t.scope}
    first = min(loops)
    strategy.axes[first] = [PIN(0)] * 3
    strategy.axes[sorted(loops)[1]] = [PIN(1)] * 3
    plan = plan_of_strategy(problem, strategy)
    assert not plan.executable and not recost(plan, traced).executable
    with pytest.raises(SoapjaxError, match="operators of each loop on the same devices.*unroll"):
        bind_plan(traced, plan)
