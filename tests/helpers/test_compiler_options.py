"""Options that XLA does not know are left out one by one; the others hold, and errors of the program itself are not hidden."""

import jax
import jax.numpy as jnp
import pytest

from soapjax.helpers.compiler_options import LEVEL, compiled_with


class Asking:
    """A lowered program that notes what it is asked to be compiled with."""

    def __init__(self, lowered):
        self.lowered, self.asked = lowered, []

    def compile(self, compiler_options):
        self.asked.append(compiler_options)
        return self.lowered.compile(compiler_options)


def test_only_an_unknown_option_is_left_out():
    lowered = Asking(jax.jit(lambda x: 2 * jnp.sin(x)).lower(1.0))
    assert compiled_with(lowered, {"xla_of_a_later_version": True, LEVEL: 0})(1.0) == 2 * jnp.sin(1.0)
    assert lowered.asked[-1] == {LEVEL: 0} and len(lowered.asked) == 2


def test_errors_of_the_program_are_not_hidden():
    class Failing:
        def compile(self, compiler_options):
            raise jax.errors.JaxRuntimeError("out of memory")

    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        compiled_with(Failing(), {LEVEL: 0})
