"""Runs examples planned, and again with plain compilation in soap_shard's place; one JSON object a line of what both printed.

    python example_worker.py '{"examples/ppo.py": {"planned": [["--steps", "3"]], "plain": [["--steps", "3"]]}}'

Each list is command lines, one run after the other in one empty folder. `num_sharded` counts the arrays among the arguments of
the last planned step that lie in parts, not whole, on the devices. An example that fails has its traceback under `failed`.
"""

import contextlib
import gc
import io
import json
import os
import runpy
import sys
import tempfile
import traceback

import jax
from flax import nnx

import soapjax

gc.set_threshold(100_000, 10, 10)  # as conftest.py: tracing makes many objects that stay
soap_shard = soapjax.soap_shard
steps = []


class Plain:
    """What soap_shard makes, as far as the examples use it, on one device."""

    def __init__(self, fn, *, planner, proposals):
        self.call = (nnx.jit if sys.argv[0].endswith("nnx_step.py") else jax.jit)(fn)

    def __call__(self, *args):
        return self.call(*args)

    def prepare(self, *args):
        self.layouts = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), args)
        return self

    def shardings(self):
        return self.layouts


def planned(fn, **options):
    steps.append(soap_shard(fn, **options))
    return steps[-1]


def printed(example, command_lines, make):
    soapjax.soap_shard = make
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as out:
        for arguments in command_lines:
            sys.argv = [example, *arguments]
            runpy.run_path(example, run_name="__main__")
    return out.getvalue().splitlines()


for example, runs in json.loads(sys.argv[1]).items():
    path, result = os.path.abspath(example), {"example": example}
    try:
        result["planned"] = printed(path, runs["planned"], planned)
        result["num_sharded"] = sum(not s.is_fully_replicated for s in jax.tree.leaves(steps[-1].shardings()))
        result["plain"] = printed(path, runs["plain"], Plain)
    except (Exception, SystemExit):
        result["failed"] = traceback.format_exc()
    print(json.dumps(result), flush=True)
