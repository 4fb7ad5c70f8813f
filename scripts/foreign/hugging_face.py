"""Hugging Face transformers' Flax models, under the step of its examples/flax: `dropout_rng` in the state, masked losses.

Random weights, tiny sizes. Language, speech, vision, contrastive pairs, dense retrieval, two towers, distillation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from foreign.registry import Made, case, floats, ints

hf_case = functools.partial(case, packages=["transformers"])
VOCAB, SEQ, BATCH = 128, 16, 16
TINY = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=VOCAB)


def transformers() -> Any:
    """The package, with `jnp.clip`'s old argument names, which its T5 and wav2vec2 use."""
    import transformers as t

    clip = jnp.clip
    jnp.clip = lambda x, min=None, max=None, *, a_min=None, a_max=None: clip(x, min if a_min is None else a_min,
                                                                            max if a_max is None else a_max)  # fmt: skip
    return t


def built(kind: Any, config: Any, **options: Any) -> tuple[Any, Any]:
    """The model and its parameters."""
    model = kind(config, _do_init=False, **options)
    return model, model.init_weights(jax.random.PRNGKey(0), model.input_shape)


def trainer(loss_fn: Callable[..., Any], params: Any, data: dict[str, np.ndarray], tx: Any = None) -> Made:
    """`train_step` of the examples: loss_fn(params, batch, dropout_rng) -> loss."""
    import flax
    from flax.training import train_state

    @flax.struct.dataclass
    class TrainState(train_state.TrainState):
        dropout_rng: jax.Array

    state = TrainState.create(apply_fn=None, params=params, tx=tx or optax.adamw(1e-3), dropout_rng=jax.random.PRNGKey(1))

    def train_step(state, batch):
        dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch, dropout_rng)
        return state.apply_gradients(grads=grads, dropout_rng=new_dropout_rng), {"loss": loss}

    return Made(train_step, (state, data))


def token_loss(logits, labels, weights=None):
    loss = optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1]))
    return loss.mean() if weights is None else (loss * weights).sum() / weights.sum()


def causal(kind: Any, config: Any) -> Made:
    model, params = built(kind, config)

    def loss_fn(params, batch, rng):
        logits = model(**batch, params=params, dropout_rng=rng, train=True)[0]
        mask = batch["attention_mask"][:, 1:]
        return token_loss(logits[:, :-1], batch["input_ids"][:, 1:], mask)

    mask = np.ones((BATCH, SEQ), np.int32)
    mask[:, -3:] = 0
    return trainer(loss_fn, params, {"input_ids": ints(VOCAB, BATCH, SEQ), "attention_mask": mask})


@hf_case("hf_gpt2", "language", is_listed=True)
def gpt2() -> Made:
    t = transformers()
    return causal(t.FlaxGPT2LMHeadModel, t.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=VOCAB, n_positions=SEQ))


@hf_case("hf_llama", "language", is_listed=True)
def llama() -> Made:
    t = transformers()
    return causal(t.FlaxLlamaForCausalLM, t.LlamaConfig(**TINY, num_key_value_heads=2, max_position_embeddings=SEQ))


@hf_case("hf_gemma", "language")
def gemma() -> Made:
    t = transformers()
    config = t.GemmaConfig(**TINY, num_key_value_heads=1, head_dim=8, max_position_embeddings=SEQ)
    return causal(t.FlaxGemmaForCausalLM, config)


@hf_case("hf_gptj_rotary", "language")
def gptj() -> Made:
    t = transformers()
    return causal(
        t.FlaxGPTJForCausalLM, t.GPTJConfig(n_layer=2, n_embd=32, n_head=4, vocab_size=VOCAB, n_positions=SEQ, rotary_dim=4)
    )


@hf_case("hf_gpt_neo_local", "language")
def gpt_neo() -> Made:
    t = transformers()
    config = t.GPTNeoConfig(hidden_size=32, num_layers=2, num_heads=4, vocab_size=VOCAB, max_position_embeddings=SEQ, window_size=4,
                            attention_types=[[["global", "local"], 1]])  # fmt: skip
    return causal(t.FlaxGPTNeoForCausalLM, config)


def masked_lm(kind: Any, config: Any, **extra: np.ndarray) -> Made:
    model, params = built(kind, config)

    def loss_fn(params, batch, rng):
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        logits = model(**inputs, params=params, dropout_rng=rng, train=True)[0]
        return token_loss(logits, batch["labels"], (batch["labels"] > 3).astype(jnp.float32))

    data = {
        "input_ids": ints(VOCAB, BATCH, SEQ),
        "attention_mask": np.ones((BATCH, SEQ), np.int32),
        "labels": ints(VOCAB, BATCH, SEQ),
    }
    return trainer(loss_fn, params, data | extra)


@hf_case("hf_bert", "language", is_listed=True)
def bert() -> Made:
    t = transformers()
    types = np.zeros((BATCH, SEQ), np.int32)
    return masked_lm(t.FlaxBertForMaskedLM, t.BertConfig(**TINY, max_position_embeddings=SEQ), token_type_ids=types)


@hf_case("hf_roformer", "language")
def roformer() -> Made:
    t = transformers()
    return masked_lm(t.FlaxRoFormerForMaskedLM, t.RoFormerConfig(**TINY, embedding_size=32, max_position_embeddings=SEQ))


@hf_case("hf_electra_discriminator", "language")
def electra() -> Made:
    t = transformers()
    model, params = built(t.FlaxElectraForPreTraining, t.ElectraConfig(**TINY, embedding_size=16, max_position_embeddings=SEQ))

    def loss_fn(params, batch, rng):
        logits = model(batch["input_ids"], batch["attention_mask"], params=params, dropout_rng=rng, train=True)[0]
        return optax.sigmoid_binary_cross_entropy(logits, batch["replaced"]).mean()

    data = {"input_ids": ints(VOCAB, BATCH, SEQ), "attention_mask": np.ones((BATCH, SEQ), np.int32),
            "replaced": ints(2, BATCH, SEQ).astype(np.float32)}  # fmt: skip
    return trainer(loss_fn, params, data)


@hf_case("hf_big_bird_sparse", "language")
def big_bird() -> Made:
    """Block-sparse attention: gathers of random blocks, drawn when it is traced."""
    t = transformers()
    config = t.BigBirdConfig(**TINY, max_position_embeddings=64, block_size=4, num_random_blocks=1, attention_type="block_sparse")
    model, params = built(t.FlaxBigBirdForMaskedLM, config, input_shape=(1, 64))

    def loss_fn(params, batch, rng):
        rng, indices_rng = jax.random.split(rng)
        logits = model(
            batch["input_ids"], batch["attention_mask"], params=params, dropout_rng=rng, indices_rng=indices_rng, train=True
        )[0]
        return token_loss(logits, batch["labels"])

    data = {"input_ids": ints(VOCAB, 8, 64), "attention_mask": np.ones((8, 64), np.int32), "labels": ints(VOCAB, 8, 64)}
    return trainer(loss_fn, params, data)


def seq2seq(
    kind: Any, config: Any, name: str = "input_ids", inputs: np.ndarray | None = None, tx: Any = None, **options: Any
) -> Made:
    """Label smoothing as in examples/flax/summarization."""
    model, params = built(kind, config, **options)

    def loss_fn(params, batch, rng):
        labels = batch["labels"]
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        logits = model(**inputs, params=params, dropout_rng=rng, train=True)[0]
        soft = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), 0.1)
        mask = (labels > 0).astype(jnp.float32)
        return (optax.softmax_cross_entropy(logits, soft) * mask).sum() / mask.sum()

    data = {name: ints(VOCAB, BATCH, SEQ) if inputs is None else inputs, "decoder_input_ids": ints(VOCAB, BATCH, SEQ),
            "labels": ints(VOCAB, BATCH, SEQ)}  # fmt: skip
    if inputs is None:
        data["attention_mask"] = np.ones((BATCH, SEQ), np.int32)
    return trainer(loss_fn, params, data, tx)


@hf_case("hf_t5_adafactor", "language", is_listed=True)
def t5() -> Made:
    t = transformers()
    config = t.T5Config(num_layers=2, d_model=32, num_heads=4, d_kv=8, d_ff=64, vocab_size=VOCAB)
    return seq2seq(t.FlaxT5ForConditionalGeneration, config, tx=optax.adafactor(1e-3))


@hf_case("hf_bart", "language")
def bart() -> Made:
    t = transformers()
    config = t.BartConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, vocab_size=VOCAB, max_position_embeddings=SEQ,
    )  # fmt: skip
    return seq2seq(t.FlaxBartForConditionalGeneration, config)


@hf_case("hf_long_t5_local", "language")
def long_t5() -> Made:
    t = transformers()
    config = t.LongT5Config(num_layers=2, d_model=32, num_heads=4, d_kv=8, d_ff=64, vocab_size=VOCAB, local_radius=3)
    return seq2seq(t.FlaxLongT5ForConditionalGeneration, config)


@hf_case("hf_whisper", "speech", is_listed=True)
def whisper() -> Made:
    t = transformers()
    config = t.WhisperConfig(
        encoder_layers=2, decoder_layers=2, d_model=32, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, vocab_size=VOCAB, max_source_positions=32, max_target_positions=SEQ, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=[1], suppress_tokens=[], num_mel_bins=20,
    )  # fmt: skip
    speech = floats(8, 20, 64)
    model = seq2seq(t.FlaxWhisperForConditionalGeneration, config, "input_features", speech, input_shape=(1, 20, 64))
    data = {"input_features": speech, "decoder_input_ids": ints(VOCAB, 8, SEQ), "labels": ints(VOCAB, 8, SEQ)}
    return model._replace(args=(model.args[0], data))


def wav2vec2_config(t: Any) -> Any:
    return t.Wav2Vec2Config(
        **TINY, conv_dim=(16, 16, 16), conv_stride=(5, 4, 2), conv_kernel=(10, 4, 2), num_feat_extract_layers=3,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, feat_extract_norm="layer", do_stable_layer_norm=True,
        num_codevectors_per_group=8, num_codevector_groups=2, codevector_dim=16, proj_codevector_dim=16, num_negatives=4,
    )  # fmt: skip


@hf_case("hf_wav2vec2_ctc", "speech")
def wav2vec2_ctc() -> Made:
    t = transformers()
    model, params = built(t.FlaxWav2Vec2ForCTC, wav2vec2_config(t), input_shape=(1, 800))

    def loss_fn(params, batch, rng):
        logits = model(batch["input_values"], params=params, dropout_rng=rng, train=True)[0]
        padding = jnp.zeros(logits.shape[:2])
        return optax.ctc_loss(logits, padding, batch["labels"], batch["label_paddings"]).mean()

    data = {"input_values": floats(8, 800), "labels": ints(VOCAB, 8, 6, low=1), "label_paddings": np.zeros((8, 6), np.float32)}
    return trainer(loss_fn, params, data)


@hf_case("hf_wav2vec2_pretrain", "speech")
def wav2vec2_pretrain() -> Made:
    """Contrastive loss against sampled negatives and a Gumbel quantiser, as in its research project's `run_wav2vec2_pretrain`."""
    t = transformers()
    model, params = built(t.FlaxWav2Vec2ForPreTraining, wav2vec2_config(t), input_shape=(1, 800))
    frames = int(model._get_feat_extract_output_lengths(800))

    def loss_fn(params, batch, rng):
        dropout, gumbel = jax.random.split(rng)
        out = model(batch["input_values"], mask_time_indices=batch["mask"], gumbel_temperature=1.0, params=params,
                    dropout_rng=dropout, gumbel_rng=gumbel, train=True)  # fmt: skip
        quantized, projected = out.projected_quantized_states, out.projected_states
        negatives = jnp.take(quantized.reshape(-1, quantized.shape[-1]), batch["negatives"], axis=0)
        targets = jnp.concatenate([quantized[None], negatives.transpose(2, 0, 1, 3)])
        logits = optax.cosine_similarity(projected, targets, epsilon=1e-8) / 0.1
        loss = optax.softmax_cross_entropy_with_integer_labels(logits.transpose(1, 2, 0), jnp.zeros(logits.shape[1:], jnp.int32))
        mask = batch["mask"].astype(jnp.float32)
        return (loss * mask).sum() / mask.sum() - 0.1 * out.codevector_perplexity / 16

    data = {"input_values": floats(8, 800), "mask": floats(8, frames) > 0, "negatives": ints(8 * frames, 8, frames, 4)}
    return trainer(loss_fn, params, data)


@hf_case("hf_clip_contrastive", "contrastive")
def clip() -> Made:
    """Pairs of images and texts; the logit scale is a trained scalar."""
    t = transformers()
    text = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCAB,
                max_position_embeddings=SEQ, bos_token_id=0, eos_token_id=1)  # fmt: skip
    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8)
    config = t.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    model, params = built(t.FlaxCLIPModel, config)

    def loss_fn(params, batch, rng):
        logits = model(**batch, params=params, dropout_rng=rng, train=True)[0]
        labels = jnp.arange(logits.shape[0])
        both = [optax.softmax_cross_entropy_with_integer_labels(x, labels).mean() for x in (logits, logits.T)]
        return sum(both) / 2

    mask = np.ones((BATCH, SEQ), np.int32)
    return trainer(
        loss_fn, params, {"input_ids": ints(VOCAB, BATCH, SEQ), "pixel_values": floats(BATCH, 3, 16, 16), "attention_mask": mask}
    )


@hf_case("hf_dense_retrieval", "retrieval")
def retrieval() -> Made:
    """One BERT encodes queries and passages; every other passage of the batch is a negative."""
    t = transformers()
    model, params = built(t.FlaxBertModel, t.BertConfig(**TINY, max_position_embeddings=SEQ))

    def loss_fn(params, batch, rng):
        query_rng, passage_rng = jax.random.split(rng)
        queries = model(batch["queries"], params=params, dropout_rng=query_rng, train=True)[0][:, 0]
        passages = model(batch["passages"], params=params, dropout_rng=passage_rng, train=True)[0][:, 0]
        return token_loss(queries @ passages.T, jnp.arange(queries.shape[0]))

    return trainer(loss_fn, params, {"queries": ints(VOCAB, BATCH, SEQ), "passages": ints(VOCAB, BATCH, SEQ)})


@hf_case("hf_distillation", "language")
def distillation() -> Made:
    """A student learns a frozen teacher's distribution; the teacher's weights are an argument of the step."""
    t = transformers()
    size = dict(n_embd=32, n_head=4, vocab_size=VOCAB, n_positions=SEQ)
    teacher, teacher_params = built(t.FlaxGPT2LMHeadModel, t.GPT2Config(n_layer=2, **size))
    student, params = built(t.FlaxGPT2LMHeadModel, t.GPT2Config(n_layer=1, **size))
    made = trainer(lambda params, batch, rng: optax.losses.kl_divergence(
        jax.nn.log_softmax(student(batch["input_ids"], params=params, dropout_rng=rng, train=True)[0]),
        jax.nn.softmax(teacher(batch["input_ids"], params=batch["teacher"])[0]),
    ).mean(), params, {"input_ids": ints(VOCAB, BATCH, SEQ), "teacher": teacher_params})  # fmt: skip
    return made


def classifier(kind: Any, config: Any, size: int = 16, key: str = "dropout_rng") -> Made:
    model, params = built(kind, config)

    def loss_fn(params, batch, rng):
        logits = model(batch["pixel_values"], params=params, train=True, **{key: rng})[0]
        return token_loss(logits, batch["labels"])

    return trainer(loss_fn, params, {"pixel_values": floats(BATCH, 3, size, size), "labels": ints(10, BATCH)})


@hf_case("hf_vit", "vision", is_listed=True)
def vit() -> Made:
    t = transformers()
    sizes = {k: v for k, v in TINY.items() if k != "vocab_size"}
    return classifier(t.FlaxViTForImageClassification, t.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=10))


@hf_case("hf_beit_relative_bias", "vision")
def beit() -> Made:
    t = transformers()
    config = t.BeitConfig(**TINY, image_size=16, patch_size=4, num_labels=10, use_relative_position_bias=True, out_indices=[0, 1])
    return classifier(t.FlaxBeitForImageClassification, config)
