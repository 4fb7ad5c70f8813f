"""The joint search of pipelines: stages, devices, the plan inside, micro-batches, schedule and rematerialisation at once.

A choice is priced by the pipeline simulation of its stages' loads (stage_problem.py): a bubble is idle time there,
recomputation is time, and what does not fit is penalised as in every search. Starts are GPipe's balanced partitions
and PipeDream's dynamic program, for every number of stages, micro-batches and schedule; the best go on by Metropolis-Hastings. The
number of stages is fixed within a chain, so every move has its reverse, as likely:

    boundary    between two stages, some operators on or back
    devices     of two groups, any split of their sum
    inside      of one group, or of all by the same step: data parallelism, Megatron's pairs over the fastest axes,
                parameters as used or sharded
    micro-batches, schedule, rematerialisation of one stage

The asynchronous schedule of PipeDream trains other weights, so it is planned only where it is asked for.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from soapjax import interrupts
from soapjax.errors import Problem, SoapjaxError
from soapjax.search.gpipe import balanced_partition
from soapjax.search.pipedream import Memory, pipedream
from soapjax.search.stage_problem import Choice, Priced, StageProblem

BETA = 100.0  # of the chain: a choice 1 % slower than the start is accepted with probability 1/e
CHAINS = 3
DEFAULT_PROPOSALS = 600


class StageSearch(NamedTuple):
    """What a search of pipelines found; `baselines` are the best of every start by its name."""

    best: Priced
    baselines: dict[str, Priced]
    num_proposals: int
    search_s: float
    stopped_by: str


def _partitions(problem: StageProblem, num: int, stages: int) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(name, bounds, device counts) from GPipe's and PipeDream's planners."""
    layers, marks = problem.layers(num)
    if stages > layers.num_layers:
        return
    devices = problem.topology.num_devices
    parts = balanced_partition(layers, stages)
    bounds = (0, *(marks[p[-1] + 1] for p in parts))
    if devices % stages == 0:
        yield "gpipe", bounds, (devices // stages,) * stages
    else:
        yield "gpipe", bounds, (1,) * stages
    if stages <= devices and layers.num_layers > 1:
        found = pipedream(layers, problem.topology, memory=Memory(is_limited=False), num_stages=stages, chain=True)
        yield "pipedream", (0, *(marks[s.layers[-1] + 1] for s in found.stages)), tuple(len(s.devices) for s in found.stages)


def _starts(problem: StageProblem) -> Iterator[tuple[str, Choice]]:
    for stages in problem.stages:
        for num in problem.microbatches:
            for name, bounds, counts in _partitions(problem, num, stages):
                for schedule in problem.schedules:
                    keeps = (True,) if problem.always_rematerialise else (False, True)
                    for again in keeps:
                        if schedule == "interleaved":
                            if name != "gpipe" or num % stages or 2 * stages > len(problem.loads.forward):
                                continue
                            layers, marks = problem.layers(num)
                            if 2 * stages > layers.num_layers:
                                continue
                            parts = balanced_partition(layers, 2 * stages)
                            cut = (0, *(marks[p[-1] + 1] for p in parts))
                        else:
                            cut = bounds
                        choice = Choice(schedule, num, cut, counts, (0,) * len(counts), (again,) * (len(cut) - 1))
                        yield f"{schedule}{', rematerialised' if again else ''}", choice


Move = Callable[[np.random.Generator, StageProblem, Choice], Choice | None]


def _move_boundary(rng: np.random.Generator, problem: StageProblem, c: Choice) -> Choice | None:
    if c.num_stages < 2:
        return None
    i = int(rng.integers(1, c.num_stages))
    step = int(rng.choice([1, 2, 4, 8])) * int(rng.choice([-1, 1]))
    cuts = problem.cuts
    at = int(np.searchsorted(cuts, c.bounds[i])) + step
    if not 0 <= at < len(cuts) or not c.bounds[i - 1] < cuts[at] < c.bounds[i + 1]:
        return None
    return dataclasses.replace(c, bounds=(*c.bounds[:i], cuts[at], *c.bounds[i + 1 :]))


def _move_devices(rng: np.random.Generator, problem: StageProblem, c: Choice) -> Choice | None:
    if len(c.counts) < 2:
        return None
    i, j = map(int, rng.choice(len(c.counts), 2, replace=False))
    total = c.counts[i] + c.counts[j]
    mine = int(rng.integers(1, total))
    counts = list(c.counts)
    counts[i], counts[j] = mine, total - mine
    return dataclasses.replace(c, counts=tuple(counts))


def _move_inside(rng: np.random.Generator, problem: StageProblem, c: Choice) -> Choice | None:
    inner = list(c.inner)
    most = 3 * (1 + math.ceil(math.log2(problem.topology.num_devices + 1)))
    picked = int(rng.integers(most))
    if rng.random() < 0.5:
        inner = [(i + picked) % most for i in inner]
    else:
        inner[int(rng.integers(len(inner)))] = picked
    return dataclasses.replace(c, inner=tuple(inner))


def _move_microbatches(rng: np.random.Generator, problem: StageProblem, c: Choice) -> Choice | None:
    return dataclasses.replace(c, num_microbatches=int(rng.choice(problem.microbatches)))


def _move_schedule(rng: np.random.Generator, problem: StageProblem, c: Choice) -> Choice | None:
    return dataclasses.replace(c, schedule=str(rng.choice(problem.schedules)))


def _move_memory(rng: np.random.Generator, problem: StageProblem, c: Choice) -> Choice | None:
    again = list(c.rematerialise)
    i = int(rng.integers(len(again)))
    again[i] = not again[i]
    return dataclasses.replace(c, rematerialise=tuple(again))


MOVES: tuple[Move, ...] = (
    _move_boundary, _move_boundary, _move_devices, _move_inside, _move_microbatches, _move_schedule, _move_memory,
)  # fmt: skip


def search_stages(
    problem: StageProblem, *, seed: int = 0, num_proposals: int | None = None, seconds: float | None = None,
    progress: Callable[[int, float, float], None] | None = None,
) -> StageSearch:  # fmt: skip
    """The best pipeline found: from all starts, then by chains from the best of them.

    Args:
      num_proposals, seconds: budget of the chains; DEFAULT_PROPOSALS where neither is given. Ctrl-C ends them early.
    Raises: SoapjaxError where no pipeline is possible; KeyboardInterrupt where none has been priced yet.
    """
    begin = time.monotonic()
    if num_proposals is None and seconds is None:
        num_proposals = DEFAULT_PROPOSALS
    best_of: dict[str, Priced] = {}
    by_stages: dict[int, Priced] = {}
    done, stopped = 0, "proposals"

    def better(a: Priced, b: Priced | None) -> bool:
        return b is None or a.rank < b.rank

    try:
        with interrupts.searching():
            for name, choice in _starts(problem):
                if problem.is_valid(choice):
                    found = problem.price(choice)
                    if better(found, best_of.get(name)):
                        best_of[name] = found
                    if better(found, by_stages.get(choice.num_stages)):
                        by_stages[choice.num_stages] = found
                interrupts.check()
    except KeyboardInterrupt:
        if not by_stages:
            raise
        stopped = "interrupted"
    if not best_of:
        stages, batches = (" or ".join(map(str, x[:8])) for x in (problem.stages, problem.microbatches))
        value = f"{stages} stages and {batches} micro-batches on {problem.topology.num_devices} devices"
        remedy = "ask for another number of stages or micro-batches, or for more devices"
        raise SoapjaxError(Problem("pipeline", value, f"what {' or '.join(problem.schedules)} can run", remedy))
    seeds = sorted(by_stages.values(), key=lambda p: p.rank)[:CHAINS]
    best, reference = seeds[0], seeds[0].cost
    rng = np.random.default_rng(seed)
    share = None if num_proposals is None else -(-num_proposals // len(seeds))
    if stopped == "interrupted":
        return StageSearch(best, best_of, done, time.monotonic() - begin, stopped)
    try:
        with interrupts.searching():
            for k, at in enumerate(seeds):
                chain = 0
                while (share is None or chain < share) and (
                    seconds is None or time.monotonic() - begin < seconds * (k + 1) / len(seeds)
                ):
                    chain += 1
                    done += 1
                    move = MOVES[int(rng.integers(len(MOVES)))](rng, problem, at.choice)
                    uniform = rng.random()
                    if move is None or not problem.is_valid(move):
                        continue
                    found = problem.price(move)
                    if uniform < math.exp(min(0.0, BETA * (at.cost - found.cost) / reference)):
                        at = found
                    if better(found, best):
                        best = found
                    if progress is not None and done % 16 == 0:
                        progress(done, best.timeline.step_time_s, time.monotonic() - begin)
            if seconds is not None and (num_proposals is None or done < num_proposals):
                stopped = "seconds"
    except KeyboardInterrupt:
        stopped = "interrupted"
    return StageSearch(best, best_of, done, time.monotonic() - begin, stopped)
