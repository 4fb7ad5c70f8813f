"""The expert-designed strategy for recurrent nets.

Wu et al., "Google's Neural Machine Translation System", 2016, section 3.1 and figure 1, as the paper compares with it (Jia,
Zaharia and Aiken, 2019, section 8.2.1): the nodes share the batch; within a node, operators of the same depth are on one GPU,
through all time steps. Encoder and decoder count their depth on their own, so that layer i of both is on one GPU, and layer
i + 1 may start while layer i is at its next step.

    depth 0      embeddings: what no recurrent layer feeds
    1, 2, ...    recurrent layers, each one deeper than those whose outputs it reads *at the same step*
    after these  what reads them and feeds none: attention, then the softmax layer with the loss

What stands between recurrent layers (residual sums, attention that is fed back) is as deep as the layer it reads; of those
it reads, one that it feeds back to. Where depths outnumber a node's GPUs, neighbouring depths share one, balanced by compute. The
softmax layer is tried on a GPU of its own depth, and split over the node's GPUs by words (as in section 3.1).
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from soapjax.graph.operators import NOT_SPLIT, OperatorGraph
from soapjax.jit.array_types import Array
from soapjax.search.experts.baselines import data_parallel_strategy, result_of, split_axes
from soapjax.search.experts.layers import LOOP, Layer, forward_edges, layers_of, steps_of, transitive
from soapjax.search.experts.placement import balanced_runs, operator_seconds, pins_of_devices, require_pins
from soapjax.search.problem import Budget, PlanningProblem, SearchResult
from soapjax.strategy.configs import REPLICATE, Strategy


class Depths(NamedTuple):
    layers: tuple[Layer, ...]
    depth: tuple[int, ...]  # of each layer
    softmax: tuple[int, ...]  # operators after the last recurrent layer that are deepest: the output layer and the loss


def depths_of(graph: OperatorGraph) -> Depths:
    """Depths of all layers; without recurrent layers, every layer is deeper than the one before it."""
    layers = layers_of(graph)
    count = len(layers)
    if not any(layer.is_recurrent for layer in layers):
        return Depths(layers, tuple(range(count)), ())
    layer_of = {n: i for i, layer in enumerate(layers) for n in layer.operators}
    edges = forward_edges(graph)
    direct = np.zeros((count, count), bool)  # [producer, reader]
    for a, b, _, _ in edges:
        direct[layer_of[a], layer_of[b]] = True
    reach = transitive(direct)
    recurrent = np.array([layer.is_recurrent for layer in layers])
    depth = _recurrent_depths(graph, layers, layer_of)
    # Recurrent layers that a layer reads through others that are not.
    through = direct & ~recurrent[:, None]
    near = direct | (direct.astype(int) @ transitive(through).astype(int) > 0)
    tail = []
    for i in range(count):
        reads = np.flatnonzero(near[:, i] & recurrent)
        if recurrent[i]:
            continue
        if not (reach[:, i] & recurrent).any():
            depth[i] = 0
        elif (reach[i] & recurrent).any():
            back = [r for r in reads if reach[i, r]]
            depth[i] = max((depth[r] for r in (back or reads)), default=0)
        else:
            tail.append(i)
    softmax = _tail_depths(graph, layers, tail, direct, depth)
    return Depths(layers, tuple(depth), softmax)


def _recurrent_depths(graph: OperatorGraph, layers: tuple[Layer, ...], layer_of: dict[int, int]) -> list[int]:
    """One more than the deepest recurrent layer that is read at the same step; at two steps at least, where there are more."""
    _, steps = steps_of(graph)
    producers: dict[int, list[int]] = {}
    for a, b, _, is_carried in forward_edges(graph):
        if steps[a] == steps[b] and not is_carried:
            producers.setdefault(b, []).append(a)
    feeds: list[set[int]] = [set() for _ in graph.operators]  # recurrent layers whose outputs an operator's result has in it
    at_steps: dict[tuple[int, int], set[str]] = {}
    order = sorted(range(graph.num_operators), key=lambda n: graph.operators[n].tasks[0])
    for n in order:
        i = layer_of[n]
        found = set().union(*(feeds[m] for m in producers.get(n, [])))
        for j in found - {i} if layers[i].is_recurrent else ():
            at_steps.setdefault((j, i), set()).add(steps[n])
        feeds[n] = {i} if layers[i].is_recurrent else found
    below: dict[int, list[int]] = {}
    for (j, i), where in at_steps.items():
        if len(where) >= 2 or any(w.startswith(LOOP) for w in where) or len({steps[n] for n in layers[i].operators}) == 1:
            below.setdefault(i, []).append(j)
    depth = [1 if layer.is_recurrent else 0 for layer in layers]
    for _ in layers:  # at most so many rounds: a loop that feeds back would never end
        deeper = [max([d, *(1 + depth[j] for j in below.get(i, []))]) for i, d in enumerate(depth)]
        if deeper == depth:
            break
        depth = [min(d, len(layers)) for d in deeper]
    return depth


def _tail_depths(
    graph: OperatorGraph, layers: tuple[Layer, ...], tail: list[int], direct: np.ndarray, depth: list[int]
) -> tuple[int, ...]:
    """Sets depths after the last recurrent layer: a module with weights is one deeper, others as deep as what they read."""
    modules = [layer.name.split("/")[0].split("#")[0] for layer in layers]
    weighted = {
        modules[i] for i in tail for n in layers[i].operators
        if graph.operators[n].parameters and any(graph.tasks[t].kind in ("dot", "conv") for t in graph.operators[n].tasks)
    }  # fmt: skip
    deepest, top = max(depth), {}
    for i in tail:
        if modules[i] in weighted:
            if modules[i] not in top:
                deepest += 1
                top[modules[i]] = deepest
            depth[i] = top[modules[i]]
        else:
            depth[i] = max((depth[j] for j in np.flatnonzero(direct[:, i])), default=0)
    return tuple(n for i in tail if top and depth[i] == deepest for n in layers[i].operators)


def expert_rnn_strategies(problem: PlanningProblem) -> tuple[list[Strategy], tuple[str, ...]]:
    """Softmax at its own depth, and split by words; notes on what went where, and on degrees that were lowered."""
    graph, space, mesh = problem.graph, problem.space, problem.space.mesh
    fastest = len(problem.simulator.tables.topology.levels) - 1
    inner = [a for a in range(space.num_axes) if mesh.axis_levels[a] == fastest and mesh.axis_sizes[a] > 1]
    strategy, notes = data_parallel_strategy(problem, [a for a in range(space.num_axes) if a not in inner])
    pins = pins_of_devices(problem, inner)
    found = depths_of(graph)
    if not any(layer.is_recurrent for layer in found.layers):
        notes += ("no recurrent layers found: within a node, layers stand on devices in program order",)
    seconds = operator_seconds(problem)
    variants, described = [], ""
    for split in ((), found.softmax) if found.softmax and inner else ((),):
        busy = np.zeros(1 + max(found.depth))
        for layer, d in zip(found.layers, found.depth, strict=True):
            busy[d] += sum(seconds[n] for n in layer.operators if n not in split)
        used = busy > 0
        part = balanced_runs(busy, len(pins)) if used.sum() > len(pins) else np.maximum(np.cumsum(used) - 1, 0)
        made = Strategy(strategy.axes.copy(), strategy.storage.copy())
        homes: dict[int, list[str]] = {}
        for layer, d in zip(found.layers, found.depth, strict=True):
            device = int(part[d])
            for n in layer.operators:
                if n not in split and space.may_pin(n):
                    made.axes[n, inner] = pins[device]
            if layer.is_recurrent:
                homes.setdefault(device, []).append(layer.name)
        if split:
            _split_words(problem, made, split, inner)
        described = described or "; ".join(f"{', '.join(names)} on device {d} of each node" for d, names in sorted(homes.items()))
        variants.append(made)
    return variants, notes + ((described,) if described else ())


def _split_words(problem: PlanningProblem, strategy: Strategy, operators: tuple[int, ...], axes: list[int]) -> None:
    """The softmax layer by its output features, and what follows likewise as far as their dims go on."""
    graph, space = problem.graph, problem.space
    words: dict[int, int] = {}  # tensor -> its dim of words
    for n in sorted(operators, key=lambda n: graph.operators[n].tasks[0]):
        op, first = graph.operators[n], graph.tasks[graph.operators[n].tasks[0]]
        if not space.may_pin(n):
            continue
        followed = [a.dims[words[a.tensor]] for a in first.reads if a.tensor in words]
        dim = next((d for d in followed if d != NOT_SPLIT), None)
        if dim is None and first.kind == "dot":
            dim = next((k for k, d in enumerate(op.dims) if d.kind == "P" and not d.is_reduced), None)
        strategy.axes[n, axes] = REPLICATE
        if dim is None:
            continue
        chosen = split_axes(space, n, dim, axes)
        strategy.axes[n, list(chosen)] = dim
        words |= {a.tensor: a.dims.index(dim) for a in first.writes if dim in a.dims}


def expert_rnn(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """Data parallel over nodes; within a node, layers of one depth on one device; the better of two softmax layers."""
    start = time.monotonic()
    require_pins(problem, "expert_rnn")
    variants, notes = expert_rnn_strategies(problem)
    return result_of(problem, variants, start, notes)
