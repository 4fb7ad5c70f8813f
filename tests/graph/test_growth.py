"""Micro-batches of one sample: what grows with the batch is known of them as of larger ones."""

import jax
import jax.numpy as jnp
import pytest
from test_batch_scaling import FUNCTIONS, LOSSES

import soapjax
from soapjax.errors import SoapjaxError
from soapjax.execute.parts.joinings import found_reduction, joining
from soapjax.execute.parts.microbatches import micro_step
from soapjax.graph.batch.correspondence import corresponding

W = jax.random.normal(jax.random.key(0), (6, 3))
ALL = FUNCTIONS | {name: loss for name, (loss, _) in LOSSES.items()}
SUMS = {"sum", "root"}  # grow with the batch, by some power of it
OF_RESULTS = {"overlap of classes"}  # what divides is known after the forward pass only; of all others the whole batch's is taken


def batch(size):
    return jax.random.normal(jax.random.key(1), (size, 6))


def picked(w, x):
    """Gathered of several samples, reshaped of one: the equations of a cross-entropy."""
    labels = (x[:, :1] > 0).astype(int)
    return jnp.take_along_axis(x @ w, labels, axis=1)


def traced(fn, *, size, parts):
    micro = micro_step(fn, W, batch(size), num_microbatches=parts)
    assert micro.growth.is_known
    return micro


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("name", ALL)
def test_growth_is_that_of_larger_micro_batches(name, size):
    def step(w, x):
        with_picked = lambda w, x: (ALL[name](w, x), picked(w, x))  # noqa: E731
        (loss, rows), gradient = jax.value_and_grad(with_picked, has_aux=True)(w, x)
        return gradient, loss, rows.mean()

    one, four = traced(step, size=size, parts=size), traced(step, size=8, parts=2)
    for mine, theirs in zip(one.step.program.outputs, four.step.program.outputs, strict=True):
        assert one.growth.of(mine) == four.growth.of(theirs)
    assert one.growth.counterpart is not None and four.growth.counterpart is None


@pytest.mark.parametrize("name", ALL)
def test_gradients_that_do_not_add_up_are_refused(name):
    micro = traced(lambda w, x: (jax.grad(ALL[name])(w, x), picked(w, x)), size=8, parts=8)
    gradient = [("w", micro.step.program.outputs[0])]
    read = {a for e in micro.step.program.eqns for a in e.read}
    passed_on = (e.key for e in micro.step.program.eqns if e.key in micro.whole and not read.isdisjoint(e.outputs))
    divisors = {micro.whole[key].scale for key in passed_on}
    assert bool(divisors) == (not LOSSES.get(name, (None, True))[1] and name not in OF_RESULTS)
    assert divisors <= {1 / 8, 8.0, *([1.0] if "mean" in name or "variance" in name else [])}  # of sums, what is over them, means
    if name not in SUMS | OF_RESULTS:
        assert found_reduction(micro, gradient, "auto") == "mean"
    else:
        with pytest.raises(SoapjaxError, match="sum over the batch|grows as|made of"):
            found_reduction(micro, gradient, "mean")
    assert name != "sum" or found_reduction(micro, gradient, "auto") == "sum"


def test_samples_are_joined_and_counts_summed():
    def step(w, x):
        h = x @ w
        return w, {"picked": picked(w, x), "each": h.sum(1), "rows": h, "count": (h > 0).sum(), "mean": (h**2).mean()}

    for size, parts in ((8, 8), (8, 4), (2, 2)):
        micro = traced(step, size=size, parts=parts)
        how = {p: joining(micro, v, "mean") for p, v in zip(micro.step.out_paths, micro.step.program.outputs, strict=True)}
        assert {h.scale for h in how.values()} == {1}
        assert {p.rpartition(".")[2]: tuple(h[:2]) for p, h in how.items() if p != "out.0"} == {
            "each": ("join", 0), "rows": ("join", 0), "count": ("sum", 0), "mean": ("mean", 0),
            "picked": ("join", 0),
        }  # fmt: skip


def test_only_what_corresponds_has_a_counterpart():
    def step(w, x):
        return w - jax.grad(lambda w: jnp.tanh(x @ w).mean() + picked(w, x).mean())(w)

    one, two = (soapjax.trace(step, W, batch(n)).program for n in (1, 2))
    values, keys = corresponding(one, two)
    ours, theirs = ({e.key: e for e, _ in p.walk()} for p in (one, two))
    assert all((ours[k].name, ours[k].stack) == (theirs[j].name, theirs[j].stack) for j, k in keys.items())
    assert 0.7 * len(ours) < len(keys) < len(ours) and len(set(values.values())) == len(values)


@pytest.mark.slow
def test_a_long_way_to_a_statistic_is_gone_without_recursion():
    """A loss over a statistic of the batch, a thousand equations behind it."""

    def step(w, x):
        def loss(w):
            scale = (x @ w).mean()
            for _ in range(1200):
                scale = jnp.tanh(scale)
            return scale / jnp.sqrt(1 + ((x @ w) ** 2).mean())

        value, gradient = jax.value_and_grad(loss)(w)
        return w - gradient, value

    assert traced(step, size=8, parts=2).growth.is_known
