"""What every operator's candidates make of its own layouts and durations, by the cost model itself."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.costs.conversion import Links, conversion_seconds
from soapjax.costs.evaluate import own_costs
from soapjax.costs.tables import CostTables
from soapjax.costs.tensor_tables import FROM_FIXED, FROM_READER
from soapjax.search.candidates import Candidates
from soapjax.simulate.programs import Program
from soapjax.strategy.layout import PARTIAL, REPLICATED

_CHUNKS = (256, 8192)  # conversions per call: two sizes, each compiled once
_BATCH = 64  # strategies per call


def layout_names(layouts: np.ndarray) -> np.ndarray:
    """One int64 per layout: int8 [..., A] -> [...]; A is 15 at most, and so are dims."""
    out = np.zeros(layouts.shape[:-1], np.int64)
    for a in range(layouts.shape[-1]):
        out = out * 16 + (layouts[..., a].astype(np.int64) + 3)
    return out


class OwnRows:
    """Layouts and durations that depend on one operator, by its candidates."""

    def __init__(self, tables: CostTables, candidates: list[Candidates]):
        """Evaluates "every operator takes its k-th candidate" for all k: what depends on one operator is read off."""
        self.tables, self.candidates = tables, candidates
        self.counts = [len(c.storage) for c in candidates]
        most = max(self.counts, default=1)
        axes = np.stack([c.axes[np.arange(most) % len(c.storage)] for c in candidates], axis=1)  # [K, N, A]
        storage = np.stack([c.storage[np.arange(most) % len(c.storage)] for c in candidates], axis=1)
        batch = min(_BATCH, most)
        run = Program(functools.partial(own_costs, tables), is_urgent=True)
        parts = []
        for k in range(0, most, batch):
            at = np.minimum(np.arange(k, k + batch), most - 1)
            found = run(jnp.asarray(axes[at]), jnp.asarray(storage[at]))
            parts.append([np.asarray(x)[: most - k] for x in found])
        self.slots, self.compute_s, self.sum_s = (np.concatenate(x) for x in zip(*parts, strict=True))
        owner = tables.parameter_op
        self.slot_op = np.concatenate([tables.access_op, owner, owner, [-1]])
        self.index = [np.arange(k) for k in self.counts]  # of each operator's candidates in the arrays
        self.convert = _converter(tables.links)
        self.names = layout_names(self.slots)  # [K, slots]

    def restricted(self, candidates: list[Candidates], keep: list[np.ndarray]) -> OwnRows:
        """Only these candidates; the arrays are shared."""
        other = copy.copy(self)
        other.candidates, other.counts = candidates, [len(k) for k in keep]
        other.index = [of[k] for of, k in zip(self.index, keep, strict=True)]
        return other

    def slot(self, s: int) -> tuple[int, np.ndarray]:
        """The operator that decides a slot's layout, and the layouts [K, A] by its candidates."""
        n = int(self.slot_op[s])
        return (n, self.slots[self.index[n], s]) if n >= 0 else (-1, self.slots[:1, s])

    def name(self, s: int) -> np.ndarray:
        """A slot's layouts as integers [K], by the candidates of its operator."""
        return self.names[self.index[int(self.slot_op[s])], s]

    def raw(self, t: int) -> tuple[int, np.ndarray]:
        """A tensor's layout as its producer makes it."""
        tables = self.tables
        if tables.tensor_source[t] == FROM_FIXED:
            return -1, tables.tensor_fixed[t : t + 1]
        n, rows = self.slot(int(tables.tensor_slot[t]))
        if tables.tensor_source[t] == FROM_READER:
            rows = np.where(rows == PARTIAL, np.int8(REPLICATED), rows)
        return n, rows


def _converter(links: Links) -> Callable[..., np.ndarray]:
    """(source [n, A], target [n, A], bytes, latency share, shape [R]) -> seconds [n, L]."""

    def run(source: Array, target: Array, size: Array, share: Array, shape: Array) -> Array:
        shapes = jnp.broadcast_to(shape, (len(source), len(shape)))
        return conversion_seconds(source, target, jnp.full(len(source), size), links, share, shape=shapes)

    programs = {chunk: Program(run, is_urgent=True) for chunk in _CHUNKS}

    def convert(source: np.ndarray, target: np.ndarray, size_bytes: float, share: float, shape: np.ndarray) -> np.ndarray:
        out = np.zeros((len(source), links.num_levels), np.float32)
        moves = np.flatnonzero((source != target).any(axis=1))
        chunk = _CHUNKS[len(moves) > _CHUNKS[0]]
        for k in range(0, len(moves), chunk):
            at = moves[k : k + chunk]
            padded = np.concatenate([at, np.zeros(chunk - len(at), at.dtype)])
            found = programs[chunk](source[padded], target[padded], np.float32(size_bytes), np.float32(share), shape)
            out[at] = np.asarray(found)[: len(at)]
        return out

    return convert
