"""Steps whose dims are all of one size: batch, features, rows, positions, groups. What was told apart by sizes alone is mixed up.

Each is a layer, one operation `(h, parameters, order, x) -> z` of it, and a loss; `order` is a permutation of the rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

N = 8


def image(h, p):
    return jnp.einsum("bi,ij->bij", h, p["b"])[..., None] * p["c"]


def rows(h, p):
    return jnp.einsum("bi,ij->bij", h, p["b"])


def convolved(x, kernel, strides, groups=1):
    numbers = ("NHWC", "HWIO", "NHWC") if x.ndim == 4 else ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=numbers, feature_group_count=groups).mean(1)


def pooled(x, start, op, window, stride, padding):
    return lax.reduce_window(x, start, op, (1, window, 1), (1, stride, 1), padding).mean(1)


def attention_of_three(h, p):
    q = rows(h, p)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, q)), q).sum(1)


def with_capacity(h, p, i):
    places = jax.nn.one_hot(h.argmax(1), N)[:, :, None] * jax.nn.one_hot(i, N)[:, None, :]
    return jnp.einsum("bec,eco->bo", places, jnp.einsum("eci,eio->eco", jnp.einsum("bec,bi->eci", places, h), p["e"]))


def quantised(h, p):
    q = p["b"][((h[:, None] - p["b"][None]) ** 2).sum(-1).argmin(1)]
    return h + lax.stop_gradient(q - h) + 0.1 * (q - lax.stop_gradient(h))


def of_the_best(h, p):
    weights, experts = lax.top_k(h, 2)
    return jnp.einsum("bk,bkd->bd", jax.nn.softmax(weights), p["b"][experts])


# fmt: off
OPERATIONS = {
    "set": lambda h, p, i, x: jnp.zeros_like(h).at[i].set(h),
    "set_into": lambda h, p, i, x: p["b"].at[i].set(h),
    "add_into": lambda h, p, i, x: p["b"].at[i].add(h),
    "max_into": lambda h, p, i, x: p["b"].at[i].max(h),
    "min_into": lambda h, p, i, x: p["b"].at[i].min(h),
    "set_cols": lambda h, p, i, x: p["b"].at[:, i].set(h),
    "add_cols": lambda h, p, i, x: p["b"].at[:, i].add(h),
    "set_2d": lambda h, p, i, x: p["b"].at[i, i[::-1]].set(h[:, 0]),
    "add_2d": lambda h, p, i, x: p["b"].at[i, i].add(h.sum(1)),
    "take": lambda h, p, i, x: h[i],
    "take_cols": lambda h, p, i, x: h[:, i],
    "take_2d": lambda h, p, i, x: h[i[:, None], i[None]],
    "take_diag": lambda h, p, i, x: h[i, i][:, None] * h,
    "take_along": lambda h, p, i, x: jnp.take_along_axis(h, jnp.broadcast_to(i[:, None], (N, N)), 0),
    "take_along1": lambda h, p, i, x: jnp.take_along_axis(h, jnp.broadcast_to(i[None], (N, N)), 1),
    "embed": lambda h, p, i, x: p["b"][i] * h,
    "embed_cols": lambda h, p, i, x: p["b"][:, i] * h,
    "segment_sum": lambda h, p, i, x: jax.ops.segment_sum(h, i // 2, N),
    "segment_max": lambda h, p, i, x: jax.ops.segment_max(h, i, N),
    "sort": lambda h, p, i, x: jnp.sort(h, 0),
    "sort1": lambda h, p, i, x: jnp.sort(h, 1),
    "sort_by": lambda h, p, i, x: h[jnp.argsort(h[:, 0])],
    "unsort": lambda h, p, i, x: h[jnp.argsort(i)][i],
    "top_k": lambda h, p, i, x: lax.top_k(h, 4)[0] @ p["b"][:4],
    "top_k_gather": lambda h, p, i, x: of_the_best(h, p),
    "cumsum": lambda h, p, i, x: jnp.cumsum(h, 0),
    "cumsum1": lambda h, p, i, x: jnp.cumsum(h, 1),
    "cumprod": lambda h, p, i, x: jnp.cumprod(h, 1),
    "cummax": lambda h, p, i, x: lax.cummax(h, 0),
    "cumlogsumexp": lambda h, p, i, x: lax.cumlogsumexp(h, 1),
    "assoc_scan": lambda h, p, i, x: lax.associative_scan(jnp.multiply, h, axis=0),
    "roll": lambda h, p, i, x: jnp.roll(h, 1, 0) + h,
    "flip": lambda h, p, i, x: h[::-1] * h,
    "shift": lambda h, p, i, x: jnp.concatenate([h[1:], h[:1]]) * h,
    "stride": lambda h, p, i, x: jnp.concatenate([h[::2], h[1::2]]),
    "pad": lambda h, p, i, x: jnp.pad(h, ((1, 1), (0, 0)))[:N] * h,
    "pad_neg": lambda h, p, i, x: lax.pad(h, 0.0, ((-1, 1, 0), (1, -1, 0))),
    "transpose": lambda h, p, i, x: h.T @ h,
    "gram": lambda h, p, i, x: h @ h.T,
    "gram3": lambda h, p, i, x: h @ h.T @ h,
    "square": lambda h, p, i, x: p["b"] @ p["b"] @ h,
    "hTb": lambda h, p, i, x: h.T @ p["b"] + h,
    "plusT": lambda h, p, i, x: h + h.T,
    "outer": lambda h, p, i, x: jnp.einsum("bi,bj->bij", h, h).sum(1),
    "outer2": lambda h, p, i, x: jnp.einsum("bi,bj,jk->bik", h, h, p["b"]).max(2),
    "kron": lambda h, p, i, x: jnp.kron(h, p["b"])[:N, :N],
    "tile": lambda h, p, i, x: jnp.tile(h, (2, 1))[N:] * h,
    "repeat": lambda h, p, i, x: jnp.repeat(h, 2, 0)[:N],
    "repeat1": lambda h, p, i, x: jnp.repeat(h, 2, 1) @ jnp.repeat(p["b"], 2, 0),
    "tril": lambda h, p, i, x: jnp.tril(h) @ p["b"],
    "diag": lambda h, p, i, x: jnp.diag(jnp.diag(h)) @ p["b"],
    "trace": lambda h, p, i, x: h * jnp.trace(h),
    "softmax0": lambda h, p, i, x: jax.nn.softmax(h, 0),
    "softmax1": lambda h, p, i, x: jax.nn.softmax(h, 1),
    "logsumexp": lambda h, p, i, x: h - jax.nn.logsumexp(h, 0),
    "layernorm": lambda h, p, i, x: (h - h.mean(1, keepdims=True)) / jnp.sqrt(h.var(1, keepdims=True) + 0.1),
    "batchnorm": lambda h, p, i, x: (h - h.mean(0)) / jnp.sqrt(h.var(0) + 0.1),
    "attention": lambda h, p, i, x: jax.nn.softmax(h @ h.T) @ h @ p["b"],
    "attention3": lambda h, p, i, x: attention_of_three(h, p),
    "where": lambda h, p, i, x: jnp.where(h > 0, h, p["b"]),
    "where_rows": lambda h, p, i, x: jnp.where((i > 2)[:, None], h, p["b"]),
    "dslice": lambda h, p, i, x: lax.dynamic_slice(h, (i[0], 0), (4, N)).sum(0) + h,
    "dus": lambda h, p, i, x: lax.dynamic_update_slice(p["b"], h[:4], (i[1] // 2, 0)),
    "dus_col": lambda h, p, i, x: lax.dynamic_update_slice(p["b"], h[:, :1], (0, i[1])),
    "vmap_dus": lambda h, p, i, x: jax.vmap(lambda a, b, j: lax.dynamic_update_slice(a, b[:1], (j,)))(p["b"], h, i),
    "vmap_ds": lambda h, p, i, x: jax.vmap(lambda a, j: lax.dynamic_slice(a, (j // 2,), (4,)))(h, i) @ p["b"][:4],
    "vmap_gather": lambda h, p, i, x: jax.vmap(lambda a, j: a[j])(h, i)[:, None] * h,
    "vmap_scatter": lambda h, p, i, x: jax.vmap(lambda a, j: a.at[j].add(1.0))(h, i),
    "vmap_mat": lambda h, p, i, x: jax.vmap(lambda a: jnp.tanh(p["b"] @ a))(h),
    "vmap_outer": lambda h, p, i, x: jax.vmap(lambda a: jax.vmap(lambda b: (a * b).sum())(h))(h),
    "solve": lambda h, p, i, x: jnp.linalg.solve(h @ h.T + 3 * jnp.eye(N), h),
    "inv": lambda h, p, i, x: jnp.linalg.inv(h.T @ h + 3 * jnp.eye(N)) @ p["b"],
    "chol": lambda h, p, i, x: jnp.linalg.cholesky(h.T @ h + 3 * jnp.eye(N)),
    "det": lambda h, p, i, x: jnp.linalg.det(h.T @ h / 3 + jnp.eye(N)) * h,
    "qr": lambda h, p, i, x: jnp.linalg.qr(h + 3 * jnp.eye(N))[1],
    "eigh": lambda h, p, i, x: jnp.linalg.eigvalsh(h @ h.T) * h,
    "svd": lambda h, p, i, x: jnp.linalg.svd(h, compute_uv=False) * h,
    "fft": lambda h, p, i, x: jnp.abs(jnp.fft.fft(h, axis=1)),
    "rfft": lambda h, p, i, x: jnp.fft.irfft(jnp.fft.rfft(h, axis=0) * 2, N, axis=0),
    "conv": lambda h, p, i, x: convolved(image(h, p), p["k"], (1, 1)).mean(1),
    "conv_s2": lambda h, p, i, x: convolved(image(h, p), p["k"], (2, 2)).mean(1),
    "conv_t": lambda h, p, i, x: lax.conv_transpose(image(h, p), p["k"], (2, 2), "SAME").mean(2).mean(1),
    "conv1d": lambda h, p, i, x: convolved(rows(h, p), p["k"][0], (1,)),
    "depthwise": lambda h, p, i, x: convolved(rows(h, p), p["k"][0, :, :1], (1,), groups=N),
    "maxpool": lambda h, p, i, x: pooled(rows(h, p), -jnp.inf, lax.max, 2, 2, "VALID"),
    "maxpool_o": lambda h, p, i, x: pooled(rows(h, p), -jnp.inf, lax.max, 3, 1, "SAME"),
    "avgpool": lambda h, p, i, x: pooled(rows(h, p), 0.0, lax.add, 2, 1, "SAME"),
    "max0": lambda h, p, i, x: h * h.max(0),
    "max1": lambda h, p, i, x: h * h.max(1, keepdims=True),
    "prod": lambda h, p, i, x: h * h.prod(0),
    "argmax": lambda h, p, i, x: p["b"][h.argmax(1)] * h,
    "onehot": lambda h, p, i, x: jax.nn.one_hot(h.argmax(1), N) @ p["b"] * h,
    "onehot_T": lambda h, p, i, x: jax.nn.one_hot(i, N).T @ h,
    "moe": lambda h, p, i, x: jnp.einsum("be,ebo->bo", jax.nn.softmax(h @ p["b"]), jnp.einsum("bi,eio->ebo", h, p["e"])),
    "moe_cap": lambda h, p, i, x: with_capacity(h, p, i),
    "ragged": lambda h, p, i, x: lax.ragged_dot(h[i], p["e"], jnp.ones(N, jnp.int32)),
    "ragged2": lambda h, p, i, x: jnp.zeros_like(h).at[i].set(lax.ragged_dot(h[i], p["e"], jnp.bincount(i // 3, length=N))),
    "scan": lambda h, p, i, x: lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), h, p["e"])[0],
    "scan_time": lambda h, p, i, x: lax.scan(lambda c, a: (jnp.tanh(c @ p["b"] + a), c), h[0], h)[1],
    "scan_ys": lambda h, p, i, x: lax.scan(lambda c, w: (jnp.tanh(c @ w), c), h, p["e"])[1].sum(1),
    "scan_b": lambda h, p, i, x: lax.scan(lambda c, a: (c + a @ p["b"], c * a), jnp.zeros(N), h)[1],
    "map": lambda h, p, i, x: lax.map(lambda a: jnp.tanh(p["b"] @ a), h),
    "fori": lambda h, p, i, x: lax.fori_loop(0, 3, lambda k, c: jnp.tanh(c @ p["b"]), h),
    "cond": lambda h, p, i, x: lax.cond(h.sum() > 0, lambda h: h @ p["b"], lambda h: h * 2, h),
    "switch": lambda h, p, i, x: jax.vmap(lambda j, a: lax.switch(j % 3, [jnp.sin, jnp.cos, lambda a: a * 2], a))(i, h),
    "remat": lambda h, p, i, x: jax.checkpoint(lambda h: jnp.tanh(h @ p["b"]) @ p["b"].T)(h),
    "reshape": lambda h, p, i, x: h.reshape(N // 2, 2, N).swapaxes(0, 1).reshape(N, N),
    "reshape2": lambda h, p, i, x: h.reshape(-1)[i * N // 2].reshape(N, 1) * h,
    "reshape3": lambda h, p, i, x: h.reshape(2, N // 2, N).sum(0).repeat(2, 0),
    "complex": lambda h, p, i, x: jnp.abs((h + 1j * p["b"]) @ (h - 1j * x)),
    "interp": lambda h, p, i, x: jnp.interp(h, jnp.linspace(-1, 1, N), p["b"][0]),
    "median": lambda h, p, i, x: h - jnp.median(h, 0),
    "quantile": lambda h, p, i, x: h * jnp.quantile(h, 0.3, axis=1, keepdims=True),
    "clip": lambda h, p, i, x: jnp.clip(h, p["b"].min(0), p["b"].max(0)),
    "einsum_diag": lambda h, p, i, x: jnp.einsum("ii->i", h) * h,
    "einsum_bb": lambda h, p, i, x: jnp.einsum("bi,ij,bj->b", h, p["b"], h)[:, None] * h,
    "bilinear": lambda h, p, i, x: jnp.einsum("bi,eij,bj->be", h, p["e"], h),
    "cross": lambda h, p, i, x: -jax.nn.log_softmax(h @ p["b"])[jnp.arange(N), i][:, None] * h,
    "nce": lambda h, p, i, x: jnp.diag(jax.nn.log_softmax(h @ h.T))[:, None] * h,
    "dist": lambda h, p, i, x: ((h[:, None] - h[None]) ** 2).sum(-1),
    "vq": lambda h, p, i, x: quantised(h, p),
    "gumbel": lambda h, p, i, x: jax.nn.softmax(h + jax.random.gumbel(jax.random.key(0), h.shape)),
    "dropout": lambda h, p, i, x: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, h.shape), h, 0),
    "perm": lambda h, p, i, x: h[jax.random.permutation(jax.random.key(2), N)],
    "hess": lambda h, p, i, x: jax.grad(lambda b: (jnp.tanh(h @ b) ** 2).sum())(p["b"]) + h,
    "jvp": lambda h, p, i, x: jax.jvp(lambda a: jnp.tanh(a @ p["b"]), (h,), (x,))[1],
    "jac": lambda h, p, i, x: jax.vmap(jax.jacfwd(lambda a: jnp.tanh(p["b"] @ a)))(h).sum(1),
    "tied": lambda h, p, i, x: jnp.tanh(h @ p["b"]) @ p["b"].T,
    "tied_embed": lambda h, p, i, x: (p["b"][i] + h) @ p["b"].T,
    "lse_mask": lambda h, p, i, x: jax.nn.logsumexp(h[:, None] + p["b"], axis=-1, where=(i > 1)[None, None]),
}
# fmt: on


def step_of(*names):
    """A step with these operations, one after the other, and its arguments."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[0]), jnp.float32)  # noqa: E731
    params = {"a": draw(N, N), "b": draw(N, N), "o": draw(N, N), "e": 1.5 * draw(N, N, N), "k": draw(3, 3, N, N), "c": draw(N)}
    x, order = 2 * draw(N, N), jnp.asarray(np.random.default_rng(3).permutation(N), jnp.int32)

    def step(params, x, order):
        def loss(params):
            h = x @ params["a"]
            for name in names:
                h = OPERATIONS[name](jnp.tanh(h), params, order, x).real
            h = jnp.tanh(h) @ params["o"] if h.ndim == 2 and h.shape[1] == N else h
            return ((h - 0.3) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step, (params, x, order)


def language_model():
    """A scanned Transformer that computes its layers again, with experts side by side and weights per token, and its arguments."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / np.sqrt(N), jnp.float32)  # noqa: E731
    params = {k: draw(N, N) for k in ("tokens", "places", "head")} | {"layers": {k: draw(N, N, N) for k in "qkvoud"}}
    words = jnp.asarray(rng.integers(0, N, (2, N, N)), jnp.int32)

    @jax.checkpoint
    def layer(x, w):
        q, k, v = ((x @ w[name]).reshape(-1, N, 2, N // 2) for name in "qkv")
        scores = jnp.where(jnp.tril(jnp.ones((N, N), bool)), jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ w["o"]
        return x + jnp.tanh(x @ w["u"]) @ w["d"], None

    def step(params, batch):
        def loss(params):
            x = lax.scan(layer, params["tokens"][batch["x"]] + params["places"], params["layers"])[0]
            rows = x.reshape(-1, N)
            expert = jnp.argmax(rows @ params["head"], -1)
            order = jnp.argsort(expert)
            sorted_rows = lax.ragged_dot(rows[order], params["layers"]["u"], jnp.bincount(expert, length=N))
            x = x + jnp.zeros_like(rows).at[order].set(sorted_rows).reshape(x.shape)
            picked = jnp.take_along_axis(jax.nn.log_softmax(x @ params["head"]), batch["y"][..., None], -1)[..., 0]
            return -(picked * batch["weights"]).sum() / batch["weights"].sum()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step, (params, {"x": words[0], "y": words[1], "weights": jnp.asarray(rng.random((N, N)), jnp.float32)})
