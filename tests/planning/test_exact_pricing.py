"""Which of the pipelines that a search found are priced on the whole graph."""

import math
import types

import pytest

from soapjax.planning.pipelining import pipelines


class Times:
    def __init__(self, step_s, is_feasible):
        self.step_s, self.is_feasible = step_s, is_feasible

    def rank(self, objective):
        return not self.is_feasible, 0.0, self.step_s


def priced(monkeypatch, found, fits, *, took_s=2.0, until=math.inf):
    """(the best, in which order they were priced); every pricing takes `took_s` of a clock that begins at 0."""
    clock, asked = [0.0], []

    def price(problem, one):
        clock[0] += took_s
        asked.append(one)
        return Times(10.0 - len(asked), one in fits)

    monkeypatch.setattr(pipelines, "times_as_it_runs", price)
    monkeypatch.setattr(pipelines.time, "monotonic", lambda: clock[0])
    return pipelines._as_it_runs(types.SimpleNamespace(objective=None), found, until)[0], asked


@pytest.mark.parametrize("found, fits, asked", [
    ("aabcde", "abc", "ab"), ("abcde", "abc", "abc"), ("abcde", "c", "abc"), ("abcde", "d", "abcd"), ("abcde", "e", "abcd"),
    ("a", "", "a"),
])  # fmt: skip
def test_the_first_three_and_others_until_one_fits(found, fits, asked, monkeypatch):
    best, order = priced(monkeypatch, list(found), fits)
    assert "".join(order) == asked
    assert best == max((x for x in order if x in fits), key=order.index, default=order[-1]), "later ones are faster here"


@pytest.mark.parametrize("until, asked", [(0.0, "a"), (1.0, "a"), (3.9, "a"), (4.0, "ab"), (6.0, "abc"), (99.0, "abc")])
def test_once_one_fits_no_other_is_late(until, asked, monkeypatch):
    assert "".join(priced(monkeypatch, list("abcd"), "abcd", until=until)[1]) == asked


def test_one_that_fits_is_looked_for_however_late(monkeypatch):
    assert "".join(priced(monkeypatch, list("abcde"), "c", until=0.0)[1]) == "abc"
