"""How many proposals per second each of the four simulators judges, on one problem and the same proposals.

    python scripts/bench_simulator.py models.nmt --topology p100x16 --json
    python scripts/bench_simulator.py models.transformer_lm --topology p100x16 --set layers=12 --set width=768 --dump problem.npz

Without --set a model's paper sizes are taken, where it has some. Proposals are the search's own, from a strategy that
the search has walked to: blocks of candidates of one operator, and leaps of many operators in the search's proportion. Judged by

* batched_delta   the exact delta for blocks, of which it simulates each distinct config once (`distinct_share`); leaps fall back
                  to the batched full simulation (all is in the time);
* batched_full    costs and simulation of every proposal as a whole, BATCH at a time;
* event_full      Algorithm 1, event_delta  Algorithm 2 and its undo: the simulation alone, given the durations, on fewer proposals.

Two threads where the search uses two. Medians of the repetitions, with smallest and largest; compilation is not in them.
`max_rel_difference` is the largest relative difference of a step time between any two of the four, on proposals that all of
them judged. `mh_steps_per_s` is the rate of Metropolis-Hastings steps of the whole search, without and with compilation.

--dump writes the arrays of the problem, so that another implementation can be timed on it (T items, S streams: 0 computes,
1 + l communicates over link level l; P proposals):

    predecessor int32 [T]     the item to wait for, -1: none. A link's end is folded into the accumulator of the next compute
    is_link, is_compute, is_barrier  bool [T]   item; a compute item starts when the accumulator is there and empties it, a
                              barrier waits for all streams; any other item starts at its predecessor's end
    overlap bool              if false, communication occupies stream 0 too
    base_s float32 [T, S]     durations of the strategy as it is; a stage of duration 0 occupies nothing. The stages of an
                              item run one after the other, each on its stream, in the order of the items
    first int64 [P + 1]       proposal p changes the items item[first[p]:first[p + 1]]
    item int32 [.], seconds float32 [., S]   to these durations
    base_step_s float32 [], step_s float32 [P]   the answers
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # models/

import jax
import jax.numpy as jnp
import numpy as np

import soapjax
from soapjax.costs.evaluate import Durations
from soapjax.errors import Problem, SoapjaxError
from soapjax.planning.entry import planning_problem
from soapjax.search.chain.block_steps import MOST_BLOCKS, UNIFORMS, draws
from soapjax.search.chain.engine import Engine
from soapjax.search.chain.mcmc_planner import BETAS, BLOCKS_PER_ROUND, ROUNDS_PER_LEAP, mcmc
from soapjax.search.chain.moves import NUM_UNIFORMS, State
from soapjax.search.chain.starting_points import starts
from soapjax.search.problem import Budget, PlanningProblem
from soapjax.simulate.event import simulate
from soapjax.simulate.event_delta import DeltaSimulation
from soapjax.simulate.items import Items
from soapjax.simulate.schedule import RESHARD, RESOLVE, SUM
from soapjax.simulate.simulator import BATCH
from soapjax.steps.sourced_models import abstract_model, parse_settings
from soapjax.strategy.configs import Strategy
from soapjax.strategy.plan import ModelSource

EVENT_PROPOSALS = 24
FULL_BATCHES = 3


def problem_of(options: argparse.Namespace) -> PlanningProblem:
    path = options.model if "." in options.model or ":" in options.model else f"models.{options.model}"
    settings = parse_settings(options.set)
    if not settings:
        with contextlib.suppress(ModuleNotFoundError):  # which is told below
            settings = dict(getattr(importlib.import_module(path.split(":")[0]), "PAPER", {}))
    model = abstract_model(ModelSource(path=path, settings=settings))
    return planning_problem(soapjax.trace(model.step, *model.arguments), soapjax.load_topology(options.topology))


class Proposals(NamedTuple):
    """Blocks (operator, candidates) and leaps beside one strategy."""

    operator: np.ndarray  # int32 [R]
    axes: np.ndarray  # int8 [R, Q, A]
    storage: np.ndarray  # int8 [R, Q]
    leaps: State  # [M, ...]


def draw(engine: Engine, at: Any, num_blocks: int) -> Proposals:
    rng = np.random.default_rng(1)
    uniforms = rng.random((num_blocks, UNIFORMS), np.float32)
    drawn = jax.jit(jax.vmap(draws, (None, 0, None, None)))(engine.moves, uniforms, at.base.axes, at.base.storage)
    num_ops, num_axes = engine.problem.graph.num_operators, engine.problem.space.num_axes
    n, axes, storage = (np.asarray(x) for x in drawn[:3])
    axes, storage = axes.transpose(0, 2, 1)[:, : engine.steps, :num_axes], storage[:, : engine.steps]
    # The search leaps up to BATCH steps in one of ROUNDS_PER_LEAP rounds of BLOCKS_PER_ROUND blocks.
    num_leaps = max(1, round(BATCH * num_blocks / (BLOCKS_PER_ROUND * ROUNDS_PER_LEAP)))
    state = State(at.base.axes, at.base.storage)
    drawn_leaps = rng.random((-(-num_leaps // BATCH), BATCH, NUM_UNIFORMS), np.float32)
    some = [engine.programs.leaps(engine.moves, uniforms, state) for uniforms in drawn_leaps]
    leaps = State(*(np.concatenate(x)[:num_leaps] for x in zip(*some, strict=True)))
    return Proposals(n, axes, storage, State(leaps.axes[:, :num_ops, :num_axes], leaps.storage[:, :num_ops]))


def timed(run: Callable[[], Any], repeat: int) -> list[float]:
    run()
    out = []
    for _ in range(repeat):
        begin = time.perf_counter()
        run()
        out.append(time.perf_counter() - begin)
    return out


def rates(count: int, seconds: list[float]) -> dict[str, Any]:
    return {
        "proposals_per_s": count / statistics.median(seconds), "slowest": count / max(seconds), "fastest": count / min(seconds),
        "proposals": count, "repetitions": len(seconds),
    }  # fmt: skip


def measure(problem: PlanningProblem, options: argparse.Namespace) -> dict[str, Any]:
    simulator, pool = problem.simulator, ThreadPoolExecutor(2)
    begun = starts(jax.random.key(options.seed), problem, Budget())
    engine = Engine(problem, begun[0].cost)
    engine.prepare()
    walker = engine.walker(begun[0].strategy, 1.0)
    walker = engine.walk(np.random.default_rng(3), BETAS[1], walker, 2 * BLOCKS_PER_ROUND)
    at = walker.at
    now = engine.strategy(State(at.base.axes, at.base.storage))
    proposals = draw(engine, at, options.blocks)
    num_blocks, steps = proposals.storage.shape

    def judge(operators: np.ndarray, axes: np.ndarray, storage: np.ndarray) -> np.ndarray:
        """Step times [R, Q]; each distinct config of a block is judged once."""
        found = []
        for n, a, s in zip(operators, axes, storage, strict=True):
            _, first, place = np.unique(np.concatenate([a, s[:, None]], 1), axis=0, return_index=True, return_inverse=True)
            found.append(engine.judged(at, int(n), a[first], s[first]).step_time_s[place.reshape(-1)])
        return np.stack(found)

    def full_s_of(states: State) -> np.ndarray:
        """Step times of any number of strategies: BATCH a call, two calls side by side."""
        batch = simulator.batch(*states)
        batch.done()
        return batch.scores.step_time_s

    half = num_blocks // 2
    halves = [tuple(x[part] for x in proposals[:3]) for part in (slice(0, half), slice(half, 2 * half))]
    leaps = [_filled(proposals.leaps, k) for k in range(0, len(proposals.leaps.storage), BATCH)]

    def batched_delta() -> tuple[np.ndarray, np.ndarray]:
        blocks = pool.map(lambda h: judge(*h), halves)
        return np.concatenate(list(blocks)), np.concatenate([full_s_of(x) for x in leaps])

    delta_s = timed(batched_delta, options.repeat)
    times, leap_times = batched_delta()

    rng = np.random.default_rng(0)
    order = rng.permutation(2 * half * steps)[: BATCH * FULL_BATCHES * 2]
    whole = _whole(now, proposals, order // steps, order % steps)
    full_s = timed(lambda: full_s_of(whole), options.repeat)
    full = full_s_of(whole)
    of_order = times[order // steps, order % steps]
    worst = [_worst(of_order, full)]
    for k, batch in enumerate(leaps):
        count = min(BATCH, len(proposals.leaps.storage) - k * BATCH)
        worst.append(_worst(leap_times[k * BATCH : k * BATCH + count], full_s_of(batch)[:count]))

    schedule = simulator.schedule
    batch = simulator.batch(whole.axes[:BATCH], whole.storage[:BATCH])
    costs = jax.tree.map(lambda *x: np.stack(x), *map(batch.costs, range(BATCH)))
    durations = schedule.durations(costs.durations)[:EVENT_PROPOSALS]
    occupies = [schedule.occupies] * EVENT_PROPOSALS
    if costs.holders is not None:
        held = [jax.tree.map(lambda x, i=i: x[i], costs.holders) for i in range(EVENT_PROPOSALS)]
        occupies = [schedule.occupies_of_groups(h) for h in held]
    own = _whole(now, proposals, np.zeros(1, int), np.zeros(1, int), moves=False)
    base_costs = simulator.batch(*own).costs(0)
    delta = DeltaSimulation(
        schedule, schedule.durations(base_costs.durations),
        None if base_costs.holders is None else schedule.occupies_of_groups(base_costs.holders),
    )  # fmt: skip
    event, event_delta, event_s, event_delta_s = [], [], [], []
    for d, o in zip(durations, occupies, strict=True):
        begin = time.perf_counter()
        event.append(simulate(schedule, d, o).makespan_s)
        event_s.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        event_delta.append(delta.change_to(d, None if costs.holders is None else o).makespan_s)
        delta.undo()
        event_delta_s.append(time.perf_counter() - begin)
    for a in (event, event_delta):
        worst += [_worst(np.array(a), full[:EVENT_PROPOSALS]), _worst(np.array(a), of_order[:EVENT_PROPOSALS])]

    searched = mcmc(jax.random.key(options.seed), problem, Budget(seconds=options.seconds))
    walked, seconds = searched.history[0][1], searched.search_s
    begin, cpu = time.perf_counter(), time.process_time()

    def walked_by(c: int) -> int:
        rng, w = np.random.default_rng(c), walker
        for _ in range(max(1, num_blocks // MOST_BLOCKS)):
            w = engine.walk(rng, BETAS[c], w, MOST_BLOCKS)
        return int(w.steps) - int(walker.steps)

    taken = sum(pool.map(walked_by, range(2)))
    steady, of_cpu = taken / (time.perf_counter() - begin), taken / (time.process_time() - cpu)
    result = {
        "batched_delta": rates(2 * half * steps + len(proposals.leaps.storage), delta_s),
        "batched_full": rates(len(order), full_s),
        "event_delta": rates(1, event_delta_s),
        "event_full": rates(1, event_s),
        "max_rel_difference": max(worst),
        "mh_steps_per_s": steady, "mh_steps_per_cpu_s": of_cpu,
        "mh_steps_per_s_with_compilation": searched.num_proposals / seconds,
        "search": {
            "seconds": seconds, "starts_s": walked, "best_step_s": searched.best.step_time_s, "stopped_by": searched.stopped_by,
        },
        "delta_over_full": statistics.median(full_s) / len(order) / statistics.median(delta_s)
        * (2 * half * steps + len(proposals.leaps.storage)),
        "block_size": steps, "distinct_share": _distinct(proposals) / proposals.storage.size,
        "operators": problem.graph.num_operators, "items": problem.simulator.items.num_items,
    }  # fmt: skip
    if options.dump:
        dump(options.dump, problem, base_costs, jax.tree.map(lambda x: x[:BATCH], costs), full[:BATCH])
    pool.shutdown()
    return result


def _distinct(proposals: Proposals) -> int:
    """How many configs the blocks hold, each counted once per block."""
    configs = np.concatenate([proposals.axes, proposals.storage[..., None]], -1)
    return sum(len(np.unique(block, axis=0)) for block in configs)


def _filled(state: State, first: int) -> State:
    """BATCH strategies from `first`, the last repeated."""
    index = np.minimum(np.arange(first, first + BATCH), len(state.storage) - 1)
    return State(jnp.asarray(state.axes[index]), jnp.asarray(state.storage[index]))


def _whole(now: Strategy, proposals: Proposals, r: np.ndarray, q: np.ndarray, *, moves: bool = True) -> State:
    """The strategies that candidates q of blocks r stand for."""
    axes, storage = (np.repeat(x[None], len(r), 0) for x in (now.axes, now.storage))
    if moves:
        rows = np.arange(len(r))
        axes[rows, proposals.operator[r]], storage[rows, proposals.operator[r]] = proposals.axes[r, q], proposals.storage[r, q]
    return State(axes, storage)


def _worst(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(a, np.float64) / np.asarray(b, np.float64) - 1)))


def _item_seconds(items: Items, d: Durations) -> np.ndarray:
    """float32 [..., T, S] of every item on every stream, from the cost model's figures."""
    found = np.zeros((*d.compute_s.shape[:-1], items.num_items, 1 + d.sum_s.shape[-1]), np.float32)
    found[..., items.is_compute, 0] = d.compute_s[..., items.source[items.is_compute]]
    for kind, seconds in ((SUM, d.sum_s), (RESOLVE, d.resolve_s), (RESHARD, d.reshard_s)):
        here = items.kind == kind
        found[..., here, 1:] = seconds[..., items.source[here], :]
    return found


def dump(path: str, problem: PlanningProblem, base, costs, step_s: np.ndarray) -> None:
    items = problem.simulator.items
    before, after = (_item_seconds(items, c.durations) for c in (base, costs))
    changed = [np.flatnonzero((a != before).any(1)) for a in after]
    schedule = problem.simulator.schedule
    occupies = None if base.holders is None else schedule.occupies_of_groups(base.holders)
    base_step = simulate(schedule, schedule.durations(base.durations), occupies).makespan_s
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer, predecessor=items.predecessor, is_link=items.is_link, is_compute=items.is_compute, is_barrier=items.is_barrier,
        overlap=np.array(problem.simulator.tables.topology.device.overlap), base_s=before,
        first=np.cumsum([0, *map(len, changed)]), item=np.concatenate(changed).astype(np.int32),
        seconds=np.concatenate([a[c] for a, c in zip(after, changed, strict=True)]), base_step_s=np.float32(base_step),
        step_s=step_s,
    )  # fmt: skip
    Path(path).write_bytes(buffer.getvalue())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--topology", required=True, help="a shipped name or a TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--blocks", type=int, default=BLOCKS_PER_ROUND * ROUNDS_PER_LEAP, help="of candidates, per repetition")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the search that mh_steps_per_s is measured on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dump", metavar="FILE.npz")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    try:
        wrong = [
            Problem(f"--{name}", str(value), "more than 0", "give a positive number")
            for name, value in (("blocks", options.blocks // 2), ("repeat", options.repeat), ("seconds", options.seconds))
            if not value > 0
        ]
        if options.dump and not Path(options.dump).resolve().parent.is_dir():
            wrong.append(Problem("--dump", options.dump, "a path in an existing folder", "make the folder first"))
        if wrong:
            raise SoapjaxError(wrong)
        result = measure(problem_of(options), options)
    except SoapjaxError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(result))
        return 0
    for name in ("batched_delta", "batched_full", "event_delta", "event_full"):
        r = result[name]
        print(f"{name:14s} {r['proposals_per_s']:12,.0f} proposals/s   {r['slowest']:,.0f} to {r['fastest']:,.0f}")
    print(f"delta over full {result['delta_over_full']:.0f} ×; largest relative difference {result['max_rel_difference']:.1e}")
    print(f"search: {result['mh_steps_per_s']:,.0f} steps/s, with compilation {result['mh_steps_per_s_with_compilation']:,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
