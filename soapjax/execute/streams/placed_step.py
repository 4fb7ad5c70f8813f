"""The placement executor: operators pinned to parts of the devices run there, as programs of their own.

Maximal runs of operators (in the plan's order) on one sub-mesh are one jitted program each, sharded inside as the plan
says. One driver dispatches them in order and moves tensors between sub-meshes; programs that need nothing of each other,
on disjoint devices, run at the same time. A parameter is updated where its owner runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.parts.cut import Part, make_part, read_at, tasks_of, with_outputs
from soapjax.execute.parts.cutter import Cutter
from soapjax.execute.parts.part_program import Place, jit_part
from soapjax.execute.parts.update_cut import Updates, cut_updates
from soapjax.execute.spmd.planned_evaluator import BoundStep
from soapjax.execute.streams.stream import Stream, StreamBuilder, Streamed
from soapjax.execute.transfers.arrivals import place_all
from soapjax.graph.passes.phases import UPDATE
from soapjax.strategy.plan import MeshPlan

Pins = tuple[int | None, ...]  # per mesh axis the coordinate, None where the operator uses all of it


def pins_of(plan: MeshPlan, operator: str) -> Pins:
    axes = plan.operators[operator].axes
    return tuple(int(axes[a][4:-1]) if axes[a].startswith("pin(") else None for a in plan.mesh.axis_names)


def sub_mesh(mesh: Mesh, pins: Pins) -> Mesh:
    """The devices at the pinned coordinates, as a mesh of the other axes (of one axis where all are pinned)."""
    devices = mesh.devices[tuple(slice(None) if p is None else p for p in pins)]
    names = tuple(n for n, p in zip(mesh.axis_names, pins, strict=True) if p is None)
    return Mesh(devices if names else np.array([devices]), names or ("all",))


class PlacedStep(Streamed):
    """A step under a plan with pins, ready to run.

    Args:
      program: the step and the plan, on the mesh of all devices.
      donate: reuse the memory of parameters and optimizer state for their new values.
    Raises: SoapjaxError where the operators of one loop are on different devices.
    """

    def __init__(self, program: BoundStep, *, donate: bool = True, is_float64: bool = False):
        self.program, self.step, self.donate = program, program.step, donate
        graph = program.graph
        found = [pins_of(program.plan, op.name) for op in graph.operators]
        self._keys = list(dict.fromkeys(found))
        self._place_of = [self._keys.index(p) for p in found]
        bound = (dataclasses.replace(program, mesh=sub_mesh(program.mesh, pins)) for pins in self._keys)
        self.places = [Place(b, is_float64=is_float64) for b in bound]
        self.parts, self.updates = self._cut()
        self.in_shardings = [self.places[self.updates.home[v]].sharding(v) for v in self.step.program.inputs]
        self._stream = functools.cache(self._emit)  # with and without gradients

    # Cutting.

    def _cut(self) -> tuple[list[Part], Updates]:
        program, graph, binding = self.step.program, self.program.graph, self.program.binding
        if binding.phases.is_single_phase:
            value, expected = "updates between two gradients", "a step with one update, at its end"
            raise SoapjaxError(Problem("plan: operators", value, expected, 'plan in the space "soap": without pins'))
        c = Cutter(self.step, graph, binding, len(self.places), range(len(self.step.in_paths)))
        order = self._ordered(c)
        free = c.keys(None)
        parts: list[Part] = []
        run: list[str] = []
        for k, keys in enumerate(order):
            run += keys
            place = c.stage[keys[0]]
            if k + 1 == len(order) or c.stage[order[k + 1][0]] != place:
                parts.append(make_part(f"program {len(parts)}", place, program, run, free))
                run = []
        owners = {p.leaf: self._place_of[p.owner] for p in self.program.graph.parameters}
        updates = cut_updates(c, parts, owners)
        also = {v for p in updates.updates for v in p.inputs} | {v for _, v in updates.gradients}
        return with_outputs(parts, also), updates

    def _ordered(self, c: Cutter) -> list[list[str]]:
        """Keys of equations, task by task in plan order (a loop counts as its last task), each after what it reads."""
        graph, binding = c.graph, c.binding
        node: dict[str, int] = {}
        problems = []
        for eqn in c.program.eqns:
            if c.phase[eqn.key] in (None, UPDATE):
                continue
            tasks = tasks_of(eqn, graph, binding)
            places = {self._place_of[graph.tasks[k].operator] for k in tasks}
            if len(places) > 1:
                names = sorted({graph.operators[graph.tasks[k].operator].name for k in tasks})
                value = f"{', '.join(names[:3])}, ... of one loop on different devices"
                remedy = "pin them alike, or plan with unroll=True (--unroll)"
                problems.append(Problem("plan: operators", value, "the operators of a loop on the same devices", remedy))
            node[eqn.key] = max(tasks)
            c.stage[eqn.key] = min(places)
            c.value_stage.update(dict.fromkeys(eqn.outputs, min(places)))
        if problems:
            raise SoapjaxError(problems[:5])
        members: dict[int, list[str]] = {}
        needs: dict[int, set[int]] = {}
        reach: dict[int, set[int]] = {}  # value -> the nodes that it is computed from directly, through free equations
        for eqn in c.program.eqns:
            read = set().union(*(reach.get(a, set()) for a in eqn.read))
            k = node.get(eqn.key)
            if k is not None:
                members.setdefault(k, []).append(eqn.key)
                needs.setdefault(k, set()).update(read - {k})
                read = {k}
            reach.update(dict.fromkeys(eqn.outputs, read))
        return [members[k] for k in _topological(needs)]

    # Running.

    @property
    def all_places(self) -> list[Place]:
        return self.places

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Arguments on the devices that hold them."""
        return place_all(leaves, self.in_shardings)

    arguments = place

    def outputs(self, results: list[Any], leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        found, program = iter(results), self.step.program
        outputs = [
            next(found) if isinstance(out, int) else jnp.asarray(out.val, program.aval(out).dtype) for out in program.outputs
        ]
        return outputs, list(found)

    def argument_structs(self) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in zip(self.step.in_avals, self.in_shardings, strict=True)
        ]

    @functools.cached_property
    def _replaced(self) -> dict[int, int]:
        """Parameters and optimizer state -> the value that replaces each."""
        leaves = self.program.graph.stored_leaves
        inputs, outputs = self.step.program.inputs, self.step.program.outputs
        return {inputs[k]: new for k, o in self.step.state_pairs.items() if k in leaves and isinstance(new := outputs[o], int)}

    def dispatches(self, *, with_gradients: bool = False) -> Stream:
        return self._stream(with_gradients)

    def _emit(self, with_gradients: bool) -> Stream:
        program, updates, out = self.step.program, self.updates, StreamBuilder()
        late = [p for p in updates.updates if p.outputs]
        readers = read_at((*self.parts, *late))
        wanted = [(v, at) for at, v in (r for r in updates.results if r is not None)]
        wanted += [(v, at) for at, v in updates.gradients] if with_gradients else []
        for v, at in wanted:
            readers.setdefault(v, []).append(at)
        given = [(v, updates.home[v]) for v in program.inputs]
        for name in given:
            out.slot(name)

        results = {out for out in program.outputs if isinstance(out, int)}

        def shardings_of(place: int, v: int) -> Any:
            special = self._result_sharding(v, place) if v in results and v not in program.inputs else None
            return special or self.places[place].sharding(v)

        def send(values: Sequence[int], source: int) -> None:
            targets: dict[int, list[int]] = {}
            for v in values:
                for t in dict.fromkeys(readers.get(v, ())):
                    if (v, t) not in out:
                        targets.setdefault(t, []).append(v)
            for t, moved in sorted(targets.items()):
                lie, wanted = ([shardings_of(p, v) for v in moved] for p in (source, t))
                ins, outs = ([(v, p) for v in moved] for p in (source, t))
                out.move(f"send {source} to {t}", f"link {source} to {t}", ins, lie, wanted, outs)

        for s in range(len(self.places)):
            send([v for v, at in given if at == s], s)
        has_one_round = not any(updates.rounds[1:])
        for part in (*self.parts, *late):
            place = self.places[part.place]
            shardings = {v: shardings_of(part.place, v) for v in part.outputs if v in results}
            last = part in late and has_one_round and self.donate
            taken = [v for v in part.inputs if last and self._replaced.get(v) in part.outputs]
            donated = [v for v in taken if (v, part.place) not in out.lent]
            fn = jit_part(place, part, out_shardings=shardings, donated=donated)
            ins, outs = ([(v, part.place) for v in values] for values in (part.inputs, part.outputs))
            takes = [(v, part.place) for v in donated]
            devices = ",".join(str(d.id) for d in place.mesh.devices.flat)
            out.call(part.name, f"devices {devices}", fn, ins, outs, takes, part=(place, part))
            send(part.outputs, part.place)
        return out.build(given, wanted)

    def _result_sharding(self, v: int, place: int) -> Any:
        inverse = {o: i for i, o in self.step.state_pairs.items()}
        inputs = self.step.program.inputs
        leaf = next((inverse[k] for k, o in enumerate(self.step.program.outputs) if o is v or o == v if k in inverse), None)
        return None if leaf is None else self.places[place].sharding(inputs[leaf])


def _topological(needs: dict[int, set[int]]) -> list[int]:
    """Nodes in ascending order, each after what it needs."""
    placed: list[int] = []
    done: set[int] = set()

    def visit(first: int) -> None:
        stack = [(first, iter(sorted(needs[first])))]
        done.add(first)
        while stack:
            k, rest = stack[-1]
            nxt = next((j for j in rest if j not in done), None)
            if nxt is None:
                stack.pop()
                placed.append(k)
            else:
                done.add(nxt)
                stack.append((nxt, iter(sorted(needs[nxt]))))

    for k in sorted(needs):
        if k not in done:
            visit(k)
    return placed
