"""Garbage collection is as the caller had it, during and after."""

import gc
from contextlib import ExitStack

import pytest

from soapjax.helpers.garbage import NEW_OBJECTS, fewer_collections


@pytest.mark.parametrize("before", [(700, 10, 10), (10 * NEW_OBJECTS, 5, 5), (0, 10, 10)])
def test_thresholds_come_back_and_are_never_lowered(before):
    own = gc.get_threshold()
    try:
        gc.set_threshold(*before)
        with pytest.raises(ValueError), fewer_collections():
            inside = gc.get_threshold()
            raise ValueError
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*own)
    assert inside == ((max(before[0], NEW_OBJECTS) if before[0] else 0), *before[1:])


def test_the_last_to_leave_puts_thresholds_back():
    """Threads leave in any order."""
    before = gc.get_threshold()
    first, second = ExitStack(), ExitStack()
    first.enter_context(fewer_collections())
    second.enter_context(fewer_collections())
    first.close()
    assert gc.get_threshold()[0] >= NEW_OBJECTS
    second.close()
    assert gc.get_threshold() == before
