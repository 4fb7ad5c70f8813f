"""`LayerGraph`: what stage planners need of a model, as plain data, whoever measured or predicted it.

A layer is what a stage boundary never cuts. Figures are of one minibatch (or micro-batch) on one device; times may come from
PipeDream's profiler (scripts/pipedream_profile.py) or from the cost model (search/stages/stage_problem.py).

>>> graph = LayerGraph(names=("embed", "block", "loss"), forward_s=[1e-3, 3e-3, 1e-3], backward_s=[2e-3, 6e-3, 1e-3],
...                    activation_bytes=[4e6, 4e6, 4], parameter_bytes=[1e8, 4e6, 0], edges=((0, 1), (1, 2)))

`cuts(graph)` are its possible prefixes: sets of layers that contain all their inputs. A stage is what lies between two of them,
the smaller inside the larger. Of a chain they are the prefixes; a graph with branches has more.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from soapjax.errors import Problem, SoapjaxError

MAX_CUTS = 600  # more (a wide graph) would make the dynamic program slow: then prefixes of one topological order only


@dataclasses.dataclass(frozen=True, eq=False)
class LayerGraph:
    """N layers in topological order.

    Raises: SoapjaxError for figures that are not finite or negative, and for edges that do not lead forwards.
    """

    names: tuple[str, ...]
    forward_s: np.ndarray  # [N]
    backward_s: np.ndarray  # [N]
    activation_bytes: np.ndarray  # [N]: the layer's output, which its readers need
    parameter_bytes: np.ndarray  # [N]
    edges: tuple[tuple[int, int], ...]  # (producer, reader)
    kept_bytes: np.ndarray | None = None  # [N]: what the backward pass needs of it; `activation_bytes` by default

    def __post_init__(self):
        problems = []
        if self.kept_bytes is None:
            object.__setattr__(self, "kept_bytes", self.activation_bytes)
        for field in ("forward_s", "backward_s", "activation_bytes", "parameter_bytes", "kept_bytes"):
            figures = np.asarray(getattr(self, field), float)
            object.__setattr__(self, field, figures)
            if figures.shape != (self.num_layers,):
                problems.append(Problem(field, f"{figures.size} figures", f"{self.num_layers}, one per layer", "correct the list"))
                continue
            for i in np.flatnonzero(~(np.isfinite(figures) & (figures >= 0)))[:5]:
                expected, remedy = "a finite number, zero or more", "measure the layer again"
                problems.append(Problem(f"{self.names[i]}: {field}", f"{figures[i]:g}", expected, remedy))
        if not self.names:
            problems.append(Problem("layers", "none", "at least one layer", "name a model that computes something"))
        for a, b in self.edges:
            if not 0 <= a < b < self.num_layers:
                problems.append(Problem("edges", f"{a} -> {b}", "from a layer to a later one", "list layers in topological order"))
        if problems:
            raise SoapjaxError(problems)

    @property
    def num_layers(self) -> int:
        return len(self.names)

    @property
    def compute_s(self) -> np.ndarray:
        return self.forward_s + self.backward_s


class Cuts(NamedTuple):
    """S prefixes in order of size, the empty one first and the whole graph last; figures are sums over a prefix.

    A stage from cut k to cut j has `compute_s[j] - compute_s[k]`, and so on.
    """

    members: np.ndarray  # bool [S, N]
    is_inside: np.ndarray  # bool [S, S]: k is a proper part of j, so that k..j is a stage
    compute_s: np.ndarray  # [S]
    parameter_bytes: np.ndarray  # [S]
    kept_bytes: np.ndarray  # [S]
    crossing_bytes: np.ndarray  # [S]: of outputs made inside and read outside, each once

    @property
    def num_cuts(self) -> int:
        return len(self.members)


def cuts(graph: LayerGraph, *, max_cuts: int = MAX_CUTS) -> Cuts:
    """All prefixes of a layer graph; where there are more than `max_cuts`, those of its topological order."""
    n = graph.num_layers
    units = _units(graph)
    unit_of = {layer: u for u, unit in enumerate(units) for layer in unit}
    inputs: list[set[int]] = [set() for _ in units]
    for a, b in graph.edges:
        if unit_of[a] != unit_of[b]:
            inputs[unit_of[b]].add(unit_of[a])
    found = _prefixes([sum(1 << u for u in mine) for mine in inputs], max_cuts)
    members = np.zeros((len(found), n), bool)
    for s, prefix in enumerate(found):
        members[s, [layer for u, unit in enumerate(units) if prefix >> u & 1 for layer in unit]] = True
    outside = ~members.astype(bool)
    is_read = np.zeros((len(found), n), bool)
    for a, b in graph.edges:
        is_read[:, a] |= members[:, a] & outside[:, b]
    size = members.sum(1)
    common = members.astype(np.float32) @ members.T.astype(np.float32)
    return Cuts(
        members, (common == size[:, None]) & (size[:, None] < size), members @ graph.compute_s, members @ graph.parameter_bytes,
        members @ graph.kept_bytes, is_read @ graph.activation_bytes,
    )  # fmt: skip


def _units(graph: LayerGraph) -> list[list[int]]:
    """Layers to cut between: one that costs nothing stays with its inputs, where all of them are one unit."""
    inputs: list[list[int]] = [[] for _ in graph.names]
    for a, b in graph.edges:
        inputs[b].append(a)
    units: list[list[int]] = []
    unit_of: dict[int, int] = {}
    is_free = (graph.compute_s == 0) & (graph.parameter_bytes == 0)
    for layer in range(graph.num_layers):
        before = {unit_of[i] for i in inputs[layer]}
        if is_free[layer] and len(before) == 1:
            unit_of[layer] = before.pop()
            units[unit_of[layer]].append(layer)
        else:
            unit_of[layer] = len(units)
            units.append([layer])
    return units


def _prefixes(inputs: list[int], max_cuts: int) -> list[int]:
    """Sets of units, as bits, that contain their inputs; smallest first."""
    everything = (1 << len(inputs)) - 1
    level, found = {0}, [0]
    while level:
        level = {p | 1 << u for p in level for u, needs in enumerate(inputs) if not p >> u & 1 and needs & ~p == 0}
        found += sorted(level)
        if len(found) > max_cuts:
            return [everything >> k for k in range(len(inputs), -1, -1)]
    return found
