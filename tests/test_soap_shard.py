"""`soap_shard` as its users meet it: like `jax.jit`, with the numbers of one device; what they fixed is kept or named."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import family
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from soapjax import Plan, SoapjaxError, load_topology, soap_shard
from soapjax.planning import entry
from soapjax.strategy.plan import parse_spec

DATA_PARALLEL = dict(topology="cpu8", planner="data_parallel")
RATE = 0.1


def arguments(batch=16, features=8, width=16, classes=4):
    """A state (parameters and momentum) and a batch."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"w1": (features, width), "w2": (width, classes)}
    params = {name: 0.3 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=False)}
    data = {"x": jax.random.normal(keys[2], (batch, features)), "y": jax.random.normal(keys[3], (batch, classes))}
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}, data


def loss_of(params, batch, between=lambda hidden: hidden):
    hidden = between(jnp.tanh(batch["x"] @ params["w1"]))
    return ((hidden @ params["w2"] - batch["y"]) ** 2).mean()


def make_step(between=lambda hidden: hidden):
    """A training step that counts how often Python runs it."""

    def step(state, batch):
        step.traces += 1
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch, between)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - RATE * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, {"loss": loss}

    step.traces = 0
    return step


def sgd(loss_fn):
    """A step without optimizer state, for models of any kind."""

    def step(state, batch):
        step.traces += 1
        loss, grads = jax.value_and_grad(loss_fn)(state, batch)
        return jax.tree.map(lambda p, g: p - RATE * g.astype(p.dtype), state, grads), {"loss": loss}

    step.traces = 0
    return step


def linen_model(init=nn.initializers.lecun_normal()):
    model = nn.Dense(16, kernel_init=init)
    _, batch = arguments()
    return sgd(lambda v, b: (model.apply(v, b["x"]) ** 2).mean()), (model.init(jax.random.key(1), batch["x"]), batch)


def nnx_model(init=nnx.initializers.lecun_normal()):
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(nnx.Linear(8, 16, kernel_init=init, rngs=nnx.Rngs(0)))
    _, batch = arguments()
    return sgd(lambda s, b: (nnx.merge(graph, s)(b["x"]) ** 2).mean()), (state, batch)


def losses(step, state, batch, count=3):
    found = []
    for _ in range(count):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


def devices(count):
    """The shipped topology of eight CPU devices with another number of them."""
    topology = load_topology("cpu8")
    return dataclasses.replace(topology, levels=(dataclasses.replace(topology.levels[0], size=count),))


def refused(step, *args, **options):
    """What is said of input that does not fit."""
    with pytest.raises(SoapjaxError) as error:
        soap_shard(step, **(DATA_PARALLEL | options))(*args)
    assert error.value.problems and all(p.place and p.value and p.expected and p.remedy for p in error.value.problems)
    return str(error.value)


@functools.cache
def planned():
    """A data-parallel step that has run once."""
    sharded = soap_shard(make_step(), **DATA_PARALLEL)
    sharded(*arguments())
    return sharded


def train_state():
    """Flax's own: the step count begins as a Python int."""
    model = nn.Dense(16)
    _, batch = arguments()
    created = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(1), batch["x"]), tx=optax.adam(0.01))

    def step(state, batch):
        step.traces += 1
        loss, grads = jax.value_and_grad(lambda p: (state.apply_fn(p, batch["x"]) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    step.traces = 0
    return step, (created, batch)


MODELS = {
    "plain": (lambda: (make_step(), arguments()), DATA_PARALLEL),
    "train_state": (train_state, dict(topology="cpu8", planner="fsdp")),
    "linen": (linen_model, dict(topology="cpu8", planner="tensor_parallel")),
    "nnx": (nnx_model, dict(topology="cpu8", planner="fsdp")),
}


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_jit_and_the_function_is_traced_once(name):
    make, options = MODELS[name]
    step, (state, batch) = make()
    expected = losses(jax.jit(step), state, batch)
    step.traces = 0
    sharded = soap_shard(**options)(step)
    np.testing.assert_allclose(losses(sharded, state, batch), expected, rtol=1e-5)
    assert losses(sharded, state, batch) == losses(sharded, state, batch)
    assert step.traces == 1
    assert sharded.plan.num_devices == 8 and sharded.__name__ == "step"


def test_a_train_state_is_state_from_its_first_step():
    """Moments are laid out as their parameters, and the second call donates what the first gave."""
    step, (state, batch) = train_state()
    sharded = soap_shard(step, topology="cpu8", planner="fsdp")
    first, _ = sharded(state, batch)
    layouts = sharded.plan.arguments
    assert layouts["state.opt_state.0.mu.params.kernel"] == layouts["state.params.params.kernel"] == "d0+d1+d2, -"
    sharded(first, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(first))
    assert not any(x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state)))


def test_bare_on_the_devices_at_hand(monkeypatch):
    monkeypatch.setattr(entry, "DEFAULT_PROPOSALS", 32)

    @soap_shard
    def predict(params, batch):
        return jnp.tanh(batch["x"] @ params["w1"])

    state, batch = arguments()
    np.testing.assert_allclose(predict(state["params"], batch), jnp.tanh(batch["x"] @ state["params"]["w1"]), rtol=1e-5, atol=1e-6)
    assert predict.plan.num_devices == len(jax.devices())


def test_there_is_no_plan_before_the_first_call():
    for ask in (lambda s: s.plan, lambda s: s.shardings(), lambda s: s.shard({})):
        with pytest.raises(SoapjaxError, match="not planned yet"):
            ask(soap_shard(make_step(), **DATA_PARALLEL))


def test_shard_lays_the_state_out_as_planned():
    state, batch = arguments()
    placed = planned().shard(state)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding == s, placed, planned().shardings()[0])))
    assert planned().shard(batch, argument=1)["x"].sharding.spec == P(("d0", "d1", "d2"), None)
    np.testing.assert_array_equal(placed["params"]["w1"], state["params"]["w1"])


def test_shardings_serve_plain_jit():
    state, batch = arguments()
    jitted = jax.jit(make_step(), in_shardings=planned().shardings())
    np.testing.assert_allclose(losses(jitted, state, batch, 1), losses(planned(), state, batch, 1), rtol=1e-5)
    _, batch_shardings = planned().shardings()
    assert batch_shardings["x"].spec == P(("d0", "d1", "d2"), None)


def test_lower_and_compile():
    state, batch = arguments()
    compiled = planned().lower(state, batch).compile()
    assert "all-reduce" in compiled.as_text()
    placed = planned().shard(state), planned().shard(batch, argument=1)
    assert all(
        a.is_equivalent_to(b.sharding, b.ndim)
        for a, b in zip(jax.tree.leaves(compiled.input_shardings[0]), jax.tree.leaves(placed), strict=True)
    )
    assert float(compiled(*placed)[1]["loss"]) == losses(planned(), state, batch, 1)[0]


def test_lower_and_prepare_need_shapes_only():
    shapes = jax.eval_shape(arguments)
    sharded = soap_shard(make_step(), topology=devices(2), planner="data_parallel").prepare(*shapes)
    assert sharded.plan.num_devices == 2
    assert sharded.lower(*shapes).compile().input_shardings[0][1]["x"].spec == P("d0", None)
    sharded(*arguments())
    assert sharded.__wrapped__.traces == 1


def test_arguments_by_keyword():
    state, batch = arguments()
    by_position = losses(planned(), state, batch, 1)[0]
    traces = planned().__wrapped__.traces
    assert float(planned()(state, batch=batch)[1]["loss"]) == by_position
    assert float(planned()(batch=batch, state=state)[1]["loss"]) == by_position
    assert planned().__wrapped__.traces == traces


def scaled_step(state, batch, scale=1.0, flag=True, extra=None):
    assert isinstance(flag, bool), "a static argument is a Python value"
    scaled_step.traces += 1
    return loss_of(state["params"], batch) * scale * (2 if flag else 1) + (0 if extra is None else extra)


@pytest.mark.parametrize("static_argnums", [3, (-2,)])
def test_static_arguments_are_those_of_jit(static_argnums):
    state, batch = arguments()
    options = dict(topology=devices(2), planner="data_parallel")
    sharded, jitted = soap_shard(scaled_step, static_argnums=static_argnums, **options), jax.jit(scaled_step, static_argnums=3)
    calls = [((state, batch, 3.0, flag, None), {}) for flag in (False, True, False)]
    calls += [((state, batch), {"flag": False})] if static_argnums == 3 else []
    expected = [jitted(*args, **kwargs) for args, kwargs in calls]
    scaled_step.traces = 0
    np.testing.assert_allclose([sharded(*args, **kwargs) for args, kwargs in calls], expected, rtol=1e-5)
    assert scaled_step.traces == len(calls) - 1  # the third call is the first again


scaled_step.traces = 0


def test_a_keyword_after_parameters_left_out_takes_their_defaults():
    state, batch = arguments()
    sharded = soap_shard(scaled_step, topology=devices(2), planner="data_parallel")
    expected = jax.jit(scaled_step)(state, batch, extra=jnp.float32(3))
    np.testing.assert_allclose(sharded(state, batch, extra=jnp.float32(3)), expected, rtol=1e-5)
    assert len(sharded.shardings()) == 3
    assert sharded.shard(jnp.float32(1), argument=4).sharding.spec == P()


def test_a_new_shape_is_planned_once_and_an_old_one_not_again(caplog):
    step = make_step()
    sharded = soap_shard(step, topology=devices(4), planner="data_parallel")
    state, _ = arguments()
    with caplog.at_level(logging.INFO, logger="soapjax"):
        for count in (16, 10, 16, 10):
            batch = arguments(batch=count)[1]
            expected = float(loss_of(state["params"], batch))
            state, metrics = sharded(state, batch)
            np.testing.assert_allclose(float(metrics["loss"]), expected, rtol=1e-5)
    said = [r.getMessage() for r in caplog.records]
    assert step.traces == sum("planned" in line for line in said) == 2
    assert sum("another shape" in line for line in said) == 3
    # The batch of 10 does not split four ways.
    assert sharded.shardings()[1]["x"].spec == P("d0", None)


def test_another_tree_is_planned_anew():
    def total(batch):
        return sum(x.sum() for x in batch.values())

    sharded = soap_shard(total, topology=devices(2), planner="data_parallel")
    _, batch = arguments()
    more = batch | {"z": batch["x"]}
    for b in (batch, more, batch):
        np.testing.assert_allclose(float(sharded(b)), float(total(b)), rtol=1e-4)
    assert set(sharded.shardings()[0]) == {"x", "y"}


def test_a_plan_file_is_executed(tmp_path):
    state, batch = arguments()
    expected = losses(planned(), state, batch)
    path = tmp_path / "plan.json"
    planned().plan.save(path)
    sharded = soap_shard(make_step(), plan=str(path))
    assert losses(sharded, state, batch) == expected
    assert sharded.plan.plan_sha256 == planned().plan.plan_sha256


def test_a_plan_for_another_step_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    planned().plan.save(path)
    state, batch = arguments(width=32)
    said = refused(make_step(), state, batch, plan=str(path))
    assert f"{path}: graph.fingerprint" in said and "plan anew" in said
    assert refused(make_step(), state, batch, plan=planned().plan).startswith("plan: graph.fingerprint")


def test_fixed_beside_a_plan_is_refused():
    with pytest.raises(SoapjaxError, match="given beside a plan"):
        soap_shard(make_step(), plan=planned().plan, fixed={"batch.x": P("d0")})


def test_state_is_donated_and_the_users_first_one_kept():
    first, batch = arguments()
    second, _ = planned()(first, batch)
    third, _ = planned()(second, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(second))
    assert not any(x.is_deleted() for x in jax.tree.leaves((first, third, batch)))


def test_a_state_from_elsewhere_is_copied_in_later_calls_too():
    planned()(*arguments())
    state, batch = arguments()
    first, again = planned()(state, batch), planned()(state, batch)
    np.testing.assert_array_equal(*(np.asarray(s["params"]["w1"]) for s, _ in (first, again)))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_inside_another_jit():
    state, batch = arguments()
    expected = losses(planned(), state, batch, 1)[0]
    assert float(jax.jit(lambda s, b: planned()(s, b)[1]["loss"])(state, batch)) == pytest.approx(expected, rel=1e-5)


def test_state_is_kept_where_donation_is_off():
    sharded = soap_shard(make_step(), plan=planned().plan, donate=False)
    first, batch = arguments()
    second, _ = sharded(first, batch)
    sharded(second, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves(second))


def test_a_batch_that_a_loader_committed_elsewhere_is_moved():
    state, batch = arguments()
    expected = losses(planned(), state, batch)
    assert losses(planned(), state, jax.device_put(batch, jax.devices()[0])) == expected
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    assert losses(planned(), state, jax.device_put(batch, NamedSharding(mesh, P("b")))) == expected
    assert losses(planned(), jax.device_get(state), jax.device_get(batch)) == expected


@pytest.mark.parametrize("how", ["shardings", "plan file"])
def test_an_evaluation_step_takes_the_layout_of_the_train_state(how):
    train = soap_shard(make_step(), topology="cpu8", planner="fsdp")
    state, batch = arguments()
    state, _ = train(state, batch)
    if how == "shardings":
        fixed = {"params": train.shardings()[0]["params"]}
    else:
        prefix = "state.params."
        fixed = {"params." + k.removeprefix(prefix): s for k, s in train.plan.arguments.items() if k.startswith(prefix)}
    evaluate = soap_shard(loss_of, fixed=fixed, **DATA_PARALLEL)
    found = evaluate(state["params"], batch)
    np.testing.assert_allclose(found, loss_of(*jax.device_get((state["params"], batch))), rtol=1e-5)
    assert evaluate.shardings()[0] == train.shardings()[0]["params"]
    assert any(s.spec != P(None, None) for s in jax.tree.leaves(evaluate.shardings()[0]))


FIXED = {
    "batch": ("batch.x", P(("d0", "d2"), "d1"), ["batch.x"]),
    "parameter": ("state.params.w1", P(None, "d1"), ["state.params.w1", "state.momentum.w1"]),
    "optimizer state": ("state.momentum.w2", P("d2"), ["state.params.w2", "state.momentum.w2"]),
    "subtree": ("state.momentum", P("d0", "d1"), ["state.params.w1", "state.params.w2", "state.momentum.w1"]),
}


@pytest.mark.parametrize("name", family(FIXED, slow=["parameter", "subtree"]))
def test_what_is_fixed_is_kept(name):
    path, spec, changed = FIXED[name]
    step, (state, batch) = make_step(), arguments()
    sharded = soap_shard(step, fixed={path: spec}, **DATA_PARALLEL)
    found = losses(sharded, state, batch)
    np.testing.assert_allclose(found, losses(jax.jit(make_step()), state, batch), rtol=1e-5)
    shardings = dict(zip(sharded.plan.arguments, jax.tree.leaves(sharded.shardings()), strict=True))
    wanted = [(s,) if isinstance(s, str) else s or () for s in spec]
    for leaf in changed:
        assert list(parse_spec(sharded.plan.arguments[leaf]))[: len(wanted)] == [tuple(w) for w in wanted]
        assert shardings[leaf].spec[0] == spec[0]
    if name != "optimizer state":
        return
    # A loaded plan keeps it too.
    again = soap_shard(make_step(), plan=Plan.loads(sharded.plan.dumps()))
    assert losses(again, state, batch) == found and again.plan.plan_sha256 == sharded.plan.plan_sha256


@pytest.mark.parametrize(
    "fixed, words",
    [
        ({"batch.z": P("d0")}, ["fixed['batch.z']", "no such argument"]),
        ({"batch.x": P("data")}, ["fixed['batch.x']", "'data'", "d0"]),
        ({"batch.x": P(None, ("d0", "d1", "d2")), "batch.y": P(None, ("d0", "d1", "d2"))}, ["fixed['batch.y']", "(16, 4)"]),
        ({"batch.x": (("d0",), ("d0",))}, ["fixed['batch.x']", "each once"]),
        ({"batch.x": P("d0", None, "d1")}, ["fixed['batch.x']", "(16, 8)"]),
        ({"batch.x": 3}, ["fixed['batch.x']", "got 3", "PartitionSpec"]),
        ({"batch.x": P(P.UNCONSTRAINED)}, ["fixed['batch.x']", "UNCONSTRAINED"]),
        ({"state": {"params": P("d0")}, "batch": {"z": P("d0")}}, ["fixed['batch.z']"]),
        ({"state.params.w1": P("d0"), "state.momentum.w1": P("d1")}, ["fixed['state.momentum.w1']", "'state.params.w1'"]),
    ],
)
def test_what_cannot_be_fixed_is_named(fixed, words):
    said = refused(make_step(), *arguments(), fixed=fixed)
    assert all(word in said for word in words), said


def test_an_argument_that_no_operator_reads_is_laid_out_as_it_is_fixed():
    def step(state, batch):
        return {**state, "w": state["w"] - RATE * jax.grad(lambda w: (batch @ w).sum())(state["w"])}

    args = {"w": jnp.ones((8, 8)), "kept": jnp.ones((8, 8))}, jnp.ones((8, 8))
    for spec, wanted in ((P("d0"), (P("d0"), P("d0", None))), (P(), (P(), P(None, None)))):
        sharded = soap_shard(step, fixed={"state.kept": spec}, **DATA_PARALLEL)
        assert sharded(*args)["kept"].sharding.spec in wanted
    made = soap_shard(step, fixed={"state.kept": P("d0")}, **DATA_PARALLEL).prepare(*args).plan
    again = soap_shard(step, plan=Plan.loads(made.dumps()))
    assert again(*args)["kept"].sharding.spec in (P("d0"), P("d0", None))


def constrained(spec, sizes=(2, 2, 2), names=("d0", "d1", "d2")):
    """A step whose own code constrains its hidden layer on a mesh of its own."""
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))

    def step(params, batch):
        hidden = jax.lax.with_sharding_constraint(jnp.tanh(batch["x"] @ params["w1"]), NamedSharding(mesh, spec))
        return hidden, (hidden @ params["w2"]).sum()

    return step


def test_the_users_own_constraints_are_kept():
    spec = P("d1", ("d0", "d2"))
    state, batch = arguments()
    for options in (DATA_PARALLEL, dict(topology="cpu8", planner="fsdp")):
        sharded = soap_shard(constrained(spec), **options)
        hidden, total = sharded(state["params"], batch)
        assert hidden.sharding.spec == spec
        assert '[{"d1"}, {"d0", "d2"}]' in sharded.lower(state["params"], batch).as_text()
        expected = jnp.tanh(batch["x"] @ state["params"]["w1"])
        np.testing.assert_allclose(hidden, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "step, words",
    [
        (lambda: constrained(P("data", "model"), (2, 2), ("data", "model")), ["'data'", "'model'", "d0", "test_soap_shard.py:"]),
        (lambda: constrained(P("d0", "d1"), (4, 1), ("d0", "d1")), ["'d0' of size 4", "'d0': 2", "test_soap_shard.py:"]),
        (lambda: constrained(P(P.UNCONSTRAINED, "d1")), ["dim 0", "UNCONSTRAINED"]),
        (lambda: constrained(P(("d0", "d1"), None)), ["dim 0", "a split into 4", "divides 10"]),
    ],
    ids=["other names", "other sizes", "unconstrained", "does not divide"],
)
def test_constraints_that_the_plan_cannot_keep_are_named(step, words):
    state, batch = arguments(batch=10)
    said = refused(step(), state["params"], batch)
    assert "sharding constraint" in said and all(word in said for word in words), said


def logical_names(step, state, batch, path, caplog):
    """A step whose kernel has the logical name "embed": ignored with one note, or mapped by rules."""
    with caplog.at_level(logging.INFO, logger="soapjax"):
        free = soap_shard(step, **DATA_PARALLEL).prepare(state, batch)
    (note,) = [r.getMessage() for r in caplog.records if "'embed'" in r.getMessage()]
    assert "ignored" in note and "logical_axis_rules" in note
    assert "d1" not in free.plan.arguments[path]
    mapped = soap_shard(step, logical_axis_rules=[("other", "d0"), ("embed", ("d1", "d2"))], **DATA_PARALLEL)
    assert mapped.prepare(state, batch).plan.arguments[path] == "-, d1+d2"
    assert "'data' for 'embed'" in refused(step, state, batch, logical_axis_rules=[("embed", "data")]).replace("['data']", "'data'")


def test_linen_metadata_is_kept_or_mapped(caplog):
    step, (state, batch) = linen_model(nn.with_partitioning(nn.initializers.lecun_normal(), (None, "d1")))
    sharded = soap_shard(step, **DATA_PARALLEL)
    np.testing.assert_allclose(losses(sharded, state, batch), losses(jax.jit(step), state, batch), rtol=1e-5)
    assert sharded.plan.arguments["state.params.kernel.value"] == "-, d1"
    step, (state, batch) = linen_model(nn.with_partitioning(nn.initializers.lecun_normal(), (None, "embed")))
    logical_names(step, state, batch, "state.params.kernel.value", caplog)


def test_nnx_metadata_is_kept_or_mapped(caplog):
    step, (state, batch) = nnx_model(nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "d1")))
    sharded = soap_shard(step, **DATA_PARALLEL)
    np.testing.assert_allclose(losses(sharded, state, batch), losses(jax.jit(step), state, batch), rtol=1e-5)
    assert sharded.plan.arguments["state.kernel.value"] == "-, d1"
    step, (state, batch) = nnx_model(nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "embed")))
    logical_names(step, state, batch, "state.kernel.value", caplog)


def test_one_device_is_jit_itself():
    state, batch = arguments()
    sharded = soap_shard(make_step(), topology=devices(1), planner="data_parallel")
    assert losses(sharded, state, batch) == losses(jax.jit(make_step()), state, batch)
    assert sharded.plan.num_devices == 1


def test_seven_devices_and_a_batch_of_ten():
    state, batch = arguments(batch=10, width=14)
    sharded = soap_shard(make_step(), topology=devices(7), planner="tensor_parallel")
    np.testing.assert_allclose(losses(sharded, state, batch), losses(jax.jit(make_step()), state, batch), rtol=1e-5)
    assert sharded.plan.num_devices == 7 and sharded.shardings()[0]["params"]["w1"].spec == P(None, "d0")


def test_fewer_devices_than_planned():
    state, batch = arguments()
    assert "64" in refused(make_step(), state, batch, topology="a100x64")
    assert "3 cpu devices" in refused(make_step(), state, batch, plan=planned().plan, devices=jax.devices()[:3])


def test_dropout_is_that_of_one_device():
    def step(state, batch, key):
        def loss(params):
            kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
            return loss_of(params, batch | {"x": jnp.where(kept, batch["x"] / 0.5, 0)})

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - RATE * g, state, grads), value

    sharded, jitted = soap_shard(step, **DATA_PARALLEL), jax.jit(step)
    state, batch = arguments()
    found = expected = state["params"]
    values = []
    for key in jax.random.split(jax.random.key(3), 3):  # typed keys, as jax.random.key makes them
        (found, a), (expected, b) = sharded(found, batch, key), jitted(expected, batch, key)
        np.testing.assert_allclose(a, b, rtol=1e-5)
        values.append(float(a))
    assert len(set(values)) == 3


def test_bfloat16_compute_with_float32_parameters():
    def loss(params, batch):
        hidden = jnp.tanh(batch["x"].astype(jnp.bfloat16) @ params["w1"].astype(jnp.bfloat16))
        return ((hidden.astype(jnp.float32) @ params["w2"] - batch["y"]) ** 2).mean()

    state, batch = arguments()
    sharded = soap_shard(sgd(loss), **DATA_PARALLEL)
    np.testing.assert_allclose(
        losses(sharded, state["params"], batch), losses(jax.jit(sgd(loss)), state["params"], batch), rtol=1e-3
    )
    assert "bf16[2,8]" in sharded.lower(state["params"], batch).compile().as_text()
