"""Exhaustive search by branch and bound: for problems small enough to prove the optimum.

Operators are assigned in program order. The bound of a partial assignment is admissible: the compute stream runs
one task at a time, so a step takes at least the sum of the compute times, those of open operators at their
shortest. Complete assignments are simulated in batches.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from soapjax.errors import Problem, SoapjaxError
from soapjax.search.baselines import replicate_all
from soapjax.search.mcmc import starts
from soapjax.search.problem import Budget, PlanningProblem, SearchResult
from soapjax.strategy.strategy import Strategy

MAX_LEAVES = 5_000_000
_BATCH = 512


def exhaustive(rng_key: Array, problem: PlanningProblem, budget: Budget) -> SearchResult:
    """The proven optimum of the space.

    Raises: SoapjaxError where the space is too large to enumerate (the bound may still prune most of it).
    """
    begin = time.monotonic()
    configs = [_configs(problem, n) for n in range(problem.graph.num_operators)]
    total = float(np.prod([float(len(c)) for c in configs]))
    if total > MAX_LEAVES * 1e6:
        raise SoapjaxError(
            Problem("planner exhaustive", f"{total:.3g} strategies", f"at most {MAX_LEAVES * 1e6:.0e}", "use planner mcmc here")
        )
    compute = _compute_seconds(problem, configs)
    shortest = np.array([c.min() for c in compute])
    rest = np.concatenate([np.cumsum(shortest[::-1])[::-1][1:], [0.0]])
    best = starts(rng_key, problem)[0]
    order = [np.argsort(c, kind="stable") for c in compute]
    pending: list[tuple[int, ...]] = []
    evaluated = 0
    stopped_by = "complete"

    def flush() -> None:
        nonlocal best, evaluated
        if not pending:
            return
        padded = pending + [pending[-1]] * (_BATCH - len(pending))
        found = problem.evaluate([_strategy(configs, choice) for choice in padded])
        evaluated += len(pending)
        best = min([best, *found[: len(pending)]], key=lambda e: (not e.is_feasible, e.cost))
        pending.clear()

    try:
        stack: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        while stack:
            choice, spent = stack.pop()
            n = len(choice)
            if best.is_feasible and spent + (rest[n - 1] if n else shortest.sum()) >= best.cost * (1 + 1e-5):
                continue
            if n == len(configs):
                pending.append(choice)
                if len(pending) == _BATCH:
                    flush()
                    if budget.progress is not None:
                        budget.progress(evaluated, best.step_time_s, time.monotonic() - begin)
                    if evaluated > MAX_LEAVES or (budget.num_proposals and evaluated >= budget.num_proposals):
                        stopped_by = "proposals"
                        break
                    if budget.seconds is not None and time.monotonic() - begin > budget.seconds:
                        stopped_by = "seconds"
                        break
                continue
            stack += [((*choice, int(k)), spent + float(compute[n][k])) for k in order[n][::-1]]
        flush()
    except KeyboardInterrupt:
        stopped_by = "interrupted"
    notes = ("proven optimal",) if stopped_by == "complete" else ("not all strategies were visited: no proof",)
    return SearchResult(best, evaluated, time.monotonic() - begin, stopped_by, (), notes)


def _configs(problem: PlanningProblem, n: int) -> list[tuple[tuple[int, ...], int]]:
    storages = range(len(problem.space.storages)) if problem.space.owns_parameters[n] else (0,)
    return [(axes, s) for axes in problem.space.configs(n) for s in storages]


def _strategy(configs: list, choice: tuple[int, ...]) -> Strategy:
    picked = [configs[n][k] for n, k in enumerate(choice)]
    return Strategy(np.array([a for a, _ in picked], np.int8), np.array([s for _, s in picked], np.int8))


def _compute_seconds(problem: PlanningProblem, configs: list) -> list[np.ndarray]:
    """Seconds of compute of each operator's tasks, per config; an operator's compute depends on its own config only."""
    tables = problem.simulator.tables
    base = replicate_all(problem)

    @jax.jit
    def seconds(axes: Array, storage: Array) -> Array:
        compute = jax.vmap(problem.simulator.evaluate_one)(axes, storage).durations.compute_s
        return jnp.zeros((axes.shape[0], problem.graph.num_operators)).at[:, tables.task_op].add(compute)

    found: list[np.ndarray] = []
    for n, choices in enumerate(configs):
        out = []
        for k in range(0, len(choices), 256):
            part = choices[k : k + 256]
            padded = part + [part[-1]] * (256 - len(part))
            axes = np.repeat(base.axes[None], 256, axis=0)
            storage = np.repeat(base.storage[None], 256, axis=0)
            axes[:, n] = [a for a, _ in padded]
            storage[:, n] = [s for _, s in padded]
            out.append(np.asarray(seconds(jnp.asarray(axes), jnp.asarray(storage)))[: len(part), n])
        found.append(np.concatenate(out))
    return found
