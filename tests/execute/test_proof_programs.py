"""The four programs of a proof are compiled quickly and at once; whatever one of them fails with is told."""

import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import soapjax
from soapjax.execute.compiled import proof_programs
from soapjax.execute.compiled.proof import reference, verify
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.helpers.compiler_options import LEVEL, OLDER_EMITTERS, compiled_with


def step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.square(jnp.tanh(x @ w)).mean())(w)
    return w - 0.1 * gradient, {"loss": loss}


@pytest.fixture(scope="module")
def bound():
    rng = np.random.default_rng(0)
    arguments = [rng.standard_normal(shape).astype(np.float32) for shape in ((16, 8), (32, 16))]
    found = soapjax.plan(step, *arguments, topology="cpu8", planner="fsdp")
    return bind_plan(found.step, found.plan), arguments


def test_all_four_are_compiled_at_once_and_quickly(bound, monkeypatch):
    """None is done before all have begun."""
    together, asked = threading.Barrier(4, timeout=120), []

    def compiled(lowered, options):
        asked.append(options)
        together.wait()
        return compiled_with(lowered, options)

    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(proof_programs, "compiled_with", compiled)
    assert verify(*bound).is_proven
    assert asked == [{**OLDER_EMITTERS, LEVEL: 0}] * 4


def test_a_reference_at_hand_is_not_compiled_again(bound, monkeypatch):
    single, count = reference(*bound), []
    monkeypatch.setattr(proof_programs, "compiled_with", lambda *of: count.append(of) or compiled_with(*of))
    assert verify(*bound, single).is_proven
    assert len(count) == 2


def test_what_does_not_compile_is_told(bound, monkeypatch):
    def failing(lowered, options):
        raise jax.errors.JaxRuntimeError("no memory left")

    monkeypatch.setattr(proof_programs, "compiled_with", failing)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no memory left"):
        verify(*bound)
