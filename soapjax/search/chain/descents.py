"""What comes before the walk: descents from the best start, from a random one and from the additive optimum (later_start.py), and
perturbations of the best end (descending.py).

A step of many equal blocks descends with few of them first (shortening.py), and as a whole only for a short time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from soapjax.jit.array_types import Array
from soapjax.jit.beside import Beside
from soapjax.search.chain.compiling import CHAINS_FROM, OF_A_DESCENT
from soapjax.search.chain.record import Record
from soapjax.search.chain.starting_points import numpy_rng
from soapjax.search.descent.assignments import Assignments
from soapjax.search.descent.descending import Descent, Perturbations
from soapjax.search.descent.leaner import Leaner
from soapjax.search.descent.shortening import FewerBlocks
from soapjax.search.problem import Evaluation, Judging
from soapjax.simulate.simulator import BATCH
from soapjax.strategy.configs import Strategy
from soapjax.strategy.space import SearchSpace

AT_ONCE = 2  # descents that have a round at the same time
RACED = 1000  # strategies that a descent judges before it may be given up for a better one
MAX_FAILED = 10  # perturbations in a row without an improvement, small ones and large ones, after which chains walk
PERTURBATIONS = (("moved",), ("leaner", "exchanged", "reranked"))  # small ones beside large ones
STARTING_DRAWS = 64  # of all axes ranked anew in the whole graph: the best of them is where the descent from a random start begins
# Of the budget: until when starts may descend, and be perturbed. Chains judge ten times as many strategies a second, so that of a
# budget in seconds they need less, and of few proposals nearly none: as many as descents of a few hundred operators take come
# first. Where no chains walk, a rest is for the whole step after one with fewer blocks.
OF_PROPOSALS, OF_SECONDS, ALONE = 0.3, (0.6, CHAINS_FROM), (0.8, 0.85)
PERTURBED = 0.1  # behind that part of the proposals
# Of a number of proposals, where no chains follow: perturbations end when so many made it no faster than `LITTLE`, and then those
# of one more descent, from another random start. Of 48 layers of width 8,192 on 64 H100 one seed of six is 3.0 % behind without
# that, none with it. (With two more BERT on 64 A100 is 0.7 % behind its best seed instead of 1.1; GPT-3 175B takes 4 s longer.)
IDLE, IDLE_AGAIN, LITTLE = 0.18, 0.15, 0.002
WHOLE_AFTER_FEWER = 0.006  # of the budget: what the descent of the whole step may take after one with fewer blocks
TIGHTENED = 0.05  # of the budget: what going on with less memory may take, where the whole step takes more
MOST_TIGHTENED = 3  # times
OF_FEWER = 500  # generators before those that descents with fewer blocks draw from
MOST_WHOLE = 8  # of the best with fewer blocks that are judged in the whole step

Later = Beside[Evaluation | None]  # a start that is looked for meanwhile
Found = tuple[list[Evaluation], str | None]  # best first; and why the search is to stop there


class SearchRun(NamedTuple):
    """What the parts of one search share."""

    key: Array
    record: Record
    pool: ThreadPoolExecutor  # of two threads
    programs: Beside[None] | None  # compiled meanwhile; None where no chains are to walk

    @property
    def is_ready(self) -> bool:
        """Whether chains can walk."""
        return self.programs is not None and self.programs.is_ready

    @property
    def is_compiling(self) -> bool:
        return self.programs is not None and self.programs.is_running


def _until(limit: int | None) -> tuple[float, float]:
    """Of a budget of so many proposals, or of seconds."""
    if limit is None:
        return OF_SECONDS
    descended = min(max(OF_PROPOSALS, OF_A_DESCENT / limit), OF_SECONDS[0])
    return descended, descended + PERTURBED


class Descents:
    """Descents and perturbations of one search, two side by side.

    Args:
      problem: judges strategies of `space`.
      for_whole: such a strategy -> that of the step.
      number: of the last generator that others have drawn from.
    """

    def __init__(
        self, run: SearchRun, problem: Judging, space: SearchSpace, *,
        for_whole: Callable[[Strategy], Strategy] = lambda strategy: strategy, number: int = 0,
    ):  # fmt: skip
        self.problem = problem
        self.search, self.record = run, run.record
        self.until = ALONE if run.programs is None else _until(run.record.limit)
        self.moves, self.for_whole, self.number = Assignments(space), for_whole, number
        self.leaner = Leaner()  # of all descents, not of perturbations
        self.since = 0  # of the proposals: when it started, or started again

    def _rng(self) -> np.random.Generator:
        self.number += 1
        return numpy_rng(self.search.key, self.number)

    def run(self, begun: list[Evaluation], later: Later | None = None) -> Found:
        """All starts, of which the worst is a random one, and what was found from some of them and from the `later` one."""
        begun = sorted(begun, key=lambda e: e.rank)
        ends = self._descended([begun[0], self._ranked(begun[-1])], later, until=self.until[0])
        found = [self._perturbed(min(ends, key=lambda e: e.cost), until=self.until[1]), *ends]
        if self._ends_idle:
            self.since = self.record.done
            (end,) = self._descended([self._ranked(begun[-1])], until=self.until[0])
            found += [self._perturbed(end, until=self.until[1]), end]
        if self.search.programs is not None:
            self.search.programs.begin()
        if self.record.limit is None and self.record.spent() >= self.until[1]:
            self.record.time_decides()
        return self._all([*found, *begun])

    def on(self, begun: list[Evaluation], share: float) -> Found:
        """A descent from the best start, for a share of the budget."""
        begun = sorted(begun, key=lambda e: e.rank)
        return self._all([*self._descended(begun[:1], until=self.record.spent() + share), *begun])

    def go_on(self, begun: list[Evaluation]) -> Found:
        """More perturbations, until chains are ready to walk or the budget is spent; as `run`."""
        best, stopped_by = begun[0], None
        while not self.search.is_ready and not (stopped_by := self.record.stopped_by(has_walked=False)):
            best = self._perturbed(best, ends_when_ready=True)
        return [best, *begun], stopped_by

    def _all(self, found: list[Evaluation]) -> Found:
        distinct = {e.strategy.key(): e for e in found}
        return sorted(distinct.values(), key=lambda e: e.rank), self.record.stopped_by(has_walked=False)

    def _ranked(self, start: Evaluation) -> Evaluation:
        """The best of many draws that rank all axes of `start` anew: as random, but what follows one another is split alike."""
        count = min(STARTING_DRAWS, max(self.record.left(), 0))
        drawn = self.moves.reranked(self._rng(), start.strategy, count, every_axis=True)
        self.record.done += len(drawn)
        return min([start, *(self.problem.evaluate(drawn) if drawn else [])], key=lambda e: e.cost)

    def _descended(self, begun: list[Evaluation], later: Later | None = None, *, until: float) -> list[Evaluation]:
        """The ends of descents, from a `later` start too as soon as it is there; two have their rounds at a time, in turn.

        Of three the worst ends as soon as two have shown what they come to.
        """
        members = [Descent(self.problem, e, self._rng(), self.moves) for e in begun]
        racing = list(members)
        while self._may_descend(until):
            if later is not None:
                later.begin_by(self.record.spent())
            if later is not None and (later.is_ready or all(d.is_over for d in racing)):
                if (start := later.wait()) is not None:
                    members.append(Descent(self.problem, start, self._rng(), self.moves))
                    racing = [members[-1], *racing]
                later = None
            shown = [d for d in racing if d.is_over or d.judged >= RACED]
            if len(racing) > AT_ONCE <= len(shown):
                racing.remove(max(shown, key=lambda d: d.best.cost))
            # While a start is looked for, one of two cores is left to that.
            at_once = AT_ONCE - (later is not None and later.is_running)
            if not (active := [d for d in racing if not d.is_over][:at_once]):
                break
            self._one_round(active)
            racing = [*(d for d in racing if d not in active), *active]
        for d in members:
            self.leaner.offer(d.leaner.front)
        unused = later.wait() if later is not None and later.is_ready else None
        return [*(d.best for d in members), *([] if unused is None else [unused])]

    def _may_descend(self, until: float) -> bool:
        record = self.record
        if record.spent() >= until and record.limit is None:
            record.time_decides()
        return record.spent() < until and record.stopped_by(has_walked=False) is None

    def _perturbed(self, best: Evaluation, *, until: float = 1.0, ends_when_ready: bool = False) -> Evaluation:
        """Small perturbations beside large ones, until many of both in a row have failed, or that part of the budget is spent."""
        record = self.record
        perturbations = [
            Perturbations(self.problem, best, self._rng(), self.moves, kinds, self.leaner.front) for kinds in PERTURBATIONS
        ]
        while any(k.failed < MAX_FAILED for k in perturbations) and record.spent() < until:
            if record.stopped_by(has_walked=False) or (ends_when_ready and self.search.is_ready) or self._is_idle():
                break
            self._one_round(perturbations)
            best = min((k.best for k in perturbations), key=lambda e: e.cost)
            for k in perturbations:
                k.offer(best)
        return best

    @property
    def _ends_idle(self) -> bool:
        """By a number of proposals, of which no chains are to have the rest."""
        return self.record.limit is not None and self.search.programs is None

    def _is_idle(self) -> bool:
        """Whether a part of the proposals has brought next to nothing."""
        record = self.record
        if not self._ends_idle:
            return False
        idle = (IDLE_AGAIN if self.since else IDLE) * record.limit
        if record.done - self.since < idle:
            return False
        then = [cost for done, _, cost in record.history if done <= record.done - idle]
        return bool(then) and record.lowest_s > (1 - LITTLE) * then[-1]

    def _one_round(self, members: Sequence[Descent | Perturbations]) -> None:
        record = self.record
        limits = [min(BATCH, (record.left() + i) // len(members)) for i in range(len(members))]
        if self.search.programs is not None:
            self.search.programs.begin_by(record.spent())
        # While the chains' programs are compiled, one of two cores is left to that.
        run = map if self.search.is_compiling else self.search.pool.map
        record.done += sum(run(lambda d, limit: d.round(limit), members, limits))
        for d in members:
            record.offer(self.for_whole(d.best.strategy), d.best.cost)
        record.tell()


def with_fewer_blocks(
    run: SearchRun, fewer: FewerBlocks, begun: list[Evaluation], later: Later | None = None
) -> list[Evaluation]:  # fmt: skip
    """The starts, best first, and what was found with fewer blocks, judged in the whole step."""
    descents = Descents(run, fewer, fewer.space, for_whole=fewer.for_whole, number=OF_FEWER)
    found, stopped_by = descents.run(fewer.evaluate([fewer.of_whole(e.strategy) for e in begun]), later)
    usable = fewer.whole.usable_memory_bytes
    for tightened in range(MOST_TIGHTENED + 1):
        judged = fewer.whole.evaluate([fewer.for_whole(e.strategy) for e in found[:MOST_WHOLE]])
        begun = sorted([*judged, *begun], key=lambda e: e.rank)
        over = judged[0].memory_bytes / usable
        if over <= 1 or not found[0].is_feasible or stopped_by or tightened == MOST_TIGHTENED:
            break
        fewer.usable_memory_bytes /= over
        found, stopped_by = descents.on(fewer.evaluate([e.strategy for e in found]), TIGHTENED)
    run.record.settle(begun[0])
    return begun
