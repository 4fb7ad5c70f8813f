"""In which order every group of devices works on micro-batches.

A group is a set of devices that stages share: one stage, or several in an interleaved schedule. The order within a group
is all that a schedule fixes; what runs at the same time follows from the data. With S = 2 stages and M = 3 micro-batches,
F and B for forward and backward, U for the update:

    gpipe   F0 F1 F2 B2 B1 B0 U       1f1b   F0 F1 B0 F2 B1 B2 U
            F0 F1 F2 B2 B1 B0 U              F0 B0 F1 B1 F2 B2 U

GPipe: Huang et al. 2019, section 2.3. 1F1B: Narayanan et al. 2019 (PipeDream), section 3.2, here with one update at the end
of a step. Interleaved 1F1B: Narayanan et al. 2021 (Megatron-LM), section 2.2. `pipedream` updates after every backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from soapjax.errors import Problem, SoapjaxError
from soapjax.strategy.pipeline import Action, Pipeline


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
    num, last = pipeline.num_microbatches, len(pipeline.stages)
    orders = []
    for group in groups:
        if pipeline.schedule == "gpipe":
            forward = [Action("forward", i, m) for i in group for m in range(num)]
            orders.append([*forward, *(a._replace(kind="backward") for a in reversed(forward))])
        elif pipeline.schedule == "interleaved":
            orders.append(_interleaved(group, len(groups), num))
        elif pipeline.schedule == "1f1b":
            orders.append(_one_forward_one_backward(group[0], last - group[0], num))
        else:
            warm_up = _pipedream_in_flight([s.replicas for s in pipeline.stages])[group[0]]
            orders.append(_with_updates(_one_forward_one_backward(group[0], warm_up, num), pipeline.stages[group[0]].replicas))
    if pipeline.schedule != "pipedream":
        orders = [[*order, *(Action("update", i, 0) for i in group)] for order, group in zip(orders, groups, strict=True)]
    return tuple(map(tuple, orders))


def in_flight(pipeline: Pipeline) -> tuple[int, ...]:
    """The most micro-batches that each stage holds: their forward pass has run there, their backward pass has not."""
    held, most = [0] * len(pipeline.stages), [0] * len(pipeline.stages)
    for order in actions(pipeline):
        for action in order:
            held[action.stage] += {"forward": 1, "backward": -1, "update": 0}[action.kind]
            most[action.stage] = max(most[action.stage], held[action.stage])
    return tuple(most)


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
            waiting = [str(o[p]) for p, o in zip(position, orders, strict=True) if p < len(o)]
            raise AssertionError(f"the schedule {pipeline.schedule} deadlocks at {waiting}")
    return tuple(merged)


def needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """What must have run before an action, beside what stands before it in its group: the neighbour's part."""
    if action.kind == "forward":
        return (action._replace(stage=action.stage - 1),) if action.stage > 0 else ()
    if action.kind == "backward":
        last = action.stage == num_stages - 1
        return (action._replace(kind="forward"),) if last else (action._replace(stage=action.stage + 1),)
    return ()


def _one_forward_one_backward(stage: int, warm_up: int, num: int) -> list[Action]:
    """`warm_up` forward passes, then a backward and a forward pass in turn, then the remaining backward passes."""
    warm_up = min(warm_up, num)
    order = [Action("forward", stage, m) for m in range(warm_up)]
    for m in range(num):
        order.append(Action("backward", stage, m))
        if warm_up + m < num:
            order.append(Action("forward", stage, warm_up + m))
    return order


def _interleaved(group: Sequence[int], num_groups: int, num: int) -> list[Action]:
    """Megatron-LM's order: as many micro-batches as there are groups on one stage, then on the group's next stage."""
    rank, width = group[0], num_groups

    def visits(kind: str, stages: Iterable[int]) -> list[Action]:
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
    if shared and name in ("1f1b", "pipedream"):
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
        if r != 1 and name != "pipedream":
            expected = "1: only pipedream deals whole minibatches out to replicas"
            problems.append(Problem(place, str(r), expected, "split the stage's batch by an axis of its mesh"))
        elif r < 1 or len(stage.devices) % r or num % r:
            expected = f"a divisor of its {len(stage.devices)} devices and of {num} minibatches"
            problems.append(Problem(place, str(r), expected, "choose another number of replicas or of minibatches"))
    if problems:
        raise SoapjaxError(problems)
