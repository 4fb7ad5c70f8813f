"""What becomes of a job when one of its processes dies, stops, or does something else: at random moments of every phase.

    python scripts/faults.py --processes 2 4 --moments 10
    python scripts/faults.py --processes 2 --moments 1 --faults death stop --phases running

Every case starts a small job (`fault_worker.py`) on this machine and disturbs one rank, drawn at random, rank 0 as well. Rows go to
results/faults.csv (the same command goes on from there), and the page to results/faults.md. A case is as it should be
where every other process has ended within the time-out + 10 s, with a line that names the rank, before any of JAX's own.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fault_worker import NUM_STEPS, PHASES
from paper_tables import ROOT, Rows, guarded, markdown, note, parser_of, positive_float, positive_int

from soapjax.errors import Problem, SoapjaxError
from soapjax.helpers.files import write_text_atomic

SIGNALS = {
    "death": signal.SIGKILL, "stop": signal.SIGSTOP, "silence": signal.SIGHUP, "exception": signal.SIGUSR1, "exit 0": signal.SIGUSR2
}  # fmt: skip
# Of the program or its environment, from the start of the process on.
OTHERS = ("a step fewer", "another order", "another function", "x64", "flags")
FLAGS = "--xla_cpu_enable_fast_math=true"
SLACK_S = 10.0
MAX_TRIES = 3
START_S = 60.0  # a phase comes within, on an idle machine
BUSY = 3.0  # times as long as before a phase may take
ARGUMENTS = ("fault", "processes", "phase", "moment", "timeout_s", "seed")
MESSAGES = ("error: ", "soapjax.errors.SoapjaxError: ")  # the second: where the program does not catch it
STACKS = ("Check failure stack trace", "terminate called", "Fatal Python error")
SHOWN = (
    "fault", "processes", "phase", "cases", "had_finished_before", "ended_in_time", "all_name_the_rank", "bare_stacks", "median_s",
    "slowest_s",
)  # fmt: skip


class Process:
    """One rank, with what it prints in files."""

    def __init__(self, folder: Path, rank: int, arguments: Sequence[str], environment: Mapping[str, str]):
        self.rank, self._out, self._err = rank, folder / f"out{rank}", folder / f"err{rank}"
        command = [sys.executable, str(ROOT / "scripts" / "fault_worker.py"), *arguments]
        with self._out.open("w") as out, self._err.open("w") as err:
            self.popen = subprocess.Popen(command, stdout=out, stderr=err, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL)
        self.ended_at: float | None = None

    def poll(self) -> int | None:
        status = self.popen.poll()
        if status is not None and self.ended_at is None:
            self.ended_at = time.monotonic()
        return status

    def phases(self) -> dict[str, float]:
        """The first time of each, since the epoch."""
        found: dict[str, float] = {}
        for line in self._out.read_text().splitlines():
            if line.startswith("phase ") and len(words := line.split()) == 3:
                found.setdefault(words[1], float(words[2]))
        return found

    def has_finished(self) -> bool:
        return "finished" in self._out.read_text().splitlines()

    def errors(self) -> str:
        return self._err.read_text(errors="replace")


def start(folder: Path, count: int, timeout_s: float, victim: int, fault: str, at: int) -> list[Process]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS" and "PROXY" not in k.upper()}
    common = kept | {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count), "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1", "SOAPJAX_JOB_KEY": secrets.token_hex(16), "FAULTS_TIMEOUT_S": str(timeout_s),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")])),
    }  # fmt: skip
    processes = []
    for rank in range(count):
        environment = common | {"JAX_PROCESS_ID": str(rank)}
        is_victim = rank == victim
        if is_victim and fault == "flags":
            environment["XLA_FLAGS"] = FLAGS
        processes.append(Process(folder, rank, [fault if is_victim else "none", str(at)], environment))
    return processes


def wait(processes: Sequence[Process], deadline: float) -> None:
    while any([p.poll() is None for p in processes]) and time.monotonic() < deadline:
        time.sleep(0.02)


def join(processes: Sequence[Process], deadline: float) -> float:
    """Waits until each has come to join the job, or ended; the time. Before, a process imports, and can notice no fault."""
    while any([p.poll() is None and "joining" not in p.phases() for p in processes]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return time.monotonic()


def durations(count: int, timeout_s: float) -> dict[str, float]:
    """Seconds that each phase of an undisturbed job takes, on its rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        processes = start(Path(folder), count, timeout_s, -1, "none", 0)
        try:
            wait(processes, time.monotonic() + 4 * START_S)
            if not all(p.has_finished() and p.poll() == 0 for p in processes):
                said = next((p.errors() for p in processes if p.poll()), "it did not end")
                value = said.strip().splitlines()[-1] if said.strip() else "no word"
                raise SoapjaxError(Problem("an undisturbed job", value, "status 0", "try again on a machine with less to do"))
            at = processes[0].phases()
        finally:
            end(processes)
    moments = [at[p] for p in PHASES]
    return {p: max(0.05, b - a) for p, a, b in zip(PHASES, moments, [*moments[1:], moments[-1] + 1.0], strict=True)}


def end(processes: Sequence[Process]) -> None:
    for p in processes:
        if p.poll() is None:
            p.popen.kill()
        p.popen.wait()


def case(fault: str, count: int, phase: str, timeout_s: float, typical: Mapping[str, float], draw: random.Random) -> dict:
    """Runs one job and says what became of it; again and earlier, where it had come to its end before the fault."""
    victim, share, at = draw.randrange(count), draw.random(), draw.randrange(1, NUM_STEPS - 2)
    for _ in range(MAX_TRIES):
        row = tried(fault, count, phase, timeout_s, typical, victim, share, at)
        if not row["finished"]:
            break
        share /= 3
    return row


def tried(
    fault: str, count: int, phase: str, timeout_s: float, typical: Mapping[str, float], victim: int, share: float, at: int
) -> dict:  # fmt: skip
    at_most_s = max(START_S, BUSY * sum(typical.values()))
    with tempfile.TemporaryDirectory() as folder:
        deadline = time.monotonic() + at_most_s
        processes = start(Path(folder), count, timeout_s, victim, fault, at)
        sick, others = processes[victim], [p for p in processes if p.rank != victim]
        try:
            if fault in SIGNALS:
                while phase not in sick.phases() and sick.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.005)
                time.sleep(share * typical[phase])
                if sick.poll() is None:
                    sick.popen.send_signal(SIGNALS[fault])
                begun = join(others, deadline)
            else:  # from when on it differs is known within the job only: the whole run is allowed for
                while "running" not in sick.phases() and any([p.poll() is None for p in processes]) and time.monotonic() < deadline:
                    time.sleep(0.02)
                begun = time.monotonic()
            slack = SLACK_S + (0.0 if fault in SIGNALS else NUM_STEPS * 0.5)
            wait(others, begun + timeout_s + slack + 20.0)
            late = [p.rank for p in others if p.poll() is None]
            in_time = all(p.ended_at is not None and p.ended_at - begun <= timeout_s + slack for p in others)
            if fault != "stop" and "joining" in sick.phases():  # one that never joins is no part of the job, and sleeps on
                wait([sick], begun + timeout_s + slack + 20.0)
                in_time = in_time and sick.ended_at is not None
            seconds = max(0.0, max((p.ended_at or time.monotonic()) - begun for p in others))
            return {
                "victim": victim, "share": share, "at_step": at if fault in OTHERS else None, "seconds": seconds,
                "in_time": int(in_time), "late": " ".join(map(str, late)), **heard(others, victim),
                "victim_status": sick.poll() if fault != "stop" else None, "statuses": " ".join(str(p.poll()) for p in others),
            }  # fmt: skip
        finally:
            end(processes)


def heard(others: Sequence[Process], victim: int) -> dict:
    """What the others say: whether all have a line that names the rank, none has a stack before it, and the first such line."""
    lines = {p.rank: [line for line in p.errors().splitlines() if line.startswith(MESSAGES)] for p in others}
    named = {r: next((line for line in ls if f"rank {victim}" in line), None) for r, ls in lines.items()}
    finished = all(p.has_finished() and p.poll() == 0 for p in others)
    bare = 0
    for p in others:
        text = p.errors()
        stack = min((text.find(s) for s in STACKS if s in text), default=-1)
        line = text.find(named[p.rank]) if named[p.rank] else -1
        bare += stack >= 0 and not 0 <= line < stack
    said = next((line for line in named.values() if line), None) or next((ls[0] for ls in lines.values() if ls), "")
    return {"all_name": int(all(named.values())), "finished": int(finished), "bare_stacks": bare, "said": said[:400]}


def summary(rows: Sequence[Mapping[str, str]]) -> list[dict]:
    found = []
    for key in dict.fromkeys((r["fault"], r["processes"], r["phase"]) for r in rows):
        of = [r for r in rows if (r["fault"], r["processes"], r["phase"]) == key]
        seconds = sorted(float(r["seconds"]) for r in of)
        undisturbed = [r for r in of if r["finished"] == "1"]
        found.append(
            dict(zip(("fault", "processes", "phase"), key, strict=True)) | {
                "cases": len(of), "ended_in_time": sum(r["in_time"] == "1" for r in of),
                "all_name_the_rank": sum(r["all_name"] == "1" for r in of), "bare_stacks": sum(int(r["bare_stacks"]) for r in of),
                "had_finished_before": len(undisturbed), "median_s": seconds[len(seconds) // 2], "slowest_s": seconds[-1],
            }
        )  # fmt: skip
    return found


def page(rows: Sequence[Mapping[str, str]]) -> str:
    good = [r for r in rows if r["in_time"] == "1" and r["all_name"] == "1" and r["bare_stacks"] == "0"]
    lines = [
        "# Jobs of which one process dies, stops, or does something else\n",
        f"`python scripts/faults.py`: {len(rows)} jobs of small processes on one machine, one rank of each disturbed at a random "
        f"moment. {len(good)} ended as they should: all other processes within the time-out + {SLACK_S:g} s, each with a line that "
        "names the rank, and no stack of JAX before it. Seconds count from the fault, or from when the last of the others comes to "
        "join the job (for other programs and settings: from the first step, or where they end before it), to the end of the last "
        "of the others.\n",
        markdown(SHOWN, summary(rows)),
        "\n## What the others say, one of each\n",
    ]
    for fault in dict.fromkeys(r["fault"] for r in rows):
        said = next((r["said"] for r in rows if r["fault"] == fault and r["all_name"] == "1"), "nothing that names the rank")
        lines.append(f"- {fault}: `{said}`")
    if bad := [r for r in rows if r not in good]:
        lines += ["\n## Not as it should be\n", markdown((*ARGUMENTS[:4], "victim", "seconds", "late", "finished", "said"), bad)]
    return "\n".join(lines) + "\n"


def body(options: argparse.Namespace) -> None:
    known = (*SIGNALS, *OTHERS)
    if unknown := [f for f in options.faults if f not in known]:
        raise SoapjaxError(Problem("--faults", ", ".join(unknown), ", ".join(known), "correct the name"))
    rows = Rows(options.results / "faults.csv", ARGUMENTS, again=options.again)
    typical: dict[int, dict[str, float]] = {}
    for count in options.processes:
        for fault in options.faults:
            for phase in options.phases if fault in SIGNALS else ("start" if fault in ("x64", "flags") else "running",):
                for moment in range(options.moments):
                    arguments = dict(zip(ARGUMENTS, (fault, count, phase, moment, options.timeout, options.seed), strict=True))
                    if rows.find(arguments) is None and count not in typical:
                        typical[count] = durations(count, options.timeout)
                        note(f"{count} processes: " + ", ".join(f"{p} {s:.1f} s" for p, s in typical[count].items()))
                    draw = random.Random(f"{options.seed} {fault} {count} {phase} {moment}")
                    row = rows.get(arguments, lambda: case(fault, count, phase, options.timeout, typical[count], draw))  # noqa: B023
                    note(f"  {float(row['seconds']):.1f} s, in time {row['in_time']}, named {row['all_name']}: {row['said'][:160]}")
    write_text_atomic(options.results / "faults.md", page(rows.rows))


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, seconds=None)
    parser.add_argument("--processes", type=positive_int, nargs="+", default=[2, 4])
    parser.add_argument("--moments", type=positive_int, default=10, help="of every fault and phase")
    parser.add_argument("--faults", nargs="+", default=[*SIGNALS, *OTHERS], metavar="FAULT", help=", ".join([*SIGNALS, *OTHERS]))
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=PHASES)
    parser.add_argument("--timeout", type=positive_float, default=8.0, help="the job's time-out in seconds")
    return guarded(body, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
