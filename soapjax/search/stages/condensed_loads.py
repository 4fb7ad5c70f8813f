"""Loads of the stages of a deep model, from its graph with few of its repeated blocks (graph/condensing.py).

A stage with more blocks than the condensed graph has is one with fewer, and for every block that is left out what one block more
costs between two others. Of a model whose blocks do not repeat these are the loads themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from soapjax.graph.condensing import MOST_KEPT, Condensed, condense
from soapjax.graph.operators import OperatorGraph
from soapjax.search.stages.stage_figures import Fabric, Figures
from soapjax.search.stages.stage_flows import CrossingBytes, sums_of
from soapjax.search.stages.stage_loads import StageLoads
from soapjax.simulate.pipeline_tasks import StageLoad
from soapjax.strategy.configs import Strategy
from soapjax.strategy.layout import Spec


class CondensedLoads:
    """As `StageLoads`, by the bounds of the whole graph; strategies and figures are the condensed graph's.

    Args:
      crossing_bytes: [n + 1] what crosses forwards at each place between forward operators.
    """

    def __init__(self, whole: StageLoads, crossing_bytes: np.ndarray):
        self.whole, self.topology = whole, whole.topology
        condensed = condense(whole.whole, crossing_bytes)
        # Blocks of whose parameters a user fixed some otherwise are no equals.
        is_whole = condensed is None or not _fixed_alike(condensed, whole.whole, whole.fixed)
        self.condensed: Condensed | None = None if is_whole else condensed
        self.small = whole if self.condensed is None else StageLoads(
            self.condensed.graph, whole.topology, whole.profile, sums_once=whole.sums_once, fixed=whole.fixed
        )  # fmt: skip

    def fabric(self, first: int, count: int, num: int) -> Fabric:
        """The devices of a stage, with what operators of the condensed graph may do there."""
        return self.small.fabric(first, count, num)

    def load(
        self, bounds: tuple[int, int], first: int, count: int, num: int, inner: int, *, overlap: bool = True
    ) -> StageLoad:  # fmt: skip
        """Of the forward operators bounds[0] : bounds[1] on `count` devices from `first`, at `num` micro-batches."""
        figures = self.fabric(first, count, num).choices[inner].figures

        def load_of(b: tuple[int, int]) -> StageLoad:
            return self.small.load_of(b, first, count, num, figures, overlap=overlap)

        load = StageLoad(*self._extended(bounds, load_of).tolist())._replace(sync_level=0)  # a whole number, and of replicas only
        # Of more blocks another moment may be the fullest: the one at which all that is kept is there.
        short = load_of(self._shortened(bounds)[0])
        more_bytes = load.kept_bytes - short.kept_bytes
        more_split_bytes = more_bytes + load.between_bytes - short.between_bytes
        load = load._replace(
            working_bytes=max(load.working_bytes, short.working_bytes + more_bytes),
            split_working_bytes=max(load.split_working_bytes, short.split_working_bytes + more_split_bytes),
        )
        if bounds[0] == 0:  # nobody waits for the backward pass of the first stage: nothing of it is put off
            load = load._replace(
                inputs_s=load.backward_s, weights_s=0.0, between_bytes=0.0, kept_for_weights_bytes=0.0,
                split_working_bytes=load.working_bytes,
            )  # fmt: skip
        return load

    def sent_bytes(self, bounds: tuple[int, int], first: int, count: int, num: int, inner: int) -> np.ndarray:
        """What each device of such a stage sends in a forward and in a backward pass over one micro-batch, and in an update [3]."""
        return self._extended(bounds, lambda b: self.small.sent_bytes(b, first, count, num, inner))

    def split_flops(self, bounds: tuple[int, int], first: int, count: int, num: int, inner: int) -> np.ndarray:
        """FLOPs of a stage per micro-batch, and those that are split [2]."""
        inside = self.fabric(first, count, num).choices[inner]
        return self._extended(bounds, lambda b: self.small.split_flops(b, first, count, num, inside.strategy, inside.figures))

    def _extended(self, bounds: tuple[int, int], figures: Callable[[tuple[int, int]], Sequence[float] | np.ndarray]) -> np.ndarray:
        """Figures of a stage from those of the shorter one."""
        short, left_out, pair = self._shortened(bounds)
        found = np.array(figures(short), np.float64)
        if not left_out:
            return found
        one, two = (np.array(figures(b), np.float64) for b in pair)
        return found + left_out * np.maximum(two - one, 0.0)

    def crossing(
        self, bounds: Sequence[int], count: Sequence[int], num: int, inside: Sequence[Figures]
    ) -> dict[tuple[int, int], CrossingBytes]:  # fmt: skip
        """(earlier stage, later stage) -> what crosses."""
        of = range(len(self.whole.whole.tensors)) if self.condensed is None else self.condensed.tensor_of
        return sums_of(self.whole.flows(bounds), lambda f: inside[f.reader].shard_bytes[of[f.tensor]] * count[f.reader])

    def strategy(self, inside: Strategy) -> Strategy:
        """A strategy of the condensed graph for the whole one."""
        return inside if self.condensed is None else inside.of(self.condensed.operator_of)

    def _shortened(self, bounds: tuple[int, int]) -> tuple[tuple[int, int], int, tuple[tuple[int, int], tuple[int, int]]]:
        """Bounds in the condensed graph, how many blocks they leave out, and the bounds of one and of two blocks between others."""
        if self.condensed is None:
            return bounds, 0, (bounds, bounds)
        blocks, removed = self.condensed.blocks, self.condensed.num_removed
        first, period, (begin, end) = blocks.first, blocks.period, bounds
        pair = (first + period, first + 2 * period), (first + period, first + 3 * period)
        shift = removed * period  # of what stands behind the run
        inside = min(end, blocks.end) - max(begin, first)  # operators of the run
        if inside <= 0:
            move = shift if begin >= blocks.end else 0
            return (begin - move, end - move), 0, pair
        if begin <= first and end >= blocks.end:
            return (begin, end - shift), removed, pair
        if begin <= first:
            left_out = max(0, inside // period - (MOST_KEPT - 2))
            return (begin, end - left_out * period), left_out, pair
        if end >= blocks.end:
            left_out = max(0, inside // period - (MOST_KEPT - 2))
            return (begin - shift + left_out * period, end - shift), left_out, pair
        left_out = max(0, (inside - 1) // period)
        start = first + period + (begin - first) % period
        return (start, start + inside - left_out * period), left_out, pair


def _fixed_alike(condensed: Condensed, graph: OperatorGraph, fixed: Mapping[str, Spec]) -> bool:
    """Whether every operator's parameters are fixed as those of the operator that stands for it."""

    def of(g: OperatorGraph, n: int) -> list[Spec | None]:
        leaves = (p.leaves for p in (g.parameters[k] for k in g.operators[n].parameters))
        return [next((fixed[g.in_paths[i]] for i in mine if g.in_paths[i] in fixed), None) for mine in leaves]

    return not fixed or all(k >= 0 and of(graph, n) == of(condensed.graph, k) for n, k in enumerate(condensed.operator_of.tolist()))
