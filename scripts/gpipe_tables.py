"""GPipe's Tables 2 and 3 (Huang et al. 2019) by simulation, and the memory of its Table 1; no figure is fitted.

    python scripts/gpipe_tables.py

The published CSV has columns table, hardware, model, microbatches, partitions, normalised_throughput. The Transformer's rows are
simulated from this package's own graph of it (models/transformer_lm.py: width 2048, 8192 within, 32 heads, 1024 tokens,
vocabulary 32000; 48 layers on TPUs, 24 on GPUs), cut into balanced stages of one device, schedule gpipe with
rematerialisation, a batch of 32.
Devices are as their data sheets say, with one assumed efficiency. Table 2 is normalised to two partitions and one micro-batch,
Table 3 to two partitions.

Table 1 asks how large a Transformer fits into 16 GB per core: without GPipe ("none") on one, with it on 1, 8, 32 and 128 of equal
numbers of layers. Here the model is as its authors published it (Lingvo's OneBWdsGPipeTransformer: dropout of 0.1, of attention
weights too, logits in pieces), at 32 sequences in 32 micro-batches with GPipe, and without at the 8 sequences of that
configuration: at 32 not one layer would fit, and the paper says neither. Layers are the most that fit; activation bytes are at the
paper's own number of layers, summed over cores, and `of none` is their ratio to those of the three layers without GPipe. Other
numbers of micro-batches are shown for the layers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # models/

import jax
from csv_files import Count, CsvRow, Name, Positive, read_rows
from paper_tables import PUBLISHED_FILES, guarded, markdown, note, show

from models import transformer_lm
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.passes.build import build_graph
from soapjax.graph.trace.tracing import trace
from soapjax.helpers.files import write_text_atomic
from soapjax.search.stages.choices import Choice
from soapjax.search.stages.gpipe import balanced_partition
from soapjax.search.stages.stage_problem import StageProblem
from soapjax.topology import DeviceTopology

SIZES = dict(width=2048, heads=32, mlp_ratio=4, seq=1024, vocab=32000)
BATCH = 32
LAYERS = {"2": 48, "3": 24}


class Published(CsvRow):
    table: Literal["2", "3"]
    hardware: Literal["tpu", "p100-pcie"]
    model: Name
    microbatches: Count
    partitions: Count
    normalised_throughput: Positive

# Per core of a TPU v3 (two cores a chip), per GPU for the P100; peak is that of the multiplications' own precision.
DEVICES = {
    "tpu": dict(
        name="TPU v3 core", platform="tpu", memory_bytes=16 * 2**30, memory_bandwidth_bytes_per_s=450e9,
        peak_flops_per_s={"float32": 61.5e12}, link_bytes_per_s=82e9,
        source="Jouppi et al., CACM 63(7), 2020: 123 TFLOP/s, 900 GB/s and 32 GB per chip of two cores; links of 656 Gb/s",
    ),
    "p100-pcie": dict(
        name="Tesla P100-PCIE-16GB", platform="cuda", memory_bytes=16 * 2**30, memory_bandwidth_bytes_per_s=732e9,
        peak_flops_per_s={"float32": 9.3e12}, link_bytes_per_s=15.75e9,
        source="NVIDIA Tesla P100 PCIe data sheet; PCIe 3.0 x16",
    ),
}  # fmt: skip
EFFICIENCY = 0.5  # assumption, of arithmetic, memory and links alike: but for latencies it cancels out of these ratios
# Table 1 of the paper, Transformer-L on TPU v3: layers of the largest model and its peak activations in GiB, without GPipe and with
# it by partitions. (For "none" the paper prints 11.7 beside parameters and 3.15 beside activations; 282.2 M parameters of 12 bytes
# are 3.15 GiB, so the two are taken the other way round.)
NONE = (3, 11.7)
LARGEST = {1: (13, 6.4), 8: (103, 50.9), 32: (415, 199.9), 128: (1663, 796.1)}
AS_PUBLISHED = dict(dropout=0.1, attention_dropout=0.1, loss_chunks=8)
BATCH_OF_NONE = 8
MICROBATCHES = (4, 8, 16, 32)  # the last as published
BYTES_PER_PARAMETER = 12  # the paper's: weights and two moments


def cluster(hardware: str, count: int) -> DeviceTopology:
    figures = dict(DEVICES[hardware])
    rate = figures.pop("link_bytes_per_s")
    device = figures | dict(
        memory_fraction=1.0, memory_margin_fraction=0.0, memory_efficiency_fraction=EFFICIENCY, launch_s=2e-6, overlap=True,
        efficiency_fraction=dict.fromkeys(("dot", "conv", "other"), EFFICIENCY),
    )  # fmt: skip
    level = dict(
        name="device", size=count, bandwidth_bytes_per_s=rate, latency_s=5e-6, efficiency_fraction=EFFICIENCY,
        source=figures["source"],
    )  # fmt: skip
    return DeviceTopology.from_dict(dict(name=hardware, device=device, levels=[level]))


def graph_of(layers: int, batch: int = BATCH, **options) -> OperatorGraph:
    """The Transformer's training step; only shapes, nothing is allocated."""
    step = None

    def shapes():
        nonlocal step
        step, state, _ = transformer_lm.make(batch=1, layers=layers, **SIZES, **options)
        return state

    state = jax.eval_shape(shapes)
    tokens = jax.ShapeDtypeStruct((batch, SIZES["seq"] + 1), "int32")
    return build_graph(trace(step, state, {"tokens": tokens}))[0]


def simulated_s(graph: OperatorGraph, hardware: str, partitions: int, microbatches: int) -> float:
    """Seconds per batch of GPipe."""
    problem = StageProblem(
        graph, cluster(hardware, partitions), schedules=("gpipe",), num_stages=partitions, num_microbatches=microbatches,
        always_rematerialise=True,
    )  # fmt: skip
    return problem.price(gpipe_choice(problem, partitions, microbatches)).timeline.step_time_s


def gpipe_choice(problem: StageProblem, partitions: int, microbatches: int, *, rematerialise: bool = True) -> Choice:
    layers, marks = problem.layers(microbatches)
    bounds = (0, *(marks[part[-1] + 1] for part in balanced_partition(layers, partitions)))
    return Choice("gpipe", microbatches, bounds, (1,) * partitions, (0,) * partitions, (rematerialise,) * partitions)


def throughput_rows(published: list[Published]) -> list[dict]:
    graphs: dict[str, OperatorGraph] = {}
    times: dict[tuple, float] = {}
    rows = []
    for row in published:
        if row.model != "transformer":
            continue
        table, hardware = row.table, row.hardware
        if table not in graphs:
            graphs[table] = graph_of(LAYERS[table])
        graph = graphs[table]

        def seconds(partitions: int, microbatches: int, key=(table, hardware), graph=graph, hardware=hardware) -> float:
            at = (*key, partitions, microbatches)
            if at not in times:
                times[at] = simulated_s(graph, hardware, partitions, microbatches)
            return times[at]

        partitions, microbatches = row.partitions, row.microbatches
        found = seconds(2, 1 if table == "2" else microbatches) / seconds(partitions, microbatches)
        paper = row.normalised_throughput
        ideal = bubble_only(partitions, microbatches) / (bubble_only(2, 1) if table == "2" else bubble_only(2, microbatches))
        rows.append(
            {
                "table": table, "hardware": hardware, "M": microbatches, "K": partitions, "paper": f"{paper:.2f}",
                "simulated": f"{found:.2f}", "error": f"{100 * (found / paper - 1):+.1f} %", "bubble alone": f"{ideal:.2f}",
            }
        )  # fmt: skip
    return rows


def bubble_only(partitions: int, microbatches: int) -> float:
    """Throughput of equal stages without transfers: K M/(M + K - 1)."""
    return partitions * microbatches / (microbatches + partitions - 1)


@dataclass(frozen=True)
class Growth:
    """What one device holds that has everything: `fixed` with no layer, and `each` per layer, the same for all."""

    fixed: float
    each: float

    @classmethod
    def through(cls, few: tuple[int, float], many: tuple[int, float]) -> Growth:
        each = (many[1] - few[1]) / (many[0] - few[0])
        return cls(few[1] - few[0] * each, each)

    def of(self, layers: float) -> float:
        return self.fixed + layers * self.each


def growth(batch: int, counts: Sequence[int]) -> tuple[Growth, dict[int, Growth]]:
    """Parameters, and peak activation bytes by number of micro-batches, of a batch of `batch` sequences."""
    figures = []
    for layers in (2, 6):
        graph = graph_of(layers, batch, **AS_PUBLISHED)
        problem = StageProblem(graph, cluster("tpu", 1), schedules=("gpipe",), num_stages=1, num_microbatches=1)
        everything = (0, len(problem.forward))
        working = {m: problem.loads.load(everything, 0, 1, m, 0).working_bytes for m in counts}
        figures.append((layers, sum(graph.tensors[p.tensor].size_bytes / 4 for p in graph.parameters), working))
    few, many = figures
    return (
        Growth.through(few[:2], many[:2]),
        {m: Growth.through((few[0], few[2][m]), (many[0], many[2][m])) for m in counts},
    )


def most_layers(parameters: Growth, working: Growth, inputs: float, partitions: int, usable: float) -> int:
    """The most layers in all that fit into equal partitions, the embedding on the first, softmax and loss on the last."""
    on_end = 1 if partitions == 1 else 0.5  # share of the embedding's and the softmax's parameters, which are equally large

    def fits(n: int) -> bool:
        return BYTES_PER_PARAMETER * (on_end * parameters.fixed + n * parameters.each) + working.of(n) + inputs <= usable

    return partitions * max((n for n in range(200) if fits(n)), default=0)


def memory_rows() -> tuple[list[dict], list[dict]]:
    """Table 1 as the authors' configuration has it; and the most layers by number of micro-batches."""
    usable = cluster("tpu", 1).device.usable_memory_bytes
    parameters, at_once = growth(BATCH_OF_NONE, (1,))
    _, working = growth(BATCH, MICROBATCHES)
    inputs = BATCH * SIZES["seq"] * SIZES["width"] * 4  # of a stage, for the whole batch: what rematerialisation keeps
    none = at_once[1].of(NONE[0])
    found = most_layers(parameters, at_once[1], 0, 1, usable)
    rows = [memory_row("none", *NONE, found, none, 1.0, 1.0)]
    most = {m: {k: most_layers(parameters, working[m], inputs, k, usable) for k in LARGEST} for m in MICROBATCHES}
    published = MICROBATCHES[-1]
    for k, (layers, paper) in LARGEST.items():
        held = working[published].of(layers) + k * inputs
        rows.append(memory_row(f"GPipe-{k}", layers, paper, most[published][k], held, held / none, paper / NONE[1]))
    by_count = [{"M": "paper"} | {f"GPipe-{k}": f"{layers}" for k, (layers, _) in LARGEST.items()}]
    for m, found in most.items():
        by_count.append({"M": f"{m}"} | {f"GPipe-{k}": f"{n} ({100 * (n / LARGEST[k][0] - 1):+.0f} %)" for k, n in found.items()})
    return rows, by_count


def memory_row(name: str, layers: int, paper: float, found: int, held: float, of_none: float, paper_of_none: float) -> dict:
    return {
        "on": name, "layers, paper": f"{layers}", "simulated": f"{found}",
        "error of layers": f"{100 * (found / layers - 1):+.1f} %",
        "activations, paper (GiB)": f"{paper}", "simulated (GiB)": f"{held / 2**30:.1f}",
        "of none, paper": f"{paper_of_none:.2f}", "of none": f"{of_none:.2f}",
        "error": f"{100 * (of_none / paper_of_none - 1):+.1f} %",
    }  # fmt: skip


def run(options) -> None:
    rows = throughput_rows(read_rows(options.published, Published))
    show("GPipe, Tables 2 and 3: normalised throughput of the Transformer", list(rows[0]), rows)
    many = [abs(float(r["error"].split()[0])) for r in rows if r["M"] == 32]
    note(f"largest error at M = 32: {max(many):.1f} %")
    impossible = [f"K = {r['K']}, M = {r['M']}" for r in rows if float(r["paper"]) > 1.02 * float(r["bubble alone"])]
    if impossible:
        note(f"the paper's throughput is above K M/(M + K - 1), which no bubble allows, at {'; '.join(impossible)}")
    memory, by_count = memory_rows()
    show("GPipe, Table 1: the largest Transformer in 16 GB per core", list(memory[0]), memory)
    show("The same by number of micro-batches, in layers", list(by_count[0]), by_count)
    if options.output is not None:
        tables = [markdown(list(table[0]), table) for table in (rows, memory, by_count)]
        write_text_atomic(options.output, "\n".join(tables))


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("published", type=Path, nargs="?", default=PUBLISHED_FILES / "gpipe_throughput.csv")
    parser.add_argument("--output", type=Path, help="a Markdown file for the tables")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(guarded(run, arguments()))
