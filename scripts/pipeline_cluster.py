"""Pipelines and pinned plans on an emulated cluster: simulated against measured step times, and against one program.

    sudo python scripts/pipeline_cluster.py                       # all, half an hour on two idle cores
    python scripts/pipeline_cluster.py --report                   # the tables again, into results/pipeline_cluster.md

Per model, rate and number of hosts scripts/pipeline_measure.py runs on hosts that scripts/emulated_cluster.py starts: GPipe, 1F1B
and ZB-H1 with several numbers of micro-batches, micro-batches in one program whose gradients are summed once or every time, and on
more than two hosts PipeDream with replicas (scripts/pipeline_candidates.py), beside plans of one program (data parallelism among
them); of the model with two branches, pinned plans beside every plan without pins. Rows go to results/pipeline_cluster.csv, a case
at once; a second run goes on with the cases that are missing.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

import pydantic
from cluster_table import APART, FITTED, RESULTS, by_case, on_hosts, reported, sections
from csv_files import CsvRow, Name, Positive

from soapjax.helpers.files import write_text_atomic
from soapjax.strategy.plan import ModelSource

FIELDS = ("model", "hosts", "rate", "strategy", "kind", "predicted_s", "measured_s", "spread", "steps", "loss")
ONE_PROGRAM = (*FITTED, "mcmc")


class Model(NamedTuple):
    source: ModelSource
    is_branched: bool = False  # pinned plans instead of pipelines


# Small enough for two cores. AlexNet and VGG-16 have most parameters in their dense layers and most arithmetic before.
MODELS: dict[str, Model] = {
    "alexnet": Model(
        ModelSource(
            path="models.alexnet", settings={"batch": 48, "image": 67, "width": 0.5, "classes": 1000, "dropout": 0.0}
        )
    ),
    "vgg16": Model(
        ModelSource(path="models.vgg", settings={"batch": 16, "image": 32, "width": 0.5, "classes": 1000, "dropout": 0.0})
    ),
    # Hosts that share cores compute sooner when others wait: here what is sent takes nearly all of the time.
    "mlp": Model(
        ModelSource(path="models.mlp", settings={"batch": 9216, "width": 64, "layers": 8, "features": 64, "classes": 64})
    ),
    "two_towers": Model(
        ModelSource(path="models.two_towers", settings={"batch": 64, "width": 1024, "layers": 12, "features": 256}), True
    ),
}  # fmt: skip
CASES = ("alexnet:200mbit", "alexnet:200mbit:4", "mlp:200mbit:4", "alexnet:1gbit", "vgg16:200mbit", "two_towers:200mbit")


class Row(CsvRow):
    """A row of pipeline_cluster.csv."""

    model: Name
    hosts: Name
    rate: Name
    strategy: Name
    kind: Name
    predicted_s: Positive
    measured_s: Positive
    spread: Annotated[float, pydantic.Field(ge=0, le=1e6)]

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


Cases = dict[tuple[str, str, str], list[Row]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="MODEL:RATE[:HOSTS]")
    parser.add_argument("--hosts", type=int, default=2, help="of cases that do not say it")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per case, at most")
    parser.add_argument("--output", default=str(RESULTS / "pipeline_cluster.csv"))
    parser.add_argument("--table", default=str(RESULTS / "pipeline_cluster.md"))
    parser.add_argument("--work", default=str(RESULTS / "pipeline_cluster"), help="where calibrations and plans are kept")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the tables of what was measured")
    options, rest = parser.parse_known_args()
    for case in [] if options.report else options.cases:
        if status := measure(options, rest, *case.split(":", 2)):
            return status
    return reported(options.output, read, lambda cases: report(cases, Path(options.table)))


def report(cases: Cases, page: Path) -> None:
    text = document(cases)
    write_text_atomic(page, text)
    print(text)


def measure(options: argparse.Namespace, rest: list[str], model: str, rate: str = "", hosts: str = "") -> int:
    options = argparse.Namespace(**vars(options) | {"hosts": hosts or options.hosts})
    return on_hosts("pipeline_measure.py", options, model, rate, rest, is_known=model in MODELS)


def read(path: str) -> Cases:
    return by_case(path, Row)


def misordered(rows: list[Row]) -> list[tuple[str, str]]:
    """Pairs whose measured times are more than 5 % apart, and whose predicted times say the opposite."""
    wrong = []
    for a, b in itertools.combinations(rows, 2):
        slow, fast = (a, b) if a.measured_s > b.measured_s else (b, a)
        if slow.measured_s > (1 + APART) * fast.measured_s and slow.predicted_s < fast.predicted_s:
            wrong.append((fast.strategy, slow.strategy))
    return wrong


def document(cases: Cases) -> str:
    begin = (
        "# Pipelines and pinned plans on an emulated cluster\n\n"
        "Hosts of one core each and shaped links (`scripts/emulated_cluster.py`); all models are small (`MODELS` in\n"
        "`scripts/pipeline_cluster.py`). Made by `python scripts/pipeline_cluster.py`. Spread is (slowest - fastest) / median\n"
        "of the timed steps. The calibration's two factors were fitted on the plans of one program. Four hosts share two cores:\n"
        "they compute sooner than calibrated while others wait, as in pipelines; and sums of small gradients, of which latencies\n"
        "are nearly all, overlap on that machine as they do not in the simulation.\n"
    )
    return begin + sections(cases, table, summary)


def table(rows: list[Row]) -> str:
    lines = ["| plan | kind | simulated ms | measured ms | spread | error |", "|---|---|--:|--:|--:|--:|"]
    for r in sorted(rows, key=lambda r: r.measured_s):
        times = f"{r.predicted_s * 1e3:.1f} | {r.measured_s * 1e3:.1f} | {r.spread:.1%} | {r.error:+.1%}"
        lines.append(f"| {r.strategy} | {r.kind} | {times} |")
    return "\n".join(lines) + "\n"


def summary(rows: list[Row]) -> str:
    """What the table says: errors and order of plans of several programs, and their gain over one program."""
    several = [r for r in rows if r.kind != "one program"]
    single = {r.strategy: r for r in rows if r.kind == "one program"}
    if not several:
        return ""
    best = min(several, key=lambda r: r.measured_s)
    lines = []
    for kind in dict.fromkeys(r.kind for r in several):
        errors = sorted(abs(r.error) for r in several if r.kind == kind)
        lines.append(f"- {kind}: error at most {errors[-1]:.1%}, median {errors[len(errors) // 2]:.1%}")
    wrong = misordered(several)
    lines.append("- order kept" if not wrong else "- wrong order: " + ", ".join(f"{a} before {b}" for a, b in wrong))
    if "data_parallel" in single:
        gain = single["data_parallel"].measured_s / best.measured_s
        lines.append(f"- {best.strategy}: {gain:.2f} x data parallelism, measured")
    if single:
        other = min(single.values(), key=lambda r: r.measured_s)
        gain = other.measured_s / best.measured_s
        lines.append(f"- {best.strategy}: {gain:.2f} x the best plan of one program ({other.strategy}), measured")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
