"""Costs of layout changes: the jitted formulas against the plain ones, hand calculations and identities."""

import math

import numpy as np
import pytest
from families import family
from hypothesis import given, settings
from hypothesis import strategies as st

from soapjax.costs.rules.links import COLLECTIVES, Links, links_of
from soapjax.costs.rules.many_reshards import reshard_costs
from soapjax.costs.rules.plain_reshard import reshard_cost_plainly
from soapjax.strategy.layout import PARTIAL, PINNED, REPLICATED
from soapjax.topology import factor_mesh, load_topology

R, P = REPLICATED, PARTIAL
FLOAT32_ERROR = 1e-6  # largest relative difference over 38,400 random reshards: 1.7e-7
KINDS = dict(zip(("scatter", "reduce", "exchange", "gather", "permute", "send"), COLLECTIVES, strict=True))

# Two hosts of four devices: latency 8 and 2 seconds, bandwidth 10 and 100 bytes per second.
TWO_LEVELS = Links((2, 2, 2), (0, 1, 1), (8.0, 2.0), (10.0, 100.0))
EIGHT = Links((2, 2, 2), (0, 0, 0), (0.5,), (4.0,))
# Batches are of one fixed shape per mesh: one trace each.
MESHES = (
    TWO_LEVELS,
    EIGHT,
    Links((2,), (0,), (1e-6,), (1e9,)),
    Links((2, 3), (0, 1), (1e-6, 1e-7), (1e9, 1e10), fractions=((0.9, 1.0, 0.5, 0.8, 0.4, 1.0), (1.0, 1.0, 0.7, 1.0, 0.6, 1.0))),
    Links((3, 2, 5), (0, 0, 1), (3e-6, 1e-6), (1e9, 3e11)),
    Links((2, 2, 3, 2, 7), (0, 1, 1, 2, 2), (1e-4, 8e-6, 2e-6), (1e8, 2e10, 2.25e11)),
    links_of(load_topology("a100x64"), factor_mesh(load_topology("a100x64"))),
    links_of(load_topology("v100x32"), factor_mesh(load_topology("v100x32"))),
    TWO_LEVELS._replace(rings_across_levels=True),
    Links(
        (2, 2, 3, 2, 7), (0, 1, 1, 2, 2), (1e-4, 8e-6, 2e-6), (1e8, 2e10, 2.25e11), rings_across_levels=True,
        fractions=((0.9, 1.0, 0.5, 0.8, 0.4, 1.0), (1.0, 1.0, 0.7, 1.0, 0.6, 1.0), (0.7, 1.0, 1.0, 0.9, 1.0, 1.0)),
    ),
)
BATCH = 64


def one(source, target, size: float, links: Links):
    """Seconds per level and bytes by kind of a single reshard, from both implementations, which must agree."""
    found = reshard_costs(np.array([source], np.int8), np.array([target], np.int8), size, links)
    seconds, sent = reshard_cost_plainly(source, target, size, links)
    np.testing.assert_allclose(found.seconds[0], seconds, rtol=FLOAT32_ERROR)
    np.testing.assert_allclose(found.bytes[0], list(sent.values()), rtol=FLOAT32_ERROR)
    return seconds, sent


def random_shapes(rng: np.random.Generator, source: np.ndarray, target: np.ndarray, links: Links) -> np.ndarray:
    """Shapes [n, 4] that hold every source and every target, and both at once in about half of the dims."""
    shape = np.ones((len(source), 4), np.int32)
    for i, (s, t) in enumerate(zip(source, target, strict=True)):
        for d in range(4):
            before, after, either = (
                math.prod(n for n, on in zip(links.axis_sizes, mask, strict=True) if on)
                for mask in (s == d, t == d, (s == d) | (t == d))
            )
            shape[i, d] = either if rng.random() < 0.5 else math.lcm(before, after)
    return shape


def random_layouts(rng: np.random.Generator, links: Links, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sources (with partial sums), targets (without) and sizes; half of the axes stay as they are."""
    shape = (count, len(links.axis_sizes))
    source = rng.integers(PARTIAL, 4, shape).astype(np.int8)
    target = rng.integers(REPLICATED, 4, shape).astype(np.int8)
    target = np.where((rng.random(shape) < 0.5) & (source != PARTIAL), source, target)
    return source, target, np.exp(rng.uniform(0, 25, count)).astype(np.float32)


@pytest.mark.parametrize("links", family(MESHES, slow=MESHES[-1:]), ids=lambda x: "x".join(map(str, x.axis_sizes)))
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32 - 1))
def test_jitted_equals_plain(links, seed):
    source, target, size = random_layouts(np.random.default_rng(seed), links, BATCH)
    found = reshard_costs(source, target, size, links)
    assert found.seconds.shape == (BATCH, links.num_levels) and found.bytes.shape == (BATCH, len(COLLECTIVES))
    plain = [reshard_cost_plainly(s, t, float(n), links) for s, t, n in zip(source, target, size, strict=True)]
    np.testing.assert_allclose(found.seconds, [p[0] for p in plain], rtol=FLOAT32_ERROR)
    np.testing.assert_allclose(found.bytes, [[p[1][k] for k in COLLECTIVES] for p in plain], rtol=FLOAT32_ERROR)


@pytest.mark.parametrize("links", family(MESHES, slow=MESHES[-1:]), ids=lambda x: "x".join(map(str, x.axis_sizes)))
def test_small_dims_jitted_equal_plain(links):
    rng = np.random.default_rng(len(links.axis_sizes))
    source, target, size = random_layouts(rng, links, BATCH)
    shape = random_shapes(rng, source, target, links)
    found = reshard_costs(source, target, size, links, shape=shape)
    plain = [
        reshard_cost_plainly(s, t, float(n), links, shape=x.tolist())
        for s, t, n, x in zip(source, target, size, shape, strict=True)
    ]
    np.testing.assert_allclose(found.seconds, [p[0] for p in plain], rtol=FLOAT32_ERROR)
    np.testing.assert_allclose(found.bytes, [[p[1][k] for k in COLLECTIVES] for p in plain], rtol=FLOAT32_ERROR)


def test_a_small_dim_gathers_before_others_enter_by_hand():
    # 4 rows in quarters of 200 bytes, 2 of the 4 parts to be split by another axis: the axes that leave come first,
    # 200 to 800 bytes per device, then all is slices.
    links = Links((2, 2, 2), (0, 0, 0), (1.0,), (100.0,))
    source, target = (0, 0, R), (1, R, 0)
    seconds, sent = reshard_cost_plainly(source, target, 800.0, links, shape=(4, 2))
    assert sent == dict.fromkeys(COLLECTIVES, 0) | {"all-gather": 600} and seconds == [3 + 600 / 100]
    # Of 8 rows it is 100 bytes after the slice, half of it exchanged, then gathered from two parts.
    _, sent = reshard_cost_plainly(source, target, 800.0, links, shape=(8, 2))
    assert sent["all-to-all"] == 50 and sent["all-gather"] == 100


def test_gather_over_two_levels_by_hand():
    # 800 bytes in eighths of 100. Between hosts first, while parts are small: 2 devices hold 200 together, each sends
    # 100 bytes once. Within a host, 4 devices hold 800 together: 3 steps, 800 * 3/4 = 600 bytes.
    seconds, sent = one((0, 0, 0), (R, R, R), 800.0, TWO_LEVELS)
    assert seconds == pytest.approx([8 + 100 / 10, 3 * 2 + 600 / 100])
    assert sent == dict.fromkeys(COLLECTIVES, 0) | {"all-gather": 700}


def test_reduce_scatter_over_two_levels_by_hand():
    # The same way back: within the host 800 * 3/4, then between hosts 200 * 1/2.
    seconds, sent = one((P, P, P), (0, 0, 0), 800.0, TWO_LEVELS)
    assert seconds == pytest.approx([8 + 100 / 10, 3 * 2 + 600 / 100])
    assert sent["reduce-scatter"] == 700


def test_all_reduce_over_two_levels_by_hand():
    seconds, sent = one((P, P, P), (R, R, R), 800.0, TWO_LEVELS)
    assert seconds == pytest.approx([2 * (8 + 100 / 10), 2 * (3 * 2 + 600 / 100)])
    assert sent["all-reduce"] == 1400


def test_a_ring_over_two_levels_by_hand():
    # Every device sends 2 * 800 * 7/8 in 14 steps; four devices share a host's four links of 10 bytes/s.
    ring = TWO_LEVELS._replace(rings_across_levels=True)
    seconds, sent = one((P, P, P), (R, R, R), 800.0, ring)
    assert seconds == pytest.approx([14 * 8 + 1400 / 40, 0])
    assert sent["all-reduce"] == 1400
    # One device per host has its own link only; within the host nothing changes.
    assert one((P, R, R), (R, R, R), 800.0, ring) == one((P, R, R), (R, R, R), 800.0, TWO_LEVELS)
    assert one((R, 0, 0), (R, R, R), 800.0, ring) == one((R, 0, 0), (R, R, R), 800.0, TWO_LEVELS)
    # Links within the host that are slower than those between hosts together hold it up.
    slow = ring._replace(bytes_per_s=(100.0, 10.0))
    assert one((0, 0, 0), (R, R, R), 800.0, slow)[0] == pytest.approx([7 * 8 + 700 / 10, 0])


def test_all_to_all_over_two_levels_by_hand():
    # Every device has 100 bytes; 1/2 of them leave for the other host, 3/4 of the rest for others within the host.
    seconds, sent = one((0, 0, 0), (1, 1, 1), 800.0, TWO_LEVELS)
    assert seconds == pytest.approx([8 + 50 / 10, 3 * 2 + 37.5 / 100])
    assert sent["all-to-all"] == 100 * 7 / 8


@pytest.mark.parametrize(
    "kind, source, target, seconds, sent",
    [  # n = 8, S = 64, a = 1/2, b = 4
        ("gather", 0, R, 7 * 0.5 + 64 * 7 / 8 / 4, 56),
        ("scatter", P, 0, 7 * 0.5 + 64 * 7 / 8 / 4, 56),
        ("reduce", P, R, 2 * (7 * 0.5 + 64 * 7 / 8 / 4), 112),
        ("exchange", 0, 1, 7 * 0.5 + 64 / 8 * 7 / 8 / 4, 7),
    ],
)
def test_formulas_over_one_level(kind, source, target, seconds, sent):
    found = one([source] * 3, [target] * 3, 64.0, EIGHT)
    assert found[0] == pytest.approx([seconds])
    assert {k: v for k, v in found[1].items() if v} == pytest.approx({KINDS[kind]: sent})


def test_mixed_reshard_slices_and_reduces_before_it_exchanges_and_gathers():
    # Axes: slice, reduce-scatter, exchange, gather, each of two devices. 160 bytes, split in two by `exchange` and
    # `gather`: 40; sliced: 20; scattered (10 sent): 10; exchanged (5 sent); gathered to 20 (10 sent).
    links = Links((2, 2, 2, 2), (0, 0, 0, 0), (1.0,), (1.0,))
    seconds, sent = one((R, P, 0, 1), (2, 3, 2, R), 160.0, links)
    assert sent == dict.fromkeys(COLLECTIVES, 0) | {"reduce-scatter": 10, "all-to-all": 5, "all-gather": 10}
    assert seconds == [1 + 10 + 1 + 5 + 1 + 10]


@settings(max_examples=40)
@given(st.sampled_from(MESHES), st.integers(0, 2**32 - 1))
def test_nothing_to_do_and_slicing_are_free(links, seed):
    rng = np.random.default_rng(seed)
    layout = rng.integers(REPLICATED, 4, (BATCH, len(links.axis_sizes))).astype(np.int8)
    # No axis splits dim 4: nothing gets out of order.
    sliced = np.where((layout == R) & (rng.random(layout.shape) < 0.5), np.int8(4), layout)
    size = np.full(BATCH, 1e9, np.float32)
    for target in (layout, sliced):
        cost = reshard_costs(layout, target, size, links)
        assert not np.any(cost.seconds) and not np.any(cost.bytes)


@settings(max_examples=40)
@given(st.sampled_from(MESHES), st.integers(0, 2**32 - 1))
def test_more_bytes_cost_more(links, seed):
    source, target, size = random_layouts(np.random.default_rng(seed), links, BATCH)
    small, large = reshard_costs(source, target, size, links), reshard_costs(source, target, 2 * size, links)
    moves = np.asarray(small.bytes).sum(-1) > 0
    np.testing.assert_allclose(large.bytes, 2 * small.bytes, rtol=FLOAT32_ERROR)
    assert (large.seconds >= small.seconds).all()
    # Latencies stay what they are, so that time at most doubles.
    assert (large.seconds <= 2 * small.seconds * (1 + FLOAT32_ERROR)).all()
    reshards = ((source != target) & ~((source == R) & (target >= 0))).any(-1)
    assert moves[reshards].all()


@settings(max_examples=40)
@given(st.sampled_from(MESHES), st.integers(0, 2**32 - 1))
def test_all_reduce_is_a_reduce_scatter_and_an_all_gather(links, seed):
    links = links._replace(fractions=())  # at one rate
    rng = np.random.default_rng(seed)
    summed = rng.random((BATCH, len(links.axis_sizes))) < 0.5
    size = np.exp(rng.uniform(0, 25, BATCH)).astype(np.float32)
    partial, scattered = np.where(summed, P, R).astype(np.int8), np.where(summed, 0, R).astype(np.int8)
    whole = np.full_like(partial, R)
    ways = (partial, whole), (partial, scattered), (scattered, whole)
    reduce, scatter, gather = (reshard_costs(s, t, size, links) for s, t in ways)
    np.testing.assert_allclose(reduce.seconds, scatter.seconds + gather.seconds, rtol=FLOAT32_ERROR)
    np.testing.assert_allclose(reduce.bytes.sum(-1), (scatter.bytes + gather.bytes).sum(-1), rtol=FLOAT32_ERROR)
    # Over all levels together the bytes are those of one flat group.
    n = np.array([math.prod(s for s, on in zip(links.axis_sizes, row, strict=True) if on) for row in summed])
    np.testing.assert_allclose(gather.bytes.sum(-1), size * (n - 1) / n, rtol=FLOAT32_ERROR)


def test_links_of_a_topology_are_its_achieved_figures():
    topology = load_topology("a100x64")
    links = links_of(topology, factor_mesh(topology))
    assert links.axis_levels == (0, 0, 0, 1, 1, 1)
    assert links.bytes_per_s == pytest.approx((25e9 * 0.8, 300e9 * 0.75))
    assert links.latency_s == pytest.approx((8e-6, 3e-6))


@pytest.mark.parametrize("links", family(MESHES, slow=[m for k, m in enumerate(MESHES) if k not in (1, 2)]))
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32 - 1))
def test_pinned_layouts_jitted_equal_plain(links, seed):
    rng = np.random.default_rng(seed)
    source, target, size = random_layouts(rng, links, BATCH)
    source, target = (np.where(rng.random(x.shape) < 0.4, PINNED - rng.integers(0, 2, x.shape), x) for x in (source, target))
    source, target = source.astype(np.int8), np.where(source == P, R, target).astype(np.int8)
    found = reshard_costs(source, target, size, links)
    plain = [reshard_cost_plainly(s, t, float(n), links) for s, t, n in zip(source, target, size, strict=True)]
    np.testing.assert_allclose(found.seconds, [p[0] for p in plain], rtol=FLOAT32_ERROR)
    np.testing.assert_allclose(found.bytes, [[p[1][k] for k in COLLECTIVES] for p in plain], rtol=FLOAT32_ERROR)


@pytest.mark.parametrize(
    "source, target, seconds, sent, late",
    [  # two axes of two devices, the first between hosts (latency 8, 10 bytes/s), the second within (2 and 100)
        ((PINNED, PINNED), (PINNED, PINNED), [0, 0], 0, 0),
        ((PINNED, PINNED), (PINNED - 1, PINNED - 1), [8 + 40 / 10, 0], 40, 0),  # one message, over the slower link
        ((PINNED, PINNED), (PINNED, PINNED - 1), [0, 2 + 40 / 100], 40, 0),
        ((PINNED, PINNED), (R, R), [8 + 40 / 10, 2 + 40 / 100], 80, 0),  # a tree
        ((PINNED, R), (0, R), [8 + 20 / 10, 0], 20, 0),
        ((0, R), (PINNED, R), [8 + 20 / 10, 0], 20, 20),  # what one device gets counts there
        ((R, R), (PINNED, PINNED), [0, 0], 0, 0),  # it is there already
        ((PINNED, 0), (R, R), [8 + 20 / 10, 2 + 20 / 100], 20, 20),  # halves are sent, and gathered where they went
    ],
)
def test_transfers_by_hand(source, target, seconds, sent, late):
    links = Links((2, 2), (0, 1), (8.0, 2.0), (10.0, 100.0))
    found = reshard_costs(np.array([source], np.int8), np.array([target], np.int8), np.array([40.0], np.float32), links)
    assert found.seconds[0].tolist() == pytest.approx(seconds)
    assert found.bytes[0, COLLECTIVES.index("transfer")] == pytest.approx(sent)
    assert found.late_bytes[0] == pytest.approx(late)
