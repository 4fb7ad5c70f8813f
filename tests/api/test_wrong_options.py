"""A table of wrong options: each is refused at the door, in words, before anything is traced or imported; none hangs."""

import dataclasses
import math
from pathlib import Path

import jax
import numpy as np
import pytest

import soapjax
from soapjax import SoapjaxError, soap_shard
from soapjax.cli import arguments, commands, planning_commands
from soapjax.costs.measured.profile import load_profile
from soapjax.planning.options import OPTIONS
from soapjax.strategy.plan import Plan
from soapjax.topology import load_topology

DEVICE = jax.devices()[0]
LONG = "x" * 100_000


def never(*_):
    pytest.fail("traced")


# Option, wrong values, words of what is expected, words of the remedy.
TABLE = [
    ("topology", [None, 3, "", b"cpu8", ["cpu8"], True, "a\0b"], "the path of a TOML file", "leave it out"),
    ("planner", [None, 1, "", "mcmcm", ["mcmc"], LONG], "mcmc or data_parallel", ""),
    ("seed", [None, -1, 2**31, 1.0, "1", True, math.nan, 10**30], "from 0 to 2147483647", "another seed"),
    ("seconds", [0, -1, math.nan, math.inf, -math.inf, "10", True, 1e300, 10**400, [1]], "positive number of seconds", "some time"),
    ("proposals", [0, -5, 2.5, "100", True, math.nan, 10**12], "from 1 to 2147483647", "at least one"),
    ("fixed", [[("w", "d0")], "w", 3, {1: "d0"}, {"": "d0"}], "a dict from argument paths", "write {"),
    ("objective", [None, 1, "", "mdpo", ["time"], LONG], "time or mdpe, or an Objective", ""),
    ("unroll", [None, 1, "yes", 0.0], "True or False", "write one"),
    ("strip_constraints", [None, "no", []], "True or False", "write one"),
    ("static_argnums", ["1", 1.5, [0.5], True, {0: 1}], "a position or several", "write e.g."),
    ("axis_name", [None, 3, "", ["batch", 2]], "the name of an axis", "write e.g."),
    ("logical_axis_rules", [3, "embed", [("embed",)], [("embed", 3)], {"embed": "d0"}], "pairs of a logical name", "write (("),
    ("devices", [[], (), 3, "cpu", [0, 1], [DEVICE] * 8, [None]], "each once", "leave it out"),
    ("profile", [3, "", True, b"p"], "the path of a profile", "soapjax profile"),
    ("verify_top", [None, -1, 0.5, "2", True, math.nan], "0 or more", "how many"),
]  # fmt: skip
ONLY_SOAP_SHARD = [
    ("plan", [3, "", True, {}], "the path of a plan file", "Plan.save"),
    ("donate", [None, "yes", 2, (0,)], "True or False", "write one"),
    ("donate_argnums", ["0", 0.5, [None]], "a position or several", "write e.g."),
    ("static_argnames", [3, "", [1], {"a": 1}], "a name or several", "write e.g."),
    ("donate_argnames", [3, [None]], "a name or several", "write e.g."),
    ("pipeline", [3, "", "gpip", ["gpipe"], True], "auto or gpipe", ""),
    ("microbatches", [0, -1, 1.5, "4", True, math.nan, 10**12], "a number from 1 on", "correct the number"),
    ("stages", [0, -1, "two", [2]], "a number from 1 on", "correct the number"),
    ("microbatch_reduction", [None, "max", 3], "auto or mean or sum", ""),
]
ONLY_PLAN = [("space", [None, "papre", 3], "soap or paper", "")]


def rows(*tables):
    return [
        pytest.param(name, value, *words, id=f"{name}={str(value)[:20]!r}")
        for table in tables for name, values, *words in table for value in values
    ]  # fmt: skip


def check(error, name, value, expected, remedy):
    (problem,) = [p for p in error.problems if p.place == name]
    assert expected in problem.expected and remedy in problem.remedy and problem.remedy
    assert "times" in problem.value or problem.value[:10].strip("'") in repr(value) or "very large" in problem.value
    assert len(str(error)) < 2000


@pytest.mark.parametrize("name, value, expected, remedy", rows(TABLE, ONLY_SOAP_SHARD))
def test_soap_shard_refuses(name, value, expected, remedy):
    more = {"pipeline": "gpipe"} if name in ("microbatches", "stages") else {}
    with pytest.raises(SoapjaxError) as e:
        soap_shard(never, **{name: value}, **more)
    check(e.value, name, value, expected, remedy)


@pytest.mark.parametrize("name, value, expected, remedy", rows(TABLE[::2], ONLY_PLAN))
def test_plan_refuses(name, value, expected, remedy):
    with pytest.raises(SoapjaxError) as e:
        soapjax.plan(never, np.ones(3), **{name: value})
    check(e.value, name, value, expected, remedy)


@pytest.mark.parametrize("step", [3, "step", [never]])
def test_a_step_is_a_function(step):
    for call in (soap_shard, soapjax.plan):
        with pytest.raises(SoapjaxError, match="the step: got .*expected a function"):
            call(step)


def test_all_failures_come_at_once():
    with pytest.raises(SoapjaxError) as e:
        soap_shard(
            never, seed=-1, seconds=math.nan, devices=[], topology=None, planner="fsdpp", microbatches=2, plan="p.json", fixed={},
        )  # fmt: skip
    places = [p.place for p in e.value.problems]
    assert places == ["topology", "planner", "seed", "seconds", "devices", "microbatches", "fixed"]


@pytest.mark.parametrize("more", [{"microbatches": 2}, {"pipeline": "1f1b", "stages": 2}], ids=str)
def test_a_planner_of_one_program_is_not_dropped_in_silence(more):
    with pytest.raises(SoapjaxError, match="planner: got 'optcnn'.*fsdp.* beside (micro-batches|a pipeline).*drop planner"):
        soap_shard(never, planner="optcnn", **more)
    command = arguments.PlanCommand("none.module", planner="optcnn", **{k: str(v) for k, v in more.items()})
    with pytest.raises(SoapjaxError, match="--planner: got optcnn.*fsdp.*drop one of them"):
        commands.run(command, None)


@pytest.mark.parametrize("more", [{"stages": 2, "pipeline": "pipedream"}, {"pipeline": "pipedream"}], ids=str)
def test_layouts_that_a_pipeline_cannot_keep_are_not_dropped_in_silence(more):
    with pytest.raises(SoapjaxError) as e:
        soap_shard(never, fixed={"w": "d0"}, logical_axis_rules=(("mlp", "d0"),), **more)
    assert [p.place for p in e.value.problems] == ["fixed", "logical_axis_rules"]


@pytest.mark.parametrize("pipeline", ["pipedream", soapjax.strategy.pipeline.Pipeline])
def test_what_says_itself_how_stages_are_split_takes_no_other_planner(pipeline):
    if not isinstance(pipeline, str):
        stage = soapjax.strategy.pipeline.Stage(operators=("a",), devices=(0,), mesh={})
        pipeline = pipeline(schedule="1f1b", num_microbatches=2, stages=(stage,))
    with pytest.raises(SoapjaxError, match="planner: got 'fsdp'; expected mcmc"):
        soap_shard(never, planner="fsdp", pipeline=pipeline)


def test_good_values_pass():
    """NumPy's numbers, jax.jit's single values and None, a tuple of devices, paths."""
    soap_shard(
        never, seed=np.int64(3), seconds=np.float32(2), proposals=np.uint8(9), static_argnums=None, static_argnames=None,
        donate_argnums=np.int32(0), devices=(DEVICE,), topology=Path("t.toml"), profile="auto", unroll=np.True_,
        logical_axis_rules=(("embed", None), ("mlp", ("d0", "d1"))), fixed={"w": "d0"}, axis_name=["a", "b"],
    )  # fmt: skip


@pytest.mark.parametrize("name", ["seed", "seconds", "proposals", "verify_top", "microbatches", "stages", "space", "pipeline"])
def test_the_command_line_has_the_same_table(name, monkeypatch):
    monkeypatch.setattr(planning_commands, "abstract_model", lambda *_: pytest.fail("the model was imported"))
    command = arguments.PlanCommand("none.module", **({} if name == "pipeline" else {"pipeline": "auto"}))
    values = {"seconds": math.nan, "proposals": 0, "space": "papre", "pipeline": "x", "microbatches": "0", "stages": "-2"}
    wrong = values.get(name, -1)
    with pytest.raises(SoapjaxError) as e:
        commands.run(dataclasses.replace(command, **{name: wrong}), None)
    found = next(p for p in e.value.problems if p.place == "--" + name.replace("_", "-"))
    assert found.expected == OPTIONS[name].problem("", wrong).expected and found.remedy


@pytest.mark.parametrize(
    "command", [arguments.RunCommand("p", steps=0), arguments.DemoCommand(steps=-1), arguments.CalibrateCommand(["p"], steps=0),
                arguments.ProfileCommand("m", seconds=math.inf), arguments.ProfileCommand("m", microbatches=(2, 0)),
                arguments.PlanCommand("m", topology="")],
    ids=lambda c: type(c).__name__,
)  # fmt: skip
def test_every_command_is_checked_before_it_begins(command):
    with pytest.raises(SoapjaxError, match="^--"):
        commands.run(command, None)


@pytest.mark.parametrize("number", ["1e31", "-1e300", "1e999", "1e-300", "1" * 30])
def test_numbers_that_overflow_are_refused_in_files(number, tmp_path):
    text = '{"sha256": "0", "profile": {"x": %s}}' % number  # noqa: UP031 - braces
    (tmp_path / "p.json").write_text(text)
    for load in (load_profile, Plan.load):
        with pytest.raises(SoapjaxError, match="a (whole )?number"):
            load(tmp_path / "p.json")


@pytest.mark.parametrize(
    "key, value",
    [("memory_bandwidth_bytes_per_s", 1e300), ("memory_bandwidth_bytes_per_s", 1e-9), ("launch_s", 1e30), ("launch_s", 1e-40),
     ("memory_efficiency_fraction", 1e-20)],
)  # fmt: skip
def test_figures_of_a_topology_have_bounds(key, value):
    data = load_topology("a100x64").to_dict()
    data["device"][key] = value
    with pytest.raises(SoapjaxError) as e:
        soapjax.DeviceTopology.from_dict(data)
    (problem,) = e.value.problems
    assert key in problem.place and key in problem.remedy and "finite number" in problem.expected


def test_no_message_repeats_what_is_long():
    for problem in (soapjax.Problem(LONG, LONG, LONG, f"write '{LONG}'"), soapjax.Problem("a", "b " * 9999, "c", "d")):
        assert len(str(SoapjaxError(problem))) < 1000
