"""Placements on an emulated cluster: time, communication and memory, simulated against real (Trinity's figure 9).

    sudo python scripts/placement_cluster.py                      # all
    python scripts/placement_cluster.py --report                  # the table and the figure again

Zeng et al., Algorithms 2022, 15(4), 108, section 5.5. Per model scripts/placement_measure.py runs on hosts that
scripts/emulated_cluster.py starts: everything on one device, layers in runs as people place them, what `hierarchical` and
`trinity` learn, and layers at random. Simulated with this cluster's measured operators and links; the two factors of its
calibration are fitted on plans without pins, and on no placement.

    time           of a step, the host where it takes longest
    communication  what the busiest host's network interface sends in a step, headers of TCP and its acknowledgements included
    memory         of the device that holds most, by the compiled programs: CPUs say nothing of a run's

Rows go to results/placement_cluster.csv, a case at once; a second run goes on with the cases that are missing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Annotated

import pydantic
from cluster_table import RESULTS, by_case, on_hosts, reported, sections
from csv_files import CsvRow, Name, Positive

from soapjax.helpers.files import write_text_atomic
from soapjax.strategy.plan import ModelSource

FIELDS = (
    "model", "hosts", "rate", "strategy", "predicted_s", "measured_s", "spread", "steps", "loss", "predicted_bytes", "sent_bytes",
    "predicted_memory", "compiled_memory",
)  # fmt: skip
# Small enough for two cores; parameters and activations of a few MB, so that placements differ in all three.
MODELS: dict[str, ModelSource] = {
    "two_towers": ModelSource(path="models.two_towers", settings={"batch": 64, "width": 1024, "layers": 6, "features": 256}),
    "rnnlm": ModelSource(
        path="models.rnnlm",
        settings={"batch": 64, "seq": 4, "hidden": 512, "layers": 2, "vocab": 4000, "optimizer": "sgd", "learning_rate": 0.1},
    ),
}  # fmt: skip
CASES = (("two_towers", "1gbit"), ("rnnlm", "1gbit"))
FIGURES = (  # title, unit, simulated, real, what one unit is
    ("run time", "ms", "predicted_s", "measured_s", 1e-3),
    ("peak communication", "MB", "predicted_bytes", "sent_bytes", 1e6),
    ("peak memory", "MB", "predicted_memory", "compiled_memory", 1e6),
)


class Measured(CsvRow):
    """A row of placement_cluster.csv."""

    model: Name
    hosts: Name
    rate: Name
    strategy: Name
    predicted_s: Positive
    measured_s: Positive
    spread: Annotated[float, pydantic.Field(ge=0, le=1e6)]
    predicted_bytes: Annotated[float, pydantic.Field(ge=0)]
    sent_bytes: Annotated[float, pydantic.Field(ge=0)]
    predicted_memory: Positive
    compiled_memory: Positive


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[f"{m}:{r}" for m, r in CASES], metavar="MODEL:RATE")
    parser.add_argument("--hosts", nargs="+", type=int, default=[2])
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds per case, at most")
    parser.add_argument("--output", default=str(RESULTS / "placement_cluster.csv"))
    parser.add_argument("--work", default=str(RESULTS / "placement_cluster"), help="where calibrations and plans are kept")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the table of what was measured")
    options, rest = parser.parse_known_args()
    for hosts in [] if options.report else options.hosts:
        for case in options.cases:
            model, _, rate = case.partition(":")
            of_hosts = argparse.Namespace(**vars(options) | dict(hosts=hosts))
            if status := on_hosts("placement_measure.py", of_hosts, model, rate, rest, is_known=model in MODELS):
                return status
    return reported(options.output, lambda path: by_case(path, Measured), lambda cases: report(cases, Path(options.output)))


def report(cases: dict[tuple[str, str, str], list[Measured]], path: Path) -> None:
    text = document(cases)
    write_text_atomic(path.with_suffix(".md"), text)
    print(text)
    draw(cases, path.with_suffix(".png"))


def document(cases: dict[tuple[str, str, str], list[Measured]]) -> str:
    begin = (
        "# Placements on an emulated cluster, simulated and real\n\n"
        "Hosts of one core each and shaped links (`scripts/emulated_cluster.py`); small models. Made by\n"
        "`python scripts/placement_cluster.py`, which says what each figure is of. Trinity's own figure 9 gives intervals of\n"
        "error of 0.05 s, 0.4 GB and 0.4 GB, for InceptionV3 at 0.7 s, 6 GB and 5 GB.\n"
    )
    return begin + sections(cases, table, summary)


def table(rows: list[Measured]) -> str:
    titles = (f"{title} simulated {unit} | real {unit}" for title, unit, *_ in FIGURES)
    lines = ["| placement | " + " | ".join(titles) + " | spread |", "|---|" + "--:|" * (2 * len(FIGURES) + 1)]
    for r in sorted(rows, key=lambda r: r.measured_s):
        figures = (f"{getattr(r, a) / one:.3g} | {getattr(r, b) / one:.3g}" for _, _, a, b, one in FIGURES)
        lines.append(f"| {r.strategy} | {' | '.join(figures)} | {r.spread:.0%} |")
    return "\n".join(lines) + "\n"


def summary(rows: list[Measured]) -> str:
    """Errors of each figure: the largest, in its unit, and the median, relative to what is real."""
    lines = []
    for title, unit, simulated, real, one in FIGURES:
        pairs = [(getattr(r, simulated), getattr(r, real)) for r in rows]
        relative = sorted(abs(a / b - 1) for a, b in pairs if a)
        most = max(abs(a - b) for a, b in pairs) / one
        median, worst = relative[len(relative) // 2], relative[-1]
        lines.append(f"- {title}: error at most {most:.3g} {unit}; of the real one {median:.1%} in the median, {worst:.1%} at most")
    return "\n".join(lines)


def draw(cases: dict[tuple[str, str, str], list[Measured]], path: Path) -> None:
    from paper_tables import figure

    with figure(path, ncols=len(FIGURES), figsize=(5 * len(FIGURES), 4.5)) as axes:
        for i, (title, unit, simulated, real, one) in enumerate(FIGURES if axes is not None else ()):
            largest = 0.0
            for (model, hosts, rate), rows in cases.items():
                x, y = ([getattr(r, name) / one for r in rows] for name in (simulated, real))
                axes[0, i].scatter(x, y, s=14, label=f"{model}, {hosts} hosts, {rate}")
                largest = max(largest, *x, *y)
            axes[0, i].plot([0, largest], [0, largest], color="grey", linewidth=0.8)
            axes[0, i].set(xlabel=f"simulated {unit}", ylabel=f"real {unit}", title=title)
        if axes is not None:
            axes[0, 0].legend()


if __name__ == "__main__":
    sys.exit(main())
