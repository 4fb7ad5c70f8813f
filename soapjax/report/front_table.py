"""The front of time, communication and memory as a table and as a plot of characters, for a terminal.

A front may have thousands of plans, many of them all but equal: MOST_ROWS that are far from one another are shown, the best in each
figure among them. Their letters stand in the plot; a dot is any other plan, the star the one that is taken.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from soapjax.helpers.sizes import size
from soapjax.report.plan_tables import seconds
from soapjax.report.text_table import TextTable

MOST_ROWS = 16
WIDTH, HEIGHT = 56, 12  # of a plot, in characters
TAKEN = "*"


class FrontRow(NamedTuple):
    """One plan of a front."""

    step_time_s: float
    sent_bytes: float  # in a step by the device that sends most
    memory_bytes: float
    words: str = ""  # what it is, where it has a name
    is_taken: bool = False


def front_view(rows: Sequence[FrontRow]) -> RenderableType:
    """Table and plots."""
    if not rows:
        return Text("no front: nothing that was judged fits the devices")
    shown = _spread(rows)
    marks = {i: TAKEN if rows[i].is_taken else letter for i, letter in zip(shown, string.ascii_letters, strict=False)}
    table = TextTable(title=f"the front of time, communication and memory: {_count(len(rows), len(shown))}", title_justify="left")
    for column in ("", "step", "a device sends", "memory", "plan"):
        table.add_column(column, justify="left" if column in ("", "plan") else "right")
    for i in shown:
        r = rows[i]
        table.add_row(marks[i], seconds(r.step_time_s), size(r.sent_bytes), size(r.memory_bytes), r.words)
    figures = np.array([r[:3] for r in rows], float)
    plots = [
        _plot(figures[:, 0], figures[:, k], marks, f"{what} a device, over the step time", (seconds, size))
        for k, what in ((1, "bytes sent by"), (2, "memory of"))
    ]  # fmt: skip
    return Group(table, Text("\n\n".join(plots)))


def _count(every: int, shown: int) -> str:
    plans = "1 plan" if every == 1 else f"{every} plans"
    return plans if every == shown else f"{shown} of {plans}"


def _spread(rows: Sequence[FrontRow]) -> list[int]:
    """Rows to be shown, the fastest first: the best in each figure and what is taken, then always what is farthest from these."""
    places = np.stack([_places(np.array([r[k] for r in rows], float)) for k in range(3)], 1)  # [F, 3] from 0 to 1
    chosen = list(dict.fromkeys([*(i for i, r in enumerate(rows) if r.is_taken), *(int(i) for i in places.argmin(0))]))
    distance = np.full(len(rows), np.inf)
    for i in chosen:
        distance = np.minimum(distance, np.abs(places - places[i]).max(1))
    while len(chosen) < min(MOST_ROWS, len(rows)) and distance.max() > 1e-3:
        i = int(distance.argmax())
        chosen.append(i)
        distance = np.minimum(distance, np.abs(places - places[i]).max(1))
    return sorted(chosen, key=lambda i: rows[i][:3])


def _places(x: np.ndarray) -> np.ndarray:
    """Numbers on a scale from 0 to 1: a logarithmic one where they are positive and span a decade."""
    low, high = float(x.min()), float(x.max())
    if low > 0 and high > 10 * low:
        x, low, high = np.log(x), math.log(low), math.log(high)
    return (x - low) / (high - low) if high > low else np.zeros(len(x))


def _plot(x: np.ndarray, y: np.ndarray, marks: dict[int, str], title: str, units: tuple) -> str:
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    columns, lines = (_places(x) * (WIDTH - 1)).round().astype(int), ((1 - _places(y)) * (HEIGHT - 1)).round().astype(int)
    order = [*(i for i in range(len(x)) if i not in marks), *sorted(marks, key=lambda i: (marks[i] == TAKEN, -i))]
    for i in order:
        grid[lines[i]][columns[i]] = marks.get(i, ".")
    labels = [units[1](float(v)) for v in (y.max(), y.min())]
    width = max(map(len, labels))
    heads = {0: labels[0], HEIGHT - 1: labels[1]}
    out = [title, *(f"{heads.get(k, ''):>{width}} |{''.join(row).rstrip()}" for k, row in enumerate(grid))]
    left, right = (units[0](float(v)) for v in (x.min(), x.max()))
    out += [f"{'':>{width}} +{'-' * WIDTH}", f"{'':>{width}}  {left}{right:>{WIDTH - len(left)}}"]
    return "\n".join(out)
