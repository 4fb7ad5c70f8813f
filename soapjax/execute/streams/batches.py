"""What every micro-batched step of several programs does with its arguments and results, whatever its schedule."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from soapjax.execute.parts.microbatches import MicroStep
from soapjax.execute.parts.part_program import Place
from soapjax.execute.parts.stage_cut import StageCut
from soapjax.execute.streams.stream import Streamed
from soapjax.execute.transfers.arrivals import place, place_all
from soapjax.execute.transfers.on_meshes import blocks_as


class MicroBatched(Streamed):
    """The state lies where the stages hold it; the batch is taken apart, and put where it is read."""

    micro: MicroStep
    as_run: MicroStep  # as the dispatches take and return it: with pieces of stacked state for its rows, where they do
    cut: StageCut
    in_shardings: list[NamedSharding | None]  # of flat arguments; None of the batch, which is taken as it comes

    @property
    @abc.abstractmethod
    def feeds(self) -> list[tuple[int, Place]]:
        """What the dispatches take of the batch, after the state: (leaf, where it is read)."""

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Arguments as the stages hold them; the batch stays as it is."""
        return place_all(leaves, self.in_shardings)

    def arguments(self, leaves: Sequence[Any]) -> list[Any]:
        """The state, placed, and the batch where stages read it."""
        state = [x for k, x in enumerate(self.place(leaves)) if k not in self.as_run.batch_leaves]
        dims = dict(zip(self.as_run.batch_leaves, self.as_run.batch_dims, strict=True))
        fed = [(leaves[leaf], dims[leaf]) for leaf, _ in self.feeds]
        return [*state, *_put_batch(fed, self._fed, self.micro.num_microbatches)]

    def argument_structs(self) -> list[jax.ShapeDtypeStruct]:
        avals, num = self.as_run.step.in_avals, self.micro.num_microbatches
        fed = [(avals[leaf], s) for (leaf, _), s in zip(self.feeds, self._fed, strict=True)]
        given = zip(avals, self.in_shardings, strict=True)
        return [
            *(jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in given if s is not None),
            *(jax.ShapeDtypeStruct((num, *a.shape), a.dtype, sharding=s) for a, s in fed),
        ]

    @functools.cached_property
    def _fed(self) -> list[NamedSharding]:
        """Every micro-batch is laid out as it is read: taking one out of the stack moves nothing."""
        inputs = self.as_run.step.program.inputs
        return [where.bound.sharding(((), *where.spec(inputs[leaf]))) for leaf, where in self.feeds]

    def outputs(self, results: list[Any], leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        program, found, outputs = self.as_run.step.program, iter(results), []
        batch = {program.inputs[k]: k for k in self.as_run.batch_leaves}
        own, whole = self.micro.step.program.outputs, self.micro.full.program.outputs
        whole = whole if len(whole) == len(own) else own
        # Of the whole batch: its size, say. (Layers' rows may have become stacks: of these none is a literal.)
        literals = iter([b if not isinstance(b, int) else a for a, b in zip(own, whole, strict=True) if not isinstance(a, int)])
        for out, result in zip(program.outputs, self.cut.results, strict=True):
            if not isinstance(out, int):
                outputs.append(jnp.asarray(next(literals).val, program.aval(out).dtype))
            else:
                outputs.append(leaves[batch[result[1]]] if result[1] in batch else next(found))
        return outputs, list(found)


def _put_batch(arrays: Sequence[tuple[Any, int]], shardings: Sequence[NamedSharding], num: int) -> list[Any]:
    """Arrays [batch, ...] as [num, batch / num, ...], each under its sharding (of the stacked shape).

    Args:
      arrays: with the dim of each that is the batch; [time, batch, ...] becomes [num, time, batch / num, ...].
    """
    stacked = {(id(x), d): _stacked(x, num, d) for x, d in arrays}
    found = [stacked[id(x), d] for x, d in arrays]
    if all(s.is_fully_addressable for s in shardings):
        return jax.device_put(found, list(shardings))
    return [place(x, s) for x, s in zip(found, shardings, strict=True)]


def _stacked(x: Any, num: int, dim: int) -> Any:
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) and x.sharding.mesh.explicit_axes:
        mesh = Mesh(x.sharding.mesh.devices, x.sharding.mesh.axis_names)  # how it lies is no type of it here
        x = blocks_as([x], x.shape, NamedSharding(mesh, x.sharding.spec))
    apart = x.reshape(*x.shape[:dim], num, x.shape[dim] // num, *x.shape[dim + 1 :])
    return apart if dim == 0 else np.moveaxis(apart, dim, 0) if isinstance(x, np.ndarray) else jnp.moveaxis(apart, dim, 0)
