"""The replicas of a PipeDream stage together: one mesh of all their devices, on which the stage is updated.

Each replica runs its passes on a mesh of its own. A round of gradients, one of every replica, is one array of the stage: what a
replica has is a block of it, and one all-reduce sums all gradients of the round. Every replica then updates its copy of
the state, as in data parallelism (Narayanan et al. 2019, section 3.2: replicas synchronise by an all-reduce).

    passes of replica q     mesh d=2            state [n, m]       share of a gradient [1, n, m]
    update of the stage     mesh replica=3 d=2  state [n, m]       gradients [3, n, m], split by replica

Arrays change between these meshes without a copy (transfers/on_meshes.py): every device keeps its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from soapjax.execute.parts.part_program import Place
from soapjax.execute.spmd.on_blocks import partition_spec
from soapjax.execute.spmd.planned_evaluator import BoundStep
from soapjax.execute.transfers.on_meshes import together
from soapjax.strategy.layout import Spec


class Replicas:
    """A stage as a whole.

    Args:
      places: its replicas, on meshes of one shape.
    """

    def __init__(self, places: Sequence[Place]):
        first = places[0].bound
        self.num = len(places)
        mesh = together([p.mesh for p in places], "replica")
        self.axis = mesh.axis_names[0]
        self.place = Place(BoundStep(first.step, first.plan, first.graph, first.binding, mesh), is_float64=places[0].is_float64)

    def round_sharding(self, value: int) -> NamedSharding:
        """Of one round of gradients, [replicas, *shape]."""
        return self.place.bound.sharding(self._round_spec(value))

    def _round_spec(self, value: int) -> Spec:
        return ((self.axis,), *self.place.spec(value))

    def summed(self, values: Sequence[int], rounds: Sequence[Any]) -> tuple[Any, ...]:
        """The sums over replicas of arrays [replicas, *shape]: one all-reduce."""
        if self.num == 1:
            return tuple(x[0] for x in rounds)

        def body(*blocks: Any) -> tuple[Any, ...]:
            return jax.lax.psum(tuple(x[0] for x in blocks), self.axis)

        in_specs = tuple(partition_spec(self._round_spec(v)) for v in values)
        out_specs = tuple(partition_spec(self.place.spec(v)) for v in values)
        return jax.shard_map(body, mesh=self.place.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*rounds)
