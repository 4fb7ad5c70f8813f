"""Compiling as users do, whatever conftest.py does to compile quickly."""

import contextlib
import functools

import jax

from soapjax.helpers.compiler_options import LEVEL

USUAL = {"xla_cpu_use_fusion_emitters": True} if jax.__version__.startswith("0.10.") else {}  # what conftest.py switches off


@contextlib.contextmanager
def compiling():
    """Inside, compilation ahead of time (`jit(f).lower(*args).compile()`) makes the HLO of a plain process.

    Of its machine code nothing is asked: LLVM optimises none of it, which is a third of the time.
    """
    quick, compile_ = jax.config.read("jax_disable_most_optimizations"), jax.stages.Lowered.compile

    @functools.wraps(compile_)
    def as_usual(lowered, compiler_options=None, **options):
        return compile_(lowered, USUAL | {LEVEL: 0} | (compiler_options or {}), **options)

    jax.config.update("jax_disable_most_optimizations", False)
    jax.stages.Lowered.compile = as_usual
    try:
        yield
    finally:
        jax.stages.Lowered.compile = compile_
        jax.config.update("jax_disable_most_optimizations", quick)
