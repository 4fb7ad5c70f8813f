"""Arguments laid out as planned: what is laid out so stays, all others go in one transfer, and nothing is compiled for it.

What arrives is copied: a step gives its state's memory away (donation), and must not take the caller's. `jax.device_put` alone may
share a buffer with what it was given, and copying on a device compiles a program per shape; so what lies on one device goes
through the host.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.transfers.pieces import piecewise
from soapjax.execute.transfers.transfer import as_words, of_words
from soapjax.graph.batch.draws import is_key


def require_arrays(leaves: Sequence[Any], paths: Sequence[str] = ()) -> None:
    """Raises: SoapjaxError naming the leaves that are shapes alone, or used up.

    JAX looks for the latter only after it has begun on some of the devices, and the process ends.
    """
    gone = [k for k, x in enumerate(leaves) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()]
    if shapes := [k for k, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)]:
        remedy = "pass arrays; prepare(...) plans for shapes alone"
        raise SoapjaxError(
            Problem(f"argument {paths[k] if paths else f'leaf {k}'}", "a ShapeDtypeStruct", "an array", remedy) for k in shapes
        )
    if gone:
        shown = ", ".join(paths[k] if paths else f"leaf {k}" for k in gone[:3]) + (f" and {len(gone) - 3} more" if gone[3:] else "")
        remedy = "go on with the state that the last call returned, or say donate=False to keep the old one"
        value, expected = "used up by an earlier call, which took its memory", "arrays that no step has used up"
        raise SoapjaxError(Problem(f"argument {shown}", value, expected, remedy))


def place(x: Any, sharding: NamedSharding | None) -> Any:
    """`place_all` of one array."""
    return place_all([x], [sharding])[0]


def place_all(leaves: Sequence[Any], shardings: Sequence[NamedSharding | None]) -> list[Any]:
    """Every leaf under its sharding: itself where it is laid out so (or where there is no sharding), else a copy.

    What comes twice (an average of the parameters that begins as these) is copied once: its memory cannot be given away twice.

    Where a sharding is of other processes too, each gives the leaf in full, and keeps its own part; nothing is sent. What
    already is spread over processes in another way goes piece by piece.
    """
    placed = list(leaves)
    moved: list[int] = []
    stay: set[int] = set()
    for k, (x, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if sharding is None:
            continue
        if _lies_so(x, sharding):
            if id(x) in stay:
                placed[k] = x.copy()
            stay.add(id(x))
            continue
        if isinstance(x, jax.core.Tracer):
            placed[k] = jax.device_put(x, sharding)
        elif isinstance(x, jax.Array) and not x.is_fully_addressable:
            placed[k] = piecewise([x.sharding], [sharding])(x)[0]
        elif not sharding.is_fully_addressable:
            placed[k] = _own_part(x if isinstance(x, jax.Array) else jax.numpy.asarray(x), sharding)
        else:
            moved.append(k)
    if moved:
        # Keys go as the words that they consist of: JAX compiles programs to copy and to cut up keys.
        copies = jax.device_put(_copied([as_words(leaves[k]) for k in moved]), [shardings[k] for k in moved])
        for k, x in zip(moved, copies, strict=True):
            placed[k] = of_words(x, leaves[k])
    return placed


def on_context_mesh(results: Any, state: Collection[int]) -> Any:
    """Results that every device has whole, but for leaves that are state, as arrays on the mesh of `jax.set_mesh`.

    Under explicit axes JAX computes with arrays of that mesh alone, and a loss is added up or compared outside of the step.
    """
    mesh = jax.sharding.get_mesh()
    devices = set(mesh.devices.flat)
    leaves, tree = jax.tree_util.tree_flatten(results)
    for k, x in enumerate(leaves):
        is_whole = isinstance(x, jax.Array) and x.is_fully_replicated and x.sharding.device_set == devices
        if is_whole and k not in state:
            blocks = [shard.data for shard in x.addressable_shards]
            leaves[k] = jax.make_array_from_single_device_arrays(x.shape, NamedSharding(mesh, PartitionSpec()), blocks)
    return jax.tree_util.tree_unflatten(tree, leaves)


def _lies_so(x: Any, sharding: NamedSharding) -> bool:
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return False
    return x.committed and (x.sharding == sharding or x.sharding.is_equivalent_to(sharding, x.ndim))


def _copied(leaves: list[Any]) -> list[Any]:
    """Copies that no one else holds: on the host where the leaf is on one device, on its devices where it is on several."""
    on_host = [k for k, x in enumerate(leaves) if isinstance(x, jax.Array) and len(x.devices()) == 1]
    fetched = dict(zip(on_host, jax.device_get([leaves[k] for k in on_host]), strict=True))
    copies = []
    for k, x in enumerate(leaves):
        if k in fetched:
            # On CPUs what was fetched is the array's own memory.
            copies.append(np.array(fetched[k]) if all(d.platform == "cpu" for d in x.devices()) else fetched[k])
        elif isinstance(x, jax.Array):
            copies.append(x.copy())
        else:
            copies.append(np.array(x) if isinstance(x, np.ndarray) else x)
    return copies


def _own_part(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    if is_key(x):
        return of_words(_own_part(as_words(x), NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec))), x)
    whole = np.asarray(x)
    # A copy, which the step may use up: on CPUs an array may share its memory with what it was made from.
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: np.array(whole[index]), dtype=whole.dtype)
