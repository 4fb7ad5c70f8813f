"""The scripts of the paper's tables and figures, at tiny sizes: they run, resume, refuse bad input and mean what they print."""

import csv
import dataclasses
import importlib
import time
from pathlib import Path

import figure7
import figure8
import figure12
import gpipe_tables
import grid_table
import iopddl_table
import megatron_table
import numpy as np
import oneflow_table
import optimality
import paper_problems
import pipedream_table
import planner_table
import pytest
import table4
import trinity_tables
from csv_files import read_rows
from paper_problems import BestKnown, Case, cluster
from paper_tables import PUBLISHED_FILES, Rows

from soapjax.errors import SoapjaxError
from soapjax.search.experts.baselines import data_parallel_strategy, replicate_all
from soapjax.search.planners import PLANNERS
from soapjax.search.problem import Budget, SearchResult
from soapjax.search.stages.grid import Grid
from soapjax.topology import load_topology

SCRIPTS = ("figure7", "figure8", "figure10b", "figure12", "table4", "optimality", "planner_table", "trinity_tables")
QUICK = ("--tiny", "--proposals", "500")
SHORT = ("--cap", "20", "--best-seconds", "2", "--best-seeds", "1")


def rows_of(path: Path) -> list[dict]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture
def quick_search(monkeypatch):
    """A stand-in for `mcmc`, which takes long to compile: the best of data parallelism and of random strategies."""

    def search(rng_key, problem, budget):
        begin, rng = time.monotonic(), np.random.default_rng(0)
        plans = [problem.space.random(rng) for _ in range(8)]
        plans += [] if budget.random_start else [data_parallel_strategy(problem)[0]]
        best = min(problem.evaluate(plans), key=lambda e: e.rank)
        stopped_by, elapsed = "proposals", time.monotonic() - begin
        try:
            while budget.num_proposals is None and elapsed < budget.seconds:
                elapsed = time.monotonic() - begin
                if budget.progress is not None:
                    budget.progress(9, best.cost, elapsed)
        except KeyboardInterrupt:
            stopped_by = "interrupted"
        return SearchResult(best, 9, elapsed, stopped_by, ((0, elapsed, best.cost), (9, elapsed, best.cost)))

    monkeypatch.setitem(PLANNERS, "mcmc", search)


def refuse(*args, **kwargs):
    raise AssertionError("computed again")


@pytest.mark.parametrize("name", SCRIPTS)
def test_bad_arguments_end_with_status_2_and_help_says_what_the_paper_shows(name, capsys):
    main = importlib.import_module(name).main
    for wrong in (["--seed", "-1"], ["--no-such-option"], ["--results"]):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "paper" in capsys.readouterr().out


def test_clusters_are_parts_of_the_shipped_ones():
    assert [lv.size for lv in cluster("k80", 64).levels] == [16, 2, 2]
    assert [lv.size for lv in cluster("k80", 2).levels] == [1, 1, 2]
    assert [lv.size for lv in cluster("p100", 8).levels] == [2, 4]
    assert cluster("p100", 1).num_devices == 1
    for name, devices in (("p100", 3), ("p100", 32), ("k80", 128)):
        with pytest.raises(SoapjaxError, match=str(devices)):
            cluster(name, devices)


def test_rows_are_kept_by_their_arguments(tmp_path):
    path = tmp_path / "deeper" / "rows.csv"
    rows = Rows(path, ("model", "seed"))
    assert rows.get(dict(model="a", seed=0), lambda: dict(x=0.5))["x"] == "0.5"
    again = Rows(path, ("model", "seed"))
    assert again.get(dict(model="a", seed=0), refuse)["x"] == "0.5"
    again.get(dict(model="a", seed=1), lambda: dict(x=1.0, y=None))
    forced = Rows(path, ("model", "seed"), again=True)
    assert forced.get(dict(model="a", seed=0), lambda: dict(x=2.0))["x"] == "2"
    assert forced.get(dict(model="a", seed=0), refuse)["x"] == "2"
    assert [(r["seed"], r["x"], r["y"]) for r in rows_of(path)] == [("0", "2", ""), ("1", "1", "")]


def test_best_known_only_improves_and_forgets_other_graphs(tmp_path):
    case = Case("lenet", "p100", 2, tiny=True)
    problem = case.problem()
    better, worse = sorted(problem.evaluate([data_parallel_strategy(problem)[0], replicate_all(problem)]), key=lambda e: e.cost)
    path = tmp_path / "best.json"
    assert BestKnown(path).offer(case, problem, worse, "a test").cost == worse.cost
    assert BestKnown(path).offer(case, problem, better, "a test").cost == better.cost
    assert BestKnown(path).offer(case, problem, worse, "a test").cost == better.cost
    found = BestKnown(path).get(case, problem)
    assert found.strategy.key() == better.strategy.key()
    other = Case("alexnet", "p100", 2, tiny=True)
    path.write_text(path.read_text().replace("lenet p100", "alexnet p100"))
    assert BestKnown(path).get(other, other.problem()) is None


def test_figure7_resumes(tmp_path, capsys, monkeypatch, quick_search):
    command = ["--models", "lenet", "--clusters", "p100", "--devices", "1", "2", "--results", str(tmp_path), *QUICK]
    assert figure7.main(command) == 0
    one, two = rows_of(tmp_path / "figure7.csv")
    assert float(one["mcmc"]) == pytest.approx(float(one["ideal"]), rel=1e-5)
    assert float(two["ideal"]) == pytest.approx(2 * float(one["ideal"]), rel=1e-5)
    assert float(two["mcmc_dp"]) >= 1 - 1e-5
    monkeypatch.setattr(figure7, "point", refuse)
    assert figure7.main(command) == 0
    assert "lenet" in capsys.readouterr().out


@pytest.mark.slow
def test_figure8_counts_bytes_and_compute_alike_with_and_without_pins(tmp_path):
    case = Case("rnnlm", "p100", 4, tiny=True)
    soap, paper = case.problem(), case._replace(space="paper").problem()
    strategy = soap.space.random(np.random.default_rng(0))
    assert figure8.moved_bytes(soap, strategy) == pytest.approx(figure8.moved_bytes(paper, strategy), rel=1e-4)
    assert figure8.compute_device_s(soap, strategy) == pytest.approx(figure8.compute_device_s(paper, strategy), rel=1e-4)
    everywhere = figure8.compute_device_s(paper, replicate_all(paper))
    alone = replicate_all(paper)
    alone.axes[:] = -2  # all on device 0
    assert figure8.moved_bytes(paper, alone) == 0
    assert figure8.compute_device_s(paper, alone) == pytest.approx(everywhere / 4, rel=1e-5)


def test_figure12_proposes_one_operator_within_the_space():
    problem = Case("lenet", "p100", 4, tiny=True).problem()
    draws = figure12.Proposals(problem, np.random.default_rng(0))
    start = replicate_all(problem)
    axes, storage = draws.draw(figure12.Chain(start.axes, start.storage, 1.0))
    for a, s in zip(axes, storage, strict=True):
        changed = (a != start.axes).any(axis=1) | (s != start.storage)
        assert changed.sum() <= 1
        assert problem.space.is_valid(type(start)(a, s))


@pytest.mark.slow
def test_optimality_judges_as_the_simulator_and_descends():
    problem = Case("lenet", "p100", 2, tiny=True).problem()
    neighbours = optimality.Neighbours(problem)
    start = problem.evaluate([replicate_all(problem)])[0]
    n = int(problem.space.owns_parameters.argmax())
    axes, storage = neighbours.candidates[n]
    assert len(axes) == len(list(problem.space.configs(n))) * len(problem.space.storages)
    plans = []
    for a, s in list(zip(axes, storage, strict=True))[:32]:
        plan = replicate_all(problem)
        plan.axes[n], plan.storage[n] = a, s
        plans.append(plan)
    judged = neighbours.costs(neighbours.engine.at(start.strategy), n)
    np.testing.assert_allclose(judged[:32], [e.cost for e in problem.evaluate(plans)], rtol=1e-5)
    found = neighbours.descend(start)
    assert found.improvements > 0
    assert neighbours.descend(found.end).improvements == 0


def test_published_figures_are_there_with_their_sources():
    page = (PUBLISHED_FILES / "README.md").read_text()
    kinds = {
        "flexflow_search_seconds": table4.Published, "gpipe_throughput": gpipe_tables.Published,
        "iopddl_scores": iopddl_table.Scores, "megatron_configurations": megatron_table.Row,
        "oneflow_gpt_v100": oneflow_table.Row, "pipedream_configs": pipedream_table.Published,
    }  # fmt: skip
    files = {f.stem: f for f in PUBLISHED_FILES.glob("*.csv")}
    assert files.keys() - kinds.keys() == {"trinity"}
    assert all(f.name in page for f in files.values()) and (PUBLISHED_FILES / "pipedream" / "LICENSE.txt").exists()
    assert all(read_rows(files[name], kind) for name, kind in kinds.items())
    assert trinity_tables.published_rows(trinity_tables.arguments([]))
    assert len(table4.published(files["flexflow_search_seconds"])) == len(table4.PAPER_MODELS) * len(table4.GPUS)


def test_table4_reads_the_published_figures(tmp_path, capsys):
    good = tmp_path / "good.csv"
    good.write_text("gpus,model,full_s,delta_s\n4,lenet,2.5,100\n")
    paper = table4.published(good)
    row = table4.summary(Case("lenet", "p100", 4), "cold", [dict(wall_s="4", cpu_s="2"), dict(wall_s="", cpu_s="")], paper, None)
    assert (row["reached"], row["target"], row["wall_min"], row["wall_median"]) == ("1/2", 5.0, 4.0, float("inf"))
    bad = tmp_path / "bad.csv"
    bad.write_text("gpus,model,full_s\nfour,lenet,2.5\n")
    assert table4.main(["--published", str(bad), "--results", str(tmp_path)]) == 2
    assert table4.main(["--published", str(tmp_path / "none.csv"), "--results", str(tmp_path)]) == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.slow
def test_planner_table_compares_with_mcmc(tmp_path, capsys):
    command = ["--models", "lenet", "--topologies", "p100x16", "--planners", "data_parallel", "expert_cnn", "bound"]
    assert planner_table.main([*command, "--results", str(tmp_path), *QUICK]) == 0
    found = {r["planner"]: r for r in rows_of(tmp_path / "planners.csv")}
    assert float(found["bound"]["step_time_s"]) <= float(found["data_parallel"]["step_time_s"])
    assert "lenet" in (tmp_path / "planners.md").read_text()
    cells = planner_table.cells(
        [dict(planner="mcmc", model="m", step_time_s="0.5", fits="1"), dict(planner="fsdp", model="m", step_time_s="1", fits="0")]
    )
    assert cells == dict(workload="m", mcmc="500", fsdp="1000 (2.000) *")


@pytest.mark.slow
def test_table4_ends_a_start_when_it_is_good_enough(tmp_path, quick_search):
    command = ["--models", "lenet", "--gpus", "4", "--starts", "2", "--programs", "cold", "--tiny", *SHORT]
    command += ["--results", str(tmp_path)]
    assert table4.main([*command, "--within", "1000"]) == 0
    assert all(float(r["wall_s"]) < 20 for r in rows_of(tmp_path / "table4.csv"))
    assert table4.main([*command, "--within", "1e-9", "--cap", "0.1"]) == 0
    assert [bool(r["wall_s"]) for r in rows_of(tmp_path / "table4.csv")] == [True, True, False, False]


def test_an_interrupted_search_is_no_row(quick_search):
    problem = Case("lenet", "p100", 2, tiny=True).problem()

    def stop(done: int, best_s: float, elapsed_s: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        paper_problems.search("mcmc", problem, Budget(seconds=100, progress=stop), 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, command",
    [
        ("figure8", ["--model", "rnnlm", "--devices", "4", *QUICK]),
        ("figure10b", ["--models", "lenet", "--devices", "2", *QUICK]),
        ("figure12", ["--model", "lenet", "--devices", "2", "--seconds", "2", "--tiny"]),
        ("table4", ["--models", "lenet", "--gpus", "4", "--starts", "1", *SHORT, "--tiny"]),
        ("optimality", ["--global-models", "lenet", "--global-devices", "2", "--models", "lenet", "--devices", "2", *QUICK]),
        ("planner_table", ["--models", "rnnlm", "--topologies", "p100x16", "--seconds", "2", "--tiny"]),
        ("figure7", ["--models", "rnnlm", "--clusters", "k80", "--devices", "4", *QUICK]),
    ],
)  # fmt: skip
def test_scripts_run_and_resume(name, command, tmp_path):
    main = importlib.import_module(name).main
    assert main([*command, "--results", str(tmp_path)]) == 0
    before = {p.name: p.read_bytes() for p in tmp_path.glob("*.csv")}
    assert before
    assert main([*command, "--results", str(tmp_path)]) == 0
    assert {p.name: p.read_bytes() for p in tmp_path.glob("*.csv")} == before
    pytest.importorskip("matplotlib")
    assert name in ("table4", "optimality", "planner_table", "trinity_tables") or (tmp_path / f"{name}.png").stat().st_size > 1000


@pytest.fixture
def quick_learning(monkeypatch):
    """A stand-in for planners that learn, whose programs take long to compile: the best placement by hand."""

    def learned(method, rng_key, problem, budget):
        starts = trinity_tables.placement_starts(rng_key, problem, budget)
        best = min(starts, key=lambda e: e.rank)
        return SearchResult(best, budget.num_proposals, 1.0, "proposals", (), ("the best is a start",))

    monkeypatch.setattr(trinity_tables, "learned", learned)


@pytest.mark.slow
def test_trinitys_table_stands_beside_the_published_one_and_resumes(tmp_path, capsys, monkeypatch, quick_search, quick_learning):
    published = tmp_path / "published.csv"
    figures = ("s", "comm_gb", "mem_gb")
    names = ["model", "batch", "gpus", "expert_s", *(f"{p}_{x}" for p in ("hierarchical", "trinity") for x in figures)]
    published.write_text(f"{','.join(names)}\nnmt_2layer,64,2,2.5,3.0,9.0,7.0,2.0,7.5,7.25\n")
    options = ["--tiny", "--models", "nmt", "--devices", "2", "--batches", "2", "--proposals", "64"]
    options += ["--parts", "table", "placement"]
    command = [*options, "--results", str(tmp_path), "--published", str(published)]
    assert trinity_tables.main(command) == 0
    rows = {r["planner"]: r for r in rows_of(tmp_path / "trinity.csv")}
    assert list(rows) == list(trinity_tables.PLANNERS)
    assert float(rows["single"]["sent_gb"]) == 0 < float(rows["expert"]["sent_gb"])
    best = min(float(rows["single"]["cost_s"]), float(rows["expert"]["cost_s"]))
    assert all(float(rows[p]["cost_s"]) <= best * (1 + 1e-5) for p in ("hierarchical", "trinity"))
    assert set(rows["trinity"]["placed_on"]) <= set("01")
    text = (tmp_path / "trinity.md").read_text()
    assert "3.0 / 9.0 / 7.0" in text and "trinity at most hierarchical: 1 of 1 cells" in text
    ratio = float(rows["trinity"]["step_s"]) / 2.0
    assert f"| nmt | 2 | trinity | step_s | {ratio:.6g} |" in text
    monkeypatch.setattr(trinity_tables, "judge", refuse)
    assert trinity_tables.main(command) == 0
    assert trinity_tables.main([*options, "--results", str(tmp_path), "--published", str(tmp_path / "absent.csv")]) == 2


@pytest.mark.slow
def test_curves_of_learning_have_a_row_per_batch(tmp_path, monkeypatch):
    command = ["--tiny", "--models", "nmt", "--devices", "2", "--batches", "2", "--seeds", "1", "--parts", "convergence"]
    command += ["--groups", "32", "--results", str(tmp_path)]
    assert trinity_tables.main(command) == 0
    rows = rows_of(tmp_path / "trinity_convergence.csv")
    assert [(r["method"], r["batch"]) for r in rows] == [("ppo", "0"), ("ppo", "1"), ("reinforce", "0"), ("reinforce", "1")]
    assert all(float(b["best_cost_s"]) <= float(a["best_cost_s"]) for a, b in ((rows[0], rows[1]), (rows[2], rows[3])))
    monkeypatch.setattr(trinity_tables, "curve", refuse)
    assert trinity_tables.main(command) == 0


@pytest.mark.slow
def test_the_grid_is_swept_for_its_best_point():
    """No point that fits is better, also of those that the closed formula let out."""
    sizes = dict(batch=8, seq=32, width=64, layers=4, heads=4, vocab=128)
    case = grid_table.Case("small", "models.transformer_lm", sizes, "p100x16")
    found = grid_table.swept(case, within=3.0)
    problem = grid_table.problem_of(case)
    every = [problem.price(choice) for *_, choice in Grid(problem).choices()]
    assert 0 < found["priced"] <= found["points"] == len(every)
    assert found["best_step_s"] == pytest.approx(min(p.timeline.step_time_s for p in every if p.is_feasible), rel=0.02)


def test_configurations_by_hand_have_the_memory_that_they_ran_with(tmp_path):
    node = tmp_path / "node.toml"
    node.write_text(megatron_table.with_memory_fraction("dgx_a100", 0.95))
    ours, theirs = load_topology("dgx_a100", hosts=2), load_topology(str(node), hosts=2)
    assert theirs.device.memory_fraction == 0.95 != ours.device.memory_fraction
    assert dataclasses.replace(theirs.device, memory_fraction=ours.device.memory_fraction) == ours.device
    assert theirs.levels == ours.levels
