"""Commands that are killed, or interrupted by Ctrl-C, at random moments: nothing torn, nothing left behind, status 130.

    python scripts/interruptions.py --kills 50 --interrupts 50              # of each command, some minutes
    python scripts/interruptions.py --commands search profile --kills 0
    python scripts/interruptions.py --page results/interruptions.md

Every command runs once to the end; then again and again, with an older result in its place, until SIGKILL or SIGINT comes at a
moment that is drawn evenly over that time. Of a kill the result must be the old one or a whole new one, nothing else may lie beside
it, and the command must succeed afterwards with the cache as it was left. Of Ctrl-C the status must be 130 with a word about it and
no traceback, the result as after a kill. The moments begin when the command has its own handler: before, for some ten milliseconds,
Python itself starts.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from soapjax.costs.measured.profile import load_profile
from soapjax.errors import SoapjaxError
from soapjax.helpers.files import write_text_atomic
from soapjax.strategy.plan import Plan

MODEL = "soapjax.models.mlp"
TINY = [x for k, v in dict(batch=8, width=16, layers=2, features=8, classes=4).items() for x in ("--set", f"{k}={v}")]
PLAN = ["plan", MODEL, *TINY, "--topology", "cpu8"]
OUT = ["-o", "out.json"]
COMMANDS = {
    "plan": [*PLAN, "--planner", "data_parallel", *OUT],
    "search": [*PLAN, "--seconds", "3", *OUT],
    "pipeline": [*PLAN, "--pipeline", "auto", "--seconds", "3", *OUT],
    "profile": ["profile", MODEL, *TINY, "--topology", "local", "--seconds", "3", "--no-search", *OUT],
    "simulate": ["simulate", "plan.json", "--trace", "out.json"],
    "run": ["run", "plan.json", "--steps", "5", "--trust"],
    "verify": ["verify", "plan.json", "--trust"],
}
OLD = "an older result\n"
LATE = "over before"
WAIT_S = 60.0  # for a command to end after Ctrl-C


class Ended(NamedTuple):
    status: int
    said: str
    seconds: float  # after the signal, or in all


class Place:
    """A folder of its own for every run, and one cache for all runs of a command."""

    def __init__(self, root: Path, plan: str | None):
        self.folder, self.cache = root / "folder", root / "cache"
        self.folder.mkdir(parents=True)
        self.given = {"plan.json": plan} if plan is not None else {}

    def clear(self) -> None:
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        for name, text in self.given.items():
            (self.folder / name).write_text(text)
        (self.folder / "out.json").write_text(OLD)

    def started(self, command: list[str], log: Path) -> subprocess.Popen:
        env = {k: v for k, v in os.environ.items() if k != "SOAPJAX_PROGRAM_CACHE"}
        env |= {"SOAPJAX_CACHE": str(self.cache), "JAX_PLATFORMS": "cpu", "PYTHONSAFEPATH": "1"}
        with log.open("wb") as f:
            return subprocess.Popen([sys.executable, "-m", "soapjax", *command], cwd=self.folder, env=env, stdout=f, stderr=f)

    def torn(self, name: str) -> str:
        """What is wrong with what lies there; "" where nothing is."""
        others = sorted(p.name for p in self.folder.iterdir() if p.name not in (*self.given, "out.json"))
        if others:
            return f"left behind: {', '.join(others)}"
        out = self.folder / "out.json"
        if not out.exists():
            return "the older result is gone"
        text = out.read_text()
        if text == OLD:
            return ""
        try:
            if name == "profile":
                load_profile(out)
            elif name != "simulate":
                Plan.load(str(out))
            elif not text.rstrip().endswith("}"):
                return "torn timeline"
        except SoapjaxError as e:
            return f"torn: {e.problems[0]}"
        return ""


def whole(place: Place, command: list[str], log: Path) -> Ended:
    """A command to its end."""
    place.clear()
    begin = time.monotonic()
    status = place.started(command, log).wait()
    return Ended(status, log.read_text(errors="replace"), time.monotonic() - begin)


def stopped(place: Place, command: list[str], log: Path, number: signal.Signals, after_s: float) -> Ended:
    """A command that gets a signal so long after it began to handle Ctrl-C."""
    place.clear()
    process = place.started(command, log)
    tasks = Path(f"/proc/{process.pid}/task")
    try:
        while process.poll() is None and len(list(tasks.iterdir())) < 2:  # the thread that listens
            time.sleep(0.001)
    except OSError:
        pass
    time.sleep(after_s)
    begin = time.monotonic()
    process.send_signal(number)
    try:
        status = process.wait(timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        status = -9
    return Ended(status, log.read_text(errors="replace"), time.monotonic() - begin)


def after_interrupt(place: Place, name: str, ended: Ended) -> str:
    """The outcome of Ctrl-C, in a word; what begins with "bad" should not be."""
    if "Traceback" in ended.said:
        return "bad: traceback"
    if torn := place.torn(name):
        return f"bad: {torn}"
    if ended.status == 0 and "interrupted" not in ended.said:
        return LATE
    if ended.status != 130:
        return f"bad: status {ended.status}"
    if "interrupted" not in ended.said:
        return "bad: 130 without a word"
    if name == "verify" and "proven" in ended.said:
        return "bad: proven"
    is_kept = (place.folder / "out.json").read_text() != OLD
    return "130, best so far kept" if is_kept else "130, nothing to keep"


def measure(name: str, place: Place, options: argparse.Namespace, rng: random.Random) -> list[tuple[str, str, int, float]]:
    """Rows (command, signal and outcome, count, longest seconds until it ended)."""
    command, log = COMMANDS[name], place.folder.parent / "log"
    whole(place, command, log)  # fills the cache
    first = whole(place, command, log)
    if first.status != 0:
        raise SystemExit(f"{name} ends with {first.status}:\n{first.said[-2000:]}")
    found: dict[str, list[float]] = collections.defaultdict(list)
    for _ in range(options.kills):
        ended = stopped(place, command, log, signal.SIGKILL, rng.uniform(0, first.seconds))
        torn = place.torn(name)
        found[f"SIGKILL: {'bad: ' + torn if torn else 'whole'}"].append(ended.seconds)
    if options.kills:
        again = whole(place, command, log)
        found["SIGKILL: bad: the cache is torn" if again.status else "SIGKILL: runs afterwards"].append(again.seconds)
    missing = options.interrupts
    for _ in range(2 * options.interrupts):  # one that comes too late is none
        if not missing:
            break
        ended = stopped(place, command, log, signal.SIGINT, rng.uniform(0, first.seconds))
        word = after_interrupt(place, name, ended)
        found[f"SIGINT: {word}"].append(ended.seconds)
        missing -= word != LATE
        if word.startswith("bad"):
            print(f"{name}: {word}\n{ended.said[-1500:]}", file=sys.stderr, flush=True)
    orphans = [p for p in place.cache.rglob("*") if p.is_file() and (p.name.startswith(".") or p.name.endswith(".tmp"))]
    if orphans:
        found[f"temporary files in the cache, swept after a day ({orphans[0].name}, ...)"] += [0.0] * len(orphans)
    return [(name, what, len(seconds), max(seconds)) for what, seconds in sorted(found.items())]


def page(lines: list[str], options: argparse.Namespace) -> str:
    """The table as Markdown, and what was asked for."""
    number = len(options.commands)
    return "\n".join([
        "# Commands killed or interrupted at random moments\n",
        f"`python scripts/interruptions.py --kills {options.kills} --interrupts {options.interrupts} --seed {options.seed}`: "
        f"{options.kills * number} SIGKILL and {options.interrupts * number} SIGINT in all, of {number} commands, at moments "
        "drawn evenly over the seconds that a command takes undisturbed. Whole: the older result or a new one, complete, and "
        "nothing beside it. Runs afterwards: the command, with the cache as the kills left it. 130: with a word, without a "
        "traceback. Over before: the command had ended. Seconds: from the signal to the end (runs afterwards: of the whole run).\n",
        *lines, "",
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--kills", type=int, default=30, help="SIGKILL, of each command")
    parser.add_argument("--interrupts", type=int, default=15, help="SIGINT, of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path, help="a Markdown file for the table")
    options = parser.parse_args()
    rng, is_good = random.Random(options.seed), True
    lines = ["| command | outcome | times | longest, s |", "|---|---|--:|--:|"]
    print(*lines, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as root:
        maker = Place(Path(root) / "maker", None)
        made = whole(maker, COMMANDS["plan"], Path(root) / "log")
        if made.status:
            raise SystemExit(made.said)
        plan = (maker.folder / "out.json").read_text()
        for name in options.commands:
            needs_plan = "plan.json" in COMMANDS[name]
            for row in measure(name, Place(Path(root) / name, plan if needs_plan else None), options, rng):
                is_good &= "bad" not in row[1]
                lines.append("| {} | {} | {} | {:.1f} |".format(*row))
                print(lines[-1], flush=True)
    if options.page:
        write_text_atomic(options.page, page(lines, options))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
