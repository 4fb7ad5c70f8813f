"""Stacked state taken apart: the same numbers, the graph of a model that is written layer by layer, and nothing else touched."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import sampled
from problems import abstract, total_flops

from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace

LAYERS, WIDTH = 3, 4
OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "decay": optax.adamw(1e-2),
    "clipped by the norm of all": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "factored": optax.adafactor(1e-2, min_dim_size_to_factor=WIDTH),
    "by the norm of each": optax.lamb(1e-2),
}


def evaluated(program, inputs):
    """A flat program, equation by equation."""
    env = dict(zip(program.inputs, inputs, strict=True)) | program.consts

    def read(atom):
        return env[atom] if isinstance(atom, int) else atom.val

    for eqn in program.eqns:
        results = eqn.primitive.bind(*map(read, eqn.inputs), **eqn.params)
        env.update(zip(eqn.outputs, results if eqn.primitive.multiple_results else [results], strict=True))
    return [read(o) for o in program.outputs]


def together(program, values):
    values = iter(values)
    rows = ([next(values) for _ in range(n)] for n in program.rows[1])
    return [r[0] if len(r) == 1 else jnp.stack(r) for r in rows]


def scanning(optimizer, *, remat=False, dtype=jnp.float32, python=False):
    """A step whose layers are the rows of three stacks, and its first state and batch."""

    def layer(h, w):
        return h + jnp.tanh(h @ w["up"] + w["bias"]).astype(h.dtype) @ w["down"], None

    def loss(params, x):
        h, body = x @ params["first"], jax.checkpoint(layer) if remat else layer
        stacks = jax.tree.map(lambda w: w.astype(dtype), params["layers"])
        if python:
            for t in range(LAYERS):
                h, _ = body(h, jax.tree.map(lambda w, t=t: w[t], stacks))
        else:
            h, _ = jax.lax.scan(body, h, stacks)
        return jnp.mean(h.astype(jnp.float32) ** 2) + 1e-3 * sum(jnp.sum(w**2) for w in jax.tree.leaves(params["layers"]))

    def step(state, x):
        params, inner = state
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, inner = optimizer.update(gradients, inner, params)
        return (optax.apply_updates(params, updates), inner), value

    keys = iter(jax.random.split(jax.random.key(0), 5))
    shapes = {"up": (LAYERS, WIDTH, 8), "bias": (LAYERS, 8), "down": (LAYERS, 8, WIDTH)}
    params = {name: jax.random.normal(next(keys), shape) / 2 for name, shape in shapes.items()}
    params = {"first": jax.random.normal(next(keys), (5, WIDTH)), "layers": params}
    return step, (params, optimizer.init(params)), jax.random.normal(next(keys), (8, 5))


@pytest.mark.parametrize("how", sampled(["remat", "plain", "bfloat16"], 3))
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_rows_are_what_the_stacks_were(name, how):
    options = {"plain": {}, "remat": dict(remat=True), "bfloat16": dict(dtype=jnp.bfloat16)}[how]
    step, state, batch = scanning(OPTIMIZERS[name], **options)
    traced = trace(step, state, batch, unroll="rows")
    leaves = jax.tree.leaves((state, batch))
    found = jax.jit(lambda rows: together(traced.program, evaluated(traced.program, rows)))(traced.rows_of(leaves))
    tolerance = 2e-2 if how == "bfloat16" else 1e-5
    for a, b in zip(found, jax.tree.leaves(jax.jit(step)(state, batch)), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    # No layer's numbers are with another's any more: parameters, their gradients and state are rows.
    assert not [a for e in traced.program.eqns for a in e.outputs if traced.program.aval(a).shape[:1] == (LAYERS,)]
    graph, _ = build_graph(traced)
    assert len(graph.parameters) == 3 * LAYERS + 1
    paths = {graph.in_paths[p.leaf]: [graph.in_paths[s] for s in p.state_leaves] for p in graph.parameters}
    assert all(f"state.0.layers.up[{t}]" in paths for t in range(LAYERS))
    assert all(s.endswith(p[p.rindex("[") :]) for p, state in paths.items() if "layers" in p for s in state if "layers" in s)


@pytest.mark.parametrize("options", [{}, dict(remat=True), dict(tie=True, dropout=0.1)], ids=str)
def test_the_graph_is_that_of_a_model_without_the_loop(options):
    sizes = dict(batch=2, seq=8, width=8, layers=LAYERS, heads=2) | options
    whether = {True: "rows", False: False}  # with a loop
    made = [trace(*abstract("transformer_lm", **sizes, scan=scan), unroll=unroll) for scan, unroll in whether.items()]
    graphs = [build_graph(traced)[0] for traced in made]
    a, b = ([(op.kind, sorted(d.size for d in op.dims), len(op.tasks), len(op.parameters)) for op in g.operators] for g in graphs)
    assert a == b
    assert total_flops(graphs[0]) == pytest.approx(total_flops(graphs[1]), rel=1e-6)
    shapes = [sorted(g.tensors[p.tensor].shape for p in g.parameters) for g in graphs]
    assert shapes[0] == shapes[1]


def test_layers_of_a_python_loop_are_rows_too():
    step, state, batch = scanning(OPTIMIZERS["momentum"], python=True)
    traced = trace(step, state, batch, unroll="rows")
    assert sorted(traced.program.rows[0]) == [1, 1, 1] + [LAYERS] * 6
    found = together(traced.program, evaluated(traced.program, traced.rows_of(jax.tree.leaves((state, batch)))))
    for a, b in zip(found, jax.tree.leaves(jax.jit(step)(state, batch)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert len(build_graph(traced)[0].parameters) == 3 * LAYERS + 1


def doubled(fn):
    """A step of one stack: its gradient under `fn`, added to it."""

    def step(w, x):
        return w + jax.grad(fn)(w, x), jnp.sum(x)

    return step


@functools.partial(jax.jit)
def _read_row_by_row(w, x):
    return sum(jnp.sum(jnp.tanh(x @ w[t])) for t in range(LAYERS))


WHOLE = {
    "a product over the rows": lambda w, x: _read_row_by_row(w, x) + jnp.sum(jnp.einsum("lij,lm->mij", w, w[:, 0])),
    "some rows only": lambda w, x: sum(jnp.sum(jnp.tanh(x @ w[t])) for t in range(LAYERS - 1)),
    "rows that were sorted": lambda w, x: _read_row_by_row(jnp.sort(w, axis=0), x),
    "a running sum": lambda w, x: _read_row_by_row(jnp.cumsum(w, axis=0), x),
    "no row": lambda w, x: jnp.sum(jnp.tanh(jnp.einsum("bi,lij->blj", x, w))),
}


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_what_is_read_as_a_whole_stays_whole(name):
    w, x = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)), jax.random.normal(jax.random.key(1), (8, WIDTH))
    step = doubled(WHOLE[name])
    program = trace(step, w, x, unroll="rows").program
    assert set(program.rows[0]) == {1}
    for a, b in zip(evaluated(program, [w, x]), jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_batch_is_no_stack():
    w = jnp.ones((WIDTH, WIDTH))
    step = doubled(lambda w, x: sum(jnp.sum(jnp.tanh(x[t] @ w)) for t in range(LAYERS)))
    assert set(trace(step, w, jnp.ones((LAYERS, 2, WIDTH)), unroll="rows").program.rows[0]) == {1}


def test_constants_and_other_results_of_all_rows():
    """A rate per layer, rows broadcast, reshaped and reduced; and a stack that is returned beside the state."""
    rates = np.linspace(0.1, 1.0, LAYERS, dtype=np.float32)

    def step(w, x):
        gradients = jax.grad(lambda w: jax.lax.scan(lambda h, v: (jnp.tanh(h @ v), None), x, w)[0].sum())(w)
        each = jnp.sqrt(jnp.mean(gradients.reshape(LAYERS, -1) ** 2, axis=1, keepdims=True))
        flat = (gradients.transpose(0, 2, 1).reshape(LAYERS, -1) / each).reshape(w.shape).transpose(0, 2, 1)
        moved = rates[:, None, None] * flat * (jnp.arange(LAYERS) > 0)[:, None, None]
        return w - moved, {"largest": jnp.max(gradients), "all": w * 2}

    w, x = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)), jax.random.normal(jax.random.key(1), (8, WIDTH))
    traced = trace(step, w, x, unroll="rows")
    assert traced.program.rows == ((LAYERS, 1), (LAYERS, 1, 1))
    found = together(traced.program, evaluated(traced.program, traced.rows_of([w, x])))
    for a, b in zip(found, jax.tree.leaves(jax.jit(step)(w, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_prints_scalars_per_layer_and_what_is_no_state():
    """A callback without results, a Python loop over a stack of scalars, and weights that the step does not return."""

    def step(state, start, x):
        def loss(state):
            h = x
            for t in range(LAYERS):
                h = h + state["rate"][t] * jnp.tanh(h @ state["w"][t])
            jax.debug.print("{}", h.sum())
            return jnp.mean(h**2) + sum(jnp.sum((state["w"][t] - start[t]) ** 2) for t in range(LAYERS))

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda a, g: a - 0.1 * g, state, gradients), value

    keys = jax.random.split(jax.random.key(0), 3)
    state = {"rate": jnp.ones(LAYERS), "w": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH))}
    start, x = jax.random.normal(keys[1], (LAYERS, WIDTH, WIDTH)), jax.random.normal(keys[2], (8, WIDTH))
    traced = trace(step, state, start, x, unroll="rows")
    assert traced.program.rows[0] == (LAYERS, LAYERS, 1, 1)
    found = together(traced.program, evaluated(traced.program, traced.rows_of(jax.tree.leaves((state, start, x)))))
    for a, b in zip(found, jax.tree.leaves(jax.jit(step)(state, start, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_finite_check_reads_every_row():
    def checked(w, x):
        gradients = jax.grad(lambda w: sum(jnp.sum(jnp.tanh(x @ w[t])) for t in range(LAYERS)))(w)
        return jnp.where(jnp.all(jnp.isfinite(gradients)), w - gradients, w), jnp.any(gradients > 1)

    w, x = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)), jax.random.normal(jax.random.key(1), (8, WIDTH))
    program = trace(checked, w, x, unroll="rows").program
    assert program.rows == ((LAYERS, 1), (LAYERS, 1))
    for a, b in zip(together(program, evaluated(program, [*w, x])), jax.jit(checked)(w, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
