"""In which order every group of devices works on micro-batches.

A group is a set of devices that stages share: one stage, or several in an interleaved schedule. The order within a group
is all that a schedule fixes; what runs at the same time follows from the data. With S = 2 stages and M = 3 micro-batches,
F and B for forward and backward, U for the update:

    gpipe   F0 F1 F2 B2 B1 B0 U       1f1b   F0 F1 B0 F2 B1 B2 U
            F0 F1 F2 B2 B1 B0 U              F0 B0 F1 B1 F2 B2 U

ZB-H1 takes the backward pass apart: B computes what earlier stages wait for, W the gradients of weights, later. Stage i puts W
off by i micro-batches, so that bubbles at the end are filled, and no stage holds more than the first does in 1F1B:

    zb-h1   F0 F1 B0 W0 F2 B1 W1 B2 W2 U
            F0 B0 F1 B1 W0 F2 B2 W1 W2 U

A stage that keeps its inputs alone computes its forward pass again before the backward pass, as an action R of its own, which needs
no gradient: it runs while the stage would wait for one (GPipe, section 2.3). Gradients of weights that are put off need
what is computed again twice; there each backward program computes it itself.

GPipe: Huang et al. 2019, section 2.3. 1F1B: Narayanan et al. 2019 (PipeDream), section 3.2, here with one update at the end
of a step. Interleaved 1F1B: Narayanan et al. 2021 (Megatron-LM), section 2.2. ZB-H1: Qi et al. 2023, section 2.3. `pipedream`
updates after every backward pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from soapjax.errors import Problem, SoapjaxError
from soapjax.strategy.pipeline import Action, ActionKind, Pipeline, ScheduleName


class ScheduleKind(NamedTuple):
    """What distinguishes one schedule from another, for costs, executor and reports; how it orders actions is a function of the
    pipeline, its groups of devices and one of them."""

    order: Callable[[Pipeline, tuple[tuple[int, ...], ...], int], list[Action]]
    is_synchronous: bool = True  # one update per step
    may_share_devices: bool = False  # several stages on one group of devices
    is_rematerialised: bool = False  # as published: stages keep their inputs and compute again
    splits_backward: bool = False  # gradients of weights are programs of their own; an own schedule's words tell
    is_steady: bool = False  # after some rounds no further micro-batch changes what is held (held.py)


def kind_of(pipeline: Pipeline) -> ScheduleKind:
    return SCHEDULES[pipeline.schedule]


def splits_backward(pipeline: Pipeline) -> bool:
    """Whether gradients of weights are programs of their own."""
    return kind_of(pipeline).splits_backward or any(word.startswith("W") for words in pipeline.order for word in words)


def recomputes_apart(pipeline: Pipeline, stage: int) -> bool:
    """Whether a stage computes its forward pass again as an action of its own."""
    is_known = kind_of(pipeline).is_synchronous and not splits_backward(pipeline)
    return is_known and pipeline.stages[stage].rematerialise


def groups_of(pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
    """The stages of each group of devices, groups in order of first appearance.

    Raises: SoapjaxError where two stages share some devices but not all, or own none.
    """
    groups: dict[frozenset[int], list[int]] = {}
    problems = []
    for i, stage in enumerate(pipeline.stages):
        place, devices = f"stages[{i}].devices", frozenset(stage.devices)
        if not devices or len(devices) != len(stage.devices):
            problems.append(Problem(place, str(stage.devices), "at least one device, each once", "give the stage devices"))
        for other in groups:
            if devices & other and devices != other:
                shared = f"{sorted(devices & other)} are stage {groups[other][0]}'s too"
                problems.append(Problem(place, shared, "all devices of another stage, or none", "give each stage its own devices"))
        groups.setdefault(devices, []).append(i)
    if problems:
        raise SoapjaxError(problems)
    return tuple(map(tuple, groups.values()))


def actions(pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
    """The ordered actions of one step, per group of `groups_of`.

    A stage with r replicas (`pipedream`) deals minibatches out to them in turn: minibatch m runs on replica m mod r, and
    one update follows every r backward passes.

    Raises: SoapjaxError where the stages, the micro-batches and the schedule do not go together.
    """
    groups = groups_of(pipeline)
    _check(pipeline, groups)
    schedule = kind_of(pipeline)
    orders = [_with_recomputation(pipeline, schedule.order(pipeline, groups, g)) for g in range(len(groups))]
    if schedule.is_synchronous:
        orders = [[*order, *(Action("update", i, 0) for i in group)] for order, group in zip(orders, groups, strict=True)]
    return tuple(map(tuple, orders))


def _with_recomputation(pipeline: Pipeline, order: list[Action]) -> list[Action]:
    """What is computed again right before the backward pass, where an order does not say it."""
    given, found = set(order), []
    for action in order:
        again = action._replace(kind="recompute")
        if action.kind == "backward" and recomputes_apart(pipeline, action.stage) and again not in given:
            found.append(again)
        found.append(action)
    return found


def dispatch_order(pipeline: Pipeline) -> tuple[Action, ...]:
    """One order for a driver that dispatches for all groups: each action after what it needs, groups in turn.

    A group that runs ahead would be handed work that it cannot start, and would hold the memory of it.
    """
    orders = actions(pipeline)
    position = [0] * len(orders)
    done: set[Action] = set()
    merged: list[Action] = []
    while any(p < len(o) for p, o in zip(position, orders, strict=True)):
        before = len(merged)
        ready = []
        for g, order in enumerate(orders):
            if position[g] < len(order) and all(n in done for n in needs(order[position[g]], len(pipeline.stages))):
                ready.append(order[position[g]])
                position[g] += 1
        done.update(ready)
        merged += ready
        if len(merged) == before:
            waiting = [_written(o[p]) for p, o in zip(position, orders, strict=True) if p < len(o)]
            value = f"deadlock: the groups wait at {', '.join(waiting)}"
            remedy = "put every action behind what it needs: a forward pass of the stage before, a backward pass of the stage after"
            raise SoapjaxError(Problem("pipeline.order", value, "an order in which some group can always go on", remedy))
    return tuple(merged)


def needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """What must have run before an action, beside what stands before it in its group: the neighbour's part."""
    if action.kind == "forward":
        return (action._replace(stage=action.stage - 1),) if action.stage > 0 else ()
    if action.kind == "backward":
        last = action.stage == num_stages - 1
        return (action._replace(kind="forward"),) if last else (action._replace(stage=action.stage + 1),)
    return ()


def _gpipe(pipeline: Pipeline, groups: tuple[tuple[int, ...], ...], g: int) -> list[Action]:
    forward = [Action("forward", i, m) for i in groups[g] for m in range(pipeline.num_microbatches)]
    return [*forward, *(a._replace(kind="backward") for a in reversed(forward))]


def _1f1b(pipeline: Pipeline, groups: tuple[tuple[int, ...], ...], g: int) -> list[Action]:
    (stage,) = groups[g]
    return _one_forward_one_backward(stage, len(pipeline.stages) - stage, pipeline.num_microbatches)


def _zero_bubble(pipeline: Pipeline, groups: tuple[tuple[int, ...], ...], g: int) -> list[Action]:
    (stage,) = groups[g]
    found: list[Action] = []
    for action in _1f1b(pipeline, groups, g):
        found.append(action)
        if action.kind == "backward" and action.microbatch >= stage:
            found.append(Action("weights", stage, action.microbatch - stage))
    num = pipeline.num_microbatches
    return [*found, *(Action("weights", stage, m) for m in range(max(num - stage, 0), num))]


def _pipedream(pipeline: Pipeline, groups: tuple[tuple[int, ...], ...], g: int) -> list[Action]:
    (stage,) = groups[g]
    warm_up = _pipedream_in_flight([s.replicas for s in pipeline.stages])[stage]
    order = _one_forward_one_backward(stage, warm_up, pipeline.num_microbatches)
    return _with_updates(order, pipeline.stages[stage].replicas)


_KINDS: dict[str, ActionKind] = {"F": "forward", "R": "recompute", "B": "backward", "W": "weights"}


def _written(action: Action) -> str:
    letter = next((k for k, kind in _KINDS.items() if kind == action.kind), "U")
    return f"{letter}{action.microbatch} of stage {action.stage}"


def _own(pipeline: Pipeline, groups: tuple[tuple[int, ...], ...], g: int) -> list[Action]:
    """The user's list; `_check_own` has seen that it can be read."""
    found = []
    for word in pipeline.order[g]:
        microbatch, _, stage = word[1:].partition(".")
        found.append(Action(_KINDS[word[0]], int(stage) if stage else groups[g][0], int(microbatch)))
    return found


def _one_forward_one_backward(stage: int, warm_up: int, num: int) -> list[Action]:
    """`warm_up` forward passes, then a backward and a forward pass in turn, then the remaining backward passes."""
    warm_up = min(warm_up, num)
    order = [Action("forward", stage, m) for m in range(warm_up)]
    for m in range(num):
        order.append(Action("backward", stage, m))
        if warm_up + m < num:
            order.append(Action("forward", stage, warm_up + m))
    return order


def _interleaved(pipeline: Pipeline, groups: tuple[tuple[int, ...], ...], g: int) -> list[Action]:
    """Megatron-LM's order: as many micro-batches as there are groups on one stage, then on the group's next stage."""
    group, width, num = groups[g], len(groups), pipeline.num_microbatches
    rank = group[0]

    def visits(kind: ActionKind, stages: Iterable[int]) -> list[Action]:
        stages = list(stages)
        rounds = [range(first, min(first + width, num)) for first in range(0, num, width)]
        return [Action(kind, i, m) for microbatches in rounds for i in stages for m in microbatches]

    forward, backward = visits("forward", group), visits("backward", reversed(group))
    # Of one stage per group this is plain 1F1B: S - i micro-batches before the first backward pass.
    ahead = width - rank if len(group) == 1 else 2 * (width - rank - 1) + (len(group) - 1) * width + 1
    ahead = min(ahead, len(forward))
    order = forward[:ahead]
    for k, action in enumerate(backward):
        order.append(action)
        order += forward[ahead + k : ahead + k + 1]
    return order


def _pipedream_in_flight(replicas: Sequence[int]) -> list[int]:
    """Minibatches that each stage admits before its first backward pass: one round more than the stage after it holds.

    Of stages without replicas S - i; of 15-1 two per replica of the first (PipeDream's NOAM, section 3.2).
    """
    held: list[int] = []
    for r in reversed(replicas):
        held.append(r * (math.ceil(held[-1] / r) + 1) if held else r)
    return held[::-1]


def _with_updates(order: list[Action], replicas: int) -> list[Action]:
    """An update after the backward pass that completes a round of the replicas; its gradients are averaged."""
    out = []
    for action in order:
        out.append(action)
        if action.kind == "backward" and (action.microbatch + 1) % replicas == 0:
            out.append(action._replace(kind="update"))
    return out


def _check(pipeline: Pipeline, groups: tuple[tuple[int, ...], ...]) -> None:
    problems = []
    num, name = pipeline.num_microbatches, pipeline.schedule
    if not pipeline.stages:
        problems.append(Problem("stages", "none", "at least one stage", "give the pipeline stages"))
    if num < 1:
        problems.append(Problem("num_microbatches", str(num), "at least 1", "choose 1 or more micro-batches"))
    shared = [g for g in groups if len(g) > 1]
    if shared and not kind_of(pipeline).may_share_devices:
        value = f"stages {' and '.join(map(str, shared[0]))} on the same devices"
        remedy = 'use the schedule "interleaved" or "gpipe", or give each stage its own devices'
        problems.append(Problem(f"schedule {name!r}", value, "one stage per group of devices", remedy))
    if name == "interleaved":
        stride = len(groups)
        if any(list(g) != list(range(g[0], len(pipeline.stages), stride)) for g in groups):
            expected = f"stages i and i + {stride} on the same devices, as many on each"
            problems.append(Problem("stages", f"groups {groups}", expected, "deal the stages out to the groups in turn"))
        if shared and num % stride:
            expected = f"a multiple of the {stride} groups of devices"
            remedy = 'choose such a number, or the schedule "1f1b"'
            problems.append(Problem("num_microbatches", str(num), expected, remedy))
    for i, stage in enumerate(pipeline.stages):
        place, r = f"stages[{i}].replicas", stage.replicas
        if r != 1 and kind_of(pipeline).is_synchronous:
            expected = "1: only pipedream deals whole minibatches out to replicas"
            problems.append(Problem(place, str(r), expected, "split the stage's batch by an axis of its mesh"))
        elif r < 1 or len(stage.devices) % r or num % r:
            expected = f"a divisor of its {len(stage.devices)} devices and of {num} minibatches"
            problems.append(Problem(place, str(r), expected, "choose another number of replicas or of minibatches"))
        if stage.keeps_casts and not kind_of(pipeline).is_synchronous:
            expected = "false: weights change with every minibatch"
            problems.append(Problem(f"stages[{i}].keeps_casts", "true", expected, "leave it out, or take another schedule"))
    if name == "own" or pipeline.order:
        problems += _check_own(pipeline, groups)
    if problems:
        raise SoapjaxError(problems)


def _check_own(pipeline: Pipeline, groups: tuple[tuple[int, ...], ...]) -> list[Problem]:
    """Whether a user's order has every pass of every micro-batch once, none before what it needs on its own stage."""
    if pipeline.schedule != "own":
        remedy = 'say schedule "own", or drop the order'
        return [Problem("pipeline.order", f"given beside the schedule {pipeline.schedule!r}", "none", remedy)]
    if len(pipeline.order) != len(groups):
        expected = f"{len(groups)}, one for each group of devices"
        return [Problem("pipeline.order", f"{len(pipeline.order)} lists", expected, "list the actions of every group")]
    problems = []
    for g, (words, group) in enumerate(zip(pipeline.order, groups, strict=True)):
        place = f"pipeline.order[{g}]"
        seen: dict[tuple[str, int, int], list[int]] = {}
        for k, word in enumerate(words):
            found = re.fullmatch(r"([FRBW])(\d{1,9})(?:\.(\d{1,9}))?", word)
            stage = int(found[3]) if found and found[3] else group[0]
            if not found or int(found[2]) >= pipeline.num_microbatches or stage not in group:
                expected = f"F, R, B or W and one of {pipeline.num_microbatches} micro-batches (F0, or F0.{group[-1]} of a stage)"
                problems.append(Problem(f"{place}[{k}]", repr(word)[:40], expected, "correct it"))
                continue
            seen.setdefault((found[1], stage, int(found[2])), []).append(k)
        is_split = any(kind == "W" for kind, _, _ in seen)
        for kind, stage, m in seen:
            if kind == "R" and (is_split or not pipeline.stages[stage].rematerialise):
                expected = "no W beside it" if is_split else "a stage that keeps its inputs alone (rematerialise)"
                problems.append(Problem(f"{place}: stage {stage}", f"R{m}", expected, "drop it: it goes before the backward pass"))
        for stage in group:
            for m in range(pipeline.num_microbatches):
                kinds = "F" + "R" * (("R", stage, m) in seen) + "B" + "W" * is_split
                at = [seen.get((kind, stage, m), []) for kind in kinds]
                if [len(x) for x in at] != [1] * len(kinds) or sum(at, []) != sorted(sum(at, [])):
                    expected = " before ".join(f"{kind}{m}" for kind in kinds) + ", each once"
                    value = " ".join(words[k] for k in sorted(sum(at, []))) or "nothing"
                    problems.append(Problem(f"{place}: stage {stage}, micro-batch {m}", value, expected, "add or move actions"))
    return problems[:10]


SCHEDULES: dict[ScheduleName, ScheduleKind] = {
    "gpipe": ScheduleKind(_gpipe, may_share_devices=True, is_rematerialised=True),
    "1f1b": ScheduleKind(_1f1b, is_steady=True),
    "interleaved": ScheduleKind(_interleaved, may_share_devices=True, is_steady=True),
    "zb-h1": ScheduleKind(_zero_bubble, splits_backward=True, is_steady=True),
    "pipedream": ScheduleKind(_pipedream, is_synchronous=False),
    "own": ScheduleKind(_own, may_share_devices=True),
}
