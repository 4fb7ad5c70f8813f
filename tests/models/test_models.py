"""Every model: abstract and real ``make`` agree, its own batch is learned, parameters count as their formulas say."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import family
from flax import linen as nn
from jax.extend import core as jax_core
from problems import abstract

from models import (
    alexnet,
    bert,
    gnmt,
    gpt3,
    inception_v3,
    lenet,
    llama,
    mlp,
    moe,
    nasnet,
    nmt,
    resnet,
    rnnlm,
    rnntc,
    text,
    transformer_lm,
    transformer_nnx,
    two_towers,
    unet,
    vgg,
)

TINY_LM = dict(batch=2, seq=8, width=8, layers=2, heads=2, learning_rate=1e-2)
TINY_IMAGE = dict(batch=4, image=32, classes=4, width=4, depth="tiny", learning_rate=0.05)
TINY_CELLS = dict(batch=4, image=16, stem=4, width=4, classes=4, learning_rate=0.05)
TINY_RNN = dict(batch=2, seq=3, hidden=8, layers=2, vocab=32, learning_rate=5e-2)
TINY_MOE = dict(batch=2, seq=8, width=12, heads=2, vocab=32)

# name -> (module, sizes)
CASES = {
    "mlp": (mlp, dict(batch=8, width=16, layers=2, classes=4, features=8, learning_rate=1e-2)),
    "mlp_bfloat16": (mlp, dict(batch=8, width=16, classes=4, features=8, learning_rate=1e-2, dtype="bfloat16")),
    "two_towers": (two_towers, dict(batch=8, width=16, layers=2, out=4, classes=4, features=8, learning_rate=0.1)),
    "lm": (transformer_lm, TINY_LM),
    "lm_full": (transformer_lm, TINY_LM | dict(scan=True, remat=True, dropout=0.1, tie=True, dtype="bfloat16")),
    "lm_sgd": (transformer_lm, TINY_LM | dict(optimizer="sgd", vocab=50, remat=True, mlp_ratio=2, learning_rate=0.1)),
    "lm_chunked": (transformer_lm, TINY_LM | dict(attention_dropout=0.1, loss_chunks=4)),
    "nnx": (transformer_nnx, TINY_LM),
    "nnx_full": (transformer_nnx, TINY_LM | dict(dropout=0.1, tie=True, dtype="bfloat16")),
    "lenet_average": (lenet, dict(batch=4, image=12)),
    "lenet_max": (lenet, dict(batch=4, image=12, pool="max")),
    "alexnet": (alexnet, dict(batch=4, image=63, classes=4, width=1 / 32, dropout=0.1, learning_rate=0.1)),
    "resnet_tiny": (resnet, TINY_IMAGE),
    "resnet_bfloat16": (resnet, TINY_IMAGE | dict(dtype="bfloat16")),
    "inception_v3": (inception_v3, dict(batch=2, width=1 / 32)),
    "nasnet": (nasnet, TINY_CELLS),
    "pnasnet": (nasnet, TINY_CELLS | dict(design="pnasnet_5", dtype="bfloat16")),
    "vgg": (vgg, dict(batch=2, depth=11, width=1 / 64, dropout=0.1)),
    "unet": (unet, dict(batch=2, image=8, width=2, groups=2)),
    "unet_bfloat16": (unet, dict(batch=2, image=8, width=2, groups=0, dtype="bfloat16")),
    "rnntc": (rnntc, TINY_RNN),
    "rnntc_scan": (rnntc, TINY_RNN | dict(scan=True, dtype="bfloat16")),
    "rnnlm": (rnnlm, TINY_RNN | dict(dtype="bfloat16")),
    "rnnlm_scan": (rnnlm, TINY_RNN | dict(scan=True)),
    "nmt": (nmt, TINY_RNN | dict(dtype="bfloat16")),
    "nmt_scan": (nmt, TINY_RNN | dict(scan=True)),
    "gnmt": (gnmt, TINY_RNN | dict(layers=3, dtype="bfloat16")),
    "gnmt_2layer": (gnmt, TINY_RNN),
    "gnmt_scan": (gnmt, TINY_RNN | dict(layers=3, scan=True)),
    "bert": (bert, dict(batch=2, seq=16, width=8, heads=2, vocab=32)),
    "bert_full": (bert, dict(batch=2, seq=16, width=8, heads=2, tie=False, remat=True, dtype="bfloat16")),
    "gpt3": (gpt3, dict(batch=2, layers=1, seq=8, remat=True, dtype="bfloat16")),
    "llama": (llama, dict(batch=2, seq=8, width=8, layers=2, heads=2, learning_rate=1e-2)),
    "moe": (moe, TINY_MOE),
    "moe_full": (moe, TINY_MOE | dict(top=2, every=1, tie=True, remat=True)),
}
# With a scan and without it, the same parameters.
PAIRS = ("rnntc", "rnnlm", "nmt", "gnmt")

# Training these as well would add minutes of compiling and no new path through the code.
LEARNING = [
    name
    for name, (module, _) in CASES.items()
    if name not in ("lm_sgd", "lenet_max", "resnet_bfloat16", "unet_bfloat16", "bert_full", "moe_full", "gpt3")
    and module not in (inception_v3, vgg)
    and (module.__name__.rpartition(".")[2] not in PAIRS or name in ("rnntc", "gnmt_2layer"))
]


def shapes(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, np.dtype(leaf.dtype)), tree)


def count(tree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@functools.cache
def compiled(step):
    """Jitted with little optimisation: these steps run a dozen times, so compiling is all that takes time.

    The same for the same step: what one test has traced or compiled, another takes.
    """
    return jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})


def product_types(closed) -> set[str]:
    """The types of the results of all matrix products and convolutions, those within nested jaxprs too."""
    found = set()

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
                found.add(str(eqn.outvars[0].aval.dtype))
            for inner in jax_core.jaxprs_in_params(eqn.params):
                visit(inner)

    visit(closed.jaxpr)
    return found


@functools.cache
def real_make(name):
    module, sizes = CASES[name]
    return module.make(**sizes)


@functools.cache
def abstract_make(module, **sizes):
    """``make`` with every array abstract, and the step that came out of the abstract call."""
    return abstract(module.__name__.removeprefix("models."), **sizes)


@pytest.mark.parametrize("name", CASES)
def test_abstract_make(name):
    """No array is allocated, and the step is pure: it keeps the state's shapes and hides no array as a constant."""
    module, sizes = CASES[name]
    step, state, batch = abstract_make(module, **sizes)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((state, batch)))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state["params"])} == {"float32"}
    traced = compiled(step).trace(state, batch)
    closed, (new_state, metrics) = traced.jaxpr, traced.out_info
    assert shapes(new_state) == shapes(state)
    assert metrics["loss"].shape == () and metrics["loss"].dtype == np.float32
    assert all(np.size(const) <= 1 for const in closed.consts)
    # The products of a bfloat16 model, forward and backward, are in bfloat16.
    if sizes.get("dtype") == "bfloat16":
        assert product_types(closed) == {"bfloat16"}


SLOW = ("lm_full", "unet", "bert", "moe", "nnx_full", "nasnet", "pnasnet", "gnmt_2layer")


@pytest.mark.parametrize("name", family(LEARNING, slow=SLOW))
def test_step_of_abstract_make_learns_real_batch(name):
    """One compilation checks three things: equal shapes, no leaked tracer in the step, and a loss that falls."""
    module, sizes = CASES[name]
    abstract_step, *abstract = abstract_make(module, **sizes)
    _, state, batch = real_make(name)
    assert shapes(abstract) == shapes([state, batch])
    step, losses = compiled(abstract_step), []
    before = step._cache_size()  # other tests may run it with these shapes
    for _ in range(12):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    assert state["step"] == 12 and step._cache_size() <= before + 1
    assert np.all(np.isfinite(losses)) and losses[-1] < 0.95 * losses[0], losses


@pytest.mark.parametrize("name", ["lm", "nnx"])
def test_make_is_deterministic_and_follows_the_seed(name):
    module, sizes = CASES[name]
    first = real_make(name)[1:]
    again, other = (module.make(**sizes, seed=seed)[1:] for seed in (0, 1))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, first, again)))
    assert not np.array_equal(first[1]["tokens"], other[1]["tokens"])
    assert not np.array_equal(first[0]["params"]["position"], other[0]["params"]["position"])


@pytest.mark.parametrize("name", family(PAIRS, slow=["gnmt", "rnnlm", "rnntc"]))
def test_unrolled_equals_scan(name):
    module, sizes = CASES[name]
    sizes = sizes | dict(dtype="float32", seq=2)
    step, state, batch = module.make(**sizes)
    scan_step, scan_state, _ = abstract_make(module, **sizes, scan=True)
    assert shapes(scan_state) == shapes(state)
    (new, metrics), (scan_new, scan_metrics) = (compiled(s)(state, batch) for s in (step, scan_step))
    np.testing.assert_allclose(scan_metrics["loss"], metrics["loss"], rtol=1e-5)
    gradient, scan_gradient = new["opt_state"][0].mu, scan_new["opt_state"][0].mu
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), scan_gradient, gradient)


@pytest.mark.parametrize("tie", [False, True])
def test_loss_in_chunks_is_the_whole_loss(tie):
    step, state, batch = transformer_lm.make(**TINY_LM, tie=tie) if tie else real_make("lm")
    chunked, chunked_state, _ = abstract_make(transformer_lm, **TINY_LM, tie=tie, loss_chunks=4)
    assert shapes(chunked_state) == shapes(state)
    (new, metrics), (chunked_new, chunked_metrics) = (compiled(s)(state, batch) for s in (step, chunked))
    np.testing.assert_allclose(chunked_metrics["loss"], metrics["loss"], rtol=1e-6)
    gradient, chunked_gradient = new["opt_state"][0].mu, chunked_new["opt_state"][0].mu
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), chunked_gradient, gradient)


@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize("capacity", [2, 8])
def test_routing(top, capacity):
    """A slot holds one token at most, a token goes to its best experts, and what is full takes the first tokens."""
    gates = np.asarray(nn.softmax(jax.random.normal(jax.random.key(0), (3, 8, 4))))
    combine, aux = map(np.asarray, moe.route(jnp.asarray(gates), top=top, capacity=capacity))
    sent = combine > 0
    assert sent.sum(axis=1).max() == 1 and aux >= 0.0
    best = np.argsort(-gates, axis=-1)[..., :top]
    expected = np.zeros((3, 8, 4), bool)
    for b in range(3):
        queue = {expert: [s for k in range(top) for s in range(8) if best[b, s, k] == expert] for expert in range(4)}
        for expert, tokens in queue.items():
            expected[b, tokens[:capacity], expert] = True
    np.testing.assert_array_equal(sent.any(axis=-1), expected)
    if capacity == 8:  # nothing is dropped
        weights = gates if top == 1 else gates / np.take_along_axis(gates, best, -1).sum(-1, keepdims=True)
        np.testing.assert_allclose(combine.sum(axis=-1), np.where(expected, weights, 0.0), rtol=1e-6)


def test_masked_loss_sees_masked_tokens_only():
    logits = jax.random.normal(jax.random.key(0), (2, 4, 8))
    labels, masked = np.arange(8).reshape(2, 4), np.arange(8).reshape(2, 4) % 3 == 0
    everywhere = -np.take_along_axis(np.asarray(nn.log_softmax(logits)), labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(bert.masked_loss(logits, labels, masked), everywhere[masked].mean(), rtol=1e-5)
    assert bert.masked_loss(logits, labels, np.zeros_like(masked)) == 0.0


def test_mlp_parameter_count():
    width, layers, classes, features = 16, 3, 4, 8
    _, state, _ = abstract_make(mlp, width=width, layers=layers, classes=classes, features=features)
    expected = features * width + width + (layers - 1) * (width**2 + width) + width * classes + classes
    assert count(state["params"]) == expected


@pytest.mark.parametrize("module", [transformer_lm, transformer_nnx])
@pytest.mark.parametrize("tie", [False, True])
def test_transformer_parameter_count(module, tie):
    seq, width, layers, vocab, ratio = 8, 16, 3, 50, 2
    _, state, _ = abstract_make(module, seq=seq, width=width, layers=layers, vocab=vocab, mlp_ratio=ratio, tie=tie)
    block = 4 * (width**2 + width) + 4 * width + 2 * ratio * width**2 + ratio * width + width
    expected = (vocab + seq) * width + layers * block + 2 * width + (0 if tie else width * vocab)
    assert count(state["params"]) == expected


@pytest.mark.parametrize(
    ("module", "sizes", "published"),
    [
        (lenet, {}, 61_706),
        (alexnet, {}, 61_100_840),
        (resnet, dict(depth=18), 11_689_512),
        (resnet, dict(depth=50), 25_557_032),
        (resnet, dict(depth=152), 60_192_808),
        (lenet, lenet.PAPER, 61_706),
        (alexnet, alexnet.PAPER, 61_100_840),
        (resnet, resnet.PAPER, 44_549_160),
        (inception_v3, inception_v3.PAPER, 23_834_568),
        (inception_v3, inception_v3.PAPER | dict(aux=True), 27_161_264),
        (vgg, vgg.PAPER, 138_357_544),
        (unet, unet.PAPER, 31_030_658),
        (bert, bert.PAPER | dict(vocab=30_522), 335_174_458),
    ],
)
def test_published_parameter_counts(module, sizes, published):
    _, state, _ = abstract_make(module, **sizes)
    assert count(state["params"]) == published


@pytest.mark.parametrize(
    ("sizes", "exactly", "parameters", "multiplications"),
    [(nasnet.PAPER, 88_753_150, 88.9e6, 23.8e9), (nasnet.PNASNET_PAPER, 86_057_668, 86.1e6, 25.0e9)],
    ids=["nasnet", "pnasnet"],
)
def test_nets_of_cells_are_as_published(sizes, exactly, parameters, multiplications):
    """Parameters and multiplications for one image: Zoph et al. 2018, table 2; Liu et al. 2018, table 5; within 1 %.

    Exactly: those of the authors' checkpoints, as Keras counts the first (88,949,818 with 196,668 moving statistics) and timm both.
    """
    # The initialisation runs the net forward, on one image.
    closed, (state, _) = jax.make_jaxpr(lambda: nasnet.make(**sizes)[1:], return_shape=True)()
    assert count(state["params"]) == exactly == pytest.approx(parameters, rel=0.01)
    assert multiplied(closed.jaxpr) == pytest.approx(multiplications, rel=0.01)


def multiplied(jaxpr) -> int:
    """Multiplications of all products and convolutions: per number of the result, those of a kernel's column."""
    total = 0
    for eqn in jaxpr.eqns:
        total += sum(multiplied(inner) for inner in jax_core.jaxprs_in_params(eqn.params))
        if eqn.primitive.name == "conv_general_dilated":
            kernel, features = eqn.invars[1].aval, eqn.params["dimension_numbers"].rhs_spec[0]
            total += eqn.outvars[0].aval.size * kernel.size // kernel.shape[features]
        elif eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            total += eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    return total


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [5, 8])
def test_mean_counts_no_pixel_beyond_the_border(size, stride):
    x = jax.random.normal(jax.random.key(0), (2, size, size, 3))
    expected = nn.avg_pool(x, (3, 3), (stride, stride), "SAME", count_include_pad=False)
    np.testing.assert_allclose(nasnet.pool("mean", x, stride), expected, rtol=1e-6)


def lstm(inputs, hidden):
    return 4 * hidden * (inputs + hidden + 1)


@pytest.mark.parametrize("sizes", [dict(hidden=6, layers=3, vocab=10), "PAPER", "TWO_LAYERS"])
def test_recurrent_parameter_counts(sizes):
    for module in (rnntc, rnnlm, nmt, gnmt) if sizes != "TWO_LAYERS" else (gnmt,):
        given = getattr(module, sizes) if isinstance(sizes, str) else sizes
        hidden, layers, vocab = (given[k] for k in ("hidden", "layers", "vocab"))
        head = hidden * vocab + vocab
        expected = {
            rnntc: vocab * hidden + layers * lstm(hidden, hidden) + hidden * 2 + 2,
            rnnlm: vocab * hidden + layers * lstm(hidden, hidden) + head,
            nmt: 2 * vocab * hidden + 2 * layers * lstm(hidden, hidden) + 2 * hidden**2 + head,
            gnmt: 2 * vocab * hidden + (layers + 1) * lstm(hidden, hidden) + 4 * hidden**2
            + layers * lstm(2 * hidden, hidden) + 2 * hidden**2 + hidden + head,
        }[module]  # fmt: skip
        _, state, _ = abstract_make(module, **given)
        assert count(state["params"]) == expected
        if isinstance(sizes, str):
            assert f"{sizes}: {expected:,}" in module.__doc__


@pytest.mark.parametrize("tie", [False, True])
def test_bert_and_moe_parameter_counts(tie):
    seq, width, layers, vocab, experts = 8, 16, 4, 50, 4
    head = 0 if tie else width * vocab
    block = 4 * (width**2 + width) + 4 * width
    _, state, _ = abstract_make(bert, seq=seq, width=width, layers=layers, vocab=vocab, tie=tie)
    expected = (vocab + seq + 2) * width + 2 * width + layers * (block + 8 * width**2 + 5 * width)
    assert count(state["params"]) == expected + width**2 + 3 * width + vocab + head
    _, state, _ = abstract_make(moe, seq=seq, width=width, layers=layers, vocab=vocab, experts=experts, tie=tie)
    mixtures = layers // 2 * (width * experts + 2 * experts * 4 * width**2)
    expected = (vocab + seq) * width + layers * block + layers // 2 * (8 * width**2 + 5 * width) + mixtures + 2 * width
    assert count(state["params"]) == expected + head


@pytest.mark.parametrize("groups", [0, 2])
def test_unet_parameter_count(groups):
    width, levels, channels, classes = 4, 3, 3, 5
    sizes = [channels, *(width * 2**i for i in range(levels + 1))]

    def pair(a, b):
        return 9 * a * b + b + 9 * b * b + b + 4 * b * bool(groups)

    down = sum(pair(a, b) for a, b in itertools.pairwise(sizes))
    up = sum(4 * a * b + b + pair(2 * b, b) for b, a in itertools.pairwise(sizes[1:]))
    _, state, _ = abstract_make(unet, channels=channels, classes=classes, width=width, levels=levels, groups=groups)
    assert count(state["params"]) == down + up + width * classes + classes


@pytest.mark.parametrize("size", [name for name in gpt3.SIZES if name != "tiny"])
def test_gpt3_sizes_are_as_named(size):
    _, state, _ = abstract_make(gpt3, **gpt3.PAPER | dict(size=size, batch=1, scan=True))
    named = float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]]
    assert count(state["params"]) == pytest.approx(named, rel=0.05)


def test_paper_sizes_of_experts():
    _, state, _ = abstract_make(moe, **moe.PAPER)
    assert f"{count(state['params']):,}" in moe.__doc__


def test_39_billion_parameters_cost_no_memory():
    step, state, batch = abstract_make(
        transformer_lm, batch=1024, seq=1024, width=8192, layers=48, heads=64, vocab=51200, scan=True, remat=True
    )
    assert count(state["params"]) > 39e9
    _, metrics = jax.eval_shape(step, state, batch)
    assert metrics["loss"].shape == ()


def test_scan_and_remat_equal_loop():
    step, state, batch = real_make("lm")
    scan_step, scan_state, _ = abstract_make(transformer_lm, **TINY_LM, scan=True, remat=True)

    def stacked(params):
        blocks = [params[f"blk{i}"] for i in range(TINY_LM["layers"])]
        rest = {name: leaf for name, leaf in params.items() if not name.startswith("blk")}
        return rest | {"blocks": jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)}

    def after_one_step(step, params):
        optimizer = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), scan_state["opt_state"])
        start = state if params is None else {**state, "params": params, "opt_state": optimizer}
        new_state, metrics = compiled(step)(start, batch)
        return metrics["loss"], new_state["opt_state"][0].mu

    loss, gradient = after_one_step(step, None)
    scan_loss, scan_gradient = after_one_step(scan_step, stacked(state["params"]))
    np.testing.assert_allclose(scan_loss, loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), scan_gradient, stacked(gradient))


def test_nnx_equals_linen():
    """The two have the same tree of parameters, so a state of one is a state of the other."""
    linen_step, state, batch = real_make("lm")
    nnx_step, nnx_state, _ = abstract_make(transformer_nnx, **TINY_LM)
    assert shapes(nnx_state["params"]) == shapes(state["params"])
    (linen_new, linen_metrics), (nnx_new, nnx_metrics) = (compiled(step)(state, batch) for step in (linen_step, nnx_step))
    np.testing.assert_allclose(nnx_metrics["loss"], linen_metrics["loss"], rtol=1e-5)
    linen_gradient, nnx_gradient = linen_new["opt_state"][0].mu, nnx_new["opt_state"][0].mu
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), nnx_gradient, linen_gradient)


def test_attention_is_causal():
    """Logits up to a position do not see the tokens after it, and those from there on do."""
    sizes = dict(seq=6, width=8, layers=2, heads=2, vocab=16, ratio=2, dropout=0.0, tie=False)
    model = transformer_lm.TransformerLM(**sizes, scan=False, remat=False, dtype=np.dtype("float32"))
    tokens = np.arange(6, dtype=np.int32)[None]
    changed = np.where(np.arange(6) < 4, tokens, 15).astype(np.int32)
    params = jax.jit(model.init)(jax.random.key(0), tokens)
    apply = jax.jit(model.apply)
    same = np.isclose(apply(params, tokens), apply(params, changed)).all(axis=(0, 2))
    assert same.tolist() == [True] * 4 + [False] * 2


@pytest.mark.parametrize("name", family(["lm_full", "nnx_full"], slow=["lm_full"]))
def test_dropout_changes_with_the_step_only(name):
    step, state, batch = real_make(name)
    step = compiled(step)
    losses = [float(step({**state, "step": np.int32(i)}, batch)[1]["loss"]) for i in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


def test_text_is_python_source():
    assert text.library_source(1000).shape == (1000,)
    assert b"import" in text.library_source().tobytes()
    drawn = list(itertools.islice(transformer_lm.batches(batch=3, seq=5), 2))
    assert [b["tokens"].shape for b in drawn] == [(3, 6)] * 2 and drawn[0]["tokens"].dtype == np.int32
    assert not np.array_equal(drawn[0]["tokens"], drawn[1]["tokens"])
    assert next(text.batches(batch=2, seq=100, vocab=7))["tokens"].max() < 7


@pytest.mark.parametrize(
    ("module", "sizes", "said"),
    [
        (mlp, dict(dtype="float64"), "choose 'float32' or 'bfloat16'"),
        (transformer_lm, dict(optimizer="lion"), "adam, adamw, sgd"),
        (transformer_lm, dict(width=10, heads=4), "not a multiple"),
        (transformer_nnx, dict(width=10, heads=4), "not a multiple"),
        (lenet, dict(pool="median"), "average, max"),
        (lenet, dict(image=8), "at least 12"),
        (alexnet, dict(image=32), "at least 63"),
        (resnet, dict(depth=34), "'tiny', 18, 50"),
        (vgg, dict(depth=12), "11, 13, 16, 19"),
        (vgg, dict(image=31), "at least 32"),
        (inception_v3, dict(image=74), "at least 75"),
        (inception_v3, dict(image=150, aux=True), "at least 299"),
        (nasnet, dict(design="amoebanet"), "nasnet_a, pnasnet_5"),
        (nasnet, dict(image=2), "at least 3"),
        (nasnet, dict(width=6), "a multiple of 4"),
        (nasnet, dict(repeats=0), "at least 1"),
        (unet, dict(image=10), "a multiple of 4"),
        (unet, dict(width=6), "groups=0"),
        (gnmt, dict(layers=1), "at least 2"),
        (bert, dict(width=10, heads=4), "not a multiple"),
        (moe, dict(width=10, heads=4), "not a multiple"),
        (moe, dict(top=3), "choose 1 or 2"),
        (gpt3, dict(size="1T"), "125M, 350M"),
    ],
)
def test_wrong_sizes_say_what_is_right(module, sizes, said):
    with pytest.raises(ValueError, match=said):
        abstract_make(module, **sizes)
