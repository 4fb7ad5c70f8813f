"""Everything on one device, and the experts' placement by layers: baselines of Trinity and of learned placement before it.

Zeng et al., "Trinity", Algorithms 2022, 15(4), 108, section 5.1, the paragraphs "Single GPU" and "Layered Expert":

    recurrent nets  each LSTM layer on a device of its own, attention and the softmax layer together on one
    others          by layers (NASNet, PNASNet), or on a single device (Inception-v3, which is hard to place well)

How it was read: recurrent layers go round the devices in program order, encoder before decoder (four layers on two devices:
0, 1, 0, 1). What feeds recurrent layers (embeddings) is where the first of them is; what comes after, attention and softmax, is on
the device of the last one, as Mirhoseini et al., 2017, section 4.1, have it. Of nets without recurrence both ways are tried, a
single device and contiguous runs of equally many layers; an expert would keep the better one.
"""

from __future__ import annotations

import time

import numpy as np

from soapjax.jit.array_types import Array
from soapjax.search.experts.baselines import result_of
from soapjax.search.experts.layers import Layer, forward_edges, layers_of
from soapjax.search.experts.placement import placed, placed_layers, require_pins
from soapjax.search.problem import Budget, PlanningProblem, SearchResult
from soapjax.strategy.configs import Strategy


def single_device(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """Every operator on the first device."""
    begin = time.monotonic()
    require_pins(problem, "single_device")
    return result_of(problem, [placed(problem, np.zeros(problem.graph.num_operators, int))], begin)


def layered_expert(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """Whole layers on devices, as an expert places them; the better way where there are two."""
    begin = time.monotonic()
    require_pins(problem, "layered_expert")
    return result_of(problem, layered_expert_strategies(problem), begin)


def layered_expert_strategies(problem: PlanningProblem) -> list[Strategy]:
    graph, count = problem.graph, problem.space.mesh.num_devices
    layers = layers_of(graph)
    if any(layer.is_recurrent for layer in layers):
        return [placed_layers(problem, layers, _recurrent_homes(graph, layers, count))]
    runs = np.arange(len(layers)) * count // max(len(layers), 1)
    return [placed_layers(problem, layers, home) for home in (runs, np.zeros_like(runs))]


def _recurrent_homes(graph, layers: tuple[Layer, ...], count: int) -> np.ndarray:
    """The device of each layer, int [layers]."""
    home = np.full(len(layers), -1)
    for number, i in enumerate(i for i, layer in enumerate(layers) if layer.is_recurrent):
        home[i] = number % count
    last = int(home[home >= 0][-1])
    layer_of = {n: i for i, layer in enumerate(layers) for n in layer.operators}
    reads: list[set[int]] = [set() for _ in layers]  # layers that read a layer
    for a, b, _, _ in forward_edges(graph):
        reads[layer_of[a]].add(layer_of[b])
    for i in range(len(layers)):
        if home[i] < 0:
            fed = sorted(home[j] for j in reads[i] if layers[j].is_recurrent)
            is_fed = any(i in reads[j] for j in range(len(layers)) if layers[j].is_recurrent)
            home[i] = fed[0] if fed and not is_fed else last
    return home
