"""Eight fake CPU devices, quick compiles, strict dtype promotion, warnings as errors: set before jax is imported."""

import atexit
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

# The checkout, with its folder `models/`, which is installed under another name: for the tests and for the processes they start.
sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))
os.environ["JAX_PLATFORMS"] = "cpu"
# Most programs here run once or twice: compiling is all that takes time. Processes that a test starts do likewise.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
if "PYTEST_XDIST_WORKER" not in os.environ:  # many tests make the same programs: all workers share what one has compiled
    cache = tempfile.mkdtemp(prefix="soapjax-tests-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    # Nothing of a test stays in the user's folders; processes that tests start load the planner's programs from here.
    os.environ["SOAPJAX_PROGRAM_CACHE"] = os.path.join(cache, "programs")
flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
os.environ["XLA_FLAGS"] = " ".join([*flags, "--xla_force_host_platform_device_count=8"])

import gc  # noqa: E402

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "standard")
MOST_BYTES = 2 << 30
gc.set_threshold(100_000, 10, 10)  # tracing makes many objects that stay


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Workers that keep all that they have compiled grow to many gigabytes, and slow."""
    yield
    if resident_bytes() > MOST_BYTES:
        jax.clear_caches()
        gc.collect()


def resident_bytes():
    """Of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@pytest.fixture
def free_port():
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
