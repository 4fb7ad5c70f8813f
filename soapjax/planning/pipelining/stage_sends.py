"""What a pipeline sends in one step, program by program: inside stages, among their replicas, and from stage to stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soapjax.costs.rules.links import COLLECTIVES, TRANSFER
from soapjax.search.stages.stage_flows import CrossingBytes
from soapjax.simulate.pipeline_tasks import StageLoad
from soapjax.strategy.pipeline import Pipeline
from soapjax.strategy.plan import SentPart
from soapjax.strategy.schedules import groups_of, kind_of, recomputes_apart, splits_backward


def sends_of_stage(pipeline: Pipeline, i: int, once: Sequence[tuple[str, SentPart]]) -> list[SentPart]:
    """What each device of a stage sends in one step, program by program, from what one pass and one update send."""
    stage, is_split = pipeline.stages[i], splits_backward(pipeline)
    passes = pipeline.num_microbatches // stage.replicas
    found = []
    for kind, part in once:
        name = "backward" if kind == "weights" and not is_split else kind
        rows = [(f"{name} {i}", 1 if kind in ("update", "gather") and kind_of(pipeline).is_synchronous else passes)]
        if stage.rematerialise and kind == "forward":
            rows.append((f"{'recompute' if recomputes_apart(pipeline, i) else 'backward'} {i}", passes))
        for program, times in rows:
            found.append(part.model_copy(update={"program": program, "bytes": {k: times * b for k, b in part.bytes.items()}}))
    return found


def sends_among_replicas(pipeline: Pipeline, i: int, load: StageLoad, num_tasks: int) -> list[SentPart]:
    """Replicas sum up the gradients of each round, by an all-reduce over the devices that hold the same part of them."""
    replicas = pipeline.stages[i].replicas
    size = pipeline.num_microbatches // replicas * 2 * (replicas - 1) / replicas * load.gradient_bytes
    sent = {"all-reduce": int(size)}
    found = SentPart(task=num_tasks, operator=f"stage {i}", reason="gradients of replicas", bytes=sent, program=f"update {i}")
    return [found] if size else []


def sends_between(num_tasks: int, crossing: Mapping[tuple[int, int], CrossingBytes], num: int) -> list[SentPart]:
    """What stages send one another in a step of `num` micro-batches."""
    found = []
    for (a, b), sizes in sorted(crossing.items()):
        rows = (
            (a, b, num * sizes.forward, "what it reads"), (b, a, num * sizes.backward, "gradients"),
            (a, b, sizes.parameters, "parameters that both read"), (b, a, sizes.sums, "sums of their gradients"),
        )  # fmt: skip
        for source, target, size, what in rows:
            if size:
                found.append(
                    SentPart(
                        task=num_tasks, operator=f"stage {source}", reason=f"{what}, to stage {target}",
                        bytes={TRANSFER: int(size)}, program=f"send {source} to {target}",
                    )
                )  # fmt: skip
    return found


def mean_sent_bytes(pipeline: Pipeline, sends: Sequence[SentPart], num_devices: int) -> dict[str, int]:
    """What a device of a pipeline sends in one step, on average over all devices."""
    total: dict[str, float] = {}
    for part in sends:
        many = 1 if TRANSFER in part.bytes else len(pipeline.stages[int(part.program.split()[1])].devices)
        for kind, size in part.bytes.items():
            total[kind] = total.get(kind, 0.0) + many * size
    return {kind: int(total[kind] / num_devices) for kind in COLLECTIVES if kind in total}


def peak_sent_bytes(pipeline: Pipeline, sends: Sequence[SentPart]) -> float:
    """What the device of a pipeline that sends most sends in one step.

    Transfers are shared out among the devices of the stage that sends.
    """
    groups = {i: g for g, group in enumerate(groups_of(pipeline)) for i in group}
    total: dict[int, float] = {}
    for part in sends:
        words, size = part.program.split(), float(sum(part.bytes.values()))
        stage = int(words[1])
        if TRANSFER in part.bytes:
            if groups[stage] == groups[int(words[3])]:
                continue  # stages on the same devices
            size /= len(pipeline.stages[stage].devices)
        total[groups[stage]] = total.get(groups[stage], 0.0) + size
    return max(total.values(), default=0.0)
