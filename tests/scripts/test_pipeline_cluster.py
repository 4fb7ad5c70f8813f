"""The tables of pipelines on the emulated cluster, from rows that are made up."""

import argparse
import sys

import cluster_measure
import pipeline_cluster


def test_what_was_measured_is_reported(tmp_path, monkeypatch):
    path, table = tmp_path / "rows.csv", tmp_path / "table.md"
    key = {"model": "alexnet", "hosts": "2", "rate": "200mbit", "spread": 0.01, "steps": 5, "loss": 1.0}
    made = [("data_parallel", "one program", 1.0, 1.0), ("gpipe, 4 micro-batches", "pipeline", 0.25, 0.24)]
    made += [("1f1b, 4 micro-batches", "pipeline", 0.22, 0.20), ("1f1b, 8 micro-batches", "pipeline", 0.19, 0.30)]
    rows = [key | dict(strategy=s, kind=k, predicted_s=p, measured_s=m) for s, k, p, m in made]
    cluster_measure.write_rows(str(path), rows, pipeline_cluster.FIELDS)
    monkeypatch.setattr(sys, "argv", ["pipeline_cluster.py", "--report", "--output", str(path), "--table", str(table)])
    assert pipeline_cluster.main() == 0
    text = table.read_text()
    assert "1f1b, 4 micro-batches: 5.00 x data parallelism, measured" in text
    assert "error at most 36.7%, median 10.0%" in text
    assert "wrong order: gpipe, 4 micro-batches before 1f1b, 8 micro-batches, 1f1b, 4 micro-batches before 1f1b, 8" in text


def test_nothing_measured_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pipeline_cluster.py", "--report", "--output", str(tmp_path / "none.csv")])
    assert pipeline_cluster.main() == 2 and "measure first" in capsys.readouterr().err


def test_rows_are_added_to_those_that_are_there(tmp_path):
    """As a run adds them, strategy after strategy, in the columns of this table."""
    options = argparse.Namespace(model="alexnet", hosts=2, rate="200mbit", output=str(tmp_path / "rows.csv"))
    recorder = cluster_measure.Recorder(options, pipeline_cluster.FIELDS)
    for k, name in enumerate(("data_parallel", "1f1b, 4 micro-batches", "data_parallel")):
        recorder.add(strategy=name, kind="pipeline", predicted_s=1.0 + k, measured_s=1.0, spread=0.1, steps=5, loss=1.0)
    assert recorder.done() == {"data_parallel", "1f1b, 4 micro-batches"}
    (rows,) = pipeline_cluster.read(options.output).values()
    assert {r.strategy: r.predicted_s for r in rows} == {"data_parallel": 3.0, "1f1b, 4 micro-batches": 2.0}
