"""How the dims of an equation's operands and results relate: one short rule per primitive.

A rule gives every dim of every operand and result a label, as in einsum
notation. Dims with equal labels are split together; a label that operands have
and results lack is *reduced* (splitting it makes the result a partial sum, or
partial maximum); BLOCKED dims are never split.

>>> labels_of(eqn of dot_general [b,m,k] x [b,k,n])
Labels(inputs=((0, 1, 3), (0, 3, 2)), outputs=((0, 1, 2),), ...)

An unknown primitive is replicated (all BLOCKED) with one warning that names it;
`register` adds a rule.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import jax

from soapjax.graph.program import FlatEqn, Program

BLOCKED = -1
log = logging.getLogger("soapjax")


class Labels(NamedTuple):
    """Labels of each operand's and each result's dims.

    `spatial` maps the labels whose neighbours are read across the border of a shard (windows) to the largest degree at
    which a shard still holds a window: they cost a halo exchange, and convolutions need manual axes.
    """

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    spatial: dict[int, int] = {}  # noqa: RUF012 - never written to


Rule = Callable[[FlatEqn, list[tuple[int, ...]], list[tuple[int, ...]]], Labels]
_RULES: dict[str, Rule] = {}
_warned: set[str] = set()


def register(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule `(eqn, input shapes, output shapes) -> Labels` for the named primitives."""

    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


def labels_of(eqn: FlatEqn, program: Program) -> Labels:
    """The labels of one equation; dims of size 1 are BLOCKED (nothing to split)."""
    ins = [tuple(program.aval(a).shape) for a in eqn.inputs]
    outs = [tuple(program.aval(a).shape) for a in eqn.outputs]
    rule = _RULES.get(eqn.name)
    if rule is None:
        if eqn.name not in _warned:
            _warned.add(eqn.name)
            log.warning(
                "no dimension rule for primitive %r: it is replicated on every device (add one with soapjax.graph.rules.register)",
                eqn.name,
            )
        return replicated(ins, outs)
    found = rule(eqn, ins, outs)

    def clean(labels: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(BLOCKED if n <= 1 else lab for lab, n in zip(labels, shape, strict=True))

    return Labels(tuple(map(clean, found.inputs, ins)), tuple(map(clean, found.outputs, outs)), found.spatial)


def replicated(ins: list[tuple[int, ...]], outs: list[tuple[int, ...]]) -> Labels:
    """Nothing can be split."""
    return Labels(tuple((BLOCKED,) * len(s) for s in ins), tuple((BLOCKED,) * len(s) for s in outs))


def is_known(name: str) -> bool:
    return name in _RULES


_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp complex conj
convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac
imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not optimization_barrier or
polygamma population_count pow random_gamma real reduce_precision regularized_incomplete_beta rem round rsqrt
select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh
threefry2x32 xor name zeta clz erf_inv mulhi pvary
"""


@register(*_ELEMENTWISE.split())
def _elementwise(eqn: FlatEqn, ins, outs) -> Labels:
    if eqn.name == "optimization_barrier":
        start, inputs = 0, []
        for s in ins:
            inputs.append(tuple(range(start, start + len(s))))
            start += len(s)
        return Labels(tuple(inputs), tuple(inputs))
    rank = max((len(s) for s in outs), default=0)
    # Scalars mix with any shape; a dim of size 1 is broadcast (cleaned to BLOCKED by the caller).
    inputs = tuple(tuple(range(rank)) if len(s) == rank else (BLOCKED,) * len(s) for s in ins)
    return Labels(inputs, tuple(tuple(range(len(s))) for s in outs))


@register("bitcast_convert_type")
def _bitcast(eqn: FlatEqn, ins, outs) -> Labels:
    rank = min(len(ins[0]), len(outs[0]))
    return Labels(
        (tuple(range(rank)) + (BLOCKED,) * (len(ins[0]) - rank),), (tuple(range(rank)) + (BLOCKED,) * (len(outs[0]) - rank),)
    )


@register("broadcast_in_dim")
def _broadcast_in_dim(eqn: FlatEqn, ins, outs) -> Labels:
    dims = eqn.params["broadcast_dimensions"]
    inputs = tuple(d if ins[0][i] == outs[0][d] else BLOCKED for i, d in enumerate(dims))
    return Labels((inputs, *((BLOCKED,) * len(s) for s in ins[1:])), (tuple(range(len(outs[0]))),))


@register("iota", "rng_uniform", "random_bits", "empty", "empty2")
def _generated(eqn: FlatEqn, ins, outs) -> Labels:
    # Bits of a counter-based generator do not depend on the sharding (jax_threefry_partitionable).
    per_key = len(ins[0]) if ins and eqn.name == "random_bits" else 0
    out = tuple(BLOCKED if i < per_key else i for i in range(len(outs[0])))
    return Labels(tuple((BLOCKED,) * len(s) for s in ins), (out,))


@register("random_wrap", "random_unwrap", "random_seed", "random_fold_in", "random_split", "random_clone", "rng_bit_generator")
def _keys(eqn: FlatEqn, ins, outs) -> Labels:
    return replicated(ins, outs)


@register("transpose")
def _transpose(eqn: FlatEqn, ins, outs) -> Labels:
    return Labels((tuple(range(len(ins[0]))),), (tuple(eqn.params["permutation"]),))


@register("squeeze")
def _squeeze(eqn: FlatEqn, ins, outs) -> Labels:
    gone = set(eqn.params["dimensions"])
    return Labels((tuple(range(len(ins[0]))),), (tuple(i for i in range(len(ins[0])) if i not in gone),))


@register("reshape")
def _reshape(eqn: FlatEqn, ins, outs) -> Labels:
    """Merged or split dims are tied by their major factor: blocks of it stay blocks."""
    order = eqn.params.get("dimensions") or range(len(ins[0]))  # a transpose first
    a, b = tuple(ins[0][d] for d in order), outs[0]
    la, lb = [BLOCKED] * len(a), [BLOCKED] * len(b)
    i = j = 0
    label = 0
    while i < len(a) and j < len(b):
        si, sj = i, j
        size_a, size_b = a[i], b[j]
        while size_a != size_b:
            if size_a < size_b:
                i += 1
                size_a *= a[i]
            else:
                j += 1
                size_b *= b[j]
        # Leading ones of either side carry nothing; tie the first real factors.
        ma = next((d for d in range(si, i + 1) if a[d] > 1), None)
        mb = next((d for d in range(sj, j + 1) if b[d] > 1), None)
        if ma is not None and mb is not None:
            la[ma] = lb[mb] = label
            label += 1
        i, j = i + 1, j + 1
    labels = dict(zip(order, la, strict=True))
    first = tuple(labels[d] for d in range(len(a)))
    return Labels((first, *((BLOCKED,) * len(s) for s in ins[1:])), (tuple(lb),))


@register("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor")
def _reduce(eqn: FlatEqn, ins, outs) -> Labels:
    gone = set(eqn.params["axes"])
    return Labels((tuple(range(len(ins[0]))),), (tuple(i for i in range(len(ins[0])) if i not in gone),))


@register("argmax", "argmin")
def _argreduce(eqn: FlatEqn, ins, outs) -> Labels:
    gone = set(eqn.params["axes"])
    inputs = tuple(BLOCKED if i in gone else i for i in range(len(ins[0])))
    return Labels((inputs,), (tuple(i for i in inputs if i != BLOCKED),))


def _tied_except(blocked: set[int], ins, outs) -> Labels:
    def one(s: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(BLOCKED if i in blocked else i for i in range(len(s)))

    return Labels(tuple(map(one, ins)), tuple(map(one, outs)))


@register("concatenate")
def _concatenate(eqn: FlatEqn, ins, outs) -> Labels:
    return _tied_except({eqn.params["dimension"]}, ins, outs)


@register("split")
def _split(eqn: FlatEqn, ins, outs) -> Labels:
    return _tied_except({eqn.params["axis"]}, ins, outs)


@register("stack")
def _stack(eqn: FlatEqn, ins, outs) -> Labels:
    kept = tuple(range(len(ins[0])))
    axis = eqn.params["axis"]
    return Labels(tuple(kept for _ in ins), ((*kept[:axis], BLOCKED, *kept[axis:]),))


@register("unstack")
def _unstack(eqn: FlatEqn, ins, outs) -> Labels:
    kept = tuple(range(len(outs[0])))
    axis = eqn.params["axis"]
    return Labels(((*kept[:axis], BLOCKED, *kept[axis:]),), tuple(kept for _ in outs))


@register("tile")
def _tile(eqn: FlatEqn, ins, outs) -> Labels:
    return _tied_except({i for i, n in enumerate(eqn.params["reps"]) if n != 1}, ins, outs)


@register("rev")
def _rev(eqn: FlatEqn, ins, outs) -> Labels:
    return _tied_except(set(eqn.params["dimensions"]), ins, outs)


@register("sort")
def _sort(eqn: FlatEqn, ins, outs) -> Labels:
    return _tied_except({eqn.params["dimension"]}, ins, outs)


@register("top_k", "approx_top_k")
def _top_k(eqn: FlatEqn, ins, outs) -> Labels:
    rank = len(ins[0])
    axis = eqn.params.get("axis", eqn.params.get("reduction_dimension", rank - 1)) % rank
    return _tied_except({axis}, ins, outs)


@register("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(eqn: FlatEqn, ins, outs) -> Labels:
    return _tied_except({eqn.params["axis"]}, ins, outs)


@register("fft")
def _fft(eqn: FlatEqn, ins, outs) -> Labels:
    rank = len(ins[0])
    return _tied_except(set(range(rank - len(eqn.params["fft_lengths"]), rank)), ins, outs)


@register("pad")
def _pad(eqn: FlatEqn, ins, outs) -> Labels:
    padded = {i for i, p in enumerate(eqn.params["padding_config"]) if tuple(p) != (0, 0, 0)}
    tied = _tied_except(padded, ins[:1], outs)
    return Labels((*tied.inputs, ()), tied.outputs)


@register("slice")
def _slice(eqn: FlatEqn, ins, outs) -> Labels:
    return _tied_except({i for i, (n, m) in enumerate(zip(ins[0], outs[0], strict=True)) if n != m}, ins, outs)


@register("dynamic_slice")
def _dynamic_slice(eqn: FlatEqn, ins, outs) -> Labels:
    cut = {i for i, (n, m) in enumerate(zip(ins[0], outs[0], strict=True)) if n != m}
    tied = _tied_except(cut, ins[:1], outs)
    return Labels((*tied.inputs, *((),) * (len(ins) - 1)), tied.outputs)


@register("dynamic_update_slice")
def _dynamic_update_slice(eqn: FlatEqn, ins, outs) -> Labels:
    cut = {i for i, (n, m) in enumerate(zip(ins[0], ins[1], strict=True)) if n != m}
    tied = _tied_except(cut, ins[:2], outs)
    return Labels((*tied.inputs, *((),) * (len(ins) - 2)), tied.outputs)


@register("dot_general")
def _dot_general(eqn: FlatEqn, ins, outs) -> Labels:
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    lhs, rhs = [None] * len(ins[0]), [None] * len(ins[1])
    label = 0
    for i, j in zip(lb, rb, strict=True):
        lhs[i] = rhs[j] = label
        label += 1
    for dims in (lhs, rhs):
        contracted = lc if dims is lhs else rc
        for i in range(len(dims)):
            if dims[i] is None and i not in contracted:
                dims[i] = label
                label += 1
    for i, j in zip(lc, rc, strict=True):
        lhs[i] = rhs[j] = label
        label += 1
    return Labels((tuple(lhs), tuple(rhs)), (tuple(range(len(outs[0]))),))


@register("conv_general_dilated")
def _conv(eqn: FlatEqn, ins, outs) -> Labels:
    """Labels: 0 batch, 1 output features, 2 input features (reduced), 3.. spatial.

    Covers the forward convolution and both of its gradients, which are convolutions too: a stride becomes a dilation
    of the image (input gradient) or of the kernel (kernel gradient, where the spatial dims are reduced). A depthwise
    convolution splits its channels, group by group.
    """
    p, dn = eqn.params, eqn.params["dimension_numbers"]
    groups, batch_groups = p["feature_group_count"], p["batch_group_count"]
    lhs, rhs, out = [BLOCKED] * len(ins[0]), [BLOCKED] * len(ins[1]), [BLOCKED] * len(outs[0])
    if batch_groups == 1:
        lhs[dn.lhs_spec[0]] = out[dn.out_spec[0]] = 0
    if groups == 1:
        lhs[dn.lhs_spec[1]] = rhs[dn.rhs_spec[1]] = 2
    if groups == batch_groups == 1:
        rhs[dn.rhs_spec[0]] = out[dn.out_spec[1]] = 1
    elif groups > 1 and groups == ins[0][dn.lhs_spec[1]]:
        lhs[dn.lhs_spec[1]] = rhs[dn.rhs_spec[0]] = out[dn.out_spec[1]] = 1
    elif batch_groups > 1 and batch_groups == ins[0][dn.lhs_spec[0]]:
        lhs[dn.lhs_spec[0]] = rhs[dn.rhs_spec[0]] = out[dn.out_spec[1]] = 1
    spatial: dict[int, int] = {}
    for k, stride in enumerate(p["window_strides"]):
        n, w, m = ins[0][dn.lhs_spec[2 + k]], ins[1][dn.rhs_spec[2 + k]], outs[0][dn.out_spec[2 + k]]
        lhs_dilation, rhs_dilation = p["lhs_dilation"][k], p["rhs_dilation"][k]
        forward = lhs_dilation == rhs_dilation == 1 and w < n == m * stride and m > 1
        input_gradient = rhs_dilation == stride == 1 and w < m == n * lhs_dilation and n > 1
        kernel_gradient = lhs_dilation == stride == 1 and m < n == w * rhs_dilation and w > 1
        if forward or input_gradient:
            lhs[dn.lhs_spec[2 + k]] = out[dn.out_spec[2 + k]] = 3 + k
            spatial[3 + k] = max(1, min(n, m) // w)
        elif kernel_gradient:
            lhs[dn.lhs_spec[2 + k]] = rhs[dn.rhs_spec[2 + k]] = 3 + k
            spatial[3 + k] = max(1, w // m)
    return Labels((tuple(lhs), tuple(rhs)), (tuple(out),), spatial)


@register("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add")
def _reduce_window(eqn: FlatEqn, ins, outs) -> Labels:
    """Batch and channel dims pass through; windowed dims only where windows do not cross the border of a shard."""
    p = eqn.params
    shape, out = ins[0], outs[0]

    def label(i: int) -> int:
        w, s, pad = p["window_dimensions"][i], p["window_strides"][i], tuple(p["padding"][i])
        untouched = w == 1 and s == 1 and pad == (0, 0)
        tiled = w == s and pad == (0, 0) and shape[i] == out[i] * s and out[i] > 1
        dilated = p.get("base_dilation", (1,) * len(shape))[i] != 1 or p.get("window_dilation", (1,) * len(shape))[i] != 1
        return i if (untouched or tiled) and not dilated else BLOCKED

    labels = tuple(label(i) for i in range(len(shape)))
    inputs = tuple(labels if len(s) == len(shape) else (BLOCKED,) * len(s) for s in ins)
    return Labels(inputs, tuple(labels for _ in outs))


@register("select_and_scatter_add")
def _select_and_scatter_add(eqn: FlatEqn, ins, outs) -> Labels:
    p = eqn.params
    source, operand = ins[0], ins[1]

    def label(i: int) -> int:
        w, s, pad = p["window_dimensions"][i], p["window_strides"][i], tuple(p["padding"][i])
        untouched = w == 1 and s == 1 and pad == (0, 0)
        tiled = w == s and pad == (0, 0) and operand[i] == source[i] * s and source[i] > 1
        return i if untouched or tiled else BLOCKED

    labels = tuple(label(i) for i in range(len(operand)))
    return Labels((labels, labels, *((BLOCKED,) * len(s) for s in ins[2:])), (labels,))


@register("gather")
def _gather(eqn: FlatEqn, ins, outs) -> Labels:
    """Labels: output dims by their position; table rows that are indexed are reduced (a masked gather, then a sum)."""
    dn, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    rank = len(outs[0])
    table = [BLOCKED] * len(ins[0])
    index = [BLOCKED] * len(ins[1])
    batching = tuple(getattr(dn, "operand_batching_dims", ()))
    index_batching = tuple(getattr(dn, "start_indices_batching_dims", ()))
    window = [d for d in range(len(ins[0])) if d not in dn.collapsed_slice_dims and d not in batching]
    for out_dim, d in zip(dn.offset_dims, window, strict=True):
        if sizes[d] == ins[0][d]:
            table[d] = out_dim
    batch_dims = [d for d in range(rank) if d not in dn.offset_dims]
    index_dims = list(range(len(ins[1]) - 1))  # the last dim of the indices is the index vector
    for out_dim, d in zip(batch_dims, index_dims, strict=True):
        index[d] = out_dim
    for d, i in zip(batching, index_batching, strict=True):
        table[d] = index[i]
    out = tuple(d if d in batch_dims or d in table else BLOCKED for d in range(rank))
    if len(dn.start_index_map) == 1 and dn.start_index_map[0] in dn.collapsed_slice_dims:
        table[dn.start_index_map[0]] = rank
    return Labels((tuple(table), tuple(index)), (out,))


@register("scatter-add", "scatter-sub", "scatter", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(eqn: FlatEqn, ins, outs) -> Labels:
    """Labels: operand dims by position, then the scattered dims of the updates (reduced, for sums only)."""
    dn = eqn.params["dimension_numbers"]
    operand_shape, update_shape = ins[0], ins[2]
    rank = len(operand_shape)
    operand = [BLOCKED] * rank
    index, update = [BLOCKED] * len(ins[1]), [BLOCKED] * len(update_shape)
    batching = tuple(getattr(dn, "operand_batching_dims", ()))
    index_batching = tuple(getattr(dn, "scatter_indices_batching_dims", ()))
    window = [d for d in range(rank) if d not in dn.inserted_window_dims and d not in batching]
    for u, d in zip(dn.update_window_dims, window, strict=True):
        if update_shape[u] == operand_shape[d]:
            operand[d] = update[u] = d
    scattered = [u for u in range(len(update_shape)) if u not in dn.update_window_dims]
    is_sum = eqn.name in ("scatter-add", "scatter-sub")
    for k, (u, i) in enumerate(zip(scattered, range(len(ins[1]) - 1), strict=True)):
        if i in index_batching:
            d = batching[index_batching.index(i)]
            operand[d] = index[i] = update[u] = d
        elif is_sum:
            index[i] = update[u] = rank + k
    return Labels((tuple(operand), tuple(index), tuple(update)), (tuple(operand),))


@register("sharding_constraint", "reshard")
def _sharding_constraint(eqn: FlatEqn, ins, outs) -> Labels:
    return Labels((tuple(range(len(ins[0]))),), (tuple(range(len(outs[0]))),))


@register("while", "cond")
def _opaque(eqn: FlatEqn, ins, outs) -> Labels:
    return replicated(ins, outs)


def user_spec(eqn: FlatEqn) -> jax.sharding.NamedSharding | None:
    """The sharding of a user's own constraint, None for any other equation."""
    sharding = eqn.params.get("sharding") if eqn.name == "sharding_constraint" else None
    return sharding if isinstance(sharding, jax.sharding.NamedSharding) else None
