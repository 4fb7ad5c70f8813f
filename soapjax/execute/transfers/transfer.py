"""Moving arrays from one mesh to another: `jax.device_put`, or the copy that it ends in.

A pipeline moves hundreds of small tensors per step, and `jax.device_put` spends two to four times as long in Python as the copy
itself takes to be issued. Where source and target are split alike, the copy is called directly; between processes it must be:
what is split otherwise goes piece by piece (pieces.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from soapjax.execute.private_jax import REUSE_INPUT, batched_copy
from soapjax.execute.transfers.pieces import piecewise
from soapjax.graph.batch.draws import is_key


def is_alike(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether device k of one holds the part of device k of the other."""
    if source.mesh.devices.shape != target.mesh.devices.shape or source.mesh.axis_names != target.mesh.axis_names:
        return source.mesh.size == target.mesh.size == 1
    return source.spec == target.spec


def mover(sources: Sequence[NamedSharding], targets: Sequence[NamedSharding]) -> Callable[..., Sequence[Any]]:
    """A function that moves arrays laid out as `sources` to `targets`, to be called many times with arrays of the same types."""
    copy = _mover(sources, targets)
    move: list[Callable[..., Sequence[Any]]] = []

    def by_words(*arrays: Any) -> list[Any]:
        return list(map(of_words, copy(*map(as_words, arrays)), arrays))

    def moved(*arrays: Any) -> Sequence[Any]:
        if not move:
            move.append(by_words if any(map(is_key, arrays)) else copy)
        return move[0](*arrays)

    return moved


def as_words(x: Any) -> Any:
    """Random keys as the words that they consist of; anything else as it is."""
    return jax.random.key_data(x) if is_key(x) else x


def of_words(words: Any, like: Any) -> Any:
    """What `as_words` made of an array such as `like`, as that was."""
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like)) if is_key(like) else words


def _mover(sources: Sequence[NamedSharding], targets: Sequence[NamedSharding]) -> Callable[..., Sequence[Any]]:
    targets = list(targets)
    pairs = {(s._internal_device_list, t._internal_device_list) for s, t in zip(sources, targets, strict=True)}
    if all(map(_is_one_copy, sources, targets)) and (len(pairs) == 1 or jax.process_count() == 1):  # for several: `send_alone`
        devices = [s._internal_device_list for s in targets]
        semantics = [REUSE_INPUT] * len(targets)
        return lambda *arrays: batched_copy(list(arrays), devices, targets, semantics)
    if jax.process_count() > 1 and not all(s.is_fully_addressable for s in (*sources, *targets)):
        return piecewise(sources, targets)
    return lambda *arrays: jax.device_put(list(arrays), targets)


def _is_one_copy(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether one call brings every part to its device. Across processes JAX wants both sides to be of different ones."""
    ours, theirs = processes_of(source), processes_of(target)
    return is_alike(source, target) and (ours == theirs == {jax.process_index()} or not ours & theirs)


def processes_of(sharding: NamedSharding) -> set[int]:
    return {d.process_index for d in sharding.mesh.devices.flat}
