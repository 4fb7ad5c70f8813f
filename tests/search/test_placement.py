"""Placement on single devices: what a layer is, model parallelism, and what experts do."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from problems import abstract, topology_of

import soapjax
from soapjax.errors import SoapjaxError
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import TracedStep
from soapjax.planning.entry import plan_of_strategy, planning_problem
from soapjax.planning.plan_files import recost
from soapjax.search.experts.layered import layered_expert_strategies
from soapjax.search.experts.layers import layers_of, steps_of
from soapjax.search.experts.placement import balanced_runs, operator_seconds, placed
from soapjax.search.experts.recurrent import depths_of
from soapjax.search.planners import PLACEMENT_PLANNERS, get_planner
from soapjax.search.problem import Budget, PlanningProblem
from soapjax.strategy.configs import FIRST_PIN, PIN, REPLICATE
from soapjax.strategy.plan import Plan

KEY = jax.random.key(0)
RNNLM = dict(batch=8, seq=4, hidden=16, vocab=32)


@functools.cache
def traced(model: str, **sizes) -> TracedStep:
    return soapjax.trace(*abstract(model, **sizes))


@functools.cache
def problem_of(model: str, topology: str = "2x2", **sizes):
    return planning_problem(traced(model, **sizes), topology_of(topology), space="paper")


def branches(params, x):
    """Two branches with nothing in common but their input and the loss."""

    def loss(p):
        one = jnp.tanh(jnp.tanh(x @ p["a1"]) @ p["a2"])
        other = jnp.tanh(jnp.tanh(x @ p["b1"]) @ p["b2"])
        return jnp.mean(one * other)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


@functools.cache
def two_branches():
    params = {k: jax.ShapeDtypeStruct((2048, 2048), "float32") for k in ("a1", "a2", "b1", "b2")}
    step = soapjax.trace(branches, params, jax.ShapeDtypeStruct((4096, 2048), "float32"))
    return planning_problem(step, topology_of("1x2"), space="paper")


def one_device(problem):
    return placed(problem, np.zeros(problem.graph.num_operators, int))


def devices_of(problem, strategy):
    """The devices that run each operator."""
    mesh = problem.space.mesh
    at = np.array([mesh.device_coordinates(d) for d in range(mesh.num_devices)])
    pin = FIRST_PIN - strategy.axes
    return [frozenset(np.flatnonzero(((p < 0) | (p == at)).all(axis=1)).tolist()) for p in pin]


# --- layers


def names_of(layers, recurrent: bool) -> set[str]:
    return {layer.name for layer in layers if layer.is_recurrent == recurrent}


@pytest.mark.parametrize("scan", [False, True])
def test_a_recurrent_layer_is_its_cell_at_all_steps(scan):
    graph = problem_of("rnnlm", scan=scan, **RNNLM).graph
    layers = layers_of(graph)
    assert sorted(n for layer in layers for n in layer.operators) == list(range(graph.num_operators))
    assert names_of(layers, True) == {"rnn/lstm0", "rnn/lstm1"} and {"embed", "head"} <= names_of(layers, False)
    for layer in layers:
        names = [graph.operators[n].name for n in layer.operators]
        if layer.is_recurrent:
            assert all(layer.name in name for name in names)
            assert set(names) >= {n.name for n in graph.operators if layer.name in n.name}
    if not scan:
        assert {s for s in steps_of(graph)[1] if s} == {"step0", "step1", "step2", "step3"}


@pytest.mark.parametrize("model", ["mlp", "transformer_lm", "resnet"])
def test_other_nets_have_no_recurrent_layers(model):
    sizes = {"transformer_lm": dict(scan=True), "resnet": dict(depth=18, image=32, width=8, classes=8)}.get(model, {})
    graph = build_graph(traced(model, **sizes))[0]
    layers = layers_of(graph)
    assert not names_of(layers, True) and sum(len(layer.operators) for layer in layers) == graph.num_operators


def test_cells_without_a_scope_per_step_are_found_by_their_shared_weights():
    def step(params, x):
        def loss(p):
            h = x[0]
            for t in range(4):
                h = jnp.tanh(x[t] @ p["in"] + h @ p["cell"])
            return jnp.mean((h @ p["out"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = {k: jax.ShapeDtypeStruct((16, 16), "float32") for k in ("in", "cell", "out")}
    problem = planning_problem(soapjax.trace(step, params, jax.ShapeDtypeStruct((4, 8, 16), "float32")), topology_of("1x2"))
    recurrent = [layer for layer in layers_of(problem.graph) if layer.is_recurrent]
    assert len(recurrent) == 1 and len(recurrent[0].operators) >= 4


def test_depths_count_encoder_and_decoder_on_their_own():
    """As in figure 1 of Wu et al.: the bottom layers side by side, attention with the decoder's first layer."""
    found = depths_of(problem_of("gnmt").graph)
    depth = {layer.name: d for layer, d in zip(found.layers, found.depth, strict=True)}
    assert depth["source_embed"] == depth["target_embed"] == 0
    assert depth["encoder_forward"] == depth["encoder_backward"] == depth["decoder/lstm0"] == 1
    assert depth["decoder/attention/query"] == depth["decoder/attention"] == 1
    encoder, decoder = ([depth[k] for k in sorted(depth) if k.startswith(f"{side}/lstm")] for side in ("encoder", "decoder"))
    assert encoder == list(range(2, 2 + len(encoder))) and decoder == list(range(1, 1 + len(decoder)))
    assert depth["head"] == depth["loss"] == 1 + max(encoder + decoder)
    deepest = {i for i, d in enumerate(found.depth) if d == max(found.depth)}
    assert set(found.softmax) == {n for i in deepest for n in found.layers[i].operators}


# --- model parallelism


def test_runs_are_as_even_as_can_be():
    rng = np.random.default_rng(0)
    for _ in range(50):
        seconds, parts = rng.random(rng.integers(1, 9)) * rng.integers(0, 2, 1) + rng.integers(0, 3), int(rng.integers(1, 5))
        run = balanced_runs(seconds, parts)
        assert run == sorted(run) and run[0] == 0 and set(run) == set(range(run[-1] + 1)) and run[-1] < parts
        cuts = itertools.combinations_with_replacement(range(len(seconds) + 1), parts - 1)
        best = min(max(sum(p) for p in np.split(seconds, list(c))) for c in cuts)
        assert max(np.bincount(run, seconds)) == pytest.approx(best, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("model, sizes", [("rnnlm", RNNLM), ("mlp", dict(layers=4))])
def test_model_parallel_balances_whole_layers(model, sizes):
    problem = problem_of(model, **sizes)
    found = get_planner("model_parallel")(KEY, problem, Budget()).best
    assert problem.space.is_valid(found.strategy) and found.is_feasible
    where = devices_of(problem, found.strategy)
    assert all(len(d) == 1 for d in where), "every operator is on one device"
    seconds, busy, largest, order = operator_seconds(problem), np.zeros(4), 0.0, []
    for layer in layers_of(problem.graph):
        (device,) = {d for n in layer.operators for d in where[n]}
        order.append(device)
        busy[device] += seconds[list(layer.operators)].sum()
        largest = max(largest, seconds[list(layer.operators)].sum())
    assert order == sorted(order), "contiguous in program order"
    assert busy.max() <= busy.sum() / 4 + largest
    assert found.step_time_s < problem.evaluate([one_device(problem)])[0].step_time_s or model == "mlp"


def test_a_placement_that_does_not_fit_says_so(monkeypatch):
    problem = two_branches()
    needed = problem.evaluate([one_device(problem)])[0].memory_bytes
    monkeypatch.setattr(PlanningProblem, "usable_memory_bytes", property(lambda self: int(0.3 * needed)))
    for name in PLACEMENT_PLANNERS:
        found = get_planner(name)(KEY, problem, Budget(num_proposals=1))
        assert problem.space.is_valid(found.best.strategy) and not found.best.is_feasible, name


def test_what_the_user_constrained_stays_whole():
    mesh = AbstractMesh((2,), ("d0",), axis_types=(AxisType.Auto,))

    def step(params, x):
        def loss(p):
            constrained = jax.lax.with_sharding_constraint(jnp.tanh(x @ p), NamedSharding(mesh, PartitionSpec("d0")))
            return jnp.mean((constrained @ p) ** 2)

        return params - 0.1 * jax.grad(loss)(params)

    shapes = jax.ShapeDtypeStruct((32, 32), "float32")
    problem = planning_problem(soapjax.trace(step, shapes, shapes), topology_of("1x2"), space="paper")
    fixed = [n for n, op in enumerate(problem.graph.operators) if op.fixed is not None]
    assert fixed
    for name in PLACEMENT_PLANNERS:
        strategy = get_planner(name)(KEY, problem, Budget(num_proposals=1)).best.strategy
        assert problem.space.is_valid(strategy) and (strategy.axes[fixed] >= REPLICATE).all(), name


# --- by experts


def test_a_single_device_does_everything():
    problem = problem_of("mlp", layers=4)
    found = get_planner("single_device")(KEY, problem, Budget())
    assert set(devices_of(problem, found.best.strategy)) == {frozenset({0})} and found.num_proposals == 1
    assert found.best.step_time_s == pytest.approx(float(operator_seconds(problem).sum()), rel=1e-5), "nothing is sent"


def test_layered_expert_gives_recurrent_layers_devices_of_their_own():
    """Four LSTM layers on four devices, on two in turn; attention, softmax and loss with the last one."""
    for topology, wanted in (("2x2", [0, 1, 2, 3]), ("1x2", [0, 1, 0, 1])):
        problem = problem_of("nmt", topology=topology, seq=3)
        where = devices_of(problem, get_planner("layered_expert")(KEY, problem, Budget()).best.strategy)
        home = {}
        for layer in layers_of(problem.graph):
            (device,) = {d for n in layer.operators for d in where[n]}
            home[layer.name] = device
        assert [home[f"{side}/lstm{i}"] for side in ("encoder", "decoder") for i in range(2)] == wanted
        assert home["source_embed"] == home["encoder/lstm0"] and home["target_embed"] == home["decoder/lstm0"]
        assert {d for name, d in home.items() if name.startswith(("attention", "head", "loss"))} == {home["decoder/lstm1"]}


def test_layered_expert_without_recurrence_is_runs_of_layers_or_one_device():
    problem = two_branches()
    found = get_planner("layered_expert")(KEY, problem, Budget())
    runs, whole = (problem.evaluate([s])[0] for s in layered_expert_strategies(problem))
    layers = [next(iter(devices_of(problem, runs.strategy)[layer.operators[0]])) for layer in layers_of(problem.graph)]
    assert layers == sorted(layers) and set(layers) == {0, 1} and abs(layers.count(0) - layers.count(1)) <= 1
    assert whole.strategy.key() == one_device(problem).key()
    assert found.best.cost == min(runs.cost, whole.cost) and found.num_proposals == 2


def test_expert_rnn_places_depths_and_splits_the_batch_over_nodes():
    problem = problem_of("rnnlm", **RNNLM)
    result = get_planner("expert_rnn")(KEY, problem, Budget())
    strategy = result.best.strategy
    assert problem.space.is_valid(strategy) and result.best.is_feasible
    assert any("rnn/lstm0 on device" in note for note in result.notes)
    assert problem.space.mesh.axis_levels == (0, 1)  # node, device
    homes = {}
    for layer in layers_of(problem.graph):
        for n in layer.operators:
            sample = next((k for k, d in enumerate(problem.graph.operators[n].dims) if d.kind == "S"), REPLICATE)
            assert strategy.axes[n, 0] == sample
        if layer.is_recurrent:
            (homes[layer.name],) = {int(v) for v in strategy.axes[list(layer.operators), 1]}
    assert all(home <= FIRST_PIN for home in homes.values())


def test_expert_rnn_where_there_is_no_recurrence():
    result = get_planner("expert_rnn")(KEY, problem_of("mlp", layers=4), Budget())
    assert "no recurrent layers found" in result.notes[0]
    assert {len(d) for d in devices_of(problem_of("mlp", layers=4), result.best.strategy)} == {2}  # one of each node


def test_expert_rnn_lowers_what_does_not_divide():
    problem = problem_of("rnnlm", topology="3x2", **RNNLM | dict(seq=2, layers=1))
    result = get_planner("expert_rnn")(KEY, problem, Budget())
    assert problem.space.is_valid(result.best.strategy)
    assert "a sample dim of 8 does not split 3 ways: 1 used" in result.notes


# --- spaces and plans


@pytest.mark.parametrize("name", PLACEMENT_PLANNERS)
def test_placement_needs_the_space_of_the_paper(name):
    plain = planning_problem(traced("mlp"), topology_of("1x2"))
    with pytest.raises(SoapjaxError, match=f'{name}.*got space "soap".*space="paper"'):
        get_planner(name)(KEY, plain, Budget())
    shapes = jax.ShapeDtypeStruct((8, 8), "float32")
    with pytest.raises(SoapjaxError, match='space="paper"'):
        soapjax.plan(lambda x: x @ x, shapes, topology=topology_of("1x2"), planner=name)


def test_an_unknown_space_lists_the_valid_ones():
    with pytest.raises(SoapjaxError, match="space: got 'papre'; expected soap or paper"):
        soapjax.plan(lambda x: x @ x, jax.ShapeDtypeStruct((8, 8), "float32"), topology="cpu8", space="papre")


def test_a_pinned_plan_round_trips(tmp_path):
    step, problem = traced("rnnlm", **RNNLM), problem_of("rnnlm", **RNNLM)
    strategy = get_planner("expert_rnn")(KEY, problem, Budget()).best.strategy
    plan = plan_of_strategy(problem, strategy)
    assert plan.pinned and plan.prediction.bytes_by_collective["transfer"] > 0
    plan.save(str(tmp_path / "plan.json"))
    again = recost(Plan.load(str(tmp_path / "plan.json")), step)
    assert again == plan and again.plan_sha256 == plan.plan_sha256


def test_a_pin_written_by_hand_counts():
    step, problem = traced("mlp", layers=4), problem_of("mlp", layers=4)
    plan = plan_of_strategy(problem, get_planner("data_parallel")(KEY, problem, Budget()).best.strategy)
    name = next(iter(plan.operators))

    def edited(value):
        part = plan.operators[name]
        axes = {a: value if n > 1 else v for (a, v), n in zip(part.axes.items(), plan.mesh.axis_sizes, strict=True)}
        return plan.model_copy(update={"operators": plan.operators | {name: part.model_copy(update={"axes": axes})}})

    pinned = recost(edited("pin(1)"), step)
    assert plan.executable and pinned.executable and not plan.pinned and pinned.pinned == (name,)
    assert pinned.prediction.step_time_s != plan.prediction.step_time_s
    loose = pinned.model_copy(update={"operators": pinned.operators | {name: plan.operators[name]}})
    assert loose.pinned == ()
    for wrong in ("pin(2)", "pin(-1)", "pin(x)", "pin(01)"):
        with pytest.raises(SoapjaxError, match=r"pin\(0\) or pin\(1\)"):
            recost(edited(wrong), step)


def test_pins_of_any_space_can_be_refused():
    problem = problem_of("mlp", layers=4)
    strategy = one_device(problem)
    strategy.axes[0, 0] = PIN(2)
    assert [p.value for p in problem.space.violations(strategy)] == ["-4"]
    assert "pin(0) or pin(1)" in problem.space.violations(strategy)[0].expected


@pytest.mark.parametrize("proposals", [1, 2])
def test_a_proposal_or_two_are_a_budget(proposals):
    result = get_planner("mcmc")(KEY, problem_of("mlp"), Budget(num_proposals=proposals))
    assert result.stopped_by == "proposals" and 1 <= result.num_proposals <= proposals


def test_more_places_along_an_axis_than_costs_tell_apart_are_refused():
    """The ninth of eleven devices would cost as the first."""
    with pytest.raises(SoapjaxError, match="an axis of 11"):
        problem_of("mlp", "1x11")
    assert planning_problem(traced("mlp"), topology_of("1x11")).space.mesh.num_devices == 11
    assert problem_of("mlp", "1x7").space.offers_pins
