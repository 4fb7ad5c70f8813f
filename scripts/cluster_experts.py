"""What an expert would write for each model of cluster_measure.py, in plain JAX: `shard_map`, and every collective by hand.

One convention throughout: activations between layers are split by batch, each device's loss is that of its own samples over
the size of the whole batch, and devices exchange by all-gather and reduce-scatter only, which are each other's transpose. So
`jax.grad` gives the gradient of the sum of all losses; parameters that are replicated need one sum of their gradients, at the end.

* data parallelism: everything replicated, gradients summed once.
* fully sharded (ZeRO-3): parameters in shards, gathered by hand; the transpose reduces and scatters the gradients.
* AlexNet: "one weird trick" (Krizhevsky, 2014): convolutions by batch; dense layers by features, columns then rows.
* LSTM: vocabulary-parallel embedding and softmax (Shoeybi et al., "Megatron-LM", 2019, section 3), the cell by batch.
* Transformer: Megatron's pairs, columns then rows, in attention and mlp, with the gathers and scatters of Korthikanti et al.
  ("Reducing Activation Recomputation", 2022) around them; vocabulary-parallel embedding and softmax.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models import alexnet, resnet, rnnlm, transformer_lm
from models.training import get_optimizer

AXIS = "h"
Settings = Mapping[str, Any]
Loss = Callable[[Any, Any, Any], tuple[jax.Array, Any]]  # (params, other state, local batch) -> (local loss, other state)


class Expert(NamedTuple):
    """A jitted `step(state, batch) -> (state, metrics)`, its global arguments, and how they are laid out."""

    step: Callable[..., Any]
    arguments: tuple[Any, Any]
    shardings: tuple[Any, Any]


class Task(NamedTuple):
    """A model, its data, and its optimizer."""

    params: Any
    other: Any  # state beside the parameters: batch statistics
    batch: Any
    optimizer: optax.GradientTransformation
    loss: Loss  # of one device's batch, with whole parameters; a mean over that batch


def task_of(name: str, settings: Settings) -> Task:
    """The task of cluster_measure.py with the same parameters, data and optimizer."""
    module = {"alexnet": alexnet, "lstm": rnnlm, "transformer": transformer_lm, "resnet": resnet}[name]
    _, state, batch = module.make(**settings)
    s = {k: v.default for k, v in inspect.signature(module.make).parameters.items()} | dict(settings)
    if name == "alexnet":
        net = alexnet.AlexNet(s["classes"], s["width"], 0.0)
        optimizer = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(s["learning_rate"], momentum=0.9))
    elif name == "resnet":
        block, stages = resnet.DEPTHS[s["depth"]]
        net = resnet.ResNet(block, stages, s["width"], s["classes"], jnp.float32)
        optimizer = optax.sgd(s["learning_rate"], momentum=0.9)
    else:
        net = _language_model(name, s)
        optimizer = get_optimizer(s["optimizer"], s["learning_rate"])

    def loss(params: Any, other: Any, batch: Any) -> tuple[jax.Array, Any]:
        if name == "resnet":
            logits, changed = net.apply({"params": params, "batch_stats": other}, batch["image"], mutable=["batch_stats"])
            return _cross_entropy(logits, batch["label"]).mean(), changed["batch_stats"]
        inputs, labels = (batch["image"], batch["label"]) if name == "alexnet" else _shifted(batch["tokens"])
        return _cross_entropy(net.apply({"params": params}, inputs), labels).mean(), other

    return Task(state["params"], state.get("batch_stats", {}), batch, optimizer, loss)


def _language_model(name: str, s: Settings) -> nn.Module:
    if name == "lstm":
        return rnnlm.RNNLM(s["hidden"], s["layers"], s["vocab"], True, jnp.float32)
    return transformer_lm.TransformerLM(
        s["seq"], s["width"], s["layers"], s["heads"], s["vocab"], s["mlp_ratio"], False, False, 0.0, False, jnp.float32
    )


def _shifted(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    return tokens[:, :-1], tokens[:, 1:]


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def by_hand(task: Task, loss: Loss, specs: Any) -> Expert:
    """A step from a loss that sees one device's parts: of the parameters as `specs` say, of the batch its samples.

    `loss` gives a device's part of the whole batch's mean.
    """
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    optimizer = task.optimizer

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        (value, other), grads = jax.value_and_grad(loss, has_aux=True)(state["params"], state["other"], batch)
        whole = jax.tree.map(lambda s: AXIS not in s, specs, is_leaf=lambda s: isinstance(s, P))
        grads = jax.tree.map(lambda g, w: jax.lax.psum(g, AXIS) if w else g, grads, whole)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        other = jax.tree.map(lambda x: jax.lax.pmean(x, AXIS), other)
        return {"params": params, "opt_state": opt_state, "other": other}, {"loss": jax.lax.psum(value, AXIS)}

    opt_state = optimizer.init(task.params)
    like = optax.tree_utils.tree_map_params(optimizer, lambda _, s: s, opt_state, specs, transform_non_params=lambda _: P())
    state = {"params": task.params, "opt_state": opt_state, "other": task.other}
    state_specs = {"params": specs, "opt_state": like, "other": jax.tree.map(lambda _: P(), task.other)}
    batch_specs = jax.tree.map(lambda _: P(AXIS), task.batch)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(state_specs, batch_specs), out_specs=(state_specs, {"loss": P()}), check_vma=False
    )
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), (state_specs, batch_specs), is_leaf=lambda s: isinstance(s, P))
    return Expert(jax.jit(mapped, donate_argnums=0), (state, task.batch), shardings)


def gathered(x: jax.Array, dim: int = 0) -> jax.Array:
    return jax.lax.all_gather(x, AXIS, axis=dim, tiled=True)


def scattered(x: jax.Array, dim: int = 0) -> jax.Array:
    return jax.lax.psum_scatter(x, AXIS, scatter_dimension=dim, tiled=True)


def data_parallel(task: Task) -> Expert:
    def loss(params: Any, other: Any, batch: Any) -> tuple[jax.Array, Any]:
        value, other = task.loss(params, other, batch)
        return value / jax.device_count(), other

    return by_hand(task, loss, jax.tree.map(lambda _: P(), task.params))


def fully_sharded(task: Task) -> Expert:
    def spec(x: jax.Array) -> P:
        dim = next((d for d, size in enumerate(x.shape) if size % jax.device_count() == 0), None)
        return P() if dim is None else P(*[None] * dim, AXIS)

    specs = jax.tree.map(spec, task.params)

    def loss(params: Any, other: Any, batch: Any) -> tuple[jax.Array, Any]:
        whole = jax.tree.map(lambda x, s: gathered(x, len(s) - 1) if AXIS in s else x, params, specs)
        value, other = task.loss(whole, other, batch)
        return value / jax.device_count(), other

    return by_hand(task, loss, specs)


def one_weird_trick(task: Task) -> Expert:
    specs = jax.tree.map(lambda _: P(), task.params)
    specs |= {"dense1": {"kernel": P(None, AXIS), "bias": P(AXIS)}, "dense2": {"kernel": P(AXIS), "bias": P(AXIS)}}
    specs |= {"head": {"kernel": P(AXIS), "bias": P()}}

    def loss(params: Any, other: Any, batch: Any) -> tuple[jax.Array, Any]:
        def conv(x: jax.Array, name: str, *, stride: int = 1) -> jax.Array:
            kernel = params[name]["kernel"]
            pad = 2 if kernel.shape[0] == 11 else kernel.shape[0] // 2
            dims = ("NHWC", "HWIO", "NHWC")
            y = jax.lax.conv_general_dilated(x, kernel, (stride, stride), [(pad, pad)] * 2, dimension_numbers=dims)
            return nn.relu(y + params[name]["bias"])

        def pool(x: jax.Array) -> jax.Array:
            return nn.max_pool(x, (3, 3), strides=(2, 2))

        x = pool(conv(pool(conv(batch["image"], "conv1", stride=4)), "conv2"))
        x = pool(conv(conv(conv(x, "conv3"), "conv4"), "conv5"))
        x = gathered(x.reshape(len(x), -1))  # all samples, to meet a part of the features
        x = nn.relu(x @ params["dense1"]["kernel"] + params["dense1"]["bias"])
        x = nn.relu(scattered(x @ params["dense2"]["kernel"], 1) + params["dense2"]["bias"])
        logits = scattered(x @ params["head"]["kernel"]) + params["head"]["bias"]  # own samples again
        return _cross_entropy(logits, batch["label"]).mean() / jax.device_count(), other

    return by_hand(task, loss, specs)


def vocabulary_lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Embeddings [b, T, W] of a device's own tokens [b, T], from a table whose rows are split."""
    index = gathered(tokens) - jax.lax.axis_index(AXIS) * len(table)
    mine = (index >= 0) & (index < len(table))
    return scattered(jnp.where(mine[..., None], table[jnp.where(mine, index, 0)], 0.0))


def vocabulary_loss(x: jax.Array, kernel: jax.Array, bias: jax.Array | float, labels: jax.Array) -> jax.Array:
    """Cross-entropy [b, T] of a device's own samples, the head's columns being split: no logits are exchanged."""
    logits = gathered(x) @ kernel + bias  # all samples, a part of the words
    index = gathered(labels) - jax.lax.axis_index(AXIS) * kernel.shape[1]
    mine = (index >= 0) & (index < kernel.shape[1])
    largest = jax.lax.pmax(jax.lax.stop_gradient(logits.max(-1)), AXIS)
    picked = jnp.take_along_axis(logits, jnp.where(mine, index, 0)[..., None], -1)[..., 0]
    total = scattered(jnp.exp(logits - largest[..., None]).sum(-1))
    own = jax.lax.dynamic_slice_in_dim(largest, jax.lax.axis_index(AXIS) * len(x), len(x))
    return jnp.log(total) + own - scattered(jnp.where(mine, picked, 0.0))


def vocabulary_parallel_lstm(task: Task) -> Expert:
    specs = jax.tree.map(lambda _: P(), task.params)
    specs |= {"embed": {"embedding": P(AXIS)}, "head": {"kernel": P(None, AXIS), "bias": P(AXIS)}}

    def loss(params: Any, other: Any, batch: Any) -> tuple[jax.Array, Any]:
        inputs, labels = _shifted(batch["tokens"])
        x = vocabulary_lookup(params["embed"]["embedding"], inputs)
        for i in range(len(params["rnn"])):
            x = _lstm(params["rnn"][f"lstm{i}"], x)
        each = vocabulary_loss(x, params["head"]["kernel"], params["head"]["bias"], labels)
        return each.mean() / jax.device_count(), other

    return by_hand(task, loss, specs)


def _lstm(p: Any, x: jax.Array) -> jax.Array:
    """[b, T, W] -> [b, T, H]; the products with the inputs of all steps are one."""
    gates = jnp.einsum("btw,wgh->tbgh", x, p["input"]["kernel"]) + p["bias"]

    def cell(carry: Any, gates: jax.Array) -> Any:
        output, memory = carry
        write, keep, candidate, read = jnp.unstack(gates + jnp.einsum("bk,kgh->bgh", output, p["hidden"]["kernel"]), axis=1)
        memory = nn.sigmoid(write) * nn.tanh(candidate) + nn.sigmoid(keep) * memory
        output = nn.sigmoid(read) * nn.tanh(memory)
        return (output, memory), output

    zeros = jnp.zeros(gates.shape[1:2] + gates.shape[3:])
    return jax.lax.scan(cell, (zeros, zeros), gates)[1].swapaxes(0, 1)


def megatron(task: Task) -> Expert:
    columns = {"kernel": P(None, AXIS), "bias": P(AXIS)}
    block = {
        "attn": {"query": columns, "key": columns, "value": columns, "out": {"kernel": P(AXIS), "bias": P()}},
        "mlp": {"up": columns, "down": {"kernel": P(AXIS), "bias": P()}},
    }
    specs = jax.tree.map(lambda _: P(), task.params)
    specs |= {"embed": {"embedding": P(AXIS)}, "head": {"kernel": P(None, AXIS)}}
    specs |= {name: specs[name] | block for name in specs if name.startswith("blk")}

    def norm(p: Any, x: jax.Array) -> jax.Array:
        return nn.LayerNorm().apply({"params": p}, x)

    def attention(p: Any, x: jax.Array) -> jax.Array:  # [b, S, W] -> the same; heads are split
        x = gathered(x)
        q, k, v = (jnp.einsum("bsw,whd->bshd", x, p[n]["kernel"]) + p[n]["bias"] for n in ("query", "key", "value"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(jnp.where(causal, scores, transformer_lm.MASKED)), v)
        return scattered(jnp.einsum("bqhd,hdw->bqw", mixed, p["out"]["kernel"])) + p["out"]["bias"]

    def feed_forward(p: Any, x: jax.Array) -> jax.Array:
        hidden = nn.gelu(gathered(x) @ p["up"]["kernel"] + p["up"]["bias"])
        return scattered(hidden @ p["down"]["kernel"]) + p["down"]["bias"]

    def loss(params: Any, other: Any, batch: Any) -> tuple[jax.Array, Any]:
        inputs, labels = _shifted(batch["tokens"])
        x = vocabulary_lookup(params["embed"]["embedding"], inputs) + params["position"]
        for name in sorted((n for n in params if n.startswith("blk")), key=lambda n: int(n[3:])):
            p = params[name]
            x = x + attention(p["attn"], norm(p["norm1"], x))
            x = x + feed_forward(p["mlp"], norm(p["norm2"], x))
        each = vocabulary_loss(norm(params["norm"], x), params["head"]["kernel"], 0.0, labels)
        return each.mean() / jax.device_count(), other

    return by_hand(task, loss, specs)


def _experts(name: str, **special: Callable[[Task], Expert]) -> dict[str, Callable[[Settings], Expert]]:
    every = {"data parallelism": data_parallel, "fully sharded": fully_sharded} | special
    return {f"hand: {label}": lambda settings, make=make: make(task_of(name, settings)) for label, make in every.items()}


EXPERTS: dict[str, dict[str, Callable[[Settings], Expert]]] = {
    "alexnet": _experts("alexnet", **{"one weird trick": one_weird_trick}),
    "lstm": _experts("lstm", **{"vocabulary parallel": vocabulary_parallel_lstm}),
    "transformer": _experts("transformer", **{"Megatron": megatron}),
    "resnet": _experts("resnet"),
}
