"""The search space: it offers every assignment that divides, and nothing else; what it refuses, it names."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import PROBLEMS, case, graph_of, topology_of

from soapjax.errors import SoapjaxError
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace
from soapjax.strategy.configs import (
    PIN,
    REPLICATE,
    Storage,
    StorageName,
    Strategy,
    replicated,
    stage_storages,
    storage_options,
)
from soapjax.strategy.layout import degree
from soapjax.strategy.space import search_space
from soapjax.topology import factor_mesh

names = pytest.mark.parametrize("model, topology", PROBLEMS)
FEW_AXES = [p for p in PROBLEMS if len(factor_mesh(topology_of(p[1])).axis_names) == 3]


def by_hand(op, mesh) -> set[tuple[int, ...]]:
    """Every assignment of axes to dims of which all degrees divide."""
    found = set()
    for values in itertools.product(range(-1, len(op.dims)), repeat=len(mesh.axis_names)):
        if all(d.divisor % degree(values, k, mesh.axis_sizes) == 0 for k, d in enumerate(op.dims)):
            found.add(values)
    return found


@pytest.mark.parametrize("model, topology", FEW_AXES)
def test_configs_are_exactly_the_assignments_that_divide(model, topology):
    c = case(model, topology)
    for n, op in enumerate(c.graph.operators):
        found = list(c.space.configs(n))
        assert len(found) == len(set(found)) == len(list(c.space.configs(n)))
        assert set(found) == by_hand(op, c.space.mesh)
        assert (REPLICATE,) * 3 in found


def test_an_operator_of_more_dims_than_a_byte_counts_is_split_on_the_first_ones():
    """The sum of a penalty over seventy weights is one region, each weight with two dims of its own."""

    def penalty(weights):
        return sum((w * w).sum() for w in weights)

    graph = build_graph(trace(penalty, [jax.ShapeDtypeStruct((4, 6 + 2 * i), jnp.float32) for i in range(70)]))[0]
    assert max(len(o.dims) for o in graph.operators) > 127, "no such operator: choose another step"
    space = search_space(graph, factor_mesh(topology_of("a100x8")))
    for seed in range(3):
        assert space.is_valid(space.random(np.random.default_rng(seed)))
    n = max(range(graph.num_operators), key=lambda n: len(graph.operators[n].dims))
    assert space.allowed[n, :, 1:].any() and not space.allowed[n, :, 128:].any()


@pytest.mark.parametrize("model, topology", FEW_AXES[:2])
def test_the_nearest_configs_are_all_the_others_in_order(model, topology):
    c = case(model, topology)
    now = c.strategies(5, 1)[0]
    for n in range(c.graph.num_operators):
        own = (tuple(now.axes[n].tolist()), int(now.storage[n]))
        storages = range(len(c.space.storages)) if c.space.owns_parameters[n] else [own[1]]
        found = list(c.space.nearest(n, *own))
        assert set(found) == {(axes, k) for axes in c.space.configs(n) for k in storages} - {own}
        distances = [sum(a != b for a, b in zip((*axes, k), (*own[0], own[1]), strict=True)) for axes, k in found]
        assert len(found) == len(set(found)) and distances == sorted(distances)


def test_sizes_that_do_not_divide_are_not_offered():
    """24 x 36 x 6 on axes of 2, 3 and 2 devices, counted on paper."""
    c = case("mlp_of_sixes", "2x6")
    assert c.space.mesh.axis_sizes == (2, 3, 2)
    assert [d.divisor for d in c.graph.operators[0].dims] == [24, 36, 6]
    # 4 values per axis; only those with both twos on the 6 are gone: 4 of 64, whatever the three does.
    assert len(list(c.space.configs(0))) == 64 - 4


def test_one_device_offers_nothing_but_itself():
    graph, topology = graph_of("mlp"), topology_of("h200x1")
    space = search_space(graph, factor_mesh(topology))
    assert space.storages == (Storage((False,), (False,)),)
    assert all(list(space.configs(n)) == [(REPLICATE,)] for n in range(graph.num_operators))
    assert space.random(np.random.default_rng(0)).key() == replicated(graph, space.mesh).key()


@names
def test_random_strategies_are_valid_and_reach_everything(model, topology):
    c = case(model, topology)
    strategies = c.strategies(seed=21, count=60)
    assert not any(c.space.violations(s) for s in strategies)
    axes, storage = np.stack([s.axes for s in strategies]), np.stack([s.storage for s in strategies])
    assert (storage[:, ~c.space.owns_parameters] == 0).all()
    assert set(storage[:, c.space.owns_parameters].ravel()) == set(range(len(c.space.storages)))
    for n, op in enumerate(c.graph.operators):
        for a, size in enumerate(c.space.mesh.axis_sizes):
            dims = {k for k, d in enumerate(op.dims) if d.divisor % size == 0}
            assert set(axes[:, n, a]) == {REPLICATE} | dims


def test_random_strategies_repeat_with_the_seed():
    c = case("lm", "a100x8")
    first, again, other = (c.strategies(seed, 1)[0].key() for seed in (5, 5, 6))
    assert first == again != other


@pytest.mark.parametrize("model, topology", FEW_AXES)
def test_a_strategy_is_valid_exactly_where_all_its_configs_are(model, topology):
    c = case(model, topology)
    rng = np.random.default_rng(7)
    configs = [by_hand(op, c.space.mesh) for op in c.graph.operators]
    outcomes = set()
    for base in c.strategies(seed=22, count=200):
        n = int(rng.integers(c.graph.num_operators))
        base.axes[n] = rng.integers(-1, len(c.graph.operators[n].dims) + 1, 3)
        expected = tuple(base.axes[n].tolist()) in configs[n]
        assert c.space.is_valid(base) == expected
        assert all(c.graph.operators[n].name in p.place for p in c.space.violations(base))
        outcomes.add(expected)
    assert outcomes == {True, False}


def test_violations_name_operator_axis_dim_and_storage():
    c = case("mlp_of_sixes", "2x6")  # axes h0=2, d0=3, d1=2
    assert c.space.mesh.axis_names == ("h0", "d0", "d1")
    strategy = c.replicated()
    strategy.axes[0] = [2, REPLICATE, 2]  # 6 features over 4
    strategy.axes[1, 1] = 3  # there is no fourth dim
    strategy.axes[2, 0] = PIN(0)  # pins are not offered
    strategy.storage[3] = 77
    operators = [op.name for op in c.graph.operators]
    problems = c.space.violations(strategy)
    dim = c.graph.operators[0].dims[2].name
    assert [p.place for p in problems] == [
        f"operators.{operators[0]}.{dim}",
        f"operators.{operators[1]}.axes.d0",
        f"operators.{operators[2]}.axes.h0",
        f"operators.{operators[3]}.storage",
    ]
    assert problems[0].value == "degree 4" and problems[0].expected == "a divisor of 6"
    assert "replicate" in problems[1].expected and c.graph.operators[1].dims[0].name in problems[1].expected
    assert not c.space.is_valid(strategy)


def test_storage_options_are_as_used_and_both_ways_to_shard_over_all_and_over_the_fastest_level():
    one, two = (factor_mesh(topology_of(name)) for name in ("a100x8", "2x4"))
    assert [s.describe(one.axis_names) for s in storage_options(one)] == [
        "as used", "sharded(d0,d1,d2), kept", "sharded(d0,d1,d2), regathered",
    ]  # fmt: skip
    assert [s.describe(two.axis_names) for s in storage_options(two)] == [
        "as used", "sharded(h0,d0,d1), kept", "sharded(h0,d0,d1), regathered", "sharded(h0,d0,d1), regathered(d0,d1)",
        "sharded(d0,d1), kept", "sharded(d0,d1), regathered",
    ]  # fmt: skip
    assert [s.describe(two.axis_names) for s in stage_storages(two, adds_up=True)] == [
        "as used", "sharded(h0,d0,d1), kept", "sharded(h0,d0,d1), regathered", "sharded(h0,d0,d1), kept, gradients sharded",
        "sharded(d0,d1), kept", "sharded(d0,d1), regathered", "sharded(d0,d1), kept, gradients sharded",
    ]  # fmt: skip
    for mesh in (one, two):
        for storage in (*storage_options(mesh), *stage_storages(mesh, adds_up=True)):
            text = storage.describe(mesh.axis_names)
            name = StorageName.parse(text)
            assert str(name) == text and name.scatters == storage.scatters
            assert [[n in names for n in mesh.axis_names] for names in name[:2]] == [list(storage.axes), list(storage.again)]


def test_configs_by_name():
    c = case("mlp_of_sixes", "2x6")
    strategy = c.replicated()
    strategy.axes[0] = [0, 1, 0]
    strategy.axes[1] = [PIN(0), PIN(1), REPLICATE]
    dims = [d.name for d in c.graph.operators[0].dims]
    first, second = (strategy.config(n, c.graph.operators[n], c.space.mesh, c.space.storages) for n in (0, 1))
    assert first.axes == {"h0": dims[0], "d0": dims[1], "d1": dims[0]} and first.storage == "as used"
    assert second.axes == {"h0": "pin(0)", "d0": "pin(1)", "d1": "replicate"}


def test_keys_tell_strategies_apart():
    c = case("mlp_of_sixes", "2x6")
    strategies = c.strategies(seed=23, count=50)
    copies = [Strategy(s.axes.copy(), s.storage.copy()) for s in strategies]
    assert [s.key() for s in strategies] == [s.key() for s in copies]
    assert len({s.key() for s in strategies}) == 50


def test_fixed_layouts_are_taken_by_path():
    graph, mesh = graph_of("mlp"), factor_mesh(topology_of("a100x8"))
    space = search_space(graph, mesh, fixed={"batch.features": (("d1",), ("d0", "d2")), "batch.label": ()})
    leaves = {graph.in_paths[leaf]: layout.tolist() for leaf, layout in space.fixed_layouts.items()}
    assert leaves == {"batch.features": [1, 0, 1], "batch.label": [-1, -1, -1]}
    # What a leaf's layout is does not narrow what operators may do.
    free = search_space(graph, mesh)
    assert (space.allowed == free.allowed).all() and not free.fixed_layouts


def test_every_fixed_layout_that_does_not_fit_is_named():
    graph, mesh = graph_of("mlp_of_sixes"), factor_mesh(topology_of("a100x8"))
    fixed = {
        "batch.featuers": (("d0",),),
        "batch.label": (("x",),),
        "batch.features": ((), ("d0", "d1")),  # 6 over 4
        "state.params.head.bias": (("d0",), ("d1",)),  # it has one dim
        "state.params.head.kernel": (("d0",), ("d0",)),  # no axis splits two dims
    }
    with pytest.raises(SoapjaxError) as error:
        search_space(graph, mesh, fixed=fixed)
    assert [p.place for p in error.value.problems] == [f"fixed[{path!r}]" for path in fixed]
    assert "'x'" in error.value.problems[1].value and "(24, 6)" in error.value.problems[2].expected


def constrained_graph(axes: tuple[str, ...], spec):
    """A step whose own code fixes a layout on a mesh of `axes`, two devices each."""
    mesh = jax.make_mesh((2,) * len(axes), axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    def step(w, x):
        def loss(w):
            hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), sharding)
            return (hidden @ w.T).sum()

        return w - 0.1 * jax.grad(loss)(w), {}

    shape = jax.ShapeDtypeStruct
    return build_graph(trace(step, shape((16, 12), jnp.float32), shape((32, 16), jnp.float32)))[0]


def test_a_constraint_of_the_users_own_has_one_config():
    graph = constrained_graph(("d0", "d1", "d2"), (("d0", "d2"), None))
    space = search_space(graph, factor_mesh(topology_of("a100x8")))
    fixed = [n for n, op in enumerate(graph.operators) if op.fixed is not None]
    assert fixed
    for n in fixed:
        op = graph.operators[n]
        sizes = {op.dims[v].size for v in next(space.configs(n)) if v >= 0}
        assert len(list(space.configs(n))) == 1 and sizes == {32}
        assert next(space.configs(n))[1] == REPLICATE
    strategy = space.random(np.random.default_rng(0))
    assert space.is_valid(strategy)
    strategy.axes[fixed[0]] = REPLICATE
    assert not space.is_valid(strategy)


def test_a_constraint_that_the_plans_mesh_cannot_express_is_named():
    graph = constrained_graph(("data", "model"), ("data", None))
    with pytest.raises(SoapjaxError) as error:
        search_space(graph, factor_mesh(topology_of("a100x8")))
    assert error.value.problems and all("'data'" in p.value and "d0" in p.expected for p in error.value.problems)


@names
def test_what_violates_the_space_is_found_one_operator_at_a_time(model, topology):
    space, rng = case(model, topology).space, np.random.default_rng(0)
    names, sizes = space.mesh.axis_names, space.mesh.axis_sizes
    for _ in range(20):
        drawn = space.random(rng)
        axes, storage = drawn.axes.copy(), drawn.storage.copy()
        for _ in range(rng.integers(0, 4)):
            axes[rng.integers(len(axes)), rng.integers(len(names))] = rng.integers(-3, axes.max() + 3)
        storage[rng.integers(len(storage))] = rng.integers(-1, len(space.storages) + 1)
        expected = []
        for n, op in enumerate(space.graph.operators):
            offered = [[REPLICATE, *(k for k in range(len(op.dims)) if space.allowed[n, a, k + 1])] for a in range(len(names))]
            expected += [f"{op.name}.axes.{names[a]}" for a in range(len(names)) if axes[n, a] not in offered[a]]
            expected += [f"{op.name}.{d.name}" for k, d in enumerate(op.dims) if d.divisor % degree(axes[n], k, sizes)]
            expected += [f"{op.name}.storage"] if not 0 <= storage[n] < len(space.storages) else []
        assert [p.place for p in space.violations(Strategy(axes, storage))] == [f"operators.{place}" for place in expected]


def test_a_mesh_of_more_axes_than_costs_have_bits_is_refused():
    graph = graph_of("mlp")
    assert search_space(graph, factor_mesh(topology_of("4096x8"))).num_axes == 15
    with pytest.raises(SoapjaxError, match="65536 devices"):
        search_space(graph, factor_mesh(topology_of("8192x8")))
