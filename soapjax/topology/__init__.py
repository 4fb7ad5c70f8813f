"""Devices, the links between them, and the mesh that a plan is laid out on."""

from soapjax.topology.by_name import load_topology
from soapjax.topology.device_topology import COLLECTIVE_KINDS, DeviceKind, DeviceTopology, LinkLevel
from soapjax.topology.local import local_topology
from soapjax.topology.mesh import FactorMesh, factor_mesh
from soapjax.topology.shipped import shipped_topologies
from soapjax.topology.toml_file import ShippedTopology, shipped_catalogue

__all__ = [
    "COLLECTIVE_KINDS",
    "DeviceKind",
    "DeviceTopology",
    "FactorMesh",
    "LinkLevel",
    "ShippedTopology",
    "factor_mesh",
    "load_topology",
    "local_topology",
    "shipped_catalogue",
    "shipped_topologies",
]
