"""Reading collectives from HLO: kinds, bytes, groups, trips; what is unknown is an error; predicted beside compiled."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from problems import abstract

import soapjax
from soapjax.errors import SoapjaxError
from soapjax.execute.compiled import aot
from soapjax.execute.compiled.collectives import collectives_of, replica_group, shape_bytes
from soapjax.execute.compiled.inspection import inspect
from soapjax.execute.compiled.traffic import compare_by_kind, differences
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.planning.entry import plan_of_strategy, planning_problem
from soapjax.search.planners import get_planner
from soapjax.search.problem import Budget
from soapjax.topology import load_topology

TEXT = """HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %ar = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add, metadata={op_name="jit(f)/m/sj7/psum"}
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %ar)
}

%cond (p: (s32[], f32[8])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%wrapped (w: bf16[16]) -> bf16[4] {
  %w = bf16[16]{0} parameter(0)
  ROOT %rs = bf16[4]{0} reduce-scatter(%w), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
}

ENTRY %main (q: f32[8], r: bf16[16]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %r = bf16[16]{0} parameter(1)
  %w = (s32[], f32[8]{0}) while(%t0), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %rss = ((bf16[16]), bf16[4]) async-start(%r), calls=%wrapped
  %ags = (f32[8]{0}, f32[64]{0}) all-gather-start(%q), replica_groups={}, dimensions={0}, metadata={op_name="jit(f)/sj3/all_gather"}
  %agd = f32[64]{0} all-gather-done(%ags)
  %cp = f32[8]{0} collective-permute(%q), source_target_pairs={{0,0},{1,2},{2,1}}
  %none = f32[8]{0} collective-permute(%q), source_target_pairs={{0,0},{1,1}}
  ROOT %o = f32[8]{0} get-tuple-element(%w), index=1
}
"""


def test_every_kind_is_counted_with_its_trips():
    found = {c.kind: c for c in collectives_of(TEXT, 8)}
    assert set(found) == {"all-reduce", "reduce-scatter", "all-gather", "collective-permute"}
    ar, rs, ag, cp = (found[k] for k in ("all-reduce", "reduce-scatter", "all-gather", "collective-permute"))
    assert (ar.sent_bytes, ar.trips, ar.group, ar.task) == (2 * 32 * 1 / 2, 5, (0, 1), 7)
    assert (rs.sent_bytes, rs.group) == (32 * 3 / 4, (0, 1, 2, 3))
    assert (ag.sent_bytes, ag.group, ag.task) == (32 * 7, tuple(range(8)), 3)
    assert cp.step_bytes == 32


def test_an_unknown_collective_is_an_error_that_names_it():
    text = TEXT.replace("all-gather-start(%q)", "ragged-gather-start(%q)")
    with pytest.raises(SoapjaxError, match=r"ragged-gather-start \(%ags\)"):
        collectives_of(text, 8)


def test_groups_in_an_unknown_form_are_an_error():
    """They are not taken for everyone, which would count bytes that are not sent."""
    text = TEXT.replace("replica_groups={{0,1},{2,3}}", "replica_groups=ring<0,1>")
    with pytest.raises(SoapjaxError, match=r"all-reduce \(%ar\): replica groups written as nothing known here: ring<0,1>"):
        collectives_of(text, 8)


def test_groups_and_shapes():
    assert replica_group("replica_groups=[4,2]<=[2,2,2]T(1,0,2)", 8) == (0, 1)
    assert replica_group("replica_groups=[4,2]<=[2,2,2]T(2,1,0)", 8) == (0, 4)
    assert replica_group("replica_groups={}, dimensions={0}", 3) == (0, 1, 2)
    # Axes of a mesh, as the partitioner writes them since jaxlib 0.10, the devices in order or permuted.
    assert replica_group("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, dimensions={0}", 8) == (0, 4)
    assert replica_group("replica_groups=mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}, dimensions={0}", 8) == (0, 2)
    assert replica_group("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", 4) == (3, 2)
    assert replica_group("replica_groups=mesh['a'=2,'b'=8] {'b':(2)2,'a'}", 16) == (0, 8, 2, 10)
    assert replica_group("replica_groups=mesh['a'=2,'b'=8] {'b':(1)2,'b':(4)2}", 16) == (0, 1, 4, 5)
    assert shape_bytes("(f32[2,3]{1,0}, bf16[4], pred[], s4[8])") == 24 + 8 + 1 + 8


@functools.cache
def problem(dtype="float32"):
    traced = soapjax.trace(*abstract("mlp", batch=16, width=32, layers=2, features=16, dtype=dtype))
    return traced, planning_problem(traced, load_topology("cpu8"))


@functools.cache
def inspected(planner: str, dtype="float32"):
    traced, found = problem(dtype)
    plan = plan_of_strategy(found, get_planner(planner)(jax.random.key(0), found, Budget()).best.strategy)
    return plan, inspect(bind_plan(traced, plan))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # CPUs send the latter as the former
@pytest.mark.parametrize("planner", ["data_parallel", "fsdp", "tensor_parallel"])
def test_predicted_bytes_are_the_compiled_ones(planner, dtype):
    plan, found = inspected(planner, dtype)
    by_kind = compare_by_kind(plan, found.collectives)
    assert sum(k["compiled"] for k in by_kind.values()) > 0
    for kind, row in by_kind.items():
        assert row["predicted"] == pytest.approx(row["compiled"], rel=1e-4, abs=32), kind
    assert differences(plan, found.collectives) == [] and not found.replicated and not found.rematerialised
    total = sum(b for part in plan.prediction.sends for b in part.bytes.values())
    assert total == pytest.approx(sum(plan.prediction.bytes_by_collective.values()), rel=1e-3, abs=32)


def test_state_that_later_operators_read_is_kept_as_it_is_stored():
    """A critic's update is an operator where the actor reads the new critic: its results are not gathered at the step's end."""
    tx = optax.adam(1e-3)

    def step(state, x):
        critic, actor, of_critic = state
        updates, of_critic = tx.update(jax.grad(lambda c: ((x @ c) ** 2).mean())(critic), of_critic)
        critic = critic + updates
        return (critic, actor - jax.grad(lambda a: (x @ a @ critic).mean())(actor), of_critic)

    critic, actor, x = jnp.zeros((16, 8)), jnp.zeros((16, 16)), jnp.zeros((32, 16))
    traced = soapjax.trace(step, (critic, actor, tx.init(critic)), x)
    found = planning_problem(traced, load_topology("cpu8"))
    plan = plan_of_strategy(found, get_planner("fsdp")(jax.random.key(0), found, Budget()).best.strategy)
    assert plan.arguments["state.0"] == plan.arguments["state.2.0.mu"] == "d0+d1+d2, -"
    apart = differences(plan, inspect(bind_plan(traced, plan)).collectives)
    assert apart == []


def test_what_the_plan_does_not_predict_is_named():
    plan, found = inspected("fsdp")
    sends = sorted(plan.prediction.sends, key=lambda p: sum(p.bytes.values()))
    forgotten = sends.pop()
    fewer = plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"sends": tuple(sends)})})
    apart = differences(fewer, found.collectives)
    assert apart and apart[0].excess_bytes == pytest.approx(sum(forgotten.bytes.values()), rel=0.01)


def test_targets_are_those_of_the_topology():
    assert aot.target_names() == ["a100", "h100", "h200", "v100"]
    assert aot.target_for("A100-SXM4-80GB") == "a100" and aot.target_for("Tesla V100-SXM2-16GB", "v100") == "v100"
    for device, wanted in (("A100-SXM4-80GB", "h100"), ("Tesla K80", "cuda"), ("A100-SXM4-80GB", "b200")):
        with pytest.raises(SoapjaxError, match="--target"):
            aot.target_for(device, wanted)
    assert "device_memory_size: 123\n" in aot.description("v100", 123) and "#" not in aot.description("v100")


def test_no_plugin_is_explained_by_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SoapjaxError, match="pip install --no-deps jax-cuda12-plugin=="):
        aot.cuda_devices("a100", 8, 8)
