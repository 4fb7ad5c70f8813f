"""The critical path: a chain without gaps from the begin to the end of the step."""

import numpy as np
import pytest
from problems import case

from soapjax.simulate.critical_tasks import critical_path, pipeline_path
from soapjax.simulate.event import simulate
from soapjax.simulate.pipeline_tasks import StageLoad, Transfer
from soapjax.simulate.pipeline_timeline import simulate_pipeline
from soapjax.simulate.simulator import occupied_by
from soapjax.strategy.pipeline import Pipeline, Stage


@pytest.mark.parametrize("model, topology", [("lm", "a100x8"), ("mlp_of_sixes", "2x6"), ("casts", "a100x8")])
def test_the_path_is_a_chain_that_takes_the_step(model, topology):
    found = case(model, topology)
    for strategy in [found.data_parallel(), *found.strategies(1, 3)]:
        costs = found.simulator.costs(strategy)
        schedule = found.simulator.schedule
        durations, occupies = schedule.durations(costs.durations), occupied_by(schedule, costs)
        timeline = simulate(schedule, durations, occupies)
        path = critical_path(schedule, durations, occupies)
        assert sum(s.duration_s for s in path) == pytest.approx(timeline.makespan_s, rel=1e-9)
        assert path[0].start_s == 0
        for before, after in zip(path, path[1:], strict=False):
            assert after.start_s == pytest.approx(before.start_s + before.duration_s)
        # What is on it delays the step by as much as it is longer; the timeline's other tasks are no later than they were.
        task = path[len(path) // 2].task
        longer = np.array(durations, np.float64)
        longer[task] += timeline.makespan_s
        assert simulate(schedule, longer, occupies).makespan_s == pytest.approx(2 * timeline.makespan_s)


def test_a_schedule_of_nothing_has_no_path():
    assert pipeline_path(()) == []


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipelines_path_goes_from_its_begin_to_its_end(schedule):
    stages = tuple(Stage(operators=(f"op{i}",), devices=(2 * i, 2 * i + 1), mesh={"d": 2}) for i in range(3))
    pipeline = Pipeline(schedule=schedule, num_microbatches=4, stages=stages)
    loads = [StageLoad(forward_s=1.0 + i / 7, backward_s=2.0, update_s=0.25) for i in range(3)]
    transfers = [Transfer(i, i + 1, 0, 0.3, 0.4) for i in range(2)]
    timeline = simulate_pipeline(pipeline, loads, transfers)
    path = pipeline_path(timeline.tasks)
    assert path[0].start_s == 0 and timeline.tasks[path[-1].task].name.startswith("update")
    assert sum(s.duration_s for s in path) == pytest.approx(timeline.makespan_s)
    serial = simulate_pipeline(pipeline, loads, transfers, overlap=False)
    assert timeline.makespan_s <= serial.makespan_s
    free = simulate_pipeline(pipeline, loads, [t._replace(forward_s=0.0, backward_s=0.0) for t in transfers], overlap=False)
    assert free.makespan_s <= timeline.makespan_s
