"""Rings through groups of devices that are not all linked: against enumeration, by hand, and as collectives are costed."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soapjax.costs.rules.links import links_of
from soapjax.topology import FactorMesh, factor_mesh, load_topology
from soapjax.topology.rings import group_shares, ring_share

CUBE_MESH = load_topology("dgx1_v100x8").levels[0].links


def whole_rings(links, group):
    """The most whole rings that share no link, by trying all; a link of one ring takes both directions."""
    left = {frozenset(p): links[p[0]][p[1]] for p in itertools.combinations(group, 2)}
    orders = [(group[0], *o, group[0]) for o in itertools.permutations(group[1:]) if o[0] < o[-1]]
    rings = [[frozenset(s) for s in itertools.pairwise(o)] for o in orders]

    def most(start):
        best = 0
        for i in range(start, len(rings)):
            if all(left[s] for s in rings[i]):
                for s in rings[i]:
                    left[s] -= 1
                best = max(best, 1 + most(i))
                for s in rings[i]:
                    left[s] += 1
        return best

    return most(0)


@settings(max_examples=60)
@given(st.integers(3, 5), st.data())
def test_parts_of_rings_carry_no_less_than_whole_ones(size, data):
    links = [[0] * size for _ in range(size)]
    for a, b in itertools.combinations(range(size), 2):
        links[a][b] = links[b][a] = data.draw(st.integers(0, 2))
    if not any(map(any, links)):
        return
    most = max(map(sum, links))
    share, whole = ring_share(links, range(size)), 2 * whole_rings(links, range(size)) / most
    assert whole - 1e-6 <= share <= min(map(sum, links)) / most + 1e-6, "no device sends more than it has links"
    assert (share > 0) == (whole > 0)
    doubled = [[2 * n for n in row] for row in links]
    assert ring_share(doubled, range(size)) == pytest.approx(share), "twice the links, all of them, are no other share"
    assert share >= 2 * whole_rings(doubled, range(size)) / (2 * most) - 1e-6


@pytest.mark.parametrize(
    "axes, share",
    [((0,), 1 / 6), ((1,), 1 / 6), ((2,), 1 / 6), ((0, 1), 2 / 6), ((0, 2), 2 / 6), ((1, 2), 4 / 6), ((0, 1, 2), 1)],
)
def test_a_hybrid_cube_mesh_by_hand(axes, share):
    """GPUs 0-3 are a quad with two rings both ways; 0, 2, 4, 6 one ring; 0 and 1 one link; all eight three rings."""
    assert group_shares(CUBE_MESH, (2, 2, 2))[axes][0] == pytest.approx(share)


def test_rings_of_the_quad_as_they_are():
    assert ring_share(CUBE_MESH, (0, 1, 2, 3)) == pytest.approx(2 * whole_rings(CUBE_MESH, (0, 1, 2, 3)) / 6)
    assert ring_share(CUBE_MESH, (2, 3)) == pytest.approx(2 / 6)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_links_between_all_are_as_good_as_a_switch_for_all_together(size):
    alike = tuple(tuple(int(a != b) for b in range(size)) for a in range(size))
    assert ring_share(alike, range(size)) == pytest.approx(1)
    assert ring_share(alike, (0, 1)) == pytest.approx(1 / (size - 1))


def test_collectives_have_the_links_of_their_group():
    """8 MB summed over GPUs 0 and 1: one link of 25 GB/s at 80 %; over all eight: six."""
    topology = load_topology("dgx1_v100x8")
    links = links_of(topology, factor_mesh(topology))
    assert links.rate("all-reduce", 0, [2]) == pytest.approx(25e9 * 0.8)
    assert links.rate("all-reduce", 0, [0, 1, 2]) == links.rate("all-reduce", 0) == pytest.approx(150e9 * 0.8)
    switched = load_topology("a100x8")
    assert not links_of(switched, factor_mesh(switched)).group_share


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (8,)])
def test_a_mesh_that_is_written_by_hand(sizes):
    """Axes of a stage's own mesh: groups of four every second GPU, and of four in a row."""
    topology = load_topology("dgx1_v100x8")
    links = links_of(topology, FactorMesh(tuple("xy"[: len(sizes)]), sizes, (0,) * len(sizes)))
    wanted = {(4, 2): (2 / 6, 1 / 6), (2, 4): (1 / 6, 4 / 6), (8,): (1.0,)}[sizes]
    assert [links.rate("all-gather", 0, [a]) / 120e9 for a in range(len(sizes))] == pytest.approx(wanted)
    assert links.rate("all-gather", 0, list(range(len(sizes)))) == pytest.approx(120e9)


def test_a_part_of_a_level():
    (level,) = load_topology("dgx1_v100x8").levels
    assert level.part(0, 8) == level
    quad = level.part(4, 4)
    assert quad.bandwidth_bytes_per_s == pytest.approx(5 * 25e9), "GPU 7 has five links to the others"
    (share, _) = group_shares(quad.links, (2, 2))[0, 1]
    assert share * quad.bandwidth_bytes_per_s == pytest.approx(4 * 25e9), "two rings, both ways"
    pair = level.part(2, 2)
    assert pair.bandwidth_bytes_per_s == pytest.approx(50e9) and pair.links == ((0, 2), (2, 0))
    apart = level.part(3, 2)  # GPUs 3 and 4 are not linked
    assert apart.bandwidth_bytes_per_s == pytest.approx(25e9) and not apart.links
    assert level.part(0, 1).bandwidth_bytes_per_s == level.bandwidth_bytes_per_s and not level.part(0, 16).links
    assert math.prod(level.part(0, 6).axis_sizes) == 6
