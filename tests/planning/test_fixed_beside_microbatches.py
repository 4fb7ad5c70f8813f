"""What the user fixed is kept beside micro-batches, too: of state as of a plan without them, of the batch of each micro-batch.

And in a pipeline, by axes of the mesh of the stage that holds it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import soapjax
from soapjax import soap_shard
from soapjax.errors import SoapjaxError
from soapjax.execute.compiled.stream_inspection import inspect_stream
from soapjax.graph.passes.build import build_graph
from soapjax.planning import choosing
from soapjax.planning.pipelining.given_pipeline import planned_pipeline
from soapjax.planning.plan_files import recost
from soapjax.planning.request import PlanRequest
from soapjax.search.stages.stage_problem import StageProblem
from soapjax.strategy.plan import Plan
from soapjax.topology import load_topology


def loss_of(p, batch):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"] @ p["first"], p["layers"])
    return ((h @ p["last"] - batch["y"]) ** 2).mean()


def step(p, batch):
    value, grads = jax.value_and_grad(loss_of)(p, batch)
    return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value


def arguments(layers=3):
    rng = np.random.default_rng(0)
    shapes = {"first": (8, 16), "layers": (layers, 16, 16), "last": (16, 8)}
    p = {name: rng.normal(size=shape).astype(np.float32) / 4 for name, shape in shapes.items()}
    return p, {"x": rng.normal(size=(32, 8)).astype(np.float32), "y": rng.normal(size=(32, 8)).astype(np.float32)}


def planned(fixed, fn=step, args=None, **how):
    args = arguments() if args is None else args
    return choosing.as_asked(PlanRequest(topology="cpu8", proposals=8, fixed=fixed, **how), fn, *args).plan


def sent(plan, args):
    """What a device of a program's sends in a step, by program and collective, as compiled."""
    made = planned_pipeline(step, *args, plan=plan, donate=False).streamed
    parts = inspect_stream(made).parts
    return {(part.name, kind): size for part in parts for kind, size in part.bytes_by_collective.items() if size}


def planned_to_send(plan):
    """As `sent`, by the plan."""
    total: dict[tuple[str, str], float] = {}
    for part in plan.prediction.sends:
        for kind, size in part.bytes.items():
            if kind != "transfer" and size:
                total[part.program, kind] = total.get((part.program, kind), 0) + size
    return total


@pytest.mark.parametrize("how", [dict(), dict(planner="fsdp")], ids=["searched", "fsdp"])
@pytest.mark.parametrize(
    "fixed, specs",
    [
        ({"p.first": P("d0", "d1"), "batch.x": P(("d1", "d2"))}, {"p.first": "d0, d1", "batch.x": "d1+d2, -"}),
        ({"p.layers": P(None, "d2"), "p.last": P()}, {f"p.layers[{k}]": "d2, -" for k in range(3)} | {"p.last": "-, -"}),
    ],
    ids=["kernel and batch", "stack"],
)
def test_the_step_is_the_same_and_lies_as_it_was_fixed(fixed, specs, how):
    plan = planned(fixed, microbatches=4, **how)
    trained = trained_as_fixed(plan, specs)
    for path, spec in fixed.items():
        if path.startswith("p."):
            new = trained[path.removeprefix("p.")]
            assert new.sharding.is_equivalent_to(jax.sharding.NamedSharding(new.sharding.mesh, spec), new.ndim)


@pytest.mark.parametrize("how", [dict(), dict(schedule="zb-h1", planner="fsdp")], ids=["searched", "fsdp"])
def test_stages_keep_what_is_fixed_by_axes_of_their_own_meshes(how):
    fixed = {"p.first": P("d1", "d0"), "p.last": P(None, ("d0", "d1")), "p.layers": P(None, "d0"), "batch.x": P("d1")}
    specs = {"p.first": "d1, d0", "p.last": "-, d0+d1", "batch.x": "d1, -"} | {f"p.layers[{k}]": "d0, -" for k in range(4)}
    plan = planned(fixed, args=arguments(4), pipeline=how.pop("schedule", "1f1b"), stages=2, microbatches=4, **how)
    assert len(plan.pipeline.stages) == 2
    trained_as_fixed(plan, specs, layers=4)


def trained_as_fixed(plan, specs, layers=3):
    """The state after a step of `plan`, which is right, and lies and sends as planned."""
    args = arguments(layers)
    assert {path: plan.arguments[path] for path in specs} == specs and plan.fixed == specs
    trained, value = soap_shard(step, plan=plan, donate=False)(*args)
    for found, wanted in zip(jax.tree.leaves((trained, value)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    again = recost(Plan.loads(plan.dumps()), soapjax.trace(step, *args, **plan.tracing))
    assert again.fixed == plan.fixed and again.prediction == plan.prediction
    assert planned_to_send(plan) == pytest.approx(sent(plan, args), rel=0.1)
    return trained


def test_a_number_of_microbatches_is_chosen_that_it_divides():
    plan = planned({"batch.x": P(("d0", "d1", "d2"))}, pipeline="1f1b", stages=1)
    assert 32 // plan.pipeline.num_microbatches % 8 == 0
    with pytest.raises(SoapjaxError, match=r"fixed\['batch.x'\].*a spec that divides shape \(4, 8\)"):
        planned({"batch.x": P(("d0", "d1", "d2"))}, microbatches=8)


def test_what_a_pipeline_cannot_keep_is_refused():
    with pytest.raises(SoapjaxError, match="fixed: got given beside such a pipeline.*replica of a pipedream stage"):
        planned({"p.last": P()}, microbatches=2, pipeline="pipedream", stages=1)
    words = r"fixed\['p.last'\] of operator '.*' in any of 2 stages, on 4 devices: got \['d2'\]; .*'d0', 'd1'.*fewer stages"
    with pytest.raises(SoapjaxError, match=words):
        planned({"p.last": P("d2")}, microbatches=2, pipeline="1f1b", stages=2)
    with pytest.raises(SoapjaxError, match="layout of p.layers: got its first dim split over d0; expected layers that are whole"):
        planned({"p.layers": P("d0")}, args=arguments(layers=4), microbatches=2)
    with pytest.raises(SoapjaxError, match="8 micro-batches on 8 devices, fsdp in every stage, layouts fixed on all of them"):
        planned({"p.last": P("d0")}, microbatches=8, planner="fsdp")  # of four samples each


def test_blocks_that_are_fixed_otherwise_are_no_equals():
    def deep(p, x):
        def loss(p):
            return (functools.reduce(lambda h, w: jnp.tanh(h @ w), p, x) ** 2).mean()

        return jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(loss)(p))

    graph = build_graph(soapjax.trace(deep, [jnp.ones((16, 16))] * 12, jnp.ones((32, 16))))[0]

    def is_condensed(fixed):
        return StageProblem(graph, load_topology("cpu8"), num_stages=1, fixed=fixed).loads.condensed is not None

    every = {f"p.{k}": (("d0",),) for k in range(12)}
    assert set(every) <= set(graph.in_paths)
    assert is_condensed({}) and is_condensed(every) and not is_condensed({"p.5": (("d0",),)})
    problems = [StageProblem(graph, load_topology("cpu8"), fixed=fixed) for fixed in ({}, {"p.5": (("d1",),)})]
    assert [p.stages for p in problems] == [[1, 2, 4, 8], [1, 2]]  # of four stages each has one axis


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, kernel_init=nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp")))(x)


def test_flax_metadata_is_mapped_by_rules():
    model, x = Layer(), jnp.ones((16, 8))
    state = model.init(jax.random.key(0), x)

    def train(state, x):
        grads = jax.grad(lambda p: (model.apply(p, x) ** 2).mean())(state)
        return jax.tree.map(lambda a, g: a - 0.1 * g, state, grads)

    plan = planned(None, train, (state, x), microbatches=2, logical_axis_rules=[("mlp", ("d1", "d2"))])
    (spec,) = plan.fixed.values()
    assert spec == "-, d1+d2"
