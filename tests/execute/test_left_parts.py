"""Parameters of which the forward pass leaves a part: the backward pass gathers from that, and computes what one device does."""

import re

import jax
import numpy as np
import pytest
from families import sampled
from planned import Case, data_parallel, rotated
from problems import MODELS

from models import mlp, transformer_lm
from soapjax.execute.compiled.inspection import inspect
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.graph.readers import left_parameters
from soapjax.strategy.configs import Strategy

STEPS = {
    "mlp": lambda: mlp.make(batch=16, width=32, layers=3, classes=8, features=32),
    "mlp in bfloat16": lambda: mlp.make(batch=16, width=32, layers=3, classes=8, features=32, dtype="bfloat16"),
    "lm": lambda: transformer_lm.make(**MODELS["lm"][1] | {"batch": 16}),
    "lm of a loop": lambda: transformer_lm.make(**MODELS["lm"][1] | {"batch": 16, "scan": True}),
}


@pytest.fixture(scope="module", params=sampled(STEPS, 4))
def found(request):
    fn, *args = STEPS[request.param]()
    return request.param, Case(fn, tuple(args), hosts=2)


def stored(c, start, option):
    return Strategy(start.axes, np.where(c.space.owns_parameters, option, start.storage).astype(np.int8))


def left_option(c):
    (option,) = (k for k, s in enumerate(c.space.storages) if any(s.left))
    return option


def test_numbers_are_those_of_one_device(found):
    name, c = found
    is_small = name == "mlp"  # of others, which take longer to compile, fewer
    for start in (data_parallel(c.space), *(rotated(c.space, k) for k in range(3 if is_small else 1))):
        c.check(stored(c, start, left_option(c)), 1e-6)
    for seed in range(2 if is_small else 1):
        c.check(c.space.random(np.random.default_rng(seed)), 1e-6)


def test_the_backward_pass_gathers_within_hosts_what_the_plan_says(found):
    name, c = found
    plan = c.plan(stored(c, data_parallel(c.space), left_option(c)))
    compiled = inspect(bind_plan(c.step, plan, devices=jax.devices()[:8])).bytes_by_collective
    predicted = plan.prediction.bytes_by_collective
    assert sum(compiled.values()) == pytest.approx(sum(predicted.values()), rel=0.02)
    kept = c.plan(stored(c, data_parallel(c.space), 1)).prediction.bytes_by_collective["all-gather"]
    assert predicted["all-gather"] > kept and left_parameters(c.graph)


@pytest.mark.parametrize("how", ["kept", "regathered", "left"])
def test_what_is_not_kept_is_gathered_one_operator_ahead(found, how):
    """In the program before XLA: its gather waits for what the heavy equation before the reader reads."""
    name, c = found
    options = {"kept": 1, "regathered": 2, "left": left_option(c)}
    program = bind_plan(c.step, c.plan(stored(c, data_parallel(c.space), options[how])), devices=jax.devices()[:8])
    made = jax.jit(lambda *x: program.evaluator().run(list(x))[0], in_shardings=program.in_shardings())
    text = made.lower(*c.leaves).as_text()
    # (what is held back, what it waits for) by their shapes: weights, and what has a batch of 16 (in lm by sequences of tokens).
    barriers = re.findall(r"optimization_barrier %\S+, %\S+ : tensor<(\S+?)>, tensor<(\S+?)>", text)
    weights = [p for p in c.graph.parameters if len(c.graph.tensors[p.tensor].shape) > 1]
    shapes = {"x".join(map(str, c.graph.tensors[p.tensor].shape)) for p in weights}
    tied = [b for a, b in barriers if a.rpartition("x")[0] in shapes and b.startswith("16x")]
    if how == "kept":
        assert not barriers
    elif name.startswith("mlp"):  # in both passes all weights but those of the first operator, which no backward pass reads
        assert len(tied) == 2 * (len(weights) - 1) - (name != "mlp")  # of two operators whose casts are apart, one
    else:
        assert len(tied) > (0 if name == "lm of a loop" else len(weights))


def test_nothing_waits_for_constants(found):
    """As the zeros are, as large as the logits, that the gradient of picking the labels' scores is scattered into."""
    _, c = found
    program = bind_plan(c.step, c.plan(stored(c, data_parallel(c.space), 2)), devices=jax.devices()[:8])
    made = jax.make_jaxpr(lambda *x: program.evaluator().run(list(x))[0])(*c.leaves)
    makers = {o: e for e in made.eqns for o in e.outvars}
    waits = [makers.get(x) for e in made.eqns if e.primitive.name == "optimization_barrier" for x in e.invars]
    assert waits and any(e.primitive.name.startswith("scatter") for e in made.eqns)
    assert all(any(not hasattr(a, "val") for a in e.invars) for e in waits if e is not None)
