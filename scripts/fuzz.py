"""Damaged files: whatever a plan, topology, profile, contest problem or CSV says, it is read, or refused with words and status 2.

    python scripts/fuzz.py --minutes 10                                   # all kinds
    python scripts/fuzz.py --kinds plan csv --mutants 10000 --seed 1      # so many mutants of each

hypothesis draws mutants of good files: values of other types and sizes, entries removed, exchanged, renamed or doubled, bytes
changed, removed and repeated. Each is read by what the commands read it with, one refused mutant in a hundred by the command line
itself, in a process per kind. Counted are tracebacks, mutants that take more than 10 s or 1 GiB, those that are taken though a time
that follows from them is not finite and positive, and exit statuses other than 2 for what is refused. The exit status is 1 where
there is any; these mutants are kept in --keep.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
from fuzz_kinds import KINDS, Kind, WrongStep
from hypothesis import strategies as st

from soapjax.errors import SoapjaxError
from soapjax.helpers.files import write_text_atomic

HANG_S, MEMORY_BYTES = 10.0, 2**30
COMMAND_EVERY = 100
BAD = ("traceback", "hang", "memory", "step time", "exit status")


class Hang(BaseException):
    pass


def peak_bytes() -> int:
    """The largest memory of this process since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def forget_peak() -> int:
    """Sets the peak back to what the process holds now, which may be more than a mutant is allowed: tests run in processes that did
    other things before."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def outcome(read: Callable[[], None]) -> tuple[str, str]:
    """What reading a mutant came to, and where a traceback ends."""

    is_reading = True

    def late(*_: Any) -> None:
        if is_reading:
            raise Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    held = forget_peak()
    try:
        try:
            read()
        finally:
            is_reading = False
        found = "taken", ""
    except SoapjaxError as e:
        is_said = all(all(str(x).strip() for x in p) for p in e.problems) and e.problems
        found = ("refused", "") if is_said else ("traceback", "an error that does not say place, value, expected, remedy")
    except WrongStep as e:
        found = "step time", str(e)
    except Hang:
        found = "hang", traceback.format_exc(limit=-3)
    except Exception as e:
        last = traceback.extract_tb(e.__traceback__)[-1]
        found = "traceback", f"{type(e).__name__} in {Path(last.filename).name}:{last.lineno}: {str(e)[:100]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if (grown := peak_bytes() - held) > MEMORY_BYTES:
        found = "memory", f"{grown / 2**30:.2f} GiB"
    return found


def by_command(arguments: list[str], expected: int) -> tuple[str, str] | None:
    """Runs a command line in this process; what is wrong with how it ended."""
    from soapjax import cli

    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main(arguments)
    except SystemExit as e:
        status = e.code or 0
        said = expected == 0 or err.getvalue().startswith("error: ")
        return None if status == expected and said and "\x1b" not in out.getvalue() + err.getvalue() else (
            "exit status", f"{status} in place of {expected}: {err.getvalue()[-200:]!r}"
        )  # fmt: skip
    except Exception as e:
        return "traceback", f"{type(e).__name__} of a command: {str(e)[:100]}"
    return "exit status", "none"


def fuzz(kind: Kind, *, mutants: int, seconds: float, seed: int, keep: Path | None = None) -> dict[str, Any]:
    """Counts of outcomes, and the first mutant of every finding."""
    counts: collections.Counter[str] = collections.Counter()
    findings: dict[tuple[str, str], int] = collections.Counter()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"mutant{kind.suffix}"

        def one(data: bytes) -> None:
            path.write_bytes(data)
            found = outcome(lambda: kind.read(path))
            number = sum(counts.values())
            arguments = kind.command(path)
            if found[0] == "refused" and arguments is not None and number % COMMAND_EVERY == 0:
                found = by_command(arguments, 2) or found
            counts[found[0]] += 1
            if found[0] in BAD:
                findings[found] += 1
                if keep is not None and findings[found] == 1:
                    keep.mkdir(parents=True, exist_ok=True)
                    name = hashlib.sha256(data).hexdigest()[:12]
                    (keep / f"{found[0].replace(' ', '_')}-{name}{kind.suffix}").write_bytes(data)

        batch = 0
        while sum(counts.values()) < mutants and time.monotonic() - begin < seconds:
            left = min(100, mutants - sum(counts.values()))  # the time is looked at between batches
            batch += 1

            @hypothesis.seed(seed * 1_000_003 + batch)
            @hypothesis.settings(
                max_examples=left, database=None, deadline=None, phases=[hypothesis.Phase.generate],
                suppress_health_check=list(hypothesis.HealthCheck),
            )  # fmt: skip
            @hypothesis.given(st.data())
            def run(data: Any) -> None:
                one(kind.mutant(data.draw))

            run()
            print(f"{sum(counts.values())} mutants", file=sys.stderr, flush=True)  # a sign of life
    return {
        "counts": dict(counts), "seconds": round(time.monotonic() - begin, 1),
        "findings": [[what, where, count] for (what, where), count in findings.items()],
    }  # fmt: skip


def in_a_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """`fuzz` in a process of its own, which may crash or hang without ending the others."""
    command = [sys.executable, __file__, "--worker", "--kinds", name, "--minutes", str(options.minutes)]
    command += ["--seed", str(options.seed), "--mutants", str(options.mutants)]
    command += ["--keep", str(options.keep)] if options.keep else []
    with tempfile.TemporaryFile("w+") as log:
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        try:
            out, _ = process.communicate(timeout=60 * options.minutes + 600)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return {"counts": {"hang": 1}, "seconds": 60 * options.minutes + 600, "findings": [["hang", "of the whole process", 1]]}
        if process.returncode != 0:
            log.seek(0)
            tail = log.read()[-1000:]
            return {"counts": {"traceback": 1}, "seconds": 0, "findings": [["traceback", f"the process ended: {tail}", 1]]}
    return json.loads(out.splitlines()[-1])


def page(lines: list[str], findings: list[str], options: argparse.Namespace) -> str:
    """The table as Markdown, with what was found under it."""
    return "\n".join([
        "# Damaged files\n",
        f"`python scripts/fuzz.py --mutants {options.mutants} --seed {options.seed}`: what becomes of mutants of good files, each "
        "kind read in a process of its own. Refused: with place, value, what was expected and the remedy, and by the command line "
        f"with status 2. Taken: every time that follows is finite and positive. Hang: more than {HANG_S:g} s for one; memory: more "
        f"than {MEMORY_BYTES / 2**30:g} GiB for one; step time: taken wrongly. Seconds: of all mutants of the kind.\n",
        *lines, "\n## Found\n", *(findings or ["Nothing."]), "",
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for each kind, at most")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--mutants", type=int, default=10_000, help="of each kind, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for mutants that found something")
    parser.add_argument("--page", type=Path, help="a Markdown file for the table")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    limits = dict(mutants=options.mutants, seconds=60 * options.minutes, seed=options.seed)
    if options.worker:
        print(json.dumps(fuzz(KINDS[options.kinds[0]](), keep=options.keep, **limits)))
        return 0
    columns = ("refused", "taken", *BAD)
    lines = [f"| kind | mutants | {' | '.join(columns)} | seconds |", "|---|" + "--:|" * (len(columns) + 2)]
    print(*lines, sep="\n", flush=True)
    is_good, findings = True, []
    for name in options.kinds:
        found = in_a_process(name, options)
        counts = found["counts"]
        numbers = [counts.get(c, 0) for c in columns]
        lines.append(f"| {name} | {sum(counts.values())} | {' | '.join(map(str, numbers))} | {found['seconds']:.0f} |")
        print(lines[-1], flush=True)
        for what, where, count in found["findings"]:
            findings.append(f"- {name}: {what} ({count}): {where}")
            print(findings[-1], file=sys.stderr, flush=True)
        is_good &= not any(counts.get(c) for c in BAD)
        if options.page:
            write_text_atomic(options.page, page(lines, findings, options))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
