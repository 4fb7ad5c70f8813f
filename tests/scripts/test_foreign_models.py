"""The public steps' script: its list of cases is well-formed, rows mean what they say, and one case goes the whole way."""

import csv
import json
import subprocess
import sys
import textwrap

import foreign_measure
import foreign_models
import foreign_report
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from foreign import registry, sources
from foreign.registry import WHOLE, Case, Made, all_cases, case


def regression(feed=None):
    """A Flax step whose key is state, and whose loss has two readers of one mask."""
    from flax import linen as nn

    net, tx = nn.Dense(8), optax.adam(1e-2)
    x = registry.floats(16, 4)
    params = net.init(jax.random.key(0), x)

    def step(state, x):
        key, sub = jax.random.split(state["key"])
        mask = (x.sum(axis=1) > 0).astype(jnp.float32)

        def loss_fn(params):
            noisy = net.apply(params, x + 0.1 * jax.random.normal(sub, x.shape))
            return ((noisy**2).mean(axis=1) * mask).sum() / mask.sum()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "key": key}, loss

    return Made(step, ({"params": params, "opt": tx.init(params), "key": jax.random.key(1)}, x), feed or {0: 0})


def test_the_list_of_cases_is_well_formed(tmp_path):
    cases = all_cases()
    assert len(cases) >= 50
    assert sum(not c.is_listed for c in cases.values()) >= 20
    assert {"rl", "graphs", "diffusion", "ssm", "pinn", "meta-learning", "gan", "moe", "retrieval", "speech", "flow", "ode",
            "contrastive", "quantised", "bayesian"} <= {c.family for c in cases.values()}  # fmt: skip
    for name, c in cases.items():
        assert name == c.name and name.replace("_", "").isalnum()
        assert c.source.count("+") == 1 or (not c.source and c.packages)
        assert not c.source or c.source in c.missing(tmp_path)
    assert "not installed: nothing_of_that_name" == Case("a", "b", None, "", ("nothing_of_that_name",), False).missing(tmp_path)


def test_a_case_is_registered_once_and_says_where_its_code_comes_from(monkeypatch):
    monkeypatch.setattr(registry, "CASES", {})
    case("one", "family", packages=["flax"])(regression)
    with pytest.raises(ValueError, match="twice"):
        case("one", "family", packages=["flax"])
    with pytest.raises(ValueError, match="neither"):
        case("two", "family")


def test_definitions_are_taken_from_where_they_stand(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_folder", tmp_path)
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        import math
        import no_such_logger
        raised = 1 / 0
        class Net:
            size = math.floor(2.5)
        if __name__ == "__main__":
            rate = 3
            def update(x: no_such_logger.Type | None):
                return x * rate * Net.size * args
    """)
    )
    m = sources.pieces("script.py", ("Net", "rate", "update"), {"args": 7}, without=("no_such_logger",))
    assert m.update(1) == 42 and not hasattr(m, "raised")
    with pytest.raises(LookupError, match="absent"):
        sources.pieces("script.py", ("absent",))
    cells = [
        {"cell_type": "code", "source": ["%matplotlib inline\n", "def f():\n", "    return 5\n"]},
        {"cell_type": "markdown", "source": []},
    ]
    (tmp_path / "book.ipynb").write_text(json.dumps({"cells": cells}))
    assert sources.pieces("book.ipynb", ("*",)).f() == 5
    with sources.stubs("no_such_logger"):
        import no_such_logger

        assert no_such_logger.anything.at.all
    assert "no_such_logger" not in sys.modules


def test_results_are_fed_back_and_compilations_counted():
    made = Made(lambda state, x: (state * x, state), (np.float32(3), np.float32(2)))
    ran = foreign_measure.run(jax.jit(made.step), made)
    assert [float(r[0]) for r in ran.results] == [6, 12, 24, 48]
    assert ran.compilations[0] >= 1 and ran.compilations[1:] == [0, 0, 0]
    other_shape = Made(lambda x: jnp.concatenate([x, x]), (np.ones(3, np.float32),), {0: WHOLE})
    assert all(n >= 1 for n in foreign_measure.run(jax.jit(other_shape.step), other_shape).compilations)


def test_distances_see_what_is_wrong():
    a = [np.array([1.0, 2.0]), np.array([3, 4]), None, np.float64(0)]
    assert foreign_measure.distance(a, a) == 0
    assert foreign_measure.distance([a[0] * 1.01, *a[1:]], a) == pytest.approx(0.01, rel=1e-6)
    assert foreign_measure.distance([a[0], np.array([3, 5]), *a[2:]], a) == 0.5
    assert foreign_measure.distance([np.array([np.nan, 2.0]), *a[1:]], a) == float("inf")
    assert foreign_measure.distance(a[:2], a) == float("inf")


def test_a_wrong_step_is_not_within_rounding():
    made = regression()
    plain = foreign_measure.run(jax.jit(made.step), made)

    def wrong(state, x):
        following, loss = made.step(state, x)
        return {**following, "params": jax.tree.map(lambda p: p * 1.001, following["params"])}, loss

    difference, bound = foreign_measure.compared(foreign_measure.run(jax.jit(wrong), made), plain, made, jax.jit(made.step))
    assert difference > bound


def test_one_case_goes_the_whole_way(tmp_path, monkeypatch):
    """In this process: planned, run, compared, proven; then from the CSV, without being computed again."""
    here = Case("regression", "test", regression, "", ("flax",), False)
    calls = []

    def row_of(name, planner, options):
        calls.append(name)
        return foreign_measure.measured(here, planner, proposals=options.proposals)

    monkeypatch.setattr(foreign_models, "row_of", row_of)
    absent = Case("absent", "test", regression, "no+body", (), False)
    options = foreign_models.parser_for().parse_args(["--results", str(tmp_path), "--planners", "fsdp", "--sources", str(tmp_path)])
    for _ in range(2):
        foreign_models.table([here, absent], options)
    assert calls == ["regression"]
    (row,) = csv.DictReader((tmp_path / "foreign_models.csv").read_text().splitlines())
    assert row["status"] == "proven", row
    assert float(row["float64_error"]) <= 1e-9 and float(row["difference"]) <= float(row["difference_bound"])
    assert 0 < float(row["flops_split"]) <= 1 and 0 < int(row["num_split"]) <= int(row["num_operators"])
    assert len(row["compilations"].split()) == foreign_measure.NUM_STEPS and foreign_report.as_often(row)
    page = (tmp_path / "foreign_models.md").read_text()
    assert "regression" in page and "no folder no+body in the sources" in page


@pytest.mark.parametrize("wrong", [["--only", "no_such_case"], ["--no-such-option"]])
def test_bad_arguments_end_with_status_2(wrong):
    with pytest.raises(SystemExit) as ended:
        foreign_models.main(wrong)
    assert ended.value.code == 2


def test_a_case_that_hangs_or_dies_is_a_row(tmp_path, monkeypatch):
    options = foreign_models.parser_for().parse_args(["--timeout", "5", "--sources", str(tmp_path)])
    run = subprocess.run
    for code, status in (("raise SystemExit(3)", "crashed"), ("import time; time.sleep(60)", "timeout")):
        monkeypatch.setattr(
            subprocess, "run", lambda command, code=code, **k: run([sys.executable, "-c", code], **{**k, "timeout": 2})
        )
        assert foreign_models.row_of("any", "fsdp", options)["status"] == status
