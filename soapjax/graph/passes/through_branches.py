"""Which operands of a `cond` or `while` one of its results is computed from.

An update that is made only where all gradients are finite, or in every second step, is one `cond` of all parameters: the new value
of each is among its results, and the gradients of all are among its operands. Which gradient is whose is told by what is inside.

    new_a, new_b = cond(is_finite, lambda: (a - da, b - db), lambda: (a, b));  new_b is computed from b and db
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from soapjax.graph.trace.flattening import flatten
from soapjax.graph.trace.program import FlatEqn, Program

Shape = tuple[int, ...]


class ThroughBranches:
    """Follows results of equations to their operands; of a `cond` or `while` along values inside whose shapes are alike."""

    def __init__(self) -> None:
        self._flat: dict[int, tuple[Any, Program, dict[int, FlatEqn]]] = {}  # by the identity of a closed jaxpr, which it holds

    def operands(self, eqn: FlatEqn, out: int, is_alike: Callable[[Shape], bool]) -> list[int]:
        """The operands that are values, the nearest first."""
        k = eqn.outputs.index(out)
        if eqn.name == "optimization_barrier":
            found = [k]
        elif eqn.name == "cond":
            found = [1 + i for branch in eqn.params["branches"] for i in self._inputs(branch, k, is_alike)]
        elif eqn.name == "while":
            found = list(self._of_loop(eqn, k, is_alike))
        else:
            return list(dict.fromkeys(eqn.read))
        return list(dict.fromkeys(a for i in found if isinstance(a := eqn.inputs[i], int)))

    def flat(self, closed: Any) -> tuple[Program, dict[int, FlatEqn]]:
        """A branch as a program, and what makes its values."""
        if id(closed) not in self._flat:
            program = flatten(closed)
            self._flat[id(closed)] = closed, program, {o: e for e in program.eqns for o in e.outputs}
        _, program, makers = self._flat[id(closed)]
        return program, makers

    def _of_loop(self, eqn: FlatEqn, k: int, is_alike: Callable[[Shape], bool]) -> Iterator[int]:
        """Positions of a `while`'s operands that its result `k` is computed from, by any number of trips."""
        num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carries = [k]
        for r in carries:  # grows
            yield num_cond + num_body + r
            for i in self._inputs(eqn.params["body_jaxpr"], r, is_alike):
                if i < num_body:
                    yield num_cond + i
                elif i - num_body not in carries:
                    carries.append(i - num_body)

    def _inputs(self, closed: Any, k: int, is_alike: Callable[[Shape], bool]) -> list[int]:
        """Positions of the inputs that output `k` of a jaxpr is computed from."""
        program, makers = self.flat(closed)
        queue = [v] if isinstance(v := program.outputs[k], int) else []
        for v in queue:  # grows
            read = self.operands(makers[v], v, is_alike) if v in makers else ()
            queue += [a for a in read if a not in queue and is_alike(tuple(program.avals[a].shape))]
        return [program.inputs.index(v) for v in queue if v in program.inputs]
