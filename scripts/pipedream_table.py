"""PipeDream's decisions from its own profiles, beside those that its paper prints (Narayanan et al. 2019, Table 1).

    python scripts/pipedream_table.py --network-efficiency 0.5

PROFILES is a folder of the profiler's graph files (vgg16.txt, ...), PUBLISHED.csv has columns model, cluster, hosts, gpus_per_host,
config, epoch_speedup_over_dp. The rate of the network is read off the cluster's name ("4xV100-PCIe-10Gbps": 10 Gb/s) times the
one efficiency. Three decisions per row, all exact optima of the planner's objective:

    one level     every worker reaches every other at the network's rate. 15-1 on four hosts of four is no plan of the paper's
                  two-level program (a stage there has whole hosts), so its decisions must have been made with one level.
                  No worker is left idle, as in the authors' program.
    fewest        the same, but of equally fast plans the one with fewest workers: what replication brings nothing.
    two levels    with links within a host as fast as their data sheet says (PCIe 3.0 x16, NVLink 2), times the efficiency

`same` tells whether a one-level decision, with or without idle workers, is the published one. `times dp` is how many times
faster than data parallelism the objective is (seconds per minibatch, in the steady state), `published` the paper's ratio of
epoch times. Rows without a profile are left out, with a note.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Annotated

import pydantic
from csv_files import Count, CsvRow, Name, read_rows
from paper_tables import PUBLISHED_FILES, guarded, markdown, note, positive_float, show
from pipedream_profile import read_profile

from soapjax.helpers.files import write_text_atomic
from soapjax.search.stages.pipedream_stages import Memory, StagePlan, data_parallel_s, pipedream
from soapjax.topology import DeviceTopology

PROFILE_OF = {"gnmt8": "gnmt"}  # the file has four encoder and four decoder layers
INTRA_HOST_BYTES_PER_S = {"PCIe": 15.75e9, "NVLink": 150e9}


class Published(CsvRow):
    model: Name
    cluster: Annotated[str, pydantic.Field(pattern=r"^[^\n]{0,80}?[1-9][0-9]{0,5}Gbps$")]  # its network's rate ends the name
    hosts: Count
    gpus_per_host: Count
    config: Name
    epoch_speedup_over_dp: Name  # shown as published



def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", type=Path, nargs="?", default=PUBLISHED_FILES / "pipedream", help="folder of profiles")
    parser.add_argument("published", type=Path, nargs="?", default=PUBLISHED_FILES / "pipedream_configs.csv")
    parser.add_argument("--network-efficiency", type=positive_float, default=0.5, help="achieved fraction of the rate; default 0.5")
    parser.add_argument("--overlap", action="store_true", help="gradients are summed beside compute (the paper's formula)")
    parser.add_argument("--output", type=Path, help="a Markdown file for the table")
    return parser.parse_args(argv)


def cluster_topology(row: Published, efficiency: float, *, overlap: bool, levels: int) -> DeviceTopology:
    """The workers of one published row as a topology of one level or two."""
    hosts, gpus = row.hosts, row.gpus_per_host
    network = int(re.search(r"([0-9]+)Gbps", row.cluster).group(1)) / 8 * 1e9
    intra = next((rate for kind, rate in INTRA_HOST_BYTES_PER_S.items() if kind in row.cluster), network)

    def level(name: str, size: int, rate: float, source: str) -> dict:
        return dict(name=name, size=size, bandwidth_bytes_per_s=rate, latency_s=1e-5, efficiency_fraction=efficiency, source=source)

    if levels == 1:
        links = [level("worker", hosts * gpus, network, "the cluster's name")]
    else:
        # Per device: a host's network rate is shared by its devices.
        links = [
            level("host", hosts, network / gpus, "the cluster's name"),
            level("device", gpus, intra, "data sheets: PCIe 3.0 x16, 15.75 GB/s; NVLink 2, six links of 25 GB/s"),
        ]
    source = "NVIDIA V100 data sheet; only memory is used here: times come from the profile"
    device = dict(
        name="V100", platform="cuda", memory_bytes=16 * 2**30, memory_fraction=1.0, memory_margin_fraction=0.0,
        memory_bandwidth_bytes_per_s=900e9, memory_efficiency_fraction=1.0, peak_flops_per_s={"float32": 15.7e12},
        efficiency_fraction=dict(dot=1.0, conv=1.0, other=1.0), launch_s=1e-6, overlap=overlap, source=source,
    )  # fmt: skip
    return DeviceTopology.from_dict(dict(name=row.cluster, device=device, levels=links))


def described(plan: StagePlan) -> str:
    used = sum(len(s.devices) for s in plan.stages)
    return f"{plan.config} ({used})" if plan.config == "straight" else plan.config


def run(options) -> None:
    table = []
    for row in read_rows(options.published, Published):
        name = PROFILE_OF.get(row.model, row.model)
        path = options.profiles / f"{name}.txt"
        if not path.exists():
            note(f"{row.model} on {row.cluster}: no profile {path.name}")
            continue
        graph = read_profile(path)
        topologies = [
            cluster_topology(row, options.network_efficiency, overlap=options.overlap, levels=levels) for levels in (1, 2)
        ]
        seconds, found = [], []
        # The paper's table has no model whose stages would not fit its GPUs; the profile's activations are whole minibatches'.
        for topology, all_workers in ((topologies[0], True), (topologies[0], False), (topologies[1], True)):
            begin = time.perf_counter()
            found.append(pipedream(graph, topology, memory=Memory(is_limited=False), all_workers=all_workers))
            seconds.append(time.perf_counter() - begin)
        same = row.config in (found[0].config, found[1].config)
        ratio = data_parallel_s(graph, topologies[0]) / found[0].bottleneck_s
        table.append(
            {
                "model": row.model, "cluster": row.cluster, "workers": f"{row.hosts}x{row.gpus_per_host}",
                "paper": row.config, **dict(zip(("one level", "fewest", "two levels"), map(described, found), strict=True)),
                "same": "yes" if same else "no", "objective, ms": f"{found[0].bottleneck_s * 1e3:.1f}", "times dp": f"{ratio:.2f}",
                "published": row.epoch_speedup_over_dp, "search, s": f"{max(seconds):.2f}",
            }
        )  # fmt: skip
    columns = list(table[0]) if table else list(Published.model_fields)
    show("PipeDream's planner on its own profiles", columns, table)
    if options.output is not None:
        write_text_atomic(options.output, markdown(columns, table))


if __name__ == "__main__":
    sys.exit(guarded(run, arguments()))
