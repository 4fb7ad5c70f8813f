"""The SPMD executor: one `jax.jit` program over the whole mesh that does what the plan says.

Every tensor is constrained as used by the task that reads it, and as kept by the task
that makes it; primitives with a way of their own run on their local blocks (on_blocks.py). A tensor wanted
twice in one layout is resharded once; a parameter that the plan regathers goes
through a barrier first, or XLA would merge the gathers of both passes, or gather all parameters at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.spmd import gather, heavy, scatter  # noqa: F401 - they say how their primitives run
from soapjax.execute.spmd.evaluator import Env, ProgramEvaluator, task_mark
from soapjax.execute.spmd.gradient_sums import GradientSums
from soapjax.execute.spmd.on_blocks import OnBlocks, contracted_axes, is_executed, partition_spec, run_on_blocks
from soapjax.execute.spmd.partial import Partial
from soapjax.execute.spmd.plan_layouts import PlanLayouts
from soapjax.execute.spmd.reduce import REDUCTIONS
from soapjax.execute.spmd.rows import BY_ROW, run_by_row
from soapjax.execute.spmd.summed_jointly import JointSums
from soapjax.graph.operators import Accumulation, OperatorGraph, Task
from soapjax.graph.passes.build import Binding, build_graph
from soapjax.graph.passes.phases import FORWARD, PHASE_NAMES
from soapjax.graph.readers import left_parameters, served_by_loop
from soapjax.graph.recompute import recomputing
from soapjax.graph.trace.program import Atom, FlatEqn
from soapjax.graph.trace.tracing import TracedStep
from soapjax.strategy.configs import StorageName
from soapjax.strategy.layout import Spec
from soapjax.strategy.plan import MeshPlan, Plan, TaskPart, parse_spec


@dataclasses.dataclass(frozen=True, eq=False)
class BoundStep:
    """A step and a plan that belong together, ready to be traced by `jax.jit`."""

    step: TracedStep
    plan: MeshPlan
    graph: OperatorGraph
    binding: Binding
    mesh: Mesh

    @functools.cached_property
    def _by_key(self) -> dict[str, FlatEqn]:
        return {e.key: e for e, _ in self.step.program.walk()}

    def eqn(self, key: str) -> FlatEqn:
        """The equation with a key (its address as text)."""
        return self._by_key[key]

    @functools.cached_property
    def orders(self) -> dict[int, tuple[int, ...]]:
        """The permutation of the values that are read by one transposition and nothing else."""
        readers: dict[int, list[FlatEqn]] = {}
        for e in self._by_key.values():
            for a in e.inputs:
                if isinstance(a, int):
                    readers.setdefault(a, []).append(e)
        return {a: tuple(e.params["permutation"]) for a, (e, *more) in readers.items() if e.name == "transpose" and not more}

    def sharding(self, spec: Spec) -> NamedSharding:
        return NamedSharding(self.mesh, partition_spec(spec))

    def in_shardings(self) -> list[NamedSharding]:
        return [self.sharding(parse_spec(self.plan.arguments[p])) for p in self.step.in_paths]

    def out_shardings(self) -> list[NamedSharding]:
        return [self.sharding(parse_spec(self.plan.results[p])) for p in self.step.out_paths]

    def task_parts(self) -> Iterator[tuple[Task, TaskPart]]:
        """Every task with the plan's specs of it; an update follows its parameter's storage and has none."""
        counters: dict[int, int] = {}
        for task in self.graph.tasks:
            if task.parameter >= 0:
                yield task._replace(reads=(), writes=()), TaskPart(phase=PHASE_NAMES[task.phase])
                continue
            k = counters[task.operator] = counters.get(task.operator, -1) + 1
            yield task, self.plan.operators[self.graph.operators[task.operator].name].tasks[k]

    def evaluator(self, *, is_float64: bool = False, sums: Sequence[Accumulation] | None = None) -> ProgramEvaluator:
        """`sums`: of the graph's gradients of parameters with several uses those that are summed once; all of them is evaluated."""
        if self.mesh.size == 1:
            return ProgramEvaluator(self.step.program, is_float64=is_float64)
        return PlannedEvaluator(self, is_float64=is_float64, sums=sums)


def mesh_of(plan: Plan, devices: Sequence[Any] | None = None) -> Mesh:
    """The plan's mesh over `devices` (all local and remote ones by default), axis types Auto.

    Raises: SoapjaxError where there are fewer devices than planned.
    """
    devices = list(jax.devices()) if devices is None else list(devices)
    if len(devices) < plan.num_devices:
        raise SoapjaxError(
            Problem(
                "devices", f"{len(devices)} {devices[0].platform} devices", f"the {plan.num_devices} that the plan is for",
                f"plan for {len(devices)} devices, or start JAX with more "
                f"(on one CPU: XLA_FLAGS=--xla_force_host_platform_device_count={plan.num_devices})",
            )
        )  # fmt: skip
    ordered = [devices[i] for i in plan.mesh.device_order]
    return Mesh(np.array(ordered).reshape(plan.mesh.axis_sizes), plan.mesh.axis_names)


def not_executable(plan: Plan, *, place: str = "plan") -> list[Problem]:
    """What keeps a plan from being run: a loop whose operators are on different devices. Pipelines are bound elsewhere."""
    if plan.executable:
        return []
    value = f"{len(plan.pinned)} operators pinned to some devices ({', '.join(plan.pinned[:3])}, ...)" if plan.pinned else "false"
    remedy = 'pin them alike, plan with unroll, or in the space "soap" (the default)'
    return [Problem(f"{place}: executable", value, "one update, and the operators of each loop on the same devices", remedy)]


def bind_plan(step: TracedStep, plan: Plan, *, devices: Sequence[Any] | None = None) -> BoundStep:
    """Puts a traced step and a plan together.

    Raises: SoapjaxError where the plan is for another step, or cannot be executed here.
    """
    step = recomputing(step, plan.recomputed)
    graph, binding = build_graph(step)
    problems = []
    if graph.fingerprint() != plan.graph.fingerprint:
        problems.append(
            Problem(
                "plan: graph.fingerprint", plan.graph.fingerprint[:12],
                f"{graph.fingerprint()[:12]}, this step's ({graph.num_operators} operators; the plan's {plan.graph.num_operators})",
                "use the plan with the model and sizes it was made for, or plan anew",
            )
        )  # fmt: skip
    problems += not_executable(plan)
    if plan.pipeline is not None:
        expected, remedy = "a plan of one program, or of pinned operators", "run it by soap_shard(plan=...) or soapjax run"
        problems.append(Problem("plan: pipeline", f"{len(plan.pipeline.stages)} stages", expected, remedy))
    if problems:
        raise SoapjaxError(problems)
    return BoundStep(step, plan, graph, binding, mesh_of(plan, devices))


def begun_within(inputs: list[Any], sizes: Sequence[int]) -> list[Any]:
    """Operands of a dynamic slice that begins where all of it is in bounds, as the primitive is defined.

    Of a slice whose result is split the partitioner makes one slice by each device's own place, which is out of bounds later than
    the whole is (jaxlib 0.10.2).
    """
    x, *begin = inputs
    return [x, *(jnp.clip(b, 0, n - size) for b, n, size in zip(begin, x.shape, sizes, strict=True))]


class PlannedEvaluator(ProgramEvaluator):
    """Evaluates a program under a plan's constraints."""

    def __init__(self, program: BoundStep, *, is_float64: bool = False, sums: Sequence[Accumulation] | None = None):
        super().__init__(program.step.program, is_float64=is_float64)
        self.bound, self.graph, self.binding = program, program.graph, program.binding
        self.values = program.binding.values
        # Summed up where they are made instead, and laid out as they are made.
        every = self.graph.accumulations
        sums = every if sums is None else sums
        at_once = {t for a in every if a not in sums for t in (*a.summands, *a.running)}
        self.layouts = PlanLayouts(
            program.plan, program.step.program, self.graph, self.binding, program.mesh, program.task_parts(), unplaced=at_once
        )
        self.sums = GradientSums(self.layouts, self.bind, self.read, sums)
        self.joint = JointSums(self.layouts, self.bind, self.operand)
        self._made = [{o for key in task.equations.keys for o in program.eqn(key).outputs} for task in self.graph.tasks]
        self._parameters = {p.tensor for p in self.graph.parameters}
        storage = {
            p.tensor: StorageName.parse(program.plan.operators[self.graph.operators[p.owner].name].storage)
            for p in self.graph.parameters
        }
        self._regathered = {t for t, how in storage.items() if how.again}
        read_later = {a.tensor for task in self.graph.tasks if task.phase != FORWARD for a in task.reads}
        frozen = {p.tensor for p in self.graph.parameters if p.is_frozen} - read_later
        self._gathered_late = self._regathered | {t for t in frozen if storage[t].axes}
        # Of what the backward pass gathers from a part that the forward pass leaves it: how that is laid out.
        may_leave = (self.graph.parameters[p].tensor for p in left_parameters(self.graph))
        self._left = {t: self.layouts.left(t, storage[t].again) for t in may_leave if storage[t].again not in ((), storage[t].axes)}
        self._served_by_loop = served_by_loop(self.graph)
        self._by_loop: dict[str, dict[tuple, Any]] = {}  # reshards of a loop's constants, made before it

    def scope_name(self, eqn: FlatEqn) -> str:
        k = self.binding.task_of.get(eqn.key)
        return super().scope_name(eqn) if k is None else f"{super().scope_name(eqn)}/{task_mark(k)}"

    def equation(self, eqn: FlatEqn, env: Env) -> list[Any]:
        if self.sums.is_on_way(eqn, env):
            return self.sums.run(eqn, env)
        if self.joint.is_on_way(eqn, env):
            k = self.binding.task_of[eqn.key]
            return [self.as_kept(k, o, x) for o, x in zip(eqn.outputs, self.joint.run(eqn, env), strict=True)]
        k = self.binding.task_of.get(eqn.key)
        inputs = [self.read(a, env) for a in eqn.inputs]
        if k is None:
            return self.bind(eqn, inputs, eqn.params)
        task = self.graph.tasks[k]
        if task.parameter >= 0:
            read = [self.as_updated(task.parameter, a, x, env) for a, x in zip(eqn.inputs, inputs, strict=True)]
            return self.bind(eqn, read, eqn.params)
        is_heavy = eqn.key == task.equations.heavy
        if is_heavy:
            self._note_read(eqn, env)
        inputs = [self.operand(k, a, j if is_heavy else -1, env) for j, a in enumerate(eqn.inputs)]
        if is_executed(eqn) and (is_heavy or eqn.name in REDUCTIONS):
            results = [self.on_blocks(k, eqn, inputs)]
        elif is_heavy and eqn.name in BY_ROW:
            results = run_by_row(k, eqn, inputs, self.layouts, self.bind)
        else:
            inputs = begun_within(inputs, eqn.params["slice_sizes"]) if eqn.name == "dynamic_slice" else inputs
            results = self.bind(eqn, inputs, eqn.params)
        return [self.as_kept(k, o, x) for o, x in zip(eqn.outputs, results, strict=True)]

    def on_blocks(self, k: int, eqn: FlatEqn, inputs: list[Any]) -> Any:
        """The result of an equation of task `k` as planned, in its home layout or as partial sums that stay apart."""
        layouts, dims = self.layouts, self.binding.dims_of[eqn.key]
        *in_specs, raw = (layouts.spec_from(self.graph.tasks[k].operator, d) for d in (*dims.operands, dims.results[0]))
        partial = contracted_axes(in_specs, raw)
        kept = self.kept(eqn, partial)
        home = raw if kept else layouts.resolved(k, eqn, raw, dims.results[0], partial)
        order, bind = self.bound.orders.get(eqn.outputs[0]), functools.partial(self.bind, eqn)
        result = run_on_blocks(eqn, inputs, OnBlocks(
            mesh=self.bound.mesh, in_specs=in_specs, raw_spec=raw, home_spec=home, bind=bind, kept=kept, order=order,
        ))  # fmt: skip
        return self.sums.made(result, kept, home)

    def operand(self, k: int, atom: Atom, position: int, env: Env) -> Any:
        """What an equation of task `k` reads: its own task's values as they are, others as the task uses them."""
        if isinstance(atom, int) and self.values.of(atom).root not in self._made[k]:
            return self.as_used(k, atom, position, env)
        return self.read(atom, env)

    def kept(self, eqn: FlatEqn, partial: set[str]) -> tuple[str, ...]:
        """Over which of the axes in `partial` a product stays apart: it is a summand of a gradient, or of a joint sum."""
        if self.joint.is_product(eqn):
            return tuple(n for n in self.bound.mesh.axis_names if n in partial)
        return self.sums.kept(eqn, partial)

    def as_updated(self, parameter: int, atom: Any, x: Any, env: Env) -> Any:
        """What a parameter's update reads: its gradient in the layout of the parameter."""
        p = self.graph.parameters[parameter]
        alias = self.values.tensor(atom) if isinstance(atom, int) else None
        if alias is None or self.binding.tensor_of.get(alias.root) != p.gradient:
            return x
        layouts = self.layouts
        stored = layouts.home[p.tensor]
        missing = len(stored) - len(self.graph.tensors[p.gradient].shape)
        cache = env.setdefault("resharded", {})
        key = (atom, "update")
        if key not in cache:
            kept = layouts.shifted(atom, layouts.home[p.gradient])
            cache[key] = layouts.resharded(atom, x, kept, layouts.shifted(atom, stored[missing:]))
        return cache[key]

    def as_used(self, k: int, atom: int, operand: int, env: Env) -> Any:
        """A value in the layout in which task `k` reads it, and cast if it casts it first; equal reshards are made once."""
        alias = self.values.tensor(atom)
        tensor = self.binding.tensor_of.get(alias.root)
        layouts = self.layouts
        used = layouts.used[k]
        spec = used.get((tensor, operand))
        if spec is None:  # read under another operand's name in the same layout
            spec = next((s for (t, _), s in used.items() if t == tensor), None)
        if spec is None:
            return env[atom]
        task = self.graph.tasks[k]
        is_served = alias.shift == 0 and (k, tensor) in self._served_by_loop
        again = tensor in self._regathered and task.phase != FORWARD and not is_served
        if tensor in self._parameters and alias.shift == 0 and alias.root in env:
            atom = alias.root  # one copy serves both sides of a barrier of rematerialisation, which holds back activations
        cast = None if self.is_float64 else dict(task.casts).get(tensor)
        key = (atom, spec, again, cast)
        cache = env.setdefault("resharded", {})
        if key not in cache:
            value, left = env[atom], self._left.get(tensor)
            home = layouts.home.get(tensor)
            source = layouts.shifted(atom, home) if home is not None else None
            if again and (atom, "left") in cache:
                value, source, cast = cache[atom, "left"], left, None
            if tensor in self._gathered_late:
                value = self._not_before(value, env, again)
            if cast is not None:  # where it is kept: what is sent is narrower
                value = jax.lax.convert_element_type(value, cast)
            cache[key] = layouts.resharded(atom, value, source, layouts.shifted(atom, spec))
            if left not in (None, home) and not again and (atom, "left") not in cache:
                part = layouts.resharded(atom, cache[key], spec, left)  # a slice, cut before the whole is used: it may go then
                cache[key], cache[atom, "left"] = jax.lax.optimization_barrier((cache[key], part))
        return cache[key]

    def _note_read(self, eqn: FlatEqn, env: Env) -> None:
        """Keeps what this heavy equation and the one before it read beside parameters: activations, gradients.

        Not what is made of constants alone, as the zeros that a gradient is scattered into: where something waits for them XLA may
        make them whole.
        """
        roots = {a: self.values.of(a).root for a in eqn.read if isinstance(env.get(a), jax.Array)}
        of_tensor, generated = self.binding.tensor_of, self.binding.generated
        read = [a for a, root in roots.items() if of_tensor.get(root) not in self._parameters and root not in generated]
        last, _ = env.get("read", (None, None))
        if read and read[0] != last:
            env["read"] = read[0], last

    def _not_before(self, value: Any, env: Env, again: bool) -> Any:
        """A stored parameter, to be gathered one heavy equation ahead and no earlier.

        A scheduler that hides latency would gather all parameters as the step begins, and hold them. Beside that, XLA would
        take one gather for both passes.
        """
        _, before = env.get("read", (None, None))
        if isinstance(ready := env.get(before), jax.Array):
            return jax.lax.optimization_barrier((value, ready))[0]
        return jax.lax.optimization_barrier(value) if again else value

    def leave(self, env: Env, values: Iterable[int]) -> None:
        env.update({v: self.joint.leave(v, env[v]) for v in values if v in env})  # the caller adds some

    def as_kept(self, k: int, out: int, x: Any) -> Any:
        if x is None:  # a sum on the way, which nobody else reads
            return None
        if isinstance(x, Partial) or self.sums.is_summand(out):
            return self.sums.summand(out, x)
        spec = self.layouts.kept[k].get(self.binding.tensor_of.get(out, -1))
        return x if spec is None else self.layouts.constrain(x, spec)

    def loop(self, eqn: FlatEqn, env: Env) -> list[Any]:
        return [self.sums.after_loop(eqn, o, x) for o, x in zip(eqn.outputs, super().loop(eqn, env), strict=True)]

    def enter_loop(self, eqn: FlatEqn, carry: list[Any], consts: Env) -> list[Any]:
        ids = eqn.body.inputs[eqn.params["num_consts"] :]
        carry = [self.sums.start(i, c) for i, c in zip(ids, super().enter_loop(eqn, carry, consts), strict=False)]
        outside: dict[Any, Any] = dict(consts)
        for inner in eqn.body.eqns:
            k = self.binding.task_of.get(inner.key)
            if k is not None and inner.body is None and not self.sums.is_on_way(inner, outside):
                for j, a in enumerate(inner.inputs):
                    if isinstance(a, int) and a in consts:
                        self.as_used(k, a, j if inner.key == self.graph.tasks[k].equations.heavy else -1, outside)
        self._by_loop[eqn.key] = outside.get("resharded", {})
        return [self._as_carried(i, c) for i, c in zip(ids, carry, strict=False)]

    def enter_body(self, eqn: FlatEqn, env: Env) -> None:
        env["resharded"] = dict(self._by_loop[eqn.key])
        first = eqn.params["num_consts"]
        for i in eqn.body.inputs[first : first + eqn.params["num_carry"]]:
            env[i] = self._as_carried(i, env[i])

    def _as_carried(self, argument: int, x: Any) -> Any:
        if isinstance(x, Partial):
            return self.sums.start(argument, x)
        alias = self.values.tensor(argument)
        spec = self.layouts.home.get(self.binding.tensor_of.get(alias.root, -1)) if alias is not None else None
        return x if spec is None else self.layouts.constrain(x, self.layouts.shifted(argument, spec))
