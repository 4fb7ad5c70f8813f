"""Garbage collection is as the caller had it, during and after."""

import gc

import pytest

from soapjax.garbage import NEW_OBJECTS, fewer_collections


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
