"""From configs to layouts: of accesses, of stored parameters, and the home of every tensor.

Pure functions of arrays, for a whole graph (evaluate.py) and for what one operator decides (change.py).
A layout is int8 [..., A]; A mesh axes of `sizes`.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.costs.tensor_tables import FROM_FIXED, FROM_READER
from soapjax.strategy.layout import PARTIAL, PINNED, REPLICATED
from soapjax.strategy.space import NOT_FIXED
from soapjax.strategy.strategy import FIRST_PIN

AXES_PER_WORD = 5  # 6 bits each


def value_index(axes: Array) -> Array:
    """Column of tables that are indexed by config value + 1; a pin replicates within its sub-mesh."""
    return jnp.maximum(axes, REPLICATED).astype(jnp.int32) + 1


def with_pins(layout: Array, axes: Array) -> Array:
    """`layout` where an axis is not pinned."""
    return jnp.where(axes <= FIRST_PIN, axes + jnp.int8(PINNED - FIRST_PIN), layout).astype(jnp.int8)


def words_of(layout: Array) -> list[Array]:
    """Layouts [..., A] as a few integers int32 [...] of less than 2^30 each, to be compared at once."""
    words = []
    for first in range(0, layout.shape[-1], AXES_PER_WORD):
        word = jnp.zeros(layout.shape[:-1], jnp.int32)
        for a in range(first, min(first + AXES_PER_WORD, layout.shape[-1])):
            word = word * 64 + (layout[..., a].astype(jnp.int32) + 40)
        words.append(word)
    return words


def split_of(mask: Array, sizes: np.ndarray) -> Array:
    """Into how many parts the axes in `mask` [..., A] split something, float32 [...]."""
    return jnp.prod(jnp.where(mask, jnp.asarray(sizes, jnp.float32), jnp.float32(1)), axis=-1)


def storage_layouts(as_used: Array, masks: Array, dim: Array, dim_size: Array, fixed: Array, sizes: np.ndarray) -> Array:
    """[P, A]: parameters as their owners read them, and over the axes in `masks` that the owners leave free."""
    as_used = jnp.where(as_used == PARTIAL, jnp.int8(REPLICATED), as_used)
    extra = masks & (as_used == REPLICATED)
    split = jnp.prod(jnp.where((as_used == dim[:, None]) | extra, sizes, 1), axis=1)
    fits = dim_size % split == 0
    stored = jnp.where(extra & fits[:, None], dim[:, None], as_used).astype(jnp.int8)
    return jnp.where(fixed != NOT_FIXED, fixed, stored).astype(jnp.int8)


def gradient_layouts(stored: Array, shift: Array) -> Array:
    """Of gradients stored like their parameters; `shift` leading (loop) dims are missing."""
    return jnp.where(stored >= 0, stored - shift[:, None], stored).astype(jnp.int8)


def home_layouts(
    made: Array, reader: Array, source: Array, fixed: Array, shape: Array, sizes: np.ndarray
) -> tuple[Array, Array]:
    """(raw, home) [T, A]: tensors as they are made, PARTIAL included, and as they are kept.

    A partial sum is scattered where the first reader wants it split, if that divides; else summed everywhere.
    """
    raw = jnp.where(source[:, None] == FROM_FIXED, fixed, made)
    raw = jnp.where((source[:, None] == FROM_READER) & (raw == PARTIAL), jnp.int8(REPLICATED), raw)
    # A later axis that already splits that dim would be the major one after the scatter: blocks out of mesh order.
    out_of_order = jnp.stack(
        [(raw[:, a + 1 :] == reader[:, a : a + 1]).any(axis=1) for a in range(len(sizes))], axis=1
    )  # fmt: skip
    scattered = jnp.where((raw == PARTIAL) & (reader >= 0) & ~out_of_order, reader, raw)
    fits = jnp.ones(raw.shape[0], bool)
    for d in range(shape.shape[1]):
        split = jnp.prod(jnp.where(scattered == d, sizes, 1), axis=1)
        fits &= shape[:, d] % split == 0
    home = jnp.where(fits[:, None], scattered, raw)
    return raw.astype(jnp.int8), jnp.where(home == PARTIAL, jnp.int8(REPLICATED), home).astype(jnp.int8)


def summed_layouts(raw: Array, home: Array, common: Array, is_summand: Array, is_joint: Array) -> tuple[Array, Array]:
    """(home, target) [T, A] where summands are kept in a `common` layout, partial sums included.

    Those of a gradient always; a product of a joint sum where it is a partial sum in that layout as it is made.
    `target` is what resolving a tensor costs the way to: a partial sum made of a whole value is a mask, free.
    """
    waits = ((raw == common) & (raw == PARTIAL).any(-1, keepdims=True)).all(-1)
    is_summand = is_summand & (waits | ~is_joint)
    target = jnp.where(raw == PARTIAL, home, raw)
    masked = jnp.where((common == PARTIAL) & (raw != PARTIAL), jnp.int8(REPLICATED), common)
    summand = is_summand[:, None]
    return jnp.where(summand, common, home).astype(jnp.int8), jnp.where(summand, masked, target).astype(jnp.int8)


def as_read(home: Array, wanted: Array) -> Array:
    """What tensors kept as `home` are converted to for a reader, layouts [E, A].

    A loop carries its sums resolved, and what is still a partial sum is summed up with the last product of its sum.
    """
    return jnp.where((wanted == PARTIAL) | (home == PARTIAL).any(-1, keepdims=True), home, wanted)


def is_held_split(raw: Array, home: Array) -> Array:
    """bool [T, A]: which axes split what is alive of a tensor.

    Where nothing is sent, slices of what each device has whole are cut out by the tensor's readers.
    """
    is_sliced = (raw == REPLICATED) & (home >= 0)
    return (home >= 0) & ~(is_sliced & ~is_sent(raw, home)[..., None])


def is_sent(home: Array, target: Array) -> Array:
    """bool [E]: conversions that make a copy of their own; slices of a whole value are cut out of it, sums of it are a mask."""
    return ((home != target) & (home != REPLICATED)).any(-1)


def needed_until(since: Array, sent: Array, made_at: Array, read_at: Array) -> Array:
    """int32 [E]: until when a conversion needs the tensor itself; -1 where an earlier reader has made its copy."""
    xp = np if isinstance(sent, np.ndarray) else jnp
    return xp.where(sent, xp.where(since > 0, -1, made_at), read_at)


def held_until(needed: Array, edge_tensor: Array, at_least: Array, until: Array) -> Array:
    """int32 [T]: until when tensors are kept, by what all conversions need [E]."""
    if isinstance(needed, np.ndarray):
        last = np.full(len(until), -1, np.int32)
        np.maximum.at(last, edge_tensor, needed)
        return np.clip(last, at_least, until)
    last = jnp.full(len(until), -1, jnp.int32).at[edge_tensor].max(
        needed, mode="promise_in_bounds", wrap_negative_indices=False
    )  # fmt: skip
    return jnp.clip(last, at_least, until)


def passing_bytes(
    raw: Array, resolved: Array, local_bytes: Array, is_product: Array, sizes: np.ndarray, *, in_place: bool
) -> Array:
    """Bytes [T] beside a tensor of `local_bytes` while it is made and its partial sums are summed up.

    `is_product`: made by a dot. An all-reduce works `in_place` where the backend says so; a reduce-scatter reads the whole of
    what it makes a part of, one axis after the other: the first one's result is the largest.
    """
    summed = (raw == PARTIAL) & (resolved != PARTIAL)
    scattered = summed & (resolved >= 0)
    if in_place:
        # Along another dim than the first a product is laid out anew, whole, to be scattered.
        is_leading = jnp.where(scattered, resolved, jnp.int8(127)).min(-1) == 0
        first = jnp.where(is_product & ~is_leading, 1.0, _first_part(scattered, sizes))
        beside = jnp.where(scattered.any(-1), 1 + first - 1 / split_of(scattered, sizes), 0.0)
    else:
        beside = summed.any(-1)
    return beside * local_bytes


def _first_part(scattered: Array, sizes: np.ndarray) -> Array:
    """The share [T] of a tensor that the first of several reduce-scatters leaves."""
    return 1 / jnp.asarray(sizes, jnp.float32)[jnp.argmax(scattered, -1)]


def waiting_bytes(raw: Array, resolved: Array, local_bytes: Array, waits: Array, combine_bytes: float, sizes: np.ndarray) -> Array:
    """Bytes [T, 2] of gradients that wait to be summed together, by all-reduces and by reduce-scatters: operands and results.

    Only what the compiler merges waits: results of up to `combine_bytes`. Scatters go one axis after the other.
    """
    summed = (raw == PARTIAL) & (resolved != PARTIAL)
    scattered = summed & (resolved >= 0)
    result = local_bytes * jnp.where(scattered.any(-1), _first_part(scattered, sizes), 1)
    both = jnp.where(waits & summed.any(-1) & (result <= combine_bytes), local_bytes + result, 0.0)
    return jnp.stack([jnp.where(scattered.any(-1), 0.0, both), jnp.where(scattered.any(-1), both, 0.0)], -1)


def waiting_spans(waiting: Array, birth: Array, operand_share: Array, merged_at: Array | int) -> list[tuple[Array, Array]]:
    """What waits [n, ..., 2], and from which task on [n]: operands since they are made, results behind the last of all."""
    return [(waiting * operand_share, birth + 1), (waiting * (1 - operand_share), merged_at + 0 * birth)]


def holders(layout: Array, coordinates: np.ndarray) -> Array:
    """bool [..., G]: the device groups with `coordinates` [G, A] that hold a tensor of this layout."""
    pin = PINNED - layout[..., None, :]
    return ((layout[..., None, :] > PINNED) | (pin == jnp.asarray(coordinates, jnp.int8))).all(axis=-1)
