"""Which compiler makes the programs of a topology's devices: the one place that says so."""

from soapjax.costs.compilers.compiler_model import CompilerModel, none
from soapjax.costs.compilers.cpu import CPU
from soapjax.costs.compilers.gpu import GPU
from soapjax.topology import DeviceTopology

# By the names of JAX's backends. On ROCm XLA is the same compiler, and none of its programs were read; those for TPUs neither.
_COMPILERS = {"cpu": CPU, "cuda": GPU, "rocm": GPU}


def compiler_of(topology: DeviceTopology) -> CompilerModel:
    """That of its platform; `none()` of platforms that are not JAX's."""
    return _COMPILERS.get(topology.device.platform, none())
