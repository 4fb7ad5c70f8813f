"""Ctrl-C in processes of their own: status 130 and a word, wherever it comes."""

import signal
import subprocess
import sys
import time

import pytest

SETUP = """
import os, signal, sys, time
from soapjax.helpers import interrupts
def press():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0)
"""


def ended(body, *, press_after_s=None, timeout=60):
    """What a script says under `interrupts.handled`; with `press_after_s` it is interrupted so long after its first word."""
    script = SETUP + "with interrupts.handled():\n" + "\n".join(f"    {line}" for line in body.strip().splitlines())
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        if press_after_s is not None:
            process.stdout.readline()
            time.sleep(press_after_s)
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=timeout)
    assert "Traceback" not in err
    return process.returncode, out, err


def test_with_nothing_to_keep_it_leaves_at_once():
    status, out, err = ended("try:\n    press()\n    time.sleep(60)\nexcept BaseException:\n    print('caught')")
    assert (status, out, err) == (130, "", "interrupted: nothing was written\n")


def test_its_word_is_heard_while_the_compilers_messages_are_collected():
    """Standard error is a file then."""
    given = "from soapjax.execute.compiled.inspection import compiler_messages\n"
    body = f"{given}with compiler_messages():\n    press()\n    time.sleep(60)"
    assert ended(body) == (130, "", "interrupted: nothing was written\n")


def test_it_leaves_out_of_what_runs_no_python():
    """One bytecode of half a minute, in which Python's own handler has no turn."""
    begin = time.monotonic()
    body = "import hashlib\nprint('begin', flush=True)\nhashlib.pbkdf2_hmac('sha256', b'', b'', 60_000_000)"
    status, _, err = ended(body, press_after_s=0.3)
    assert status == 130 and "nothing was written" in err and time.monotonic() - begin < 20


def test_a_search_ends_with_its_best():
    body = """
best = 0
try:
    with interrupts.searching():
        for best in range(1000):
            if best == 3: press()
            time.sleep(0.01)
except KeyboardInterrupt: pass
press()
print(best, interrupts.came())
"""
    status, out, err = ended(body)
    best, came = out.split()
    assert status == 0 and 3 <= int(best) < 10 and came == "True" and err == ""


def test_what_is_lost_in_a_finalizer_is_raised_by_the_next_progress():
    body = """
class Finalized:
    def __del__(self): press()
try:
    with interrupts.searching():
        progress = interrupts.Interruptible(lambda done: print(done))
        progress(1)
        made = Finalized()
        del made
        progress(2)
except KeyboardInterrupt: print('raised')
progress(3)
"""
    assert ended(body) == (0, "1\nraised\n3\n", "")


def test_after_a_search_it_is_held_and_the_next_search_does_not_begin():
    body = """
with interrupts.searching(): pass
press()
print('held')
try:
    with interrupts.searching(): print('began')
except KeyboardInterrupt: print('raised')
"""
    assert ended(body) == (0, "held\nraised\n", "")


@pytest.fixture
def ctrl_c():
    """Python's own handler: a shell's background job starts with Ctrl-C ignored."""
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, found)


def test_a_second_one_leaves_always():
    body = "interrupts.hold('left')\npress()\ntime.sleep(0.7)\npress()\ntime.sleep(60)"
    assert ended(body) == (130, "", "left\n")


def test_nothing_is_left_installed(ctrl_c):
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    from soapjax.helpers import interrupts

    with interrupts.handled():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before
    with interrupts.searching(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
