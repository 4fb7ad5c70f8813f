"""A part of scripts/fuzz.py: some mutants of every kind that needs no long search."""

import json

import fuzz
import fuzz_kinds
import fuzz_mutants
import pytest


@pytest.mark.parametrize("kind, mutants", [("plan", 40), ("topology", 60), ("profile", 150), ("problem", 100), ("csv", 100)])
def test_mutants_are_read_or_refused(kind, mutants, monkeypatch):
    monkeypatch.setattr(fuzz, "COMMAND_EVERY", 50)
    found = fuzz.fuzz(fuzz.KINDS[kind](quick=True), mutants=mutants, seconds=60, seed=1)
    counts = found["counts"]
    assert not found["findings"] and not any(counts.get(bad) for bad in fuzz.BAD)
    assert counts["refused"] > mutants / 4 and counts.get("taken", 0) > 0


def test_what_is_counted_is_found(tmp_path):
    """A reader with mistakes: each is counted by its name, and kept."""

    class Careless(fuzz_kinds.Csvs):
        def read(self, path):
            text = path.read_text(errors="replace")
            if "resnet" not in text:
                fuzz_kinds.check_time("nothing", 0.0)
            [][len(text)]

    found = fuzz.fuzz(Careless(), mutants=30, seconds=30, seed=0, keep=tmp_path)["counts"]
    assert found["traceback"] and found["step time"] and sum(found.values()) >= 30
    assert {p.name.split("-")[0] for p in tmp_path.iterdir()} == {"traceback", "step_time"}


def test_a_hang_and_memory_are_found(monkeypatch):
    def forever():
        while True:
            pass

    with monkeypatch.context() as patched:
        patched.setattr(fuzz, "HANG_S", 0.2)
        assert fuzz.outcome(forever)[0] == "hang"
    monkeypatch.setattr(fuzz, "MEMORY_BYTES", 2**20)
    assert fuzz.outcome(lambda: b"x" * 2**27)[0] == "memory"
    assert json.loads(fuzz_mutants.dumped([10**5000]).decode().replace("0" * 5000, ""))  # integers of any length are written
