"""Convolutions split in space: blocks with their neighbours' halos give the whole convolution, and send what is predicted."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from planned import Case

from soapjax.costs.rules.halos import halo_cost_plainly
from soapjax.costs.rules.links import Links
from soapjax.costs.rules.reshard_cost import halos, network_of
from soapjax.costs.rules.sets import encoded, mesh_of
from soapjax.execute.compiled.collectives import collectives_of
from soapjax.execute.spmd.heavy import run_product
from soapjax.execute.spmd.on_blocks import OnBlocks
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.graph.rules.light_rules import labels_of
from soapjax.graph.trace.flattening import flatten
from soapjax.strategy.configs import replicated
from soapjax.strategy.layout import HALO, REPLICATED

SIZE = 32
# window, stride, padding before and after (None: the same result size), groups; of one spatial dim
CASES = {
    "odd window": (3, 1, None, 1),
    "wide window": (5, 1, None, 1),
    "even window": (4, 1, None, 1),
    "stride": (3, 2, None, 1),
    "stride, other padding": (3, 2, (1, 1), 1),
    "wide window and stride": (7, 2, None, 1),
    "window as wide as the stride": (2, 2, None, 1),
    "one position": (1, 1, None, 1),
    "one position and stride": (1, 2, None, 1),
    "by channel": (3, 1, None, 4),
}
AXES = {"a": 2, "b": 2, "c": 2}


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(tuple(AXES.values())), tuple(AXES))


def convolution(dims, window, stride, padding, groups):
    pads = "SAME" if padding is None else (padding,) * dims
    letters = "DHW"[-dims:]

    def loss(image, kernel):
        out = lax.conv_general_dilated(
            image, kernel, (stride,) * dims, pads, dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
            feature_group_count=groups,
        )  # fmt: skip
        return (out * jnp.cos(out)).sum()

    rng = np.random.default_rng(0)
    image = jnp.asarray(rng.normal(size=(2, *(SIZE,) * dims, 4)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=((window,) * dims) + (4 // groups, 8)), jnp.float32)
    return loss, image, kernel


def convolutions(fn, *args):
    """(equation, labels, operands, result) of each convolution of a function, gradients included."""
    program = flatten(jax.jit(fn).trace(*args).jaxpr)
    is_convolution = lambda eqn: eqn.name == "conv_general_dilated"  # noqa: E731

    @jax.jit
    def values(*args):
        env, found = {**program.consts, **dict(zip(program.inputs, args, strict=True))}, []
        for eqn in program.eqns:
            operands = [env[a] if isinstance(a, int) else jnp.asarray(a.val, a.aval.dtype) for a in eqn.inputs]
            out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
            env.update(zip(eqn.outputs, out if eqn.primitive.multiple_results else [out], strict=True))
            if is_convolution(eqn):
                found.append((operands, out))
        return found

    for eqn, (operands, out) in zip(filter(is_convolution, program.eqns), jax.tree.map(np.asarray, values(*args)), strict=True):
        yield eqn, labels_of(eqn, program), operands, out


def specs_of(labels, names):
    """Specs of operands and result with the axes `names` {label: axes}."""
    return [tuple(names.get(lab, ()) for lab in labs) for labs in (*labels.inputs, labels.outputs[0])]


def ways_to_split(labels, degree_of):
    """{label: axes}: every spatial label alone, over one axis and over three, and two of them at once."""
    ways = [{lab: tuple(AXES)[:count]} for lab in degree_of for count in (1, 3)]
    first, *rest = degree_of
    ways += [{first: ("b",), lab: ("a", "c")} for lab in rest] + [{first: ("a", "c"), lab: ("b",)} for lab in rest]
    return [w for w in ways if all(2 ** len(names) <= degree_of[lab] for lab, names in w.items())]


@pytest.mark.parametrize("name, dims", [("odd window", 1), ("stride", 1), *((name, 2) for name in CASES)])
def test_blocks_with_borders_give_the_whole_convolution(mesh, name, dims):
    """The forward convolution and both gradients; where blocks would be smaller than a window the rules offer no split."""
    loss, *operands = convolution(dims, *CASES[name])
    seen = 0
    for eqn, labels, inputs, expected in convolutions(jax.grad(loss, (0, 1)), *operands):
        spatial = [lab for lab in labels.inputs[0] if lab >= 3]
        degree_of = {lab: labels.spatial.get(lab, inputs[0].shape[labels.inputs[0].index(lab)]) for lab in spatial}
        ways = ways_to_split(labels, degree_of) if degree_of else []

        @jax.jit
        def run(*inputs, eqn=eqn, specs=tuple(specs_of(labels, names) for names in ways)):
            bind = lambda x, p: [eqn.primitive.bind(*x, **eqn.primitive.get_bind_params(p))]  # noqa: E731
            return [run_product(eqn, list(inputs), OnBlocks(mesh, own, raw, raw, bind)) for *own, raw in specs]

        for names, found in zip(ways, run(*inputs), strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max(), err_msg=str(names))
        seen += len(ways)
    assert seen >= 2, "the rules offer no split"


def test_jitted_cost_equals_the_plain_one():
    """Any number of split dims, axes of both levels, with and without other splits."""
    links = Links((2, 2, 3, 2), (0, 0, 1, 1), (1e-4, 1e-6), (1e9, 1e11))
    rng = np.random.default_rng(0)
    layouts = rng.choice([HALO, HALO - 1, HALO - 2, 0, REPLICATED], size=(200, 4)).astype(np.int8)
    sizes = rng.uniform(1e3, 1e6, 200).astype(np.float32)
    # Borders along the k-th spatial dim stand in column 1 + k.
    inner = encoded(np.where(layouts <= HALO, 1 + HALO - layouts.astype(int), layouts), 4, False)
    found_s, found = jax.jit(halos, static_argnums=4)(
        mesh_of(links.axis_sizes), network_of(links, links.num_levels), inner.T, sizes, 4
    )  # fmt: skip
    for i, (layout, size) in enumerate(zip(layouts, sizes, strict=True)):
        seconds, sent = halo_cost_plainly(layout, float(size), links)
        np.testing.assert_allclose(found_s[:, i], seconds, rtol=1e-6)
        assert {k for k, x in sent.items() if x} <= {"collective-permute"}
        np.testing.assert_allclose(found[i], sent["collective-permute"], rtol=1e-6)
    along, others = [HALO, REPLICATED, 0, REPLICATED], 3
    seconds, sent = halo_cost_plainly(along, 6e5, links)
    assert sent["collective-permute"] == 6e5 / others
    assert math.isclose(seconds[0], 2e-4 + 6e5 / others / 1e9)


def test_a_convolution_split_in_space_sends_the_predicted_borders():
    """Of the image once for the convolution and the kernel's gradient, and of the cotangent."""
    loss, image, kernel = convolution(2, 3, 1, None, 1)

    def step(params, batch):
        hidden = lambda p: jnp.tanh(batch["x"] * p["scale"])  # noqa: E731 - the image has a gradient too
        value, grads = jax.value_and_grad(lambda p: loss(hidden(p), p["kernel"]))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    case = Case(step, ({"kernel": kernel, "scale": jnp.ones(4)}, {"x": image}))
    strategy = replicated(case.graph, case.space.mesh)
    split = 0
    for n, op in enumerate(case.graph.operators):
        k = next((k for k, d in enumerate(op.dims) if d.size == SIZE and d.divisor % 4 == 0), None)
        if k is not None:
            strategy.axes[n, :2] = k
            split += 1
    assert split and case.space.is_valid(strategy)
    plan = case.plan(strategy)
    bound = bind_plan(case.step, plan)
    specs = dict(in_shardings=bound.in_shardings(), out_shardings=bound.out_shardings())
    run = jax.jit(lambda *leaves: bound.evaluator().run(list(leaves))[0], **specs)
    found = collectives_of(run.lower(*case.leaves).compile().as_text(), 8)
    compiled = sum(c.step_bytes for c in found if c.kind == "collective-permute")
    rows = 2 * SIZE * 4 * 2 * (4 + 8)  # before and after a block; in bytes of float32, 2 images; image and cotangent
    assert compiled == rows == plan.prediction.bytes_by_collective["collective-permute"]
    case.check(strategy)
