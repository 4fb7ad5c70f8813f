"""The plan file: it says the strategy and nothing is lost on the way to disk and back; what is wrong in it is named."""

import functools
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from families import family
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import PROBLEMS, SLOW, case, case_with

from soapjax.errors import SoapjaxError
from soapjax.helpers import files
from soapjax.strategy import plan as plans
from soapjax.strategy.configs import PIN
from soapjax.strategy.layout import degree, divides, layout_of, spec_of
from soapjax.strategy.plan import ModelSource, Plan, Prediction, Provenance, format_spec, parse_spec
from soapjax.strategy.plan_strategy import make_plan, mesh_plan, strategy_of

names = pytest.mark.parametrize("model, topology", family(PROBLEMS, slow=SLOW))
PREDICTION = Prediction(
    step_time_s=0.125, memory_bytes_per_device=2**20, usable_memory_bytes=2**30, memory_parts_bytes={"state": 2**20},
    feasible=True, bytes_by_collective={"all-gather": 7},
)  # fmt: skip


def plan_of(c, strategy, **kw) -> Plan:
    layouts = jax.tree.map(lambda x: x[0], c.figures([strategy])[0]).layouts
    return make_plan(c.space, c.topology, strategy, mesh_plan(c.space, strategy, layouts.slots, layouts.home), PREDICTION, **kw)


@functools.cache
def small_plan() -> Plan:
    c = case("mlp_of_sixes", "2x6")
    return plan_of(c, c.strategies(seed=31, count=1)[0])


def changed(edit) -> str:
    """The text of the small plan after `edit` of its JSON data."""
    data = json.loads(small_plan().dumps())
    edit(data)
    return json.dumps(data)


def problems_of(text: str, *, of_strategy: bool = False) -> list[str]:
    with pytest.raises(SoapjaxError) as error:
        plan = Plan.loads(text)
        if of_strategy:
            strategy_of(plan, case("mlp_of_sixes", "2x6").space)
    return [p.place for p in error.value.problems]


@names
def test_round_trip_gives_the_same_plan_and_strategy(model, topology):
    c = case(model, topology)
    for strategy in [c.replicated(), *c.strategies(seed=32, count=4)]:
        plan = plan_of(c, strategy, model=ModelSource(path=model, settings={"batch": 8, "dtype": "float32", "rate": 0.1}))
        read = Plan.loads(plan.dumps())
        assert read == plan and read.dumps() == plan.dumps() and read.plan_sha256 == plan.plan_sha256
        assert strategy_of(read, c.space).key() == strategy.key()
        assert read.num_devices == c.topology.num_devices and read.executable


def test_strategies_that_differ_give_plans_that_differ():
    c = case("mlp_of_sixes", "2x6")
    assert len({plan_of(c, s).plan_sha256 for s in c.strategies(seed=33, count=8)}) == 8


@names
def test_specs_say_the_layouts(model, topology):
    c = case(model, topology)
    graph, axis_names, sizes = c.graph, c.space.mesh.axis_names, c.space.mesh.axis_sizes
    plan = plan_of(c, c.strategies(seed=34, count=1)[0])
    assert list(plan.arguments) == list(graph.in_paths) and list(plan.results) == list(graph.out_paths)
    for p in graph.parameters:
        shape = graph.tensors[p.tensor].shape
        spec = parse_spec(plan.arguments[p.path])
        assert len(spec) == len(shape) and divides(layout_of(spec, axis_names), shape, sizes)
        # Optimizer state is stored as its parameter, and what a step replaces is returned as it came.
        assert all(plan.arguments[graph.in_paths[leaf]] == plan.arguments[p.path] for leaf in p.state_leaves)
    assert all(plan.results[graph.out_paths[o]] == plan.arguments[graph.in_paths[i]] for i, o in graph.state_pairs)
    tasks = [t for t in graph.tasks if t.parameter < 0]
    assert sum(len(o.tasks) for o in plan.operators.values()) == len(tasks)
    for n, op in enumerate(graph.operators):
        own = [t for t in tasks if t.operator == n]
        for part, task in zip(plan.operators[op.name].tasks, own, strict=True):
            for text, access in zip((*part.operands, *part.results), (*task.reads, *task.writes), strict=True):
                assert len(parse_spec(text)) == len(graph.tensors[access.tensor].shape)
            for text, access in zip(part.operands, task.reads, strict=True):
                for d, split in enumerate(parse_spec(text)):  # an operand is split as its operator's config says
                    dim = op.dims[access.dims[d]].name if access.dims[d] >= 0 else None
                    assert split == tuple(a for a in axis_names if plan.operators[op.name].axes[a] == dim)


def test_fixed_layouts_are_written_down():
    path, spec = "batch.features", (("d0", "d2"), ("d1",))
    c = case_with("mlp", "a100x8", fixed={path: spec})
    plan = plan_of(c, c.replicated())
    assert plan.fixed == {path: "d0+d2, d1"} and plan.arguments[path] == "d0+d2, d1"


def test_pinned_plans_say_so():
    c = case("mlp_of_sixes", "2x6")
    strategy = c.replicated()
    strategy.axes[0, 0] = PIN(1)
    plan = plan_of(c, strategy)
    assert plan.executable and plan.pinned and "pin(1)" in plan.operators[c.graph.operators[0].name].axes.values()


def test_hash_is_of_the_plan_and_not_of_how_it_was_found():
    plan = small_plan()
    provenance = Provenance(versions={"jax": "9"}, planner="mcmc", seed=3, baselines={"data": None}, notes=("x",))
    later = plan.model_copy(update={"provenance": provenance})
    assert later.plan_sha256 == plan.plan_sha256 and later != plan
    assert Plan.loads(later.dumps()) == later
    for update in ({"executable": False}, {"prediction": PREDICTION.model_copy(update={"step_time_s": 0.25})}):
        assert plan.model_copy(update=update).plan_sha256 != plan.plan_sha256


def test_save_and_load(tmp_path):
    path = tmp_path / "plan.json"
    small_plan().save(str(path))
    assert Plan.load(str(path)) == small_plan()
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(SoapjaxError, match="No space left"):
        small_plan().save(str(path))
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["plan.json"]
    with pytest.raises(SoapjaxError):
        small_plan().save(str(tmp_path / "nowhere" / "plan.json"))


def test_a_reader_never_sees_half_a_file(tmp_path, monkeypatch):
    path, seen = tmp_path / "plan.json", []
    path.write_text("old")
    replace = os.replace

    def watched(a, b):
        seen.append((path.read_text(), Path(a).read_text() == small_plan().dumps()))
        replace(a, b)

    monkeypatch.setattr(files.os, "replace", watched)
    small_plan().save(str(path))
    assert seen == [("old", True)] and path.read_text() == small_plan().dumps()


@pytest.mark.parametrize(
    "text, place",
    [
        ("", "plan: line 1, column 1"),
        ('{"schema_version": 1,\n "x" 2}', "plan: line 2, column 6"),
        ("[]", "plan"),
        ('{"a": NaN}', "plan"),
        ('{"a": {"b": 1, "b": 2}}', "plan: b"),
        ("[" * 100_000, "plan"),
        ('{"schema_version": ' + "1" * 5000 + "}", "plan"),
        ('{"schema_version": 99}', "plan: schema_version"),
    ],
)
def test_text_that_is_no_plan(text, place):
    assert problems_of(text) == [place]


def test_numbers_without_bounds_are_refused():
    # JSON has no infinity, but its parser makes one of this.
    text = small_plan().dumps().replace("0.125", "1e999")
    assert problems_of(text) == ["plan"]


def test_every_entry_that_is_missing_unknown_or_of_another_kind_is_named():
    def edit(data):
        del data["graph"]["fingerprint"]
        data["surprise"] = 1
        data["mesh"]["axis_sizes"] = "two"
        data["operators"]["head"]["axes"]["h0"] = 3

    assert sorted(problems_of(changed(edit))) == [
        "plan: graph.fingerprint", "plan: mesh.axis_sizes", "plan: operators.head.axes.h0", "plan: surprise",
    ]  # fmt: skip


def test_every_choice_that_the_space_does_not_offer_is_named():
    def edit(data):
        data["operators"]["dense9"] = data["operators"].pop("dense1")
        data["operators"]["head"]["axes"] = {"h0": "width", "d0": "replicate", "x": "replicate"}
        data["operators"]["dense0"]["storage"] = "sharded(x), kept"

    assert sorted(problems_of(changed(edit), of_strategy=True)) == [
        "plan: operators.dense0.storage", "plan: operators.dense1", "plan: operators.dense9",
        "plan: operators.head.axes.d1", "plan: operators.head.axes.h0", "plan: operators.head.axes.x",
    ]  # fmt: skip


def test_a_degree_that_does_not_divide_is_named():
    c = case("mlp_of_sixes", "2x6")
    dim = c.graph.operators[0].dims[2]
    assert dim.size == 6

    def edit(data):
        data["operators"]["dense0"]["axes"] = {"h0": dim.name, "d0": "replicate", "d1": dim.name}

    assert problems_of(changed(edit), of_strategy=True) == [f"plan: operators.dense0.{dim.name}"]


def test_a_plan_for_another_mesh_is_refused():
    other = case_with("mlp_of_sixes", "a100x8")
    with pytest.raises(SoapjaxError) as error:
        strategy_of(small_plan(), other.space)
    assert "plan: mesh" in [p.place for p in error.value.problems]


def test_an_edited_choice_is_taken():
    def edit(data):
        data["operators"]["dense0"]["axes"] = dict.fromkeys(("h0", "d0", "d1"), "replicate") | {"d0": "sample"}
        data["operators"]["dense0"]["storage"] = "sharded(d0,d1), regathered"

    c = case("mlp_of_sixes", "2x6")
    found = strategy_of(Plan.loads(changed(edit)), c.space)
    config = found.config(0, c.graph.operators[0], c.space.mesh, c.space.storages)
    assert config.axes == {"h0": "replicate", "d0": "sample", "d1": "replicate"}
    assert config.storage == "sharded(d0,d1), regathered"
    rest = strategy_of(small_plan(), c.space)
    np.testing.assert_array_equal(found.axes[1:], rest.axes[1:])


axis = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=1, max_size=4)


@settings(max_examples=300)
@given(st.lists(axis, unique=True, max_size=6), st.integers(0, 5), st.randoms(use_true_random=False))
def test_specs_are_read_as_they_are_written(axis_names, rank, random):
    layout = [random.randint(-1, rank - 1) for _ in axis_names]
    spec = spec_of(layout, rank=rank, axis_names=axis_names)
    assert parse_spec(format_spec(spec)) == spec
    assert layout_of(spec, axis_names) == layout
    assert len(spec) == rank and sum(map(len, spec)) == sum(d >= 0 for d in layout)


def test_specs_as_people_write_them():
    assert format_spec((("h0", "d0"), (), ("d1",))) == "h0+d0, -, d1"
    assert parse_spec(" h0+d0,-,  d1") == (("h0", "d0"), (), ("d1",))
    assert format_spec(()) == "" and parse_spec("") == ()


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(-2, 3), st.sampled_from([1, 2, 3, 5])), max_size=5), st.lists(st.integers(1, 60), max_size=4))
def test_a_layout_divides_where_every_part_has_whole_elements(axes, shape):
    layout, sizes = [d for d, _ in axes], [s for _, s in axes]
    parts = {d: np.array_split(range(n), degree(layout, d, sizes)) for d, n in enumerate(shape)}
    assert divides(layout, shape, sizes) == all(len({len(p) for p in found}) == 1 for found in parts.values())


def test_the_file_says_its_schema_and_the_whole_topology():
    assert json.loads(small_plan().dumps())["schema_version"] == plans.SCHEMA_VERSION
    assert json.loads(small_plan().dumps())["topology"] == case("mlp_of_sixes", "2x6").topology.to_dict()
