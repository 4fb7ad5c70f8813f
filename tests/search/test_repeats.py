"""Blocks that repeat, against sequences that were made of blocks."""

import numpy as np
import pytest

from soapjax.search.descent.repeats import runs_of


def shown(groups):
    return [r.members.tolist() for r in runs_of(groups)]


@pytest.mark.parametrize(
    "groups, members",
    [
        ("eabcabcabcz", [[[1, 2, 3], [4, 5, 6], [7, 8, 9]]]),
        ("abc", []),
        ("", []),
        ("aa", [[[0], [1]]]),
        # Where blocks begin is a matter of view. The last one lacks two operators: the one that it has belongs to it all the same.
        ("xbcabcabcabyz", [[[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, -1, -1]]]),
        ("xbzabcabcab", [[[-1, 1, -1], [3, 4, 5], [6, 7, 8], [9, 10, -1]]]),
        # Two runs, that of more operators first.
        ("ababqcdecdecde", [[[5, 6, 7], [8, 9, 10], [11, 12, 13]], [[0, 1], [2, 3]]]),
        # One operator three times in a block is three places.
        ("aaabaaab", [[[0, 1, 2, 3], [4, 5, 6, 7]]]),
    ],
)
def test_runs_are_found_by_structure_alone(groups, members):
    assert shown([ord(c) for c in groups]) == members


def test_whatever_is_found_repeats_and_nothing_is_in_two_runs():
    rng = np.random.default_rng(0)
    for _ in range(200):
        parts = [np.tile(rng.integers(0, 4, rng.integers(1, 5)), rng.integers(1, 6)) for _ in range(rng.integers(1, 4))]
        groups, seen = np.concatenate(parts), set()
        for run in runs_of(groups):
            assert run.num_blocks > 1
            for place in run.members.T:
                assert len(set(groups[place[place >= 0]])) == 1
            inside = run.members[run.members >= 0].tolist()
            assert inside == sorted(inside) and not seen.intersection(inside)
            seen.update(inside)


def test_blocks_that_are_split_in_two_ways_count_two():
    (run,) = runs_of([0, 1, 0, 1, 0, 1])
    axes, storage = np.zeros((6, 2), np.int8), np.zeros(6, np.int8)
    assert run.distinct(axes, storage) == 1
    axes[3, 1] = 1
    assert run.distinct(axes, storage) == 2
    storage[0] = 1
    assert run.distinct(axes, storage) == 3
