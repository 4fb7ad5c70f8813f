"""A Flax training loop: data on disk, dropout, a learning-rate schedule, evaluation, checkpoints. Two lines change: (1), (2).

    python examples/flax_loop.py --folder /tmp/spirals      # again with --steps 400: goes on from the checkpoint

What a plan adds besides is marked (+): the state is made where the plan wants it, restored there, and evaluated there.
"""

from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import tyro
from flax import linen as nn
from flax.training.train_state import TrainState

from soapjax import soap_shard  # (1)


class Classifier(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, *, train):  # points [batch, 2] -> logits [batch, 3]
        for _ in range(3):
            x = nn.Dropout(0.1, deterministic=not train)(nn.relu(nn.Dense(self.width)(x)))
        return nn.Dense(3)(x)


def spirals(path, size=3000):
    """Points on three arms of a spiral, and the arm of each; made once, then read from disk."""
    if not path.exists():
        rng = np.random.default_rng(0)
        arm, radius = rng.integers(0, 3, size), rng.uniform(0.1, 1.0, size)
        angle = arm * 2 * np.pi / 3 + 5 * radius + rng.normal(0, 0.2, size)
        points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
        np.savez(path, points=points.astype(np.float32), arm=arm.astype(np.int32))
    return dict(np.load(path))


def train_step(state, batch, key):
    def loss_fn(params):
        logits = state.apply_fn(params, batch["points"], train=True, rngs={"dropout": jax.random.fold_in(key, state.step)})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["arm"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def num_right(state, batch):
    return (state.apply_fn(state.params, batch["points"], train=False).argmax(axis=-1) == batch["arm"]).sum()


def main(folder: Path, steps: int = 200, width: int = 512, batch_size: int = 64, planner: str = "mcmc"):
    folder.mkdir(parents=True, exist_ok=True)
    data = spirals(folder / "spirals.npz")
    held_out = {k: v[:500] for k, v in data.items()}

    def batch_of(step):
        return {k: v[np.random.default_rng(step).integers(500, len(v), batch_size)] for k, v in data.items()}

    def init(key):
        model = Classifier(width)
        optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 20, 400))
        return TrainState.create(apply_fn=model.apply, params=model.init(key, held_out["points"], train=False), tx=optimizer)

    key = jax.random.key(1)
    step_fn = soap_shard(train_step, planner=planner, proposals=512)  # (2) was: jax.jit(train_step, donate_argnums=0)
    shapes = jax.eval_shape(init, jax.random.key(0))
    layouts = step_fn.prepare(shapes, batch_of(0), key).shardings()  # (+) plans from shapes: no array exists yet
    evaluate = jax.jit(num_right, in_shardings=(layouts[0], None))  # (+)

    with ocp.CheckpointManager(folder.absolute() / "checkpoints") as manager:
        if manager.latest_step() is None:
            state = jax.jit(init, out_shardings=layouts[0])(jax.random.key(0))  # (+) each device makes its own part
        else:
            planned = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, layouts[0])  # (+)
            state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(planned))
        for step in range(int(state.step), steps):
            state, loss = step_fn(state, batch_of(step), key)
            if (step + 1) % max(steps // 10, 1) == 0:
                print(f"step {step + 1}  loss {loss:.6f}")
        print(f"right: {int(evaluate(state, held_out)) / 500:.1%} of 500 held out")
        manager.save(int(state.step), args=ocp.args.StandardSave(state))


if __name__ == "__main__":
    tyro.cli(main)
