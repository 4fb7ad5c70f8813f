"""Sizes that happen to be equal, and layers that are computed again, change no operator: those of other sizes are the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace


def _operators(*, batch=24, inputs=12, width=20, inner=28, dtype="float32", again="none") -> list[tuple[str, list[str]]]:
    """Names and dims of the operators of four layers: [batch, inputs] -> width -> inner -> inner -> 6.

    Args:
      again: what `jax.checkpoint` is around: none, the net, or each layer.
    """
    shapes = [(inputs, width), (width, inner), (inner, inner), (inner, 6)]
    params = [np.ones(shape, np.float32) for shape in shapes]

    def layer(w, x):
        return jnp.tanh(x @ w.astype(dtype))

    each = jax.checkpoint(layer) if again == "each layer" else layer

    def net(params, x):
        x = x.astype(dtype)
        for w in params[:-1]:
            x = each(w, x)
        return (x @ params[-1].astype(dtype)).astype(jnp.float32)

    of_all = jax.checkpoint(net) if again == "the net" else net

    def step(params, x, y):
        grads = jax.grad(lambda p: ((of_all(p, x) - y) ** 2).mean())(params)
        return [w - 0.1 * g for w, g in zip(params, grads, strict=True)]

    data = np.ones((batch, inputs), np.float32), np.ones((batch, 6), np.float32)
    graph, _ = build_graph(trace(step, params, *data))
    return [(op.name, sorted(d.name for d in op.dims)) for op in graph.operators]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("again", ["none", "the net", "each layer"])
@pytest.mark.parametrize(
    "equal", [{"batch": 28}, {"width": 28}, {"batch": 28, "width": 28}, {"batch": 28, "width": 28, "inputs": 28}], ids=str
)
def test_equal_sizes_take_no_dims(dtype, again, equal):
    found = _operators(dtype=dtype, again=again, **equal)
    assert found == _operators(dtype=dtype, again=again)
    products = [dims for name, dims in found if name.startswith("dot")]
    assert products == [["param0", "param1_in", "sample"]] * 4  # no gradient of a weight is an operator of its own


def test_layers_computed_again_in_other_order():
    """Each layer's recomputation is its own operator's: the backward pass begins with the last."""
    params = [np.ones((16, 16), np.float32) for _ in range(3)]

    def step(params, x):
        layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))

        def loss(params):
            out = x
            for w in params:
                out = layer(w, out)
            return (out**2).mean()

        return [w - g for w, g in zip(params, jax.grad(loss)(params), strict=True)]

    traced = trace(step, params, np.ones((8, 16), np.float32))
    graph, binding = build_graph(traced)
    assert [op.kind for op in graph.operators].count("dot") == 3
    weights = set(traced.program.inputs[:3])
    read: dict[int, set[int]] = {}  # operator -> the weights that its products read
    for e in traced.program.leaves:
        if e.name == "dot_general":
            of = graph.tasks[binding.task_of[e.key]].operator
            read.setdefault(of, set()).update(weights & {binding.values.original[a].root for a in e.read})
    assert sorted(map(sorted, read.values())) == [[w] for w in sorted(weights)]


def _gated(*, width=20, inner=28, dtype="float32") -> list[tuple[str, list[str]]]:
    """Of two gated layers, each in `jax.checkpoint`: derivatives of the gate stand among what is computed again."""
    shapes = {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
    params = [{name: np.ones(shape, np.float32) for name, shape in shapes.items()} for _ in range(2)]

    @jax.checkpoint
    def layer(p, x):
        gate, up, down = (p[name].astype(dtype) for name in shapes)
        return x + (jax.nn.silu(x @ gate) * (x @ up)) @ down

    def step(params, x):
        def loss(params):
            out = x.astype(dtype)
            for p in params:
                out = layer(p, out)
            return (out.astype(jnp.float32) ** 2).mean()

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    graph, _ = build_graph(trace(step, params, np.ones((24, width), np.float32)))
    return [(op.name, sorted(d.name for d in op.dims)) for op in graph.operators]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gated_layer_as_wide_inside_as_outside(dtype):
    found = _gated(inner=20, dtype=dtype)
    assert found == _gated(dtype=dtype)
    assert [dims for name, dims in found if name.startswith("dot")] == [["param0", "param1_in", "sample"]] * 6
