"""google/flax, examples: the steps are the examples' own."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax

from foreign.registry import Made, case, floats, ints
from foreign.sources import load, plain, without_collectives

SOURCE = "google+flax"
EX = f"{SOURCE}/examples"
flax_case = functools.partial(case, family="flax", source=SOURCE, is_listed=True)


def config_of(**values):
    import ml_collections

    return ml_collections.ConfigDict(values)


def train_state(apply, params, tx):
    from flax.training import train_state

    return train_state.TrainState.create(apply_fn=apply, params=params, tx=tx)


@flax_case("flax_mnist_nnx")
def mnist() -> Made:
    """nnx: model, optimizer and metrics change in place; split and merged around their step."""
    from flax import nnx

    m = load(f"{EX}/mnist", "train")
    model = m.CNN(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.01, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    graph, state = nnx.split((model, optimizer, metrics, nnx.Rngs(0)))

    def train_step(state, batch):
        model, optimizer, metrics, rngs = nnx.merge(graph, state)
        plain(m.train_step)(model, optimizer, metrics, batch, rngs)
        return nnx.split((model, optimizer, metrics, rngs))[1], metrics.compute()

    return Made(train_step, (state, {"image": floats(32, 28, 28, 1), "label": ints(10, 32)}))


@flax_case("flax_imagenet_resnet18")
def imagenet() -> Made:
    import flax

    m = without_collectives(load(f"{EX}/imagenet", "train", "models", "input_pipeline"))
    linen = types.ModuleType("linen_without_axis_names")
    linen.__getattr__ = lambda name: getattr(flax.linen, name)
    linen.BatchNorm = lambda **k: flax.linen.BatchNorm(**{**k, "axis_name": None})
    m.models.nn = linen
    config = config_of(half_precision=False, momentum=0.9, warmup_epochs=5.0, num_epochs=100)
    rate = m.create_learning_rate_fn(config, 0.1, 100)
    net = m.models.ResNet18(num_classes=1000, num_filters=8, dtype=jnp.float32)
    state = m.create_train_state(jax.random.key(0), config, net, 32, rate)
    step = functools.partial(m.train_step, learning_rate_fn=rate)
    return Made(step, (state, {"image": floats(16, 32, 32, 3), "label": ints(1000, 16)}))


@flax_case("flax_lm1b")
def lm1b() -> Made:
    m = load(f"{EX}/lm1b", "train", "models", "input_pipeline", "utils", "temperature_sampler", "tokenizer")
    config = m.models.TransformerConfig(
        vocab_size=128, output_vocab_size=128, emb_dim=32, num_heads=4, num_layers=2, qkv_dim=32, mlp_dim=64, max_len=16
    )
    rate = m.create_learning_rate_schedule(0.0016, 1000)
    tx = optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)
    model = m.models.TransformerLM(config.replace(deterministic=True))
    state = m.utils.init_train_state(model, tx, config_of(per_device_batch_size=16, max_target_length=16), jax.random.key(0))
    state = m.utils.unbox_logicallypartioned_trainstate(state)

    def train_step(state, batch, rng):
        return m.train_step(state, batch, config, rate, 0.0, rng)

    return Made(train_step, (state, {"inputs": ints(128, 16, 16, low=1)}, jax.random.key(1)))


@flax_case("flax_wmt")
def wmt() -> Made:
    m = without_collectives(load(f"{EX}/wmt", "train", "models", "input_pipeline", "bleu", "decode", "tokenizer"))
    config = m.models.TransformerConfig(
        vocab_size=128, output_vocab_size=128, share_embeddings=True, logits_via_embedding=True, emb_dim=32, num_heads=4,
        num_layers=2, qkv_dim=32, mlp_dim=64, max_len=16,
    )  # fmt: skip
    rate = m.create_learning_rate_schedule(0.002, 1000)
    model, ones = m.models.Transformer(config.replace(deterministic=True)), jnp.ones((16, 16), jnp.float32)
    params = model.init(jax.random.key(0), ones, ones)["params"]
    tx = optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9)
    state = m.TrainState.create(apply_fn=model.apply, params=params, tx=tx, dynamic_scale=None)

    def train_step(state, batch, rng):
        return m.train_step(state, batch, config, rate, 0.1, rng)

    data = {"inputs": ints(128, 16, 16, low=1), "targets": ints(128, 16, 16, low=1)}
    data["targets"][:, -5:] = 0
    return Made(train_step, (state, data, jax.random.key(1)))


@flax_case("flax_nlp_seq")
def nlp_seq() -> Made:
    m = without_collectives(load(f"{EX}/nlp_seq", "train", "models", "input_pipeline"))
    config = m.models.TransformerConfig(
        vocab_size=128, output_vocab_size=32, max_len=16, emb_dim=32, num_heads=4, num_layers=2, qkv_dim=32, mlp_dim=64
    )
    model = m.models.Transformer(config)
    params = model.init(jax.random.key(0), inputs=jnp.ones((16, 16), jnp.float32), train=False)["params"]
    rate = m.create_learning_rate_scheduler(base_learning_rate=0.05)
    state = train_state(model.apply, params, optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1))

    def train_step(state, batch, rng):
        return m.train_step(state, batch, model, rate, rng)

    data = {"inputs": ints(128, 16, 16, low=1), "targets": ints(32, 16, 16, low=1)}
    return Made(train_step, (state, data, jax.random.key(1)))


@flax_case("flax_seq2seq")
def seq2seq() -> Made:
    m = load(f"{EX}/seq2seq", "train", "models", "input_pipeline")
    from absl import flags

    flags.FLAGS.mark_as_parsed()
    flags.FLAGS.hidden_size = 32
    table = m.CTable("0123456789+= ", 3)
    state = m.get_train_state(jax.random.key(0), table)
    inner = plain(m.train_step)

    def train_step(state, batch, rng):
        return inner(state, batch, rng, table.eos_id)

    return Made(train_step, (state, table.get_batch(16), jax.random.key(0)))


@flax_case("flax_vae")
def vae() -> Made:
    m = load(f"{EX}/vae", "train", "models", "input_pipeline", "utils")
    model = m.models.model(20)
    params = model.init(jax.random.key(0), jnp.ones((32, 784)), jax.random.key(1))["params"]
    state = train_state(model.apply, params, optax.adam(1e-3))

    def step(state, batch, rng):
        return m.train_step(state, batch, rng, 20)

    from foreign.registry import WHOLE

    return Made(step, (state, (floats(32, 784) > 0).astype(np.float32), jax.random.key(2)), {0: WHOLE})


@flax_case("flax_sst2")
def sst2() -> Made:
    m = load(f"{EX}/sst2", "train", "models", "input_pipeline", "vocabulary")
    config = config_of(
        embedding_size=32, hidden_size=32, vocab_size=128, output_size=1, dropout_rate=0.5, word_dropout_rate=0.1, unk_idx=1,
        learning_rate=0.1, momentum=0.9, weight_decay=3e-6,
    )  # fmt: skip
    state = m.create_train_state(jax.random.key(0), config, m.model_from_config(config))
    data = {"token_ids": ints(128, 16, 12), "length": ints(12, 16, low=3), "label": ints(2, 16).astype(np.float32)}
    return Made(m.train_step, (state, data, {"dropout": jax.random.key(1), "word_dropout": jax.random.key(2)}))


@flax_case("flax_ogbg_molpcba", packages=["jraph"])
def ogbg() -> Made:
    import jraph

    m = load(f"{EX}/ogbg_molpcba", "train", "models", "input_pipeline", stand_ins=["ogb"])
    config = config_of(
        model="GraphConvNet", latent_size=32, num_mlp_layers=2, message_passing_steps=2, num_classes=128, dropout_rate=0.1,
        skip_connections=True, layer_norm=True, use_edge_model=True, optimizer="adam", learning_rate=1e-3,
    )  # fmt: skip
    graphs, nodes, edges = 8, 64, 128
    batch = jraph.GraphsTuple(
        nodes=floats(nodes, 9), edges=floats(edges, 3), senders=ints(nodes, edges), receivers=ints(nodes, edges),
        globals=(floats(graphs, 128) > 0).astype(np.float32), n_node=np.full(graphs, nodes // graphs, np.int32),
        n_edge=np.full(graphs, edges // graphs, np.int32),
    )  # fmt: skip
    params = jax.jit(m.create_model(config, deterministic=True).init)(jax.random.key(0), m.replace_globals(batch))
    state = train_state(m.create_model(config, deterministic=False).apply, params, m.create_optimizer(config))
    return Made(plain(m.train_step), (state, batch, {"dropout": jax.random.key(1)}))


@flax_case("flax_ppo_atari")
def ppo() -> Made:
    """`train_step` is a Python loop over minibatches: two updates in one call."""
    m = load(f"{EX}/ppo", "ppo_lib", "agent", "models", "env_utils", "test_episodes", "seed_rl_atari_preprocessing")
    model = m.models.ActorCritic(num_outputs=4)
    params = model.init(jax.random.key(0), jnp.ones((1, 84, 84, 4)))["params"]
    state = train_state(model.apply, params, optax.adam(2.5e-4))
    inner = plain(m.train_step)

    def train_step(state, trajectories):
        return inner(state, trajectories, 8, clip_param=0.1, vf_coeff=0.5, entropy_coeff=0.01)

    frames = np.abs(floats(16, 84, 84, 4)) * 60
    return Made(train_step, (state, (frames, ints(4, 16), -np.abs(floats(16)), floats(16), floats(16))))


@case("flax_gemma", "flax", source=SOURCE)
def gemma() -> Made:
    """Their nnx Gemma (`examples/gemma/transformer.py`) under their `train_step`'s loss."""
    from flax import nnx

    m = load(
        f"{EX}/gemma",
        "transformer",
        "modules",
        "layers",
        "helpers",
        "positional_embeddings",
        "sow_lib",
        "params",
        "transformer_cfg",
    )
    config = m.TransformerConfig(
        num_layers=2, num_embed=128, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8, num_kv_heads=1,
        final_logit_softcap=None, use_post_attn_norm=False, use_post_ffw_norm=False,
        attention_types=(m.modules.AttentionType.GLOBAL,) * 2,
    )  # fmt: skip
    model = m.Transformer(config, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def train_step(state, batch):
        model, optimizer = nnx.merge(graph, state)

        def loss_fn(model):
            tokens = batch["inputs"]
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            mask = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))[None].repeat(tokens.shape[0], 0)
            logits, _ = model(tokens, positions=positions, attention_mask=mask, cache=None)
            weights = (batch["targets"] > 0).astype(jnp.float32)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return (loss * weights).sum() / weights.sum()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return nnx.split((model, optimizer))[1], loss

    return Made(train_step, (state, {"inputs": ints(128, 16, 16), "targets": ints(128, 16, 16)}))
