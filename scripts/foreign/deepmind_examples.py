"""Examples of google-deepmind's dm-haiku, optax, distrax and jraph, and of google/jaxopt and e3nn."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from foreign.registry import WHOLE, Made, case, floats, ints
from foreign.sources import load, package, pieces, plain

HAIKU, OPTAX, JRAPH = "google-deepmind+dm-haiku", "google-deepmind+optax", "google-deepmind+jraph"
haiku_case = functools.partial(case, source=HAIKU, packages=["haiku"])
optax_case = functools.partial(case, source=OPTAX)
jraph_case = functools.partial(case, family="graphs", source=JRAPH, packages=["jraph", "haiku"])


@haiku_case("haiku_transformer_lm", "language", is_listed=True)
def haiku_lm() -> Made:
    m = package(HAIKU, "examples.transformer.train")
    m.NUM_LAYERS, m.MODEL_SIZE, m.NUM_HEADS, m.KEY_SIZE = 2, 32, 4, 8
    data = m.dataset.Batch(ints(128, 16, 16, low=1), ints(128, 16, 16, low=1))
    return Made(plain(m.update), (plain(m.init)(jax.random.PRNGKey(0), data), data))


@haiku_case("haiku_rnn_lm", "recurrent")
def haiku_rnn() -> Made:
    """A stack of haiku LSTMs over tiny Shakespeare, by `dynamic_unroll`."""
    m = package(HAIKU, "examples.rnn.train")
    import haiku as hk
    from absl import flags

    flags.FLAGS.mark_as_parsed()
    flags.FLAGS.hidden_size = 32
    data = {"input": ints(128, 8, 16), "target": ints(128, 8, 16)}
    params = hk.without_apply_rng(hk.transform(m.sequence_loss)).init(jax.random.PRNGKey(0), data)
    state = m.TrainingState(params=params, opt_state=m.make_optimizer()[0](params))
    return Made(plain(m.update), (state, data), {0: WHOLE})


@haiku_case("haiku_vae", "generative")
def haiku_vae() -> Made:
    classes = ("Config", "Batch", "Encoder", "Decoder", "VAEOutput", "VariationalAutoEncoder", "TrainingState")
    m = pieces(f"{HAIKU}/examples/vae.py", (*classes, "model", "loss_fn", "update"), {"optimizer": optax.adam(1e-3)})
    images = floats(16, 28, 28, 1) > 0
    params = m.model.init(jax.random.PRNGKey(0), images)
    state = m.TrainingState(params, m.optimizer.init(params), jax.random.PRNGKey(1))
    return Made(plain(m.update), (state, m.Batch(images)), {0: WHOLE})


@haiku_case("haiku_vqvae", "generative")
def vqvae() -> Made:
    """A quantiser with a straight-through gradient and moving averages (haiku state) in the forward pass."""
    import haiku as hk

    optimizer = optax.adam(3e-4)
    given = dict(optimizer=optimizer, num_hiddens=16, num_residual_layers=1, num_residual_hiddens=8)
    m = pieces(f"{HAIKU}/examples/vqvae_example.ipynb", ("ResidualStack", "Encoder", "Decoder", "VQVAEModel", "train_step"), given)

    def forward(data, is_training):
        parts = (m.Encoder(16, 1, 8), m.Decoder(16, 1, 8))
        quantiser = hk.nets.VectorQuantizerEMA(embedding_dim=8, num_embeddings=32, commitment_cost=0.25, decay=0.99)
        net = m.VQVAEModel(*parts, quantiser, hk.Conv2D(8, (1, 1), name="to_vq"), data_variance=1.0)
        return net(data["image"], is_training)

    m.forward = hk.transform_with_state(forward)
    data = {"image": floats(16, 16, 16, 3)}
    params, state = m.forward.init(jax.random.PRNGKey(0), data, is_training=True)
    return Made(plain(m.train_step), (params, state, optimizer.init(params), data), {0: 0, 1: 1, 2: 2})


@haiku_case("haiku_gan", "gan")
def haiku_gan() -> Made:
    """Real and generated images joined into one batch."""
    m = pieces(f"{HAIKU}/examples/mnist_gan.ipynb", (
        "Generator", "Discriminator", "GAN", "GANTuple", "GANState", "tree_shape", "sparse_softmax_cross_entropy",
    ))  # fmt: skip
    gan, images = m.GAN(16), floats(16, 28, 28, 1)
    state = gan.initial_state(jax.random.PRNGKey(0), images)
    inner = plain(m.GAN.update)

    def update(key, state, batch):
        return inner(gan, key, state, batch)

    return Made(update, (jax.random.PRNGKey(1), state, images), {0: 0, 1: 1})


@haiku_case("haiku_mnist_ema", "vision")
def haiku_mnist() -> Made:
    import haiku as hk

    optimiser = optax.adam(1e-3)
    m = pieces(f"{HAIKU}/examples/mnist.py", ("Batch", "TrainingState", "NUM_CLASSES", "net_fn", "loss", "update"),
               {"optimiser": optimiser})  # fmt: skip
    m.network = hk.without_apply_rng(hk.transform(m.net_fn))
    batch = m.Batch(image=np.abs(floats(32, 28, 28, 1)), label=ints(10, 32))
    params = m.network.init(jax.random.PRNGKey(0), batch.image)
    return Made(plain(m.update), (m.TrainingState(params, params, optimiser.init(params)), batch), {0: WHOLE})


@optax_case("optax_nanolm", "language", is_listed=True)
def nanolm() -> Made:
    """Draws its batch from the data set, a constant of the step, by a key that it returns."""
    given = dict(
        vocab=[chr(i) for i in range(65)], LEARNING_RATE=5e-3, BATCH_SIZE=16, DROPOUT_RATE=0.2, BLOCK_SIZE=16, NUM_LAYERS=2,
        EMBED_SIZE=32, NUM_HEADS=4, HEAD_SIZE=8, train_data=jnp.asarray(ints(65, 4000)), opt=optax.adamw(5e-3),
    )  # fmt: skip
    names = ("get_batch", "NanoLM", "loss_fun", "model", "dynamic_slice_vmap", "step")
    m = pieces(f"{OPTAX}/examples/nanolm.ipynb", names, given)
    params = m.model.init(jax.random.PRNGKey(0), jnp.ones((16, 16), jnp.int32), training=False)
    return Made(plain(m.step), (jax.random.PRNGKey(1), params, m.opt.init(params)), {0: 1, 1: 0, 2: 2})


@optax_case("optax_adversarial_pgd", "robust")
def adversarial() -> Made:
    """Ascent on the images inside the step."""
    given = dict(EPSILON=0.1, L2_REG=1e-4, num_classes=10, optimizer=optax.adam(1e-3))
    m = pieces(f"{OPTAX}/examples/adversarial_training.ipynb", ("CNN", "net", "loss_fun", "pgd_attack", "train_step"), given)
    images = (np.abs(floats(16, 28, 28, 1)) * 60).astype(np.uint8)
    params = m.net.init(jax.random.PRNGKey(0), jnp.ones((1, 28, 28, 1)))["params"]
    return Made(plain(m.train_step), (params, m.optimizer.init(params), (images, ints(10, 16))), {0: 0, 1: 1})


@optax_case("optax_meta_learning", "meta-learning")
def meta_learning() -> Made:
    """The learning rate is learned, through inner steps whose optimizer has it as state. Its parameters are scalars."""
    opt = optax.inject_hyperparams(optax.rmsprop)(learning_rate=0.1)
    given = dict(opt=opt, meta_opt=optax.rmsprop(learning_rate=0.1))
    m = pieces(f"{OPTAX}/examples/meta_learning.ipynb", ("f", "loss", "step", "outer_loss", "outer_step"), given)
    theta, eta = jnp.asarray(1.0), jnp.asarray(-2.2)
    samples = [(jnp.asarray(x), jnp.asarray(x * 3)) for x in (0.3, -0.5, 0.8)]
    args = (eta, theta, m.meta_opt.init(eta), opt.init(theta), samples)
    return Made(plain(m.outer_step), args, {0: 0, 1: 1, 2: 2, 3: 3})


@optax_case("optax_lookahead", "vision")
def lookahead() -> Made:
    given = dict(solver=optax.lookahead(optax.adam(2e-3), sync_period=2, slow_step_size=0.5))
    m = pieces(f"{OPTAX}/examples/lookahead_mnist.ipynb", ("CNN", "predict", "loss_accuracy", "train_step"), given)
    from flax import nnx

    model = m.CNN(1, rngs=nnx.Rngs(0))
    params = optax.LookaheadParams.init_synced(nnx.state(model, nnx.Param))
    inner = plain(m.train_step)
    graph, state = nnx.split(model)

    def train_step(params, solver_state, batch):
        return inner(params, nnx.merge(graph, state), solver_state, batch)

    return Made(train_step, (params, m.solver.init(params), (floats(16, 28, 28, 1), ints(10, 16))), {0: 0, 1: 1})


@optax_case("optax_private_sgd", "private")
def private_sgd() -> Made:
    """Per-example gradients, clipped and noised."""
    given = dict(DPSGD=True, L2_NORM_CLIP=1.5, NOISE_MULTIPLIER=1.3, LEARNING_RATE=0.15)
    names = ("init_random_params", "loss_fn", "tx", "train_step")
    m = pieces(
        f"{OPTAX}/examples/contrib/differentially_private_sgd.ipynb", names, given, without=("dp_accounting", "grain", "tensorflow")
    )
    _, params = m.init_random_params(jax.random.PRNGKey(1337), (-1, 28, 28, 1))
    data = (floats(16, 28, 28, 1), ints(10, 16))
    return Made(plain(m.train_step), (params, m.tx.init(params), data), {0: 0, 1: 1})


@case("jaxopt_deep_equilibrium", "implicit", source="google+jaxopt", packages=["jaxopt"])
def deep_equilibrium() -> Made:
    """A fixed point by Anderson acceleration for each example, differentiated implicitly by conjugate gradients."""
    import jaxopt
    from jaxopt.linear_solve import solve_normal_cg

    m = load("google+jaxopt/examples/fixed_point", "deep_equilibrium_model")
    solver = functools.partial(
        jaxopt.AndersonAcceleration, history_size=3, ridge=1e-4, maxiter=5, tol=1e-2, implicit_diff=True,
        implicit_diff_solve=functools.partial(solve_normal_cg, tol=1e-2, maxiter=5),
    )  # fmt: skip
    net, tx = m.FullDEQ(10, 8, 8, solver), optax.adam(1e-3)
    variables = net.init(jax.random.PRNGKey(0), jnp.ones((2, 16, 16, 1)), train=True)

    def step(state, images, labels):
        def loss_fn(params):
            inputs = {"params": params, "batch_stats": state["stats"]}
            logits, changed = net.apply(inputs, images, train=True, mutable=["batch_stats"])
            return jax.vmap(m.loss.multiclass_logistic_loss)(labels, logits).mean(), changed["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "stats": stats}, loss

    state = {"params": variables["params"], "opt": tx.init(variables["params"]), "stats": variables["batch_stats"]}
    return Made(step, (state, floats(8, 16, 16, 1), ints(10, 8)))


@case("distrax_spline_flow", "flow", source="google-deepmind+distrax", packages=["distrax", "haiku"])
def spline_flow() -> Made:
    m = load("google-deepmind+distrax/examples", "flow")
    from absl import flags

    flags.FLAGS.mark_as_parsed()
    flags.FLAGS.flow_num_layers, flags.FLAGS.hidden_size = 2, 32
    optimizer = optax.adam(1e-4)
    update = plain(pieces("google-deepmind+distrax/examples/flow.py", ("update",), {
        "optimizer": optimizer, "loss_fn": m.loss_fn, "Batch": m.Batch, "PRNGKey": m.PRNGKey, "OptState": m.OptState,
    }, without=("distrax", "haiku")).update)  # fmt: skip
    batch = {"image": np.abs(floats(16, 8, 8, 1)) * 60}
    params = m.log_prob.init(jax.random.PRNGKey(0), np.zeros((1, 8, 8, 1), np.float32))
    return Made(update, (params, jax.random.PRNGKey(1), optimizer.init(params), batch), {0: 0, 2: 1})


@jraph_case("jraph_gcn_karate_club")
def gcn() -> Made:
    """Graph, labels and all are constants: nothing but the state goes in."""
    import haiku as hk

    m = load(f"{JRAPH}/jraph/examples", "zacharys_karate_club")
    graph = m.get_zacharys_karate_club()
    opt_init, opt_update = optax.adam(1e-2)
    step = pieces(f"{JRAPH}/jraph/examples/zacharys_karate_club.py", ("prediction_loss", "update"), {
        "network": hk.without_apply_rng(hk.transform(m.network_definition)), "zacharys_karate_club": graph,
        "opt_update": opt_update,
    })  # fmt: skip
    params = step.network.init(jax.random.PRNGKey(42), graph)
    return Made(plain(step.update), (params, opt_init(params)), {0: 0, 1: 1})


def _jraph_problem(example: str, make, *sizes) -> Made:
    """The examples that train on one small problem after another, with an update of the same form."""
    import random

    import haiku as hk

    m = load(f"{JRAPH}/jraph/examples", example)
    random.seed(0)
    np.random.seed(0)
    problem = make(m, *sizes)
    opt_init, opt_update = optax.adam(2e-4)
    step = pieces(f"{JRAPH}/jraph/examples/{example}.py", ("prediction_loss", "update"), {
        "network": hk.without_apply_rng(hk.transform(m.network_definition)), "opt_update": opt_update,
    })  # fmt: skip
    params = step.network.init(jax.random.PRNGKey(42), problem.graph)
    problem = jax.tree.map(lambda x: np.asarray(x), problem)
    return Made(plain(step.update), (params, opt_init(params), problem), {0: 0, 1: 1})


@jraph_case("jraph_interaction_2sat")
def interaction() -> Made:
    return _jraph_problem("sat", lambda m, *n: m.get_2sat_problem(*n), 8, 16)


@jraph_case("jraph_relation_higgs")
def relation() -> Made:
    return _jraph_problem("higgs_detection", lambda m, *n: m.get_higgs_problem(*n), 4, 8)


@case("e3nn_tetris", "graphs", source="e3nn+e3nn-jax", packages=["e3nn_jax", "jraph"])
def tetris() -> Made:
    """An equivariant network: spherical harmonics and tensor products of irreps."""
    opt = optax.adam(learning_rate=0.01)
    path = "e3nn+e3nn-jax/examples/tetris_point.py"
    m = pieces(path, ("*", "loss_fn", "update_fn"), {"opt": opt})
    m.model = m.Model()
    graphs = m.tetris()
    params = jax.jit(m.model.init)(jax.random.PRNGKey(3), graphs)
    return Made(plain(m.update_fn), (params, opt.init(params), jax.tree.map(np.asarray, graphs)), {0: 0, 1: 1})
