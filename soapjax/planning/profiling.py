"""Where measuring and planning meet: what to measure of a model for a topology, and the profile that comes of it.

The shapes that matter are those that strategies ask for: the baselines' first, then those of a short search with what
was measured so far. Of each, the tasks with the largest share of the predicted compute time come first, until
the time is spent.
"""

from __future__ import annotations

import datetime
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import jax
import numpy as np

from soapjax.costs.measured.fit import fitted_link, fitted_rates
from soapjax.costs.measured.interpolation import ComputeRates, LocalTask, figures_of, local_task
from soapjax.costs.measured.profile import Profile, installed_versions, is_same_kind, merged
from soapjax.costs.measured.profile_parts import Calibration, Device, Measurement
from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.compiled.measure import LocalStep, Timing, Unmeasurable
from soapjax.execute.compiled.measure_links import time_collectives
from soapjax.execute.compiled.timing import are_fake, num_cores, processor_name
from soapjax.graph.microbatch import micro_batch
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.build import build_graph
from soapjax.graph.passes.phases import PHASE_NAMES
from soapjax.graph.trace.tracing import TracedStep
from soapjax.helpers import interrupts
from soapjax.jit.programs import threads
from soapjax.search.experts.baselines import data_parallel_strategy
from soapjax.search.planners import BASELINES, get_planner
from soapjax.search.problem import Budget, PlanningProblem
from soapjax.search.stages.stage_figures import part_of
from soapjax.simulate.event import simulate
from soapjax.simulate.simulator import Simulator, occupied_by
from soapjax.strategy.configs import Strategy
from soapjax.strategy.space import search_space
from soapjax.topology import DeviceTopology, factor_mesh

SEARCHES, SEARCH_PROPOSALS = 2, 2048
MOST_AT_ONCE, SHARE_AT_ONCE = 8, 0.1  # of tasks that are compiled side by side, two cores each; of the device's memory
COVERED = 0.995  # of a strategy's predicted compute time; the rest is left to the roofline
Progress = Callable[[int, int, float, str], None]  # measured, asked for, elapsed seconds, label


class Request(NamedTuple):
    """A task at local shapes, and how many seconds of a step it is predicted to take."""

    task: int
    degrees: tuple[int, ...]
    local: LocalTask
    step_s: float


def device_at_hand() -> Device:
    """The device that would be measured: the first one of this process."""
    first = jax.local_devices()[0]
    platform = first.platform
    if platform == "gpu":
        platform = "rocm" if "rocm" in first.client.platform_version.lower() else "cuda"
    is_cpu = platform == "cpu"
    return Device(name=first.device_kind, platform=platform, processor=processor_name() if is_cpu else "")


def asked_degrees(simulator: Simulator, strategy: Strategy) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Per task the degrees of its operator's dims (of an update: the shards), and its predicted compute seconds [K]."""
    tables, costs = simulator.tables, simulator.costs(strategy)
    graph, sizes = tables.graph, tables.links.axis_sizes
    num_u, num_p = len(tables.access_op), len(tables.parameter_op)
    stored = np.asarray(costs.layouts.slots)[num_u : num_u + num_p]
    found: list[tuple[int, ...]] = []
    for task in graph.tasks:
        if task.parameter >= 0:
            layout = stored[task.parameter]
            found.append((math.prod(n for n, d in zip(sizes, layout, strict=True) if d >= 0),))
        else:
            axes = strategy.axes[task.operator]
            dims = range(len(graph.operators[task.operator].dims))
            found.append(tuple(math.prod(n for n, v in zip(sizes, axes, strict=True) if v == d) for d in dims))
    return found, np.asarray(costs.durations.compute_s)


def requests_of(simulator: Simulator, strategies: Sequence[Strategy]) -> list[Request]:
    """The distinct local tasks that strategies ask for, largest first, down to what covers nearly all of each."""
    graph = simulator.tables.graph
    largest: dict[tuple, Request] = {}
    for strategy in strategies:
        degrees, seconds = asked_degrees(simulator, strategy)
        own: dict[tuple, Request] = {}
        for k in range(len(graph.tasks)):
            local = local_task(graph, k, degrees[k])
            before = own[local.identity].step_s if local.identity in own else 0.0
            own[local.identity] = Request(k, degrees[k], local, before + float(seconds[k]))
        covered, total = 0.0, sum(r.step_s for r in own.values())
        for identity, request in sorted(own.items(), key=lambda x: -x[1].step_s):
            if covered > COVERED * total:
                break
            covered += request.step_s
            if identity not in largest or largest[identity].step_s < request.step_s:
                largest[identity] = request
    return sorted(largest.values(), key=lambda r: (-r.step_s, r.task, r.degrees))


def require_kind(topology: DeviceTopology) -> Device:
    """The device at hand, of the kind that a topology names.

    Raises: SoapjaxError where it is of another kind.
    """
    device = device_at_hand()
    if not is_same_kind(topology.device, device):
        found, wanted = f"{device.name} ({device.platform})", f"{topology.device.name} ({topology.device.platform})"
        remedy = "run this on such a device, or name a topology of the devices at hand"
        raise SoapjaxError(Problem("devices", found, f"{wanted}, of the topology {topology.name}", remedy))
    return device


def measure_profile(
    step: TracedStep, topology: DeviceTopology, *, seconds: float, command: str = "", seed: int = 0, search: bool = True,
    microbatches: Sequence[int] = (), progress: Progress | None = None,
) -> tuple[Profile, list[str]]:
    """Measures a step's tasks on one device at hand, and the links between all of them; a profile and notes.

    Args:
      seconds: ends the measuring of tasks; what is under way is finished.
      search: also measure what a short search asks for.
      microbatches: also measure tasks on one device at these parts of the batch, as stages of a pipeline run them.
    Raises: SoapjaxError where the device at hand is of another kind than the topology's, and where a number does not divide
      the batch.
    """
    begin = time.monotonic()
    device = require_kind(topology)
    graph, binding = build_graph(step)
    for num in microbatches:
        micro_batch(graph, num)  # refuses what does not divide
    space = search_space(graph, factor_mesh(topology))
    local_step = LocalStep(step, graph, binding)
    tasks = _TaskTimes(graph, local_step, begin, seconds, progress, topology.device.available_memory_bytes)
    notes: list[str] = []
    links = _measured_links(topology, notes)

    def profile() -> Profile:
        operators = tuple(tasks.found.values())
        before = ComputeRates(topology, None).rates_of((m.kind, m.dtype) for m in operators)
        return Profile(
            device=device, versions=installed_versions(),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), commands=(command,) if command else (),
            operators=operators, rates=fitted_rates(operators, before), links=links,
        )  # fmt: skip

    try:
        with interrupts.searching():
            rounds = _rounds(graph, space, topology, profile, seed=seed, search=search)
            for requests in itertools.chain((in_stages(graph, topology, num) for num in microbatches), rounds):
                if left := tasks.measure(requests):
                    notes.append(f"the time was spent with {left} distinct tasks not measured, the smallest ones")
                    break
    except KeyboardInterrupt:
        notes.append("interrupted: what was measured so far is kept")
    notes += [f"not measured: {why}" for why in tasks.failed.values()]
    return profile(), notes


class _TaskTimes:
    """Tasks measured, by their identity, and why others cannot be."""

    def __init__(self, graph: OperatorGraph, local_step: LocalStep, begin: float, seconds: float, progress: Progress | None,
                 memory_bytes: float):  # fmt: skip
        self.graph, self.local_step, self.begin, self.seconds, self.progress = graph, local_step, begin, seconds, progress
        self.found: dict[tuple, Measurement] = {}
        self.failed: dict[tuple, str] = {}
        self.at_once, self.most_bytes = max(1, min(MOST_AT_ONCE, num_cores() // 2)), memory_bytes * SHARE_AT_ONCE

    def measure(self, requests: Sequence[Request]) -> int:
        """Measures those that are new; how many were left when the time was over."""
        fresh = [r for r in requests if r.local.identity not in self.found and r.local.identity not in self.failed]
        done = 0
        for together in _compiled_together(fresh, self.at_once, self.most_bytes):
            elapsed_s, left = time.monotonic() - self.begin, len(fresh) - done
            if self.found and elapsed_s > self.seconds:
                return left
            if self.progress is not None:
                self.progress(len(self.found), len(self.found) + left, elapsed_s, self._label(together[0]))
            # Compilers try kernels out on the device: nothing is timed meanwhile.
            with threads(len(together)) as pool:
                ready = [pool.submit(self.local_step.ready, r.task, r.degrees, jax.local_devices()[0]) for r in together]
            for request, compiled in zip(together, ready, strict=True):
                self._measure_one(request, compiled)
            done += len(together)
        return 0

    def _label(self, request: Request) -> str:
        task = self.graph.tasks[request.task]
        return f"{self.graph.operators[task.operator].name} {PHASE_NAMES[task.phase]}"

    def _measure_one(self, request: Request, compiled: Future[Callable[[], Timing]]) -> None:
        local, task, label = request.local, self.graph.tasks[request.task], self._label(request)
        try:
            timing = compiled.result()()
        except Unmeasurable as e:
            self.failed[local.identity] = f"{label}: {e}"
            return
        self.found[local.identity] = Measurement(
            label=label, structure=local.structure, kind=task.kind, dtype=task.dtype, reads=local.reads,
            writes=local.writes, elements=local.elements, flops=local.flops, moved_bytes=local.moved_bytes,
            seconds=float(f"{timing.seconds:.6g}"), spread=round(timing.spread, 4), num_runs=timing.num_runs,
        )  # fmt: skip


def _compiled_together(requests: Sequence[Request], most: int, most_bytes: float) -> Iterator[list[Request]]:
    """At most `most` of them, and one or what together moves no more than so many bytes: all their arguments are there at once."""
    together: list[Request] = []
    for r in requests:
        if together and (len(together) == most or sum(x.local.moved_bytes for x in [*together, r]) > most_bytes):
            yield together
            together = []
        together.append(r)
    if together:
        yield together


def in_stages(graph: OperatorGraph, topology: DeviceTopology, num: int) -> list[Request]:
    """What one device does of each of `num` micro-batches; as tasks of the whole step, split along the samples."""
    alone = part_of(topology, 0, 1)
    small = micro_batch(graph, num)
    problem = PlanningProblem.make(small, search_space(small, factor_mesh(alone)), alone)
    requests = requests_of(problem.simulator, [data_parallel_strategy(problem)[0]])
    found = []
    for r in requests:
        if small.tasks[r.task].parameter < 0:
            dims = graph.operators[graph.tasks[r.task].operator].dims
            r = r._replace(degrees=tuple(num if d.kind == "S" else 1 for d in dims))
        found.append(r)
    return found


def _rounds(graph, space, topology, profile: Callable[[], Profile], *, seed: int, search: bool) -> Iterator[list[Request]]:
    """What the baselines ask for; then what a search with the measurements so far does."""
    key = jax.random.key(seed)
    problem = PlanningProblem.make(graph, space, topology)
    strategies = [run(key, problem, Budget()).best.strategy for run in BASELINES.values()]
    yield requests_of(problem.simulator, strategies)
    # What looks good because it was only estimated is measured, and may look less good to the next search.
    for i in range(SEARCHES if search and topology.num_devices > 1 else 0):
        problem = PlanningProblem.make(graph, space, topology, profile())
        result = get_planner("mcmc")(jax.random.fold_in(key, i), problem, Budget(SEARCH_PROPOSALS))
        strategies = [e.strategy for e in result.candidates[:8]] or [result.best.strategy]
        yield requests_of(problem.simulator, strategies)


def _measured_links(topology: DeviceTopology, notes: list[str]) -> tuple:
    """Fits of the topology's levels, where the devices at hand are all of its devices."""
    devices, sizes = jax.devices(), [lv.size for lv in topology.levels]
    if jax.process_count() > 1:  # which time them as often as each sees fit: they would wait for each other
        notes.append("links not measured: the devices belong to several processes")
        return ()
    if topology.num_devices < 2 or len(devices) < 2:
        notes.append("links not measured: one device at hand")
        return ()
    if len(devices) != topology.num_devices:
        notes.append(f"links not measured: {len(devices)} devices at hand, {topology.num_devices} in {topology.name}")
        return ()
    if are_fake(devices):
        notes.append("links not measured: fake devices share cores")
        return ()
    return tuple(
        fitted_link(lv.name, time_collectives(sizes, i, devices)) for i, lv in enumerate(topology.levels) if lv.size > 1
    )


def scaled_prediction(simulator: Simulator, strategy: Strategy, compute_scale: float, network_scale: float) -> float:
    """The step time with all compute and all communication slowed; both scale the durations linearly."""
    costs = simulator.costs(strategy)
    d = costs.durations
    scaled = type(d)(
        np.asarray(d.compute_s) * compute_scale, *(np.asarray(x) * network_scale for x in (d.resolve_s, d.reshard_s, d.sum_s))
    )
    schedule = simulator.schedule
    return simulate(schedule, schedule.durations(scaled), occupied_by(schedule, costs)).makespan_s


def communicates(simulator: Simulator, strategy: Strategy) -> bool:
    return bool(np.asarray(simulator.costs(strategy).bytes_by_collective).sum() > 0)


def calibrated(base: Profile | None, device: Device, calibration: Calibration, command: str) -> Profile:
    """A profile with the scalars alone, to be read together with what it was fitted beside."""
    own = Profile(
        device=device, versions=installed_versions(), calibration=calibration, commands=(command,) if command else (),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
    return own if base is None else merged([base.model_copy(update={"calibration": None}), own])


def compute_figures(simulator: Simulator, strategy: Strategy) -> tuple[list[str], dict[str, float]]:
    """Where the compute seconds of a strategy come from: per operator the weakest source, and shares of all seconds."""
    tables = simulator.tables
    graph = tables.graph
    degrees, seconds = asked_degrees(simulator, strategy)
    at = np.zeros((len(degrees), tables.measured.degrees.shape[1]), np.float32)
    for k, found in enumerate(degrees):
        at[k, : len(found)] = np.log2(found)
    is_fitted = np.array([tables.rates.is_fitted(t.kind, t.dtype) for t in graph.tasks], bool)
    sources = figures_of(tables.measured, at, is_fitted)
    order = ("measured", "calibrated", "analytic")
    seconds = np.asarray(seconds, np.float64)  # thousands of tasks, whose shares must not add up to more than all
    total = max(float(seconds.sum()), 1e-30)
    shares = {s: float(sum(x for x, f in zip(seconds, sources, strict=True) if f == s)) / total for s in order}
    weakest = [max((sources[k] for k in op.tasks), key=order.index, default="analytic") for op in graph.operators]
    return weakest, {s: round(x, 4) for s, x in shares.items() if x > 0}
