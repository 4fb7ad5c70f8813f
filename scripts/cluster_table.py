"""Predicted against measured step times on an emulated cluster, and searched plans against hand-written strategies.

    sudo python scripts/cluster_table.py --models alexnet lstm --hosts 2 --rates 200mbit 1gbit
    python scripts/cluster_table.py --report

For each model and rate it calibrates, plans (baselines, the searches, random points of the space) and measures every strategy
and the hand-written ones of cluster_experts.py on hosts that scripts/emulated_cluster.py starts. Rows go to
results/cluster.csv, a case at once; a second run goes on with what is missing (`--stage measure` on a quiet machine, for
instance). Errors count all strategies but the four that the calibration was fitted on.

With a job's own launcher (srun, mpirun) run scripts/cluster_measure.py on the hosts, and `--report` afterwards.
"""

from __future__ import annotations

import argparse
import itertools
import math
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pydantic
from csv_files import Bytes, CsvRow, Name, Positive, read_rows

from soapjax.errors import SoapjaxError

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER.parent / "results"
# The two factors come from these, which compute, reduce, gather and scatter; they count in no error.
FITTED = ("replicated", "data_parallel", "tensor_parallel", "fsdp")
STAGES = ("calibrate", "plan", "measure")  # of cluster_measure.py
APART = 0.05  # pairs closer than this in measured time say nothing about an order


class Row(NamedTuple):
    """One measured strategy."""

    strategy: str
    measured_s: float
    spread: float
    predicted_s: float | None  # None: hand-written
    predicted_bytes: int | None
    compiled_bytes: int

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["alexnet", "lstm", "transformer", "resnet"])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"])
    parser.add_argument("--random", type=int, default=8, help="random points of the space per model")
    parser.add_argument("--proposals", type=int, default=4096, help="of mcmc")
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds per model and rate, at most")
    parser.add_argument("--output", default=str(RESULTS / "cluster.csv"))
    parser.add_argument("--work", default=str(RESULTS / "cluster"), help="where calibrations and plans are kept")
    parser.add_argument("--plot", default="", help="a PNG of predicted against measured")
    parser.add_argument("--report", action="store_true", help="measure nothing, print what was measured")
    options = parser.parse_args()
    if not options.report:
        for rate, model in itertools.product(options.rates, options.models):
            if status := measure(options, rate, model):
                return status
    return reported(options.output, read, lambda cases: report(cases, options.plot))


def report(cases: dict[tuple[str, str, str], list[Row]], picture: str) -> None:
    print("\n\n".join(table(case, rows) for case, rows in cases.items()))
    print("\n" + summary(cases))
    if picture:
        plot(cases, picture)


def measure(options: argparse.Namespace, rate: str, model: str) -> int:
    more = ["--random", str(options.random), "--stage", options.stage, "--proposals", str(options.proposals)]
    return on_hosts("cluster_measure.py", options, model, rate, more)


def on_hosts(script: str, options: argparse.Namespace, model: str, rate: str, more: list[str], *, is_known: bool = True) -> int:
    """Runs a script on the hosts of an emulated cluster; its exit status. A model that is not known is refused there."""
    work = Path(options.work) / f"{model}-{options.hosts}x{rate}"
    if is_known and rate.replace(".", "").isalnum():  # else the cluster refuses it
        work.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(FOLDER / script), "--model", model, "--rate", rate, "--hosts", str(options.hosts)]
    command += ["--output", options.output, "--work", str(work), *more]
    launcher = [sys.executable, str(FOLDER / "emulated_cluster.py"), "--hosts", str(options.hosts), "--rate", rate]
    launcher += ["--timeout", str(options.timeout), "--"]
    # A terminal's Ctrl-C reaches the launcher too, which cleans up; a signal to this process alone is passed on.
    process = subprocess.Popen([*launcher, *command])
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        return process.wait()
    except KeyboardInterrupt:
        return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


class Measured(CsvRow):
    """A row of cluster.csv; predictions may be missing."""

    model: Name
    hosts: Name
    rate: Name
    strategy: Name
    measured_s: Positive
    spread: Annotated[float, pydantic.Field(ge=0, le=1e6)]
    predicted_s: Positive | None = None
    predicted_bytes: Bytes | None = None
    compiled_bytes: Bytes


def read(path: str) -> dict[tuple[str, str, str], list[Row]]:
    return {
        case: [Row(r.strategy, r.measured_s, r.spread, r.predicted_s, r.predicted_bytes, r.compiled_bytes) for r in rows]
        for case, rows in by_case(path, Measured).items()
    }


def sections(cases: Mapping[tuple[str, str, str], Sequence[Any]], table: Callable[..., str], summary: Callable[..., str]) -> str:
    """A section of a page per case (model, hosts, rate): the table of its rows, and what that says."""
    parts = (f"\n## {m}, {hosts} hosts, {rate}\n\n{table(rows)}\n{summary(rows)}\n" for (m, hosts, rate), rows in cases.items())
    return "".join(parts)


def by_case(path: str, row: type[CsvRow]) -> dict[tuple[str, str, str], list[Any]]:
    """Rows of a CSV by (model, hosts, rate)."""
    cases: dict[tuple[str, str, str], list[Any]] = {}
    if Path(path).is_file():
        for r in read_rows(path, row):
            cases.setdefault((r.model, r.hosts, r.rate), []).append(r)
    return cases


def reported(path: str, read: Callable[[str], dict[Any, Any]], report: Callable[[dict[Any, Any]], None]) -> int:
    """Reports the cases that are read from a CSV; the exit status."""
    try:
        cases = read(path)
    except SoapjaxError as e:
        print("\n".join(f"error: {p}" for p in e.problems), file=sys.stderr)
        return 2
    if not cases:
        expected, remedy = "rows of an earlier run", "measure first: leave out --report"
        print(f"error: {path}: got nothing; expected {expected}. Remedy: {remedy}.", file=sys.stderr)
        return 2
    report(cases)
    return 0


def judged(rows: list[Row]) -> list[Row]:
    """Those whose prediction nothing was fitted on."""
    return [r for r in rows if r.predicted_s is not None and r.strategy not in FITTED]


def kendall_tau(rows: list[Row]) -> tuple[float, int]:
    """Kendall's rank correlation over pairs whose measured times are more than 5 % apart, and the number of pairs."""
    signs = []
    for a, b in itertools.combinations([r for r in rows if r.predicted_s is not None], 2):
        slow, fast = (a, b) if a.measured_s > b.measured_s else (b, a)
        if slow.measured_s > (1 + APART) * fast.measured_s:
            signs.append(math.copysign(1, slow.predicted_s - fast.predicted_s) if slow.predicted_s != fast.predicted_s else 0.0)
    return (sum(signs) / len(signs) if signs else float("nan")), len(signs)


def table(case: tuple[str, str, str], rows: list[Row]) -> str:
    model, hosts, rate = case
    lines = [f"{model}, {hosts} hosts, {rate}"]
    columns = f"{'predicted':>11s}{'measured':>11s}{'spread':>8s}{'error':>8s}{'sent, predicted':>17s}{'compiled':>11s}"
    lines.append(f"  {'strategy':26s}{columns}")
    for r in sorted(rows, key=lambda r: r.measured_s):
        predicted = f"{r.predicted_s * 1e3:8.1f} ms" if r.predicted_s is not None else ""
        error = f"{r.error:+.1%}" + ("*" if r.strategy in FITTED else " ") if r.predicted_s is not None else ""
        sent = f"{r.predicted_bytes / 1e6:.2f} MB" if r.predicted_bytes is not None else ""
        lines.append(
            f"  {r.strategy:26s}{predicted:>11s}{r.measured_s * 1e3:8.1f} ms{r.spread:8.1%}{error:>8s}{sent:>17s}"
            f"{r.compiled_bytes / 1e6:8.2f} MB"
        )
    lines.append("  * the calibration was fitted on these")
    return "\n".join(lines)


def summary(cases: dict[tuple[str, str, str], list[Row]]) -> str:
    header = (
        f"{'model':12s}{'hosts':>6s}{'rate':>9s}{'strategies':>12s}{'median error':>14s}{'worst':>8s}{'tau':>7s}{'pairs':>7s}"
        f"{'searched / best':>17s}{'best by hand / searched':>25s}{'data parallel / searched':>26s}"
    )
    lines = [header]
    for (model, hosts, rate), rows in cases.items():
        ours = [r for r in rows if r.predicted_s is not None]
        errors = [abs(r.error) for r in judged(rows)]
        tau, pairs = kendall_tau(rows)
        by_name = {r.strategy: r.measured_s for r in rows}
        searched = by_name.get("mcmc")
        by_hand = [r.measured_s for r in rows if r.predicted_s is None]

        def ratio(a: float | None, b: float | None) -> str:
            return f"{a / b:.2f} x" if a and b else "-"

        median, worst = (statistics.median(errors), max(errors)) if errors else (float("nan"), float("nan"))
        lines.append(
            f"{model:12s}{hosts:>6s}{rate:>9s}{len(ours):12d}{median:14.1%}{worst:8.1%}{tau:7.2f}{pairs:7d}"
            f"{ratio(searched, min((r.measured_s for r in ours), default=None)):>17s}"
            f"{ratio(min(by_hand, default=None), searched):>25s}{ratio(by_name.get('data_parallel'), searched):>26s}"
        )
    return "\n".join(lines)


def plot(cases: dict[tuple[str, str, str], list[Row]], path: str) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plot: pip install 'soapjax[figures]' for matplotlib", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 6))
    ends: list[float] = []
    for (model, hosts, rate), rows in cases.items():
        points = [(r.measured_s, r.predicted_s) for r in rows if r.predicted_s is not None]
        ends += [x for point in points for x in point]
        axes.scatter(*zip(*points, strict=True), s=14, label=f"{model}, {hosts} hosts, {rate}")
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color="black", linewidth=0.7)
    axes.set(xscale="log", yscale="log", xlabel="measured step (s)", ylabel="predicted step (s)")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    sys.exit(main())
