"""Where chains begin, made good before they walk: descents in moves of many operators at once (assignments.py).

A round takes a batch of strategies that were not judged before, from random draws or from a *sweep*: every value on
every axis of every group, and every storage, one group after the other in random order. It simulates them and takes
the best if it is better; what else was better is tried on top of it in the next round. What has helped goes on, sweep or draws;
what has not gives way to the other. Where a whole sweep has not helped, some of what it tried may help together (trades.py).

Where that has not helped either, *perturbations* follow (iterated local search: Lourenço, Martin, Stützle 2003), of four kinds:

* moved: a few moves at once from the best, whatever they cost, and a short descent from there;
* exchanged: two mesh axes of one size change places in the whole graph. Of little consequence by itself, where their links are
  alike, but the order of axes decides which sums can be scattered, and the descent that follows splits layers in another way;
* reranked: some axes are ranked anew in the whole graph, and a whole descent follows; what keeps a descent from the best is most
  often how many axes split the batch, how many the width, and no move of one axis gets from one to the other;
* leaner: where the device is nearly full, something that was judged, hardly slower than the best, and takes less memory, and a
  whole descent from there (leaner.py).

What ends lower is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from soapjax.search.descent.assignments import Assignments
from soapjax.search.descent.leaner import Leaner
from soapjax.search.descent.trades import overlaid, traded
from soapjax.search.problem import Evaluation, Judging
from soapjax.simulate.simulator import BATCH
from soapjax.strategy.configs import Strategy

# Rounds in a row without an improvement after which draws follow the sweep, and the sweep draws. (One or two of the sweep instead
# of three: of four models and three seeds each no better, 15,000 proposals.)
SWEPT_ROUNDS, DRAWN_ROUNDS = 3, 1
PATIENCE = 24  # rounds without an improvement and with the sweep at its end, after which a descent is over
PERTURBED_MOVES = (2, 5)  # of one small perturbation, at least and at most
PERTURBED_PATIENCE = 6  # of the descent after a small perturbation
MOST_RERANKED = 5  # a perturbation of that kind takes the best of 2 to the power of 0 to 5 draws: the first is the boldest
_MOST_MERGED = 6  # improvements that are tried together
# Moves that are made at once: the first take as long as forty more, which are of no use once something better is found.
_AT_ONCE = BATCH // 2, 4 * BATCH  # right after that, and at most
_TRIES = 8  # so many times, for as many as are wanted that were not judged before


class Descent:
    """One descent from `start`; what it judges depends on `rng` alone."""

    def __init__(
        self, problem: Judging, start: Evaluation, rng: np.random.Generator, moves: Assignments, *,
        patience: int = PATIENCE, sweeps: bool = True, leaner: Leaner | None = None,
    ):  # fmt: skip
        """`leaner` takes note of what is judged."""
        self.problem, self.best, self.rng, self.moves, self.patience = problem, start, rng, moves, patience
        self.leaner = Leaner() if leaner is None else leaner
        self.seen = {start.strategy.key()}
        self.merged: list[Strategy] = []
        self.drawn: list[Strategy] = []  # from the best, and not looked at yet
        self.around: list[Evaluation] = []  # judged since the best is the best
        self.has_traded = False
        self.quiet = self.judged = 0
        self.is_over = False
        self.is_sweeping, self.failed = False, 0  # rounds in a row without an improvement, since the last turn
        # Of the moves of a sweep; those on several axes come last.
        self.orders: tuple[np.ndarray, ...] = self.moves.swept(rng) if sweeps else ()
        self.next = [0] * len(self.orders)
        self.since = 0  # so many moves of the sweep did not help

    def round(self, limit: int = BATCH) -> int:
        """Judges up to `limit` new strategies and gives their number."""
        drawn = self._fresh(min(limit, BATCH))
        if not drawn:
            self._trade()
            return 0
        found = sorted(self.problem.evaluate(drawn), key=lambda e: e.cost)
        self.judged += len(drawn)
        self.leaner.offer(found)
        better = [e.strategy for e in found if e.cost < self.best.cost][:_MOST_MERGED]
        self.merged = self.moves.divided(self.best.strategy, overlaid(self.best.strategy, better))
        self.failed = 0 if better else self.failed + 1
        if self.failed >= (SWEPT_ROUNDS if self.is_sweeping else DRAWN_ROUNDS):
            self.is_sweeping, self.failed = not self.is_sweeping, 0
        self.quiet = 0 if better else self.quiet + 1
        self.since = 0 if better else self.since
        self.drawn = [] if better else self.drawn
        self.around = [] if better else [*self.around, *found]
        self.has_traded &= not better
        self.best = min(self.best, found[0], key=lambda e: e.cost)
        if self.quiet >= self.patience and self.since >= self.num_swept:
            self._trade()
        return len(drawn)

    @property
    def num_swept(self) -> int:
        """Moves of a whole sweep."""
        return sum(map(len, self.orders))

    def _trade(self) -> None:
        """What may help together comes next, once for each best; the descent is over where nothing may."""
        self.merged = [] if self.has_traded else traded(self.best, self.around, self.problem.usable_memory_bytes, BATCH)
        self.has_traded, self.is_over = True, not self.merged

    def _fresh(self, count: int) -> list[Strategy]:
        """Up to `count` strategies that were not judged before: what was merged, then the sweep or draws."""
        found = self._unseen(self.merged[:count])
        self.merged = []
        if self.is_sweeping:
            found += self._swept(count - len(found))
        return found + self._random(count - len(found))

    def _unseen(self, strategies: list[Strategy]) -> list[Strategy]:
        """Those of them that were not judged before; they count as judged from now on."""
        fresh = []
        for one in strategies:
            if (key := one.key()) not in self.seen:
                self.seen.add(key)
                fresh.append(one)
        return fresh

    def _swept(self, count: int) -> list[Strategy]:
        """The next `count` moves of the sweep, fewer once all of them have not helped."""
        found: list[Strategy] = []
        while len(found) < count and self.since < self.num_swept:
            i = int(self.since >= len(self.orders[0]))
            order, left = self.orders[i], sum(map(len, self.orders[: i + 1])) - self.since
            chosen = order[(self.next[i] + np.arange(min(_AT_ONCE[0], left))) % len(order)]
            for one in self.moves.single(self.best.strategy, chosen):
                self.next[i], self.since = (self.next[i] + 1) % len(order), self.since + 1
                found += self._unseen([one])
                if len(found) == count:
                    break
        return found

    def _random(self, count: int) -> list[Strategy]:
        """`count` random moves, fewer where most of what is drawn was judged before."""
        found: list[Strategy] = []
        for tries in range(_TRIES):
            if len(found) == count:
                break
            if not self.drawn:
                at_once = min(_AT_ONCE[0] << (self.quiet + tries), _AT_ONCE[1])
                self.drawn = self.moves.draw(self.rng, [self.best.strategy] * at_once)
            while self.drawn and len(found) < count:
                found += self._unseen([self.drawn.pop()])
        return found


class Kind(NamedTuple):
    """The descent that follows a perturbation."""

    patience: int
    sweeps: bool
    swept_if_better: bool = False  # goes on with a sweep if it ends below the best


SWEPT = Kind(PATIENCE, sweeps=True)
KINDS = {
    "moved": Kind(PERTURBED_PATIENCE, sweeps=False),
    "exchanged": Kind(PATIENCE // 2, sweeps=False, swept_if_better=True),
    "reranked": SWEPT,
    "leaner": SWEPT,
}


class Perturbations:
    """Perturbations of some kinds in turn, from the best known, `start` at first, and descents from there.

    What it judges depends on the best, on what was `judged` before, and on `rng` alone. "leaner" is not the only kind: there may be
    nothing leaner.
    """

    def __init__(
        self, problem: Judging, start: Evaluation, rng: np.random.Generator, moves: Assignments, kinds: Sequence[str],
        judged: Iterable[Evaluation] = (),
    ):  # fmt: skip
        self.problem, self.best, self.rng, self.moves = problem, start, rng, moves
        self.kinds, self.kind = itertools.cycle(kinds), KINDS[kinds[0]]
        self.draws = {"moved": self._moved, "exchanged": self._exchanged, "reranked": self._reranked}
        self.descent: Descent | None = None
        self.failed = 0  # perturbations in a row without an improvement
        self.exchanges: list[Strategy] = []  # of the best, not tried yet
        self.leaner = Leaner()
        self.leaner.offer(judged)

    def offer(self, best: Evaluation) -> None:
        """The next perturbation is from `best` if that is better."""
        if best.cost < self.best.cost:
            self.best, self.failed, self.exchanges = best, 0, []

    def round(self, limit: int = BATCH) -> int:
        """A perturbation, or one round of the descent after it; the number of strategies judged, `limit` at most."""
        if limit < 1:
            return 0
        if self.descent is None:
            start, judged = self._start(limit)
            self.descent = self._from(start, self.kind)
            return judged
        judged = self.descent.round(limit)
        if self.descent.is_over:
            found, is_swept = self.descent.best, self.descent.num_swept > 0
            goes_on = self.kind.swept_if_better and not is_swept and found.cost < self.best.cost
            self.failed += not goes_on
            self.offer(found)
            self.descent = self._from(found, SWEPT) if goes_on else None
        return judged

    def _start(self, limit: int) -> tuple[Evaluation, int]:
        """Where the next descent begins, of the next kind that there is; and how many strategies were judged for it."""
        while True:
            name = next(self.kinds)
            self.kind = KINDS[name]
            if name != "leaner":
                perturbed = self.draws[name](limit)
                return min(self.problem.evaluate(perturbed), key=lambda e: e.cost), len(perturbed)
            if (found := self.leaner.next(self.best, self.problem.usable_memory_bytes)) is not None:
                return found, 0

    def _from(self, start: Evaluation, kind: Kind) -> Descent:
        return Descent(
            self.problem, start, self.rng, self.moves, patience=kind.patience, sweeps=kind.sweeps, leaner=self.leaner
        )  # fmt: skip

    def _moved(self, limit: int) -> list[Strategy]:
        perturbed = [self.best.strategy]
        for _ in range(self.rng.integers(PERTURBED_MOVES[0], PERTURBED_MOVES[1] + 1)):
            perturbed = self.moves.draw(self.rng, perturbed)
        return perturbed

    def _exchanged(self, limit: int) -> list[Strategy]:
        """One exchange of the best, each of them once; axes are ranked anew where there is none."""
        if not self.exchanges:
            self.exchanges = self.moves.exchanged(self.rng, self.best.strategy)
        return [self.exchanges.pop()] if self.exchanges else self._reranked(limit)

    def _reranked(self, limit: int) -> list[Strategy]:
        count = min(2 ** int(self.rng.integers(0, MOST_RERANKED + 1)), limit)
        return self.moves.reranked(self.rng, self.best.strategy, count)
