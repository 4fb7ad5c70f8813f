"""From a step and its arguments to its plan, searched, read or agreed on by all processes, and to the program that runs it."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from soapjax.execute.parts.joinings import warn_anew
from soapjax.execute.processes import jointly
from soapjax.execute.spmd.compiled_step import CompiledStep
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.execute.streams.stream_step import StreamStep, compile_step
from soapjax.graph.trace.tracing import TracedStep, trace
from soapjax.helpers import progress
from soapjax.planning.choosing import Chosen, as_asked
from soapjax.planning.entry import given_arguments, time_plan
from soapjax.planning.options import objective
from soapjax.planning.pipelining.given_pipeline import pipelined, planned_pipeline
from soapjax.planning.plan_files import recost
from soapjax.planning.request import PlanRequest
from soapjax.planning.verify_top import FAILURES
from soapjax.strategy.pipeline import Pipeline
from soapjax.strategy.plan import Plan

log = logging.getLogger("soapjax")


class Maker:
    """How one step function is planned.

    Args:
      name: of the step, for messages.
      request: what is asked of planning.
      plan: a plan or its file, instead of a search.
    """

    def __init__(self, name: str, request: PlanRequest, plan: str | Plan | None):
        self.name, self.request, self.source, self.devices = name, request, plan, request.devices

    def made(
        self, fn: Callable[..., Any], args: tuple[Any, ...], static: tuple[int, ...], donate: bool | Sequence[int], *, runs: bool
    ) -> tuple[Plan | None, CompiledStep | StreamStep]:
        """The plan (None of a given pipeline) and the program for these arguments, of which those at `static` are constants.

        Args:
          runs: whether the step is run as it is made, so that a check of the plan may compile it.
        """
        warn_anew()
        asked = self.request.but(static_argnums=static, donate=donate, check=self.request.check if runs else "none")
        if isinstance(asked.pipeline, Pipeline):
            return None, pipelined(
                fn, *args, pipeline=asked.pipeline, reduction=asked.microbatch_reduction, topology=asked.topology,
                devices=self.devices, donate=bool(donate), **asked.tracing,
            )  # fmt: skip
        start = time.monotonic()
        with progress.shown(f"planning {self.name}") as report:
            asked = asked.but(progress=report)
            if jointly.spans_processes(self.devices):
                with jointly.call(self.name):  # it may be `prepare` or `lower` that plans
                    chosen = self._plan_jointly(asked.but(check="none"), fn, args)
            else:
                chosen = self._make_plan(asked, fn, args)
        made = chosen.plan
        devices = self.devices if self.devices is not None else jax.devices()[: made.num_devices]
        compiled: CompiledStep | StreamStep
        if chosen.program is not None:
            compiled = chosen.program
        elif made.pipeline is not None:
            compiled = planned_pipeline(
                fn, *args, plan=made, devices=devices, donate=bool(donate), reduction=asked.microbatch_reduction,
                of_micro=chosen.of_micro, static_argnums=asked.static_argnums,
            )  # fmt: skip
        else:
            step = chosen.step or trace(fn, *args, **asked.tracing)
            compiled = compile_step(bind_plan(step, made, devices=devices), donate=donate)
        log.info(
            "soap_shard(%s): planned %d operators for %d devices in %.1f s, predicted %.4g s per step",
            self.name, made.graph.num_operators, made.num_devices, time.monotonic() - start, made.prediction.step_time_s,
        )  # fmt: skip
        if self.source is None:
            p = made.prediction
            for problem in objective(asked.objective).unmet(p.peak_sent_bytes, p.memory_bytes_per_device):
                log.warning("soap_shard(%s): %s", self.name, problem)
        return made, compiled

    def _make_plan(self, asked: PlanRequest, fn: Callable[..., Any], args: tuple[Any, ...]) -> Chosen:
        """The plan, and what was made on the way to it."""
        if self.source is None:
            if asked.devices is None:
                asked = asked.but(devices=jax.devices())  # of whatever platform: it runs there
            return as_asked(asked, fn, *args)
        source, place = (self.source, "plan") if isinstance(self.source, Plan) else (Plan.load(self.source), str(self.source))
        beside = {name: said for name, said in asked.tracing_in_plan.items() if said}
        source = source.model_copy(update=beside | {k: v for k, v in source.tracing.items() if v})
        step = trace(fn, *args, **asked.tracing | source.tracing)
        plan = recost(source, step, place=place)
        return Chosen(plan, stopped_by="", front=(), step=step)

    def _plan_jointly(self, asked: PlanRequest, fn: Callable[..., Any], args: tuple[Any, ...]) -> Chosen:
        """The one plan of all processes: process 0 plans, the others take its plan; of plan files, each reads its own."""
        jointly.agree_on_settings(self.name)
        chosen: Chosen | None = None  # of this process
        traced = functools.cache(lambda: trace(fn, *args, **asked.tracing))
        measured = jointly.Measured(self.name, seconds=asked.seconds) if asked.verify_top and self.source is None else None

        def make() -> Plan:
            nonlocal chosen
            if measured is None:
                chosen = self._make_plan(asked, fn, args)
                return chosen.plan
            try:
                chosen = self._make_plan(asked.but(measuring=measured.announce), fn, args)
            finally:
                measured.announce(None)
            return chosen.plan

        if measured is not None:
            measured.follow(lambda plan: self._measure_too(asked, fn, args, traced(), plan))
        made = jointly.planned_by_first(self.name, make, seconds=asked.seconds) if self.source is None else make()
        step = (chosen.step if chosen else None) or traced()
        jointly.agree_on_plan(self.name, made, step)
        of_micro = chosen.of_micro if chosen else None
        return Chosen(made, stopped_by="", front=(), step=step, of_micro=of_micro)

    def _measure_too(
        self, asked: PlanRequest, fn: Callable[..., Any], args: tuple[Any, ...], step: TracedStep, plan: Plan
    ) -> None:  # fmt: skip
        """Runs a plan that rank 0 measures; one that fails fails there, too."""
        leaves = jax.tree_util.tree_leaves(given_arguments(asked.understood(fn)[0], fn, args))
        with contextlib.suppress(*FAILURES):
            time_plan(plan, step, leaves, asked.devices)
