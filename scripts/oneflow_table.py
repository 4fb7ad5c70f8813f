"""OneFlow's published GPT runs on 32 V100, predicted: two scalars fitted on three rows, the other rows predicted with them.

    python scripts/oneflow_table.py --output results/oneflow.md

Columns of the file: data, tensor, pipeline, global_batch, hidden, layers, oneflow_ms, oneflow_mib. Sequences of 2,048 tokens,
float16, each block recomputed in the backward pass: whole, with its last product and the sum of that over the devices, as
OneFlow's checkpointing pass copies a block (JAX leaves out what no gradient needs; the table adds it). Heads, and 32
micro-batches of the pipelines, as in the benchmark's own configuration (Oneflow-Inc/OneFlow-Benchmark,
LanguageModeling/GPT/integration_test/config_of_performance_test.csv).

The strategy of a row is the published one: tensor parallelism (Megatron's pairs, and the vocabulary split) over the fastest
links, data parallelism over the others. Where a row has tensor parallelism the benchmark has NCCL on the stream of the
compute (`nccl_use_compute_stream`, LanguageModeling/GPT/oneflow_gpt/training.py): nothing runs beside collectives there.

A pipeline of p stages and m micro-batches takes the sum of its stages' times and (m - 1) times the slowest stage (GPipe,
Huang et al. 2019, section 2.3); a stage is simulated on its own devices, and holds the inputs of p micro-batches' blocks (1F1B)
and the sums of its gradients.

Memory was published as the driver counts it, with what the process itself has on the GPU: the CUDA context, libraries, NCCL's
buffers, cached blocks. What the program takes is predicted; the rest, one figure, is the median of what is missing in the fitted
rows. The table has both errors.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import sys
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple

from paper_tables import PUBLISHED_FILES, guarded

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import pydantic
from csv_files import Count, CsvRow, Positive, read_rows
from scipy.stats import kendalltau

from soapjax.costs.measured.fit import fitted_scales
from soapjax.errors import Problem, SoapjaxError
from soapjax.graph.passes.build import build_graph
from soapjax.graph.passes.phases import FORWARD
from soapjax.graph.trace.tracing import trace
from soapjax.helpers.files import write_text_atomic
from soapjax.planning.profiling import scaled_prediction
from soapjax.search.experts.baselines import tensor_parallel_strategy
from soapjax.search.problem import PlanningProblem
from soapjax.steps.sourced_models import abstract_model
from soapjax.strategy.configs import Strategy
from soapjax.strategy.plan import ModelSource
from soapjax.strategy.space import search_space
from soapjax.topology import DeviceTopology, factor_mesh, load_topology

# One GPU: compute alone. Eight within a host: the fast links. Sixteen on two hosts: the slow ones.
FITTED = ("1x1x1", "1x8x1", "16x1x1")
HEADS = {1536: 16, 2304: 24, 3072: 32}
VOCAB, SEQ, MICROBATCHES = 51_200, 2048, 32
MIB = 2**20


class Row(CsvRow):
    data: Count
    tensor: Count
    pipeline: Count
    global_batch: Count
    hidden: Annotated[Literal[tuple(HEADS)], pydantic.BeforeValidator(int)]
    layers: Count
    oneflow_ms: Positive
    oneflow_mib: Positive

    @property
    def step_s(self) -> float:
        return self.oneflow_ms / 1e3

    @property
    def memory_bytes(self) -> float:
        return self.oneflow_mib * MIB

    @property
    def name(self) -> str:
        return f"{self.data}x{self.tensor}x{self.pipeline}"


def machine(devices: int, tensor: int, platform: str) -> DeviceTopology:
    """So many devices of the cluster, whole hosts first. The models compute in bfloat16; it stands for float16 here."""
    topology = load_topology("v100x32")
    hosts, each = max(1, devices // 8), min(devices, 8)
    levels = [lv.part(0, n) for lv, n in zip(topology.levels, (hosts, each), strict=True) if n > 1]
    peak = dict(topology.device.peak_flops_per_s) | {"bfloat16": topology.device.peak_flops_per_s["float16"]}
    device = replace(topology.device, peak_flops_per_s=peak, overlap=tensor == 1, platform=platform)
    return replace(topology, device=device, levels=tuple(levels or [topology.levels[-1].part(0, 1)]))


@functools.cache
def graph_of(batch: int, hidden: int, layers: int):
    sizes = dict(batch=batch, seq=SEQ, width=hidden, layers=layers, heads=HEADS[hidden], vocab=VOCAB)
    how = dict(scan=True, remat=True, tie=True, dtype="bfloat16", optimizer="adamw")
    made = abstract_model(ModelSource(path="soapjax.models.transformer_lm", settings=sizes | how))
    return build_graph(trace(made.step, *made.arguments))[0]


class Simulated(NamedTuple):
    """A model of so many layers under the row's data and tensor degrees."""

    problem: PlanningProblem
    strategy: Strategy

    def seconds(self, compute_scale: float, network_scale: float) -> float:
        once = scaled_prediction(self.problem.simulator, self.strategy, compute_scale, network_scale)
        compute_s, network_s = self.last_products_s()
        return once + compute_scale * compute_s + network_scale * network_s

    @functools.cache  # noqa: B019 - lives as long as the script
    def last_products_s(self) -> tuple[float, float]:
        """Of the blocks' last products, forward, in all layers: computing them, and summing them over devices."""
        graph, durations = self.problem.graph, self.problem.simulator.costs(self.strategy).durations
        (k,) = (
            k for k, t in enumerate(graph.tasks)
            if t.is_heavy and t.phase == FORWARD and graph.operators[t.operator].name == "blocks/mlp/down"
        )  # fmt: skip
        made = [a.tensor for a in graph.tasks[k].writes]
        return float(durations.compute_s[k]), float(np.asarray(durations.resolve_s)[made].sum())

    @functools.cache  # noqa: B019 - lives as long as the script
    def memory_bytes(self) -> float:
        return float(self.problem.simulator.costs(self.strategy).memory_bytes[3])

    def gradient_bytes(self) -> float:
        """As they are added up over micro-batches, in the parameters' own type and layout."""
        tables, parts = self.problem.simulator.tables, self.problem.simulator.costs(self.strategy).parts
        return float((parts.stored_bytes / tables.state_copies).sum())


@functools.cache
def simulated(batch: int, hidden: int, layers: int, data: int, tensor: int, platform: str = "cuda") -> Simulated:
    topology = machine(data * tensor, tensor, platform)
    mesh = factor_mesh(topology)
    graph = graph_of(batch, hidden, layers)
    problem = PlanningProblem.make(graph, search_space(graph, mesh), topology)
    # The axes come slowest links first: tensor parallelism takes the fastest whose product is its degree.
    first = next(a for a in range(len(mesh.axis_sizes) + 1) if math.prod(mesh.axis_sizes[a:]) == tensor)
    axes = [a for a in range(first, len(mesh.axis_sizes)) if mesh.axis_sizes[a] > 1]
    return Simulated(problem, with_vocabulary_parallel(problem, tensor_parallel_strategy(problem, axes), axes))


def with_vocabulary_parallel(problem: PlanningProblem, strategy: Strategy, axes: list[int]) -> Strategy:
    """Embedding, head and loss split over the vocabulary, as Megatron (2019, section 3) and OneFlow's benchmark do."""
    for n, op in enumerate(problem.graph.operators):
        dim = next((d for d, x in enumerate(op.dims) if x.size == VOCAB), None)
        if dim is not None:
            strategy.axes[n, axes] = dim
    if not problem.space.is_valid(strategy):
        raise SystemExit(f"no such strategy: {problem.space.violations(strategy)}")
    return strategy


def predicted_s(row: Row, compute_scale: float, network_scale: float) -> float:
    def seconds(batch: int, layers: int) -> float:
        return simulated(batch, row.hidden, layers, row.data, row.tensor).seconds(compute_scale, network_scale)

    if row.pipeline == 1:
        return seconds(row.global_batch, row.layers)
    batch, layers = row.global_batch // MICROBATCHES, row.layers // row.pipeline
    # Twice the batch takes one more micro-batch of work; what is left is paid once (gradient sums, update).
    one, two = seconds(batch, layers), seconds(2 * batch, layers)
    last, once = two - one, max(2 * one - two, 0.0)  # the last stage has the head
    longer = seconds(2 * batch, 2 * layers) - seconds(batch, 2 * layers)
    other = longer - last  # so many layers alone
    stages = [other] * (row.pipeline - 1) + [last]
    sent_bytes = batch // row.data * SEQ * row.hidden * 2
    link = load_topology("v100x32").levels[0]
    hop_s = network_scale * (link.latency_s + sent_bytes / link.achieved_bytes_per_s)
    return sum(stages) + 2 * (row.pipeline - 1) * hop_s + (MICROBATCHES - 1) * max(stages) + once


def predicted_bytes(row: Row) -> float:
    """On a platform that is not XLA's: what XLA keeps wider or longer on GPUs OneFlow's kernels and memory planner do not."""
    if row.pipeline == 1:
        return simulated(row.global_batch, row.hidden, row.layers, row.data, row.tensor, "oneflow").memory_bytes()
    batch, layers = row.global_batch // MICROBATCHES, row.layers // row.pipeline
    kept = batch // row.data * SEQ * row.hidden * 2 * layers  # the input of every block, of one micro-batch
    stage = simulated(batch, row.hidden, layers, row.data, row.tensor, "oneflow")
    return stage.memory_bytes() + (row.pipeline - 1) * kept + stage.gradient_bytes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default=PUBLISHED_FILES / "oneflow_gpt_v100.csv", help="the published rows (CSV)")
    parser.add_argument("--output", help="where to write the table (Markdown)")
    return guarded(run, parser.parse_args())


def run(options: argparse.Namespace) -> None:
    rows = read_rows(options.file, Row)
    if absent := [name for name in FITTED if name not in {r.name for r in rows}]:
        expected, remedy = f"the rows {', '.join(FITTED)} (data x tensor x pipeline), which are fitted", "give the whole table"
        raise SoapjaxError(Problem(options.file, f"no row {', '.join(absent)}", expected, remedy))
    fitted = [r for r in rows if r.name in FITTED]

    def predict(compute_scale: float, network_scale: float) -> list[float]:
        return [predicted_s(r, compute_scale, network_scale) for r in fitted]

    fit = fitted_scales([r.name for r in fitted], predict, [r.step_s for r in fitted], has_network=True)
    others = [r for r in rows if r.name not in FITTED]
    times = {r.name: predicted_s(r, fit.compute_scale, fit.network_scale) for r in rows}
    memory = {r.name: predicted_bytes(r) for r in rows}
    process = float(np.median([r.memory_bytes - memory[r.name] for r in fitted]))
    tau = kendalltau([times[r.name] for r in others], [r.step_s for r in others]).statistic
    # Of rows within 5 % of one another the order is chance, as in the table of the emulated cluster.
    pairs = [(a, b) for a, b in itertools.combinations(others, 2) if abs(a.step_s / b.step_s - 1) > 0.05]
    signs = [np.sign((times[a.name] - times[b.name]) * (a.step_s - b.step_s)) for a, b in pairs]
    time_errors = [abs(times[r.name] / r.step_s - 1) for r in others]
    program_errors = [abs(memory[r.name] / r.memory_bytes - 1) for r in others]
    memory_errors = [abs((memory[r.name] + process) / r.memory_bytes - 1) for r in others]
    lines = [
        "| data x tensor x pipeline | batch | hidden | layers | measured ms | predicted ms | error "
        "| measured MiB | program MiB | with the process | error |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        t, b, all_b = times[r.name], memory[r.name], memory[r.name] + process
        lines.append(
            f"| {r.name}{' (fitted)' if r.name in FITTED else ''} | {r.global_batch} | {r.hidden} | {r.layers} "
            f"| {r.step_s * 1e3:.0f} | {t * 1e3:.0f} | {t / r.step_s - 1:+.0%} "
            f"| {r.memory_bytes / MIB:.0f} | {b / MIB:.0f} | {all_b / MIB:.0f} | {all_b / r.memory_bytes - 1:+.0%} |"
        )
    lines += [
        "",
        f"Two scalars, fitted on {', '.join(FITTED)} and frozen: compute x {fit.compute_scale:.3g}, network x "
        f"{fit.network_scale:.3g} (error left on these three: median {fit.residual:.0%}, worst {fit.worst:.0%}). "
        f"The other {len(others)} rows: Kendall's tau {tau:.3f} over all pairs, {np.mean(signs):.3f} over the {len(pairs)} more "
        f"than 5 % apart; step time: median error {np.median(time_errors):.0%}, "
        f"worst {max(time_errors):.0%}; memory, with {process / MIB:.0f} MiB of the process: median error "
        f"{np.median(memory_errors):.0%}, worst {max(memory_errors):.0%}; of the program alone {np.median(program_errors):.0%}, "
        f"{max(program_errors):.0%}.",
    ]
    print("\n".join(lines))
    if options.output:
        write_text_atomic(options.output, "\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
