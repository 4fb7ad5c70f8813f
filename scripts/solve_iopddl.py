"""Solves a problem of the ASPLOS 2025 contest on intra-operator parallelism (.json or .json.gz).

    python scripts/solve_iopddl.py problem.json.gz --seconds 60 --seed 0

The best cost is printed as it improves, on standard error; the last line of standard output is the solution, a JSON list
of one strategy index per node. Ctrl-C or SIGTERM end the search early with the best so far. Exit status: 0, a
feasible solution; 1, the solver failed (the best so far is printed all the same); 2, bad input; 3, no feasible solution exists or
was found (the least violating one is printed).
"""

from __future__ import annotations

import time

BEGIN = time.monotonic()  # --seconds counts from here, loading included

import argparse  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from typing import Any  # noqa: E402

from soapjax.additive.additive_problem import Score  # noqa: E402
from soapjax.additive.iopddl import load_problem  # noqa: E402
from soapjax.additive.solver import Best, solve  # noqa: E402
from soapjax.errors import Problem, SoapjaxError  # noqa: E402

AGAIN_S = 0.2  # between interrupts, if one is not enough
START_S = 0.5  # of a process, and of printing: kept free at the end
MAX_SEED = 2**63 - 1


def _described(score: Score, usage_limit: int) -> str:
    text = f"cost {score.cost}"
    if score.violations:
        text += f", {score.violations} forbidden choices"
    if score.excess:
        text += f", {score.excess} over the usage limit of {usage_limit}"
    return text


class Signals:
    """Signals, and the alarm, end what is under way by KeyboardInterrupt, until they are no longer heard.

    Again and again: an exception in a finalizer, or in JAX's hook after every garbage collection, is printed and forgotten.
    """

    def __init__(self) -> None:
        self.are_heard = True
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(name, self._handle)

    def _handle(self, *_: Any) -> None:
        if self.are_heard:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)
            raise KeyboardInterrupt

    def ignore(self) -> None:
        self.are_heard = False
        signal.setitimer(signal.ITIMER_REAL, 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--seconds", default="60", help="wall-clock budget, loading included")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--one-process", action="store_true", help="use one core only")
    options = parser.parse_args()
    wrong = []
    try:
        options.seconds = float(options.seconds)
    except ValueError:
        options.seconds = math.nan
        wrong.append(Problem("--seconds", "no number", "a positive number of seconds", "for example --seconds 60"))
    else:
        if not (options.seconds > 0 and math.isfinite(options.seconds)):
            wrong.append(
                Problem(
                    "--seconds",
                    str(options.seconds),
                    "a positive number: a budget of zero finds nothing",
                    "for example --seconds 60",
                )
            )
    try:
        options.seed = int(options.seed)
        if not 0 <= options.seed <= MAX_SEED:
            raise ValueError
    except ValueError:
        wrong.append(Problem("--seed", str(options.seed), f"a whole number from 0 to {MAX_SEED}", "for example --seed 0"))
    try:
        options.problem = load_problem(options.file)
    except SoapjaxError as e:
        wrong += e.problems
    if wrong:
        raise SoapjaxError(wrong)
    return options


def main() -> int:
    signals = Signals()
    try:
        options = _arguments()
        problem = options.problem
        best = Best(
            problem, lambda s, t: print(f"{t:8.2f} s  {_described(s, problem.usage_limit)}", file=sys.stderr, flush=True), BEGIN
        )
        seconds = options.seconds - min(START_S + 0.02 * options.seconds, 0.2 * options.seconds)
    except SoapjaxError as e:
        for failure in e.problems:
            print(f"error: {failure}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        signals.ignore()
        print("interrupted before the problem was read", file=sys.stderr)
        return 130
    is_sound = True
    try:
        # No step may outlast the budget, however large the problem.
        signal.setitimer(signal.ITIMER_REAL, max(0.1, seconds - (time.monotonic() - BEGIN)))
        solve(best, seconds, options.seed, is_alone=options.one_process)
        signals.ignore()  # in here: the alarm comes just when the search ends by itself
    except KeyboardInterrupt:
        signals.ignore()
    except Exception:  # a fault of the solver's: it is shown, and what was found is not lost
        signals.ignore()
        traceback.print_exc()
        is_sound = False
    best.close()
    bound = ""
    if best.bound is not None and best.infeasible is None:
        # The bound is a sum in floating point; what it lacks in digits is given away.
        bound = f"; no solution costs less than {math.ceil(best.bound - 1e-9 * abs(best.bound) - 1e-3)}"
    print(f"{time.monotonic() - BEGIN:8.2f} s  best: {_described(best.score, problem.usage_limit)}{bound}", file=sys.stderr)
    if not best.score.is_feasible:
        print(f"infeasible: {best.infeasible or 'no solution within the limits was found'}", file=sys.stderr)
    print(json.dumps(best.strategies.tolist()), flush=True)
    if not is_sound:
        return 1
    return 0 if best.score.is_feasible else 3


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # freeing gigabytes of tables one by one would take seconds of the budget
