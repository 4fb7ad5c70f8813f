"""What a search has found so far, and whether its budget is spent."""

from __future__ import annotations

import time

from soapjax.search.problem import Budget, Evaluation
from soapjax.strategy.configs import Strategy

DEFAULT_PROPOSALS = 100_000
TIME_DECIDED = "what was searched depended on the clock: another run may find another plan, one by --proposals the same"


class Record:
    """Of one search, which began with `first` at `begin`."""

    def __init__(self, budget: Budget, begin: float, first: Evaluation):
        self.budget, self.begin = budget, begin
        self.limit = budget.num_proposals
        if self.limit is None and budget.seconds is None:
            self.limit = DEFAULT_PROPOSALS
        self.done, self.best_at = 0, 0
        self.began = self.best_elapsed = self.elapsed  # compiling the simulator is no lack of improvement
        self.lowest_s = first.cost
        self.candidates = [first.strategy]
        self.history = [(0, self.elapsed, first.cost)]
        self.notes: list[str] = []

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begin

    def left(self) -> int:
        """Proposals."""
        return DEFAULT_PROPOSALS if self.limit is None else self.limit - self.done

    def spent(self) -> float:
        """Which part of the budget, from the first judged strategies on."""
        seconds = self.budget.seconds
        of_time = 0.0 if seconds is None else (self.elapsed - self.began) / max(seconds - self.began, 1e-9)
        return max(of_time, 0.0 if self.limit is None else self.done / self.limit)

    def time_decides(self) -> None:
        """Says so: the clock decided what is judged, not only when the search ends."""
        if TIME_DECIDED not in self.notes:
            self.notes.append(TIME_DECIDED)

    def offer(self, strategy: Strategy, cost_s: float) -> None:
        if cost_s < self.lowest_s:
            self.lowest_s, self.best_at, self.best_elapsed = cost_s, self.done, self.elapsed
            self.candidates.append(strategy)
            self.history.append((self.done, self.elapsed, cost_s))

    def settle(self, best: Evaluation) -> None:
        """The best so far is this: what was offered before was judged by something else than the whole step."""
        self.lowest_s = best.cost
        self.candidates.append(best.strategy)
        self.history = [h for h in self.history if h[2] > best.cost] + [(self.done, self.elapsed, best.cost)]

    def tell(self) -> None:
        if self.budget.progress is not None:
            self.budget.progress(self.done, self.lowest_s, self.elapsed)

    def stopped_by(self, *, has_walked: bool) -> str | None:
        """Why the search ends now, if it does: half of the budget without an improvement is enough, once chains have walked."""
        if self.limit is not None and self.done >= self.limit:
            return "proposals"
        seconds = self.budget.seconds
        if seconds is not None and self.elapsed >= seconds:
            return "seconds"
        if not has_walked:
            return None
        if self.limit is not None:
            is_idle = self.done - self.best_at > self.limit / 2
        else:
            is_idle = self.elapsed - self.best_elapsed > seconds / 2
        return "converged" if is_idle else None
