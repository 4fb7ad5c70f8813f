"""The rule table against its meaning: an equation on blocks of its labelled dims gives the blocks of its result.

For every label of every equation of a zoo of small functions: split the labelled
dims of the operands into contiguous blocks, run the primitive on each block, put the results
together (concatenate where the result has the label, reduce where it has not), and compare.
"""

import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from planned import Case, all_on

from soapjax.graph.program import flatten
from soapjax.graph.rules import _RULES, BLOCKED, labels_of, register

FUNCTIONS = {}


def covers(*primitives):
    """Registers a zoo function `make() -> (fn, args)` and the primitives that it is there for."""

    def add(make):
        FUNCTIONS[make.__name__] = (make, set(primitives))
        return make

    return add


def values(*shape, seed=0):
    """Distinct values, none of them special."""
    x = np.random.default_rng(seed).permutation(math.prod(shape)) + 1.0
    return jnp.asarray((x / x.size - 0.37).reshape(shape), jnp.float32)


def indices(high, *shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(high, size=shape), jnp.int32)


@covers("dot_general")
def dots():
    def fn(a, b, c):
        batched = lax.dot_general(a, b, (((1, 3), (2, 0)), ((0,), (1,))))  # two contracted dims, batch dims apart
        return batched, a[0, 0] @ c, jnp.einsum("ij,kl->ikjl", c, c), lax.dot_general(c, c, (((0, 1), (0, 1)), ((), ())))

    return fn, (values(2, 4, 6, 8), values(8, 2, 4, 5, seed=1), values(8, 4, seed=2))


def conv_zoo(**params):
    """A convolution and its two gradients."""
    lhs, rhs = params.pop("lhs", (4, 8, 8, 6)), params.pop("rhs", (3, 3, 6, 10))
    numbers = params.pop("numbers", ("NHWC", "HWIO", "NHWC"))
    params = {"window_strides": (1, 1), "padding": "SAME"} | params

    def make():
        def fn(x, w):
            out, pull = jax.vjp(lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=numbers, **params), x, w)
            return out, pull(jnp.cos(out))

        return fn, (values(*lhs), values(*rhs, seed=1))

    return make


CONVS = {
    "plain": {},
    "strided": dict(window_strides=(2, 2)),
    "strided_valid": dict(window_strides=(2, 1), padding="VALID", lhs=(4, 9, 8, 6)),
    "dilated": dict(rhs_dilation=(2, 2)),
    "transposed": dict(lhs_dilation=(2, 2), padding=((2, 2), (2, 2)), rhs=(4, 4, 6, 10)),
    "pointwise": dict(rhs=(1, 1, 6, 10)),
    "pointwise_strided": dict(rhs=(1, 1, 6, 10), window_strides=(2, 2)),
    "grouped": dict(feature_group_count=2, rhs=(3, 3, 3, 10)),
    "depthwise": dict(feature_group_count=6, rhs=(3, 3, 1, 6)),
    "depthwise_multiplied": dict(feature_group_count=6, rhs=(3, 3, 1, 12)),
    "batch_grouped": dict(batch_group_count=2, rhs=(3, 3, 6, 10)),
    "batch_grouped_depthwise": dict(batch_group_count=4, rhs=(3, 3, 6, 8)),
    "channels_first": dict(lhs=(4, 6, 8, 8), rhs=(10, 6, 3, 3), numbers=("NCHW", "OIHW", "NCHW")),
    "even_kernel": dict(rhs=(2, 4, 6, 10)),
    "one_dim": dict(lhs=(4, 8, 6), rhs=(3, 6, 10), window_strides=(2,), numbers=("NWC", "WIO", "NWC")),
}
for _name, _params in CONVS.items():
    FUNCTIONS[f"conv_{_name}"] = (conv_zoo(**_params), {"conv_general_dilated"})


@covers("reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim")
def shapes():
    def fn(a):
        merged, split = a.reshape(24, 8), a.reshape(4, 3, 2, 8)
        regrouped, ones = a.reshape(8, 3, 8), a.reshape(1, 4, 1, 48)
        unmatched = a.reshape(3, 64)
        moved = lax.transpose(a, (2, 0, 1))
        wide = lax.broadcast_in_dim(a[:, :1], (4, 5, 6, 8), (0, 2, 3))
        return merged, split, regrouped, ones, unmatched, moved, wide, lax.expand_dims(a, (1, 3)), lax.squeeze(ones, (0, 2))

    return fn, (values(4, 6, 8),)


@covers("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin")
def reductions():
    def fn(a, i):
        big = a > 0.3
        return (
            a.sum(1), a.max((0, 2)), a.min(0), a.prod(2), big.all(0), big.any((1, 2)), lax.reduce_xor(i, (0,)), a.sum(),
            a.argmax(1), a.argmin(2),
        )  # fmt: skip

    return fn, (values(4, 6, 8), indices(99, 4, 6))


@covers("concatenate", "pad", "slice", "rev", "split")
def pieces():
    def fn(a):
        return (
            jnp.concatenate([a, 2 * a[:, :2]], 1), jnp.pad(a, ((0, 0), (1, 2), (0, 0))), lax.pad(a, 0.0, ((0, 0, 0), (0, 0, 1), (0, 0, 0))),
            lax.pad(a, 0.0, ((0, 0, 0), (-1, 0, 0), (0, 0, 0))), a[:, 1:5], a[:, ::2], a[1:3, :, ::-1], jnp.flip(a, (0, 2)),
            jnp.split(a, 2, 1), lax.split(a, (2, 6), 2),
        )  # fmt: skip

    return fn, (values(4, 6, 8),)


@covers("dynamic_slice", "dynamic_update_slice")
def moving_pieces():
    def fn(a, i):
        part = lax.dynamic_slice(a, (0, i, 0), (4, 2, 8))
        return part, lax.dynamic_update_slice(a, 3 * part, (0, i + 1, 0)), lax.dynamic_update_slice(a, a + 1, (0, 0, 0))

    return fn, (values(4, 6, 8), jnp.int32(3))


@covers("sort", "top_k", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def along_an_axis():
    def fn(a, i):
        pair = lax.sort((i, a[:, :, 0]), dimension=1, num_keys=1)
        cumulative = [f(a, axis=1) for f in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)]
        return jnp.sort(a, 0), pair, lax.top_k(a, 3), cumulative, lax.cumsum(a, axis=2, reverse=True)

    return fn, (values(4, 6, 8), indices(5, 4, 6))


@covers("gather")
def gathers():
    def fn(table, a, i, j):
        return (
            table[i], jnp.take(table, i, axis=1), jnp.take(table, i, axis=0, mode="clip"), jnp.take_along_axis(a, j, 1),
            table[:, 3], table[i, i], jnp.take_along_axis(a, a.argmax(-1)[:, None], -1), jax.vmap(lambda r, k: r[k])(a, i[:, 0]),
        )  # fmt: skip

    return fn, (values(6, 6), values(4, 8, seed=1), indices(6, 4, 2), indices(8, 4, 6, seed=1))


@covers("scatter-add", "scatter", "scatter-mul", "scatter_min", "scatter_max")
def scatters():
    def fn(table, a, i, j, updates):
        at = table.at[i]
        gradient = jax.grad(lambda a: jnp.sum(jnp.take_along_axis(a, j, 1) ** 2))(a)
        return at.add(updates), at.set(1.5), at.multiply(updates), at.min(updates), at.max(updates), gradient, a.at[:, i[:, 0]].add(2.0)

    return fn, (values(6, 10), values(4, 8, seed=1), indices(6, 4, 2), indices(8, 4, 6, seed=1), values(4, 2, 10, seed=2))


@covers("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_scatter_add")
def pooling():
    def window(a, op, init, size, stride, padding):
        return lax.reduce_window(a, init, op, (1, size, size, 1), (1, stride, stride, 1), padding)

    def fn(a):
        def most(x):
            return window(x, lax.max, -jnp.inf, 2, 2, "VALID")

        out = [most(a), window(a, lax.min, jnp.inf, 3, 1, "SAME"), window(a, lax.add, 0.0, 2, 2, "VALID")]
        out += [window(a, lax.mul, 1.0, 2, 2, "VALID"), window(a, lax.max, -jnp.inf, 3, 2, "SAME")]
        out += [lax.reduce_window(a, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID", base_dilation=(1, 2, 1, 1))]
        overlapping = jax.grad(lambda x: jnp.sum(window(x, lax.max, -jnp.inf, 3, 2, "SAME") ** 2))(a)
        return out, jax.grad(lambda x: jnp.sum(most(x) ** 2))(a), overlapping

    return fn, (values(4, 8, 8, 6),)


@covers("select_and_gather_add")
def pooling_twice():
    def fn(a):
        def pool(x):
            return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID")

        return jax.jvp(pool, (a,), (jnp.cos(a),))

    return fn, (values(4, 8, 6),)


@covers("fft")
def fourier():
    def fn(a):
        return jnp.fft.rfft(a), jnp.fft.fft2(a.astype(jnp.complex64)), jnp.fft.irfft(jnp.fft.rfft(a))

    return fn, (values(4, 6, 8),)


@covers("select_n", "clamp", "optimization_barrier", "convert_element_type", "bitcast_convert_type", "add", "exp", "atan2", "erf_inv")
def elementwise():
    def fn(a, b):
        bits = lax.bitcast_convert_type(a, jnp.int32)
        narrow, wide = lax.bitcast_convert_type(a, jnp.int16), lax.bitcast_convert_type(jnp.ones((4, 6, 2), jnp.int16), jnp.int32)
        return (
            jnp.where(a > b, a, b), lax.clamp(-0.1, a, 0.2), lax.clamp(b, a, b + 0.1), lax.optimization_barrier((a, b)), lax.erf_inv(a),
            a + b, jnp.exp(a) * b[:1], jnp.arctan2(a, b), a.astype(jnp.bfloat16), bits, narrow, wide, lax.select(a[0, 0] > 0, a, b),
        )  # fmt: skip

    return fn, (values(4, 6), values(4, 6, seed=1))


@covers("while", "cond", "iota", "random_bits", "random_wrap", "random_unwrap", "random_fold_in", "threefry2x32")
def opaque():
    def fn(a, raw, key):
        key = jax.random.fold_in(key, 3)
        kept = jax.random.bernoulli(key, 0.5, a.shape) | (jax.random.bits(jax.random.wrap_key_data(raw), a.shape) > 9)
        a = jnp.where(kept, a, 0) + jnp.arange(6.0)
        a = lax.while_loop(lambda x: x.sum() < 20, lambda x: x + 1, a)
        bits = lax.random_bits if hasattr(lax, "random_bits") else None
        del bits
        return lax.cond(a.sum() > 3, lambda x: x * 2, lambda x: x, a), jax.random.key_data(key)

    return fn, (values(4, 6), jax.random.PRNGKey(1), jax.random.key(0))


# Combines the results of the blocks of a label that the result lacks.
COMBINE = {
    "reduce_max": np.maximum,
    "reduce_min": np.minimum,
    "reduce_prod": np.multiply,
    "reduce_and": np.logical_and,
    "reduce_or": np.logical_or,
    "reduce_xor": np.bitwise_xor,
} | dict.fromkeys(["dot_general", "conv_general_dilated", "reduce_sum", "gather", "scatter-add"], np.add)


def is_key(x):
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def block(x, labels, label, part, parts):
    for d, found in enumerate(labels):
        if found == label:
            x = jnp.split(x, parts, d)[part]
    return x


def local_params(eqn, label, labels, parts, ins, outs):
    """The parameters on a block: those that hold shapes, and group counts."""
    p = dict(eqn.params)
    if eqn.name == "broadcast_in_dim":
        p["shape"] = outs[0]
    elif eqn.name == "reshape":
        p["new_sizes"] = outs[0]
    elif eqn.name == "dynamic_slice":
        p["slice_sizes"] = outs[0]
    elif eqn.name == "slice":
        split = [found == label for found in labels.inputs[0]]
        p["limit_indices"] = tuple(n if s else m for s, n, m in zip(split, ins[0], p["limit_indices"], strict=True))
    elif eqn.name == "gather":
        is_window = label in labels.outputs[0]
        batching = p["dimension_numbers"].operand_batching_dims
        p["slice_sizes"] = tuple(
            n if is_window and found == label and d not in batching else m
            for d, (found, n, m) in enumerate(zip(labels.inputs[0], ins[0], p["slice_sizes"], strict=True))
        )
    elif eqn.name == "conv_general_dilated":
        dn = p["dimension_numbers"]
        if p["feature_group_count"] > 1 and labels.inputs[0][dn.lhs_spec[1]] == label:
            p["feature_group_count"] //= parts
        if p["batch_group_count"] > 1 and labels.inputs[0][dn.lhs_spec[0]] == label:
            p["batch_group_count"] //= parts
    return p


def masked_gather(eqn, operands, full_rows, part, parts, axis):
    """Rows of this block where the index points into it, zero elsewhere: what the partitioner makes of a split table."""
    table, index = operands
    start, size = part * full_rows // parts, full_rows // parts
    inside = (index[..., 0] >= start) & (index[..., 0] < start + size)
    p = eqn.params
    out = eqn.primitive.bind(table, jnp.clip(index - start, 0, size - 1), **p)
    dn = p["dimension_numbers"]
    shape = [n if d not in dn.offset_dims else 1 for d, n in enumerate(out.shape)]
    return jnp.where(inside.reshape(shape), out, 0)


def run_on_blocks(eqn, label, labels, operands, outs, parts):
    results = []
    for part in range(parts):
        mine = [block(x, labs, label, part, parts) for x, labs in zip(operands, labels.inputs, strict=True)]
        shapes = [tuple(n // parts if found == label else n for n, found in zip(o, labs, strict=True))
                  for o, labs in zip(outs, labels.outputs, strict=True)]  # fmt: skip
        is_reduced = all(label not in labs for labs in labels.outputs)
        if eqn.name == "gather" and label in labels.inputs[0] and is_reduced:
            rows = operands[0].shape[labels.inputs[0].index(label)]
            results.append([masked_gather(eqn, mine, rows, part, parts, labels.inputs[0].index(label))])
            continue
        if eqn.name == "scatter-add" and is_reduced and part > 0:
            mine[0] = jnp.zeros_like(mine[0])  # the operand counts once
        params = local_params(eqn, label, labels, parts, [x.shape for x in mine], shapes)
        out = eqn.primitive.bind(*mine, **eqn.primitive.get_bind_params(params))
        out = list(out) if eqn.primitive.multiple_results else [out]
        assert [x.shape for x in out] == shapes, f"{eqn.name}: blocks of another shape"
        results.append(out)
    return results


def joined(eqn, label, labels, results):
    whole = []
    for k, labs in enumerate(labels.outputs):
        pieces = [np.asarray(r[k]) for r in results]
        if label in labs:
            whole.append(np.concatenate(pieces, labs.index(label)))
        else:
            assert all(label not in found for found in labels.outputs), f"{eqn.name}: one result has the label, another lacks it"
            total = pieces[0]
            for piece in pieces[1:]:
                total = COMBINE[eqn.name](total, piece)
            whole.append(total)
    return whole


def check_equation(eqn, program, env):
    """Every label of one equation but those of windows; returns how many were checked."""
    labels = labels_of(eqn, program)
    operands = [env[a] if isinstance(a, int) else jnp.asarray(a.val, a.aval.dtype) for a in eqn.inputs]
    outs = [env[o].shape for o in eqn.outputs]
    checked = 0
    for label in sorted({lab for labs in labels.inputs for lab in labs} - {BLOCKED} - labels.spatial):
        for labs in (*labels.inputs, *labels.outputs):
            assert sum(found == label for found in labs) <= 1, f"{eqn.name}: label {label} twice in one tensor"
        sizes = [x.shape[d] for x, labs in zip(operands, labels.inputs, strict=True) for d, found in enumerate(labs) if found == label]
        sizes += [s[d] for s, labs in zip(outs, labels.outputs, strict=True) for d, found in enumerate(labs) if found == label]
        common = math.gcd(*sizes)
        parts = next((n for n in range(2, common + 1) if common % n == 0), 1)
        if parts == 1 or any(is_key(x) for x in operands):
            continue
        whole = joined(eqn, label, labels, run_on_blocks(eqn, label, labels, operands, outs, parts))
        for found, o in zip(whole, eqn.outputs, strict=True):
            expected = np.asarray(env[o])
            close = dict(rtol=2e-5, atol=2e-5) if expected.dtype.kind in "fc" else dict(rtol=0, atol=0)
            np.testing.assert_allclose(
                found.astype(expected.dtype), expected, **close, err_msg=f"{eqn.name}, label {label} of {labels}, {eqn.params}"
            )
        checked += 1
    return checked


def evaluated(program, args):
    env = {**program.consts, **dict(zip(program.inputs, args, strict=True))}
    for eqn in program.eqns:
        operands = [env[a] if isinstance(a, int) else jnp.asarray(a.val, a.aval.dtype) for a in eqn.inputs]
        out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        env.update(zip(eqn.outputs, out if eqn.primitive.multiple_results else [out], strict=True))
    return env


@pytest.mark.parametrize("name", FUNCTIONS)
def test_blocks_of_every_label_give_the_whole(name):
    make, primitives = FUNCTIONS[name]
    fn, args = make()
    program = flatten(jax.jit(fn).trace(*args).jaxpr)
    assert primitives <= {eqn.name for eqn in program.eqns}
    env = evaluated(program, args)
    checked = sum(check_equation(eqn, program, env) for eqn in program.eqns)
    assert checked or name == "opaque"
