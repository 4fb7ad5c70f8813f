"""Tasks alone at local shapes: every task that a strategy asks for has a local form, with the planned work, and can be timed."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import family
from planned import data_parallel, rotated
from problems import MODELS, topology_of

from soapjax.costs.measured.interpolation import local_task
from soapjax.execute.compiled.measure import COLD_BYTES, LARGE_BYTES, MAX_COPIES, LocalStep, Unmeasurable, _cold, time_calls
from soapjax.execute.compiled.measure_links import KINDS, time_collectives
from soapjax.execute.spmd.evaluator import ProgramEvaluator
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace
from soapjax.planning.profiling import asked_degrees
from soapjax.search.problem import PlanningProblem
from soapjax.strategy.space import search_space
from soapjax.topology import factor_mesh


@functools.cache
def local_step(model, **settings):
    module, sizes = MODELS[model]
    made = importlib.import_module(f"models.{module}")
    steps = []

    def arguments():
        step, *rest = made.make(**sizes | settings)
        steps.append(step)
        return rest

    args = jax.eval_shape(arguments)
    step = trace(steps[0], *args)
    graph, binding = build_graph(step)
    return LocalStep(step, graph, binding)


EVERY_KIND = family(["mlp", "lm_tied_scan_remat", "moe", "resnet", "lm", "rnnlm"], slow=["resnet", "lm", "rnnlm"])


@pytest.mark.parametrize("model", EVERY_KIND)
def test_every_task_has_a_local_form_with_the_planned_work(model):
    local = local_step(model)
    graph = local.graph
    topology = topology_of("2x4")
    space = search_space(graph, factor_mesh(topology))
    problem = PlanningProblem.make(graph, space, topology)
    seen = set()
    for strategy in (data_parallel(space), rotated(space, 0), rotated(space, 2)):
        degrees, _ = asked_degrees(problem.simulator, strategy)
        for k, task in enumerate(graph.tasks):
            wanted = local_task(graph, k, degrees[k])
            if wanted.identity in seen:
                continue
            seen.add(wanted.identity)
            run, types = local.task(k, degrees[k])
            if task.kind == "dot":
                flops = jax.jit(run).lower(*types).cost_analysis()["flops"]
                assert flops == pytest.approx(wanted.flops, rel=0.05), (graph.operators[task.operator].name, degrees[k])
            else:
                jax.eval_shape(run, *types)
    assert len(seen) > 10


def test_a_whole_task_computes_what_the_step_does():
    """The tasks' functions, fed with the step's own values, give the step's own values."""
    local = local_step("mlp")
    program, values = local.step.program, local.binding.values
    rng = np.random.default_rng(0)
    arguments = [
        (0.1 * rng.standard_normal(a.shape)).astype(a.dtype) if a.dtype.kind == "f" else np.zeros(a.shape, a.dtype)
        for a in local.step.in_avals
    ]
    every = [o for e in program.eqns for o in e.outputs]
    _, found = jax.jit(lambda *a: ProgramEvaluator(program).run(list(a), tuple(every)))(*arguments)
    known = dict(zip(program.inputs, arguments, strict=True)) | dict(zip(every, found, strict=True))
    known |= {values.of(i).root: x for i, x in known.items()} | program.consts
    checked = 0
    for k, task in enumerate(local.graph.tasks):
        eqns = [local.by_key[key] for key in task.equations.keys]
        made = {o for e in eqns for o in e.outputs}
        outside = list(dict.fromkeys(a for e in eqns for a in e.inputs if isinstance(a, int) and a not in made))
        if task.parameter >= 0 or set(outside) & local._generated:
            continue
        run, types = local.task(k, [1] * len(local.graph.operators[task.operator].dims))
        assert [t.shape for t in types] == [np.shape(known[a]) for a in outside]
        got = jax.jit(run)(*(known[a] for a in outside))
        for o, x in zip(local._read_outside(k, eqns), got, strict=True):
            np.testing.assert_allclose(x, known[o], rtol=1e-4, atol=1e-6)
            checked += 1
    assert checked > 10


def test_what_is_written_is_what_a_step_writes():
    """An update's optimizer state and a product's operand, not what a compiler computes anew where it is read."""

    def types_of(local, k):
        run, types = local.task(k, [1] * max(1, len(local.graph.operators[local.graph.tasks[k].operator].dims)))
        return [(x.shape, str(x.dtype)) for x in types], [(x.shape, str(x.dtype)) for x in jax.eval_shape(run, *types)]

    local = local_step("lm", dtype="bfloat16")
    update = next(k for k, t in enumerate(local.graph.tasks) if t.parameter >= 0)
    whole = local.graph.tensors[local.graph.parameters[local.graph.tasks[update].parameter].tensor].shape
    read, written = types_of(local, update)
    assert written == [(whole, "float32")] * 3 and [r for r in read if r[0] == whole] == [(whole, "float32")] * 4
    names = [local.graph.operators[t.operator].name for t in local.graph.tasks]
    mixes = [k for k, t in enumerate(local.graph.tasks) if names[k].endswith("attn.mix") and t.phase == 0]
    for k in mixes:
        wide = [t for t in types_of(local, k)[1] if t[0][-1] > 1]
        assert [dtype for _, dtype in wide] == ["bfloat16"], "the exponentials are computed anew by the backward pass"
    assert mixes


def test_a_task_that_does_not_divide_is_said():
    local = local_step("mlp")
    update = next(k for k, t in enumerate(local.graph.tasks) if t.parameter >= 0)
    with pytest.raises(Unmeasurable):
        local.task(update, [7919])


def test_more_work_takes_longer():
    a = np.random.default_rng(0).standard_normal((1536, 1536)).astype(np.float32)
    product = jax.jit(lambda x, y: x @ y)
    small, large = time_calls(product, [a[:64, :64], a[:64, :64]]), time_calls(product, [a, a])
    assert 0 < 10 * small.seconds < large.seconds and large.num_runs >= 7


def test_large_arguments_are_others_in_every_call():
    small, large = jnp.ones(8), jnp.arange(float(LARGE_BYTES // 4))
    calls = _cold([small, large])
    assert (len(calls) - 1) * large.nbytes <= COLD_BYTES < (len(calls) + 1) * large.nbytes or len(calls) == MAX_COPIES
    assert all(x is small for x, _ in calls) and len({y.unsafe_buffer_pointer() for _, y in calls}) == len(calls)
    assert all((y == large).all() for _, y in calls)
    assert _cold([small]) == [[small]]
    taken = []
    time_calls(lambda x, y: taken.append(id(y)) or x, *calls[:3], repeats=1)
    assert set(taken) == {id(y) for _, y in calls[:3]}


def test_a_task_is_timed():
    local = local_step("mlp")
    dot = next(k for k, t in enumerate(local.graph.tasks) if t.kind == "dot")
    timing = local.ready(dot, [1] * len(local.graph.operators[local.graph.tasks[dot].operator].dims), jax.local_devices()[0])()
    assert 0 < timing.seconds < 1 and timing.num_runs > 0


def test_collectives_of_each_level_are_timed():
    for level, n in ((0, 2), (1, 4)):
        points = time_collectives((2, 4), level, jax.devices()[:8], sizes_bytes=(2**12, 2**16), repeats=2)
        assert [p[0] for p in points] == [k for k in KINDS for _ in range(2)]
        assert all(p[1] == n and p[3] > 0 for p in points) and {p[2] for p in points} == {2**12, 2**16}
