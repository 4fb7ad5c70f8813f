"""Whole steps are timed on copies, and fake devices are told apart."""

import types

import jax
import numpy as np
from planned import Case, data_parallel

from soapjax.execute.compiled.timing import are_fake, example_arguments, time_steps
from soapjax.execute.spmd.planned_evaluator import bind_plan


def step(state, batch):
    loss, grads = jax.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(state)
    return state - 0.1 * grads, loss


def test_steps_are_timed_and_the_caller_keeps_the_state():
    case = Case(step, (np.ones((16, 8), np.float32), np.ones((32, 16), np.float32)), devices=4)
    bound = bind_plan(case.step, case.plan(data_parallel(case.space)), devices=jax.devices()[:4])
    arguments = [jax.device_put(x, s) for x, s in zip(case.leaves, bound.in_shardings(), strict=True)]
    assert 0 < time_steps(bound, arguments, num_steps=3) < 10
    np.testing.assert_array_equal(arguments[0], case.leaves[0])  # not donated
    assert 0 < time_steps(bound, None, num_steps=1) < 10
    made = example_arguments(bound)
    assert [(x.shape, x.dtype) for x in made] == [(a.shape, a.dtype) for a in case.step.in_avals]


def test_devices_of_one_process_are_fake_on_a_cpu_only():
    def device(platform, process):
        return types.SimpleNamespace(platform=platform, process_index=process)

    own = jax.process_index()
    assert are_fake(jax.devices()[:2]) and not are_fake(jax.devices()[:1])
    assert not are_fake([device("cpu", own), device("cpu", own + 1)])
    assert not are_fake([device("gpu", own), device("gpu", own)])
