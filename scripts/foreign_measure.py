"""One public step under one planner beside plain `jax.jit`: its row of `foreign_models.py`.

Both sides start from the same arguments and are fed their own results. A step whose numbers move apart is not wrong by that
alone: reinforcement learning and deep nets amplify rounding. So the bound is how far one device goes from itself within the same
steps on arguments that are moved by rounding. The proof is `verify`'s: loss and gradients of one step in float64.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from foreign.registry import Case, Made

import soapjax
from soapjax.errors import SoapjaxError
from soapjax.execute.compiled.proof import verify
from soapjax.execute.spmd.planned_evaluator import bind_plan
from soapjax.strategy.plan import Plan

COMPILED = "/jax/core/compile/backend_compile_duration"  # jax.monitoring's event, once for every compiled program
NUM_STEPS = 4
OWN_BOUND, OWN_FACTOR = 1e-4, 3  # of results in the step's own precision, after NUM_STEPS steps
DRIFT = 1e-2  # what an optimizer that divides by tiny gradients makes of rounding within NUM_STEPS steps of a proven step
MOVED_BY = 4  # units of the precision
NUM_MOVED = 3


class Run(NamedTuple):
    """Calls of one step: results as NumPy arrays, seconds, and programs compiled, call by call."""

    results: list[list[np.ndarray | None]]
    call_s: list[float]
    compilations: list[int]


def measured(case: Case, planner: str, *, proposals: int, seed: int = 0) -> dict[str, Any]:
    """The row of a case. Whatever fails is said in `status` and `error`; what was measured before stays in the row."""
    row: dict[str, Any] = {"status": "adapter fails"}
    try:
        made = case.build()
        jitted = jax.jit(made.step)
        plain = run(jitted, made)
        row |= {"jit_compilations": spaced(plain.compilations), "jit_first_s": plain.call_s[0], "jit_second_s": plain.call_s[1]}
        with heard() as said:
            row["status"] = "not planned"
            begin = time.perf_counter()
            found = soapjax.plan(made.step, *made.args, topology="cpu8", planner=planner, proposals=proposals, seed=seed)
            row["plan_s"] = time.perf_counter() - begin
            row |= shares(found.plan)
            row["notes"] = " / ".join(found.plan.provenance.notes)
            row["status"] = "does not run"
            # Prepared before: what compiles is the step alone, not the planner that prices the plan again.
            planned = run(soapjax.soap_shard(made.step, plan=found.plan).prepare(*made.args), made)
            row |= {"compilations": spaced(planned.compilations), "first_s": planned.call_s[0], "second_s": planned.call_s[1]}
            difference, bound = compared(planned, plain, made, jitted)
            row |= {"difference": difference, "difference_bound": bound, "status": "wrong results"}
            if not difference <= bound:
                row["error"] = f"results of {NUM_STEPS} steps differ by {difference:.1e}; one device from itself by {bound:.1e}"
            else:
                row["status"] = "not verified"
            row |= proof(found, made)
            if row["is_proven"] and row["status"] == "not verified":
                row["status"] = "proven"
            elif row["is_proven"] and difference <= DRIFT:
                row["status"] = "proven, drifts"
    except SoapjaxError as e:
        row["error"] = " / ".join(map(str, e.problems))
    except Exception as e:  # public code and what is under test may raise anything
        where = traceback.extract_tb(e.__traceback__)[-1]
        row["error"] = f"{type(e).__name__}: {str(e).strip()[:600]} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
    if "plan_s" in row or row["status"] == "not planned":
        row["warnings"] = " / ".join(dict.fromkeys(said))
    return {k: v.replace("\n", " ") if isinstance(v, str) else v for k, v in row.items()}


def run(fn: Callable[..., Any], made: Made, args: tuple[Any, ...] | None = None) -> Run:
    """`NUM_STEPS` calls, each fed with the results of the one before."""
    args = made.args if args is None else args
    out = Run([], [], [])
    for _ in range(NUM_STEPS):
        with counted() as compiled:
            begin = time.perf_counter()
            result = jax.block_until_ready(fn(*args))
            out.call_s.append(time.perf_counter() - begin)
        out.compilations.append(len(compiled))
        out.results.append([as_numpy(x) for x in jax.tree.leaves(result)])
        args = made.next_args(args, result)
    return out


@contextlib.contextmanager
def counted() -> Iterator[list[float]]:
    """Seconds of every compilation while it is open."""
    seconds: list[float] = []

    def listen(event: str, duration: float, **kwargs: Any) -> None:
        if is_open and event == COMPILED:
            seconds.append(duration)

    is_open = True
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        is_open = False  # there is no public way to take a listener back


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Python warnings and the package's logged ones."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("soapjax")
    log.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            yield said
        finally:
            log.removeHandler(handler)
            said += [str(w.message) for w in caught if not issubclass(w.category, DeprecationWarning | ResourceWarning)]


def as_numpy(x: Any) -> np.ndarray | None:
    """A copy, which the next call cannot overwrite; a key's words, and None of what is no array."""
    if not hasattr(x, "dtype"):
        return np.array(x) if isinstance(x, bool | int | float | complex) else None
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    wide = jnp.float32 if jax.dtypes.issubdtype(x.dtype, np.floating) and x.dtype.itemsize < 4 else x.dtype
    return np.array(x).astype(wide)


def compared(planned: Run, plain: Run, made: Made, jitted: Callable[..., Any]) -> tuple[float, float]:
    """The largest difference of any result of the last step, and what rounding alone makes of it on one device: of `jitted`."""
    difference = distance(planned.results[-1], plain.results[-1])
    bound = OWN_BOUND
    if not difference <= bound:
        rng, eps = np.random.default_rng(0), coarsest(made)
        for _ in range(NUM_MOVED):
            moved = run(jitted, made, jax.tree.map(lambda x: moved_by_rounding(x, rng, eps), made.args))
            bound = max(bound, OWN_FACTOR * distance(moved.results[-1], plain.results[-1]))
    return difference, bound


def distance(found: list[np.ndarray | None], wanted: list[np.ndarray | None]) -> float:
    """Of floating-point leaves the norm of the difference over the norm of all of them or their own; 1 where integers differ much.

    A leaf that is tiny beside the others is compared with a millionth of the whole.
    """
    if len(found) != len(wanted):
        return float("inf")
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a is not None and b is not None]
    inexact = [(a, b) for a, b in pairs if np.issubdtype(b.dtype, np.inexact)]
    finite = [b[np.isfinite(b)] for _, b in inexact]
    whole = float(np.sqrt(sum(float(np.vdot(b, b).real) for b in finite))) if inexact else 0.0
    worst = 0.0
    for a, b in inexact:
        a, b = np.atleast_1d(a).astype(np.complex128), np.atleast_1d(b).astype(np.complex128)
        if a.shape != b.shape or (np.isnan(a) != np.isnan(b)).any():
            return float("inf")
        kept = np.isfinite(b)
        norm = max(float(np.linalg.norm(b[kept])), 1e-6 * whole, np.finfo(np.float64).tiny)
        error = float(np.linalg.norm(a[kept] - b[kept])) / norm
        worst = error if not error <= worst else worst
    for a, b in pairs:
        if not np.issubdtype(b.dtype, np.inexact):
            worst = max(worst, float(np.mean(a != b)) if a.shape == b.shape and b.size else 0.0)
    return worst


def coarsest(made: Made) -> float:
    """The unit of the lowest precision in which the step computes: that of bfloat16, say, on parameters of float32."""
    program = soapjax.trace(made.step, *made.args).program
    dtypes = {a.dtype for a in program.avals.values() if hasattr(a, "dtype") and jax.dtypes.issubdtype(a.dtype, np.floating)}
    return max(float(jnp.finfo(d).eps) for d in dtypes)


def moved_by_rounding(x: Any, rng: np.random.Generator, eps: float) -> Any:
    if not hasattr(x, "dtype") or not jax.dtypes.issubdtype(x.dtype, np.floating):
        return x
    by = 1 + MOVED_BY * eps * rng.integers(-1, 2, x.shape)
    return (np.asarray(x, np.float64) * by).astype(x.dtype)


def shares(plan: Plan) -> dict[str, Any]:
    """How much of the step's arithmetic is split over devices, and how many operators are split at all."""
    num_split = sum(any(v != "replicate" for v in o.axes.values()) for o in plan.operators.values())
    return {"num_operators": len(plan.operators), "num_split": num_split, "flops_split": plan.prediction.split_flops_share}


def proof(found: soapjax.Planned, made: Made) -> dict[str, Any]:
    """What `soapjax verify` proves of the plan."""
    program = bind_plan(found.step, found.plan, devices=jax.devices()[: found.plan.num_devices])
    v = verify(program, jax.tree.leaves(made.args))
    error = max(v.gradient_rel_error, v.loss_rel_error)
    error64 = max(v.gradient_rel_error_float64, v.loss_rel_error_float64)
    is_within = v.gradient_rel_error <= v.gradient_rel_bound and v.loss_rel_error <= v.loss_rel_bound
    row = {
        "float64_error": error64, "own_error": error, "own_bound": max(v.gradient_rel_bound, v.loss_rel_bound),
        "num_gradients": v.num_gradients, "ops_planned": v.planned_ops, "ops_as_planned": v.ops_as_planned,
        "ops_unchecked": v.ops_unchecked, "is_proven": int(v.is_proven_in_float64 and is_within),
    }  # fmt: skip
    if not row["is_proven"]:
        row["error"] = f"{v.worst_leaf}: float64 error {error64:.1e}, own {error:.1e} of {row['own_bound']:.1e}"
    elif v.differences:
        row["error"] = f"other than planned: {v.differences[0]}"
    return row


def plain_row(case: Case) -> dict[str, Any]:
    """That a case runs under `jax.jit` at all: the adapter's own test."""
    try:
        made = case.build()
        done = run(jax.jit(made.step), made)
    except Exception as e:
        traceback.print_exc()
        return {"status": "adapter fails", "error": f"{type(e).__name__}: {str(e).strip()[:300]}"}
    numbers = [x for x in done.results[-1] if x is not None and np.issubdtype(x.dtype, np.inexact)]
    state = "runs" if all(np.isfinite(x).all() for x in numbers) else "runs, with numbers that are not finite"
    return {"status": state, "jit_compilations": spaced(done.compilations), "jit_first_s": done.call_s[0]}


def spaced(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))
