"""An operator graph as figures: the same costs from the file, and no figure that a stranger wrote is believed unchecked."""

import dataclasses
import json
import random

import jax
import jax.numpy as jnp
import pytest
from command_line import call, plan_text
from patterns import PATTERNS
from problems import graph_of as graph_of_model

from soapjax import Plan
from soapjax.errors import SoapjaxError
from soapjax.graph.figures import figures_of, figures_text, graph_of
from soapjax.graph.operators import Access, Task
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace
from soapjax.helpers.canonical_json import sha256_of
from soapjax.planning.plan_files import opened_alone


def figures():
    return json.loads(plan_text())["operator_graph"]


def test_what_is_written_is_what_is_read():
    graph = graph_of(figures())
    assert figures_of(graph) == figures() == json.loads(figures_text(figures()))
    assert graph.fingerprint() == Plan.loads(plan_text()).graph.fingerprint


@pytest.mark.parametrize("name", ["scan_of_updates", "key_that_is_returned_and_read", "fourier", "reduces_nothing"])
def test_any_step_has_figures(name):
    def reduces_nothing(state, batch):
        return state + (batch - batch[:0].sum(axis=0)) @ state, {}

    steps = PATTERNS | {"reduces_nothing": lambda: (reduces_nothing, (jnp.ones((8, 8)), jnp.ones((8, 8))))}
    step, arguments = steps[name]()
    graph, _ = build_graph(trace(step, *arguments))
    read = graph_of(figures_of(graph))
    assert read == dataclasses.replace(graph, tasks=tuple(without_keys(t) for t in graph.tasks))
    assert read.fingerprint() == graph.fingerprint()


@pytest.mark.parametrize("unroll", [False, True])
def test_a_loop_of_no_trips_is_none(unroll):
    def step(w, x):
        def loss(w):
            h, before = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), h), x, jnp.ones((0, 3)))
            return (h @ w).sum() + before.sum()

        return w - 0.1 * jax.grad(loss)(w)

    graph, _ = build_graph(trace(step, jnp.ones((8, 8)), jnp.ones((16, 8)), unroll=unroll))
    assert graph_of(figures_of(graph)).fingerprint() == graph.fingerprint()
    assert not any(task.scope for task in graph.tasks)


def test_a_loop_over_layers_reads_slices_of_older_files_too():
    """Which do not say of how many slices a loop reads one."""
    found = figures_of(graph := graph_of_model("lm_scan"))
    reads, writes = Task._fields.index("reads"), Task._fields.index("writes")
    for row in found["tasks"]:
        for accesses in (row[reads], row[writes]):
            accesses[:] = [access[: Access._fields.index("slices")] for access in accesses]
    read = graph_of(found)
    assert {a.slices for t in graph.tasks for a in t.reads} == {1, 2}
    assert [t.reads for t in read.tasks] == [t.reads for t in graph.tasks] and read.fingerprint() == graph.fingerprint()


def without_keys(task):
    return task._replace(equations=task.equations._replace(keys=()))


def test_tasks_of_older_files_are_read():
    def in_one_row(row):
        *shared, trips, scope, parameter, structure, halos, casts, memory, equations = row
        (size, sources, choices, adds), (keys, heavy, *dims) = memory, equations
        return [*shared, keys, heavy, trips, scope, parameter, *dims, size, sources, structure, halos, casts, choices, adds]

    def without_costly(row):
        *rest, memory, equations = row
        return [*rest, memory[:4], equations]

    found = figures()
    found |= {"tasks": [without_costly(row) for row in found["tasks"]]}
    older = found | {"tasks": [in_one_row(row) for row in found["tasks"]]}
    assert older != found and graph_of(older) == graph_of(found)


def test_a_line_each():
    lines = figures_text(figures()).splitlines()
    found = figures()
    rows = [row for name, rows in found.items() if name not in ("in_paths", "out_paths", "is_single_phase") for row in rows]
    assert sum(line.startswith("   [") for line in lines) == len(rows) > 20


def test_the_file_alone_and_the_step_predict_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(plan_text())
    alone, trusted = (call("simulate", "plan.json", "--json", *more).result for more in ([], ["--trust"]))
    assert alone == trusted


def put(found, value, *path):
    for key in path[:-1]:
        found = found[key]
    found[path[-1]] = value


WRONG = {
    "a size below zero": (("operators", 0, 2, 0, 1), -1),
    "a divisor of zero": (("operators", 0, 2, 0, 2), 0),
    "a size beyond floats": (("operators", 0, 2, 0, 1), 10**30),
    "a task that is not there": (("operators", 0, 3), [10**6]),
    "an operator that is not there": (("tasks", 0, 0), 99),
    "a tensor that is not there": (("tasks", 0, 5, 0, 0), 10**6),
    "a tensor of minus two": (("tasks", 0, 5, 0, 0), -2),
    "a dim that is not there": (("tasks", 0, 4, 0, 1), [40]),
    "a dim of a result that is not there": (("tasks", 0, 15, 3), [40]),
    "infinite work": (("tasks", 0, 4, 0, 0), float("inf")),
    "work that is none": (("tasks", 0, 4, 0, 0), float("nan")),
    "negative work": (("tasks", 0, 4, 0, 0), -1.0),
    "no trips": (("tasks", 0, 8), 0),
    "a fourth phase": (("tasks", 0, 1), 3),
    "a word for a number": (("tensors", 0, 3), "4"),
    "a tensor of too many bytes": (("tensors", 0, 1), [2**31, 2**31, 2**31]),
    "an input that is not there": (("tensors", 0, 5), 10**6),
    "an owner that is not there": (("parameters", 0, 3), -1),
    "a pair of nothing": (("state_pairs", 0), [0, 10**6]),
    "too few of a row": (("operators", 0), ["dense0"]),
    "an operator twice": (("operators", 1, 0), "dense0"),
    "an unknown entry": (("code",), "1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_figure_is_named(what):
    path, value = WRONG[what]
    found = figures()
    put(found, value, *path)
    with pytest.raises(SoapjaxError) as error:
        graph_of(found)
    assert all(p.place.startswith("operator_graph") and p.expected and "--model" in p.remedy for p in error.value.problems)


def places(value, path=()):
    if isinstance(value, list | dict):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))
    else:
        yield path


def test_any_figure_changed_is_refused_or_of_a_graph():
    rng, every = random.Random(0), list(places(figures()))
    values = [-1, 0, 1, 3, 10**6, 2**40, 10**20, 0.5, 1e300, float("nan"), "", "x", None, [], [0], True]
    num_refused = 0
    for _ in range(300):
        found = figures()
        for path in rng.sample(every, rng.choice([1, 1, 3])):
            put(found, rng.choice(values), *path)
        try:
            graph = graph_of(found)
        except SoapjaxError:
            num_refused += 1
        else:
            assert figures_of(graph).keys() == found.keys()
    assert num_refused > 100


def sealed(edit):
    """A plan by a writer who lies with care: sum and fingerprint are those of the changed figures."""
    data = json.loads(plan_text())
    edit(data["operator_graph"])
    graph = graph_of(data["operator_graph"])
    data["graph"]["figures_sha256"] = sha256_of(data["operator_graph"])
    data["graph"]["fingerprint"] = graph.fingerprint()
    return data


def test_figures_that_were_changed_are_noticed():
    data = json.loads(plan_text())
    data["operator_graph"]["tasks"][0][4][0][0] *= 2
    with pytest.raises(SoapjaxError, match="figures_sha256"):
        opened_alone(Plan.loads(json.dumps(data)))
    data["graph"]["figures_sha256"] = sha256_of(data["operator_graph"])
    with pytest.raises(SoapjaxError, match="graph.fingerprint"):
        opened_alone(Plan.loads(json.dumps(data)))


def test_figures_of_no_step_end_with_an_error():
    def weightless(found):
        found["tensors"][0][3] = 0  # bytes of an element

    def more_flops(found):
        found["tasks"][0][4][0][0] = 1e22

    with pytest.raises(SoapjaxError, match="operator_graph"):
        opened_alone(Plan.loads(json.dumps(sealed(weightless))))
    lied = opened_alone(Plan.loads(json.dumps(sealed(more_flops)))).plan.prediction.step_time_s
    assert lied > Plan.loads(plan_text()).prediction.step_time_s, "a prediction is as good as its figures"
