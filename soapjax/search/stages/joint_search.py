"""The joint search of pipelines: stages, devices, the plan inside, micro-batches, schedule and rematerialisation at once.

A choice is priced by the pipeline simulation of its stages' loads (stage_problem.py): a bubble is idle time there,
recomputation is time, and what does not fit is penalised as in every search. Starts are the best points of the grid that experts
tune by hand (grid.py), and for their numbers of stages PipeDream's dynamic program, which makes uneven stages; the best go on by
Metropolis-Hastings. The number of stages is fixed within a chain, so every move has its reverse, as likely:

    boundary    between two stages, some operators on or back
    devices     of two groups, any split of their sum
    inside      of one group, or of all by the same step: one of the inner strategies (stage_figures.py)
    micro-batches, schedule, rematerialisation of one stage

Of the best, what is inside its stages is searched operator by operator at last (inside_search.py), and taken where that pays.

The asynchronous schedule of PipeDream trains other weights, so it is planned only where it is asked for.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from soapjax.errors import Problem, SoapjaxError
from soapjax.helpers import interrupts
from soapjax.search.stages.choices import Choice, Priced
from soapjax.search.stages.grid import Grid
from soapjax.search.stages.inside_search import searched_inside
from soapjax.search.stages.pipedream_stages import Memory, pipedream
from soapjax.search.stages.stage_problem import ONLY_INTERLEAVED, StageProblem

MOST_TRIED = 480  # points of the grid whose stages are looked at
MOST_STARTS = 96  # of these that are priced
STARTS_SHARE = 0.4  # of the seconds, for starts
INSIDE_SHARE = 0.3  # of the seconds and of the proposals, for what is inside the stages of the best
MOST_UNEVEN = 64  # devices of PipeDream's dynamic program, which takes minutes for more
BETA = 100.0  # of the chain: a choice 1 % slower than the start is accepted with probability 1/e
CHAINS = 3
WORTH = 0.02  # relative step time that is worth another search
DEFAULT_PROPOSALS = 600


class StageSearch(NamedTuple):
    """What a search of pipelines found.

      baselines: the best of every start by its name.
      others: the best before the search inside its stages, and the best of every number of stages.
      is_bound: by memory: what fits only where every stage computes all again would, without that, be faster than all that fits.
    """

    best: Priced
    baselines: dict[str, Priced]
    others: tuple[Priced, ...]
    num_proposals: int
    search_s: float
    stopped_by: str
    is_bound: bool


def _uneven(problem: StageProblem, like: Choice) -> Choice | None:
    """PipeDream's partition into as many stages as a choice has, with its micro-batches and schedule, data parallelism inside."""
    layers, marks = problem.layers(like.num_microbatches)
    devices, stages = problem.topology.num_devices, like.num_stages
    if not 1 < stages <= min(layers.num_layers, devices) or stages != len(like.counts) or devices > MOST_UNEVEN:
        return None
    found = pipedream(layers, problem.topology, memory=Memory(is_limited=False), num_stages=stages, chain=True)
    bounds = (0, *(marks[s.layers[-1] + 1] for s in found.stages))
    counts = tuple(len(s.devices) for s in found.stages)
    return dataclasses.replace(like, bounds=bounds, counts=counts, inner=(0,) * len(counts))


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
    most = problem.most_inner
    picked = int(rng.integers(most))
    if rng.random() < 0.5:
        inner = [(i + picked) % most for i in inner]
    else:
        inner[int(rng.integers(len(inner)))] = picked
    return dataclasses.replace(c, inner=tuple(inner))


def _move_microbatches(rng: np.random.Generator, problem: StageProblem, c: Choice) -> Choice | None:
    return dataclasses.replace(c, num_microbatches=int(rng.choice(problem.microbatches)))


def _move_schedule(rng: np.random.Generator, problem: StageProblem, c: Choice) -> Choice | None:
    return dataclasses.replace(c, schedule=problem.schedules[int(rng.integers(len(problem.schedules)))])


def _move_memory(rng: np.random.Generator, problem: StageProblem, c: Choice) -> Choice | None:
    again = list(c.rematerialise)
    i = int(rng.integers(len(again)))
    again[i] = not again[i]
    return dataclasses.replace(c, rematerialise=tuple(again))


MOVES: tuple[Move, ...] = (
    _move_boundary, _move_boundary, _move_devices, _move_inside, _move_microbatches, _move_schedule, _move_memory,
)  # fmt: skip


Key = TypeVar("Key", str, int)


class _Best:
    """The best choices so far: of all, by the name of a start, by the number of stages."""

    def __init__(self):
        self.of_name: dict[str, Priced] = {}
        self.of_stages: dict[int, Priced] = {}
        self.best: Priced | None = None
        self.is_bound = False

    def see(self, found: Priced, name: str | None = None) -> None:
        if self.best is None or found.rank < self.best.rank:
            self.best = found
        if name is not None:
            _keep_better(self.of_name, name, found)
        _keep_better(self.of_stages, found.choice.num_stages, found)


def _keep_better(table: dict[Key, Priced], key: Key, found: Priced) -> None:
    if key not in table or found.rank < table[key].rank:
        table[key] = found


def search_stages(
    problem: StageProblem, *, seed: int = 0, num_proposals: int | None = None, seconds: float | None = None,
    progress: Callable[[int, float, float], None] | None = None, share_if_bound: float = 1.0,
) -> StageSearch:  # fmt: skip
    """The best pipeline found: from the best points of the grid by chains, then inside the stages of the best.

    Args:
      num_proposals: after the starts; DEFAULT_PROPOSALS where neither it nor `seconds` is given.
      seconds: of all of the search; a start that fits is looked for beyond them. Ctrl-C ends it early.
      share_if_bound: how much of them where memory binds, or nothing fits: the caller has other steps to search in then.
    Raises: SoapjaxError where no pipeline is possible; KeyboardInterrupt where none has been priced yet.
    """
    begin = time.monotonic()
    if num_proposals is None and seconds is None:
        num_proposals = DEFAULT_PROPOSALS
    seen, done, stopped, chained = _Best(), 0, "proposals", None

    def until(share: float) -> float:
        return math.inf if seconds is None else begin + share * seconds

    try:
        with interrupts.searching():
            _price_starts(problem, seen, until(STARTS_SHARE))
            if seen.best is None:
                raise SoapjaxError(_impossible(problem))
            if seconds is not None and (seen.is_bound or not seen.best.is_feasible):
                seconds *= share_if_bound
            for walk, share, of_seconds in _walks(problem, np.random.default_rng(seed), seen):
                chained = seen.best
                most = math.inf if num_proposals is None else math.ceil(share * num_proposals)
                for step, found in enumerate(walk, 1):
                    done += 1
                    seen.see(found)
                    if progress is not None and done % 16 == 0:
                        progress(done, seen.best.timeline.step_time_s, time.monotonic() - begin)
                    if step >= most:
                        break
                    if time.monotonic() >= until(of_seconds):
                        stopped = "seconds"
                        break
    except KeyboardInterrupt:
        if seen.best is None:
            raise
        stopped = "interrupted"
    good = (chained or seen.best, *sorted(seen.of_stages.values(), key=lambda p: p.rank))
    return StageSearch(
        seen.best, seen.of_name, good, num_proposals=done, search_s=time.monotonic() - begin, stopped_by=stopped,
        is_bound=seen.is_bound,
    )  # fmt: skip


def _walks(problem: StageProblem, rng: np.random.Generator, seen: _Best) -> Iterator[tuple[Iterator[Priced], float, float]]:
    """What follows the starts: walks, with their shares of the proposals, and of the seconds by which each ends.

    Nothing where an expert's points of the grid are asked for.
    """
    if problem.expert is not None:
        return
    seeds = sorted(seen.of_stages.values(), key=lambda p: p.rank)[:CHAINS]
    of_chain, of_seconds = (1 - INSIDE_SHARE) / len(seeds), (1 - INSIDE_SHARE - STARTS_SHARE) / len(seeds)
    for k, at in enumerate(seeds, 1):
        yield _chain(problem, rng, at, seeds[0].cost), of_chain, STARTS_SHARE + k * of_seconds
    yield searched_inside(problem, rng, seen.best), INSIDE_SHARE, 1.0


def _price_starts(problem: StageProblem, seen: _Best, until: float) -> None:
    """Prices the grid's best, and beside them uneven stages.

    The formula orders all points. Of the first MOST_TRIED, or as many as half of the time allows, the loads of their own stages
    tell memory, and the time but for what is sent. The best MOST_STARTS of these are simulated, which on a thousand devices takes
    a second each. Beyond the clock goes only the search for one that fits; what does not fit is simulated where nothing else is.
    """
    begin = time.monotonic()
    fits: list[tuple[float, int, str, Choice]] = []
    too_large: list[tuple[float, int, str, Choice]] = []
    for k, (name, _, choice) in enumerate(Grid(problem).choices()):
        if k >= MOST_TRIED or (fits and time.monotonic() >= begin + (until - begin) / 2):
            break
        memory = problem.memory_bytes(choice)
        if memory > problem.usable_bytes:
            too_large.append((memory, k, name, choice))
        else:
            if not fits:
                seen.see(problem.price(choice), name)  # Ctrl-C has something to give from now on
            fits.append((problem.estimated_s(choice), k, name, choice))
        interrupts.check()
    seen.is_bound = _is_bound(problem, [(seconds, choice) for seconds, *_, choice in fits])
    for *_, name, choice in sorted(fits)[:MOST_STARTS] or sorted(too_large)[:CHAINS]:
        seen.see(problem.price(choice), name)
        interrupts.check()
        if time.monotonic() >= until:
            break
    likes = seen.of_stages.values() if problem.expert is None else ()
    for like in [p.choice for p in sorted(likes, key=lambda p: p.rank)[:CHAINS]]:
        if time.monotonic() < until and (choice := _uneven(problem, like)) is not None and problem.is_valid(choice):
            seen.see(problem.price(choice), f"{choice.schedule}, uneven")
        interrupts.check()


def _is_bound(problem: StageProblem, fits: Sequence[tuple[float, Choice]]) -> bool:
    """Whether a choice would be faster than all of these, with their estimates, if it need not compute everything again."""
    again = [c for _, c in fits if all(c.rematerialise)]
    kept_s = (problem.estimated_s(dataclasses.replace(c, rematerialise=(False,) * c.num_stages)) for c in again)
    return min(kept_s, default=math.inf) < (1 - WORTH) * min((s for s, _ in fits), default=math.inf)


def _impossible(problem: StageProblem) -> Problem:
    stages, batches = (" or ".join(map(str, x[:8])) for x in (problem.stages, problem.microbatches))
    value = f"{stages} stages and {batches} micro-batches on {problem.topology.num_devices} devices"
    value += f", {problem.expert} in every stage" if problem.expert is not None else ""
    value += ", layouts fixed on all of them" if problem.exact.fixed else ""
    expected = f"what {' or '.join(problem.schedules)} can run"
    remedy = "ask for another number of stages or micro-batches, or for more devices"
    if problem.schedules == ONLY_INTERLEAVED:
        expected += ": several groups of devices, of several stages each, and a multiple of as many micro-batches"
    return Problem("pipeline", value, expected, remedy)


def _chain(problem: StageProblem, rng: np.random.Generator, at: Priced, reference_s: float) -> Iterator[Priced]:
    """Where a chain stands after each of its steps, without end."""
    while True:
        move = MOVES[int(rng.integers(len(MOVES)))](rng, problem, at.choice)
        uniform = rng.random()
        if move is not None and problem.is_valid(move):
            found = problem.price(move)
            if uniform < math.exp(min(0.0, BETA * (at.cost - found.cost) / reference_s)):
                at = found
            yield found
        else:
            yield at
        interrupts.check()
