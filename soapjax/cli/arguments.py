"""What each command takes, as its --help says. Nothing heavy is imported: --help must not wait for JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

import tyro

# What several commands take.
Repeated = tyro.conf.UseAppendAction[list[str]]
Json = Annotated[bool, tyro.conf.arg(help="Print one JSON object on standard output.")]
PlanFile = Annotated[tyro.conf.Positional[str], tyro.conf.arg(help="A plan file.")]
PlannedFor = Annotated[str | None, tyro.conf.arg(help="Refuse the plan unless it is for this topology.")]
Factory = Annotated[tyro.conf.Positional[str], tyro.conf.arg(help="package.module (its `make`) or package.module:factory.")]
Settings = Annotated[Repeated, tyro.conf.arg(help="A setting of the model, key=value; repeat for more.")]
Unroll = Annotated[bool, tyro.conf.arg(help="Plan every step of a scan on its own.")]
OF_AXES = "An axis over which the step's own collectives go, as of jax.pmap: its one member is the whole batch. Repeat for more."
AxisName = Annotated[Repeated, tyro.conf.arg(help=OF_AXES)]
StripConstraints = Annotated[bool, tyro.conf.arg(help="Leave the step's own sharding constraints out.")]


@dataclasses.dataclass
class PlanCommand:
    """Plan a model for a topology and write the plan file.

    Example:  soapjax plan soapjax.models.mlp --topology cpu8 -o plan.json

    Example:  soapjax plan soapjax.models.transformer_lm --topology a100x64 --set layers=12 --set width=768 -o plan.json

    Example:  soapjax plan soapjax.models.gpt3 --topology dgx_h100 --hosts 8 -o plan.json

    Example:  soapjax plan my_package.training:make_small --topology my_cluster.toml --planner fsdp -o plan.json

    Example:  soapjax plan soapjax.models.rnnlm --topology p100x16 --space paper --planner model_parallel

    Example:  soapjax plan soapjax.models.vgg --topology p100x16 --pipeline 1f1b --microbatches 8 -o plan.json

    Example:  soapjax plan soapjax.models.vgg --topology p100x16 --objective mdpe --max-bytes 200MB --max-memory 4GB --pareto
    """

    model: Factory
    topology: str = "local"
    """A TOML file, "local", or a shipped name such as a100x64 (`soapjax topologies` lists them)."""
    hosts: str | None = None
    """Of a topology by node: how many. --topology dgx_a100 --hosts 64 is --topology 64xdgx_a100."""
    set: Settings = dataclasses.field(default_factory=list)
    planner: str = "mcmc"
    """mcmc, mcmc_paper, data_parallel, fsdp, tensor_parallel, expert_cnn, optcnn, ilp or exhaustive; with --space paper also
    single_device, model_parallel, layered_expert, expert_rnn, reinforce, hierarchical and trinity."""
    space: str = "soap"
    """soap, or paper: also operators on parts of the devices. They run as several programs."""
    pipeline: str | None = None
    """auto, gpipe, 1f1b, interleaved or pipedream: stages that work on micro-batches. auto takes a pipeline only where it is
    faster than the planner's plan, and never pipedream, which trains with old weights."""
    microbatches: str = "auto"
    """Their number, or auto: of a pipeline the best; of one program several only where nothing fits without. Gradients are added
    up over them."""
    stages: str = "auto"
    """Of a pipeline: their number, or auto."""
    objective: str = "time"
    """What is minimised: time, or mdpe: time, with a penalty where communication or memory of a device exceed a limit (Trinity)."""
    max_bytes: str | None = None
    """Of mdpe: what a device may send in a step, e.g. 8GB. Exit status 3 where no plan that was judged meets the limits."""
    max_memory: str | None = None
    """Of mdpe: what a device may store, e.g. 40GB, where that is less than it has."""
    weights: str | None = None
    """Of mdpe: of time, communication and memory, together 1. By default 0.5,0.3,0.2."""
    pareto: bool = False
    """Also print the front of time, communication and memory that the search saw."""
    seed: int = 0
    """Of the search; the same seed and --proposals give the same plan."""
    seconds: float | None = None
    """End the search after this time."""
    proposals: int | None = None
    """End the search after so many proposals."""
    output: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """Where to write the plan."""
    unroll: Unroll = False
    axis_name: AxisName = dataclasses.field(default_factory=list)
    strip_constraints: StripConstraints = False
    fix: Repeated = dataclasses.field(default_factory=list)
    """A layout that the plan must keep, path=spec as plan files have them: state.params.head.kernel="-, d1+d2". Repeat for more."""
    axis_rule: Repeated = dataclasses.field(default_factory=list)
    """Mesh axes of a logical name in Flax's partitioning metadata, name=axes: mlp=d1+d2, or embed= for none. Repeat for more."""
    profile: str | None = None
    """Cost with measurements: a file of `soapjax profile`, or "auto": all in the cache that fit."""
    simplicity: float = 0.5
    """Of plans within so many percent of the best step time the simplest is taken: equal blocks alike, fewer bytes sent, fewer
    reshards. 0 takes the best."""
    check: str = "none"
    """compile: the best plan is compiled, and where it does not fit, the search goes on with less memory, until one does (exit
    status 3 where none does). none: plans keep a margin of memory for the error of their prediction."""
    target: str | None = None
    """Of --check compile, what to compile for: by default the topology's own devices (GPUs need not be there); cpu: fake CPU
    devices, whatever the topology; others as for `soapjax verify`."""
    verify_top: int = 0
    """Run so many of the best strategies, and data parallelism, on the devices at hand, and take the measured best."""
    json: Json = False


@dataclasses.dataclass(kw_only=True)
class StepOptions:
    """Where the step of a plan comes from."""

    model: str | None = None
    """The plan's step: package.module (its `make`) or package.module:factory."""
    set: Repeated = dataclasses.field(default_factory=list)
    """A setting of --model, key=value; repeat for more."""
    trust: bool = False
    """Import and call what the plan names as its step. Only for plans whose writer you trust."""


@dataclasses.dataclass
class SimulateCommand(StepOptions):
    """Predict the step time of a plan file, edited or not, anew; from the file alone, unless --model gives the step.

    Example:  soapjax simulate plan.json

    Example:  soapjax simulate plan.json --trace trace.json    (open it at https://ui.perfetto.dev)
    """

    plan: PlanFile
    topology: PlannedFor = None
    trace: str | None = None
    """Where to write the simulated timeline, for Perfetto: a track per device and link."""
    json: Json = False


@dataclasses.dataclass
class ExplainCommand:
    """Say why a plan is as it is: critical path, largest costs, baselines, which limit binds; of an operator, its neighbours.

    Example:  soapjax explain plan.json

    Example:  soapjax explain plan.json blk0/attn/query

    Example:  soapjax explain plan.json --plan-only    (as written: no critical path, no neighbours)
    """

    plan: PlanFile
    operator: Annotated[str | None, tyro.conf.Positional] = None
    """The name of an operator, or a part of it that no other has: every other choice for it is simulated."""
    plan_only: bool = False
    """Predict nothing anew: say what is written in the file."""
    json: Json = False


@dataclasses.dataclass
class DiffCommand:
    """Compare two plans: operators that differ, with what each change costs.

    Example:  soapjax diff a.json b.json

    Example:  soapjax diff a.json b.json --plan-only    (as written: what each side takes, not what a change costs)
    """

    a: Annotated[str, tyro.conf.Positional]
    """A plan file."""
    b: Annotated[str, tyro.conf.Positional]
    """Another one."""
    plan_only: bool = False
    """Predict nothing anew: say what is written in the files."""
    json: Json = False


@dataclasses.dataclass
class ReportCommand:
    """Write a plan as one HTML page: timeline, memory, operators, costs, baselines. It needs no network.

    Example:  soapjax report plan.json -o report.html

    Example:  soapjax report plan.json -o report.html --plan-only    (without timeline and memory over the step)
    """

    plan: PlanFile
    output: Annotated[str, tyro.conf.arg(aliases=["-o"])] = "report.html"
    """Where to write the page."""
    plan_only: bool = False
    """Predict nothing anew: show what is written in the file."""
    json: Json = False


@dataclasses.dataclass
class RunCommand(StepOptions):
    """Train a model under a plan for it, and time it.

    Example:  soapjax run plan.json --model soapjax.models.mlp --steps 20
    """

    plan: PlanFile
    steps: int = 10
    """Training steps."""
    json: Json = False


@dataclasses.dataclass
class VerifyCommand(StepOptions):
    """Prove a plan: numbers equal to one device's, compiled program as planned, bytes and memory as predicted.

    Example:  soapjax verify plan.json --model soapjax.models.mlp --set width=1024

    Example:  soapjax verify plan.json --trust --target cuda --topology a100x64
    """

    plan: PlanFile
    target: str = "local"
    """What to compile for: local (the devices at hand, or fake ones), cpu (fake devices), cuda (the topology's GPU, which
    need not be there: only the compiled program is checked), or a GPU by name: v100, a100, h100, h200."""
    topology: PlannedFor = None
    json: Json = False


@dataclasses.dataclass
class ProfileCommand:
    """Measure a model's operators at the local shapes that a search for a topology asks for, and the links at hand.

    Example:  soapjax profile soapjax.models.mlp --topology local --seconds 30

    Example:  soapjax profile soapjax.models.transformer_lm --topology h200x8 --set layers=12 --set width=768 -o h200.json

    Example:  soapjax profile soapjax.models.vgg --topology local --microbatches 4 8
    """

    model: Factory
    topology: str = "local"
    """What is planned for: a TOML file, "local", or a shipped name. One of its devices must be at hand."""
    hosts: str | None = None
    """Of a topology by node: how many."""
    set: Settings = dataclasses.field(default_factory=list)
    seconds: float = 60.0
    """End the measuring after this time, the smallest contributors left out."""
    search: bool = True
    """Also measure what a short search asks for, beside the baselines."""
    microbatches: tuple[int, ...] = ()
    """Also measure what a stage of a pipeline does of the batch in so many parts: one number or more."""
    unroll: Unroll = False
    axis_name: AxisName = dataclasses.field(default_factory=list)
    strip_constraints: StripConstraints = False
    output: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """A file; by default a new one in the cache (~/.cache/soapjax/profiles, or $SOAPJAX_CACHE/profiles)."""
    json: Json = False


@dataclasses.dataclass
class CalibrateCommand(StepOptions):
    """Run plans of one model on the devices at hand, and fit at most two scalars (compute and network) to their step times.

    Example:  soapjax calibrate plan.json fsdp.json --model soapjax.models.mlp --steps 10
    """

    plans: Annotated[list[str], tyro.conf.Positional]
    """Plan files for the devices at hand."""
    steps: int = 5
    """Timed steps of each."""
    profile: str | None = None
    """What the scalars are fitted beside: a profile file or "auto"; by default the plans' own measurements."""
    output: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """A file; by default a new one in the cache."""
    json: Json = False


@dataclasses.dataclass
class TopologiesCommand:
    """List the machines that --topology knows, or all figures of some and where each comes from.

    Example:  soapjax topologies

    Example:  soapjax topologies dgx_h100 4xaws_p4d_24xlarge my_cluster.toml
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names or TOML files to tell everything about; none lists the shipped ones."""
    json: Json = False


@dataclasses.dataclass
class DemoCommand:
    """Plan a small language model for 8 devices, train it on 8 fake CPU devices, and compare with one.

    Example:  soapjax demo
    """

    steps: int = 20
    """Training steps."""
    json: Json = False


COMMANDS: dict[str, Callable[..., Any]] = {
    "plan": PlanCommand,
    "simulate": SimulateCommand,
    "explain": ExplainCommand,
    "diff": DiffCommand,
    "report": ReportCommand,
    "run": RunCommand,
    "verify": VerifyCommand,
    "profile": ProfileCommand,
    "calibrate": CalibrateCommand,
    "topologies": TopologiesCommand,
    "demo": DemoCommand,
}
