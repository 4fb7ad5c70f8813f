"""Any layout becomes any other, piece by piece; on devices of one process here, on several in test_pipeline_processes.py."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from soapjax.execute.transfers.pieces import on_every_process, pieces_of, piecewise

SHAPE = (8, 4)


def layouts():
    devices = np.array(jax.devices())
    two = Mesh(devices[:4].reshape(2, 2), ("a", "b"))
    other = Mesh(devices[2:8].reshape(2, 3), ("a", "b"))
    one = Mesh(devices[7:], ("a",))
    specs = [(), ("a",), (None, "a"), (("a",),)]
    found = [NamedSharding(mesh, PartitionSpec(*spec)) for mesh in (two, other, one) for spec in specs]
    return [*found, NamedSharding(two, PartitionSpec("b", "a")), NamedSharding(two, PartitionSpec(("b", "a")))]


def test_any_layout_becomes_any_other():
    x = np.arange(32.0).reshape(SHAPE)
    pairs = list(itertools.product(layouts(), repeat=2))
    sources, targets = zip(*pairs, strict=True)
    moved = piecewise(sources, targets)(*(jax.device_put(x, s) for s in sources))
    for y, target in zip(moved, targets, strict=True):
        assert y.sharding == target and y.committed
        for shard in y.addressable_shards:
            np.testing.assert_array_equal(shard.data, x[shard.index])


@pytest.mark.parametrize("source", range(14))
def test_every_element_comes_once_from_a_device_that_has_it(source):
    source = layouts()[source]
    having = source.devices_indices_map(SHAPE)
    for target in layouts():
        came = {d: np.zeros(SHAPE, int) for d in target.mesh.devices.flat}
        for p in pieces_of(source, target, SHAPE):
            block = tuple(slice(a, b) for a, b in p.block)
            came[p.target][block] += 1
            held = np.zeros(SHAPE, bool)
            held[having[p.source]] = True
            assert held[block].all()
            assert p.source == p.target or not _has(having.get(p.target), block)  # nothing is sent that is there
        for device, index in target.devices_indices_map(SHAPE).items():
            wanted = np.zeros(SHAPE, int)
            wanted[index] = 1
            np.testing.assert_array_equal(came[device], wanted)


def _has(index, block):
    if index is None:
        return False
    held = np.zeros(SHAPE, bool)
    held[index] = True
    return bool(held[block].all())


def test_a_scalar_comes_to_every_process():
    source = layouts()[0]
    target = on_every_process(jax.devices(), source)
    (y,) = piecewise([source], [target])(jax.device_put(np.float32(3), source))
    assert float(y) == 3 and len(target.device_set) == 1  # there is one process
