"""Who of the job has stopped? One rank's judgement, from what all ranks say of themselves. channel.py carries it.

Every rank beats: it says once per second where it is (calls.py), and passes on what it has heard of the others, so that nobody
depends on one rank. A rank is named, with what it did last, that

    has died            its connections are closed and its port is gone
    has ended           with an error; or well, while others are in a call that it did not make
    is silent           no beat for the time-out: stopped, or its host or network is gone. A compilation is not silent.
    makes other calls   the n-th call is of another step there than elsewhere
    does not come       it is in no call for the time-out, while others are in the next one or at their end
    does nothing        it plans, compiles, dispatches, or runs on CPUs a call that others have left, and has used no processor
                        time for the time-out; or it is to look for the others, and does not
    all do nothing      all run one call on CPUs, and none has used processor time: each is said with its line
    does not end        all are at their end, which is not over within the time-out: each is said with its line
    does not wait       it runs the step, while another waits for all to agree on it, for the time-out
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from soapjax.errors import Problem
from soapjax.execute.processes.calls import RUNNING, WAITING, Calls, Where
from soapjax.execute.processes.start_up import Peer, named

BEAT_S = 1.0  # at most; a tenth of the time-out where that is less
IDLE = 0.02  # of a processor: less is nothing, of a rank that has work of its own
STILL = 0.005  # of one that runs: slow links take little, but more
MAX_NAMED = 8  # ranks, a line each
AGAIN = "see what it printed, and start all processes again"


class Watch:
    """What one rank knows of all.

    Args:
      peers: by rank.
      now: the clock, in seconds.
    """

    def __init__(
        self, rank: int, peers: Sequence[Peer], timeout_s: float, calls: Calls, now: Callable[[], float] = time.monotonic
    ):  # fmt: skip
        self.rank, self.peers, self.timeout_s, self.calls, self.now = rank, list(peers), timeout_s, calls, now
        self.beat_s = min(BEAT_S, timeout_s / 10)
        self.has_left = False  # a rank ended with an error of its own
        self._beats = 0
        self._rows: dict[int, tuple[int, Where]] = {}  # rank -> the number of its last beat, and where it was
        start = now()
        self._looked = start
        self._seen = {r: start for r in range(len(peers))}  # when its last beat was new here
        self._active = {(r, share): (0.0, start) for r in range(len(peers)) for share in (IDLE, STILL)}  # processor time, when
        self._since: dict[tuple[str, int], tuple[int, float]] = {}  # what may be wrong with a rank, in which call, since when
        self._died: set[int] = set()
        self._told: list[Problem] = []

    def table(self) -> dict[str, Any]:
        """A beat: where this rank is, and what it has heard of the others."""
        self._beats += 1
        self._enter(self.rank, self._beats, self.calls.where())
        return {"rows": [[r, beat, list(where)] for r, (beat, where) in self._rows.items()]}

    def hear(self, message: dict[str, Any]) -> None:
        if "stopped" in message:
            self._told = self._told or [Problem(*p) for p in message["stopped"]]
        for rank, beat, where in message.get("rows", ()):
            if rank != self.rank and beat > self._rows.get(rank, (0,))[0]:
                where = Where(*where)
                self._enter(rank, beat, where._replace(recent=tuple((n, name, digest) for n, name, digest in where.recent)))

    def _enter(self, rank: int, beat: int, where: Where) -> None:
        before = self._rows.get(rank)
        self._rows[rank], self._seen[rank] = (beat, where), self.now()
        moved = before is None or before[1][:4] != where[:4] or before[1].num_looks != where.num_looks
        for share in (IDLE, STILL):
            if moved or where.cpu_s - self._active[rank, share][0] > share * self.timeout_s:
                self._active[rank, share] = where.cpu_s, self.now()

    def died(self, rank: int) -> None:
        """Its connections are closed, and nobody listens at its port."""
        self._died.add(rank)

    def has_ended(self, rank: int) -> bool:
        return rank in self._rows and self._rows[rank][1].status is not None

    @property
    def all_have_ended(self) -> bool:
        return all(self.has_ended(r) for r in range(len(self.peers)))

    @property
    def all_are_fresh(self) -> bool:
        """Whether every rank has just given a sign of life, or has ended."""
        return all(self.has_ended(r) or self.is_fresh(r) for r in range(len(self.peers)))

    def is_fresh(self, rank: int) -> bool:
        """Whether it has just given a sign of life."""
        return self.now() - self._seen[rank] < 5 * self.beat_s

    def look(self) -> list[Problem]:
        """The ranks that have stopped, if any."""
        now = self.now()
        if now - self._looked > max(5 * self.beat_s, self.timeout_s / 4):
            self._forgive(now - self._looked)
        self._looked = now
        if self._told:
            return self._told
        for rule in (self._dead, self._silent, self._left, self._others_calls, self._ended_early, self._stuck, self._all_stuck):
            if found := rule():
                expected = f"all {len(self.peers)} ranks at work, in the same calls"
                return [Problem("the job", text, expected, remedy) for text, remedy in found[:MAX_NAMED]]
        return []

    def _forgive(self, gap_s: float) -> None:
        """This process itself was stopped so long: what the others did meanwhile it could not hear."""
        self._seen = {r: t + gap_s for r, t in self._seen.items()}
        self._active = {k: (cpu_s, t + gap_s) for k, (cpu_s, t) in self._active.items()}
        self._since = {k: (n, t + gap_s) for k, (n, t) in self._since.items()}

    def _where(self, rank: int) -> Where:
        return self._rows[rank][1] if rank in self._rows else Where()

    def _named(self, rank: int) -> str:
        return named(rank, self.peers[rank])

    def last(self, rank: int) -> str:
        """What it did last: "last seen 31 s ago in call 17 of train_step"."""
        if rank not in self._rows:
            return "never seen since the start"
        age_s = self.now() - self._seen[rank]
        return f"last seen {age_s:.{0 if age_s >= 10 else 1}f} s ago {self._where(rank)}"

    @property
    def _living(self) -> list[int]:
        return [r for r in range(len(self.peers)) if not self.has_ended(r)]

    def _dead(self) -> list[tuple[str, str]]:
        dead = sorted(r for r in self._died if not self.has_ended(r))
        remedy = "see what it printed, or who ended it, and start all processes again"
        return [(f"{self._named(r)} has died (its connections are closed): {self.last(r)}", remedy) for r in dead]

    def _silent(self) -> list[tuple[str, str]]:
        silent = [r for r in self._living if r != self.rank and self.now() - self._seen[r] > self.timeout_s]
        remedy = "see whether its process is stopped, or its host or network is gone; start all processes again"
        return [(f"{self._named(r)} silent for {self.timeout_s:g} s: {self.last(r)}", remedy) for r in silent]

    def _left(self) -> list[tuple[str, str]]:
        left = [r for r in self._rows if r != self.rank and self._where(r).status]
        self.has_left = bool(left)
        return [(f"{self._named(r)} {self._ending(self._where(r))}", AGAIN) for r in left]

    def _ending(self, where: Where) -> str:
        return f"has ended with status {where.status}{f' ({where.why})' if where.why else ''} {where}"

    def _others_calls(self) -> list[tuple[str, str]]:
        """The earliest call that not all who made it agree on; the fewer are named."""
        calls: dict[int, dict[int, tuple[str, int]]] = {}
        for rank in self._rows:
            for number, name, digest in self._where(rank).recent:
                calls.setdefault(number, {})[rank] = name, digest
        for number, made in sorted(calls.items()):
            if len(set(made.values())) < 2:
                continue
            common, _ = Counter(made.values()).most_common(1)[0]
            others = [(r, m) for r, m in sorted(made.items()) if m != common]
            rank = next(r for r, m in sorted(made.items()) if m == common)
            remedy = "call the same steps in the same order on all ranks"
            if all(name == common[0] for _, (name, _) in others):
                order = f"other calls before call {number} of {common[0]} than rank {rank}"
                return [(f"{self._named(r)} {self.last(r)}: {order}", remedy) for r, _ in others]
            return [
                (f"{self._named(r)} {self.last(r)}: call {number} is of {name}, on rank {rank} of {common[0]}", remedy)
                for r, (name, _) in others
            ]
        return []

    def _ended_early(self) -> list[tuple[str, str]]:
        """Ended well, but others are in a call that it did not make, or did not see to its end."""
        found = []
        for rank in [r for r in self._rows if self._where(r).status == 0]:
            mine = self._where(rank)
            further = [r for r in self._rows if self._where(r).num_calls > mine.num_calls]
            inside = [r for r in self._living if self._where(r).is_inside and self._where(r).num_calls == mine.num_calls]
            if further or (mine.is_broken and inside):
                other = self._where(r := (further or inside)[0])
                text = f"has ended with status 0 {'in' if mine.is_broken else 'after'} call {mine.num_calls} of {mine.name}"
                text = text if mine.num_calls > 0 else "has ended with status 0 before its first call"
                found.append((f"{self._named(rank)} {text}, rank {r} is {other.call()}", "make the same calls on all ranks"))
        return found

    def _stuck(self) -> list[tuple[str, str]]:
        found = []
        most = max((w.num_calls for _, w in self._rows.values()), default=0)
        any_ended = any(self.has_ended(r) for r in self._rows)
        heard = [r for r in self._living if r in self._rows and self.is_fresh(r)]  # others are silent, or will be
        waiting = {self._where(r).num_calls: r for r in heard if self._where(r).doing.startswith(WAITING)}  # call -> a rank
        for rank in heard:
            mine = self._where(rank)
            are_ahead = most > mine.num_calls or any_ended
            runs = mine.is_inside and mine.doing.startswith(RUNNING)
            limit_s = max(self.timeout_s, mine.busy_s)
            if self._lasts("out", rank, not mine.is_inside and are_ahead, mine, limit_s):
                text = f"in no call for {limit_s:g} s, {self._others_of(mine)}"
                remedy = 'make the same calls on all ranks; around long work of one, write "with soapjax.distributed.busy(...)"'
                found.append((f"{self._named(rank)} {self.last(rank)}: {text}", remedy))
            own_work = mine.is_inside and not runs  # waiting is work too: it looks for the others again and again
            is_late = runs and mine.doing == RUNNING and are_ahead
            if (own_work or is_late) and self.now() - self._active[rank, IDLE][1] > self.timeout_s:
                found.append((f"{self._named(rank)} {self.last(rank)}: does nothing for {self.timeout_s:g} s", AGAIN))
            if self._lasts("apart", rank, runs and mine.num_calls in waiting, mine):
                other = waiting[mine.num_calls]
                text = f"runs, rank {other} is {self._where(other).call()}"
                found.append((f"{self._named(rank)} {self.last(rank)}: {text}", "give all ranks arguments of the same shapes"))
        return found

    def _all_stuck(self) -> list[tuple[str, str]]:
        """All wait for each other. Of many ranks those are named whose line is not that of most."""
        ranks = range(len(self.peers))
        alike = {(self._where(r).num_calls, self._where(r).is_inside, self._where(r).doing) for r in ranks}
        if not self.all_are_fresh or len(alike) > 1 or not self._where(0).is_inside or self._where(0).doing != RUNNING:
            return []
        if any(self.now() - self._active[r, STILL][1] <= self.timeout_s for r in ranks):
            return []
        text = f"nor does any other rank anything for {self.timeout_s:g} s"
        return [(f"{self._named(r)} {self.last(r)}: {text}", AGAIN) for r in self._elsewhere(ranks)]

    def _elsewhere(self, ranks: Sequence[int]) -> Sequence[int]:
        """Those whose line is not that of most; all, where that tells nothing."""
        lines = Counter(self._where(r).at for r in ranks)
        most, _ = lines.most_common(1)[0]
        return [r for r in ranks if self._where(r).at != most] if len(ranks) > 2 and len(lines) > 1 else ranks

    def without_end(self) -> list[Problem]:
        """All have ended their program, and JAX's own ending, of all processes together, does not come to its end."""
        expected, remedy = f"all {len(self.peers)} ranks to end", "see what it does at its exit, or whether it was stopped"
        text = f"does not come to its end within {self.timeout_s:g} s"
        return [
            Problem("the job", f"{self._named(r)} {self.last(r)}: {text}", expected, remedy)
            for r in self._elsewhere(range(len(self.peers)))[:MAX_NAMED]
        ]

    def _others_of(self, mine: Where) -> str:
        ahead = [r for r in self._rows if self._where(r).num_calls > mine.num_calls]
        if ahead:
            return f"rank {ahead[0]} is {self._where(ahead[0]).call()}"
        ended = next(r for r in self._rows if self.has_ended(r))
        return f"rank {ended} has ended"

    def _lasts(self, what: str, rank: int, is_so: bool, mine: Where, limit_s: float | None = None) -> bool:
        """Whether it has been so for the time-out, or `limit_s`, in the same call, up to its last beat: since then nobody knows."""
        if not is_so:
            self._since.pop((what, rank), None)
            return False
        number, since = self._since.get((what, rank), (-1, 0.0))
        if number != mine.num_calls:
            self._since[what, rank] = mine.num_calls, self.now()
            return False
        return self._seen[rank] - since > (self.timeout_s if limit_s is None else limit_s)
