"""Fine-tuning a Flax model of transformers on sentences of different lengths. Two lines change: (1), (2).

    python examples/hugging_face.py

The model is a small GPT-2 with random weights, so that nothing is downloaded; the real thing is
`model, params = FlaxGPT2LMHeadModel.from_pretrained("gpt2", _do_init=False)`.
Sentences are counted sequences, padded to one length; the loss leaves the padding out.
"""

import jax
import numpy as np
import optax
import tyro
from flax.training.train_state import TrainState
from transformers import FlaxGPT2LMHeadModel, GPT2Config

from soapjax import soap_shard  # (1)

VOCABULARY, LENGTH = 64, 32


def sentences(seed, batch):
    """Each counts up from somewhere in steps of one to four; `attention_mask` is 0 on the padding."""
    rng = np.random.default_rng(seed)
    start, stride = rng.integers(0, VOCABULARY, (batch, 1)), rng.integers(1, 5, (batch, 1))
    mask = np.arange(LENGTH) < rng.integers(LENGTH // 2, LENGTH + 1, (batch, 1))
    ids = (start + stride * np.arange(LENGTH)) % VOCABULARY
    return {"input_ids": np.where(mask, ids, 0).astype(np.int32), "attention_mask": mask.astype(np.int32)}


def decayed(params):
    """Weight decay for matrices, not for biases and the scales of norms."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def train_step(state, batch, key):
    def loss_fn(params):
        dropout = jax.random.fold_in(key, state.step)
        logits = state.apply_fn(**batch, params=params, dropout_rng=dropout, train=True).logits[:, :-1]
        weights = batch["attention_mask"][:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["input_ids"][:, 1:])
        return (losses * weights).sum() / weights.sum()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "gradient_norm": optax.global_norm(grads)}


def main(steps: int = 100, width: int = 128, layers: int = 2, batch: int = 32, planner: str = "mcmc"):
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=width, n_layer=layers, n_head=4)
    model = FlaxGPT2LMHeadModel(config, _do_init=False)
    params = jax.jit(lambda key: model.init_weights(key, (1, LENGTH)))(jax.random.key(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01, mask=decayed))
    state = TrainState.create(apply_fn=model.__call__, params=params, tx=optimizer)

    step_fn = soap_shard(train_step, planner=planner, proposals=512)  # (2) was: jax.jit(train_step)
    for step in range(steps):
        state, metrics = step_fn(state, sentences(step, batch), jax.random.key(1))
        if (step + 1) % max(steps // 10, 1) == 0:
            print(f"step {step + 1}  loss {metrics['loss']:.6f}  gradient norm {metrics['gradient_norm']:.6f}")

    prompt = sentences(steps, 1)["input_ids"][:, :8]
    logits = jax.jit(model.__call__)(prompt, params=state.params).logits
    print("goes on:", *prompt[0], "->", logits[0, -1].argmax())
    # model.save_pretrained(folder, params=jax.device_get(state.params)) saves it as transformers reads it


if __name__ == "__main__":
    tyro.cli(main)
