"""The command line in this process: what it printed, and with which status it ended."""

import contextlib
import functools
import io
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

from soapjax import cli

TINY = ["--set", "batch=4", "--set", "width=16", "--set", "layers=1", "--set", "features=8", "--set", "classes=4"]
ROOT = Path(__file__).parent.parent


class Ended(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def result(self) -> dict:
        """The one JSON object on standard output; NaN and Infinity, which JSON lacks, are errors."""

        def refuse(name):
            raise AssertionError(f"{name} is not JSON")

        return json.loads(self.out, parse_constant=refuse)


def call(*argv: object) -> Ended:
    out, err = io.StringIO(), io.StringIO()
    status = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main([str(a) for a in argv])
        except SystemExit as e:
            status = e.code
    return Ended(0 if status is None else status, out.getvalue(), err.getvalue())


def done(*argv: object) -> dict:
    """The one JSON object of a command that succeeds."""
    ended = call(*argv, "--json")
    assert ended.status == 0, ended.err
    return ended.result


def step_of(path: object = "plan.json") -> list[str]:
    """The options that give a command the step that a plan was made for."""
    model = json.loads(Path(path).read_text())["model"]
    return ["--model", model["path"], *(word for k, v in model["settings"].items() for word in ("--set", f"{k}={v}"))]


@functools.cache
def plan_text(model: str = "models.mlp", *settings: str, topology: str = "cpu8", planner: str = "data_parallel") -> str:
    """The plan file of a small model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        ended = call("plan", model, "--topology", topology, "--planner", planner, "-o", path, *(settings or TINY))
        assert ended.status == 0, ended.err
        return path.read_text()
