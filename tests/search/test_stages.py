"""Stage planners against brute force on small random cases, and on what PipeDream's paper says of its workers."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soapjax.costs.measured.layer_graph import LayerGraph, cuts
from soapjax.errors import SoapjaxError
from soapjax.search.stages.gpipe import balanced_partition
from soapjax.search.stages.pipedream_stages import Memory, data_parallel_s, pipedream
from soapjax.topology import DeviceTopology


def topology(sizes, rates, *, overlap=True, memory_bytes=2**40):
    """`rates`: bytes/s of one child of each level."""
    below = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    levels = [
        dict(name=name, size=size, bandwidth_bytes_per_s=rate / n, latency_s=1e-9, efficiency_fraction=1.0, source="test")
        for name, size, rate, n in zip("abc", sizes, rates, below, strict=False)
    ]
    device = dict(
        name="test", platform="cuda", memory_bytes=memory_bytes, memory_fraction=1.0, memory_margin_fraction=0.0,
        memory_bandwidth_bytes_per_s=1e12, memory_efficiency_fraction=1.0, peak_flops_per_s={"float32": 1e12},
        efficiency_fraction=dict(dot=1.0, conv=1.0, other=1.0), launch_s=1e-6, overlap=overlap, source="test",
    )  # fmt: skip
    return DeviceTopology.from_dict(dict(name="test", device=device, levels=levels))


def chain(seconds, activations, parameters):
    n = len(seconds)
    return LayerGraph(
        tuple(f"layer{i}" for i in range(n)), np.array(seconds) / 3, np.array(seconds) * 2 / 3, activations, parameters,
        tuple((i, i + 1) for i in range(n - 1)),
    )  # fmt: skip


class BruteForce:
    """The objective as its definition reads, over every plan on a line of workers, chains only."""

    def __init__(self, graph, sizes, rates, overlap, memory_bytes=math.inf, state_copies=2.0, total=None):
        self.graph, self.sizes, self.rates, self.overlap = graph, sizes, rates, overlap
        self.memory_bytes, self.state_copies = memory_bytes, state_copies
        self.total = total or math.prod(sizes)

    def path(self, worker):
        return np.unravel_index(worker, self.sizes)

    def rate_between(self, workers):
        """Of the slowest level at which some of `workers` differ."""
        paths = [self.path(w) for w in workers]
        return next(rate for level, rate in enumerate(self.rates) if len({p[: level + 1] for p in paths}) > 1)

    def sync(self, workers):
        total = 0.0
        for level, rate in enumerate(self.rates):
            children = {}
            for w in workers:
                children.setdefault(self.path(w)[:level], set()).add(self.path(w)[level])
            n = max(len(c) for c in children.values())
            total += 2 * (n - 1) / n / rate
        return total

    def stage(self, k, j, workers, line):
        g, m = self.graph, len(workers)
        compute = sum(g.compute_s[k:j])
        sync = sum(g.parameter_bytes[k:j]) * self.sync(workers)
        versions = math.ceil((line - workers[0]) / m)
        weights, kept = sum(g.parameter_bytes[k:j]), sum(g.activation_bytes[k:j])
        if versions * (weights + kept) + self.state_copies * weights > self.memory_bytes:
            return math.inf
        return (max(compute, sync) if self.overlap else compute + sync) / m

    def plans(self):
        """(boundaries, worker counts) of every plan of plain stages."""
        n = self.graph.num_layers
        for stages in range(1, min(n, self.total) + 1):
            for inner in itertools.combinations(range(1, n), stages - 1):
                for used in range(stages, self.total + 1):
                    for marks in itertools.combinations(range(1, used), stages - 1):
                        yield (0, *inner, n), (0, *marks, used)

    def objective(self, bounds, marks):
        found = []
        for s in range(len(bounds) - 1):
            mine = range(marks[s], marks[s + 1])
            found.append(self.stage(bounds[s], bounds[s + 1], mine, self.total))
            if s:
                both = range(marks[s - 1], marks[s + 1])
                found.append(2 * self.graph.activation_bytes[bounds[s] - 1] / self.rate_between(both))
        return max(found)

    def best(self):
        return min(self.objective(*plan) for plan in self.plans())


figures, rates = st.floats(0.1, 100.0), st.floats(100.0, 100_000.0)  # rates in bytes/s: a topology has no slower link than 1


@st.composite
def chains(draw, most=6):
    n = draw(st.integers(1, most))
    each = st.lists(figures, min_size=n, max_size=n)
    return chain(draw(each), *([1000 * x for x in draw(each)] for _ in range(2)))


@settings(max_examples=60)
@given(chains(), st.integers(1, 5), rates, st.booleans())
def test_one_level_is_optimal(graph, workers, rate, overlap):
    found = pipedream(graph, topology([workers], [rate], overlap=overlap), memory=Memory(is_limited=False))
    brute = BruteForce(graph, (workers,), (rate,), overlap)
    assert found.bottleneck_s == pytest.approx(brute.best(), rel=1e-9)
    # The plan itself is worth what is claimed for it.
    bounds = (0, *(s.layers[-1] + 1 for s in found.stages))
    marks = (0, *(s.devices[-1] + 1 for s in found.stages))
    assert brute.objective(bounds, marks) == pytest.approx(found.bottleneck_s, rel=1e-9)


@settings(max_examples=40)
@given(chains(5), rates, rates, st.booleans())
def test_two_levels_are_no_worse_than_any_line_of_workers(graph, slow, fast, overlap):
    """With pipelines inside hosts allowed too, the optimum can only be better; plans of plain stages are worth what is claimed."""
    found = pipedream(graph, topology([2, 2], [slow, fast], overlap=overlap), memory=Memory(is_limited=False))
    brute = BruteForce(graph, (2, 2), (slow, fast), overlap)
    best = brute.best()
    # The only plans besides: both hosts run the same pipeline, and gradients of all layers are summed across.
    inside = BruteForce(graph, (2,), (fast,), overlap).best()
    sync = graph.parameter_bytes.sum() * (2 * 1 / 2 / slow)
    nested = (max(inside, sync) if overlap else inside + sync) / 2
    assert found.bottleneck_s == pytest.approx(min(best, nested), rel=1e-9)
    if best < nested * (1 - 1e-9):
        bounds, marks = (0, *(s.layers[-1] + 1 for s in found.stages)), (0, *(s.devices[-1] + 1 for s in found.stages))
        assert brute.objective(bounds, marks) <= found.bottleneck_s * (1 + 1e-9)


@settings(max_examples=40)
@given(chains(5), st.floats(20_000, 1_500_000))
def test_memory_is_respected(graph, memory_bytes):
    brute = BruteForce(graph, (4,), (7.0,), True, int(memory_bytes))
    best = brute.best()
    machine = topology([4], [7.0], memory_bytes=int(memory_bytes))
    if math.isinf(best):
        with pytest.raises(SoapjaxError, match="fit"):
            pipedream(graph, machine)
    else:
        assert pipedream(graph, machine).bottleneck_s == pytest.approx(best, rel=1e-9)


@settings(max_examples=40)
@given(chains(7), st.integers(1, 7))
def test_the_balanced_partition_is_optimal(graph, stages):
    if stages > graph.num_layers:
        with pytest.raises(SoapjaxError, match=f"1 to {graph.num_layers}"):
            balanced_partition(graph, stages)
        return
    found = balanced_partition(graph, stages)
    assert [i for s in found for i in s] == list(range(graph.num_layers)) and len(found) == stages
    cost = graph.compute_s
    best = min(
        max(sum(cost[a:b]) for a, b in itertools.pairwise((0, *marks, len(cost))))
        for marks in itertools.combinations(range(1, len(cost)), stages - 1)
    )
    assert max(sum(cost[list(s)]) for s in found) == pytest.approx(best)


@settings(max_examples=40)
@given(st.integers(0, 2**15 - 1), st.integers(2, 6))
def test_cuts_are_the_prefixes_of_the_graph(bits, n):
    """Against all subsets: a cut contains the inputs of its members; a crossing output is made inside and read outside."""
    pairs = list(itertools.combinations(range(n), 2))
    edges = tuple(p for i, p in enumerate(pairs) if bits >> i & 1)
    sizes = 2.0 ** np.arange(n)
    graph = LayerGraph(tuple(map(str, range(n))), np.ones(n), np.ones(n), sizes, np.ones(n), edges)
    found = cuts(graph)
    expected = {
        frozenset(s) for r in range(n + 1) for s in itertools.combinations(range(n), r)
        if all(a in s for a, b in edges if b in s)
    }  # fmt: skip
    members = [frozenset(np.flatnonzero(row).tolist()) for row in found.members]
    assert set(members) == expected and len(members) == len(expected)
    for inside, crossing in zip(members, found.crossing_bytes, strict=True):
        assert crossing == sum(sizes[a] for a in {a for a, b in edges if a in inside and b not in inside})
    for k, j in itertools.product(range(len(members)), repeat=2):
        assert found.is_inside[k, j] == (members[k] < members[j])


def test_heavy_weights_behind_light_activations_are_not_replicated():
    """VGG's shape: convolutions first, then weights that cost more to sum than to wait for: 15-1 on four hosts of four."""
    graph = chain([30.0, 30.0, 30.0, 1.0], [50.0, 50.0, 1.0, 1.0], [1.0, 1.0, 1.0, 5000.0])
    machine = topology([4, 4], [10.0, 100.0])
    found = pipedream(graph, machine)
    assert found.config == "15-1"
    assert data_parallel_s(graph, machine) > found.bottleneck_s
    # Without weights to sum, nothing beats data parallelism: no bubble, no transfer.
    assert pipedream(chain([30.0] * 3, [50.0] * 3, [0.0] * 3), machine).config == "16"


def test_of_equally_fast_plans_the_one_with_fewest_workers():
    graph = chain([10.0, 10.0], [1.0, 1.0], [1e6, 1e6])
    machine = topology([6], [1.0])
    assert [len(s.devices) for s in pipedream(graph, machine).stages] == [1, 1]
    assert sum(len(s.devices) for s in pipedream(graph, machine, all_workers=True).stages) == 6
    assert len(pipedream(graph, machine, num_stages=1).stages) == 1


def test_figures_of_layers_are_checked():
    with pytest.raises(SoapjaxError, match="forward_s: got nan") as caught:
        LayerGraph(("a", "b"), [math.nan, 1], [1, 1], [1, 1], [1, -1], ((1, 0),))
    assert len(caught.value.problems) == 3


def test_a_layer_that_fits_nowhere_is_an_error():
    with pytest.raises(SoapjaxError, match="layer1"):
        pipedream(chain([1.0, 1.0], [1.0, 1.0], [1.0, 1e13]), topology([4], [1.0]))


