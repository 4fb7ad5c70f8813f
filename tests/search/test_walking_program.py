"""The compiled walking program copies no array of its state, over all lanes, in any loop: such copies cost more than the walk."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import case

from soapjax.jit.kernel import in_kernel, put, row
from soapjax.search.chain.block_steps import LANES
from soapjax.search.chain.engine import Engine
from soapjax.search.chain.neighbourhood import scratch_of
from soapjax.search.problem import PlanningProblem

COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|branch_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)")
COPY = re.compile(r"(?:ROOT )?%?[\w.\-]+ = (\w+)\[([\d,]*)\]\S* copy(?:-start)?\(")


def copies_in_loops(hlo):
    """(dtype, number of elements) of every copy in the body of a while loop, or in what a body calls, of an optimised program."""
    computations, lines = {}, []
    for line in hlo.splitlines():
        if found := None if line.startswith(" ") else COMPUTATION.match(line):
            lines = computations.setdefault(found[1], [])
        elif line.startswith("  "):
            lines.append(line.strip())
    called = {
        name: {c.strip(" %") for line in lines for group in CALLED.findall(line) for c in group.split(",")}
        for name, lines in computations.items()
    }  # fmt: skip
    left, inside = re.findall(r"body=%?([\w.\-]+)", hlo), set()
    while left:
        name = left.pop()
        left += called.get(name, set()) - inside - {name}
        inside.add(name)
    found = [COPY.match(line) for name in inside for line in computations.get(name, ())]
    return [(m[1], int(np.prod([int(n) for n in m[2].split(",") if n]))) for m in found if m]


def name_of(dtype):
    """As HLO has it."""
    return {"bool": "pred"}.get(str(dtype), f"{'f' if dtype.kind == 'f' else 's'}{8 * dtype.itemsize}")


@functools.cache
def engine():
    c = case("mlp", "a100x8")
    made = Engine(PlanningProblem(c.graph, c.space, c.simulator))
    made.prepare()
    return made


def test_the_walk_copies_no_state_over_all_lanes():
    state = jax.eval_shape(lambda tables: scratch_of(tables, engine().sizes, LANES), engine().tables)
    wide = {(name_of(x.dtype), x.size) for x in jax.tree.leaves(state) if x.ndim > 1 and x.shape[-1] == LANES}
    assert len(wide) > 5
    copies = copies_in_loops(engine().programs.walk._compiled.as_text())
    assert copies and not [c for c in copies if c in wide]


@pytest.mark.parametrize("reads_first, is_copied", [(True, True), (False, False)])
def test_copies_are_seen(reads_first, is_copied):
    """Of an array that a loop reads at one place and then writes at another XLA makes a copy per turn."""

    def run(x, places):
        def turn(i, x):
            if reads_first:
                return put(put(x, row(places, i), row(x, i)), i, row(x, row(places, i)))
            return put(x, row(places, i), jnp.ones(LANES))

        return jax.lax.fori_loop(0, len(places), turn, x)

    x, places = jnp.zeros((500, LANES)), jnp.arange(100)[::-1]
    hlo = jax.jit(lambda x, places: jax.lax.fori_loop(0, 3, lambda _, x: in_kernel(run, x, places), x)).lower(x, places).compile()
    assert (("f32", x.size) in copies_in_loops(hlo.as_text())) == is_copied
