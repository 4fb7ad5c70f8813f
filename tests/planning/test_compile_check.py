"""The compiler's word on a plan's memory: what is called fitting fits as compiled, by whoever plans."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_line import call

from soapjax import InfeasibleError, Plan, load_topology, soap_shard, trace
from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.compiled.devices import devices_of_target
from soapjax.execute.compiled.inspection import inspect
from soapjax.execute.compiled.stream_inspection import inspect_stream
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.planning import compile_check, entry
from soapjax.planning.choosing import as_asked
from soapjax.planning.pipelining.given_pipeline import planned_pipeline
from soapjax.planning.plan_files import recost
from soapjax.planning.request import PlanRequest

WIDTH, BATCH = 128, 1024


def step(weights, x):
    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.square(y).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value


def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(k, (WIDTH, WIDTH)) / 11 for k in keys[1:]], jax.random.normal(keys[0], (BATCH, WIDTH))


def cpu8(available_bytes):
    topology = load_topology("cpu8")
    device = dataclasses.replace(topology.device, memory_bytes=int(available_bytes), memory_fraction=1.0)
    return dataclasses.replace(topology, device=device)


def planned(topology, **options):
    return entry.plan(step, *arguments(), topology=topology, **{"planner": "optcnn"} | options)


@pytest.fixture(scope="module")
def roomy():
    """The plan where memory is no concern, checked."""
    return planned(cpu8(2**30), check="compile").plan


def compiled_bytes(found):
    return inspect(bind_plan(found.step, found.plan, devices=jax.devices("cpu")[:8])).memory_bytes


def test_what_the_compiler_says_is_in_the_plan(roomy):
    (figures,) = roomy.provenance.compiled
    assert figures.fits and figures.compiled_memory_bytes > 0 < figures.predicted_memory_bytes
    assert figures.predicted_memory_bytes == roomy.prediction.memory_bytes_per_device
    assert sum(figures.compiled_sent_bytes.values()) == pytest.approx(sum(roomy.prediction.bytes_by_collective.values()), rel=0.05)


@pytest.mark.parametrize("planner", ["optcnn", "mcmc"])
def test_where_the_winner_does_not_fit_as_compiled_the_search_goes_on_with_less(roomy, monkeypatch, planner):
    """Of a compiler whose programs take half as much again as predicted."""
    compile_one = compile_check.compiled_plan

    def hungry(step, plan, *args):
        return compile_one(step, plan, *args)._replace(memory_bytes=int(1.5 * plan.prediction.memory_bytes_per_device))

    monkeypatch.setattr(entry, "compiled_plan", hungry)
    available = int(1.1 * roomy.prediction.memory_bytes_per_device)
    found = planned(cpu8(available), check="compile", planner=planner, proposals=256)
    asked = found.plan.provenance.compiled
    assert len(asked) > 1 and not any(f.fits for f in asked[:-1]) and asked[-1].fits
    assert all(a.predicted_memory_bytes > b.predicted_memory_bytes for a, b in zip(asked[:-1], asked[1:], strict=True))
    p = found.plan.prediction
    assert p.feasible and asked[-1].predicted_memory_bytes == p.memory_bytes_per_device <= p.usable_memory_bytes <= available
    assert found.plan.topology["device"]["memory_margin_fraction"] > 0  # tightened, and the file says so
    assert Plan.loads(found.plan.dumps()) == found.plan
    assert recost(found.plan, found.step).prediction == p


def test_what_is_called_fitting_fits(roomy):
    available = int(0.8 * roomy.provenance.compiled[0].compiled_memory_bytes)
    found = planned(cpu8(available), check="compile")
    assert found.plan.provenance.compiled[-1].compiled_memory_bytes == compiled_bytes(found) <= available
    assert found.plan.prediction.feasible


def test_the_compiler_has_the_last_word_on_a_plan_that_is_predicted_not_to_fit(roomy, monkeypatch):
    needed = roomy.prediction.memory_bytes_per_device
    monkeypatch.setattr(entry, "compiled_plan", lambda *args: compile_check.Compiled("cpu", needed // 4, {}, None))
    found = planned(cpu8(needed // 3), check="compile", planner="data_parallel")
    assert found.plan.prediction.memory_bytes_per_device > found.plan.prediction.usable_memory_bytes
    assert found.plan.prediction.feasible and recost(found.plan, found.step).prediction.feasible
    edited = {n: part.model_copy(update={"storage": "as used"}) for n, part in found.plan.operators.items()}
    edited = {n: part.model_copy(update={"axes": dict.fromkeys(part.axes, "replicate")}) for n, part in edited.items()}
    assert not recost(found.plan.model_copy(update={"operators": edited}), found.step).prediction.feasible  # another plan


def test_nothing_fits_is_said_with_figures():
    with pytest.raises(InfeasibleError, match=r"as compiled \(predicted .*expected at most 100 kB on cpu8"):
        planned(cpu8(100_000), check="compile", planner="fsdp")


def test_the_step_that_runs_is_compiled_once(roomy, monkeypatch):
    from soapjax.execute.spmd import compiled_step

    made, compile_for = [], compiled_step.compiled_for
    monkeypatch.setattr(compiled_step, "compiled_for", lambda *args: made.append(args) or compile_for(*args))
    sharded = soap_shard(step, topology=cpu8(2**30), planner="data_parallel", devices=jax.devices("cpu")[:8])
    weights, _ = sharded(*arguments())
    assert len(made) == 1 and sharded.plan.provenance.compiled[-1].fits
    np.testing.assert_allclose(weights[0], jax.jit(step)(*arguments())[0][0], rtol=1e-4, atol=1e-6)


def test_a_step_that_runs_fits_or_says_why_not(caplog):
    options = dict(topology=cpu8(200_000), planner="data_parallel", devices=jax.devices("cpu")[:8])
    with pytest.raises(InfeasibleError, match="as compiled"):
        soap_shard(step, **options)(*arguments())
    unchecked = soap_shard(step, **options, check="none")
    with caplog.at_level(logging.WARNING, "soapjax"):
        unchecked(*arguments())
    assert "as compiled" in caplog.text and not unchecked.plan.provenance.compiled


def test_what_is_only_prepared_is_not_compiled():
    prepared = soap_shard(step, topology=cpu8(2**30), planner="data_parallel", devices=jax.devices("cpu")[:8])
    prepared.prepare(*arguments())
    assert not prepared.plan.provenance.compiled
    topology = prepared.plan.topology["device"]
    assert prepared.plan.prediction.usable_memory_bytes == pytest.approx(2**30 * (1 - topology["memory_margin_fraction"]), rel=1e-6)


def test_no_plan_that_was_not_compiled_fills_the_margin(roomy):
    """The limit of the search, of the baselines' figures and of the plan is one and the same."""
    needed = roomy.prediction.memory_bytes_per_device
    topology = cpu8(1.2 * needed)  # less the margin it is not enough
    found = planned(topology)
    limit = topology.device.usable_memory_bytes
    assert limit < needed and found.plan.prediction.usable_memory_bytes == limit
    assert found.plan.prediction.feasible == (found.plan.prediction.memory_bytes_per_device <= limit)
    for name, figures in found.plan.provenance.baseline_figures.items():
        assert figures.feasible == (figures.memory_bytes_per_device <= limit) == found.baselines[name].best.is_feasible


def test_the_command_compiles_and_says_what_it_found(tmp_path):
    plan = ["plan", "soapjax.models.mlp", "--topology", "cpu8", "--planner", "fsdp", "--check", "compile", "--set", "batch=16"]
    ended = call(*plan, "--set", "width=64", "--json", "-o", tmp_path / "plan.json")
    assert ended.status == 0 and [f["fits"] for f in ended.result["compiled"]] == [True]
    assert "compiled for cpu" in call("simulate", tmp_path / "plan.json").out


def test_what_does_not_go_together_is_said_at_once():
    ended = call("plan", "nowhere", "--target", "cpu", "--check", "compiler")
    assert ended.status == 2 and "--target" in ended.err and "--check" in ended.err and "none or compile" in ended.err


def test_a_backend_that_cannot_compile_here_is_named():
    with pytest.raises(ValueError, match="those of a100x8"):
        entry.plan(step, *jax.eval_shape(arguments), topology="a100x8", check="compile", planner="data_parallel")
    found = entry.plan(
        step, *jax.eval_shape(arguments), topology="a100x8", check="compile", planner="data_parallel",
        devices=devices_of_target(load_topology("a100x8"), "cpu"),
    )  # fmt: skip
    assert found.plan.provenance.compiled[-1].target == "cpu"


def test_a_step_is_compiled_for_the_devices_that_it_runs_on_whatever_it_was_planned_for():
    sharded = soap_shard(step, topology="a100x8", planner="data_parallel")
    sharded(*arguments())
    assert sharded.plan.provenance.compiled[-1].target == "cpu"


STAGES = [dict(pipeline="1f1b", stages=2), dict(pipeline="pipedream", stages=2, microbatches=4), dict(microbatches=4)]


def staged(topology, **options):
    return as_asked(PlanRequest(topology=topology, check="compile", proposals=16, **options), step, *arguments())


@pytest.mark.parametrize("options", STAGES)
def test_stages_are_compiled_once_and_the_plan_says_what_they_take(options, monkeypatch):
    import soapjax.steps.making

    monkeypatch.setattr(soapjax.steps.making, "planned_pipeline", None)  # what was checked is what runs
    sharded = soap_shard(step, topology=cpu8(2**30), proposals=16, **options)
    weights, _ = sharded(*arguments())
    (figures,) = sharded.plan.provenance.compiled
    made = planned_pipeline(step, *arguments(), plan=sharded.plan).streamed
    assert figures.compiled_memory_bytes == max(inspect_stream(made).memory_bytes.values())
    assert figures.predicted_memory_bytes == sharded.plan.prediction.memory_bytes_per_device and figures.fits
    if options.get("pipeline") != "pipedream":
        np.testing.assert_allclose(weights[0], jax.jit(step)(*arguments())[0][0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", STAGES[::2])
def test_stages_that_do_not_fit_as_compiled_are_planned_with_less(monkeypatch, options):
    """Of a compiler whose programs take half as much again as they do."""
    compile_one = compile_check.compiled_stream

    def hungry(made):
        found = compile_one(made)
        return found._replace(memory_bytes=int(1.5 * found.memory_bytes))

    available = 1.2 * staged(cpu8(2**30), **options).plan.provenance.compiled[-1].compiled_memory_bytes
    monkeypatch.setattr(compile_check, "compiled_stream", hungry)
    found = staged(cpu8(available), **options).plan
    *before, last = found.provenance.compiled
    assert before and not any(f.fits for f in before) and last.fits
    p = found.prediction
    assert p.feasible and last.predicted_memory_bytes == p.memory_bytes_per_device <= p.usable_memory_bytes < available
    assert Plan.loads(found.dumps()).dumps() == found.dumps()
    assert recost(found, trace(step, *arguments(), unroll=found.unroll)).prediction == p


def test_further_searches_of_stages_are_short_and_do_not_give_up(monkeypatch):
    """By default a quarter of the proposals; where a search finds nothing under its limit, one with a lower one follows."""
    from soapjax.planning.pipelining import staging

    asked, find, available = [], staging.find_pipeline, 1.0e6

    def found(graph, topology, **how):
        asked.append((how["proposals"], topology.device.usable_memory_bytes))
        if len(asked) == 2:
            raise SoapjaxError(Problem("stage 0", "too much", "less", "more stages"))
        return find(graph, topology, **how | {"proposals": 16})

    makes = iter([1.3 * available, 0.9 * available])
    compile_one = compile_check.compiled_stream
    monkeypatch.setattr(compile_check, "compiled_stream", lambda made: compile_one(made)._replace(memory_bytes=int(next(makes))))
    monkeypatch.setattr(staging, "find_pipeline", found)
    plan = as_asked(PlanRequest(topology=cpu8(available), check="compile", pipeline="1f1b", stages=2), step, *arguments()).plan
    assert [n for n, _ in asked] == [600, 150, 150] and sorted(asked, key=lambda x: -x[1]) == asked
    assert [f.fits for f in plan.provenance.compiled] == [False, True]
    assert plan.provenance.num_proposals > 16  # of all searches


def test_an_interrupt_in_a_further_search_of_stages_keeps_what_was_found(monkeypatch):
    from soapjax.planning.pipelining import staging

    find, calls = staging.find_pipeline, []

    def interrupted(graph, topology, **how):
        calls.append(topology)
        return find(graph, topology, **how)._replace(stopped_by="proposals" if len(calls) == 1 else "interrupted")

    monkeypatch.setattr(compile_check, "compiled_stream", lambda made: compile_check.Compiled("cpu", 2**21, {}, None))
    monkeypatch.setattr(staging, "find_pipeline", interrupted)
    chosen = staged(cpu8(2**20 * 1.9), pipeline="1f1b", stages=2)
    assert chosen.stopped_by == "interrupted" and chosen.program is None and len(chosen.plan.provenance.compiled) == 1


def test_too_few_devices_are_named_before_anything_is_searched():
    with pytest.raises(SoapjaxError, match="devices: got 4 devices; expected the 8 of cpu8"):
        staged(cpu8(2**30), pipeline="1f1b", devices=jax.devices("cpu")[:4])


def test_stages_that_fit_under_no_plan_are_refused_with_figures(monkeypatch):
    monkeypatch.setattr(compile_check, "compiled_stream", lambda made: compile_check.Compiled("cpu", 2**31, {}, None))
    with pytest.raises(InfeasibleError, match="2.15 GB per device as compiled .*the least of .* expected at most 1.07 GB on cpu8"):
        staged(cpu8(2**30), pipeline="1f1b", stages=2)


def test_the_command_compiles_stages(tmp_path):
    plan = ["plan", "soapjax.models.mlp", "--topology", "a100x8", "--check", "compile", "--target", "cpu", "--set", "batch=16"]
    ended = call(*plan, "--pipeline", "1f1b", "--stages", "2", "--proposals", "16", "--json", "-o", tmp_path / "plan.json")
    assert ended.status == 0 and [f["fits"] for f in ended.result["compiled"]] == [True]
    assert "compiled for cpu" in call("simulate", tmp_path / "plan.json").out
