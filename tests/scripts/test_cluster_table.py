"""The measuring scripts' own arithmetic: order statistics, calibration, bytes in compiled programs, bad input."""

import os
import subprocess
import sys
from pathlib import Path

import cluster_measure
import cluster_table
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from cluster_calibration import fitted_factors, undisturbed
from cluster_table import Row
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

SCRIPTS = Path(__file__).parents[2] / "scripts"


def rows(measured, predicted):
    return [Row(f"s{i}", m, 0.0, p, 0, 0) for i, (m, p) in enumerate(zip(measured, predicted, strict=True))]


def test_kendall_is_scipys_where_all_are_far_apart():
    rng = np.random.default_rng(0)
    for _ in range(20):
        measured, predicted = 1.1 ** rng.permutation(12), rng.permutation(12) + 1.0
        tau, pairs = cluster_table.kendall_tau(rows(measured, predicted))
        assert pairs == 66
        assert tau == pytest.approx(scipy.stats.kendalltau(measured, predicted).statistic)


def test_kendall_leaves_out_close_pairs_and_hand_written_rows():
    tau, pairs = cluster_table.kendall_tau([*rows([1.0, 1.04, 2.0], [2.0, 1.0, 3.0]), Row("hand: x", 0.1, 0.0, None, None, 0)])
    assert (tau, pairs) == (1.0, 2)


def test_two_factors_are_found_again():
    compute_s, network_s = np.array([0.1, 0.05, 0.05]), np.array([0.0, 0.4, 0.2])
    c, k = fitted_factors(compute_s, network_s, 1.3 * compute_s + 0.8 * network_s)
    assert (c, k) == (pytest.approx(1.3, rel=2e-3), pytest.approx(0.8, rel=2e-3))


def test_bytes_of_a_collective_in_a_loop_count_in_every_trip():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def body(x):
        def trip(carry, _):
            return jnp.tanh(jax.lax.psum(carry, "x")), None

        return jax.lax.all_gather(jax.lax.scan(trip, x, length=7)[0], "x")

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P(None, "x"), check_vma=False))
    hlo = run.lower(jax.ShapeDtypeStruct((2, 100), jnp.float32)).compile().as_text()
    assert cluster_measure.sent_bytes(hlo, 2) == 7 * 400 + 400


def test_undisturbed_ends_as_it_began():
    before = os.sched_getscheduler(0)
    with undisturbed():
        pass
    assert os.sched_getscheduler(0) == before


def test_what_was_measured_is_reported(tmp_path, capsys, monkeypatch):
    path = tmp_path / "cluster.csv"
    key = {"model": "lstm", "hosts": "2", "rate": "1gbit"}
    common = key | dict(written_by="soapjax", predicted_compute_s=0.1, spread=0.01, steps=5, predicted_bytes=10, compiled_bytes=10)
    planned = [("data_parallel", 1.0, 1.0), ("mcmc", 0.20, 0.25), ("random 0", 2.0, 1.6)]
    made = [common | dict(strategy=s, predicted_s=p, measured_s=m) for s, p, m in planned]
    by_hand = common | dict(strategy="hand: x", predicted_s="", predicted_bytes="", written_by="hand", measured_s=0.5)
    cluster_measure.write_rows(str(path), [*made, by_hand])
    assert [r["strategy"] for r in cluster_measure.read_rows(str(path))] == ["data_parallel", "mcmc", "random 0", "hand: x"]
    monkeypatch.setattr(sys, "argv", ["cluster_table.py", "--report", "--output", str(path)])
    assert cluster_table.main() == 0
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last[:7] == ["lstm", "2", "1gbit", "3", "22.5%", "25.0%", "1.00"]  # errors of mcmc and random: -20 %, +25 %
    assert last[8] == "1.00" and last[10] == "2.00" and last[12] == "4.00"


@pytest.mark.parametrize("arguments", [["--report"], ["--rates", "fast"], ["--hosts", "0"]])
def test_bad_input_ends_with_2(tmp_path, arguments):
    command = [sys.executable, SCRIPTS / "cluster_table.py", "--output", tmp_path / "none.csv", "--work", tmp_path, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "error: " in done.stderr and "Traceback" not in done.stderr
