"""What is asked of planning, as one value: the place where an option has its name, its default and its meaning.

`soapjax.plan`, `soapjax.plan_pipeline`, `soap_shard` and the command line make one and hand it on. A new option is a field here,
a row in the table of what options may be (options.py), and an argument of the command line (soapjax/cli/arguments.py).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np

from soapjax.costs.measured.profile import Profile, cache_folder, cached_profile, load_profile, mismatches, other_versions
from soapjax.errors import Problem, SoapjaxError
from soapjax.planning import options
from soapjax.planning.profiling import device_at_hand
from soapjax.search.experts.baselines import BASELINES
from soapjax.search.objective import TIME, Objective
from soapjax.search.planners import PLANNERS
from soapjax.steps.calling import listed
from soapjax.strategy.pipeline import Pipeline, ScheduleName
from soapjax.strategy.plan import TRACING, ModelSource, Plan
from soapjax.topology import DeviceTopology, load_topology
from soapjax.topology.local import local_topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is asked of planning.

    Args:
      topology: a TOML file, a shipped name ("a100x64"), "local", or a `DeviceTopology`.
      planner: a name in `soapjax.PLANNERS`. Beside a pipeline or micro-batches "data_parallel", "fsdp" or "tensor_parallel" says
        how every stage is split: of that kind the best is taken of all that is not given, such as the number of stages.
      space: "soap", or "paper": also operators on parts of the devices. Such plans run as several programs.
      pipeline: a schedule to plan ("gpipe", "1f1b", "interleaved", "pipedream"), or "auto": the best synchronous one, where it is
        faster than one program. Of `soap_shard` also a `Pipeline` to run as it is.
      microbatches: a number, or "auto": of a pipeline the best, of one program several only where no plan fits without. Of one
        program they are a pipeline of one stage: gradients are added up over them.
      stages: of a pipeline that is planned, a number or "auto".
      microbatch_reduction: "mean" where the loss is a mean over the batch, "sum" where it is a sum; "auto": as the step tells.
      objective: what is minimised: "time", or an `Objective` with limits of communication and memory. Where no plan meets these,
        the one that violates them least is taken, with a note; `objective.unmet` names them.
      pareto: keep the front of time, communication and memory of all that the search judged.
      seed, proposals, seconds: the search's; the same seed and `proposals` give the same plan. Compiling is part of the seconds.
      simplicity: of plans within so many percent of the best step time, the simplest is taken; 0 takes the best.
      check: "compile": compile the best plan, and search on with less memory where it does not fit. With "none" plans keep a
        margin of memory for the error of their prediction.
      verify_top: run so many of the best strategies, and data parallelism, and take the measured best.
      profile: measurements to cost with: a file of `soapjax profile`, "auto" (all in the cache that fit), or a `Profile`.
      devices: those to run on and to compile for, and those that "local" means; `jax.devices()` by default.
      fixed: argument path -> PartitionSpec (or axis names per dim, or a pytree of shardings) that the plan must keep; of a pipeline
        by axes of the mesh of the stage that holds the argument.
      logical_axis_rules: (logical name, mesh axis, several or None) pairs, as Flax has them, for the logical names in Flax's
        partitioning metadata. Names that nothing maps to axes of the plan's mesh are ignored, with one note.
      unroll: plan every step of a scan on its own.
      static_argnums: positions of compile-time constants, as for `jax.jit`.
      axis_name: axes over which the step's collectives go, as for `jax.pmap` (`jax.lax.pmean(grads, "batch")`, BatchNorm's
        `axis_name`). The step gets the global batch, which is the one member of the axis: means and sums are those over the whole
        batch (soapjax/graph/trace/one_program.py).
      strip_constraints: ignore the step's own `with_sharding_constraint`, such as one on a mesh of its own.
      donate: give the memory of state arguments (what the step returns anew) to the results.
      model: where the step comes from, for the plan's file.
      progress: called between rounds with (proposals, best step time, elapsed seconds).
      measuring: called with every plan that is about to be run for `verify_top`: the job's other processes must run it, too.
    """

    topology: str | DeviceTopology = "local"
    planner: str = "mcmc"
    space: str = "soap"
    pipeline: Pipeline | str | None = None
    microbatches: int | Literal["auto"] | None = "auto"
    stages: int | Literal["auto"] | None = "auto"
    microbatch_reduction: str = "auto"
    objective: str | Objective = "time"
    pareto: bool = False
    seed: int = 0
    proposals: int | None = None
    seconds: float | None = None
    simplicity: float = 0.5
    check: str = "none"
    verify_top: int = 0
    profile: str | Profile | None = None
    devices: Sequence[Any] | None = None
    fixed: Mapping[str, Any] | None = None
    logical_axis_rules: Sequence[tuple[str, Any]] | None = None
    unroll: bool = False
    static_argnums: int | Sequence[int] | None = ()
    axis_name: str | Sequence[str] = ()
    strip_constraints: bool = False
    donate: bool | Sequence[int] = True  # `soap_shard` says by position which arguments' memory is given
    model: ModelSource | None = None
    progress: Callable[[int, float, float], None] | None = None
    measuring: Callable[[Plan], None] | None = None

    def __post_init__(self) -> None:
        """A NumPy number becomes Python's own."""
        for name, value in vars(self).copy().items():
            if isinstance(value, np.generic):
                object.__setattr__(self, name, value.item())

    def but(self, **others: Any) -> Self:
        """The same with other values."""
        return dataclasses.replace(self, **others)

    def values(self) -> dict[str, Any]:
        """By name, as they are."""
        return dict(vars(self))

    @property
    def num_microbatches(self) -> int | None:
        return None if self.microbatches == "auto" else self.microbatches

    @property
    def num_stages(self) -> int | None:
        return None if self.stages == "auto" else self.stages

    @property
    def tracing(self) -> dict[str, Any]:
        """How the step is traced: options of `soapjax.trace`."""
        return {"static_argnums": self.static_argnums} | self.tracing_in_plan

    @property
    def tracing_in_plan(self) -> dict[str, Any]:
        """What of that a plan file says."""
        return {name: getattr(self, name) for name in TRACING} | {"axis_name": listed(self.axis_name)}

    def problems(self) -> list[Problem]:
        """What does not go together with a pipeline or micro-batches; of each value by itself options.py says it."""
        numbers = {"microbatches": self.num_microbatches, "stages": self.num_stages}
        given = [name for name, value in numbers.items() if value is not None]
        problems = []
        if self.pipeline is None and self.num_stages is not None:
            problems.append(Problem("stages", "given without a pipeline", "a pipeline", 'say pipeline="1f1b", or drop stages'))
        if isinstance(self.pipeline, Pipeline):
            problems += [Problem(n, "given beside a Pipeline", "one of them", f"the Pipeline has its own: drop {n}") for n in given]
        if self.adds_up:
            given = [name for name in ("verify_top", "space") if getattr(self, name) != getattr(PlanRequest, name)]
            problems += [Problem(name, "given beside micro-batches", "one of them", "drop it") for name in given]
        is_known = isinstance(self.planner, str) and self.planner in PLANNERS
        if is_known and self.planner not in (allowed := planners_beside(self.pipeline, self.adds_up)):
            beside = "micro-batches" if self.adds_up else "a pipeline"
            expected, remedy = f"{' or '.join(allowed)} beside {beside}", f"drop planner, or {beside}"
            problems.append(Problem("planner", repr(self.planner), expected, remedy))
        of_user = [name for name in ("fixed", "logical_axis_rules") if getattr(self, name) is not None]
        if not self.keeps_layouts:
            expected = "one of them: each replica of a pipedream stage has all of it, and a Pipeline has meshes of its own"
            problems += [Problem(n, "given beside such a pipeline", expected, "drop it, or name another schedule") for n in of_user]
        return problems

    @property
    def keeps_layouts(self) -> bool:
        """Whether layouts that the user decided can be kept: by axes of the plan's mesh, or of a stage's."""
        return self.pipeline != "pipedream" and not isinstance(self.pipeline, Pipeline)

    @property
    def adds_up(self) -> bool:
        """Whether one program is to add up gradients over a number of micro-batches."""
        return self.pipeline is None and isinstance(self.num_microbatches, int) and self.num_microbatches > 1

    @property
    def expert(self) -> str | None:
        """A baseline whose way of splitting every stage is to have."""
        return self.planner if self.planner in BASELINES else None

    def adding_up(self) -> Self:
        """One stage on all devices, whose gradients are added up over micro-batches."""
        return self.but(pipeline="1f1b", stages=1)

    def understood(self, fn: Any) -> tuple[Understood, tuple[str, ...]]:
        """The same with what its names mean, and remarks on the profile.

        Raises: SoapjaxError with every option that does not fit.
        """
        values = self.values() if isinstance(self.donate, bool) else {**self.values(), "donate": True}  # positions, from within
        options.check(values, also=[*options.check_step(fn), *self.problems()])
        topology = _topology(self.topology, self.devices)
        profile, remarks = find_profile(self.profile, topology)
        constants, objective = listed(self.static_argnums), options.objective(self.objective)
        meant = {"topology": topology, "profile": profile, "objective": objective, "static_argnums": constants}
        return Understood(**self.values() | meant), remarks


def planners_beside(pipeline: Pipeline | str | None, adds_up: bool) -> Collection[str]:
    """Planners that a pipeline, or one stage of micro-batches, may be asked for with: baselines say how stages are split."""
    if pipeline in (None, "auto") and not adds_up:
        return PLANNERS
    if isinstance(pipeline, Pipeline):
        return (PlanRequest.planner,)  # it says it itself
    return PlanRequest.planner, *(["data_parallel"] if pipeline == "pipedream" else BASELINES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Understood(PlanRequest):
    """A request whose options were checked, and whose names are replaced by what they mean."""

    topology: DeviceTopology
    pipeline: ScheduleName | Literal["auto"] | None = None  # a `Pipeline` is not planned
    profile: Profile | None = None
    objective: Objective = TIME
    static_argnums: Sequence[int] = ()


def _topology(topology: str | DeviceTopology, devices: Sequence[Any] | None) -> DeviceTopology:
    """The topology that is meant; "local" is that of the devices to run on."""
    if topology == "local":
        return local_topology(devices)
    return topology if isinstance(topology, DeviceTopology) else load_topology(topology)


def find_profile(profile: str | Profile | None, topology: DeviceTopology) -> tuple[Profile | None, tuple[str, ...]]:
    """The profile that is meant, and remarks on what was left out.

    Raises: SoapjaxError where a file is damaged, or of another device kind.
    """
    if profile is None:
        return None, ()
    if profile == "auto":
        at_hand = device_at_hand()
        own = at_hand.processor if topology.device.platform == "cpu" == at_hand.platform else None
        found, notes = cached_profile(topology.device, processor=own, topology_fingerprint=topology.fingerprint())
        if found is None:
            notes = (*notes, f"no profile of {topology.device.name} in {cache_folder()}: all figures are analytic")
        return found, notes
    place = "profile" if isinstance(profile, Profile) else profile
    found = profile if isinstance(profile, Profile) else load_profile(profile)
    if problems := mismatches(found, topology.device, place=place):
        raise SoapjaxError(problems)
    fitting = found.for_cluster(topology.fingerprint())
    remarks = ["scalars of another cluster left out"] if fitting is not found else []
    return fitting, tuple(f"{place}: {remark}" for remark in (*remarks, other_versions(found)) if remark)


def takes_options(*left_out: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Lets a function of `**options` take the fields of `PlanRequest` by name, those in `left_out` excepted, and say so.

    A name that the function has itself is its own.
    """

    def decorated(fn: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(fn)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = {p.name for p in own} | set(left_out)
        fields = [f for f in dataclasses.fields(PlanRequest) if f.name not in names]
        own += [inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type) for f in fields]
        accepted = {p.name for p in own}

        @functools.wraps(fn)
        def checked(*args: Any, **given: Any) -> Any:
            if unknown := [name for name in given if name not in accepted]:
                raise TypeError(f"{fn.__name__}() got an unexpected keyword argument {unknown[0]!r}")
            return fn(*args, **given)

        checked.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]  # what `inspect` reads
        return checked

    return decorated
