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
import copy
import gzip
import hashlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

from soapjax.errors import SoapjaxError
from soapjax.helpers.files import write_text_atomic

HANG_S, MEMORY_BYTES = 10.0, 2**30
COMMAND_EVERY = 100
TINY = {"batch": 4, "width": 16, "layers": 1, "features": 8, "classes": 4}
BAD = ("traceback", "hang", "memory", "step time", "exit status")


# --- mutants

NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 7, 8, 1e300, -1e300, 1e-300, 5e-324, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e9])
TEXTS = st.sampled_from(["", "x", "é", "\x1b[2J", "[red]", "\x00", "../..", "-1", "nan", "1e999", "pin(99)", "d0", "a" * 5000])
CONSTANTS = st.sampled_from([None, True, False, float("nan"), float("inf"), [], {}, [[]], {"a": 1}, [0] * 300])
VALUES = st.one_of(NUMBERS, TEXTS, CONSTANTS)


def places(tree: Any, at: tuple = ()) -> Iterator[tuple]:
    """Paths of all entries below the root."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*at, key)
        yield from places(value, (*at, key))


def entry(tree: Any, at: tuple) -> Any:
    for key in at:
        tree = tree[key]
    return tree


def mutated_tree(draw: Callable[[Any], Any], tree: Any) -> Any:
    """A copy of JSON data, changed in one to four places."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw(st.integers(1, 4))):
        found = list(places(tree))
        if not found:
            return copy.deepcopy(draw(VALUES))
        at = draw(st.sampled_from(found))
        parent, key = entry(tree, at[:-1]), at[-1]
        how = draw(st.sampled_from(["value", "value", "remove", "other", "rename", "double", "scale"]))
        if how == "value":
            parent[key] = copy.deepcopy(draw(VALUES))
        elif how == "remove":
            del parent[key]
        elif how == "other":
            parent[key] = json.loads(json.dumps(entry(tree, draw(st.sampled_from(found))), allow_nan=True))
        elif how == "scale" and isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
            with contextlib.suppress(OverflowError):
                parent[key] *= draw(st.sampled_from([-1, 2, 3, 0.5, 1e-9, 1e9, 1e150]))
        elif isinstance(parent, dict):
            name = draw(st.one_of(TEXTS, st.sampled_from([str(k) for *_, k in found])))
            parent[name] = copy.deepcopy(parent[key]) if how == "double" else parent.pop(key)
        else:
            parent.insert(draw(st.integers(0, len(parent))), copy.deepcopy(parent[key]))
    return tree


def mutated_bytes(draw: Callable[[Any], Any], data: bytes) -> bytes:
    """A copy of bytes, changed in one to four places."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        end = min(len(data), at + draw(st.integers(0, 40)))
        how = draw(st.sampled_from(["cut", "remove", "repeat", "byte", "text", "token", "token", "line"]))
        if how == "cut":
            data = data[:at]
        elif how == "remove":
            data = data[:at] + data[end:]
        elif how == "repeat":
            data = data[:at] + data[at:end] * draw(st.integers(2, 50)) + data[end:]
        elif how == "byte":
            data = data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]
        elif how == "text":
            data = data[:at] + draw(TEXTS).encode() + data[at:]
        elif how == "token":  # the word or number there, replaced
            begin, end = at, at
            while begin and chr(data[begin - 1]).isalnum():
                begin -= 1
            while end < len(data) and (chr(data[end]).isalnum() or data[end] in b".+-_"):
                end += 1
            with contextlib.suppress(ValueError):  # more digits than Python prints
                data = data[:begin] + str(draw(st.one_of(NUMBERS, TEXTS))).encode() + data[end:]
        else:
            lines = data.splitlines(keepends=True)
            if lines:
                k = draw(st.integers(0, len(lines) - 1))
                lines[k : k + 1] = draw(st.sampled_from([[], [lines[k]] * 2, [lines[-1]], lines[k : k + 1] + lines[:1]]))
            data = b"".join(lines)
    return data


def dumped(tree: Any) -> bytes:
    """JSON, with NaN, and integers as long as they are."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(tree).encode()
    finally:
        sys.set_int_max_str_digits(before)


# --- kinds of files: their good examples, how one is read, and the command that reads it


class Kind:
    suffix = ".json"

    def __init__(self, *, quick: bool = False):
        """With `quick` only the examples that are there at once."""
        self.quick = quick
        self.examples = self.made()

    def made(self) -> list[Any]:
        raise NotImplementedError

    def read(self, path: Path) -> None:
        """Raises: SoapjaxError where the file is refused, WrongStep where it is taken and should not be."""
        raise NotImplementedError

    def command(self, path: Path) -> list[str] | None:
        return None

    def mutant(self, draw: Callable[[Any], Any]) -> bytes:
        tree = draw(st.sampled_from(self.examples))
        if draw(st.booleans()):
            return mutated_bytes(draw, json.dumps(tree).encode())
        return dumped(mutated_tree(draw, tree))


class WrongStep(Exception):
    """A file is taken from which a time follows that is not finite and positive."""


def check_time(what: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise WrongStep(f"{what}: {seconds}")


class Plans(Kind):
    """Plans of one program; placed; pipelines; one with a profile."""

    def made(self) -> list[Any]:
        from soapjax.planning import entry
        from soapjax.planning.pipelining import staging
        from soapjax.steps.sourced_models import abstract_model
        from soapjax.strategy.plan import ModelSource

        model = abstract_model(ModelSource(path="soapjax.models.mlp", settings=TINY))
        options = dict(topology="cpu8", model=model.source)
        one = entry.plan(model.step, *model.arguments, planner="data_parallel", **options)
        self.step, self.space = one.step, one.problem.space
        plans = [one.plan]
        if not self.quick:
            deeper = abstract_model(ModelSource(path="soapjax.models.mlp", settings=TINY | {"layers": 3}))
            plans.append(
                entry.plan(deeper.step, *deeper.arguments, planner="model_parallel", space="paper", **options).plan
            )
            for schedule in ("gpipe", "interleaved"):
                plans.append(
                    staging.plan_pipeline(
                        deeper.step, *deeper.arguments, pipeline=schedule, stages=2, microbatches=2, proposals=8, **options
                    )[0]
                )
            plans.append(one.plan.model_copy(update={"profile": profile_data(self.step)}))
        return [json.loads(p.dumps()) for p in plans]

    def read(self, path: Path) -> None:
        import rich.console

        from soapjax.cli import arguments, commands
        from soapjax.strategy.plan import Plan
        from soapjax.strategy.plan_strategy import strategy_of, topology_of

        plan = Plan.load(str(path))
        name = str(path)
        which = path.stat().st_size % 3
        command = (
            arguments.ExplainCommand(plan=name, plan_only=True),
            arguments.DiffCommand(a=name, b=name, plan_only=True),
            arguments.ReportCommand(plan=name, plan_only=True, output=f"{name}.html"),
        )[which]
        result, text, status = commands.run(command, None)
        json.dumps(result)
        rich.console.Console(file=io.StringIO()).print(text)
        assert status == 0
        check_time("prediction", plan.prediction.step_time_s)
        topology, mesh = topology_of(plan, place=name)
        if plan.pipeline is None and not plan.pinned and mesh.axis_sizes == self.space.mesh.axis_sizes:
            strategy_of(plan, self.space, place=name)

    def command(self, path: Path) -> list[str]:
        return ["explain", "--plan-only", str(path)]


class Topologies(Kind):
    suffix = ".toml"

    def made(self) -> list[Any]:
        import importlib.resources

        from soapjax.topology import load_topology

        names = ("cpu8", "a100x64", "dgx_h100") if self.quick else ("cpu8", "a100x64", "dgx_h100", "dgx1_v100x8", "gh200", "k80x64")
        for name in names:
            load_topology(name)
        folder = importlib.resources.files("soapjax.topologies") if installed() else Path(__file__).parent.parent / "topologies"
        return [(folder / f"{name}.toml").read_bytes() for name in names]

    def mutant(self, draw: Callable[[Any], Any]) -> bytes:
        return mutated_bytes(draw, draw(st.sampled_from(self.examples)))

    def read(self, path: Path) -> None:
        from soapjax.topology import factor_mesh, load_topology

        topology = load_topology(str(path))
        factor_mesh(topology)
        topology.describe()
        json.dumps(topology.to_dict(), allow_nan=False)
        device = topology.device
        check_time("a byte of memory", 1 / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency))
        for dtype, rate in device.peak_flops_per_s.items():
            for kind, fraction in device.efficiency.items():
                check_time(f"a FLOP of {kind} in {dtype}", 1 / (rate * fraction))
        for level in topology.levels:
            check_time(f"a byte over {level.name}", level.latency_s + 1 / (level.bandwidth_bytes_per_s * level.efficiency))

    def command(self, path: Path) -> list[str]:
        return ["topologies", str(path)]


class Profiles(Kind):
    def made(self) -> list[Any]:
        from soapjax.graph.trace.tracing import trace
        from soapjax.steps.sourced_models import abstract_model
        from soapjax.strategy.plan import ModelSource

        model = abstract_model(ModelSource(path="soapjax.models.mlp", settings=TINY))
        return [profile_data(trace(model.step, *model.arguments))]

    def mutant(self, draw: Callable[[Any], Any]) -> bytes:
        """Half of them with the hash of what they hold, so that what they hold is looked at."""
        from soapjax.costs.measured.profile import Profile

        data = draw(st.sampled_from(self.examples))
        if draw(st.booleans()):
            data = mutated_tree(draw, data)
            with contextlib.suppress(Exception):
                return dumped({"sha256": Profile.model_validate(data).sha256, "profile": data})
        return mutated_bytes(draw, dumped({"sha256": Profile.model_validate(self.examples[0]).sha256, "profile": data}))

    def read(self, path: Path) -> None:
        from soapjax.costs.measured.fit import fitted_rates
        from soapjax.costs.measured.profile import load_profile

        profile = load_profile(path)
        for m in profile.operators:
            check_time(m.label, m.seconds)
        for link in profile.links:
            check_time(link.level, link.latency_s + 1 / link.bytes_per_s)
        if profile.calibration is not None:
            check_time("compute scale", profile.calibration.compute_scale)
            check_time("network scale", profile.calibration.network_scale)
        rates = profile.rates or fitted_rates(profile.operators)
        if rates is not None:
            for rate in (*rates.flops_per_s.values(), rates.memory_bytes_per_s):
                check_time("a FLOP or byte", rates.launch_s + 1 / rate)

    def command(self, path: Path) -> list[str]:
        settings = [x for k, v in TINY.items() for x in ("--set", f"{k}={v}")]
        plan = ["plan", "soapjax.models.mlp", "--topology", "a100x8", "--planner", "data_parallel", *settings]
        return [*plan, "--profile", str(path)]


class Problems(Kind):
    def made(self) -> list[Any]:
        nodes = {"intervals": [[30, 70], [40, 70], [40, 100], [0, 100]], "costs": [[15, 20], [10], [12, 4, 3], [0, 7]]}
        nodes["usages"] = [[10, 25], [20], [12, 15, 20], [1, 0]]
        edges = {"nodes": [[0, 1], [1, 2], [0, 3]], "costs": [[30, 40], [20, 15, 10], [1, 2, 3, 10**18]]}
        return [{"problem": {"name": "example", "usage_limit": 50, "nodes": nodes, "edges": edges}}]

    def mutant(self, draw: Callable[[Any], Any]) -> bytes:
        data = super().mutant(draw)
        how = draw(st.sampled_from(["plain", "plain", "gzip", "damaged gzip"]))
        if how == "plain":
            return data
        packed = gzip.compress(data, mtime=0)
        return packed if how == "gzip" else mutated_bytes(draw, packed)

    def read(self, path: Path) -> None:
        import numpy as np

        from soapjax.additive.iopddl import load_problem

        problem = load_problem(path)
        score = problem.score(np.zeros(problem.num_nodes, np.int64))
        if not (math.isfinite(score.cost) and score.cost >= 0):
            raise WrongStep(f"cost {score.cost}")


class Csvs(Kind):
    suffix = ".csv"

    def made(self) -> list[Any]:
        return [
            b"# published\nmodel,gpus,full_s,delta_s,note\nalexnet,4,0.11,0.04,\nresnet101,64,1.4,0.4,\"a, b\"\n",
            b"model,gpus,full_s,delta_s\r\nlstm,16,2.5e1,4\r\n\r\ninception,2,3,0.001\r\n",
        ]

    def mutant(self, draw: Callable[[Any], Any]) -> bytes:
        return mutated_bytes(draw, draw(st.sampled_from(self.examples)))

    def read(self, path: Path) -> None:
        from csv_files import Count, CsvRow, Name, Positive, read_rows, read_table

        class Published(CsvRow):
            model: Name
            gpus: Count
            full_s: Positive
            delta_s: Positive

        for row in read_rows(path, Published):
            check_time(row.model, row.full_s / row.gpus)
            check_time(row.model, row.delta_s)
        for row in read_table(path, ("model", "gpus")):
            if row["full_s"]:
                check_time(row["model"], float(row["full_s"]))


KINDS: dict[str, type[Kind]] = {
    "plan": Plans, "topology": Topologies, "profile": Profiles, "problem": Problems, "csv": Csvs,
}  # fmt: skip


def installed() -> bool:
    return not (Path(__file__).parent.parent / "topologies").is_dir()


def profile_data(step: Any) -> dict[str, Any]:
    """A profile of a step on an A100 that nobody measured."""
    from soapjax.costs.measured.fit import fitted_rates
    from soapjax.costs.measured.profile import Profile, installed_versions
    from soapjax.costs.measured.profile_parts import Calibration, Device, Link, Measurement
    from soapjax.graph.passes.build import build_graph

    graph, _ = build_graph(step)
    operators = tuple(
        Measurement(
            label=f"task {i}", structure=task.structure, kind=task.kind, dtype="float32", reads=((4, 16),), writes=((4, 16),),
            elements=64 + i, flops=1000.0 * (i + 1), moved_bytes=512.0, seconds=1e-6 * (i + 1), spread=0.01, num_runs=10,
        )
        for i, task in enumerate(graph.tasks)
    )  # fmt: skip
    profile = Profile(
        device=Device(name="A100", platform="cuda"), versions=installed_versions(), created="2026-01-01T00:00:00+00:00",
        commands=("none",), operators=operators, rates=fitted_rates(operators),
        links=(Link(level="device", latency_s=1e-5, bytes_per_s=1e11, fractions={"all-to-all": 0.5}),),
        calibration=Calibration(compute_scale=1.1, network_scale=0.9, residual=0.02, worst=0.1, steps=(("a.json", 1e-3, 1.1e-3),)),
    )  # fmt: skip
    return json.loads(profile.model_dump_json())


# --- reading mutants, and counting


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
