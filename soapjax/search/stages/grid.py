"""The grid that people tune by hand, swept by a closed formula: what the search of pipelines starts from.

A point is a number of stages, the degree of tensor parallelism inside them (with or without sequence parallelism), how parameters
are stored, the size of a micro-batch, the schedule, and whether stages compute their activations again; data parallelism takes
the devices that are left. Its time and memory follow from two prices of the whole model per degree, on as many devices as the
degree says (time and activations are straight lines in the size of the micro-batch), by formulas that thousands of points
a second pass through:

    step = (M + (S - 1) / V) * slowest stage + sums of gradients once, or parameters gathered every time + update
    memory = state + gradients + micro-batches in flight * what one keeps + one micro-batch's own

for S groups of devices with V stages each and M micro-batches (Narayanan et al. 2021, sections 2.2 and 3). They order the points;
what a point costs is said by `StageProblem.price`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from soapjax.costs.measured.layer_graph import LayerGraph
from soapjax.errors import SoapjaxError
from soapjax.search.stages.choices import Choice
from soapjax.search.stages.gpipe import balanced_partition
from soapjax.search.stages.stage_figures import STORED, expert_of, level_between
from soapjax.search.stages.stage_problem import StageProblem
from soapjax.simulate.pipeline_tasks import StageLoad
from soapjax.strategy.pipeline import ScheduleName

MOST_CHUNKS = 4  # stages of one group of devices in an interleaved schedule


class Point(NamedTuple):
    """One point of the grid; `inside` is the name of an inner strategy (stage_figures.py) without its storage."""

    schedule: ScheduleName
    groups: int
    width: int  # devices of each group
    chunks: int  # stages of each group
    inside: str
    degree: int  # of tensor parallelism
    storage: str  # of STORED
    num_microbatches: int
    rematerialise: bool

    @property
    def name(self) -> str:
        again = ", rematerialised" if self.rematerialise else ""
        return f"{self.schedule}{again}"


class _Line(NamedTuple):
    """The whole model on `degree` devices: figures of one sample per micro-batch, and what one sample more costs [fields]."""

    one: np.ndarray
    more: np.ndarray

    def at(self, samples: np.ndarray) -> StageLoad:
        """Figures for so many samples [points]."""
        return StageLoad(*(self.one[:, None] + self.more[:, None] * (samples - 1)))


class Grid:
    """All points of a problem, best first."""

    def __init__(self, problem: StageProblem):
        self.problem, self.topology = problem, problem.topology
        self.batch = problem.most_microbatches
        self.layers = [problem.layers(self.batch, marks) for marks in dict.fromkeys((problem.joints, problem.cuts))]
        self.bounds: dict[int, tuple[int, ...] | None] = {}

    def choices(self) -> Iterator[tuple[str, float, Choice]]:
        """Points as choices that the problem can price: the name of their kind, seconds of a step by the formula, and the choice.

        What fits by the formula, and is fast, comes first.
        """
        points = self._points()
        if not points:
            return
        step_s, excess = self._figures(points)
        for k in np.lexsort((step_s, excess)):
            choice = self._choice(points[k])
            if choice is not None and self.problem.is_valid(choice):
                yield points[k].name, float(step_s[k]), choice

    def _points(self) -> list[Point]:
        found = []
        for groups in self.problem.stages:
            # Seven devices for two stages leave one idle, and more where the samples of no micro-batch divide by three, or the
            # devices of a stage were of two hosts, and not all of these.
            widths = range(self.topology.num_devices // groups, 0, -1)
            whole = (width for width in widths if self.problem.has_units((width,) * groups))
            found += next(filter(None, (self._points_of(groups, width) for width in whole)), [])
        return found

    def _points_of(self, groups: int, width: int) -> list[Point]:
        problem, found = self.problem, []
        is_whole = width == self.topology.num_devices // groups
        insides = self._insides(self.topology.num_devices // min(problem.stages) if is_whole else width)
        for (inside, degree), num in itertools.product(insides, problem.microbatches):
            if width % degree or (self.batch // num) % (width // degree):
                continue  # devices would repeat each other's work
            for schedule, chunks in self._schedules(groups, num):
                for storage, again in itertools.product(STORED, (True, False)):
                    if (storage and width == degree) or (problem.always_rematerialise and not again):
                        continue
                    if problem.expert not in (None, expert_of(inside + storage)):
                        continue
                    found.append(Point(
                        schedule=schedule, groups=groups, width=width, chunks=chunks, inside=inside, degree=degree,
                        storage=storage, num_microbatches=num, rematerialise=again,
                    ))  # fmt: skip
        return found

    def _schedules(self, groups: int, num: int) -> Iterator[tuple[ScheduleName, int]]:
        for schedule in self.problem.schedules:
            if groups == 1 and schedule != "1f1b" and "1f1b" in self.problem.schedules:
                continue  # the same order, or more micro-batches in flight
            if schedule != "interleaved":
                yield schedule, 1
            elif groups > 1 and num % groups == 0:
                yield from ((schedule, chunks) for chunks in range(2, MOST_CHUNKS + 1))

    def _insides(self, width: int) -> list[tuple[str, int]]:
        """Names of inner strategies as used, with their degrees: those that a stage of so many devices may have."""
        plain = [n for n in self._names(width, self.problem.microbatches[-1]) if not any(n.endswith(s) for s in STORED if s)]
        return [(n, int(n.split(",")[0].split("/")[1]) if "/" in n else 1) for n in plain]

    def _names(self, width: int, num: int) -> list[str]:
        """Of all inner strategies of a stage of so many devices."""
        return [x.name for x in self.problem.loads.fabric(0, width, num).choices]

    # The formula.

    def _figures(self, points: list[Point]) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a step, and bytes per device beyond what is usable, of every point."""
        step_s, excess = np.full(len(points), np.inf), np.full(len(points), np.inf)
        kinds: dict[tuple[str, int], list[int]] = {}
        for k, p in enumerate(points):
            kinds.setdefault((p.inside, p.degree), []).append(k)
        for (inside, degree), mine in kinds.items():
            line = self._line(inside, degree)
            step_s[mine], excess[mine] = self._of_kind(line, degree, [points[k] for k in mine])
        return step_s, excess

    def _line(self, inside: str, degree: int) -> _Line:
        problem = self.problem
        everything = (0, len(problem.forward))
        two = min(n for n in range(2, self.batch + 1) if self.batch % n == 0) if self.batch > 1 else 1
        found = []
        for samples in dict.fromkeys((1, two)):
            num = self.batch // samples
            names = self._names(degree, num)
            inner = names.index(inside) if inside in names else 0
            found.append(np.array(problem.loads.load(everything, 0, degree, num, inner), np.float64))
        return _Line(found[0], (found[-1] - found[0]) / max(two - 1, 1))

    def _of_kind(self, line: _Line, degree: int, points: list[Point]) -> tuple[np.ndarray, np.ndarray]:
        fields = "groups", "width", "chunks", "num_microbatches"
        groups, width, chunks, num = (np.array([getattr(p, f) for p in points], float) for f in fields)
        again = np.array([p.rematerialise for p in points])
        sharded, regathered, scattered = (
            np.array([word in p.storage for p in points]) for word in ("sharded", "regathered", "gradients")
        )  # fmt: skip
        data = width // degree
        one = line.at(self.batch / num / data)
        gather_s = self._ring_s(one.parameter_bytes / groups, data.astype(int), degree)
        share = self._slowest_share((groups * chunks).astype(int))
        pass_s = (one.forward_s * (1 + again) + one.backward_s) * share
        pass_s += regathered * 3.0 * gather_s / chunks
        sum_s = gather_s * one.gradient_bytes / np.maximum(one.parameter_bytes, 1)
        pass_s += scattered * sum_s / chunks
        once_s = np.where(regathered, 0.0, np.where(scattered, gather_s, 2 * sum_s))
        most = groups * np.where(chunks > 1, 2 - 1 / chunks, 1)
        is_put_off = np.array([p.schedule == "zb-h1" for p in points])
        in_flight = np.where([p.schedule == "gpipe" for p in points], num, np.minimum(num, most))
        # Gradients of weights, a third of a pass or so, fill the bubble at the end (Qi et al. 2023, section 2.3).
        # What is computed again for the first gradient is done while the stage waits for it.
        bubble_s = (groups - 1) * (pass_s - np.where(again & ~is_put_off, one.forward_s * share, 0))
        bubble_s *= np.where(is_put_off, 2 / 3, 1)
        step_s = num * chunks * pass_s + bubble_s + once_s + one.update_s / groups / np.where(sharded, data, 1)
        held = np.where(again, one.input_bytes + one.batch_bytes, one.kept_bytes / groups)
        whole = one.state_bytes / groups / np.where(sharded, data, 1)
        whole += one.gradient_bytes / groups / np.where(regathered | scattered, data, 1)
        whole += np.where(sharded & ~regathered, one.parameter_bytes / groups, 0)
        memory = whole + in_flight * held + np.maximum(one.working_bytes, one.kept_bytes) / groups
        return step_s, np.maximum(memory - self.problem.usable_bytes, 0)

    def _ring_s(self, size_bytes: np.ndarray, data: np.ndarray, degree: int) -> np.ndarray:
        """Seconds to gather parameters over data parallelism (costs/rules/links.py), over the slowest links between replicas."""
        levels = [self.topology.levels[level_between(self.topology, 0, int(d) * degree - 1)] for d in data]
        rate = np.array([level.achieved_bytes_per_s for level in levels])
        latency = np.array([level.latency_s for level in levels])
        return (data - 1) * latency + size_bytes * (data - 1) / data / rate

    def _slowest_share(self, stages: np.ndarray) -> np.ndarray:
        """Of the whole model's time, what the slowest of so many stages takes; all of it where it cannot be cut so often."""
        layers, marks = self.layers[-1]
        before = np.r_[0.0, np.cumsum(layers.compute_s)] / layers.compute_s.sum()
        shares = {}
        for g in set(stages.tolist()):
            bounds = self._bounds(g) or (marks[0], marks[-1])
            # Of a long model the joints of its blocks are not all among the other places to cut at.
            shares[g] = np.diff(np.interp(bounds, marks, before)).max()
        return np.array([shares[g] for g in stages.tolist()])

    # From points to choices.

    def _choice(self, p: Point) -> Choice | None:
        bounds = self._bounds(p.groups * p.chunks)
        if bounds is None:
            return None
        names = self._names(p.width, p.num_microbatches)
        if p.inside + p.storage not in names:
            return None
        inner = names.index(p.inside + p.storage)
        again = (p.rematerialise,) * (len(bounds) - 1)
        return Choice(p.schedule, p.num_microbatches, bounds, (p.width,) * p.groups, (inner,) * p.groups, again)

    def _bounds(self, stages: int) -> tuple[int, ...] | None:
        """GPipe's balanced partition into so many stages, even of stacked state; None where the model has too few places to cut."""
        if stages not in self.bounds:
            self.bounds[stages] = next(filter(None, (self._partition(*x, stages) for x in self.layers)), None)
        return self.bounds[stages]

    def _partition(self, layers: LayerGraph, marks: tuple[int, ...], stages: int) -> tuple[int, ...] | None:
        if stages > layers.num_layers:
            return None
        ways = self.problem.stacks.even_cuts(marks, stages) if stages in self.problem.even_stages else (None,)
        before = np.r_[0.0, np.cumsum(layers.compute_s)]
        found: list[tuple[float, tuple[int, ...]]] = []
        for allowed in ways:
            with contextlib.suppress(SoapjaxError):
                ends = [0, *(p[-1] + 1 for p in balanced_partition(layers, stages, allowed))]
                found.append((float(np.diff(before[ends]).max()), tuple(marks[k] for k in ends)))
        return min(found)[1] if found else None
