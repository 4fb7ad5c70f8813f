"""Slices have names of their own, because XLA mistakes JAX's for the partitioner's."""

import as_users
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from soapjax.execute.compiled.hlo import namesakes
from soapjax.execute.spmd.slicing import block_slice, block_slice_in_dim


def joined(num_ours, num_theirs, slice_in_dim):
    """What two devices make of a concatenation of slices by hand and by the partitioner, what NumPy does, the compiled text."""
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    whole, split = (NamedSharding(mesh, PartitionSpec(*p)) for p in ((), ("d",)))
    rng = np.random.default_rng(0)
    arrays = [jax.device_put(rng.random((8, 3), np.float32), whole) for _ in range(num_ours + num_theirs)]

    def part(x):
        return slice_in_dim(x, jax.lax.axis_index("d") * 4, 4, 0)

    @jax.jit
    def fn(*xs):
        by_hand = jax.shard_map(part, mesh=mesh, in_specs=PartitionSpec(), out_specs=split.spec, check_vma=False)
        ours = [by_hand(x) for x in xs[:num_ours]]
        theirs = [jax.lax.with_sharding_constraint(x, split) for x in xs[num_ours:]]
        return jax.lax.with_sharding_constraint(jnp.concatenate(ours + theirs, axis=-1), split)

    with as_users.compiling():
        compiled = fn.lower(*arrays).compile()
    return np.asarray(compiled(*arrays)), np.concatenate(arrays, axis=-1), compiled.as_text()


@pytest.mark.parametrize(("num_ours", "num_theirs"), [(1, 2), (2, 3), (2, 4), (1, 1)])
def test_slices_by_hand_and_by_the_partitioner_in_one_fusion(num_ours, num_theirs):
    found, wanted, text = joined(num_ours, num_theirs, block_slice_in_dim)
    np.testing.assert_array_equal(found, wanted)
    assert "block_slice" in text and not namesakes(text)


def test_xla_still_takes_namesakes_for_one():
    """Where this fails, a new XLA tells them apart: `block_slice` and `namesakes` can go."""
    found, wanted, text = joined(1, 2, jax.lax.dynamic_slice_in_dim)
    assert len(namesakes(text)) == 1 and "dynamic_slice" in namesakes(text)[0]
    assert not np.array_equal(found, wanted)


def test_what_is_not_in_a_fusion_has_no_namesake_in_it():
    line = "  %dynamic_slice.4 = f32[2]{0} dynamic-slice(%x, %i), dynamic_slice_sizes={2}\n"
    ours, theirs = line, line.replace("%dynamic_slice", "%dynamic-slice")
    assert len(namesakes(f"%fused_computation (x: f32[4]) -> f32[2] {{\n{ours}{theirs}}}\n")) == 1
    apart = f"%fused_computation (x: f32[4]) -> f32[2] {{\n{ours}}}\n\nENTRY %main (x: f32[4]) -> f32[2] {{\n{theirs}}}\n"
    assert not namesakes(apart)


@pytest.mark.parametrize("start", [(0, 0), (3, 1), (7, 9), (-1, 2)])
def test_a_block_that_would_end_outside_is_moved_inwards(start):
    x = np.arange(40.0).reshape(8, 5)
    row, column = (min(max(s, 0), most) for s, most in zip(start, (4, 3), strict=True))
    wanted = x[row : row + 4, column : column + 2]
    starts = [jnp.int32(s) for s in start]
    np.testing.assert_array_equal(block_slice(x, starts, (4, 2)), wanted)
    np.testing.assert_array_equal(jax.jit(lambda x, *s: block_slice(x, s, (4, 2)))(x, *starts), wanted)


def test_under_vmap():
    x = np.arange(120.0).reshape(3, 8, 5)
    starts = np.array([[0, 1], [2, 0], [4, 3]], np.int32)
    found = jax.jit(jax.vmap(lambda x, s: block_slice(x, [s[0], s[1]], (4, 2))))(x, starts)
    np.testing.assert_array_equal(found, [x[k, r : r + 4, c : c + 2] for k, (r, c) in enumerate(starts)])
    alike = jax.jit(jax.vmap(lambda x: block_slice_in_dim(x, jnp.int32(3), 2, 1), in_axes=1, out_axes=1))(x)
    np.testing.assert_array_equal(alike, x[:, :, 3:5])
