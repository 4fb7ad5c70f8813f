"""Pipelines and pinned plans over processes give the single-device step's numbers; each process holds what it uses."""

import json
import subprocess
import sys

import numpy as np
import pytest
from planned import topology_with
from process_worker import MODELS
from ranks import ROOT, environment

import soapjax
from soapjax.planning.entry import plan_of_strategy, planning_problem
from soapjax.search.experts.placement import placed

WORKER = ROOT / "tests" / "execute" / "process_worker.py"


def run_processes(port, cases, count, devices_each=1, timeout=240):
    """The line of results of every process and case: [case][rank]."""
    workers = [
        subprocess.Popen(
            [sys.executable, WORKER, *cases], env=environment(port, rank, count, devices=devices_each), cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        ended = [w.communicate(timeout=timeout) for w in workers]
    finally:
        for w in workers:
            w.kill()
    found = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in ended]
    assert all(len(lines) == len(cases) for lines in found), "\n".join(err[-2000:] for _, err in ended)
    return list(zip(*found, strict=True))


def check(results, last_is_empty=(), random=()):
    """Every process has the loss; what it holds is right; together they hold everything, and none holds all of it.

    Args:
      last_is_empty: cases (by number) whose last stage has no weight of its own: the first stage holds the tied one.
      random: cases where one process may happen to hold all.
    """
    for case, found in enumerate(results):
        for rank, r in enumerate(found):
            assert r["worst"] <= 1e-5 and r["loss"] <= 1e-5, found
            is_empty = case in last_is_empty and rank == len(found) - 1
            most = r["leaves"] - (case not in random)
            assert (r["held"] == 0 if is_empty else 0 < r["held"] <= most), found
        assert sum(r["held"] for r in found) >= found[0]["leaves"], found


def on_the_first_device(model, devices):
    """A plan that uses nothing of the other processes."""
    module, sizes = MODELS[model]
    problem = planning_problem(soapjax.trace(*module.make(**sizes)), topology_with(devices), space="paper")
    return plan_of_strategy(problem, placed(problem, np.zeros(problem.graph.num_operators, int)))


def test_two_processes(free_port, tmp_path):
    """A schedule of one order, one of another with a parameter that both stages read, and a plan that leaves one process idle."""
    path = tmp_path / "one.json"  # made here: processes need not compile the planner's programs for it
    on_the_first_device("mlp", 2).save(path)
    check(run_processes(free_port, ["mlp/1f1b", "tied/gpipe", f"mlp/{path}"], 2), last_is_empty=(2,), random=(2,))


@pytest.mark.slow
def test_replicas_of_stages_on_several_processes(free_port):
    check(run_processes(free_port, ["mlp/replicas"], 2, devices_each=2), random=(0,))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_operators_pinned_to_processes(free_port, count):
    """Layers on either process, and one over all; random points of the space."""
    check(run_processes(free_port, ["mlp/pinned", "nmt/random"], count, timeout=500), random=(1,))


@pytest.mark.slow
@pytest.mark.parametrize("devices_each", [1, 2])
def test_four_processes(free_port, devices_each):
    check(run_processes(free_port, ["mlp/1f1b", "tied/1f1b", "tied/gpipe", "mlp/pinned"], 4, devices_each), last_is_empty=(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("devices_each", [1, 2])
def test_stacked_state_on_two_processes(free_port, devices_each):
    """Rows on both, of arrays that are one for the user; biases and scales, which are cut unevenly, go to and fro."""
    check(run_processes(free_port, ["scan/planned"], 2, devices_each), random=(0,))
