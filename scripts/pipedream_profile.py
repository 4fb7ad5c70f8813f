"""Reads the files of PipeDream's profiler (Narayanan et al. 2019, section 3.1), one layer or one edge per line:

    node4 -- Conv2d(64, 192, kernel_size=(5, 5)) -- forward_compute_time=3.128, backward_compute_time=5.612, ↵
        activation_size=143327232.000, parameter_size=1229568.000
    ⇥node3 -- node4

Times are milliseconds of one minibatch, sizes bytes; a layer of several outputs has a list of sizes, [6291456.0; 131072.0].
Inputs are no layers (loading data is nobody's stage), nor is what never follows from a layer and costs nothing.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import numpy as np

from soapjax.costs.measured.layer_graph import LayerGraph
from soapjax.errors import Problem, SoapjaxError
from soapjax.helpers.files import read_text

FIGURES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
MAX_REPORTED = 20
MAX_LAYERS = 20_000
_REMEDY = "correct the line, or profile the model again"
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")


class _Node(NamedTuple):
    line: int
    kind: str
    figures: tuple[float, ...]  # by FIGURES


def read_profile(path: str | os.PathLike[str]) -> LayerGraph:
    """The layers of a profile file.

    Raises: SoapjaxError naming every line that is malformed, edges of unknown layers, and cycles.
    """
    return parse_profile(read_text(path), place=str(path))


def parse_profile(text: str, *, place: str = "profile") -> LayerGraph:
    """The layers that the text of a profile describes; see `read_profile`."""
    problems: list[Problem] = []
    nodes: dict[str, _Node] = {}
    edges: list[tuple[int, str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{place}: line {number}"
        parts = [part.strip() for part in line.split(" -- ")]
        if line.startswith("\t"):
            if len(parts) == 2 and all(parts):
                edges.append((number, parts[0], parts[1]))
            else:
                problems.append(Problem(where, repr(line.strip()), "an edge, 'node1 -- node2'", _REMEDY))
            continue
        if len(parts) < 3 or not parts[0]:
            expected = "a layer, 'node1 -- Linear(...) -- forward_compute_time=..., ...', or an edge behind a tab"
            problems.append(Problem(where, repr(line.strip()), expected, _REMEDY))
            continue
        if parts[0] in nodes:
            expected = f"a name of its own: line {nodes[parts[0]].line} has it too"
            problems.append(Problem(where, parts[0], expected, "rename one of them"))
        nodes[parts[0]] = _Node(number, " -- ".join(parts[1:-1]), _figures(parts[-1], where, problems))
    for number, a, b in edges:
        for name in {a, b} - nodes.keys():
            expected, remedy = "a layer that has a line of its own", "add it, or delete the edge"
            problems.append(Problem(f"{place}: line {number}", name, expected, remedy))
    if not nodes and not problems:
        expected = "a layer per line, as PipeDream's profiler writes them"
        problems.append(Problem(place, "no layers", expected, "check the path"))
    if len(nodes) > MAX_LAYERS:
        problems.append(Problem(place, f"{len(nodes)} layers", f"at most {MAX_LAYERS}", "profile larger layers"))
    if problems:
        raise SoapjaxError(problems[:MAX_REPORTED])
    return _layer_graph(nodes, sorted({(a, b) for _, a, b in edges}), place)


def _figures(text: str, where: str, problems: list[Problem]) -> tuple[float, ...]:
    given = dict(part.strip().partition("=")[::2] for part in text.split(","))
    figures = []
    for name in FIGURES:
        numbers = [x.strip() for x in given.get(name, "").strip("[] ").split(";")]
        if name not in given:
            problems.append(Problem(where, f"no {name}", f"{name}=a number", _REMEDY))
        elif not all(_NUMBER.fullmatch(x) for x in numbers):
            expected = "a number, zero or more, or a list [1.0; 2.0] of them"
            problems.append(Problem(f"{where}: {name}", repr(given[name]), expected, _REMEDY))
        else:
            figures.append(sum(float(x) for x in numbers))
            continue
        figures.append(0.0)
    return tuple(figures)


def _layer_graph(nodes: dict[str, _Node], edges: list[tuple[str, str]], place: str) -> LayerGraph:
    inputs: dict[str, list[str]] = {name: [] for name in nodes}
    for a, b in edges:
        inputs[b].append(a)
    left_out: set[str] = set()
    order: list[str] = []
    waiting = dict(inputs)
    while waiting:
        ready = [name for name, needs in waiting.items() if not any(n in waiting for n in needs)]
        if not ready:
            some = ", ".join(sorted(waiting)[:5])
            raise SoapjaxError(Problem(f"{place}: edges", f"a cycle through {some}", "no cycles", _REMEDY))
        for name in ready:
            order.append(name)
            del waiting[name]
    for name in order:
        node = nodes[name]
        is_input = not inputs[name] and node.kind.startswith("Input")
        if is_input or (not any(node.figures) and all(n in left_out for n in inputs[name])):
            left_out.add(name)
    kept = _depth_first([n for n in order if n not in left_out], inputs, left_out)
    if not kept:
        raise SoapjaxError(Problem(place, "only inputs", "layers that compute", "profile the whole model"))
    index = {name: i for i, name in enumerate(kept)}
    figures = np.array([nodes[name].figures for name in kept])
    return LayerGraph(
        names=tuple(f"{name} {nodes[name].kind}" for name in kept),
        forward_s=figures[:, 0] / 1e3,
        backward_s=figures[:, 1] / 1e3,
        activation_bytes=figures[:, 2],
        parameter_bytes=figures[:, 3],
        edges=tuple((index[a], index[b]) for a, b in edges if a in index and b in index),
    )


def _depth_first(order: list[str], inputs: dict[str, list[str]], left_out: set[str]) -> list[str]:
    """Every layer right after the last of its inputs, so that few outputs cross a prefix of the order."""
    readers: dict[str, list[str]] = {name: [] for name in order}
    missing = {name: 0 for name in order}
    for name in order:
        for source in inputs[name]:
            if source not in left_out:
                readers[source].append(name)
                missing[name] += 1
    stack = [name for name in reversed(order) if not missing[name]]
    result = []
    while stack:
        name = stack.pop()
        result.append(name)
        for reader in reversed(readers[name]):
            missing[reader] -= 1
            if not missing[reader]:
                stack.append(reader)
    return result
