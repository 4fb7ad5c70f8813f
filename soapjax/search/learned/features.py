"""What the networks are told of operators (Trinity, table 1), and the groups of operators of fixed co-location.

Trinity (Zeng et al., Algorithms 2022, 15(4), 108), section 4.1.1:

    time       seconds on one device, as a z-score
    structure  node2vec of the graph
    type       a word of a vocabulary; the word's vector is learned (networks.py)
    out        the elements of all results together

How it was read: a *word* is what an operator computes, whatever the shapes (`Task.structure`), of its first task; at most
200 words, the commonest, as the paper collects 200 of TensorFlow's, and one for all others. Elements are counted as z-scores
of their logarithms: from a scalar to a table of words they span eight decades.

Hierarchical (Mirhoseini et al., "A Hierarchical Model for Device Placement", 2018) has no times and no node2vec: it is told the
places in program order of up to six operators that an operator reads from and of six that read from it.
"""

from __future__ import annotations

import collections
from typing import Literal, NamedTuple

import numpy as np

from soapjax.graph.operators import OperatorGraph
from soapjax.search.experts.layers import forward_edges, layers_of, steps_of
from soapjax.search.experts.placement import operator_seconds
from soapjax.search.learned.node_embedding import Walking, node2vec
from soapjax.search.problem import PlanningProblem

VOCABULARY = 200
NEIGHBOURS = 6  # that are named, on either side of an operator
NOBODY = -1.0
WALKING = Walking()
FIGURES = 2 + WALKING.size  # as many for every planner: one program serves them all
Chosen = Literal["trinity", "hierarchical"]


class Features(NamedTuple):
    """Of N operators; E edges between different ones."""

    word: np.ndarray  # int32 [N], at most VOCABULARY
    figures: np.ndarray  # float32 [N, FIGURES]
    size: np.ndarray  # float32 [N]: of the results, z-score
    seconds: np.ndarray  # float32 [N]: of compute on one device
    edges: np.ndarray  # int32 [E, 2], smaller one first


def features_of(rng: np.random.Generator, problem: PlanningProblem, told: Chosen) -> Features:
    graph, seconds = problem.graph, operator_seconds(problem)
    size, edges = z_score(np.log1p(result_elements(graph))), edges_of(graph)
    if told == "trinity":
        vectors = node2vec(rng, graph.num_operators, edges, WALKING)
        figures = [z_score(seconds)[:, None], size[:, None], vectors]
    else:
        figures = [size[:, None], *(z_score(x)[:, None] for x in neighbours_of(graph.num_operators, edges).T)]
    of_all = np.zeros((graph.num_operators, FIGURES), np.float32)
    found = np.concatenate(figures, axis=1)
    of_all[:, : found.shape[1]] = found
    return Features(words_of(graph), of_all, size.astype(np.float32), seconds.astype(np.float32), edges)


def z_score(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / max(float(x.std()), 1e-12) if len(x) else x


def words_of(graph: OperatorGraph) -> np.ndarray:
    """The word of every operator, int32 [N], by how common it is; VOCABULARY for a rare one."""
    names = [graph.tasks[op.tasks[0]].structure or op.kind for op in graph.operators]
    common = [name for name, _ in collections.Counter(names).most_common(VOCABULARY)]
    number = {name: i for i, name in enumerate(common)}
    return np.array([number.get(name, VOCABULARY) for name in names], np.int32)


def result_elements(graph: OperatorGraph) -> np.ndarray:
    """Elements of all that an operator writes, float [N]."""
    found = np.zeros(graph.num_operators)
    for task in graph.tasks:
        for access in task.writes:
            found[task.operator] += np.prod(graph.tensors[access.tensor].shape, dtype=float)
    return found


def edges_of(graph: OperatorGraph) -> np.ndarray:
    """Pairs of operators of which one reads what the other writes, in any phase, int32 [E, 2]."""
    maker = {a.tensor: t.operator for t in graph.tasks for a in t.writes}
    pairs = {
        (min(maker[a.tensor], t.operator), max(maker[a.tensor], t.operator))
        for t in graph.tasks for a in t.reads if maker.get(a.tensor, t.operator) != t.operator
    }  # fmt: skip
    return np.array(sorted(pairs), np.int32).reshape(-1, 2)


def neighbours_of(num_operators: int, edges: np.ndarray) -> np.ndarray:
    """Where in the program the nearest neighbours before and after an operator stand, from 0 to 1, float [N, 2 × NEIGHBOURS]."""
    found = np.full((num_operators, 2, NEIGHBOURS), NOBODY)
    count = np.zeros((num_operators, 2), int)
    by_distance = edges[np.argsort(edges[:, 1] - edges[:, 0], kind="stable")]
    for a, b in by_distance.tolist():
        for n, side, other in ((b, 0, a), (a, 1, b)):
            if count[n, side] < NEIGHBOURS:
                found[n, side, count[n, side]] = other / max(num_operators - 1, 1)
                count[n, side] += 1
    return found.reshape(num_operators, -1)


def colocated(graph: OperatorGraph, seconds: np.ndarray, num_devices: int, max_groups: int) -> np.ndarray:
    """The group of every operator, int [N], groups numbered in program order.

    Mirhoseini et al., 2017, section 3.3: all of a recurrent layer at one time step is one group; then the cheapest group joins
    the neighbour that it exchanges most bytes with, until `max_groups` are left.
    """
    _, steps = steps_of(graph)
    group = np.arange(graph.num_operators)
    for layer in layers_of(graph):
        if layer.is_recurrent:
            first: dict[str, int] = {}
            for n in layer.operators:
                group[n] = group[first.setdefault(steps[n], n)]
    weight = {int(g): float(seconds[group == g].sum()) for g in np.unique(group)}
    near: dict[int, dict[int, float]] = {g: {} for g in weight}
    for a, b, size, _ in forward_edges(graph):
        a, b = int(group[a]), int(group[b])
        if a != b:
            near[a][b] = near[a].get(b, 0.0) + size
            near[b][a] = near[b].get(a, 0.0) + size
    light = sum(weight.values()) / num_devices / 2
    parent = {g: g for g in weight}
    while len(weight) > max_groups:
        g = min(weight, key=lambda g: (weight[g], g))
        # Into a neighbour that stays small, so that the rest can still be balanced; else the one before it.
        choices = near[g] or {max((o for o in weight if o < g), default=min(o for o in weight if o != g)): 0.0}
        other = max(choices, key=lambda o: (weight[o] + weight[g] <= light, choices[o], -o))
        parent[g] = other
        weight[other] += weight.pop(g)
        for o, size in near.pop(g).items():
            del near[o][g]
            if o != other:
                near[o][other] = near[o].get(other, 0.0) + size
                near[other][o] = near[other].get(o, 0.0) + size

    def root(g: int) -> int:
        while parent[g] != g:
            g = parent[g]
        return g

    roots = np.array([root(int(g)) for g in group])
    order = {r: i for i, r in enumerate(dict.fromkeys(roots.tolist()))}
    return np.array([order[r] for r in roots.tolist()])
