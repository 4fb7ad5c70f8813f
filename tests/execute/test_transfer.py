"""The one private JAX function: this fails where it goes or changes, and says what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from soapjax.execute.transfers.transfer import is_alike, mover


def sharding(devices, shape, names, spec):
    return NamedSharding(Mesh(np.array(devices).reshape(shape), names), PartitionSpec(*spec))


@pytest.mark.parametrize("spec", [(), ("a",), ("a", "b"), (None, ("a", "b"))])
def test_a_direct_copy_is_a_device_put(spec):
    devices = jax.devices()
    source, target = sharding(devices[:4], (2, 2), ("a", "b"), spec), sharding(devices[4:], (2, 2), ("a", "b"), spec)
    assert is_alike(source, target)
    x = jax.device_put(jnp.arange(64.0).reshape(8, 8), source)
    (y,) = mover([source], [target])(x)  # if this raises: let `mover` always return the jax.device_put variant
    assert y.sharding == target and y.committed
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(jax.jit(lambda a: a + 1)(y), np.asarray(x) + 1)


def test_other_layouts_go_the_usual_way():
    devices = jax.devices()
    pairs = [
        (sharding(devices[:4], (2, 2), ("a", "b"), ("a",)), sharding(devices[4:], (2, 2), ("a", "b"), ("b",))),
        (sharding(devices[:4], (4,), ("a",), ("a",)), sharding(devices[4:6], (2,), ("a",), ("a",))),
        (sharding(devices[:7], (7,), ("a",), ()), sharding(devices[7:], (1,), ("a",), ("a",))),
    ]
    for source, target in pairs:
        assert not is_alike(source, target)
        x = jax.device_put(jnp.arange(64.0).reshape(8, 8), source)
        (y,) = mover([source], [target])(x)
        assert y.sharding.is_equivalent_to(target, 2)
        np.testing.assert_array_equal(y, x)
