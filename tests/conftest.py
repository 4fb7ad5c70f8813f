"""Eight fake CPU devices, quick compiles, and the programs of the last run: set before jax is imported."""

import atexit
import contextlib
import ctypes
import functools
import importlib.metadata
import itertools
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

MOST_CACHED_BYTES = 4 << 30


def folder_of_programs():
    """Where this run finds what the last one compiled: with what pytest keeps itself, and forgotten by its `--cache-clear`.

    A folder for this run alone where nothing can be written there; an empty one where it has grown too large.
    """
    kept = Path(__file__).parent.parent / ".pytest_cache" / "d" / "programs"
    try:
        if sum(f.stat().st_size for f in kept.rglob("*") if f.is_file()) > MOST_CACHED_BYTES:
            shutil.rmtree(kept)
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=kept).close()
        return kept
    except OSError:
        of_this_run = tempfile.mkdtemp(prefix="soapjax-tests-")
        atexit.register(shutil.rmtree, of_this_run, ignore_errors=True)
        return Path(of_this_run)


# The checkout, with its folder `models/`, which is installed under another name: for the tests and for the processes they start.
sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))
os.environ["JAX_PLATFORMS"] = "cpu"
# Most programs here run once or twice: compiling is all that takes time. Processes that a test starts do likewise.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # of a program only its operations' names are read, not where it was traced
QUICKLY = ["--xla_cpu_parallel_codegen_split_count=1"]
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones end the process on a flag that they no longer have
    QUICKLY.append("--xla_cpu_use_fusion_emitters=false")  # a third less
if "PYTEST_XDIST_WORKER" not in os.environ:  # many tests make the same programs: all workers share what one has compiled
    cache = folder_of_programs()
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": str(cache / "jax"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5"}
    # Nothing of a test stays in the user's folders; processes that tests start load the planner's programs from here.
    os.environ["SOAPJAX_PROGRAM_CACHE"] = str(cache / "planner")
flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
os.environ["XLA_FLAGS"] = " ".join([*flags, *QUICKLY, "--xla_force_host_platform_device_count=8"])

import gc  # noqa: E402

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "standard")  # optax's do not work under "strict", as our own programs do
hypothesis.settings.register_profile("untimed", deadline=None)  # the machine may have other work
hypothesis.settings.load_profile("untimed")
PROGRAMS_OF_A_CONTEXT = 500  # what is interned in a context stays as long as it
gc.set_threshold(500_000, 10, 10)  # tracing makes many objects that stay


def share_contexts():
    """Many programs have one MLIR context: JAX makes one for each, which takes up to a fifth of the time of a small program.

    By a private function of JAX; without it tests only take longer.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src.interpreters import mlir

        new, lowered = mlir.make_ir_context, itertools.count()
        of_group = functools.lru_cache(maxsize=1)(lambda group: new())
        mlir.make_ir_context = lambda: of_group(next(lowered) // PROGRAMS_OF_A_CONTEXT)


share_contexts()


def pytest_collection_finish():
    """What has been imported stays: no collection need go through it again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """Likewise what is there at the end, where pytest makes five of them."""
    pytest_collection_finish()


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Workers that keep all that they have compiled grow to many gigabytes, and slow."""
    yield
    if resident_bytes() > most_bytes():
        jax.clear_caches()
        gc.collect()
        give_back()


def give_back():
    """Freed memory to the system, where the C library can: kept, it would count as resident after every further module."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def most_bytes():
    """Of a worker: what it has compiled is worth half of the machine's memory, and at least 2 GiB each."""
    try:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        machine = 0
    return max(2 << 30, machine // 2 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))


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
