"""What a plan recomputes: the same operators, the same numbers, and a backward pass that reads repetitions behind a barrier."""

import functools
import importlib
import itertools

import jax
import numpy as np
import pytest
from planned import leaf_errors, plain_leaves

from soapjax.errors import SoapjaxError
from soapjax.execute.spmd.evaluator import ProgramEvaluator
from soapjax.graph.passes.build import build_graph
from soapjax.graph.passes.phases import BACKWARD, FORWARD, RECOMPUTED
from soapjax.graph.recompute import Recomputation, recomputing
from soapjax.graph.segments import Value, _places, cuts
from soapjax.graph.trace.tracing import trace

QUICK = {"xla_backend_optimization_level": 0}
MODELS = {
    "llama": ("llama", dict(batch=4, seq=8, width=16, layers=3, heads=2, vocab=32)),
    "dropout": ("transformer_lm", dict(batch=4, seq=8, width=16, layers=2, heads=2, vocab=32, dropout=0.1)),
    "convolutions": ("resnet", dict(batch=4, image=32, width=4, classes=4, depth="tiny")),
    "square": ("bert", {}),
    "nnx": ("transformer_nnx", dict(batch=4, seq=8, width=16, layers=2, heads=2, vocab=32)),
    "steps": ("rnnlm", dict(batch=4, seq=3, hidden=8, layers=1, vocab=32)),
    "own marks": ("transformer_lm", dict(batch=4, seq=8, width=16, layers=2, heads=2, vocab=32, remat=True)),
    "loop": ("transformer_lm", dict(batch=4, seq=8, width=16, layers=2, heads=2, vocab=32, scan=True)),
}


def made(model, **changes):
    module, sizes = MODELS[model]
    return importlib.import_module(f"models.{module}").make(**sizes, **changes)


@functools.cache
def options_of(model, **changes):
    """Nothing is allocated."""
    steps = []
    arguments = jax.eval_shape(lambda: steps.append(made(model, **changes)) or steps[0][1:])
    return Recomputation(trace(steps[0][0], *arguments))


@functools.cache
def step_with(options, names):
    """The step that recomputes these: each, and its graph, is made once for all tests."""
    return options.step(names)


@pytest.fixture(params=MODELS)
def options(request):
    return options_of(request.param)


def subsets(options, seed=0):
    """All that may be recomputed, and a random half of it."""
    names = sorted(options.offered)
    chosen = np.random.default_rng(seed).random(len(names)) < 0.5
    return [tuple(names), tuple(n for n, is_in in zip(names, chosen, strict=True) if is_in)]


def test_operators_are_those_of_the_step_whatever_is_recomputed(options):
    """So that a strategy of one is a strategy of all."""
    for chosen in subsets(options):
        graph, _ = build_graph(step_with(options, chosen))
        wanted = [(op.name, op.kind, op.dims, op.parameters) for op in options.graph.operators]
        assert [(op.name, op.kind, op.dims, op.parameters) for op in graph.operators] == wanted
        assert graph.fingerprint() == options.graph.fingerprint()
        assert graph.recomputed <= set(chosen)
        assert sum(len(op.tasks) for op in graph.operators) > len(options.graph.tasks)


def test_what_is_recomputed_is_kept_by_nobody(options):
    """Of a chosen operator the backward pass reads only repetitions, but for what crosses from one segment to another."""
    for chosen in subsets(options):
        kept, again = (build_graph(step_with(options, names))[0] for names in ((), chosen))
        freed = {(name, t) for name in chosen for t in options.parts[name].tensors}
        values = {kept.tensors[t].value for _, t in freed}
        made_forward = {a.tensor for task in again.tasks if task.phase == FORWARD for a in task.writes}
        read_backward = {a.tensor for task in again.tasks if task.phase == BACKWARD for a in task.reads}
        assert values and not values & {again.tensors[t].value for t in made_forward & read_backward}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dropout", "loop"])
def test_numbers_are_those_of_the_step(model):
    step, *arguments = made(model)
    options, leaves = Recomputation(trace(step, *arguments)), jax.tree.leaves(arguments)

    def run(step):
        return jax.jit(lambda *a: ProgramEvaluator(step.program, is_float64=True).run(list(a))[0], compiler_options=QUICK)

    with jax.enable_x64(True):
        wanted, *found = (plain_leaves(run(options.step(names))(*leaves)) for names in ([], subsets(options)[1]))
    assert max(leaf_errors(found[0], wanted)) <= 1e-9


def test_repetitions_wait_for_a_cotangent_that_is_read_behind_the_barrier(options):
    """XLA takes out of a barrier what nobody reads; with the cotangent gone, it would compute all of it in the forward pass."""
    program = step_with(options, tuple(sorted(options.offered))).program
    phase_of = options._forward.phase_of
    made_backward = {o for e in options.traced.program.eqns if phase_of(e) == BACKWARD for o in e.outputs}
    read = [a for e in program.eqns for a in e.inputs if isinstance(a, int)]
    barriers = [e for e in program.eqns if e.name == "optimization_barrier" and e.stack == RECOMPUTED]
    for e in barriers:
        made_backward |= {o for a, o in zip(e.inputs, e.outputs, strict=True) if a in made_backward}
        assert e is barriers[0] or any(o in made_backward and o in read for o in e.outputs), "the first may begin the backward pass"
    assert barriers


def test_blocks_are_recomputed_as_by_jax_checkpoint():
    """A step whose blocks are all recomputed does the products of one with `jax.checkpoint` around every block."""
    flops = []
    for remat in (False, True):
        options = options_of("llama", remat=remat)
        graph, _ = build_graph(options.traced if remat else options.step(options.offered))
        flops.append(sum(w.flops * t.trip_count for t in graph.tasks for w in t.work if t.kind == "dot"))
    assert flops[0] == pytest.approx(flops[1], rel=0.05)


def test_nothing_is_offered_of_a_loop():
    options = options_of("own marks", scan=True)
    assert not any(options.graph.tasks[k].scope for op in options.graph.operators if op.name in options.offered for k in op.tasks)


def test_an_operator_that_keeps_nothing_is_refused_by_name():
    with pytest.raises(SoapjaxError, match=r"my.json: operators.no such one.recompute: got true; .*Remedy: set it to false"):
        recomputing(options_of("llama").traced, ["no such one"], place="my.json")


@pytest.mark.parametrize("num_blocks, width", [(4, 3), (12, 6)])
def test_a_chain_of_equal_blocks_is_cut_between_blocks(num_blocks, width):
    """Each makes `width` values of four bytes that its backward pass reads, and one of one byte that the next block reads."""
    values = []
    for i in range(num_blocks):
        start = i * (width + 1)
        values += [Value(start + k, start + width, 4.0, True) for k in range(width)]
        values.append(Value(start + width, min(start + 2 * width, num_blocks * (width + 1) - 1), 1.0, True))
    ends = cuts(values, num_blocks * (width + 1))
    assert ends and all(e % (width + 1) == 0 for e in ends)


def test_cuts_keep_little_more_than_the_best_ones():
    """Against every set of places where a cut may lie, on random passes."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        length = 24
        values = [
            Value(i, min(i + int(rng.integers(0, 4)), length - 1), float(rng.integers(1, 9)), bool(rng.random() < 0.8))
            for i in range(length)
        ]  # fmt: skip
        places = _places(values, length)[1:-1]

        def peak(ends, values=values, length=length):
            bounds = [0, *ends, length]
            crosses = [v for v in values if any(v.made < e <= v.last_read for e in ends)]
            inner = [sum(v.size_bytes for v in values if v.is_saved and v not in crosses and a <= v.made < b)
                     for a, b in itertools.pairwise(bounds)]  # fmt: skip
            return sum(v.size_bytes for v in crosses) + max(inner)

        every = (c for n in range(len(places) + 1) for c in itertools.combinations(places, n))
        assert places and peak(cuts(values, length)) <= 1.25 * min(map(peak, every))
