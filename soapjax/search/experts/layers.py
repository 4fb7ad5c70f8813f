"""Which operators are one layer, and which layers are recurrent: for strategies that place whole layers.

An unrolled recurrent net holds every layer once per time step, with the same parameters. Products that read one parameter
and differ only in a number of their names tell which part of a name counts steps:

    step0/rnn/lstm1/hidden, step1/rnn/lstm1/hidden, ...  ->  rnn/lstm1/hidden at step0, step1, ...

Without these parts, equal names are one node of a small graph. Its cycles are recurrences, those of a loop (`scan`) too. The
innermost module that holds one cycle is one recurrent layer, with all that stands in it (`rnn/lstm1`: cell, input product,
hidden product). Every other node is a layer of its own.
What runs in the backward pass only belongs to the layer that reads its results.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import scipy

from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.phases import FORWARD

LOOP = "loop "  # begins the step of what a loop runs in every trip
Key = tuple[str, ...]  # parts of a name without those that count time steps


class Layer(NamedTuple):
    name: str
    operators: tuple[int, ...]
    is_recurrent: bool


def forward_edges(graph: OperatorGraph) -> list[tuple[int, int, float, bool]]:
    """(producer, reader, bytes, whether it is carried to the next trip of a loop) of every tensor between forward tasks."""
    maker = {a.tensor: (k, t.operator) for k, t in enumerate(graph.tasks) if t.phase == FORWARD for a in t.writes}
    return [
        (maker[a.tensor][1], t.operator, graph.tensors[a.tensor].size_bytes, maker[a.tensor][0] >= k)
        for k, t in enumerate(graph.tasks) if t.phase == FORWARD
        for a in t.reads if a.tensor in maker
    ]  # fmt: skip


def steps_of(graph: OperatorGraph) -> tuple[list[Key], list[str]]:
    """Per operator its name without what counts time steps, and that step ("" where there is none, a loop's own name in it)."""
    parts, numbers = [], []
    for op in graph.operators:
        base, _, number = op.name.partition("#")
        parts.append(tuple(base.split("/")))
        numbers.append(f"#{number}" if number else "")
    readers: dict[int, dict[int, None]] = {p.tensor: {} for p in graph.parameters}
    for task in graph.tasks:
        if task.phase == FORWARD and task.kind in ("dot", "conv"):
            for access in task.reads:
                if access.tensor in readers:
                    readers[access.tensor][task.operator] = None
    counts: set[str] = set()
    unscoped: set[Key] = set()  # modules in which the numbers of equal names count steps
    for found in readers.values():
        for n, m in itertools.pairwise(sorted(found)):
            if len(parts[n]) != len(parts[m]):
                continue
            differ = [(a, b) for a, b in zip(parts[n], parts[m], strict=True) if a != b]
            if not differ:
                unscoped.add(parts[n][:-1])
            elif len(differ) == 1 and re.sub(r"\d+", "#", differ[0][0]) == re.sub(r"\d+", "#", differ[0][1]):
                counts.update(differ[0])
    unscoped = {module for module in unscoped if not counts.intersection(module)}
    keys, steps = [], []
    for n, op in enumerate(graph.operators):
        key = tuple(p for p in parts[n] if p not in counts)
        step = "/".join(p for p in parts[n] if p in counts)
        if parts[n][:-1] in unscoped or parts[n] in unscoped:
            step += numbers[n] or "#1"
        elif numbers[n]:
            key += (numbers[n],)
        keys.append(key)
        scope = next((graph.tasks[t].scope for t in op.tasks if graph.tasks[t].phase == FORWARD), "")
        steps.append(step or (f"{LOOP}{scope}" if scope else ""))
    return keys, steps


def layers_of(graph: OperatorGraph) -> tuple[Layer, ...]:
    """All layers, by their first operator; every operator is in one."""
    keys, _ = steps_of(graph)
    members: dict[Key, list[int]] = {}
    for n, key in enumerate(keys):
        members.setdefault(key, []).append(n)
    edges = {(keys[a], keys[b]) for a, b, _, is_carried in forward_edges(graph) if a != b or is_carried}

    def may_recur(some: Iterable[Key]) -> bool:
        return _may_recur(graph, [n for k in some for n in members[k]])

    taken: dict[Key, Key] = {}
    inside = {k for cycle in _cycles(members, edges) for k in cycle}
    modules = {module[:i] for k in inside for module in [_module(k)] for i in range(len(module) + 1)}
    found: list[Key] = []
    for module in sorted(modules, key=lambda m: (-len(m), m)):
        if any(m[: len(module)] == module for m in found):
            continue  # a submodule recurs
        whole = [k for k in members if k[: len(module)] == module]
        cycles = _cycles([k for k in whole if k in inside], edges)
        if not cycles or not may_recur(whole):
            continue
        found.append(module)
        for cycle in [whole] if len(cycles) == 1 and module else cycles:
            if may_recur(cycle):
                taken |= dict.fromkeys(cycle, module if cycle is whole else min(cycle))
    for n, twin in _only_backward(graph).items():
        keys[n] = keys[twin]
    groups: dict[tuple[Key, bool], list[int]] = {}
    for n, key in enumerate(keys):
        groups.setdefault((taken.get(key, key), key in taken), []).append(n)
    return tuple(Layer("/".join(k).replace("/#", "#"), tuple(ns), is_recurrent) for (k, is_recurrent), ns in groups.items())


def _only_backward(graph: OperatorGraph) -> dict[int, int]:
    """Operators without a forward task, each with one that reads their results, or else whose results they read."""
    is_forward = [any(graph.tasks[t].phase == FORWARD for t in op.tasks) for op in graph.operators]
    writer = {a.tensor: t.operator for t in graph.tasks for a in t.writes}
    near: dict[int, list[int]] = {n: [] for n, found in enumerate(is_forward) if not found}
    for makes in (True, False):
        for task in graph.tasks:
            for access in task.reads:
                maker = writer.get(access.tensor, task.operator)
                own, other = (maker, task.operator) if makes else (task.operator, maker)
                if own in near and is_forward[other]:
                    near[own].append(other)
    return {n: found[0] for n, found in near.items() if found}


def _may_recur(graph: OperatorGraph, operators: list[int]) -> bool:
    """Recurrent layers have products; a sum over all steps has none, and a loop over layers has other parameters in each trip."""
    tasks = [graph.tasks[t] for n in operators for t in graph.operators[n].tasks]
    own = {p for n in operators for p in graph.operators[n].parameters if not graph.parameters[p].is_frozen}
    shapes = [(graph.tensors[graph.parameters[p].tensor].shape, graph.tensors[graph.parameters[p].gradient].shape) for p in own]
    return any(t.kind in ("dot", "conv") for t in tasks) and not any(len(a) > len(b) for a, b in shapes)


def _module(key: Key) -> Key:
    return key[:-1] if key[-1].startswith("#") else key


def _cycles(nodes: Iterable[Key], edges: set[tuple[Key, Key]]) -> list[list[Key]]:
    """Strongly connected components with an edge in them, of the graph on `nodes`."""
    index = {k: i for i, k in enumerate(nodes)}
    pairs = np.array([(index[a], index[b]) for a, b in edges if a in index and b in index], int).reshape(-1, 2)
    matrix = scipy.sparse.csr_array((np.ones(len(pairs), np.int8), (pairs[:, 0], pairs[:, 1])), (len(index), len(index)))
    _, component = scipy.sparse.csgraph.connected_components(matrix, directed=True, connection="strong")
    inner = {int(component[a]) for a, b in pairs if component[a] == component[b]}
    return [sorted(k for k, i in index.items() if component[i] == c) for c in sorted(inner)]


def transitive(reach: np.ndarray) -> np.ndarray:
    """The transitive closure of a relation, bool [M, M]: by squaring, paths of at most 1, 2, 4, ... edges."""
    while True:
        longer = reach | (reach.astype(np.float32) @ reach.astype(np.float32) > 0)
        if (longer == reach).all():
            return reach
        reach = longer
