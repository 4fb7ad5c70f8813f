"""Fits of the cost model to measurements: a roofline to tasks, latency and bandwidth to collectives, two scalars to steps.

Errors are relative ones, in logarithms: a task of a microsecond counts as much as one of a second, and an outlier
little (soft L1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import scipy

from soapjax.costs.measured.profile_parts import Calibration, Link, Measurement, Rates

MIN_POINTS = 4  # fewer tasks fit no roofline
STAY = 0.003  # pull of a rate to where it began
STAY_LAUNCH = 0.3  # of the launch: it would take up whatever the roofs miss of a few long tasks


def fitted_rates(measurements: Sequence[Measurement], before: Rates | None = None) -> Rates | None:
    """max(flops / rate of its class, bytes / memory rate) + launch, for every class and dtype at once.

    A rate that no measured task is bound by stays where it began, and so does the launch where all tasks are long: at what was
    taken for them before (a device's data sheet), or at the best that any task of the class reached.
    """
    if len(measurements) < MIN_POINTS:
        return None
    names = sorted({f"{m.kind} {m.dtype}" for m in measurements})
    index = np.array([names.index(f"{m.kind} {m.dtype}") for m in measurements])
    flops, moved, seconds = (
        np.array([max(getattr(m, field), floor) for m in measurements])
        for field, floor in (("flops", 1e-30), ("moved_bytes", 1e-30), ("seconds", 1e-12))
    )
    # The largest rates reached are lower bounds of the roofs, and a good place to begin.
    best = [max((flops / seconds)[index == i].max(), 1.0) for i in range(len(names))]
    start = [*best, max((moved / seconds).max(), 1.0), max(seconds.min() / 2, 1e-9)]
    if before is not None:
        known = before.flops_per_s
        start = [*(known.get(n, b) for n, b in zip(names, best, strict=True)), before.memory_bytes_per_s, before.launch_s or 1e-9]
    began = np.log(start)
    stay = np.full(len(began), STAY)
    stay[-1] = STAY if before is None else STAY_LAUNCH

    def predicted(x: np.ndarray) -> np.ndarray:
        roofs = np.exp(np.clip(x, -60, 60))
        return np.maximum(flops / roofs[index], moved / roofs[-2]) + roofs[-1]

    def errors(x: np.ndarray) -> np.ndarray:
        # Without a pull a rate that binds nothing any more flies off to infinity on the step that freed it.
        return np.concatenate([np.log(predicted(x) / seconds), stay * (x - began)])

    found = scipy.optimize.least_squares(errors, began, loss="soft_l1", f_scale=0.3, x_scale=1.0)
    roofs = np.exp(found.x)
    error = float(np.median(np.abs(predicted(found.x) / seconds - 1)))
    return Rates(
        flops_per_s={n: float(f"{r:.4g}") for n, r in zip(names, roofs, strict=False)},
        memory_bytes_per_s=float(f"{roofs[-2]:.4g}"),
        launch_s=float(f"{roofs[-1]:.4g}"),
        median_error=round(error, 4),
    )


PULL = 0.03  # of a kind's fraction towards 1, where its bytes do not tell


def _steps_and_bytes(kind: str, n: int, size: float) -> tuple[float, float]:
    """Steps of a collective, and bytes that each of n devices sends that hold `size` before or after it (many_reshards.py)."""
    if kind == "collective-permute":
        return 1.0, size
    times = 2.0 if kind == "all-reduce" else 1.0
    return times * (n - 1), times * size * (n - 1) / n


def fitted_link(level: str, points: Sequence[tuple[str, int, float, float]]) -> Link:
    """Latency and rate of one level from (collective, devices, bytes each holds, seconds), and each kind's fraction of the rate.

    The rate is the first kind's; where only one kind was measured all have it.
    """
    kinds = list(dict.fromkeys(kind for kind, *_ in points))
    which = np.array([kinds.index(kind) for kind, *_ in points])
    steps, sent = np.array([_steps_and_bytes(kind, n, size) for kind, n, size, _ in points]).T
    seconds = np.array([s for *_, s in points])
    start = np.log([max((seconds / steps).min(), 1e-9), max((sent / seconds).max(), 1.0), *[1.0] * (len(kinds) - 1)])

    def predicted(x: np.ndarray) -> np.ndarray:
        fractions = np.exp(np.concatenate([[0.0], x[2:]]))
        return steps * np.exp(x[0]) + sent / (np.exp(x[1]) * fractions[which])

    def errors(x: np.ndarray) -> np.ndarray:
        return np.concatenate([np.log(predicted(x) / seconds), PULL * x[2:]])

    found = scipy.optimize.least_squares(errors, start, loss="soft_l1", f_scale=0.3)
    latency_s, rate, *fractions = np.exp(found.x)
    error = float(np.median(np.abs(predicted(found.x) / seconds - 1)))
    return Link(
        level=level, latency_s=float(f"{latency_s:.4g}"), bytes_per_s=float(f"{rate:.4g}"), median_error=round(error, 4),
        fractions={kind: float(f"{f:.4g}") for kind, f in zip(kinds[1:], fractions, strict=True)},
        points=tuple((k, int(n), float(size), float(f"{s:.6g}")) for k, n, size, s in points),
    )  # fmt: skip


Predict = Callable[[float, float], Sequence[float]]


def fitted_scales(names: Sequence[str], predict: Predict, measured_s: Sequence[float], *, has_network: bool) -> Calibration:
    """At most two scalars that bring predictions to measured whole steps, and what error is left.

    Args:
      names: what ran, one per step.
      predict: (compute scale, network scale) -> predicted seconds of every step.
      has_network: whether any step communicates; where none does the network's scale is 1.
    """
    measured = np.asarray(measured_s, float)

    def scales(x: np.ndarray) -> tuple[float, float]:
        return float(np.exp(x[0])), float(np.exp(x[1])) if len(x) > 1 else 1.0

    # One step cannot tell the two apart: both are one scalar then.
    is_pair = has_network and len(measured) > 1
    both = has_network and not is_pair

    def predicted(x: np.ndarray) -> np.ndarray:
        compute, network = scales(x)
        return np.asarray(predict(compute, compute if both else network), float)

    ratio = float(np.log(np.median(measured / np.maximum(predicted(np.zeros(1)), 1e-12))))
    start = np.full(2 if is_pair else 1, ratio)
    found = scipy.optimize.least_squares(lambda x: np.log(predicted(x) / measured), start, bounds=(-12, 12), diff_step=1e-3)
    compute, network = (float(f"{s:.6g}") for s in scales(found.x))
    network = compute if both else network
    final = np.asarray(predict(compute, network), float)
    errors = np.abs(final / measured - 1)
    return Calibration(
        compute_scale=compute, network_scale=network, residual=round(float(np.median(errors)), 5),
        worst=round(float(errors.max()), 5),
        steps=tuple((n, float(f"{p:.6g}"), float(f"{m:.6g}")) for n, p, m in zip(names, final, measured, strict=True)),
    )  # fmt: skip
