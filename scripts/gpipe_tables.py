"""GPipe's Tables 2 and 3 (Huang et al. 2019) by simulation, and the memory of its Table 1; no figure is fitted.

    python scripts/gpipe_tables.py PUBLISHED.csv

PUBLISHED.csv has columns table, hardware, model, microbatches, partitions, normalised_throughput. The Transformer's rows are
simulated from this package's own graph of it (models/transformer_lm.py: width 2048, 8192 within, 32 heads, 1024 tokens,
vocabulary 32000; 48 layers on TPUs, 24 on GPUs), cut into balanced stages of one device, schedule gpipe with
rematerialisation, a batch of 32.
Devices are as their data sheets say, with one assumed efficiency. Table 2 is normalised to two partitions and one micro-batch,
Table 3 to two partitions.

Table 1 asks how large a model fits into 16 GB: here, by the same stage loads, the most layers on one device that keeps everything
("none"), and with GPipe on 1, 8, 32 and 128. The paper does not say how many micro-batches it used, so 1 to 32 are shown, with the
difference of layers from the paper's. `times none` are parameters against those of the paper's three layers without GPipe.
At a batch of 32 three layers do not fit without it; the script says at which batch they do.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from pathlib import Path

import jax
from paper_tables import guarded, markdown, note, show

from models import transformer_lm
from soapjax.errors import Problem, SoapjaxError
from soapjax.files import read_text, write_text_atomic
from soapjax.graph.build import build_graph
from soapjax.graph.operators import OperatorGraph
from soapjax.graph.trace import trace
from soapjax.search.gpipe import balanced_partition
from soapjax.search.stage_problem import Choice, StageProblem
from soapjax.topology import DeviceTopology

SIZES = dict(width=2048, heads=32, mlp_ratio=4, seq=1024, vocab=32000)
BATCH = 32
LAYERS = {"2": 48, "3": 24}
COLUMNS = ("table", "hardware", "model", "microbatches", "partitions", "normalised_throughput")
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
# Table 1 of the paper, Transformer-L on TPU v3: layers of the largest model without GPipe, and with it by partitions.
LAYERS_OF_NONE = 3
LARGEST = {1: 13, 8: 103, 32: 415, 128: 1663}
MICROBATCHES = (1, 2, 4, 8, 16, 32)
BYTES_PER_PARAMETER = 12  # the paper's: weights and two moments


def cluster(hardware: str, count: int) -> DeviceTopology:
    figures = dict(DEVICES[hardware])
    rate = figures.pop("link_bytes_per_s")
    device = figures | dict(
        memory_fraction=1.0, memory_efficiency_fraction=EFFICIENCY, launch_s=2e-6, overlap=True,
        efficiency_fraction=dict.fromkeys(("dot", "conv", "other"), EFFICIENCY),
    )  # fmt: skip
    level = dict(
        name="device", size=count, bandwidth_bytes_per_s=rate, latency_s=5e-6, efficiency_fraction=EFFICIENCY,
        source=figures["source"],
    )  # fmt: skip
    return DeviceTopology.from_dict(dict(name=hardware, device=device, levels=[level]))


def graph_of(layers: int) -> OperatorGraph:
    """The Transformer's training step; only shapes, nothing is allocated."""
    step = None

    def shapes():
        nonlocal step
        step, state, _ = transformer_lm.make(batch=1, layers=layers, **SIZES)
        return state

    state = jax.eval_shape(shapes)
    tokens = jax.ShapeDtypeStruct((BATCH, SIZES["seq"] + 1), "int32")
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


def throughput_rows(published: list[dict]) -> list[dict]:
    graphs: dict[str, OperatorGraph] = {}
    times: dict[tuple, float] = {}
    rows = []
    for row in published:
        if row["model"] != "transformer":
            continue
        table, hardware = row["table"], row["hardware"]
        if table not in graphs:
            graphs[table] = graph_of(LAYERS[table])
        graph = graphs[table]

        def seconds(partitions: int, microbatches: int, key=(table, hardware), graph=graph, hardware=hardware) -> float:
            at = (*key, partitions, microbatches)
            if at not in times:
                times[at] = simulated_s(graph, hardware, partitions, microbatches)
            return times[at]

        partitions, microbatches = int(row["partitions"]), int(row["microbatches"])
        found = seconds(2, 1 if table == "2" else microbatches) / seconds(partitions, microbatches)
        paper = float(row["normalised_throughput"])
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


def memory_rows() -> tuple[list[dict], float]:
    """Largest models by number of micro-batches; and the batch at which none has the paper's layers.

    From the loads of two depths: everything grows by the same bytes per layer.
    """
    figures, depths = {}, (2, 6)
    for layers in depths:
        problem = StageProblem(graph_of(layers), cluster("tpu", 1), schedules=("gpipe",), num_stages=1, num_microbatches=1)
        count = sum(problem.graph.tensors[p.tensor].size_bytes / 4 for p in problem.graph.parameters)
        everything = (0, len(problem.loads.forward))
        figures[layers] = count, {m: problem.loads.load(everything, 0, 1, m, 0).working_bytes for m in MICROBATCHES}
    usable = cluster("tpu", 1).device.usable_memory_bytes

    def by_layers(get) -> tuple[float, float]:
        """(of no layers, of each)."""
        few, many = (float(get(figures[d])) for d in depths)
        each = (many - few) / (depths[1] - depths[0])
        return few - depths[0] * each, each

    parameters = by_layers(lambda f: f[0])
    state = tuple(BYTES_PER_PARAMETER * p for p in parameters)
    whole = by_layers(lambda f: f[1][1])
    fitting = BATCH * (usable - state[0] - LAYERS_OF_NONE * state[1]) / (whole[0] + LAYERS_OF_NONE * whole[1])
    none = max((usable - state[0] - whole[0]) / (state[1] + whole[1]), 0.0)
    inputs = BATCH * SIZES["seq"] * SIZES["width"] * 4  # of a stage, for the whole batch
    rows = [{"M": "paper", "none, layers": str(LAYERS_OF_NONE)} | {f"GPipe-{k}": f"{n}" for k, n in LARGEST.items()}]
    rows[0] |= {f"K={k} times none": f"{ratio(parameters, n):.1f}" for k, n in LARGEST.items()}
    for m in MICROBATCHES:
        working = by_layers(lambda f, m=m: f[1][m])
        # GPipe: one micro-batch's activations, and the inputs of the whole batch; embedding and softmax are on the outer stages.
        alone = max((usable - state[0] - working[0]) / (state[1] + working[1]), 0.0)
        inner = max((usable - inputs) / (state[1] + working[1]), 0.0)
        row = {"M": m, "none, layers": f"{none:.1f}"}
        for k, paper in LARGEST.items():
            layers = alone if k == 1 else (k - 2) * inner + 2 * alone
            row[f"GPipe-{k}"] = f"{layers:.1f} ({100 * (layers / paper - 1):+.0f} %)"
            row[f"K={k} times none"] = f"{ratio(parameters, layers):.1f}"
        rows.append(row)
    return rows, fitting


def ratio(parameters: tuple[float, float], layers: float) -> float:
    """Parameters of a model of so many layers against those of the paper's largest without GPipe."""
    return (parameters[0] + layers * parameters[1]) / (parameters[0] + LAYERS_OF_NONE * parameters[1])


def published_rows(path: Path) -> list[dict]:
    rows = list(csv.DictReader(io.StringIO(read_text(path))))
    missing = sorted(set(COLUMNS) - set(rows[0] if rows else {}))
    if missing:
        raise SoapjaxError(Problem(f"{path}: columns", f"no {missing}", ", ".join(COLUMNS), "give the table of throughputs"))
    return rows


def run(options) -> None:
    rows = throughput_rows(published_rows(options.published))
    show("GPipe, Tables 2 and 3: normalised throughput of the Transformer", list(rows[0]), rows)
    many = [abs(float(r["error"].split()[0])) for r in rows if r["M"] == 32]
    note(f"largest error at M = 32: {max(many):.1f} %")
    impossible = [f"K = {r['K']}, M = {r['M']}" for r in rows if float(r["paper"]) > 1.02 * float(r["bubble alone"])]
    if impossible:
        note(f"the paper's throughput is above K M/(M + K - 1), which no bubble allows, at {'; '.join(impossible)}")
    memory, batch = memory_rows()
    show("GPipe, Table 1: the largest Transformer in 16 GB, in layers", list(memory[0]), memory)
    if options.output is not None:
        write_text_atomic(options.output, markdown(list(rows[0]), rows) + "\n" + markdown(list(memory[0]), memory))
    note(f"without GPipe {LAYERS_OF_NONE} layers fit at a batch of {batch:.1f} sequences, not at {BATCH}")


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("published", type=Path)
    parser.add_argument("--output", type=Path, help="a Markdown file for the tables")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(guarded(run, arguments()))
