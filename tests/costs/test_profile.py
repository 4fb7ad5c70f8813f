"""Profiles on disk: writers at once, torn and flipped files, full disks; and what is taken of them for a device."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from profile_writers import profile

from soapjax.costs.measured.fit import fitted_link, fitted_rates, fitted_scales
from soapjax.costs.measured.profile import (
    cache_folder,
    cached_profile,
    load_profile,
    merged,
    mismatches,
    other_versions,
    save_profile,
)
from soapjax.costs.measured.profile_parts import Calibration, Device, Measurement, Rates
from soapjax.errors import SoapjaxError
from soapjax.topology import load_topology

ROOT = Path(__file__).parent.parent.parent
CPU = load_topology("cpu8").device


def process(mode, folder):
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(Path(__file__).parent / "profile_writers.py"), mode, str(folder)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_what_is_written_is_read(tmp_path):
    wanted = profile(3)
    path = save_profile(wanted, tmp_path)
    assert load_profile(path) == wanted and wanted.sha256 in path.name
    before = path.stat().st_mtime_ns
    assert save_profile(wanted, tmp_path) == path
    assert path.stat().st_mtime_ns == before and os.listdir(tmp_path) == [path.name], "the same is written once"
    copy = tmp_path / "mine.json"
    copy.write_text(path.read_text())
    assert load_profile(copy) == wanted, "a file may have any name"


def test_sixteen_writers_at_once(tmp_path):
    assert process("writers", tmp_path).returncode == 0
    files = sorted(tmp_path.iterdir())
    assert {load_profile(p).sha256 for p in files} == {profile(k).sha256 for k in (0, 1, 2, *range(10, 26))}
    assert len(files) == 19, "nothing half-written, nothing twice"


def test_a_killed_writer_leaves_nothing_half_written(tmp_path):
    assert process("killed", tmp_path).returncode == 0
    names = os.listdir(tmp_path)
    assert names, "some were written before"
    for name in names:  # a writer killed between giving a whole file its name and putting it in place leaves that for the sweep
        assert re.fullmatch(r"cpu-.*\.json|\.soapjax-[0-9a-f]{16}\.tmp", name)
        load_profile(tmp_path / name)


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path):
    ended = process("full", tmp_path)
    assert ended.returncode == 0 and "File too large" in ended.stdout and "Remedy" in ended.stdout
    assert os.listdir(tmp_path) == []


def test_every_flipped_bit_is_seen(tmp_path):
    path = save_profile(profile(1, size=3), tmp_path)
    text = path.read_bytes()
    rng = random.Random(0)
    for place in rng.sample(range(len(text)), 300):
        flipped = bytearray(text)
        flipped[place] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(SoapjaxError):
            load_profile(path)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_torn_file_is_refused_ignored_and_replaced(tmp_path, share):
    wanted = profile(1)
    path = save_profile(wanted, tmp_path)
    text = path.read_text()
    path.write_text(text[: int(share * len(text))])
    with pytest.raises(SoapjaxError, match="soapjax profile|file of"):
        load_profile(path)
    found, notes = cached_profile(CPU, folder=tmp_path)
    assert found is None and len(notes) == 1 and "ignored" in notes[0]
    assert save_profile(wanted, tmp_path) == path and load_profile(path) == wanted


def test_a_file_under_the_name_of_another_is_refused(tmp_path):
    a, b = save_profile(profile(1), tmp_path), save_profile(profile(2), tmp_path)
    b.write_text(a.read_text())
    with pytest.raises(SoapjaxError, match="damaged"):
        load_profile(b)


@pytest.mark.parametrize("text", ["[]", "{}", '{"sha256": 1, "profile": {}}', "[" * 100_000, '{"sha256": "a", "profile": NaN}'])
def test_what_is_no_profile_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(SoapjaxError):
        load_profile(tmp_path / "x.json")


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SoapjaxError, match="SOAPJAX_CACHE"):
        save_profile(profile(1), tmp_path / "file" / "profiles")


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("SOAPJAX_CACHE", "/a")
    assert cache_folder() == Path("/a/profiles")
    monkeypatch.delenv("SOAPJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/b/soapjax/profiles")


def test_another_device_or_version_is_named():
    fits = profile(1)
    assert mismatches(fits, CPU, place="p") == []
    gpu = load_topology("h200x8").device
    assert "H200" in str(mismatches(fits, gpu, place="p")[0])
    nvidia = fits.model_copy(update={"device": Device(name="NVIDIA H200", platform="cuda")})
    assert mismatches(nvidia, gpu, place="p") == []
    assert mismatches(nvidia, load_topology("a100x8").device, place="p")
    for name, topology in (("NVIDIA GH200 480GB", "h200"), ("NVIDIA L40S", "aws_g6_48xlarge"), ("NVIDIA L4", "l40s_pcie")):
        longer = fits.model_copy(update={"device": Device(name=name, platform="cuda")})  # one name within another
        assert mismatches(longer, load_topology(topology).device, place="p")
    old = fits.model_copy(update={"versions": fits.versions | {"jaxlib": "0.1"}})
    assert mismatches(old, CPU, place="p") == [] and other_versions(fits) == ""
    assert other_versions(old).startswith("measured with jaxlib 0.1; installed: jaxlib ")
    assert mismatches(fits, CPU, place="p", processor="another")


def test_the_later_measurement_counts_whatever_the_order(tmp_path):
    early, late = profile(1), profile(1)
    late = late.model_copy(
        update={
            "created": "2026-02-02T00:00:00",
            "operators": tuple(m.model_copy(update={"seconds": 5.0}) for m in late.operators[:10]),
            "calibration": Calibration(compute_scale=2.0, residual=0.1),
        }
    )
    for p in (late, early):
        save_profile(p, tmp_path)
    found, notes = cached_profile(CPU, folder=tmp_path)
    assert notes == () and found == merged([late, early]) == merged([early, late])
    assert sorted(m.seconds for m in found.operators) == [1e-3] * 190 + [5.0] * 10
    assert found.error == 0.1 and set(found.sources) == {early.sha256, late.sha256}


def measurement(kind, flops, moved_bytes, seconds):
    return Measurement(
        label="", structure="s", kind=kind, dtype="float32", reads=(), writes=(), flops=flops, moved_bytes=moved_bytes,
        seconds=seconds,
    )  # fmt: skip


def test_a_roofline_is_found_again():
    rng = np.random.default_rng(0)
    roofs, memory, launch = {"dot": 5e12, "other": 2e11}, 4e11, 3e-6
    points = []
    for kind, roof in roofs.items():
        for _ in range(40):
            flops, moved = 10 ** rng.uniform(5, 11), 10 ** rng.uniform(4, 9)
            seconds = (max(flops / roof, moved / memory) + launch) * np.exp(rng.normal(0, 0.03))
            points.append(measurement(kind, flops, moved, seconds))
    found = fitted_rates(points)
    for kind, roof in roofs.items():
        assert found.flops_per_s[f"{kind} float32"] == pytest.approx(roof, rel=0.1)
    assert found.memory_bytes_per_s == pytest.approx(memory, rel=0.1) and found.launch_s == pytest.approx(launch, rel=0.2)
    assert found.median_error < 0.05
    assert fitted_rates(points[:2]) is None


@pytest.mark.parametrize("seed", range(8))
def test_a_rate_that_binds_no_task_stays_at_the_best_that_was_reached(seed):
    """Elementwise tasks that all wait for memory, or are too small to see: their arithmetic shows no roof."""
    rng = np.random.default_rng(seed)
    points = []
    for _ in range(30):
        moved = 10 ** rng.uniform(2, 8)
        seconds = (moved / 3e10 + 2e-6) * np.exp(rng.normal(0, 0.3))
        points.append(measurement("other", moved / 100, moved, seconds))
        points.append(measurement("dot", 1e9, moved, 1e9 / 1e11 + seconds))
    best = max(m.flops / m.seconds for m in points if m.kind == "other")
    found = fitted_rates(points).flops_per_s["other float32"]
    assert 0.3 * best <= found <= 1.2 * best


def test_a_link_is_found_again():
    rng = np.random.default_rng(1)
    points = []
    for kind, times in (("all-reduce", 2), ("all-gather", 1)):
        for n in (2, 4):
            for size in (2**12, 2**16, 2**20, 2**24):
                seconds = times * (n - 1) * 20e-6 + times * size * (n - 1) / n / 3e9
                points.append((kind, n, size, seconds * np.exp(rng.normal(0, 0.02))))
    found = fitted_link("host", points)
    assert found.latency_s == pytest.approx(20e-6, rel=0.1) and found.bytes_per_s == pytest.approx(3e9, rel=0.1)
    assert found.fractions == {"all-gather": pytest.approx(1.0, rel=0.05)}


def test_kinds_that_reach_less_of_a_link_are_found_again():
    fractions = {"all-reduce": 1.0, "reduce-scatter": 0.9, "all-to-all": 0.5, "collective-permute": 0.45}
    points = []
    for kind, fraction in fractions.items():
        for size in (2**12, 2**16, 2**20, 2**22):
            steps, sent = {"all-reduce": (6, 1.5), "collective-permute": (1, 1.0)}.get(kind, (3, 0.75))
            points.append((kind, 4, size, steps * 50e-6 + sent * size / (25e6 * fraction)))
    found = fitted_link("host", points)
    assert found.bytes_per_s == pytest.approx(25e6, rel=0.03) and found.median_error < 0.03
    del fractions["all-reduce"]
    assert found.fractions == pytest.approx(fractions, rel=0.05)


def test_two_scalars_are_found_again_and_the_error_is_what_is_left():
    compute, network = np.array([1.0, 2.0, 0.5, 1.5]), np.array([0.3, 0.1, 2.0, 0.0])
    noise = np.array([1.02, 0.98, 1.01, 0.99])

    def predict(c, n):
        return c * compute + n * network

    found = fitted_scales("abcd", predict, 1.7 * compute * noise + 0.6 * network * noise, has_network=True)
    assert found.compute_scale == pytest.approx(1.7, rel=0.05) and found.network_scale == pytest.approx(0.6, rel=0.1)
    assert 0.002 < found.residual < 0.02 and found.worst < 0.04
    alone = fitted_scales("abcd", lambda c, n: c * compute, 3.0 * compute, has_network=False)
    assert alone.compute_scale == pytest.approx(3.0, rel=1e-3) and alone.network_scale == 1.0
    assert alone.residual == pytest.approx(0, abs=1e-3)


def test_a_profile_is_plain_json():
    data = json.loads(profile(2).to_text())
    assert data["profile"]["device"]["name"] == "cpu" and len(data["sha256"]) == 64


def test_a_few_long_tasks_leave_the_launch_and_unbound_rates_as_they_were():
    """Products of milliseconds alone said 100 µs per task, and elementwise work at what the slowest of it reached."""
    rng = np.random.default_rng(3)

    def task(kind, flops, moved, seconds):
        return Measurement(
            label="", structure=str(rng.integers(1 << 30)), kind=kind, dtype="bfloat16", reads=(), writes=(), flops=flops,
            moved_bytes=moved, seconds=seconds * float(rng.uniform(0.9, 1.1)),
        )  # fmt: skip

    dots = [task("dot", f, 1e6, f / 7e14 + 4e-6) for f in (1e12, 1.1e12, 1.8e12, 2e12, 2.2e12)]
    others = [task("other", b / 1000, b, b / 3e12 + 4e-6) for b in (2e9, 3e9, 1.5e9)]
    before = Rates(flops_per_s={"dot bfloat16": 5e14, "other bfloat16": 5e14}, memory_bytes_per_s=4e12, launch_s=4e-6)
    found = fitted_rates([*dots, *others], before)
    assert found.flops_per_s["dot bfloat16"] == pytest.approx(7e14, rel=0.1)
    assert found.memory_bytes_per_s == pytest.approx(3e12, rel=0.1)
    assert found.launch_s == pytest.approx(4e-6, rel=0.5) and found.flops_per_s["other bfloat16"] == pytest.approx(5e14, rel=0.1)
    small = [task("other", 1e3, 1e4, 9e-6) for _ in range(5)]
    assert fitted_rates([*dots, *others, *small], before).launch_s == pytest.approx(9e-6, rel=0.2), "short tasks tell it"


def test_profiles_that_travel_with_the_project_are_whole():
    files = sorted((ROOT / "profiles").glob("*.json"))
    assert files
    for path in files:
        found = load_profile(path)
        assert found.operators and found.rates is not None and found.sha256 in path.name and found.commands
