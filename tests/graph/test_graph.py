"""The operator graph of every model: what belongs together, phases, loops, fingerprints and FLOPs."""

import collections
import functools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from problems import total_flops

from models import alexnet, lenet, mlp, moe, resnet, rnnlm, transformer_lm, transformer_nnx
from soapjax.graph.passes.build import build_graph
from soapjax.graph.passes.phases import BACKWARD, FORWARD, UPDATE, is_recompute, module_path, value_and_grad
from soapjax.graph.passes.units import HEAVY, generated_values
from soapjax.graph.rules.flops import flops_of, window_pairs
from soapjax.graph.trace.tracing import trace

LAYERS = 3
LM = dict(batch=2, seq=8, width=8, layers=LAYERS, heads=2)
IMAGE = dict(batch=4, classes=4)
MODELS = {
    "mlp": (mlp, dict(batch=8, width=16, layers=2, classes=4, features=8)),
    "lm": (transformer_lm, LM),
    "lm_scan": (transformer_lm, LM | dict(scan=True)),
    "lm_remat": (transformer_lm, LM | dict(remat=True)),
    "lm_scan_remat": (transformer_lm, LM | dict(scan=True, remat=True)),
    "lm_dropout_tied": (transformer_lm, LM | dict(dropout=0.1, tie=True)),
    "lm_bfloat16": (transformer_lm, LM | dict(dtype="bfloat16")),
    "nnx": (transformer_nnx, LM),
    "lenet": (lenet, dict(batch=4, image=12)),
    "lenet_max": (lenet, dict(batch=4, image=12, pool="max")),
    "alexnet": (alexnet, IMAGE | dict(image=63, width=1 / 32)),
    "resnet": (resnet, IMAGE | dict(image=32, width=4, depth="tiny")),
    "rnnlm": (rnnlm, dict(batch=2, seq=4, hidden=16, layers=2, vocab=24)),
    "moe": (moe, dict(batch=2, seq=8, width=8, layers=2, heads=2, experts=4, vocab=16, top=2)),
}
LOOPED = {"lm_scan", "lm_scan_remat"}
# Products per transformer block: q, k, v, scores, values, out, up, down; one more is the head.
NUM_PRODUCTS = {
    "mlp": 3, "nnx": 8 * LAYERS + 1, "lenet": 5, "lenet_max": 5, "alexnet": 8, "resnet": 13,
    # Two layers: inputs at four steps, outputs before at three, the head at four. Of experts: gate, send, up, down, fetch.
    "rnnlm": 2 * (4 + 3) + 4, "moe": 8 + 6 + 5 + 1,
    **{name: 8 * (1 if name in LOOPED else LAYERS) + 1 for name in MODELS if name.startswith("lm")},
}  # fmt: skip


@functools.cache
def made(name):
    module, sizes = MODELS[name]
    return abstract(module, **sizes)


def abstract(module, **sizes):
    """(step, state, batch), nothing allocated."""
    kept = []

    def build():
        step, *args = module.make(**sizes)
        kept.append(step)
        return args

    state, batch = jax.eval_shape(build)
    return kept[0], state, batch


@functools.cache
def built(name):
    step = trace(*made(name))
    return step, *build_graph(step)


def equations(step):
    return {eqn.key: (eqn, trips) for eqn, trips in step.program.walk()}


def products(graph):
    return [(n, op) for n, op in enumerate(graph.operators) if op.kind in ("dot", "conv")]


@pytest.mark.parametrize("name", MODELS)
def test_every_heavy_equation_is_in_exactly_one_task(name):
    step, graph, binding = built(name)
    by_key = equations(step)
    constant = generated_values(step.program, binding.values)  # each device makes its own, as no task
    heavy = [key for key, (eqn, _) in by_key.items() if eqn.name in HEAVY and not set(eqn.outputs) <= constant]
    assert all(by_key[key][0].name == "scatter-add" for key in by_key if by_key[key][0].name in HEAVY and key not in heavy)
    counts = collections.Counter(task.equations.heavy for task in graph.tasks if task.is_heavy)
    assert counts == dict.fromkeys(heavy, 1)
    members = collections.Counter(key for task in graph.tasks for key in task.equations.keys)
    assert set(members.values()) == {1} and members.keys() <= by_key.keys()
    for k, task in enumerate(graph.tasks):
        assert all(binding.task_of[key] == k for key in task.equations.keys)
        if task.is_heavy:
            assert task.equations.heavy in task.equations.keys


@pytest.mark.parametrize("name", MODELS)
def test_a_product_its_gradients_and_its_recomputation_are_one_operator(name):
    step, graph, _ = built(name)
    by_key = equations(step)
    assert len(products(graph)) == NUM_PRODUCTS[name]
    for _, op in products(graph):
        tasks = [graph.tasks[t] for t in op.tasks if graph.tasks[t].is_heavy]
        again = [t for t in tasks if is_recompute(by_key[t.equations.heavy][0])]
        forward = [t for t in tasks if t.phase == FORWARD]
        backward = [t for t in tasks if t.phase == BACKWARD and t not in again]
        assert {t.kind for t in tasks} == {op.kind}
        assert len(forward) == 1 and 1 <= len(backward) <= 2, op.name
        assert len(again) <= ("remat" in name)
        # The first layer's input needs no gradient; every other product has two.
        assert len(backward) == 2 or op.name in ("dense0", "conv1", "stem_conv") or "moe/send" in op.name
    if "remat" in name:  # all but the last product of a block and the head
        tasks = [graph.tasks[t] for _, op in products(graph) for t in op.tasks]
        heavy = [by_key[t.equations.heavy][0] for t in tasks if t.is_heavy]
        assert sum(map(is_recompute, heavy)) == 7 * (1 if name in LOOPED else LAYERS)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_have_owners_and_gradients_and_one_update(name):
    step, graph, binding = built(name)
    _, state, _ = made(name)
    expected = [p for p in step.in_paths if p.startswith("state.params.")]
    assert [p.path for p in graph.parameters] == expected
    updates = collections.Counter(t.parameter for t in graph.tasks if t.parameter >= 0)
    assert updates == dict.fromkeys(range(len(expected)), 1)
    for k, p in enumerate(graph.parameters):
        owner, value, gradient = graph.operators[p.owner], graph.tensors[p.tensor], graph.tensors[p.gradient]
        assert k in owner.parameters and value.input_leaf == p.leaf
        assert gradient.shape in (value.shape, value.shape[1:])  # one trip's part where layers are stacked
        assert any(a.tensor == p.tensor for t in owner.tasks for a in graph.tasks[t].reads)
        writer = next(t for t in graph.tasks if any(a.tensor == p.gradient for a in t.writes))
        assert writer.phase == BACKWARD
        for leaf in p.state_leaves:
            assert step.in_avals[leaf].shape == value.shape and step.in_paths[leaf].startswith("state.opt_state")
        if owner.kind in ("dot", "conv"):
            assert any(d.kind == "P" for d in owner.dims)
    assert sum(len(op.parameters) for op in graph.operators) == len(expected)


@pytest.mark.parametrize("name", MODELS)
def test_phases(name):
    step, graph, binding = built(name)
    assert not graph.is_single_phase
    assert [t.phase for t in graph.tasks] == sorted(t.phase for t in graph.tasks)
    updated = set()
    for eqn, _ in step.program.walk():
        phase = binding.phases.phase.get(eqn.key)
        if eqn.body is not None:
            continue
        if "transpose(" in eqn.stack:
            assert phase == BACKWARD
        elif "jvp(" in eqn.stack:
            assert phase == FORWARD
        if phase == UPDATE:
            updated.update(eqn.outputs)
        else:
            assert not updated & {a for a in eqn.inputs if isinstance(a, int)}
    # All that makes a new parameter is update, its gradient apart.
    new = {o for i, o in graph.state_pairs if graph.in_paths[i].startswith("state.params.")}
    assert new and all(step.program.outputs[o] in updated for o in new)


def test_steps_of_time_are_operators_that_share_their_parameters():
    """The gradients of a step belong to that step, and so does the sum of a weight's gradients so far."""
    step, graph, _ = built("rnnlm")
    by_key = equations(step)
    for n, op in products(graph):
        tasks = [graph.tasks[t] for t in op.tasks if graph.tasks[t].is_heavy]
        assert {module_path(by_key[t.equations.heavy][0].stack) for t in tasks} == {op.name}
    names = {op.name for _, op in products(graph)}
    assert names == {f"step{t}/rnn/lstm{i}/{part}" for t in range(4) for i in range(2) for part in ("input", "hidden")
                     if t or part == "input"} | {f"step{t}/head" for t in range(4)}  # fmt: skip
    # What is left for the backward pass alone: the cotangents of all steps side by side, for the embedding.
    assert [op.name for op in graph.operators if all(graph.tasks[t].phase == BACKWARD for t in op.tasks)] == ["step~backward"]
    later = [op for op in graph.operators if re.match(r"step[12]/loss", op.name)]
    assert len(later) == 2 and later[0].group == later[1].group
    assert all([d.name for d in op.dims] == ["sample", "param0"] for op in later)


def test_what_inputs_and_constants_prepare_belongs_to_its_reader():
    """No operator gathers the dropout masks of all layers."""
    _, graph, _ = built("lm_dropout_tied")
    assert all(sum(d.kind == "S" for d in op.dims) <= 1 for op in graph.operators)


def test_a_mean_over_windows_and_its_gradient_are_one_operator():
    def step(w, x):
        def loss(w):
            with jax.named_scope("net"), jax.named_scope("pool"):
                pooled = jax.lax.reduce_window(x * w, 0.0, jax.lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
            return jnp.sum(pooled**2)

        return w - jax.grad(loss)(w)

    graph, _ = build_graph(trace(step, jnp.ones((8,)), jnp.ones((4, 6, 6, 8))))
    (pool,) = (op for op in graph.operators if op.kind == "pool")
    forward, backward = (graph.tasks[t] for t in pool.tasks if graph.tasks[t].is_heavy)
    assert (forward.phase, backward.phase) == (FORWARD, BACKWARD)
    assert forward.equations.operand_dims[0] == forward.equations.result_dims == backward.equations.result_dims == (0, -1, -1, 1)


def test_square_values_keep_their_dims_apart():
    """As many tokens as channels: a gradient that is not transposed yet does not tie the two."""
    _, graph, _ = built("moe")
    (send,) = (op for op in graph.operators if "moe/send" in op.name)
    assert [(d.kind, d.size) for d in send.dims] == [("S", 2), ("A", 8), ("A", 4), ("A", 5), ("A", 8)]


def blocks(name, graph):
    """block number -> groups of its products, in order."""
    found = collections.defaultdict(list)
    for _, op in products(graph):
        match = re.match(r"blk(\d+)", op.name)
        if match:
            found[int(match[1])].append(op.group)
    return found


@pytest.mark.parametrize("name", ["lm", "lm_remat", "lm_dropout_tied"])
def test_repeated_blocks_share_their_groups(name):
    _, graph, _ = built(name)
    groups = blocks(name, graph)
    assert len(groups) == LAYERS and len(groups[0]) == 8
    assert all(groups[k] == groups[0] for k in groups)
    heads = [op.group for _, op in products(graph) if not op.name.startswith("blk")]
    assert not set(heads) & set(groups[0])
    up, down = (next(op.group for op in graph.operators if op.name == f"blk0/mlp/{w}") for w in ("up", "down"))
    assert up != down


def test_blocks_of_nnx_share_their_groups():
    """Attention scores have no parameter, hence no path: the groups repeat all the same."""
    _, graph, _ = built("nnx")
    groups = [op.group for _, op in products(graph)]
    assert groups[:8] == groups[8:16] == groups[16:24] and groups[24] not in groups[:24]
    names = {op.name for _, op in products(graph)}
    assert {f"blk{k}/{part}" for k in range(LAYERS) for part in ("attn/query", "attn/value", "mlp/down")} <= names


def test_groups_tell_shapes_apart():
    step = trace(jax.jit(lambda a, b, c: ((a @ b) @ b) @ c), jnp.ones((4, 8)), jnp.ones((8, 8)), jnp.ones((8, 2)))
    graph, _ = build_graph(step)
    first, second, third = (op.group for op in graph.operators)
    assert first == second != third


@pytest.mark.parametrize("name", sorted(LOOPED))
def test_scanned_layers_run_once_per_layer(name):
    step, graph, _ = built(name)
    inside = [t for t in graph.tasks if t.scope]
    assert inside and all(t.trip_count == LAYERS for t in inside)
    assert all(t.trip_count == 1 for t in graph.tasks if not t.scope)
    assert len({t.scope for t in inside}) == 2  # the forward and the backward loop
    for _, op in products(graph):
        assert all(bool(graph.tasks[t].scope) == op.name.startswith("blocks/") for t in op.tasks if graph.tasks[t].is_heavy)
    stacked = [graph.tensors[p.tensor].shape for p in graph.parameters if p.path.startswith("state.params.blocks.")]
    assert stacked and all(shape[0] == LAYERS for shape in stacked)


def flops_by_name(step):
    """primitive -> FLOPs of a step, loops counted with their trips."""
    found = collections.Counter()
    for eqn, trips in step.program.walk():
        if eqn.body is None:
            found[eqn.name] += trips * flops_of(eqn, step.program)
    return found


@pytest.mark.parametrize("unroll", [False, True])
def test_layers_that_a_scan_computes_again_wait_for_their_cotangent(unroll):
    """Though they are marked as needing no barrier against merging: the compiler would compute one layer too early."""
    step, state, batch = made("lm_scan_remat")
    program = trace(step, state, batch, unroll=unroll).program
    barriers = [e for e, _ in program.walk() if e.name == "optimization_barrier"]
    assert len(barriers) == (LAYERS if unroll else 1)


@pytest.mark.parametrize("name", sorted(LOOPED))
def test_unrolled_graphs_have_the_flops_of_the_loop(name):
    step, graph, _ = built(name)
    flat = trace(*made(name), unroll=True)
    unrolled, _ = build_graph(flat)
    assert all(t.trip_count == 1 and not t.scope for t in unrolled.tasks)
    inside = sum(bool(t.is_heavy and t.scope and t.kind == "dot") for t in graph.tasks)
    num = [sum(bool(t.is_heavy and t.kind == "dot") for t in g.tasks) for g in (graph, unrolled)]
    assert num[1] == num[0] + inside * (LAYERS - 1)
    assert flops_by_name(flat)["dot_general"] == flops_by_name(step)["dot_general"] > 0
    assert total_flops(unrolled) == pytest.approx(total_flops(graph), rel=1e-3)


def test_a_hand_marked_gradient_is_the_boundary():
    """A backward pass without `transpose` in its name stacks."""

    def loss(w, x):
        return jnp.sum((x @ w) ** 2)

    def step(w, x):
        _, grad = value_and_grad(loss)(w, x)
        return w - 0.1 * grad

    graph, _ = build_graph(trace(step, jnp.ones((8, 4)), jnp.ones((2, 8))))
    assert [p.path for p in graph.parameters] == ["w"]
    assert not graph.is_single_phase


def test_an_average_of_parameters_as_they_were_is_kept_beside_them():
    """One that lags a step behind; a target network of another shape is no such, one that the loss reads is stored by itself."""

    def step(state, x):
        w, average, target, other = state
        grad = jax.grad(lambda w: (((x @ w) - x @ target) ** 2).mean())(w)
        return w - grad, 0.9 * average + 0.1 * w, 0.9 * target + 0.1 * w, 0.9 * other + w.T

    w = jnp.ones((8, 4))
    graph, _ = build_graph(trace(step, (w, w, w, w.T), jnp.ones((2, 8))))
    assert [(p.path, p.state_leaves) for p in graph.parameters] == [("state.0", (1,)), ("state.2", ())]


@pytest.mark.parametrize("kind", ["fori", "scan", "while", "lags"])
def test_what_a_loop_before_the_gradient_hands_on_is_no_update(kind):
    """A key that is split anew in every trip: nothing behind the loop reads the last one."""

    def noisy(x, key):
        def trip(carry):
            y, key = carry
            key, own = jax.random.split(key)
            return y + 0.1 * jax.random.normal(own, y.shape), key

        if kind == "fori":
            return jax.lax.fori_loop(0, 3, lambda i, c: trip(c), (x, key))[0]
        if kind == "lags":  # each trip reads what the one before made of what the one before that made
            three = jax.lax.fori_loop(0, 4, lambda i, c: (c[0] + c[1], jnp.tanh(c[1] + c[2]), jnp.tanh(1.1 * c[2])), (x, x, x))
            return three[0]
        if kind == "scan":
            return jax.lax.scan(lambda c, _: (trip(c), None), (x, key), length=3)[0][0]
        return jax.lax.while_loop(lambda c: c[0].sum() < 0, trip, (x, key))[0]

    def step(state, x):
        loss, grad = jax.value_and_grad(lambda w: ((noisy(x, state["key"]) @ w) ** 2).mean())(state["w"])
        return {"w": state["w"] - 0.1 * grad, "key": state["key"]}, loss

    graph, binding = build_graph(trace(step, {"w": jnp.ones((8, 4)), "key": jax.random.key(0)}, jnp.ones((2, 8))))
    assert [p.path for p in graph.parameters] == ["state.w"] and not graph.is_single_phase
    assert sum(phase == UPDATE for phase in binding.phases.phase.values()) == 2  # of w: a product and a difference


FINGERPRINTS = """
import sys
sys.path.insert(0, sys.argv[1])
import test_graph
for name in ("mlp", "lm_scan_remat", "lenet_max"):
    print(test_graph.built(name)[1].fingerprint())
"""


def test_fingerprints_are_the_same_in_every_process():
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here.parent.parent, here.parent)))
    mine = [built(name)[1].fingerprint() for name in ("mlp", "lm_scan_remat", "lenet_max")]
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        environment["XLA_FLAGS"] = ""  # another number of devices changes nothing
        run = subprocess.run(
            [sys.executable, "-c", FINGERPRINTS, str(here)], env=environment, capture_output=True, text=True, check=True
        )
        assert run.stdout.split() == mine


def test_fingerprints_change_with_shapes_dtypes_and_structure_only():
    module, sizes = MODELS["mlp"]
    changes = [dict(batch=16), dict(width=32), dict(layers=3), dict(dtype="bfloat16"), dict(classes=8)]
    prints = [build_graph(trace(*abstract(module, **(sizes | c))))[0].fingerprint() for c in [{}, *changes]]
    assert len(set(prints)) == len(prints)
    again = build_graph(trace(*abstract(module, **sizes | dict(seed=3))))[0]
    assert again.fingerprint() == prints[0]


# A reader of the products in a compiled program's text. A name is defined before it is used, with its shape.
_INSTRUCTION = re.compile(r"%?([\w.\-]+) = \(?\w+\[([\d,]*)\][^=]*? (dot|convolution)\(([^)]*)\)(.*)")
_DEFINED = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = \w+\[([\d,]*)\]", re.MULTILINE)


def numbers(text):
    return [int(n) for n in re.findall(r"\d+", text)]


def hlo_product_flops(text):
    """(dot FLOPs, convolution FLOPs, other ways of calling a product) of an HLO module without loops."""
    shapes = {name: numbers(dims) for name, dims in _DEFINED.findall(text)}
    total = {"dot": 0, "convolution": 0}
    for line in text.splitlines():
        match = _INSTRUCTION.search(line)
        if match is None:
            continue
        _, out, op, operands, attributes = match.groups()
        lhs, rhs = (shapes[name] for name in re.findall(r"%([\w.\-]+)", operands))
        if op == "dot":
            contracted = numbers(re.search(r"lhs_contracting_dims=\{([\d,]*)\}", attributes)[1])
            total[op] += 2 * math.prod(numbers(out)) * math.prod(lhs[d] for d in contracted)
        else:
            total[op] += hlo_convolution(numbers(out), lhs, rhs, attributes)
    called = re.findall(r'custom_call_target="([^"]*(?:gemm|matmul|dot|conv|dnn|blas)[^"]*)"', text, re.IGNORECASE)
    return total["dot"], total["convolution"], called


def hlo_convolution(out, lhs, rhs, attributes):
    """2 x batch x features of either kernel side x window positions that meet an element of the input."""
    window = re.search(r"window=\{([^}]*)\}", attributes)[1]
    lhs_labels, rhs_labels, out_labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes).groups()
    batch_groups = int((re.search(r"batch_group_count=(\d+)", attributes) or [0, 1])[1])

    def per_dim(key, default):
        found = re.search(rf"\b{key}=([\dx_\-]+)", window)
        return found[1].split("x") if found else [default] * (len(lhs) - 2)

    flops = 2 * lhs[lhs_labels.index("b")] // batch_groups * rhs[rhs_labels.index("i")] * rhs[rhs_labels.index("o")]
    strides, pads = per_dim("stride", "1"), per_dim("pad", "0_0")
    dilations = per_dim("lhs_dilate", "1"), per_dim("rhs_dilate", "1")
    for k, (stride, pad, wide, far) in enumerate(zip(strides, pads, *dilations, strict=True)):
        n, w, m = lhs[lhs_labels.index(str(k))], rhs[rhs_labels.index(str(k))], out[out_labels.index(str(k))]
        low = int(re.match(r"-?\d+", pad)[0])
        places = [o * int(stride) + i * int(far) - low for o in range(m) for i in range(w)]
        flops *= sum(0 <= x <= (n - 1) * int(wide) and x % int(wide) == 0 for x in places)
    return flops


@functools.cache
def compiled(name):
    step, state, batch = made(name)
    return jax.jit(step).lower(state, batch).compile()


# Others say nothing new and take seconds to compile.
WITHOUT_LOOPS = ["mlp", "lm", "lm_remat", "lm_dropout_tied", "nnx", "lenet", "lenet_max", "alexnet", "resnet", "rnnlm"]


@pytest.mark.parametrize("name", WITHOUT_LOOPS)
def test_products_have_the_flops_of_the_compiled_program(name):
    step, graph, _ = built(name)
    dots, convolutions, called = hlo_product_flops(compiled(name).as_text())
    assert not called
    found = flops_by_name(step)
    assert (found["dot_general"], found["conv_general_dilated"]) == (dots, convolutions)


@pytest.mark.parametrize("name", WITHOUT_LOOPS)
def test_total_flops_are_those_of_the_compiler(name):
    assert total_flops(built(name)[1]) == pytest.approx(compiled(name).cost_analysis()["flops"], rel=0.1)


def test_window_positions_of_a_convolution_by_enumeration():
    cases = [(n, w, m, s, p, a, b) for n in (1, 4, 5) for w in (1, 3) for m in (1, 4, 7) for s in (1, 2, 3)
             for p in (-1, 0, 2) for a in (1, 2, 3) for b in (1, 2)]  # fmt: skip
    for n, w, m, stride, low, wide, far in cases:
        places = [o * stride + i * far - low for o in range(m) for i in range(w)]
        expected = sum(0 <= x <= (n - 1) * wide and x % wide == 0 for x in places)
        assert window_pairs(n, w, m, stride=stride, low=low, lhs_dilation=wide, rhs_dilation=far) == expected


@pytest.mark.parametrize("left_side", [True, False])
def test_a_triangular_solve_counts_its_right_hand_sides_on_either_side(left_side):
    def solve(a, b):
        return jax.lax.linalg.triangular_solve(a, b, left_side=left_side)

    program = trace(solve, jnp.ones((8, 8)), jnp.ones((8, 3) if left_side else (3, 8))).program
    (eqn,) = [e for e in program.eqns if e.name == "triangular_solve"]
    assert flops_of(eqn, program) == 8 * 8 * 3


def test_the_gradient_of_an_update_that_loops_over_earlier_ones_is_found():
    tx = optax.lbfgs(0.1, linesearch=None)
    w = {"a": jnp.ones((16, 32)), "b": jnp.ones((32, 8))}

    def step(w, state, x):
        loss, gradients = jax.value_and_grad(lambda w: (jnp.tanh(x @ w["a"]) @ w["b"]).mean() ** 2)(w)
        updates, state = tx.update(gradients, state, w)
        return optax.apply_updates(w, updates), state, loss

    graph, _ = build_graph(trace(step, w, tx.init(w), jnp.ones((16, 16))))
    assert [p.path for p in graph.parameters] == ["w.a", "w.b"] and not graph.is_single_phase
    assert all(graph.tensors[p.gradient].shape == w[p.path[-1]].shape for p in graph.parameters)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_gradients_are_found_through_an_update_of_other_shapes(is_transposed):
    """As Muon's, which iterates on stacks of matrices, the wide side last."""

    def step(params, x):
        grads = jax.grad(lambda p: (jnp.tanh(x @ p["w"]) @ p["u"]).mean())(params)

        def update(p, g):
            stack = (g.T if is_transposed else g)[None]
            stack = stack / jnp.sqrt((stack**2).sum())
            stack = 2 * stack - stack @ stack.transpose(0, 2, 1) @ stack
            return p - 0.1 * (stack[0].T if is_transposed else stack[0])

        return jax.tree.map(update, params, grads)

    params = {"w": jnp.ones((6, 8)), "u": jnp.ones((8, 4))}
    graph, binding = build_graph(trace(step, params, jnp.ones((16, 6))))
    assert not graph.is_single_phase and [p.path for p in binding.phases.parameters] == ["params.u", "params.w"]
    for p in binding.phases.parameters:
        assert binding.values.producer[p.gradient].name in ("dot_general", "transpose", "mul")


@pytest.mark.parametrize("way", ["ravelled", "flat optimizer", "flat optimizer, if all is finite", "stacked"])
def test_gradients_are_found_through_an_update_of_all_parameters_end_to_end(way):
    """Each finds its own, though others have its shape."""
    params = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4)), "c": jnp.ones((4, 4))}
    if way != "stacked":
        params["d"] = jnp.ones((4, 8))
    tx = optax.flatten(optax.sgd(0.1, momentum=0.9))
    if way.endswith("finite"):
        tx = optax.apply_if_finite(tx, 3)

    def step(params, state, x):
        grads = jax.grad(lambda p: (functools.reduce(lambda h, k: jnp.tanh(h @ p[k]), sorted(p), x) ** 2).mean())(params)
        if way.startswith("flat optimizer"):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state
        if way == "ravelled":
            flat, unravel = jax.flatten_util.ravel_pytree(grads)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, unravel(flat / jnp.linalg.norm(flat))), state
        rows = jnp.stack([grads[k] for k in sorted(grads)])
        rows = rows / jnp.linalg.norm(rows)
        return {k: params[k] - 0.1 * rows[n] for n, k in enumerate(sorted(params))}, state

    traced = trace(step, params, tx.init(params), jnp.ones((16, 4)))
    graph, binding = build_graph(traced)
    assert not graph.is_single_phase and [p.path for p in binding.phases.parameters] == [f"params.{k}" for k in params]
    # The loss goes through the parameters in order, and its gradient back: the last one's comes first.
    order = [binding.values.order[binding.values.producer[p.gradient].key] for p in binding.phases.parameters]
    assert order == sorted(order, reverse=True) and len(set(order)) == len(params)


def test_gradients_are_found_behind_a_projection_to_few_rows():
    """As GaLore's, whose projection changes in some steps only; the norm of all gradients leads to none of another parameter."""

    def step(state, x):
        params, q, n = state
        grads = jax.grad(lambda p: (jnp.tanh(x @ p["a"]) @ p["b"]).mean())(params)
        norm = optax.global_norm(grads)
        q = jax.lax.cond(n % 2 == 0, lambda: jax.tree.map(lambda g: jnp.linalg.qr(g)[0][:, :2], grads), lambda: q)
        return jax.tree.map(lambda p, q, g: p - q @ (q.T @ g) / norm, params, q, grads), q, n + 1

    params, q = ({k: jnp.ones((8, n)) for k in "ab"} for n in (8, 2))
    graph, binding = build_graph(trace(step, (params, q, 0), jnp.ones((16, 8))))
    assert [p.path for p in graph.parameters] == ["state.0.a", "state.0.b"] and not graph.is_single_phase
    of_a, of_b = (binding.values.order[binding.values.producer[p.gradient].key] for p in binding.phases.parameters)
    assert of_a > of_b


@pytest.mark.parametrize("each", [jax.vmap, lambda f: functools.partial(jax.lax.map, f)], ids=["vmap", "map"])
def test_moments_of_gradients_that_are_summed_over_parts_are_their_parameters(each):
    """Also where the optimizer's state comes before the parameters."""
    tx = optax.adam(1e-3)

    def step(state, x):
        gradients = each(lambda x: jax.grad(lambda w: ((jnp.tanh(x @ w) @ w.T) ** 2).mean())(state["w"]))(x)
        updates, moments = tx.update(gradients.mean(0), state["moments"])
        return {"moments": moments, "w": state["w"] + updates}

    w = jnp.ones((8, 16))
    graph, _ = build_graph(trace(step, {"moments": tx.init(w), "w": w}, jnp.ones((4, 32, 8))))
    (parameter,) = graph.parameters
    assert graph.in_paths[parameter.leaf] == "state.w" and len(parameter.state_leaves) == 2
