"""Detection of this machine: eight fake CPU devices here, stand-ins for GPUs."""

from types import SimpleNamespace

import jax
import pytest

from soapjax.errors import SoapjaxError
from soapjax.topology import DeviceTopology, load_topology, local_topology


def gpu(kind, *, process=0, memory_stats=None):
    client = SimpleNamespace(platform_version="cuda 12")
    return SimpleNamespace(
        device_kind=kind, platform="gpu", process_index=process, memory_stats=lambda: memory_stats, client=client
    )


@pytest.fixture
def pretend(monkeypatch):
    def pretend(devices):
        monkeypatch.setattr(jax, "devices", lambda: devices)
        monkeypatch.setattr(jax, "local_devices", lambda: [d for d in devices if d.process_index == 0])
        return local_topology()

    return pretend


def test_fake_cpu_devices():
    topology = load_topology("local")
    assert topology.num_devices == jax.device_count() == 8
    assert topology.fake and not topology.device.overlap
    assert topology.device.platform == "cpu"
    assert topology.device.memory_bytes * 8 <= 2**45
    assert "timings mean nothing" in topology.describe()
    assert DeviceTopology.from_dict(topology.to_dict()) == topology
    assert local_topology().fingerprint() == topology.fingerprint()


@pytest.mark.parametrize(
    "kind, like, how",
    [
        ("NVIDIA A100-SXM4-80GB", "a100x64", "as in a100x"),
        ("NVIDIA A100-PCIE-40GB", "a100x64", "is like the A100-SXM4-80GB"),
        ("NVIDIA H100 80GB HBM3", "h100x64", "as in h100x64"),
        ("NVIDIA H200", "h200x8", "as in h200x8"),
        ("Tesla K80", "k80x64", "as in k80x64"),
        ("NVIDIA GH200 480GB", "gh200", "as in gh200"),
        ("NVIDIA A100-SXM4-40GB", "gcp_a2_highgpu_8g", "as in gcp_a2_highgpu_8g"),  # the slowest network of its nodes
        ("NVIDIA B200", "b200", "as in b200"),
        ("NVIDIA L4", "aws_g6_48xlarge", "as in aws_g6_48xlarge"),
        ("NVIDIA L40S", "l40s_pcie", "as in l40s_pcie"),
        ("Radeon", "dgx1_v100x8", "unknown device"),
    ],
)
def test_gpus_take_shipped_figures(pretend, kind, like, how):
    topology = pretend([gpu(kind)] * 4)
    assert topology.device.peak_flops_per_s == load_topology(like).device.peak_flops_per_s
    assert topology.device.name == kind
    assert how in topology.device.source["peak"] and how in topology.levels[0].source
    assert (topology.num_devices, topology.fake, topology.device.platform) == (4, False, "cuda")
    assert DeviceTopology.from_dict(topology.to_dict()) == topology


def test_memory_is_what_the_allocator_may_use(pretend):
    limit_bytes = 60 * 2**30 + 12345
    topology = pretend([gpu("NVIDIA H200", memory_stats={"bytes_limit": limit_bytes})])
    assert topology.device.available_memory_bytes == 60 * 2**30
    assert topology.device.usable_memory_bytes == int(60 * 2**30 * (1 - topology.device.memory_margin)) < 60 * 2**30
    assert "memory_stats" in topology.device.source["memory"]


def test_several_hosts(pretend):
    topology = pretend([gpu("NVIDIA A100-SXM4-80GB", process=i // 4) for i in range(8)])
    assert [(level.name, level.size) for level in topology.levels] == [("host", 2), ("device", 4)]
    assert topology.levels[0].bandwidth_bytes_per_s == 25e9
    topology = pretend([gpu("NVIDIA B200", process=i // 4) for i in range(8)])
    assert [(level.name, level.size, level.bandwidth_bytes_per_s) for level in topology.levels] == [
        ("host", 2, 50e9), ("device", 4, 900e9),
    ]  # fmt: skip


def test_mixed_machines_are_rejected(pretend):
    with pytest.raises(SoapjaxError) as caught:
        pretend([gpu("Tesla K80"), gpu("Tesla K80"), gpu("NVIDIA H200", process=1)])
    assert len(caught.value.problems) == 2
