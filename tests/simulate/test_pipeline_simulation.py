"""The simulated pipeline against closed forms and against a plain recursion over the schedule."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soapjax.simulate import pipeline_tasks
from soapjax.simulate.pipeline_tasks import StageLoad, Transfer
from soapjax.simulate.pipeline_timeline import memory_of, predicted_times, simulate_pipeline
from soapjax.strategy.pipeline import Pipeline, Stage
from soapjax.strategy.schedules import actions, groups_of, needs


def pipeline(schedule, num_stages, num_microbatches, *, groups=None, replicas=None, remat=()):
    replicas = replicas or [1] * num_stages
    stages, first = [], 0
    for i, r in enumerate(replicas):
        devices = (i % groups,) if groups else tuple(range(first, first + r))
        stages.append(Stage(operators=(f"op{i}",), devices=devices, replicas=r, rematerialise=i in remat))
        first += r
    return Pipeline(schedule=schedule, num_microbatches=num_microbatches, stages=tuple(stages))


def makespan(p, loads, delay_s=0.0):
    """Passes in schedule order, each when its group is free and what it needs has arrived; links never busy."""
    group_of = {i: g for g, group in enumerate(groups_of(p)) for i in group}
    orders, ends = actions(p), {}
    free, position = [0.0] * len(orders), [0] * len(orders)
    while any(q < len(o) for q, o in zip(position, orders, strict=True)):
        for g, order in enumerate(orders):
            while position[g] < len(order) and all(n in ends for n in needs(order[position[g]], len(p.stages))):
                a = order[position[g]]
                load = loads[a.stage]
                again_s = load.forward_s if p.stages[a.stage].rematerialise else 0.0
                took = {
                    "forward": load.forward_s, "recompute": again_s, "backward": load.backward_s, "update": load.update_s
                }[a.kind]  # fmt: skip
                arrived = [ends[n] + (delay_s if group_of[n.stage] != g else 0.0) for n in needs(a, len(p.stages))]
                ends[a] = free[g] = max([free[g], *arrived]) + took
                position[g] += 1
    return max(ends.values())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@given(st.integers(1, 8), st.integers(1, 20), st.floats(0.1, 5), st.floats(0.1, 5))
@settings(max_examples=30)
def test_equal_stages_have_the_papers_bubble(schedule, num_stages, num, forward_s, backward_s):
    found = simulate_pipeline(pipeline(schedule, num_stages, num), [StageLoad(forward_s, backward_s, 0.0)] * num_stages, ())
    assert found.step_time_s == pytest.approx((num + num_stages - 1) * (forward_s + backward_s))


@given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 4), st.floats(0.1, 5))
@settings(max_examples=30)
def test_interleaving_divides_the_bubble(groups, chunks, rounds, forward_s):
    """Narayanan et al. 2021, section 2.2.2: the bubble is (G - 1)/V passes of a whole group."""
    num = groups * rounds
    p = pipeline("interleaved", groups * chunks, num, groups=groups)
    found = simulate_pipeline(p, [StageLoad(forward_s, 2 * forward_s, 0.0)] * (groups * chunks), ())
    whole = chunks * 3 * forward_s
    assert found.step_time_s == pytest.approx(num * whole + (groups - 1) / chunks * whole)


loads_of = st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 9), st.floats(0, 2)), min_size=1, max_size=5)


@given(st.sampled_from(["gpipe", "1f1b"]), loads_of, st.integers(1, 9), st.lists(st.booleans(), min_size=5, max_size=5))
@settings(max_examples=80)
def test_any_stages_run_as_the_schedule_says(schedule, figures, num, remat):
    loads = [StageLoad(*f) for f in figures]
    p = pipeline(schedule, len(loads), num, remat=[i for i, r in enumerate(remat) if r])
    assert simulate_pipeline(p, loads, ()).step_time_s == pytest.approx(makespan(p, loads))


@given(st.sampled_from(["gpipe", "1f1b"]), loads_of, st.integers(1, 9), st.floats(0.01, 3))
@settings(max_examples=60)
def test_transfers_delay_and_queue(schedule, figures, num, seconds):
    """At least the time with links that are never busy; exactly that where no two transfers can meet."""
    loads = [StageLoad(*f) for f in figures]
    p = pipeline(schedule, len(loads), num)
    sends = [Transfer(i, i + 1, 0, seconds, seconds) for i in range(len(loads) - 1)]
    found = simulate_pipeline(p, loads, sends)
    least = makespan(p, loads, seconds)
    assert found.step_time_s >= least * (1 - 1e-12)
    if num == 1:
        assert found.step_time_s == pytest.approx(least)
    for task in found.tasks:
        assert task.duration_s > 0
    # A device does one pass at a time, a link one transfer each way.
    streams = {}
    for task in found.tasks:
        for d in task.devices:
            leaves = d in p.stages[task.stage].devices
            streams.setdefault((d, task.level, leaves), []).append((task.start_s, task.start_s + task.duration_s))
    for spans in streams.values():
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(sorted(spans)))


def test_a_slow_link_is_the_bottleneck():
    p = pipeline("1f1b", 2, 50)
    found = simulate_pipeline(p, [StageLoad(1.0, 1.0, 0.0)] * 2, [Transfer(0, 1, 0, 3.0, 3.0)])
    # Two micro-batches are in flight; there and back one takes 1 + 3 + 2 + 3 + 1 s. What goes does not wait for what comes.
    assert 25 * 10 <= found.step_time_s <= 25 * 10 + 6
    # What leaves a stage for two others queues, where it is not on two levels of links.
    p3 = pipeline("gpipe", 3, 20)
    loads = [StageLoad(0.1, 0.1, 0.0)] * 3
    one = simulate_pipeline(p3, loads, [Transfer(0, 1, 0, 1.0, 1.0), Transfer(0, 2, 0, 1.0, 1.0)])
    two = simulate_pipeline(p3, loads, [Transfer(0, 1, 0, 1.0, 1.0), Transfer(0, 2, 1, 1.0, 1.0)])
    assert two.step_time_s < 0.7 * one.step_time_s


@pytest.mark.parametrize("replicas, times, expected", [([1, 1, 1], [2, 3, 1], 3), ([15, 1], [30, 1.5], 2), ([2, 3], [4, 9], 3)])
def test_pipedream_reaches_its_bottleneck(replicas, times, expected):
    """In the steady state a minibatch takes as long as the slowest stage divided by its replicas."""
    p = pipeline("pipedream", len(replicas), 30, replicas=replicas)
    loads = [StageLoad(t / 3, 2 * t / 3, 0.0) for t in times]
    assert simulate_pipeline(p, loads, ()).step_time_s == pytest.approx(30 * expected, rel=0.02)


def test_replicas_sum_their_gradients_once_a_round():
    p = pipeline("pipedream", 1, 40, replicas=[4])
    found = simulate_pipeline(p, [StageLoad(1.0, 2.0, 0.5, sync_s=0.25)], ())
    assert found.step_time_s == pytest.approx(10 * 3.75, rel=0.05)
    assert sum("sum of gradients" in t.name for t in found.tasks) == sum("update" in t.name for t in found.tasks)


@given(st.integers(1, 6), st.integers(1, 12))
@settings(max_examples=30)
def test_memory_counts_what_is_in_flight(num_stages, num):
    load = StageLoad(
        1.0, 2.0, 0.1, parameter_bytes=10, state_bytes=30, gradient_bytes=10, unsummed_bytes=10, input_bytes=1, kept_bytes=20,
        working_bytes=25,
    )  # fmt: skip
    loads = [load] * num_stages
    every = range(num_stages)
    own = 25 + (10 if num > 1 else 0)  # the working set, and a micro-batch's gradients beside their sums
    found = simulate_pipeline(pipeline("gpipe", num_stages, num), loads, ())
    assert found.memory_bytes == (40 + (num - 1) * 20 + own,) * num_stages
    again = simulate_pipeline(pipeline("gpipe", num_stages, num, remat=every), loads, ())
    assert again.memory_bytes == (40 + (num - 1) * 1 + own,) * num_stages
    held = [min(num, num_stages - i) for i in every]
    plain = simulate_pipeline(pipeline("1f1b", num_stages, num), loads, ())
    # Where not all are held, the next one arrives.
    assert plain.memory_bytes == tuple(40 + (h - 1) * 20 + own + (h < num) for h in held)
    stashed = simulate_pipeline(pipeline("pipedream", num_stages, num), loads, ())
    assert stashed.memory_bytes == tuple(40 + (h - 1) * (20 + 10) + own + (h < num) for h in held)


def fullest(p, loads):
    """Bytes of each group of devices: all its stages' micro-batches, one after the other, by what is alive of each."""
    found = {}
    for group, order in zip(groups_of(p), actions(p), strict=True):
        stays = sum(loads[i].state_bytes + loads[i].gradient_bytes for i in group)
        keeps = {i: loads[i].input_bytes if p.stages[i].rematerialise else loads[i].kept_bytes for i in group}
        alive, peaks = {}, []  # (stage, micro-batch) -> bytes
        ends = "weights" if p.schedule == "zb-h1" else "backward"
        most = {i: min(p.num_microbatches, max_held(order, i, ends)) for i in group}
        for a in order:
            others = sum(size for at, size in alive.items() if at != (a.stage, a.microbatch))
            load = loads[a.stage]
            working = load.split_working_bytes if p.schedule == "zb-h1" else load.working_bytes
            own = max(working, load.kept_bytes) if a.kind != "update" else 0.0
            arriving = loads[a.stage].input_bytes if own and most[a.stage] < p.num_microbatches else 0.0
            both = loads[a.stage].input_bytes if own and p.schedule == "zb-h1" and p.stages[a.stage].rematerialise else 0.0
            peaks.append(stays + others + own + arriving + both)
            if a.kind == "forward":
                alive[a.stage, a.microbatch] = keeps[a.stage]
            elif a.kind == "recompute":
                alive[a.stage, a.microbatch] += loads[a.stage].kept_bytes
            elif a.kind == ends:
                del alive[a.stage, a.microbatch]
            elif a.kind == "backward":
                again = p.stages[a.stage].rematerialise
                alive[a.stage, a.microbatch] = load.between_bytes + (load.input_bytes if again else load.kept_for_weights_bytes)
        found |= dict.fromkeys(group, max(peaks))
    return [found[i] for i in range(len(p.stages))]


def max_held(order, stage, end):
    held = list(itertools.accumulate((a.kind == "forward") - (a.kind == end) for a in order if a.stage == stage))
    return max(held)


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1"]), st.integers(2, 4), st.integers(1, 3), st.integers(1, 7),
    st.booleans(), st.lists(st.tuples(*[st.integers(1, 50)] * 7), min_size=12, max_size=12),
)  # fmt: skip
@settings(max_examples=60)
def test_stages_on_the_same_devices_hold_what_all_of_them_have_in_flight(schedule, groups, chunks, rounds, again, sizes):
    chunks = chunks if schedule in ("gpipe", "interleaved") else 1
    p = pipeline(schedule, groups * chunks, groups * rounds, groups=groups, remat=range(groups * chunks) if again else ())
    names = "state", "input", "kept", "working", "between", "kept_for_weights", "split_working"
    rows = [{f"{name}_bytes": n for name, n in zip(names, row, strict=True)} for row in sizes[: groups * chunks]]
    loads = [StageLoad(1.0, 2.0, 0.1, **row) for row in rows]
    assert memory_of(p, loads)[0] == pytest.approx(fullest(p, loads))


def test_the_batch_is_there_as_a_whole_and_in_parts():
    load = StageLoad(1.0, 2.0, 0.1, batch_bytes=3)
    assert simulate_pipeline(pipeline("1f1b", 1, 5), [load], ()).memory_bytes == (2 * 5 * 3,)


@given(st.integers(1, 6), st.integers(6, 20), st.floats(0.1, 5))
@settings(max_examples=30)
def test_zero_bubble_has_a_third_of_the_bubble(num_stages, num, pass_s):
    """Qi et al. 2023, table 1: (S - 1)(F + B - W), against (S - 1)(F + B + W); F = B = W here."""
    load = StageLoad(pass_s, 2 * pass_s, 0.0, inputs_s=pass_s, weights_s=pass_s)
    found = simulate_pipeline(pipeline("zb-h1", num_stages, num), [load] * num_stages, ())
    assert found.step_time_s == pytest.approx((3 * num + num_stages - 1) * pass_s)


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 20), st.floats(0.1, 5))
@settings(max_examples=40)
def test_what_is_computed_again_needs_no_gradient(schedule, num_stages, num, pass_s):
    """GPipe, section 2.3: the bubble is that of passes without recomputation, which is done while a stage waits."""
    load = StageLoad(pass_s, 2 * pass_s, 0.0)
    found = simulate_pipeline(pipeline(schedule, num_stages, num, remat=range(num_stages)), [load] * num_stages, ())
    assert found.step_time_s == pytest.approx((4 * num + 3 * (num_stages - 1)) * pass_s)


@pytest.mark.parametrize("schedule, groups", [("1f1b", None), ("gpipe", None), ("zb-h1", None), ("interleaved", 3)])
def test_a_long_step_is_predicted_from_a_short_one(schedule, groups):
    p = pipeline(schedule, 6, 72, groups=groups)
    loads = [StageLoad(1 + 0.1 * i, 2.0, 0.3, kept_bytes=7.0, inputs_s=1.2, weights_s=0.9) for i in range(6)]
    transfers = [Transfer(i, i + 1, 0, 0.2, 0.1, sums_s=0.5 * (i == 2), parameters_s=0.3 * (i == 2)) for i in range(5)]
    whole, found = simulate_pipeline(p, loads, transfers), predicted_times(p, loads, transfers)
    assert found.step_time_s == pytest.approx(whole.step_time_s, rel=1e-9)
    assert (found.memory_bytes, found.in_flight) == (whole.memory_bytes, whole.in_flight)
    assert len(found.tasks) < len(whole.tasks)


def test_what_is_sent_once_is_waited_for():
    """Parameters of the first stage that the last one reads too, before its first pass; its part of their gradient at the end."""
    p, loads = pipeline("1f1b", 2, 3), [StageLoad(1.0, 1.0, 1.0)] * 2
    plain = simulate_pipeline(p, loads, [Transfer(0, 1, 0, 0.0, 0.0)])
    late = simulate_pipeline(p, loads, [Transfer(0, 1, 0, 0.0, 0.0, parameters_s=5.0, sums_s=7.0)])
    assert late.step_time_s == pytest.approx(plain.step_time_s + (5.0 - 1.0) + (7.0 - 1.0))


def test_what_an_earlier_pipeline_of_the_same_shape_took_leaves_no_trace():
    """Tasks are kept by their shape: loads, casts, and which transfers there are, are read anew."""
    p = pipeline("1f1b", 3, 4)
    casting = p.model_copy(update={"stages": tuple(s.model_copy(update={"keeps_casts": True}) for s in p.stages)})
    loads = [StageLoad(1.0, 2.0, 0.5, casts_s=0.25)] * 3
    cases = [
        (p, loads, [Transfer(0, 1, 0, 0.5, 0.5), Transfer(1, 2, 0, 0.5, 0.5)]),
        (p, [StageLoad(2.0, 1.0, 0.5)] * 3, [Transfer(0, 1, 0, 0.5, 0.0), Transfer(1, 2, 0, 0.0, 0.5)]),
        (casting, loads, [Transfer(0, 1, 0, 0.5, 0.5, parameters_s=3.0), Transfer(1, 2, 0, 0.5, 0.5, sums_s=2.0)]),
        (pipeline("1f1b", 3, 4, remat=[1]), loads, [Transfer(0, 1, 1, 0.5, 0.5), Transfer(0, 2, 0, 0.5, 0.5)]),
    ]

    def first(case):
        pipeline_tasks._expanded.cache_clear()
        return simulate_pipeline(*case)

    alone = [first(case) for case in cases]
    for _ in range(2):
        assert [simulate_pipeline(*case) for case in cases] == alone
    assert len({found.step_time_s for found in alone}) == len(cases)
