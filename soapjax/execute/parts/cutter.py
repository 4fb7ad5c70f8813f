"""What is known of a step before it is cut into parts: phases of equations, and where they run."""

from __future__ import annotations

from collections.abc import Sequence

from soapjax.errors import Problem, SoapjaxError
from soapjax.execute.parts.cut import depends_on, keys_of, phase_of
from soapjax.graph.batch.unlike_sums import SCALES
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.build import Binding
from soapjax.graph.passes.phases import FORWARD
from soapjax.graph.trace.program import FlatEqn
from soapjax.graph.trace.tracing import TracedStep
from soapjax.graph.trace.values import IDENTITIES


def outermost_gradients(step: TracedStep, binding: Binding) -> list[int]:
    """The outermost value of every parameter's gradient.

    Raises: SoapjaxError where one has none.
    """
    at = {binding.values.of(o).root: o for e in reversed(step.program.eqns) for o in e.outputs}
    in_loops = {key for key in binding.phases.own_additions if binding.values.scope[key]}
    added_up = {p for p, chain in binding.sums.items() if not in_loops.isdisjoint(chain.additions)}
    if inside := [p.path for i, p in enumerate(binding.phases.parameters) if p.gradient not in at or i in added_up]:
        value = f"the gradient of {inside[0]!r} (and {len(inside) - 1} more) stays inside a loop of the step's own"
        expected = "gradients that one backward pass makes: micro-batches are added up by the pipeline"
        raise SoapjaxError(Problem("train step", value, expected, "leave the accumulation out, or plan without a pipeline"))
    return [at[p.gradient] for p in binding.phases.parameters]


class Cutter:
    """What is known of a step before it is cut: the phase of every equation, and where those of both passes run.

    Args:
      num: how many places (stages, sub-meshes) there are.
      batch_leaves: input leaves that differ from micro-batch to micro-batch.
      draws: equations whose random numbers do.
      after_all: equations that are evaluated on what all micro-batches make.
    """

    def __init__(
        self, step: TracedStep, graph: OperatorGraph, binding: Binding, num: int, batch_leaves: Sequence[int],
        draws: frozenset[str] = frozenset(), after_all: frozenset[str] = frozenset(),
    ):  # fmt: skip
        self.step, self.graph, self.binding, self.num = step, graph, binding, num
        self.program, self.values = step.program, binding.values
        self.phase = {e.key: phase_of(e, graph, binding) for e in self.program.eqns}
        of_batch = depends_on(self.program, {self.program.inputs[i] for i in batch_leaves})
        self.of_batch = {e.key for e in self.program.eqns if any(o in of_batch for o in e.outputs)}
        drawn = {o for e in self.program.eqns if not draws.isdisjoint(keys_of(e)) for o in e.outputs} if draws else ()
        of_draws = depends_on(self.program, drawn)
        differs = self.of_batch | {e.key for e in self.program.eqns if any(o in of_draws for o in e.outputs)}
        # Of the forward pass what is the same for all micro-batches; what the update may evaluate: also what is made of all.
        self.same = {k for k, p in self.phase.items() if p == FORWARD and k not in differs}
        self.once = self.same | {k for k, p in self.phase.items() if p == FORWARD and k in after_all}
        self.made_by = {o: e for e in self.program.eqns for o in e.outputs}
        self.stage: dict[str, int] = {}  # of every forward and backward equation
        self.value_stage: dict[int, int] = {}

    def source(self, value: int) -> int:
        """What it is, behind barriers and names, which run wherever their results are read."""
        eqn = self.made_by.get(value)
        while eqn is not None and eqn.name in IDENTITIES:
            of = eqn.inputs[eqn.outputs.index(value)]
            if not isinstance(of, int):
                break
            value, eqn = of, self.made_by.get(of)
        return value

    def set_free(self, value: int) -> bool:
        """Has every part that reads a value make it, and what it is made of: where that is the same for all micro-batches."""
        found: dict[str, FlatEqn] = {}
        queue = [value]
        while queue:
            eqn = self.made_by.get(queue.pop())
            if eqn is not None and eqn.key not in found and self.phase[eqn.key] is not None:
                if eqn.key not in self.same or eqn.body is not None:
                    return False
                found[eqn.key] = eqn
                queue += eqn.read
        for key, eqn in found.items():
            self.phase[key] = None
            self.stage.pop(key, None)
            for o in eqn.outputs:
                self.value_stage.pop(o, None)
        return True

    def keys(self, phase: int | None, stage: int | None = None) -> set[str]:
        return {k for k, p in self.phase.items() if p == phase and (stage is None or self.stage[k] == stage)}

    def gradient_values(self) -> list[int]:
        """The outermost value of every parameter's gradient."""
        return outermost_gradients(self.step, self.binding)

    def summands(self, value: int) -> list[int]:
        """A sum of gradients, taken apart as long as its terms come from several stages."""
        eqn = self.made_by.get(value)
        is_sum = eqn is not None and eqn.name in ("add_any", "add") and SCALES not in eqn.params
        operands = eqn.read if eqn is not None and is_sum else ()
        if eqn is not None and operands and len(operands) == len(eqn.inputs):
            terms = [t for a in operands for t in self.summands(a)]
            if len({self.value_stage.get(t) for t in terms}) > 1 and all(t in self.value_stage for t in terms):
                return terms
        return [value]

    def between_stages(self) -> set[str]:
        """The additions of gradients' terms from several stages: the update adds them up, once per step."""
        found: set[str] = set()
        waiting = [v for v in self.gradient_values() if self.summands(v) != [v]]
        while waiting:
            v = waiting.pop()
            if self.summands(v) != [v]:
                found.add(self.made_by[v].key)
                waiting += self.made_by[v].read
        return found
