"""Calls that are not the planned one, and odd configurations of JAX: each computes what the unsharded step does, or is refused.

Every row says the words of the one error, or nothing where the numbers must be those of `jax.jit`.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from soapjax import SoapjaxError, soap_shard, trace
from soapjax.graph.passes.build import build_graph
from soapjax.helpers.own_config import on_cpu
from soapjax.planning import entry

pytestmark = pytest.mark.usefixtures("no_search")
X = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
XS = np.stack([X, 2 * X])


def new():
    return {"w": np.full((8, 4), 0.1, np.float32)}


def step(state, x):
    loss, grads = jax.value_and_grad(lambda s: ((x @ s["w"]) ** 2).mean())(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def plain(state, x):
    """The step of the values alone: JAX itself refuses to mix some layouts."""
    return step(*jax.tree.map(lambda v: v if isinstance(v, jax.core.Tracer) else np.asarray(v), (state, x)))


def sharded(fn=step, **options):
    return soap_shard(fn, planner="data_parallel", donate=False, **options)


@functools.cache
def planned():
    made = sharded()
    made(new(), X)
    return made


def mesh(kind, shape=(8,), names=("a",)):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def laid_out(tree, kind, spec=P("a"), **of):
    return jax.device_put(tree, NamedSharding(mesh(kind, **of), spec))


def used(tree):
    gone = jax.tree.map(jnp.array, tree)
    jax.tree.map(lambda x: x.delete(), gone)
    return gone


@jax.tree_util.register_pytree_node_class
class Other(dict):
    def tree_flatten(self):
        return tuple(self.values()), tuple(self)

    @classmethod
    def tree_unflatten(cls, keys, values):
        return cls(zip(keys, values, strict=True))


# A call of `f`, and of the plain step: what it computes is compared.
LIKE_JIT = {
    "state on explicit axes": lambda f: f(laid_out(new(), AxisType.Explicit), X),
    "state on another mesh": lambda f: f(laid_out(new(), AxisType.Auto, P("b", "a"), shape=(4, 2), names=("a", "b")), X),
    "state on four devices": lambda f: f(jax.device_put(new(), NamedSharding(Mesh(np.array(jax.devices()[2:6]), "a"), P("a"))), X),
    "state on one device": lambda f: f(jax.device_put(new(), jax.devices()[5]), X),
    "batch on explicit axes": lambda f: f(new(), laid_out(X, AxisType.Explicit)),
    "batch on another mesh": lambda f: f(new(), laid_out(X, AxisType.Auto)),
    "both on explicit axes": lambda f: f(*laid_out((new(), X), AxisType.Explicit)),
    "another tree": lambda f: f(Other(new()), X),
    "jit": lambda f: jax.jit(f)(new(), X),
    "jit of a constant state": lambda f: jax.jit(lambda x: f(new(), x))(X),
    "scan": lambda f: jax.lax.scan(f, new(), XS),
    "vmap": lambda f: jax.vmap(f, (None, 0))(new(), XS),
    "grad": lambda f: jax.grad(lambda s: f(s, X)[1])(new()),
    "value_and_grad": lambda f: jax.value_and_grad(lambda x: f(new(), x)[1])(X),
    "jvp": lambda f: jax.jvp(lambda x: f(new(), x)[1], (X,), (X,)),
    "checkpoint": lambda f: jax.checkpoint(f)(new(), X),
    "fori_loop": lambda f: jax.lax.fori_loop(0, 2, lambda i, s: f(s, X)[0], jax.tree.map(jnp.asarray, new())),
    "cond": lambda f: jax.lax.cond(True, lambda s: f(s, X)[0], lambda s: s, jax.tree.map(jnp.asarray, new())),
    "keyword": lambda f: f(new(), x=X),
}  # fmt: skip
SHAPES = {
    "eval_shape": lambda f: jax.eval_shape(f, new(), X),
    "eval_shape of shapes": lambda f: jax.eval_shape(f, jax.eval_shape(lambda: new()), X),
}


def same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", LIKE_JIT)
def test_a_planned_step_computes_what_jit_does(how):
    same(LIKE_JIT[how](planned()), LIKE_JIT[how](plain))


@pytest.mark.parametrize("how", ["state on explicit axes", "jit", "scan", "grad"])
def test_so_does_one_that_is_not_planned_yet(how):
    same(LIKE_JIT[how](sharded()), LIKE_JIT[how](plain))


@pytest.mark.parametrize("how", SHAPES)
def test_shapes_are_those_of_the_step(how):
    expected = jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(step, new(), X))
    for f in (planned(), sharded()):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), SHAPES[how](f)) == expected


UNDER = {
    "set_mesh, explicit": lambda: jax.set_mesh(mesh(AxisType.Explicit)),
    "set_mesh, auto": lambda: jax.set_mesh(mesh(AxisType.Auto)),
    "disable_jit": jax.disable_jit,
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "no rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "no transfers": lambda: jax.transfer_guard("disallow"),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "checking_leaks": jax.checking_leaks,
    "default_device": lambda: jax.default_device(jax.devices()[3]),
    "precision": lambda: jax.default_matmul_precision("highest"),
}


AT_PLANNING = ["set_mesh, explicit", "set_mesh, auto", "disable_jit", "strict promotion", "no rank promotion", "no transfers"]


@pytest.mark.parametrize("how, is_planned", [*((how, True) for how in UNDER), *((how, False) for how in AT_PLANNING)])
def test_configurations_of_the_users(how, is_planned):
    expected = step(new(), X)
    f = planned() if is_planned else sharded()
    arguments = planned().shard(new()), planned().shard(X, argument=1)  # no transfer is left to do
    with UNDER[how]():
        found = f(*arguments)
        assert not found[0]["w"].is_deleted()
    same(found, expected)


def test_x64_is_the_users():
    with jax.enable_x64(True):
        state, x = {"w": np.full((8, 4), 0.1)}, X.astype(np.float64)
        found, expected = sharded()(state, x), jax.jit(step)(state, x)
        assert found[1].dtype == np.float64
        same(found, expected)


def test_the_planner_runs_under_jaxs_own_configuration():
    with UNDER["strict promotion"](), UNDER["no rank promotion"](), UNDER["no transfers"](), UNDER["set_mesh, explicit"]():
        with on_cpu():
            assert (jnp.ones((2, 3), jnp.int32) + jnp.ones(3, jnp.int8)).dtype == jnp.int32
            assert jax.sharding.get_abstract_mesh().empty
        assert not jax.sharding.get_abstract_mesh().empty
        assert jax.config.jax_numpy_dtype_promotion == "strict" and jax.config.jax_numpy_rank_promotion == "raise"


# Refused: a call of a step, words of place, value, expected and remedy.
REFUSED = {
    "a used-up state": (lambda f: f(used(new()), X), ["argument state.w", "used up", "arrays that", "donate=False"]),
    "a used-up batch": (lambda f: f(new(), used(X)), ["argument x", "used up", "arrays that", "go on with"]),
    "an empty batch": (lambda f: f(new(), X[:0]), ["argument x", "an empty batch", "one example", "skip"]),
    "empty batches": (lambda f: f(new(), {"x": X[:0], "y": X[:0]}), ["argument x", "an empty batch", "one example", "skip"]),
    "a shape alone": (lambda f: f(jax.eval_shape(lambda: new()), X), ["state.w", "ShapeDtypeStruct", "an array", "prepare"]),
    "text in the state": (lambda f: f({"w": "abc"}, X), ["state.w", "'abc'", "an array or a number", "leave it out"]),
    "an array of objects": (lambda f: f(new(), X.astype(object)), ["argument x", "ndarray", "an array", "convert"]),
    "no state": (lambda f: f(None, X), ["step", "NoneType", "jax.jit can trace", "correct the step"]),
    "another key": (lambda f: f({"v": new()["w"]}, X), ["step", "KeyError", "jax.jit can trace", "correct the step"]),
    "another width": (lambda f: f(new(), X[:, :5]), ["step", "TypeError", "jax.jit can trace", "correct the step"]),
    "too many arguments": (lambda f: f(new(), X, X), ["step", "3 were given", "arguments that the step takes", "pass these"]),
    "too few arguments": (lambda f: f(new()), ["step", "missing", "arguments that the step takes", "pass these"]),
    "an unknown keyword": (lambda f: f(new(), X, rate=1), ["step: arguments", "'rate'", "step(state, x)", "correct the call"]),
    "an argument twice": (lambda f: f(new(), X, x=X), ["step: arguments", "'x'", "step(state, x)", "correct the call"]),
    "pmap": (
        lambda f: jax.pmap(f)(jax.tree.map(lambda w: np.stack([w] * 8), new()), np.stack([X] * 8)),
        ["a planned step", "shard_map or pmap", "the whole batch", "axis_name="],
    ),
    "shard_map": (
        lambda f: jax.shard_map(
            lambda s, x: f(s, x)[1][None], mesh=mesh(AxisType.Auto), in_specs=(P(), P("a")), out_specs=P("a"), check_vma=False
        )(new(), np.concatenate([X] * 8)),
        ["a planned step", "shard_map or pmap", "the whole batch", "axis_name="],
    ),
    "explicit axes inside jit": (
        lambda f: jax.jit(f)(laid_out(new(), AxisType.Explicit), X),
        ["inside jit", "explicit axes ('a',)", "a plan may lay out", "AxisType.Auto"],
    ),
    "shard of another tree": (lambda f: f.shard({"v": X}), ["step.shard", "not planned: v", "was planned", "same tree"]),
    "shard of a leaf": (lambda f: f.shard(X), ["step.shard", "a single leaf", "was planned", "argument="]),
    "shard of nothing": (lambda f: f.shard(None), ["step.shard", "missing: w", "was planned", "same tree"]),
    "shard of text": (lambda f: f.shard({"w": "abc"}), ["step.shard", "'abc'", "an array", "leave it out"]),
    "shard of a used-up state": (lambda f: f.shard(used(new())), ["argument w", "used up", "arrays", "go on"]),
    "shard of a fifth argument": (lambda f: f.shard(X, argument=4), ["argument", "got 4", "0 to 1", "count from 0"]),
    "shard of a negative one": (lambda f: f.shard(X, argument=-1), ["argument", "got -1", "0 to 1", "count from 0"]),
    "shard of a name": (lambda f: f.shard(X, argument="x"), ["argument", "got 'x'", "0 to 1", "count from 0"]),
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSED)
def test_a_call_that_cannot_be_meant_is_refused(how):
    call, words = REFUSED[how]
    with pytest.raises(SoapjaxError) as e:
        call(planned())
    said = str(e.value)
    assert all(w in said for w in words), said
    assert all(all(p) for p in e.value.problems) and len(said) < 2000
    same(planned()(new(), X), step(new(), X))  # the plan at hand is as good as before


@pytest.mark.parametrize("how", ["a used-up state", "an empty batch", "a shape alone", "text in the state", "no state", "pmap"])
def test_so_is_one_of_a_step_that_is_not_planned_yet(how):
    call, words = REFUSED[how]
    with pytest.raises(SoapjaxError) as e:
        call(sharded())
    assert all(w in str(e.value) for w in words[1:]), str(e.value)


def test_jit_under_a_mesh_of_explicit_axes_says_how():
    with jax.set_mesh(mesh(AxisType.Explicit)), pytest.raises(SoapjaxError, match="explicit axes .*AxisType.Auto"):
        jax.jit(planned())(new(), X)
    with jax.set_mesh(mesh(AxisType.Auto)):
        same(jax.jit(planned())(new(), X), step(new(), X))


@pytest.mark.parametrize("fn", [lambda s, x: None, lambda s, x: {}, lambda s, x: ()])
def test_a_step_that_returns_nothing(fn):
    with pytest.raises(SoapjaxError, match="the step: got nothing that is returned.*return the new state"):
        entry.require_operators(build_graph(trace(fn, new(), X))[0])


def test_nothing_stays_behind():
    """Contexts are left as they were found, also after an error."""
    with contextlib.suppress(SoapjaxError), jax.disable_jit():
        planned()(used(new()), X)
    assert not jax.config.jax_disable_jit and jax.sharding.get_abstract_mesh().empty
