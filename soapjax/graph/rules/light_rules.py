"""The rules of equations that carry dims along: elementwise, broadcasts, reshapes, reductions, slices, sorts.

Importing this module registers every rule, those of products, windows and indexing (heavy_rules.py), of linear
algebra (linalg_rules.py) and of `while` and `cond` (control_rules.py) too.
"""

from __future__ import annotations

import itertools

from soapjax.graph.rules import control_rules, heavy_rules, linalg_rules  # noqa: F401 - they register their rules
from soapjax.graph.rules.rule_table import BLOCKED, Labels, MadeOf, is_known, labels_of, register, replicated, user_spec
from soapjax.graph.trace.program import FlatEqn

__all__ = [
    "ALONG", "BLOCKED", "ELEMENTWISE", "LIGHT", "Labels", "MadeOf", "is_known", "labels_of", "register", "replicated",
    "shard_map_axes", "user_spec",
]  # fmt: skip

ELEMENTWISE = frozenset(
    """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp complex conj
convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac
imag integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul ne neg nextafter not one_minus_square
optimization_barrier or polygamma population_count pow random_gamma real reduce_precision regularized_incomplete_beta rem round
rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh
threefry2x32 xor eq_to le_to lt_to name zeta clz mulhi pvary
""".split()
)

# What the compiler computes anew in every reader instead of storing the result.
LIGHT = {
    *ELEMENTWISE, "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "rev", "slice", "pad", "iota",
    "concatenate", "split", "bitcast_convert_type",
}  # fmt: skip


@register(*ELEMENTWISE - {"optimization_barrier"}, by_shapes=True)
def _elementwise(eqn: FlatEqn, ins, outs) -> Labels:
    rank = max((len(s) for s in outs), default=0)
    # Scalars mix with any shape; a dim of size 1 is broadcast (cleaned to BLOCKED by the caller).
    inputs = tuple(tuple(range(rank)) if len(s) == rank else (BLOCKED,) * len(s) for s in ins)
    return Labels(inputs, tuple(tuple(range(len(s))) for s in outs))


@register("optimization_barrier", "device_put", "sharding_constraint", "reshard", by_shapes=True)
def _each(eqn: FlatEqn, ins, outs) -> Labels:
    """Of one value, or of many, each as it was."""
    starts = itertools.accumulate(map(len, ins), initial=0)
    apart = tuple(tuple(range(n, n + len(s))) for n, s in zip(starts, ins, strict=False))
    return Labels(apart, apart)


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


@register("iota", "rng_uniform", "empty", "empty2", "platform_index")
def _generated(eqn: FlatEqn, ins, outs) -> Labels:
    return Labels(tuple((BLOCKED,) * len(s) for s in ins), (tuple(range(len(outs[0]))),))


@register("random_wrap", "random_unwrap", "random_seed", "random_fold_in", "random_split", "random_clone", "random_bits")
def _keys(eqn: FlatEqn, ins, outs) -> Labels:
    """Arrays of keys split as other arrays do. The words of a key stay together.

    What one key makes (bits, more keys) is counted out, position by position (jax_threefry_partitionable): split or not, the
    numbers are the same.
    """
    per_key = min(len(ins[0]), len(outs[0]))
    made = range(len(outs[0])) if eqn.name in ("random_split", "random_bits") else range(per_key)

    def labelled(shape: tuple[int, ...], kept: range) -> tuple[int, ...]:
        return tuple(i if i in kept else BLOCKED for i in range(len(shape)))

    return Labels(tuple(labelled(s, range(per_key)) for s in ins), (labelled(outs[0], made),))


@register("transpose")
def _transpose(eqn: FlatEqn, ins, outs) -> Labels:
    return Labels((tuple(range(len(ins[0]))),), (tuple(eqn.params["permutation"]),))


@register("reshape")
def _reshape(eqn: FlatEqn, ins, outs) -> Labels:
    """Merged or split dims are tied by their major factor: blocks of it stay blocks. The other factors are made of all of it."""
    a, b = ins[0], outs[0]
    la, lb = [BLOCKED] * len(a), [BLOCKED] * len(b)
    if 0 in a:  # nothing in it
        return replicated(ins, outs)
    i = j = 0
    label = 0
    made_of = []
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
            made_of += [MadeOf(0, ma, 0, d) for d in range(mb + 1, j + 1) if i == ma and b[d] > 1]  # [64] -> [4, 16]
            made_of += [MadeOf(0, d, 0, mb) for d in range(ma + 1, i + 1) if j == mb and a[d] > 1]  # [2, 64] -> [128]
        i, j = i + 1, j + 1
    return Labels((tuple(la), *((BLOCKED,) * len(s) for s in ins[1:])), (tuple(lb),), made_of=tuple(made_of))


@register("squeeze", "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor")
def _reduce(eqn: FlatEqn, ins, outs) -> Labels:
    gone = set(eqn.params["dimensions" if eqn.name == "squeeze" else "axes"])
    return Labels((tuple(range(len(ins[0]))),), (tuple(i for i in range(len(ins[0])) if i not in gone),))


@register("argmax", "argmin")
def _argreduce(eqn: FlatEqn, ins, outs) -> Labels:
    gone = set(eqn.params["axes"])
    inputs = tuple(BLOCKED if i in gone else i for i in range(len(ins[0])))
    return Labels((inputs,), (tuple(i for i in inputs if i != BLOCKED),))


def _tied_except(blocked: set[int], ins, outs) -> Labels:
    def one(s: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(BLOCKED if i in blocked else i for i in range(len(s)))

    pairs = [(k, r) for k in range(len(ins)) for r in range(len(outs)) if len(ins[k]) == len(outs[r])]
    made_of = tuple(MadeOf(k, d, r, d) for d in sorted(blocked) for k, r in pairs)
    return Labels(tuple(map(one, ins)), tuple(map(one, outs)), made_of=made_of)


CUMULATIVE = dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), "axis")
# Primitives that put in order, or add up, along dims, and which of their parameters says so.
ALONG = {"sort": "dimension", "rev": "dimensions", **CUMULATIVE}
_WHOLE = {**ALONG, "concatenate": "dimension", "split": "axis"}


@register(*_WHOLE)
def _along(eqn: FlatEqn, ins, outs) -> Labels:
    along = eqn.params[_WHOLE[eqn.name]]
    return _tied_except(set(along) if isinstance(along, tuple) else {along}, ins, outs)


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


@register("top_k", "approx_top_k")
def _top_k(eqn: FlatEqn, ins, outs) -> Labels:
    rank = len(ins[0])
    axis = eqn.params.get("axis", eqn.params.get("reduction_dimension", rank - 1)) % rank
    return _tied_except({axis}, ins, outs)


@register("fft")
def _fft(eqn: FlatEqn, ins, outs) -> Labels:
    rank = len(ins[0])
    return _tied_except(set(range(rank - len(eqn.params["fft_lengths"]), rank)), ins, outs)


@register("pad")
def _pad(eqn: FlatEqn, ins, outs) -> Labels:
    padded = {i for i, p in enumerate(eqn.params["padding_config"]) if tuple(p) != (0, 0, 0)}
    tied = _tied_except(padded, ins[:1], outs)
    return tied._replace(inputs=(*tied.inputs, ()))


@register("slice", "dynamic_slice")
def _slice(eqn: FlatEqn, ins, outs) -> Labels:
    cut = {i for i, (n, m) in enumerate(zip(ins[0], outs[0], strict=True)) if n != m}
    tied = _tied_except(cut, ins[:1], outs)
    return tied._replace(inputs=(*tied.inputs, *((),) * (len(ins) - 1)))


@register("dynamic_update_slice")
def _dynamic_update_slice(eqn: FlatEqn, ins, outs) -> Labels:
    cut = {i for i, (n, m) in enumerate(zip(ins[0], ins[1], strict=True)) if n != m}
    tied = _tied_except(cut, ins[:2], outs)
    return tied._replace(inputs=(*tied.inputs, *((),) * (len(ins) - 2)))


@register("shard_map")
def _shard_map(eqn: FlatEqn, ins, outs) -> Labels:
    """The user's own: dims that its specs split over the same axes are one dim, no other dim is split."""
    numbers: dict[tuple[str, ...], int] = {}

    def labelled(spec, shape: tuple[int, ...]) -> tuple[int, ...]:
        entries = [axes if isinstance(axes, tuple) else (axes,) for axes in (*spec, *(None,) * (len(shape) - len(spec)))]
        return tuple(BLOCKED if None in axes or not axes else numbers.setdefault(axes, len(numbers)) for axes in entries)

    return Labels(tuple(map(labelled, eqn.params["in_specs"], ins)), tuple(map(labelled, eqn.params["out_specs"], outs)))


def shard_map_axes(eqn: FlatEqn) -> list[tuple[str, ...]]:
    """The axes that each label of the user's `shard_map` is split over."""
    found: dict[tuple[str, ...], None] = {}
    for spec in (*eqn.params["in_specs"], *eqn.params["out_specs"]):
        found.update((axes if isinstance(axes, tuple) else (axes,), None) for axes in spec if axes)
    return list(found)


@register("rng_bit_generator")
def _opaque(eqn: FlatEqn, ins, outs) -> Labels:
    return replicated(ins, outs)
