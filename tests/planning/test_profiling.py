"""Which tasks are measured, and how many are compiled side by side."""

import dataclasses

import jax
import numpy as np
import pytest

from soapjax.execute.compiled.measure import LocalStep, Timing, Unmeasurable
from soapjax.graph.trace.tracing import trace
from soapjax.planning import profiling
from soapjax.planning.profiling import _compiled_together, measure_profile
from soapjax.topology import local_topology


def step(weights, batch):
    def loss(w):
        x = batch
        for layer in w:
            x = jax.numpy.tanh(x @ layer)
        return (x**2).mean()

    found, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), found


def traced():
    return trace(step, [np.ones((8, 16), np.float32), np.ones((16, 4), np.float32)], np.ones((32, 8), np.float32))


class Moved:
    """A request as `_compiled_together` reads it."""

    def __init__(self, moved_bytes):
        self.local = dataclasses.make_dataclass("Local", ["moved_bytes"])(moved_bytes)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_compiled_together_fits_and_stays_in_order(seed):
    rng = np.random.default_rng(seed)
    requests = [Moved(int(n)) for n in rng.integers(1, 60, 40)]
    groups = list(_compiled_together(requests, 4, 100.0))
    assert [r for g in groups for r in g] == requests
    sums = [sum(r.local.moved_bytes for r in g) for g in groups]
    assert all(1 <= len(g) <= 4 for g in groups) and all(s <= 100 or len(g) == 1 for g, s in zip(groups, sums, strict=True))
    for g, s, after in zip(groups, sums, groups[1:], strict=False):
        assert len(g) == 4 or s + after[0].local.moved_bytes > 100, "it could have been one more"


def test_side_by_side_the_same_tasks_are_measured(monkeypatch):
    local = dataclasses.replace(local_topology(jax.devices()[:1]), fake=False)
    alone, _ = measure_profile(traced(), local, seconds=60)
    monkeypatch.setattr(profiling, "num_cores", lambda: 16)
    together, notes = measure_profile(traced(), local, seconds=60)
    assert [m.identity for m in together.operators] == [m.identity for m in alone.operators] and len(together.operators) > 4
    assert all(m.seconds > 0 for m in together.operators) and not any("not measured: " in n and "links" not in n for n in notes)


def test_a_task_that_is_refused_leaves_the_others(monkeypatch):
    ready = LocalStep.ready

    def refuses(self, k, degrees, device):
        if k == 0:
            raise Unmeasurable("no")
        timed = ready(self, k, degrees, device)
        return timed if k != 1 else lambda: (_ for _ in ()).throw(Unmeasurable("not now"))

    monkeypatch.setattr(LocalStep, "ready", refuses)
    found, notes = measure_profile(traced(), local_topology(jax.devices()[:1]), seconds=60)
    assert found.operators and sum("not measured: " in n and n.endswith(("no", "not now")) for n in notes) == 2


def test_the_time_is_spent_on_the_largest(monkeypatch):
    monkeypatch.setattr(LocalStep, "ready", lambda *_: lambda: Timing(1.0, 0.0, 1))
    found, notes = measure_profile(traced(), local_topology(jax.devices()[:1]), seconds=0)
    assert len(found.operators) == 1 and any("the time was spent" in n for n in notes)
