"""Numbers that are made of the batch alone are computed of all of it, before the first micro-batch (graph/batch/whole_batch.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from soapjax.execute.parts.batch_axes import joined
from soapjax.execute.parts.microbatches import MicroStep
from soapjax.execute.spmd.evaluator import ProgramEvaluator
from soapjax.graph.batch.whole_batch import part_for


class BatchStatistics:
    """Of a micro-batched step the numbers that its equations `keys` pass on.

    leaves: which parts of the batch they are made of; `state`, which input leaves beside these.
    """

    def __init__(self, micro: MicroStep, keys: Sequence[str], *, is_float64: bool = False):
        self.keys, self._wanted = keys, [micro.whole[k] for k in keys]
        whole = micro.full.program
        self._program, read = part_for(whole, [w.value for w in self._wanted])
        self._dims = dict(zip(micro.batch_leaves, micro.batch_dims, strict=True))
        self.leaves = [k for k in micro.batch_leaves if whole.inputs[k] in read]
        self.state = [k for k, v in enumerate(whole.inputs) if v in read and k not in micro.batch_leaves]
        self._evaluator = ProgramEvaluator(self._program, is_float64=is_float64)

    def of_batch(self, given: Mapping[int, Any]) -> list[Any]:
        """By equation its number, of the whole batch and of state (by input leaf)."""
        evaluator, program = self._evaluator, self._program
        env: dict[Any, Any] = {k: evaluator.lift(v) for k, v in program.consts.items()}
        env.update((program.inputs[k], evaluator.as_traced(program.inputs[k], given[k])) for k in (*self.leaves, *self.state))
        evaluator.block(program, env)
        return [env[w.value] if w.scale == 1 else env[w.value] * jnp.asarray(w.scale, env[w.value].dtype) for w in self._wanted]

    def jitted(self, sharding: Any) -> Any:
        """`(*micro-batches of `leaves`, stacked, *`state`) -> numbers`, each laid out as `sharding`."""

        def statistics(*given: Any) -> tuple[Any, ...]:
            batch = {k: joined(x, self._dims[k]) for k, x in zip(self.leaves, given, strict=False)}
            return tuple(self.of_batch(batch | dict(zip(self.state, given[len(batch) :], strict=True))))

        return jax.jit(statistics, out_shardings=(sharding,) * len(self._wanted))
