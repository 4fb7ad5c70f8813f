"""The rule table against its meaning: an equation on blocks of its labelled dims gives the blocks of its result.

For every label of every equation of a zoo of small functions: split the labelled
dims of the operands into contiguous blocks, run the primitive on each block, put the results
together (concatenate where the result has the label, reduce where it has not), and compare.
"""

import functools
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from planned import QUICK, Case, rotated

from soapjax.graph.rules import rule_table
from soapjax.graph.rules.rule_table import _RULES, BLOCKED, Labels, labels_of, register
from soapjax.graph.trace.flattening import flatten

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


@covers("ragged_dot_general")
def ragged_dots():
    sizes = jnp.asarray([2, 0, 6], jnp.int32)

    def fn(x, w, c):  # the product, and its two gradients: rows by columns, and a sum of rows for each group
        return lax.ragged_dot(x, w, sizes), *jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)[1](c)

    return fn, (values(8, 4), values(3, 4, 6, seed=1), values(8, 6, seed=2))


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


@covers("reshape", "transpose", "squeeze", "broadcast_in_dim")
def shapes():
    def fn(a):
        merged, split = a.reshape(24, 8), a.reshape(4, 3, 2, 8)
        regrouped, ones = a.reshape(8, 3, 8), a.reshape(1, 4, 1, 48)
        unmatched = a.reshape(3, 64)
        moved = lax.transpose(a, (2, 0, 1))
        wide = lax.broadcast_in_dim(a[:, :1], (4, 5, 6, 8), (0, 2, 3))
        return merged, split, regrouped, ones, unmatched, moved, wide, lax.squeeze(ones, (0, 2)), lax.reshape(a, (8, 24), (2, 1, 0))

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


@covers("device_put")
def moved():
    def fn(a, b):
        return jax.device_put((a, b))

    return fn, (values(4, 6), values(8, seed=1))


@covers("concatenate", "pad", "slice", "rev", "split", "stack", "unstack", "tile")
def pieces():
    def fn(a):
        return (
            jnp.concatenate([a, 2 * a[:, :2]], 1), jnp.pad(a, ((0, 0), (1, 2), (0, 0))),
            lax.pad(a, 0.0, ((0, 0, 0), (0, 0, 1), (0, 0, 0))),
            lax.pad(a, 0.0, ((0, 0, 0), (-1, 0, 0), (0, 0, 0))), a[:, 1:5], a[:, ::2], a[1:3, :, ::-1], jnp.flip(a, (0, 2)),
            jnp.split(a, 2, 1), lax.split(a, (2, 6), 2),
            jnp.stack([a, 2 * a], 1), jnp.stack([a, a], -1), jnp.unstack(a), jnp.unstack(a, axis=1), jnp.tile(a, (1, 2, 1)),
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


@covers("scatter-add", "scatter-sub", "scatter", "scatter-mul", "scatter-min", "scatter-max")
def scatters():
    def fn(table, a, i, j, updates):
        at = table.at[i]
        gradient = jax.grad(lambda a: jnp.sum(jnp.take_along_axis(a, j, 1) ** 2))(a)
        cuts = at.set(1.5), at.multiply(updates), at.min(updates), at.max(updates), at.apply(jnp.sin)
        return at.add(updates), at.subtract(updates), cuts, gradient, a.at[:, i[:, 0]].add(2.0)

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


@covers(
    "select_n", "clamp", "optimization_barrier", "convert_element_type", "bitcast_convert_type", "add", "exp", "atan2", "erf_inv"
)
def elementwise():
    def fn(a, b):
        bits = lax.bitcast_convert_type(a, jnp.int32)
        narrow, wide = lax.bitcast_convert_type(a, jnp.int16), lax.bitcast_convert_type(jnp.ones((4, 6, 2), jnp.int16), jnp.int32)
        return (
            jnp.where(a > b, a, b), lax.clamp(-0.1, a, 0.2), lax.clamp(b, a, b + 0.1), lax.optimization_barrier((a, b)),
            lax.erf_inv(a),
            a + b, jnp.exp(a) * b[:1], jnp.arctan2(a, b), a.astype(jnp.bfloat16), bits, narrow, wide, lax.select(a[0, 0] > 0, a, b),
        )  # fmt: skip

    return fn, (values(4, 6), values(4, 6, seed=1))


@covers("while", "cond")
def control():
    def fn(a, b, w, n):
        def go(carry):  # every row for as long as it is short
            x, count = carry
            return jnp.tanh(x @ w) * 1.5 + x, count + 1

        def vmapped(x):
            return lax.while_loop(lambda c: (jnp.abs(c[0]).sum() < 30) & (c[1] < 9), go, (x, 0))

        nested = lax.while_loop(
            lambda c: c[1] < n, lambda c: (lax.cond(c[1] > 1, lambda x: x * 2 + b, lambda x: x - 1, c[0]), c[1] + 1), (a, 0)
        )
        longest = lax.while_loop(lambda x: x.sum() < 200, lambda x: x * x / x.max() + 1, jnp.abs(a))  # sums of all: numbers
        counted = lax.while_loop(lambda c: c[1] < n, lambda c: (c[0] + a.sum(0), c[1] + 1), (b[0], 0))  # a sum: in one piece
        return jax.vmap(vmapped)(a), nested, longest, counted, lax.cond(n > 3, lambda x, y: x + y, lambda x, y: x * 2, a, b)

    return fn, (values(4, 6), values(4, 6, seed=1), values(6, 6, seed=2) / 4, jnp.int32(4))


@covers("random_bits", "random_wrap", "random_unwrap", "random_fold_in", "random_split", "random_clone", "random_seed")
def keys():
    def fn(a, raw, seeds):
        each = jax.random.wrap_key_data(raw)
        folded = jax.vmap(jax.random.fold_in)(jax.random.clone(each), jnp.arange(4))
        drawn = jax.vmap(lambda key: jax.random.uniform(key, (6,)))(jax.vmap(jax.random.split)(folded)[:, 1])
        split = jax.vmap(lambda key: jax.random.normal(key, (6,)))(jax.random.split(jax.random.key(3), 4))
        seeded = jax.vmap(lambda s: jax.random.bits(jax.random.key(s), (6,)))(seeds)
        return jnp.where(drawn > 0.5, a, 0) + split, seeded, jax.random.key_data(folded)

    return fn, (values(4, 6), jax.random.key_data(jax.random.split(jax.random.key(0), 4)), jnp.arange(4, dtype=jnp.int32))


@covers(
    "cholesky", "cholesky_update", "lu", "lu_pivots_to_permutation", "triangular_solve", "tridiagonal_solve", "tridiagonal",
    "qr", "householder_product", "eigh", "eig", "svd", "hessenberg", "schur",
)  # fmt: skip
def decompositions():
    def fn(a, b, m):
        spd = a @ a.mT + 6 * jnp.eye(6)
        lower = lax.linalg.cholesky(spd)
        band = jnp.ones((4, 6)) * jnp.arange(1.0, 7.0)
        return (
            lower, lax.linalg.triangular_solve(lower, b, left_side=True, lower=True), jnp.linalg.solve(spd, b),
            jnp.abs(jnp.linalg.qr(m)[1]), jnp.linalg.eigvalsh(spd), jnp.linalg.svd(m, compute_uv=False),
            lax.linalg.tridiagonal_solve(band, 4 * band, band, b), jnp.abs(lax.linalg.hessenberg(a)[1]),
            jnp.abs(lax.linalg.schur(spd)[0]), lax.linalg.cholesky_update(lower[0].mT, b[0, :, 0]),
            lax.linalg.lu_pivots_to_permutation(lax.linalg.lu(spd)[1], 6), lax.linalg.tridiagonal(spd)[1],
            lax.linalg.householder_product(a / 4, b[:, :, 0] / 4), jnp.abs(jnp.linalg.eigvals(a)).sum(1),
        )  # fmt: skip

    return fn, (values(4, 6, 6), values(4, 6, 3, seed=1), values(4, 8, 6, seed=2))


@covers("iota", "rng_uniform", "rng_bit_generator", "empty")
def opaque():
    """Nothing of these has a labelled operand."""

    def fn(a, raw):
        a = a + jnp.arange(6.0) + lax.rng_uniform(0.0, 1.0, a.shape) + lax.empty(a.shape, a.dtype) * 0
        return a, lax.rng_bit_generator(jnp.concatenate([raw, raw]), (4, 6), algorithm=lax.RandomAlgorithm.RNG_THREE_FRY)

    return fn, (values(4, 6), jnp.arange(2, dtype=jnp.uint32))


# Combines the results of the blocks of a label that the result lacks.
COMBINE = {
    "reduce_max": jnp.maximum,
    "reduce_min": jnp.minimum,
    "reduce_prod": jnp.multiply,
    "reduce_and": jnp.logical_and,
    "reduce_or": jnp.logical_or,
    "reduce_xor": jnp.bitwise_xor,
} | dict.fromkeys(
    ["dot_general", "ragged_dot_general", "conv_general_dilated", "reduce_sum", "gather", "scatter-add", "scatter-sub"], jnp.add
)


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


def masked_gather(eqn, operands, full_rows, part, parts):
    """Rows of this block where the index points into it, zero elsewhere: what the partitioner makes of a split table."""
    table, index = operands
    start, size = part * full_rows // parts, full_rows // parts
    inside = (index[..., 0] >= start) & (index[..., 0] < start + size)
    p = eqn.params
    out = eqn.primitive.bind(table, jnp.clip(index - start, 0, size - 1), **p)
    dn = p["dimension_numbers"]
    shape = [n if d not in dn.offset_dims else 1 for d, n in enumerate(out.shape)]
    return jnp.where(inside.reshape(shape), out, 0)


def in_own_rows(eqn, operands, dim, full_rows, part, parts):
    """Operands of a scatter into one block of rows: what belongs to others points out of bounds."""
    numbers = eqn.params["dimension_numbers"]
    column = numbers.scatter_dims_to_operand_dims.index(dim)
    start = part * full_rows // parts
    return [operands[0], operands[1].at[..., column].add(-start), operands[2]]


def own_groups(sizes, part, parts):
    """How many rows of a block of all rows are of each group."""
    group = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=8)
    return jnp.bincount(jnp.split(group, parts)[part], length=len(sizes)).astype(sizes.dtype)


def run_on_blocks(eqn, label, labels, operands, outs, parts):
    results = []
    for part in range(parts):
        mine = [block(x, labs, label, part, parts) for x, labs in zip(operands, labels.inputs, strict=True)]
        shapes = [tuple(n // parts if found == label else n for n, found in zip(o, labs, strict=True))
                  for o, labs in zip(outs, labels.outputs, strict=True)]  # fmt: skip
        is_reduced = all(label not in labs for labs in labels.outputs)
        if eqn.name == "gather" and label in labels.inputs[0] and is_reduced:
            rows = operands[0].shape[labels.inputs[0].index(label)]
            results.append([masked_gather(eqn, mine, rows, part, parts)])
            continue
        if eqn.name in ("scatter-add", "scatter-sub") and is_reduced and part > 0:
            mine[0] = jnp.zeros_like(mine[0])  # the operand counts once
        if eqn.name == "ragged_dot_general" and label == labels.inputs[0][0]:
            mine[2] = own_groups(operands[2], part, parts)
        params = local_params(eqn, label, labels, parts, [x.shape for x in mine], shapes)
        if eqn.name in ("scatter-add", "scatter-sub") and label in eqn.params["dimension_numbers"].inserted_window_dims:
            mine = in_own_rows(eqn, mine, label, operands[0].shape[label], part, parts)
            params["mode"] = lax.GatherScatterMode.FILL_OR_DROP
        out = eqn.primitive.bind(*mine, **eqn.primitive.get_bind_params(params))
        out = list(out) if eqn.primitive.multiple_results else [out]
        assert [x.shape for x in out] == shapes, f"{eqn.name}: blocks of another shape"
        results.append(out)
    return results


def compared(eqn, label, labels, results, expected):
    """Pairs of arrays that must be equal: the results of the blocks put together, and the whole ones."""
    pairs = []
    for k, labs in enumerate(labels.outputs):
        pieces = [r[k] for r in results]
        if label in labs:
            pairs.append((jnp.concatenate(pieces, labs.index(label)), expected[k]))
        elif any(label in found for found in labels.outputs):  # only another result depends on it
            pairs += [(piece, expected[k]) for piece in pieces]
        else:
            pairs.append((functools.reduce(COMBINE[eqn.name], pieces), expected[k]))
    return pairs


def check_equation(eqn, program, env):
    """(what, pairs) for every label of one equation but those of windows."""
    labels = labels_of(eqn, program)
    operands = [env[a] if isinstance(a, int) else jnp.asarray(a.val, a.aval.dtype) for a in eqn.inputs]
    outs = [env[o].shape for o in eqn.outputs]
    checks = []
    for label in sorted({lab for labs in labels.inputs for lab in labs} - {BLOCKED} - set(labels.spatial)):
        for labs in (*labels.inputs, *labels.outputs):
            assert sum(found == label for found in labs) <= 1, f"{eqn.name}: label {label} twice in one tensor"
        shaped = [*zip((x.shape for x in operands), labels.inputs, strict=True), *zip(outs, labels.outputs, strict=True)]
        common = math.gcd(*(n for shape, labs in shaped for n, found in zip(shape, labs, strict=True) if found == label))
        parts = next((n for n in range(2, common + 1) if common % n == 0), 1)
        # Keys do not go through NumPy; bodies are for whole shapes, and may need numbers of all blocks: the executor shows them.
        has_keys = any(is_key(x) for x in (*operands, *(env[o] for o in eqn.outputs)))
        if parts > 1 and not has_keys and eqn.name not in ("while", "cond"):
            results = run_on_blocks(eqn, label, labels, operands, outs, parts)
            what = f"{eqn.name}, label {label} of {labels}, {eqn.params}"
            checks.append((what, compared(eqn, label, labels, results, [env[o] for o in eqn.outputs])))
    return checks


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
    names = []

    def run(*args):  # one compilation for all
        env = evaluated(program, args)
        checks = [check for eqn in program.eqns for check in check_equation(eqn, program, env)]
        names.extend(what for what, _ in checks)
        return [pairs for _, pairs in checks]

    checks = jax.jit(run, compiler_options=QUICK)(*args)
    for what, pairs in zip(names, checks, strict=True):
        for found, expected in pairs:
            found, expected = np.asarray(found), np.asarray(expected)
            assert found.dtype == expected.dtype
            is_exact = found.dtype.kind not in "fc"
            found, expected = (x.astype(np.float32) if str(x.dtype) == "bfloat16" else x for x in (found, expected))
            tolerance = 0 if is_exact else 2e-5 * max(1, np.abs(expected).max())
            np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance, err_msg=what)
    assert checks or name in ("opaque", "control")


# Primitives of the table that no function here can reach.
UNREACHED = {
    "empty2": "the traceable form of empty, for internal use",
    "platform_index": "the branch of platform_dependent, a number",
    "approx_top_k": "top_k's rule under another name; runs on TPU",
    "sharding_constraint": "needs a mesh: see the executor's tests",
    "shard_map": "needs a mesh: see the tests of the space",
    "geqrf": "what qr is made of in its lowering",
    "geqp3": "the same",
    "reshard": "what the gradient of a sharding constraint is: see the executor's tests",
}


def test_every_rule_is_in_the_zoo():
    covered = set().union(*(primitives for _, primitives in FUNCTIONS.values()))
    elementwise = {name for name, rule in _RULES.items() if rule is _RULES["add"]}
    assert _RULES.keys() - covered - elementwise == UNREACHED.keys()
    assert covered <= _RULES.keys()


@st.composite
def regrouped_shapes(draw):
    """Two shapes with the same number of elements: products of runs of the same primes, in the same order."""
    primes = draw(st.lists(st.sampled_from([1, 2, 2, 3]), min_size=1, max_size=6))

    def grouped():
        cuts = draw(st.lists(st.booleans(), min_size=len(primes), max_size=len(primes)))
        shape = [1]
        for n, cut in zip(primes, cuts, strict=True):
            shape = [*shape, n] if cut else [*shape[:-1], shape[-1] * n]
        return tuple(shape)

    return grouped(), grouped()


class FakeReshape:
    """As much of an equation and its program as the rule looks at: no compiling, so that many shapes can be tried."""

    name = "reshape"

    def __init__(self, a, b):
        self.inputs, self.outputs = ("a",), ("b",)
        self.params = {"new_sizes": b, "dimensions": None}
        self.shapes = {"a": a, "b": b}

    def aval(self, atom):
        return jax.ShapeDtypeStruct(self.shapes[atom], jnp.float32)


@settings(max_examples=300)
@given(regrouped_shapes())
def test_blocks_of_any_reshape(shapes):
    a, b = shapes
    eqn = FakeReshape(a, b)
    (source,), (target,) = labels_of(eqn, eqn)[:2]
    x = np.arange(math.prod(a)).reshape(a)
    whole = x.reshape(b)
    for label in set(source) - {BLOCKED}:
        i, j = source.index(label), target.index(label)
        common = math.gcd(a[i], b[j])
        for parts in (n for n in range(2, common + 1) if common % n == 0):
            pieces = zip(np.split(x, parts, i), np.split(whole, parts, j), strict=True)
            for piece, expected in pieces:
                np.testing.assert_array_equal(piece.reshape(expected.shape), expected)
    if a == b:
        assert source == target and BLOCKED not in [lab for lab, n in zip(source, a, strict=True) if n > 1]


@settings(max_examples=200)
@given(regrouped_shapes())
def test_a_reshape_ties_all_that_it_can(shapes):
    """A dim that starts a merged or split group is labelled on both sides; so is the reshape back."""
    a, b = shapes
    eqn, back = FakeReshape(a, b), FakeReshape(b, a)
    (source,), (target,) = labels_of(eqn, eqn)[:2]
    assert labels_of(back, back)[:2] == ((target,), (source,))
    first = [next((lab for lab, n in zip(labs, s, strict=True) if n > 1), None) for labs, s in ((source, a), (target, b))]
    assert first[0] == first[1] != BLOCKED


def test_an_unknown_primitive_is_replicated_with_one_warning(caplog):
    def fn(a):
        return tuple(jax.pure_callback(np.sin, a, x) for x in (a, a + 1))

    program = flatten(jax.jit(fn).trace(jnp.eye(4)).jaxpr)
    unknown = [eqn for eqn in program.eqns if eqn.name == "pure_callback"]
    with caplog.at_level(logging.WARNING, logger="soapjax"):
        for eqn in unknown:
            assert labels_of(eqn, program)[:2] == (((BLOCKED, BLOCKED),), ((BLOCKED, BLOCKED),))
    assert len(unknown) == 2 and sum("pure_callback" in r.message for r in caplog.records) == 1


def test_a_registered_rule_is_used(monkeypatch):
    monkeypatch.setattr(rule_table, "_RULES", dict(_RULES))

    @register("pure_callback")
    def by_row(eqn, ins, outs):
        return Labels(((0, BLOCKED),), ((0, BLOCKED),))

    program = flatten(jax.jit(lambda a: jax.pure_callback(np.sin, a, a)).trace(jnp.ones((3, 4))).jaxpr)
    eqn = next(e for e in program.eqns if e.name == "pure_callback")
    assert labels_of(eqn, program).outputs == ((0, BLOCKED),)


def test_what_a_loop_keeps_apart_has_labels():
    fn, args = control()
    program = flatten(jax.jit(fn).trace(*args).jaxpr)
    outputs = [labels_of(eqn, program).outputs for eqn in program.eqns if eqn.name in ("while", "cond")]
    kept = [[[lab != BLOCKED for lab in labs] for labs in found if labs] for found in outputs]
    assert kept[0] == kept[1] == kept[4] == [[True, True]]
    assert kept[2] == [[True]]  # columns; the rows that are summed up stay in one piece
    assert kept[3] == [[True, False], [True]]  # rows, each with a count of its own; columns meet in a product
    read = [eqn for eqn in program.eqns if eqn.name == "while"][2]
    inner = [labs for labs, a in zip(labels_of(read, program).inputs, read.inputs, strict=True) if program.aval(a).ndim == 2]
    assert [lab == BLOCKED for labs in inner for lab in labs] == [True, False]


def test_another_librarys_primitive_is_looked_into():
    marked = jax.extend.core.Primitive("marked")
    marked.def_impl(lambda x: jnp.sin(x) * 2)
    marked.def_abstract_eval(lambda x: x)
    numbers = jax.extend.core.Primitive("numbers")
    numbers.def_impl(lambda x: np.sin(np.asarray(x)))
    numbers.def_abstract_eval(lambda x: x)
    closed = jax.make_jaxpr(lambda x: numbers.bind(marked.bind(x)))(jnp.ones(4))
    assert [e.name for e in flatten(closed, has_rule=lambda name: False).eqns] == ["sin", "mul", "numbers"]
    assert [e.name for e in flatten(closed).eqns] == ["marked", "numbers"]


def together(names):
    """All these zoo functions as one step."""
    made = [FUNCTIONS[name][0]() for name in names]
    return (lambda *args: [fn(*a) for (fn, _), a in zip(made, args, strict=True)]), tuple(args for _, args in made)


CONV_NAMES = [name for name in FUNCTIONS if name.startswith("conv_")]
EXECUTED = {
    "windows": [
        n for n in CONV_NAMES if n in ("conv_plain", "conv_strided", "conv_dilated", "conv_even_kernel", "conv_transposed")
    ],
    "groups": [n for n in CONV_NAMES if "group" in n or "depthwise" in n],
    "other": ["dots", "shapes", "pieces", "gathers", "scatters"],
    "bodies": ["control", "keys", "decompositions"],
}


@pytest.mark.parametrize("name", EXECUTED)
def test_the_executor_splits_every_dim(name):
    """Spatial dims, which blocks alone cannot show, and several axes at once."""
    fn, args = together(EXECUTED[name])
    case = Case(fn, args)
    for start in range(0, max(len(op.dims) for op in case.graph.operators), 3):  # three axes move on together
        case.check(rotated(case.space, start))


def test_values_that_are_moved_together_keep_dims_of_their_own():
    fn, arguments = FUNCTIONS["moved"][0]()
    program = flatten(jax.jit(fn).trace(*arguments).jaxpr)
    (eqn,) = program.eqns
    assert eqn.name == "device_put" and labels_of(eqn, program).inputs == labels_of(eqn, program).outputs == ((0, 1), (2,))
