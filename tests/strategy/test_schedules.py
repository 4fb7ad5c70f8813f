"""Schedules: every pass once, in an order that the data allows, holding no more micro-batches than the papers say."""

import hypothesis
import hypothesis.strategies as st
import pytest

from soapjax.errors import SoapjaxError
from soapjax.strategy.held import in_flight, most_held
from soapjax.strategy.pipeline import Pipeline, Stage
from soapjax.strategy.schedules import actions, dispatch_order, groups_of, needs


def pipeline(schedule, num_stages, num_microbatches, *, num_groups=None, replicas=None):
    replicas = replicas or [1] * num_stages
    stages, first = [], 0
    for i, r in enumerate(replicas):
        devices = (i % num_groups,) if num_groups else tuple(range(first, first + r))
        stages.append(Stage(operators=(f"op{i}",), devices=devices, replicas=r))
        first += r
    return Pipeline(schedule=schedule, num_microbatches=num_microbatches, stages=tuple(stages))


@st.composite
def pipelines(draw):
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "pipedream"]))
    if schedule in ("interleaved", "gpipe"):
        groups, chunks, rounds = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
        return pipeline(schedule, groups * chunks, groups * rounds, num_groups=groups)
    if schedule == "pipedream":
        replicas = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
        return pipeline(schedule, len(replicas), 12 * draw(st.integers(1, 3)), replicas=replicas)
    return pipeline(schedule, draw(st.integers(1, 8)), draw(st.integers(1, 20)))


@hypothesis.given(pipelines())
@hypothesis.settings(max_examples=150)
def test_every_pass_runs_once_after_what_it_needs(p):
    order = dispatch_order(p)  # raises at a deadlock
    assert sorted(order) == sorted(a for group in actions(p) for a in group)
    place = {a: k for k, a in enumerate(order)}
    for i in range(len(p.stages)):
        for kind in ("forward", "backward"):
            assert [a.microbatch for a in sorted(order) if a.stage == i and a.kind == kind] == list(range(p.num_microbatches))
    for a in order:
        assert all(place[n] < place[a] for n in needs(a, len(p.stages)))
    for group in actions(p):
        assert [place[a] for a in group] == sorted(place[a] for a in group)
    updates = {i: [a for a in order if a.kind == "update" and a.stage == i] for i in range(len(p.stages))}
    for i, found in updates.items():
        assert len(found) == (p.num_microbatches // p.stages[i].replicas if p.schedule == "pipedream" else 1)
        if p.schedule != "pipedream":
            assert place[found[0]] > max(place[a] for a in order if a.stage == i and a.kind != "update")


@hypothesis.given(st.integers(1, 8), st.integers(1, 20))
def test_micro_batches_held(num_stages, num):
    assert in_flight(pipeline("gpipe", num_stages, num)) == (num,) * num_stages
    assert in_flight(pipeline("1f1b", num_stages, num)) == tuple(min(num, num_stages - i) for i in range(num_stages))
    assert in_flight(pipeline("interleaved", num_stages, num)) == in_flight(pipeline("1f1b", num_stages, num))


def test_pipedream_admits_two_minibatches_per_replica_of_15_1():
    assert in_flight(pipeline("pipedream", 2, 60, replicas=[15, 1])) == (30, 1)
    assert in_flight(pipeline("pipedream", 4, 60)) == (4, 3, 2, 1)


def test_interleaved_idles_less():
    """Two chunks on each of 4 groups: the bubble, (G - 1) / V forward and backward passes, is half of 1F1B's."""

    def makespan(p, pass_s):
        orders, ends, free = actions(p), {}, [0.0] * len(groups_of(p))
        position = [0] * len(orders)
        while any(q < len(o) for q, o in zip(position, orders, strict=True)):
            for g, order in enumerate(orders):
                while position[g] < len(order) and all(n in ends for n in needs(order[position[g]], len(p.stages))):
                    a = order[position[g]]
                    start = max([free[g], *(ends[n] for n in needs(a, len(p.stages)))])
                    ends[a] = free[g] = start + {"forward": 1, "backward": 2, "update": 0}[a.kind] * pass_s
                    position[g] += 1
        return max(ends.values())

    plain, chunked = pipeline("1f1b", 4, 8), pipeline("interleaved", 8, 8, num_groups=4)
    assert makespan(plain, 1.0) == pytest.approx(3 * (8 + 3))
    assert makespan(chunked, 0.5) == pytest.approx(3 * (8 + 1.5))


def keeping_casts(made):
    return made.model_copy(update={"stages": tuple(s.model_copy(update={"keeps_casts": True}) for s in made.stages)})


@pytest.mark.parametrize(
    "wrong, word",
    [
        (lambda: pipeline("1f1b", 4, 4, num_groups=2), "interleaved"),
        (lambda: pipeline("interleaved", 4, 3, num_groups=2), "multiple of the 2 groups"),
        (lambda: pipeline("gpipe", 2, 0), "at least 1"),
        (lambda: pipeline("1f1b", 2, 4, replicas=[2, 1]), "only pipedream"),
        (lambda: pipeline("pipedream", 2, 5, replicas=[2, 1]), "5 minibatches"),
        (lambda: keeping_casts(pipeline("pipedream", 2, 4)), r"stages\[1\].keeps_casts: got true"),
        (
            lambda: Pipeline(
                schedule="gpipe",
                num_microbatches=2,
                stages=(Stage(operators=("a",), devices=(0, 1)), Stage(operators=("b",), devices=(1, 2))),
            ),
            "its own devices",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(wrong, word):
    with pytest.raises(SoapjaxError, match=word):
        actions(wrong())


@hypothesis.given(st.integers(1, 8), st.integers(1, 20))
@hypothesis.settings(max_examples=40)
def test_zero_bubble_holds_no_more_than_the_first_stage_of_1f1b(num_stages, num):
    """Qi et al. 2023, section 2.3: ZB-H1 needs the memory of 1F1B; stage i puts i micro-batches off, and one that is computed."""
    p = pipeline("zb-h1", num_stages, num)
    assert max(in_flight(p)) <= min(num, num_stages)
    assert most_held(p, "put_off") == tuple(min(i + 1, num) for i in range(num_stages))


def own(order, *, num=2, stages=2, groups=None, again=False):
    made = pipeline("1f1b", stages, num, num_groups=groups).model_copy(update={"schedule": "own", "order": order})
    return recomputed(made) if again else made


def recomputed(p):
    return p.model_copy(update={"stages": tuple(s.model_copy(update={"rematerialise": True}) for s in p.stages)})


def test_recomputation_is_an_action_before_the_backward_pass():
    for schedule in ("gpipe", "1f1b", "interleaved"):
        p = pipeline(schedule, 4, 4, num_groups=2 if schedule == "interleaved" else None)
        plain, again = actions(p), actions(recomputed(p))
        assert [[a for a in order if a.kind != "recompute"] for order in again] == list(map(list, plain))
        for order in again:
            before = [order[k - 1] for k, a in enumerate(order) if a.kind == "backward"]
            assert before == [a._replace(kind="recompute") for a in order if a.kind == "backward"]
        assert most_held(recomputed(p), "recomputed") == (1,) * 4 and most_held(p, "recomputed") == (0,) * 4
        assert in_flight(p) == in_flight(recomputed(p))
    for schedule in ("zb-h1", "pipedream"):  # one program of the backward pass does it
        assert actions(pipeline(schedule, 4, 4)) == actions(recomputed(pipeline(schedule, 4, 4)))


def test_an_own_order_is_what_it_says():
    for schedule in ("1f1b", "zb-h1", "gpipe"):
        named = pipeline(schedule, 3, 4)
        letters = {"forward": "F", "backward": "B", "weights": "W"}
        words = tuple(tuple(f"{letters[a.kind]}{a.microbatch}" for a in o if a.kind != "update") for o in actions(named))
        assert actions(own(words, num=4, stages=3)) == actions(named)
    early = own((("F0", "F1", "R0", "R1", "B0", "B1"), ("F0", "B0", "F1", "B1")), again=True)
    assert most_held(early, "recomputed") == (2, 1)
    assert "".join(a.kind[0] for a in actions(early)[1]) == "frbfrbu"  # right before the backward pass, if not said
    shared = own((("F0.0", "F0.2", "B0.2", "B0"), ("F0.1", "B0.1")), num=1, stages=3, groups=2)
    passes = [str(a.stage) + a.kind[0] for a in dispatch_order(shared) if a.kind != "update"]
    assert passes == ["0f", "1f", "2f", "2b", "1b", "0b"]


@pytest.mark.parametrize("order, complaint", [
    ((("F0", "F1", "B0", "B1"),), "2, one for each group"),
    ((("F0", "B0", "F1", "B1"), ("F0", "B0", "F1")), "F1 before B1, each once"),
    ((("F0", "B0", "F1", "B1"), ("B0", "F0", "F1", "B1")), "F0 before B0, each once"),
    ((("F0", "B0", "F1", "B1"), ("F0", "X7", "F1", "B1")), "F, R, B or W and one of 2 micro-batches"),
    ((("F0", "B0", "F1", "B1"), ("F0", "B" + 5000 * "9", "F1", "B1")), "F, R, B or W and one of 2 micro-batches"),
    ((("F0", "B0", "F1", "B1"), ("F0", "B0", "W0", "F1", "B1")), "F1 before B1 before W1"),
    ((("F0", "B0", "F1", "B1"), ("F1", "F0", "B0", "B1")), "deadlock: the groups wait at B0 of stage 0, F1 of stage 1"),
])  # fmt: skip
def test_an_own_order_that_cannot_run_is_refused(order, complaint):
    with pytest.raises(SoapjaxError, match=complaint):
        dispatch_order(own(order))


@pytest.mark.parametrize("words, again, complaint", [
    (("F0", "R0", "B0", "F1", "B1"), False, "R0; expected a stage that keeps its inputs alone"),
    (("F0", "R0", "B0", "W0", "F1", "B1", "W1"), True, "R0; expected no W beside it"),
    (("R0", "F0", "B0", "F1", "B1"), True, "R0 F0 B0; expected F0 before R0 before B0, each once"),
    (("F0", "R0", "R0", "B0", "F1", "B1"), True, "F0 before R0 before B0, each once"),
])  # fmt: skip
def test_a_recomputation_that_cannot_be_is_refused(words, again, complaint):
    with pytest.raises(SoapjaxError, match=complaint):
        actions(own((words, ("F0", "B0", "F1", "B1")), again=again))
