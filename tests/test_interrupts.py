import signal
import sys

import pytest

from soapjax.interrupts import Interrupts


class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interrupts():
    before = signal.getsignal(signal.SIGINT)
    yield Interrupts()
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_a_finalizer_ends_what_reports_progress(interrupts, monkeypatch):
    lost, seen = [], []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: lost.append(found.exc_type))
    progress = interrupts.checked(lambda done: seen.append(done))
    progress(1)
    del (x := [Finalized()])[0]
    assert lost == [KeyboardInterrupt] and not x
    with pytest.raises(KeyboardInterrupt):
        progress(2)
    progress(3)
    assert seen == [1, 3]


def test_ctrl_c_is_raised_at_once_elsewhere(interrupts):
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    interrupts.checked(None).stop()
