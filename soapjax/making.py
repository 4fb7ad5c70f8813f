"""From a step and its arguments to its plan, searched, read or agreed on by all processes, and to the program that runs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from soapjax import progress
from soapjax.execute.processes import jointly
from soapjax.execute.spmd.compiled_step import CompiledStep
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.execute.streams.stream_step import StreamStep, compile_step
from soapjax.graph.trace.trace import TracedStep, trace
from soapjax.options import objective
from soapjax.planning import entry
from soapjax.planning.auto_pipeline import plan_one_or_pipeline
from soapjax.planning.given_pipeline import PipelineOptions, pipelined, planned_pipeline
from soapjax.planning.plan_files import recost
from soapjax.strategy.pipeline import Pipeline
from soapjax.strategy.plan import Plan

log = logging.getLogger("soapjax")


class Maker:
    """How one step function is planned.

    Args:
      name: of the step, for messages.
      plan: a plan or its file, instead of a search.
      options: of the search and the trace, as `soapjax.plan` takes them.
    """

    def __init__(
        self, name: str, *, plan: str | Plan | None, devices: Sequence[Any] | None, pipeline: PipelineOptions | None, **options: Any
    ):  # fmt: skip
        self.name, self.source, self.devices, self.pipeline, self.options = name, plan, devices, pipeline, options
        self.check = options.pop("check")
        self.tracing = {k: options[k] for k in ("axis_name", "strip_constraints")}

    def made(
        self, fn: Callable[..., Any], args: tuple[Any, ...], static: tuple[int, ...], donate: bool | Sequence[int], *, runs: bool
    ) -> tuple[Plan | None, CompiledStep | StreamStep]:
        """The plan (None of a given pipeline) and the program for these arguments, of which those at `static` are constants.

        Args:
          runs: whether the step is run as it is made, so that a check of the plan may compile it.
        """
        asked = self.pipeline
        if asked is not None and isinstance(asked.pipeline, Pipeline):
            return None, pipelined(
                fn, *args, pipeline=asked.pipeline, reduction=asked.reduction, topology=self.options["topology"],
                devices=self.devices, static_argnums=static, unroll=self.options["unroll"], donate=bool(donate), **self.tracing,
            )  # fmt: skip
        start, program = time.monotonic(), None
        with progress.shown(f"planning {self.name}") as report:
            if jointly.spans_processes(self.devices):
                with jointly.call(self.name):  # it may be `prepare` or `lower` that plans
                    made, step = self._plan_jointly(fn, args, static, report)
            else:
                check = dict(check=self.check if runs else "none", donate=donate)
                made, step, program = self._make_plan(fn, args, static, report, check)
        devices = self.devices if self.devices is not None else jax.devices()[: made.num_devices]
        if made.pipeline is not None:
            compiled = planned_pipeline(
                fn, *args, plan=made, devices=devices, donate=bool(donate), static_argnums=static,
                reduction="mean" if asked is None else asked.reduction, **self.tracing,
            )  # fmt: skip
        else:
            compiled = program or compile_step(bind_plan(step, made, devices=devices), donate=donate)
        log.info(
            "soap_shard(%s): planned %d operators for %d devices in %.1f s, predicted %.4g s per step",
            self.name, made.graph.num_operators, made.num_devices, time.monotonic() - start, made.prediction.step_time_s,
        )  # fmt: skip
        if self.source is None:
            p = made.prediction
            for problem in objective(self.options["objective"]).unmet(p.peak_sent_bytes, p.memory_bytes_per_device):
                log.warning("soap_shard(%s): %s", self.name, problem)
        return made, compiled

    def _make_plan(
        self, fn: Callable[..., Any], args: tuple[Any, ...], static: tuple[int, ...], report: progress.Report | None,
        check: dict[str, Any],
    ) -> tuple[Plan, TracedStep, CompiledStep | None]:  # fmt: skip
        """The plan, the traced step, and the program where a check compiled it."""
        options = self.options
        tracing = dict(static_argnums=static, **self.tracing)
        if self.source is None and self.pipeline is not None:
            return self._planned_pipeline(fn, args, static, report), trace(fn, *args, unroll=options["unroll"], **tracing), None
        if self.source is None:
            devices = jax.devices() if self.devices is None else self.devices  # of whatever platform: it runs there
            found = entry.plan(fn, *args, static_argnums=static, devices=devices, progress=report, **check, **options)
            return found.plan, found.step, found.program
        source = self.source if isinstance(self.source, Plan) else Plan.load(self.source)
        step = trace(fn, *args, unroll=source.unroll or options["unroll"], **tracing)
        return recost(source, step, place="plan" if source is self.source else str(self.source)), step, None

    def _planned_pipeline(
        self, fn: Callable[..., Any], args: tuple[Any, ...], static: tuple[int, ...], report: progress.Report | None
    ) -> Plan:
        """The plan of the schedule that was asked for; of "auto" perhaps one of a single program."""
        asked, options = self.pipeline, self.options
        numbers = dict(microbatches=asked.num_microbatches, stages=asked.num_stages, static_argnums=static, progress=report)
        if asked.pipeline == "auto":
            return plan_one_or_pipeline(fn, *args, devices=self.devices, **numbers, **options).plan
        names = ("topology", "seed", "proposals", "seconds", "unroll", "profile", "objective", *self.tracing)
        shared = {k: options[k] for k in names}
        return entry.plan_pipeline(fn, *args, pipeline=asked.pipeline, devices=self.devices, **numbers, **shared)[0]

    def _plan_jointly(
        self, fn: Callable[..., Any], args: tuple[Any, ...], static: tuple[int, ...], report: progress.Report | None
    ) -> tuple[Plan, TracedStep]:
        """The one plan of all processes: process 0 plans, the others take its plan; of plan files, each reads its own."""
        jointly.agree_on_settings(self.name)
        if self.source is None:
            step: TracedStep | None = None

            def search() -> Plan:
                nonlocal step
                made, step, _ = self._make_plan(fn, args, static, report, {})
                return made

            made = jointly.planned_by_first(self.name, search, seconds=self.options["seconds"])
            step = step or trace(fn, *args, static_argnums=static, unroll=self.options["unroll"], **self.tracing)
        else:
            made, step, _ = self._make_plan(fn, args, static, report, {})
        jointly.agree_on_plan(self.name, made, step)
        return made, step
