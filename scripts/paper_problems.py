"""The planning problems of the paper's tables and figures, for the scripts beside this file.

Six workloads at the paper's sizes (Jia, Zaharia and Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks", 2019,
section 8.1), on 1 to 16 P100 and 1 to 64 K80, four GPUs to a node. A graph does not depend on the number of devices: each model
is traced once. Everything is simulated, on the CPU; `BestKnown` keeps the best strategy ever found for a problem.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import importlib
import json
import math
import os
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # models/

import jax
import numpy as np

from models import gnmt, nasnet
from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace
from soapjax.helpers.files import read_text, write_text_atomic
from soapjax.search.experts.baselines import replicate_all
from soapjax.search.planners import get_planner
from soapjax.search.problem import Budget, Evaluation, PlanningProblem, SearchResult
from soapjax.steps.sourced_models import abstract_model
from soapjax.strategy.configs import Strategy
from soapjax.strategy.plan import ModelSource
from soapjax.strategy.space import search_space
from soapjax.topology import DeviceTopology, factor_mesh, load_topology

PAPER_MODELS = ("alexnet", "inception_v3", "resnet101", "rnntc", "rnnlm", "nmt")
CNNS = ("lenet", "alexnet", "vgg", "inception_v3", "resnet101", "unet")
SPACES = ("soap", "paper")  # without and with pins (operators on parts of the devices)
CLUSTERS = {"p100": "p100x16", "k80": "k80x64", "a100": "a100x64", "p100_pcie": "pcie_p100x4"}
CLUSTER_DEVICES = {
    "p100": (1, 2, 4, 8, 16), "k80": (1, 2, 4, 8, 16, 32, 64), "a100": (1, 2, 4, 8, 16, 32, 64), "p100_pcie": (1, 2, 4),
}  # fmt: skip

_LM = dict(batch=64, seq=512, width=768, layers=12, heads=12, vocab=32_768)


class Workload(NamedTuple):
    """A module of `models/` and arguments of its `make`."""

    module: str
    sizes: dict | None = None  # None: the module's PAPER
    tiny: dict = {}  # instead, to try a script out


WORKLOADS = {
    "alexnet": Workload("alexnet", None, dict(batch=16, image=67, width=0.125, classes=64)),
    "inception_v3": Workload("inception_v3"),
    "resnet101": Workload("resnet", None, dict(batch=8, image=32, width=8, classes=8, depth="tiny")),
    "rnntc": Workload("rnntc", None, dict(seq=2, layers=2)),
    "rnnlm": Workload("rnnlm", None, dict(seq=2)),
    "nmt": Workload("nmt", None, dict(seq=2)),
    "lenet": Workload("lenet", None, dict(batch=16)),
    "rnnlm_2_steps": Workload(
        "rnnlm", dict(batch=64, seq=2, hidden=2048, layers=2, vocab=10_000, optimizer="sgd", learning_rate=0.1),
        dict(seq=2, layers=1),
    ),
    "vgg": Workload("vgg", None, dict(depth=11)),
    "gnmt": Workload("gnmt", dict(batch=64, seq=20, hidden=1024, layers=4, vocab=32_000), dict(seq=2, layers=2)),
    "gnmt_2layer": Workload("gnmt", gnmt.TWO_LAYERS, dict(seq=2, layers=2)),
    "nasnet_large": Workload("nasnet", None, dict(image=16)),
    "nasnet_large_32": Workload("nasnet", nasnet.PAPER | dict(batch=32), dict(image=16, batch=16)),
    "pnasnet_large": Workload("nasnet", nasnet.PNASNET_PAPER, dict(design="pnasnet_5", image=16)),
    "bert": Workload("bert", _LM, dict(layers=1)),
    "transformer_lm": Workload("transformer_lm", _LM, dict(layers=1)),
    "moe": Workload("moe", dict(batch=64, seq=512, width=768, layers=8, heads=12, vocab=32_768, experts=16, top=2)),
    "unet": Workload("unet", dict(batch=32, image=256, width=64, levels=4, groups=0), dict(levels=1)),
}  # fmt: skip


def sizes_of(model: str, *, tiny: bool = False) -> dict:
    """The arguments of a workload's `make`; tiny ones leave out what is the default."""
    workload = WORKLOADS[model]
    if tiny:
        return workload.tiny
    return workload.sizes if workload.sizes is not None else importlib.import_module(f"models.{workload.module}").PAPER


class Traced(NamedTuple):
    graph: OperatorGraph
    batch: int  # samples of a step


@functools.cache
def traced(model: str, *, tiny: bool = False) -> Traced:
    """The operator graph of a workload; nothing is allocated."""
    source = ModelSource(path=f"soapjax.models.{WORKLOADS[model].module}", settings=sizes_of(model, tiny=tiny))
    made = abstract_model(source)
    samples = jax.tree.leaves(made.arguments[1])[0].shape[0]
    return Traced(build_graph(trace(made.step, *made.arguments))[0], samples)


@functools.cache
def cluster(name: str, num_devices: int) -> DeviceTopology:
    """`num_devices` GPUs of a shipped topology: whole nodes, or a part of one.

    Raises: SoapjaxError where the topology has no such part.
    """
    base = load_topology(CLUSTERS[name])
    levels, left = [], num_devices
    for level in reversed(base.levels):
        levels.insert(0, dataclasses.replace(level, size=math.gcd(level.size, left)))
        left //= levels[0].size
    if left != 1:
        expected = " or ".join(map(str, CLUSTER_DEVICES[name]))
        raise SoapjaxError(Problem("--devices", str(num_devices), f"{expected} of {name}", "choose one of these"))
    return dataclasses.replace(base, name=f"{name}x{num_devices}", levels=tuple(levels))


def planning_problem(model: str, topology: DeviceTopology, *, space: str = "soap", tiny: bool = False) -> PlanningProblem:
    """A fresh problem: nothing of it is compiled yet."""
    graph = traced(model, tiny=tiny).graph
    return PlanningProblem.make(graph, search_space(graph, factor_mesh(topology), pins=space == "paper"), topology)


class Case(NamedTuple):
    """A workload on a cluster, by name."""

    model: str
    cluster: str
    devices: int
    space: str = "soap"
    tiny: bool = False

    def problem(self) -> PlanningProblem:
        return planning_problem(self.model, cluster(self.cluster, self.devices), space=self.space, tiny=self.tiny)

    def key(self) -> dict[str, str]:
        """The columns that name it in a table."""
        sizes = "tiny" if self.tiny else "full"
        return dict(model=self.model, cluster=self.cluster, devices=str(self.devices), space=self.space, sizes=sizes)

    def __str__(self) -> str:
        tiny = " (tiny)" if self.tiny else ""
        return f"{self.model}{tiny} on {self.devices} {self.cluster}, space {self.space}"


def search(planner: str, problem: PlanningProblem, budget: Budget, seed: int) -> SearchResult:
    """A planner's result.

    Raises: KeyboardInterrupt where it was interrupted: half a search is no row of a table.
    """
    result = get_planner(planner)(jax.random.key(seed), problem, budget)
    if result.stopped_by == "interrupted":
        raise KeyboardInterrupt
    return result


def one_device_s(model: str, cluster_name: str, *, tiny: bool = False) -> float:
    """The step time of one device that does everything, whether it fits or not."""
    problem = Case(model, cluster_name, 1, tiny=tiny).problem()
    return problem.evaluate([replicate_all(problem)])[0].step_time_s


def expert_of(model: str) -> tuple[str, str]:
    """The planner that imitates the experts, and the space that it needs."""
    return ("expert_cnn", "soap") if model in CNNS else ("expert_rnn", "paper")


class BestKnown:
    """The best feasible strategy known for every case, in a JSON file that only improves.

    Costs are evaluated anew whenever they are asked for: figures of an older cost model are never compared with.
    """

    def __init__(self, path: Path):
        self.path = path
        self.entries: dict[str, dict] = json.loads(read_text(path)) if path.exists() else {}

    def get(self, case: Case, problem: PlanningProblem) -> Evaluation | None:
        """None where nothing is known, or only for another graph."""
        entry = self.entries.get(" ".join(case.key().values()))
        shape = problem.graph.num_operators, problem.space.num_axes
        if entry is None or entry["graph"] != problem.graph.fingerprint()[:16]:
            return None
        data = np.frombuffer(zlib.decompress(base64.b64decode(entry["strategy"])), np.int8)
        if len(data) != shape[0] * (shape[1] + 1):
            return None
        split = shape[0] * shape[1]
        found = Strategy(data[:split].reshape(shape).copy(), data[split:].copy())
        evaluation = problem.evaluate([found])[0]
        return evaluation if evaluation.is_feasible else None

    def offer(self, case: Case, problem: PlanningProblem, found: Evaluation, found_by: str) -> Evaluation:
        """Keeps the better of `found` and what is known, and gives it."""
        known = self.get(case, problem)
        if not found.is_feasible or (known is not None and known.cost <= found.cost):
            return known or found
        packed = base64.b64encode(zlib.compress(found.strategy.key(), 9)).decode()
        entry = dict(cost_s=float(f"{found.cost:.7g}"), found_by=found_by, graph=problem.graph.fingerprint()[:16], strategy=packed)
        if self.path.exists():  # another script may have written meanwhile
            self.entries = json.loads(read_text(self.path))
        self.entries[" ".join(case.key().values())] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(self.path, json.dumps(self.entries, indent=1, sort_keys=True) + "\n")
        return found
