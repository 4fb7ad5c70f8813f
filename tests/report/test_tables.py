"""What a plan's table says: gains with what to know of them, equal rows merged, small ones folded."""

import io

import pytest
import rich.console
from command_line import plan_text

from soapjax import Plan
from soapjax.report.front_table import MOST_ROWS, FrontRow, front_view
from soapjax.report.plan_tables import caveat, gain_lines, gains, operator_rows, operator_table, plan_report
from soapjax.strategy.pipeline import Pipeline, Stage
from soapjax.strategy.plan import OperatorCost, StrategyFigures


def plan_with(**baselines):
    """A real plan, compared with baselines that split a share of the FLOPs."""
    plan = Plan.loads(plan_text())
    step_s = plan.prediction.step_time_s
    figures = {
        name: StrategyFigures(
            step_time_s=times * step_s, without_overlap_s=3 * times * step_s, split_flops_share=share,
            memory_bytes_per_device=2_000_000, sent_bytes=5, feasible=True,
        )
        for name, (times, share) in baselines.items()
    }  # fmt: skip
    times = {name: f.step_time_s for name, f in figures.items()}
    provenance = plan.provenance.model_copy(update={"baselines": times, "baseline_figures": figures, "notes": ()})
    prediction = plan.prediction.model_copy(update={"split_flops_share": 1.0, "without_overlap_s": 2 * step_s})
    return plan.model_copy(update={"provenance": provenance, "prediction": prediction})


def with_cost(plan, seconds_of):
    """The plan with operators that take so many seconds, by name."""
    parts = {
        name: part.model_copy(update={"cost": OperatorCost(
            compute_s=seconds_of(name), communication_s=0, sent_bytes=0, memory_bytes=0, flops=1, split_flops_share=1)})
        for name, part in plan.operators.items()
    }  # fmt: skip
    return plan.model_copy(update={"operators": parts})


def text_of(renderable, width=160):
    out = io.StringIO()
    rich.console.Console(file=out, width=width).print(renderable)
    return out.getvalue()


def test_a_gain_over_a_baseline_that_repeats_work_says_so():
    lines = gain_lines(plan_with(data_parallel=(1.9, 0.12), fsdp=(1.2, 0.899), tensor_parallel=(1.1, 0.999)))
    assert lines[0] == "this plan's speed: 1.10 × tensor_parallel"
    assert lines[1].startswith("  1.90 × data_parallel, which splits only 12 % of the FLOPs")
    assert lines[2].startswith("  1.20 × fsdp, which splits only 89.9 % of the FLOPs") and len(lines) == 3


def test_the_plan_is_held_to_the_same_measure():
    plan = plan_with(data_parallel=(1.5, 1.0))
    plan = plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"split_flops_share": 0.3})})
    assert gain_lines(plan)[-1].startswith("this plan splits only 30 % of the FLOPs")


@pytest.mark.parametrize(
    "share, devices, says",
    [(1.0, 8, False), (0.9, 8, False), (0.8999, 8, True), (0.0, 8, True), (0.95, 64, True), (0.99, 64, False), (1.0, 1, False)],
)
def test_what_counts_as_split(share, devices, says):
    assert bool(caveat(share, devices)) is says, "under 90 %, or every FLOP on two devices or more"


def test_hidden_communication_stands_beside_every_step_time():
    plan = plan_with(data_parallel=(2.0, 1.0))
    shown = text_of(plan_report(plan))
    from soapjax.report.plan_tables import seconds

    s = plan.prediction.step_time_s
    row, other = (next(line for line in shown.splitlines() if name in line) for name in ("this plan (", "│ data_parallel"))
    assert all(seconds(x) in row for x in (s, 2 * s)) and all(seconds(x) in other for x in (2 * s, 4 * s, 6 * s))
    assert plan.prediction.hidden_communication_s == pytest.approx(s)


def test_equal_operators_are_one_row_and_small_ones_are_folded():
    plan = Plan.loads(plan_text())
    name, part = next((n, p) for n, p in plan.operators.items() if p.kind == "dot")
    many = {f"penalty{i}_of_{'abcdefgh'[i % 8]}": part for i in range(48)} | {f"{name}": part}
    plan = with_cost(plan.model_copy(update={"operators": many}), lambda n: 1.0 if n == name else 1e-5)
    rows = operator_rows(plan)
    assert len(rows) == 9 and sum(len(r.names) for r in rows) == 49
    assert sum(r.time_share for r in rows) == pytest.approx(1)
    table = operator_table(plan)
    assert table.row_count == 2
    shown = text_of(table)
    assert name in shown and "48 others, each line under 0.1%" in shown


def test_operators_of_a_pipeline_are_split_over_the_mesh_of_their_stage():
    """Of a stage on three devices the first axis has three, of all eight it has two."""
    plan = Plan.loads(plan_text())
    name, part = next((n, p) for n, p in plan.operators.items() if p.kind == "dot")
    part = part.model_copy(update={"axes": {"d0": "sample"}, "storage": "sharded(d0), kept"})
    stage = Stage(operators=(name,), devices=(0, 1, 2), mesh={"d0": 3})
    pipeline = Pipeline(schedule="gpipe", num_microbatches=1, stages=(stage,))
    (row,) = operator_rows(plan.model_copy(update={"operators": {name: part}, "pipeline": pipeline}))
    assert (row.split, row.storage) == ("sample/3 (d0)", "sharded/3, kept")


def test_plans_of_older_versions_are_shown_without_what_they_lack():
    plan = Plan.loads(plan_text())
    data = plan.model_dump(mode="json", exclude_none=True)
    for part in data["operators"].values():
        part.pop("cost")
    for field in ("without_overlap_s", "split_flops_share"):
        data["prediction"].pop(field)
    data["provenance"].pop("baseline_figures")
    import json

    old = Plan.loads(json.dumps(data))
    assert old.plan_sha256 == plan.plan_sha256 and old.prediction.hidden_communication_s is None
    assert operator_table(old).row_count == len(operator_rows(old)) and "fsdp" in text_of(plan_report(old))
    assert all(words == "" for _, words in gains(old).values())


def rows_of_front(count):
    """More communication the faster; memory is least in the middle."""
    return [
        FrontRow(1e-3 * (1 + i), 4e9 / (1 + i), 1e9 + abs(i - count // 2) * 1e7, "fsdp" if i == 1 else "", is_taken=i == 3)
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 4, 300])
def test_a_front_shows_the_best_in_each_figure_and_what_is_taken(count):
    text = text_of(front_view(rows_of_front(count)))
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert len(rows) == min(count, MOST_ROWS)
    marks = [row.split("│")[1].strip() for row in rows]
    assert "1 ms" in rows[0] and "4 GB" in rows[0], "the fastest first"
    assert f"{count} ms" in rows[-1].replace("0.3 s", "300 ms") and any("1 GB" in row for row in rows), "the least of the others"
    plots = text.split("bytes sent by a device")[1]
    assert marks.count("*") == (count > 3) and plots.count("*") == 2 * marks.count("*"), "once in both plots"
    assert marks[0] in plots and marks[-1] in plots
    assert ("300 plans" in text) == (count == 300) and (count != 4 or "fsdp" in rows[1])


def test_an_empty_front_says_so():
    assert "nothing that was judged fits" in text_of(front_view([]))
