"""Plans in Flax's and MaxText's words, and the operators named for which these have none."""

import functools

import jax
import numpy as np
import pytest
from flax import linen as nn

import soapjax
from soapjax import Plan, SoapjaxError
from soapjax.planning.plan_files import recost

X = np.ones((16, 32), np.float32)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        def named(*names):
            return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)

        up = nn.Dense(64, use_bias=False, name="up", kernel_init=named("embed", "mlp"))
        down = nn.Dense(32, use_bias=False, name="down", kernel_init=named("mlp", "embed"))
        return down(nn.relu(up(x)))


def step(params, x):
    grads = jax.grad(lambda p: (Block().apply(p, x) ** 2).mean())(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


@functools.cache
def made(planner):
    params = jax.eval_shape(Block().init, jax.random.key(0), X)
    return soapjax.planning.entry.plan(step, params, X, topology="cpu8", planner=planner)


def edited(planner, **changes):
    """A plan with another axis assignment of some operators, as somebody would write it."""
    found = made(planner)
    parts = dict(found.plan.operators)
    for name, axes in changes.items():
        parts[name] = parts[name].model_copy(update={"axes": parts[name].axes | axes})
    return recost(found.plan.model_copy(update={"operators": parts}), found.step)


def products(plan):
    return [name for name, part in plan.operators.items() if part.kind == "dot"]


def test_rules_lay_parameters_out_as_the_plan():
    plan = made("data_parallel").plan
    assert dict(plan.logical_axis_rules()) == {"batch": ("d0", "d1", "d2"), "embed": None, "mlp": None}
    up, down = products(plan)
    columns = {a: [d for d in plan.operators[up].dims if d.startswith("param") and not d.endswith("_in")][0] for a in ("d0",)}
    rows = {"d0": [d for d in plan.operators[down].dims if d.endswith("_in")][0]}
    megatron = edited(
        "data_parallel",
        **{up: columns, down: rows},
        **{n: {"d0": "attr0"} for n in plan.operators if n not in (up, down) and "attr0" in plan.operators[n].dims},
    )
    rules = dict(megatron.logical_axis_rules())
    assert rules["mlp"] == ("d0",) and rules["embed"] is None
    params = jax.eval_shape(Block().init, jax.random.key(0), X)
    specs = nn.logical_to_mesh(nn.get_partition_spec(params), list(rules.items()))
    for path, name in (("params.params.up.kernel.value", "up"), ("params.params.down.kernel.value", "down")):
        spec = specs["params"][name]["kernel"]
        said = ", ".join("+".join((s,) if isinstance(s, str) else s or ("-",)) for s in spec)
        assert said == megatron.arguments[path]
    again = Plan.loads(megatron.dumps())
    assert again.logical_axis_rules() == megatron.logical_axis_rules() and again.plan_sha256 == megatron.plan_sha256


def test_what_one_rule_cannot_serve_is_named():
    up, down = products(made("data_parallel").plan)
    with pytest.raises(SoapjaxError) as error:
        edited("data_parallel", **{down: {"d0": "replicate"}}).logical_axis_rules()
    assert f"operator {down}" in str(error.value) or f"operator {up}" in str(error.value)
    nameless = made("data_parallel").plan.model_copy(update={"logical_axes": {}})
    with pytest.raises(SoapjaxError, match="logical names in the model's metadata"):
        nameless.logical_axis_rules()


def test_maxtext():
    ones = {f"{w}_{k}_parallelism": 1 for w in ("dcn", "ici") for k in ("data", "fsdp", "tensor")}
    assert made("data_parallel").plan.to_maxtext() == ones | {"ici_data_parallelism": 8}
    assert made("fsdp").plan.to_maxtext() == ones | {"ici_fsdp_parallelism": 8}
    up, down = products(made("data_parallel").plan)
    with pytest.raises(SoapjaxError, match=f"operators {down}: got replicate"):
        edited("data_parallel", **{down: {"d0": "replicate"}}).to_maxtext()
