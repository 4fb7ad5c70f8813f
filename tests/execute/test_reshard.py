"""Resharding: right values for every pair of layouts, and exactly the collectives that the cost model counts."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from soapjax.costs.rules.links import Links
from soapjax.costs.rules.plain_reshard import reshard_cost_plainly
from soapjax.execute.compiled.collectives import collectives_of
from soapjax.execute.spmd.on_blocks import partition_spec
from soapjax.execute.spmd.resharder import permutation, reshard, reshard_sums
from soapjax.strategy.layout import spec_of
from soapjax.strategy.resharding import Exchange, Gather, Permute, rounds_of, steps_of

NAMES, SIZES = ("x0", "x1", "x2"), (2, 2, 2)
LINKS = Links(SIZES, (0, 0, 0), (0.0,), (1.0,))
PAIRS = list(itertools.product(itertools.product((-1, 0, 1), repeat=3), repeat=2))


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(SIZES), NAMES)


def resharded(pairs, x):
    """One program that reshards `x` [..] once per pair."""
    m = mesh()

    def run(x):
        found = []
        for i, (source, target) in enumerate(pairs):
            s, t = (spec_of(layout, rank=x.ndim, axis_names=NAMES) for layout in (source, target))
            with jax.named_scope(f"sj{i}"):
                made = jax.lax.with_sharding_constraint(x + i, NamedSharding(m, partition_spec(s)))
                found.append(jax.lax.with_sharding_constraint(reshard(made, s, t, m), NamedSharding(m, partition_spec(t))))
        return found

    return jax.jit(run, in_shardings=NamedSharding(m, partition_spec(()))).lower(x).compile()


def check(pairs, x):
    compiled = resharded(pairs, x)
    sent: dict[int, dict[str, float]] = {}
    for c in collectives_of(compiled.as_text(), 8):
        kinds = sent.setdefault(c.task, {})
        kinds[c.kind] = kinds.get(c.kind, 0) + c.step_bytes
    for i, ((source, target), y) in enumerate(zip(pairs, compiled(x), strict=True)):
        for shard in y.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(x + i)[shard.index], err_msg=f"{source} to {target}")
        if len(rounds_of(source, target)) <= 2:
            _, predicted = reshard_cost_plainly(source, target, x.nbytes, LINKS, shape=x.shape)
            assert {k: v for k, v in predicted.items() if v} == sent.get(i, {}), f"{source} to {target}"


def test_every_pair_of_2d_layouts():
    """Every seventh of the 729, another seventh at each of two sizes: all of them cost half a minute of compiling."""
    check(PAIRS[::7], jnp.arange(64.0).reshape(8, 8))
    check(PAIRS[3::7], jnp.arange(128.0).reshape(16, 8))


@pytest.mark.parametrize("rank", [3, 4])
def test_pairs_of_more_dims(rank):
    rng = np.random.default_rng(rank)
    pairs = [tuple(tuple(map(int, rng.integers(-1, rank, 3))) for _ in range(2)) for _ in range(40)]
    check(pairs, jnp.arange(8.0**rank).reshape((8,) * rank))


@pytest.mark.parametrize("shape", [(8, 8), (2, 16)])
def test_sums_on_the_way(shape):
    """Summed over some axes and left apart over others: the right total, and the collectives that costs count for it."""
    rng, m = np.random.default_rng(0), mesh()
    # An axis leaves a dim that the axis of a sum enters: blocks would change places, were it no sum.
    cases = [((0, -2, -1), (-1, 0, -1)), ((1, 0, -2), (1, -1, 0)), ((0, -2, -2), (1, 0, -2))]
    while len(cases) < 24:
        source, target = (tuple(map(int, rng.choice([-2, -1, 0, 1], 3))) for _ in range(2))
        # Whole values are not made partial here, and what is split is not either.
        is_way = -2 in source and all(t != -2 or s == -2 for s, t in zip(source, target, strict=True)) and source != target
        if is_way and all(n % 2 ** sum(a == d for a in layout) == 0 for layout in (source, target) for d, n in enumerate(shape)):
            cases.append((source, target))
    values = [rng.integers(-9, 9, (*(2 if s == -2 else 1 for s in source), *shape)) for source, _ in cases]

    for (source, target), x in zip(cases, values, strict=True):
        sums = tuple(n for n, s in zip(NAMES, source, strict=True) if s == -2)
        kept = tuple(n for n, t in zip(NAMES, target, strict=True) if t == -2)
        s, t = (spec_of(layout, rank=len(shape), axis_names=NAMES) for layout in (source, target))
        blocks = jnp.asarray(x.reshape(*(2 for _ in sums), *shape), jnp.float32)
        given = NamedSharding(m, partition_spec((*((n,) for n in sums), *s)))
        run = jax.jit(lambda x, *ways: reshard_sums(x, *ways, m), static_argnums=(1, 2, 3, 4), in_shardings=given)
        compiled = run.lower(blocks, sums, kept, s, t).compile()
        y = compiled(jax.device_put(blocks, given))
        lead = tuple(a for a in range(3) if source[a] == -2 and target[a] != -2)
        wanted = x.sum(lead, keepdims=True).reshape(y.shape)
        for shard in y.addressable_shards:
            np.testing.assert_array_equal(shard.data, wanted[shard.index], err_msg=f"{source} to {target}")
        fits = [n % 2 ** sum(d in pair for pair in zip(source, target, strict=True)) == 0 for d, n in enumerate(shape)]
        if all(fits) and len(rounds_of(source, target)) <= 2:
            summed = tuple(-1 if t == -2 else s for s, t in zip(source, target, strict=True))
            goal = tuple(max(t, -1) for t in target)
            _, predicted = reshard_cost_plainly(summed, goal, 4 * math.prod(shape), LINKS, shape=shape)
            sent = {k: 0.0 for k, v in predicted.items() if v}
            for c in collectives_of(compiled.as_text(), 8):
                sent[c.kind] = sent.get(c.kind, 0.0) + c.step_bytes
            assert {k: v for k, v in predicted.items() if v} == sent, f"{source} to {target}"


def test_steps_by_hand():
    assert steps_of((0, -1), (0, -1), (2, 2)) == ()
    assert steps_of((0, -1), (-1, 0), (2, 2)) == (Permute(((0,),), ((1,),)),)
    assert [type(s) for s in steps_of((0, 0), (0, -1), (2, 2))] == [Gather]
    assert [type(s) for s in steps_of((0, 0), (-1, 0), (2, 2))] == [Permute, Gather]  # the major axis leaves
    assert [type(s) for s in steps_of((0, -1), (1, -1), (2, 2))] == [Exchange]


def test_permutation_brings_every_block_where_it_is_wanted():
    sizes = (2, 3, 2)
    axes, pairs = permutation(((0, 1), (2,)), ((1, 0), (2,)), sizes)
    assert axes == (0, 1, 2) and sorted(s for s, _ in pairs) == sorted(r for _, r in pairs) == list(range(12))
    for sender, receiver in pairs:
        (a, b, c), (d, e, f) = (np.unravel_index(x, sizes) for x in (sender, receiver))
        assert (a * 3 + b, c) == (e * 2 + d, f)


def test_axes_that_leave_a_small_dim_are_gathered_first():
    """Four columns cannot be split by three axes of two at once, nor six by two and three."""
    fits = [p for p in PAIRS[1::5] if all(8 % 2 ** x.count(0) == 0 and 2 % 2 ** x.count(1) == 0 for x in p)]
    check(fits, jnp.arange(16.0).reshape(8, 2))
    m = mesh()
    x = jnp.arange(32.0).reshape(8, 4)
    source, target = ((), ("x0", "x1")), ((), ("x1", "x2"))
    run = jax.jit(lambda x: reshard(x, source, target, m), in_shardings=NamedSharding(m, partition_spec(source)))
    compiled = run.lower(x).compile()
    np.testing.assert_array_equal(compiled(jax.device_put(x, NamedSharding(m, partition_spec(source)))), x)
    m = Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("a", "b"))
    x = jnp.arange(36.0).reshape(6, 6)
    out = jax.jit(lambda x: reshard(x, (("a",), ("b",)), ((), ("a",)), m))(x)
    np.testing.assert_array_equal(out, x)
    x = jnp.arange(18.0).reshape(6, 3)
    out = jax.jit(lambda x: reshard(x, (("b",), ("a",)), (("a",), ()), m))(x)
    np.testing.assert_array_equal(out, x)
