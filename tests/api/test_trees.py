"""Arguments and results in trees of many kinds: nodes that look at their leaves, state in parts of a result."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import sampled
from jax.example_libraries import optimizers
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import soapjax
from soapjax.graph.trace.tracing import trace


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class LossScale:
    """A node that looks at its leaf as it is made."""

    scale: Any

    def __post_init__(self):
        if type(self.scale) is not object and not jnp.issubdtype(jax.eval_shape(lambda: self.scale).dtype, jnp.floating):
            raise ValueError("no float")

    def tree_flatten(self):
        return (self.scale,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


@jax.tree_util.register_pytree_node_class
class Flat:
    """A node that keeps its leaves in a list, from which JAX leaves out what is None."""

    def __init__(self, mapping):
        self.leaves, self.tree = jax.tree.flatten(dict(mapping))

    def __getitem__(self, key):
        return jax.tree.unflatten(self.tree, self.leaves)[key]

    def tree_flatten(self):
        return tuple(self.leaves), self.tree

    @classmethod
    def tree_unflatten(cls, tree, leaves):
        return cls(jax.tree.unflatten(tree, leaves))


def weights():
    rng = np.random.default_rng(0)
    return {"a": rng.normal(size=(12, 24)).astype(np.float32), "b": rng.normal(size=(24, 8)).astype(np.float32) / 4}


def loss(w, x):
    return ((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2).mean()


def updated(w, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, gradient), value


def with_scale(state, x):
    w, s = state
    new, value = updated(w, x * s.scale / s.scale)
    return (new, s), value


class Result(NamedTuple):
    loss: Any
    state: Any


MOMENTUM, MOMENTUM_UPDATE, MOMENTUM_PARAMS = optimizers.momentum(0.1, mass=0.9)


def by_optimizer(state, x):
    """JAX's own optimizers: a NamedTuple that is registered as a node of its own is the only result."""
    return MOMENTUM_UPDATE(0, jax.grad(loss)(MOMENTUM_PARAMS(state), x), state)


STEPS = {
    "checked": (with_scale, lambda: (weights(), LossScale(jnp.float32(4)))),
    "flat": (updated, lambda: Flat(weights())),
    "a dict": (lambda w, x: dict(zip(("state", "loss"), updated(w, x), strict=True)), weights),
    "in a dict in a tuple": (lambda w, x: ({"new": {"w": updated(w, x)[0]}}, updated(w, x)[1]), weights),
    "a named tuple": (lambda w, x: Result(*updated(w, x)[::-1]), weights),
    "a node of its own": (by_optimizer, lambda: MOMENTUM(weights())),
}
IN_PARTS = {"microbatches": 2, "proposals": 4}
FORMS = [{"planner": "fsdp"}, IN_PARTS, {"pipeline": "1f1b", "stages": 2, **IN_PARTS}]


@pytest.mark.parametrize("form", FORMS, ids=["one program", "micro-batches", "pipeline"])
@pytest.mark.parametrize("name", sampled(STEPS, 2))
def test_a_step_with_trees_of_its_own_trains_as_jit(name, form):
    step, make = STEPS[name]
    x = np.random.default_rng(1).normal(size=(16, 12)).astype(np.float32)
    assert len(trace(step, make(), x).state_pairs) == len(jax.tree.leaves(make()))
    run, wanted = soapjax.soap_shard(step, donate=False, **form), jax.jit(step)
    found, expected = run(make(), x), wanted(make(), x)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, again, other in zip(*map(jax.tree.leaves, (found, run(make(), x), expected)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=1e-6)
        np.testing.assert_array_equal(mine, again)


def test_a_batch_that_looks_like_a_parameter_is_no_state():
    """The larger argument is looked for first, and a single array within a dict is never one."""

    def step(x, w):
        return updated(w, x)[0], {"rows": x * 2}

    w = weights()
    traced = trace(step, np.ones((12, 12), np.float32), w | {"a": np.ones((12, 24), np.float32)})
    assert [traced.in_paths[i] for i in traced.state_pairs] == ["w.a", "w.b"]
    same = trace(lambda x, w: {"w": w - x, "y": x}, np.ones((4, 4)), np.ones((4, 4)))
    assert not same.state_pairs


@pytest.mark.parametrize("spec", [P("batch"), P()])
def test_micro_batches_of_arrays_on_a_mesh_of_explicit_axes(spec):
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Explicit,))
    x, w = np.random.default_rng(1).normal(size=(16, 12)).astype(np.float32), weights()
    expected = jax.jit(updated)(w, x)[1]
    with jax.set_mesh(mesh):
        args = (jax.device_put(w, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, spec)))
        for form in FORMS[1:]:
            np.testing.assert_allclose(soapjax.soap_shard(updated, donate=False, **form)(*args)[1], expected, rtol=1e-5)
