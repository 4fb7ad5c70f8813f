"""The factor mesh: prime axes, slowest link first."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soapjax.errors import SoapjaxError
from soapjax.topology import LinkLevel, factor_mesh, load_topology


def topology_of(*levels):
    """A topology with these (name, size) levels, slowest first."""
    return replace(load_topology("a100x8"), levels=tuple(LinkLevel(n, s, 1e9, 1e-6, 1.0, "test") for n, s in levels))


def is_prime(n):
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def test_hosts_and_gpus():
    mesh = factor_mesh(topology_of(("host", 4), ("device", 8)))
    assert mesh.axis_names == ("h0", "h1", "d0", "d1", "d2")
    assert mesh.axis_sizes == (2, 2, 2, 2, 2)
    assert mesh.axis_levels == (0, 0, 1, 1, 1)
    assert mesh.device_coordinates(9) == (0, 1, 0, 0, 1)


def test_larger_primes_first():
    mesh = factor_mesh(topology_of(("host", 12), ("device", 10)))
    assert dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)) == {"h0": 3, "h1": 2, "h2": 2, "d0": 5, "d1": 2}


def test_three_levels():
    assert factor_mesh(load_topology("k80x64")).axis_names == ("h0", "h1", "h2", "h3", "p0", "d0")


def test_a_level_of_one_gives_no_axis():
    mesh = factor_mesh(topology_of(("host", 1), ("device", 2)))
    assert (mesh.axis_names, mesh.axis_levels) == (("d0",), (1,))


@pytest.mark.parametrize("levels", [[("device", 1)], [("host", 1), ("device", 1)], [("node", 1)]])
def test_one_device_is_one_axis(levels):
    mesh = factor_mesh(topology_of(*levels))
    assert (mesh.axis_names, mesh.axis_sizes, mesh.num_devices) == (("d0",), (1,), 1)
    assert mesh.axis_levels == (len(levels) - 1,)
    assert mesh.device_coordinates(0) == (0,)


@pytest.mark.parametrize(
    "names, prefixes",
    [
        (("host", "device"), ("h", "d")),
        (("host", "hive", "device"), ("ho", "hi", "d")),
        (("host", "hostel"), ("host", "hoste")),
        (("rack", "rail", "r"), ("rac", "rai", "r")),
    ],
)
def test_axis_prefixes_are_unique(names, prefixes):
    mesh = factor_mesh(topology_of(*((n, 2) for n in names)))
    assert mesh.axis_names == tuple(f"{p}0" for p in prefixes)


@pytest.mark.parametrize("i", [-1, 8])
def test_no_such_device(i):
    with pytest.raises(SoapjaxError, match="0 to 7"):
        factor_mesh(load_topology("a100x8")).device_coordinates(i)


NAMES = st.builds(str.__add__, st.sampled_from("abc"), st.text("abc_", max_size=3))


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    names=st.lists(NAMES, min_size=3, max_size=3, unique=True),
)
def test_properties(sizes, names):
    topology = topology_of(*zip(names, sizes, strict=False))
    mesh = factor_mesh(topology)
    assert mesh.num_devices == topology.num_devices == math.prod(mesh.axis_sizes)
    assert len(set(mesh.axis_names)) == len(mesh.axis_names) == len(mesh.axis_sizes) == len(mesh.axis_levels) >= 1
    assert list(mesh.axis_levels) == sorted(mesh.axis_levels)
    if mesh.num_devices > 1:
        assert all(is_prime(size) for size in mesh.axis_sizes)
        for index, size in enumerate(sizes):
            own = [s for s, level in zip(mesh.axis_sizes, mesh.axis_levels, strict=True) if level == index]
            assert math.prod(own) == size and own == sorted(own, reverse=True)


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_coordinates_count_row_major(sizes):
    mesh = factor_mesh(topology_of(*zip("abc", sizes, strict=False)))
    coordinates = [mesh.device_coordinates(i) for i in range(mesh.num_devices)]
    assert coordinates == sorted(set(coordinates))
    assert all(0 <= c < s for row in coordinates for c, s in zip(row, mesh.axis_sizes, strict=True))
