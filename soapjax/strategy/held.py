"""How many micro-batches every stage holds while a group of devices works, as the order of its schedule (schedules.py) has it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from soapjax.strategy.pipeline import OrderShape, Pipeline
from soapjax.strategy.schedules import actions, groups_of, kind_of, splits_backward

STEADY_ROUNDS = 4  # of as many micro-batches as there are groups of devices


class Held(NamedTuple):
    """What the W actions of a group of devices find of micro-batches on its S stages, each action counted without its own."""

    stage: np.ndarray  # int [W]: which stage of the group works
    kept: np.ndarray  # int [W, S]: micro-batches whose forward pass has run, and whose (whole) backward pass has not
    put_off: np.ndarray  # int [W, S]: those whose gradients of weights are still to come, those of inputs not
    recomputed: np.ndarray  # int [W, S]: those that were computed again, and are still to be differentiated


def in_flight(pipeline: Pipeline) -> tuple[int, ...]:
    """The most micro-batches that each stage holds: their forward pass has run there, their (whole) backward pass has not."""
    return most_held(pipeline, "kept")


def most_held(pipeline: Pipeline, what: str) -> tuple[int, ...]:
    """The most micro-batches of each stage that count as `what`, one of the fields of `Held`, each action's own among them."""
    found = [0] * len(pipeline.stages)
    field = Held._fields.index(what) - 1
    for group, (_, _, held) in zip(groups_of(pipeline), _held(_shape(pipeline)), strict=True):
        for i, most in zip(group, held[:, :, field].max(0, initial=0).tolist(), strict=True):
            found[i] = most
    return tuple(found)


def held_by(pipeline: Pipeline) -> tuple[Held, ...]:
    """What each group of `groups_of` holds while it works, every combination once; of replicas what one of them holds."""
    found = []
    for group, (stage, own, held) in zip(groups_of(pipeline), _held(_shape(pipeline)), strict=True):
        replicas = np.array([pipeline.stages[i].replicas for i in group])
        others = -(-held // replicas[:, None])
        others[np.arange(len(stage)), stage] -= own
        found.append(Held(stage, *np.moveaxis(others, 2, 0)))
    return tuple(found)


def _shape(pipeline: Pipeline) -> OrderShape:
    """With no more micro-batches than tell what is held."""
    most = len(groups_of(pipeline)) * STEADY_ROUNDS if kind_of(pipeline).is_steady else pipeline.num_microbatches
    return OrderShape.of(pipeline)._replace(num_microbatches=min(pipeline.num_microbatches, most))


@functools.lru_cache(maxsize=1024)  # searches ask for the same few again and again, of thousands of actions each
def _held(shape: OrderShape) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]:
    """Of the actions of every group which of its stages works [W], which of the fields of `Held` count its micro-batch, 0 or 1
    [W, 3], and what all stages hold meanwhile, this one counted [W, S, 3]; every combination once."""
    pipeline = shape.pipeline()
    last = "weights" if splits_backward(pipeline) else "backward"
    # By the fields of `Held` from which action on, and until which, a micro-batch counts; and what else is done with it meanwhile.
    put_off = ("backward" if last == "weights" else "", last)
    spans = (("forward", last, "recompute", "backward"), put_off, ("recompute", "backward"))
    found = []
    for group, order in zip(groups_of(pipeline), actions(pipeline), strict=True):
        held = [0] * (3 * len(group))
        states: dict[tuple[int, ...], None] = {}
        for action in order:
            s = group.index(action.stage)
            at = range(3 * s, 3 * s + 3)
            for k, (begin, *_) in zip(at, spans, strict=True):
                held[k] += action.kind == begin
            own = (held[k] > 0 and action.kind in kinds for k, kinds in zip(at, spans, strict=True))
            states[(s, *own, *held)] = None
            for k, (_, end, *_) in zip(at, spans, strict=True):
                held[k] -= action.kind == end and held[k] > 0
        rows = np.array(list(states), int)
        found.append((rows[:, 0], rows[:, 1:4], rows[:, 4:].reshape(-1, len(group), 3)))
    return tuple(found)
