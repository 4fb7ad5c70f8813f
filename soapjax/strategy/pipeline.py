"""Pipelines as data: which operators form a stage, on which devices, and in what order stages work on micro-batches.

The schedules are those of GPipe (Huang et al. 2019, section 2.3), 1F1B and PipeDream (Narayanan et al. 2019, section 3.2),
interleaved 1F1B (Narayanan et al. 2021, section 2.2), and ZB-H1 (Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2),
where gradients of weights are computed apart from those of inputs. An `own` schedule is a list of actions per group of devices.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import pydantic

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "pipedream", "own"]
ActionKind = Literal["forward", "recompute", "backward", "weights", "update"]


class Stage(pydantic.BaseModel):
    """A run of operators and the devices that it has for itself."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    operators: tuple[str, ...]  # names in program order; their backward tasks run here too
    devices: tuple[int, ...]  # indices into the topology's device order; any number of them, replica by replica
    mesh: dict[str, int] = {}  # axis name -> size, slowest first; the product is the number of devices of one replica
    replicas: int = 1  # pipedream: copies of the stage on equal shares of `devices`, which take minibatches in turn
    rematerialise: bool = False  # keep only the stage's inputs, and compute its forward pass again before its backward pass
    keeps_casts: bool = False  # weights that passes read in another type are cast once per step, not in every pass


class Pipeline(pydantic.BaseModel):
    """Stages in the order in which the forward pass visits them."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    schedule: ScheduleName
    num_microbatches: int
    stages: tuple[Stage, ...]
    vertical_sync: bool = False  # pipedream: a minibatch sees one version of the weights on all stages
    # own: of every group of devices what it does, in order: F3 and B3 are the passes of micro-batch 3, W3 its gradients of weights
    # where B3 leaves them out, R3 what is computed again for B3, right before it if not said; F3.5 is the pass of stage 5, where a
    # group has several.
    order: tuple[tuple[str, ...], ...] = ()


class Action(NamedTuple):
    """One program of one stage for one micro-batch."""

    kind: ActionKind
    stage: int
    microbatch: int  # 0 of an update; in pipedream the minibatch that it follows


class OrderShape(NamedTuple):
    """What the order of a pipeline's actions depends on; to be a key, as a `Pipeline`, which names all operators, should not be."""

    schedule: ScheduleName
    num_microbatches: int
    order: tuple[tuple[str, ...], ...]
    stages: tuple[tuple[tuple[int, ...], int, bool], ...]  # devices, replicas, and whether it computes again

    @classmethod
    def of(cls, pipeline: Pipeline) -> OrderShape:
        stages = tuple((s.devices, s.replicas, s.rematerialise) for s in pipeline.stages)
        return cls(pipeline.schedule, pipeline.num_microbatches, pipeline.order, stages)

    def pipeline(self) -> Pipeline:
        """One of this shape, whose stages have no operators."""
        stages = tuple(Stage.model_construct(operators=(), devices=d, replicas=r, rematerialise=a) for d, r, a in self.stages)
        return Pipeline.model_construct(**self._asdict() | {"stages": stages})
