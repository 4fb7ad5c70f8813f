"""Programs of the planner's own: traced once, compiled once, and kept on disk for the next run.

A search judges millions of strategies with a few jitted functions that take longer to compile than to find a good strategy. So
their executables are kept in a folder of the user (`$SOAPJAX_CACHE/programs`, or `~/.cache/soapjax/programs`), under a
hash of the program's text and of all that a compiler looks at beside it; or, of those with a name, of the source of this package
in place of the text, so that a later process does not even trace them. JAX's own compilation cache, and its
configuration, belong to the user's programs and are left alone. `SOAPJAX_PROGRAM_CACHE=off` keeps nothing, a path keeps them
there.

Loading an executable unpickles it: only what this user alone could write is read (kept_programs.py). What cannot be read,
written, loaded or run is compiled as if there were no cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.experimental import serialize_executable

from soapjax.helpers.compiler_options import LEVEL, OLDER_EMITTERS, compiled_with
from soapjax.helpers.files import cached
from soapjax.helpers.garbage import fewer_collections
from soapjax.jit.kept_programs import drop_program, read_program, write_program

# The older emitters compile the chains' walk in 3.6 to 4.7 CPU seconds instead of 4.9 to 5.9, and it is as fast within the noise
# (five models on 16 P100). At LLVM's first level of optimisation the cost program compiles in a tenth less and is no slower, where
# the walk takes up to 1.7 times as long.
QUICKLY = {**OLDER_EMITTERS, LEVEL: 1}
_NARROW = {f"{kind}64": f"{kind}32" for kind in ("float", "int", "uint")}


class PlannerProgram:
    """A pure function of arrays of one set of shapes, on the CPU; compiled at its first call, or before by `prepare`.

    It computes in 32 bits also where the user's step has switched on 64: what is kept of it serves both.

    `is_urgent` where somebody waits for it: compiled sooner, at the price of some speed. That level of optimisation holds where the
    user has switched optimisations off (`jax_disable_most_optimizations`), too: it halves the time of a search.
    """

    def __init__(
        self, fn: Callable[..., Any], *, is_urgent: bool = False, name: str = "", results: Any = None, over: int | None = None,
        promotes: bool = False,
    ):  # fmt: skip
        """`name`, of what no problem is part of: it says with the arguments' shapes which program this is. `results` is a pytree
        like the function's. Argument number `over` is gone after a call: results are written over it. `promotes` where libraries
        are called whose arithmetic mixes dtypes."""
        self._jitted, self._name, self._results = jax.jit(fn, donate_argnums=() if over is None else over), name, results
        self._over, self._promotion = over, "standard" if promotes else "strict"
        self._options = dict(QUICKLY if is_urgent else OLDER_EMITTERS)
        self._compiled: Callable[..., Any] | None = None
        self._is_proven = False  # that it runs: of what was read from disk, only a call tells
        self.took_s = 0.0  # to trace and to compile, or to load: without what other threads traced meanwhile
        self._lock = threading.Lock()

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    def prepare(self, *args: Any) -> None:
        """Compiles for arguments like these: arrays or `jax.ShapeDtypeStruct`s."""
        with self._lock:
            if self._compiled is not None:
                return
            begin = time.thread_time()  # Python, for which threads wait for each other
            lowered = None if self._is_kept(args) else self.lower(*args)
            self.took_s, begin = time.thread_time() - begin, time.monotonic()
            if lowered is not None:
                self.compile(lowered)
                self.took_s += time.monotonic() - begin

    def forget(self) -> None:
        """The next call compiles it again, or loads it: for scripts that time this."""
        with self._lock:
            self._compiled, self._is_proven = None, False

    def is_at_hand(self, *args: Any) -> bool:
        """Whether it is compiled for arguments like these, or was kept on disk, from where it is loaded."""
        with self._lock:
            return self._compiled is not None or self._is_kept(args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """The program traced for such arguments."""
        args = _in_32_bits(args)
        with fewer_collections(), jax.enable_x64(False), jax.numpy_dtype_promotion(self._promotion):
            return self._jitted.lower(*args)

    def compile(self, lowered: jax.stages.Lowered) -> None:
        self._compiled, self._is_proven = _compiled(lowered, self._options, key=self._key(lowered.in_avals))

    def _key(self, args: Any) -> str | None:
        """Of a program with a name, where programs are kept."""
        if not self._name or program_folder() is None or (device := _own_device()) is None:
            return None
        shapes = [(x.shape, str(x.dtype)) for x in jax.tree.leaves(_in_32_bits(args))]
        asked = f"{_surroundings()}\n{device.id}\n{self._options}\n{self._name}\n{shapes}\n{_source()}"
        return hashlib.sha256(asked.encode()).hexdigest()

    def _is_kept(self, args: Any) -> bool:
        """Loads the program where one of its name is kept."""
        folder, key = program_folder(), self._key(args)
        if folder is None or key is None or (device := _own_device()) is None:
            return False
        in_tree, out_tree = jax.tree.structure((args, {})), jax.tree.structure(self._results)
        self._compiled, self._is_proven = _loaded(folder, key, in_tree, out_tree, device), False
        return self._compiled is not None

    def __call__(self, *args: Any) -> Any:
        args = _narrowed(args)
        if self._compiled is None:
            self.prepare(*args)
        with jax.enable_x64(False):
            if self._is_proven:
                return self._compiled(*args)
            try:
                results = jax.block_until_ready(self._compiled(*self._copied(args)))
            except (jax.errors.JaxRuntimeError, TypeError, ValueError):  # written by another build of XLA, say: once, not again
                lowered = self.lower(*args)
                self._compiled, _ = _compiled(lowered, self._options, key=self._key(lowered.in_avals), anew=True)
                results = self._compiled(*args)
        self._is_proven = True
        return results

    def _copied(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """With a copy of what a call takes away: what does not run is called again."""
        return tuple(jax.tree.map(np.array, x) if i == self._over else x for i, x in enumerate(args))


def _narrowed(args: Any) -> Any:
    """Arguments of a call, those of 64 bits in 32."""
    if not jax.config.jax_enable_x64:  # type: ignore[attr-defined]  # options are made at run time
        return args  # as they are: there are none
    return _in_32_bits(args)


def _in_32_bits(args: Any) -> Any:
    """Arguments, those of 64 bits in 32, whatever is enabled: other threads than the one that made them may ask."""

    def narrow(x: Any) -> Any:
        dtype = _NARROW.get(str(x.dtype))
        if dtype is None:
            return x
        return jax.ShapeDtypeStruct(x.shape, dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(dtype)

    return jax.tree.map(narrow, args)


def threads(count: int | None) -> ThreadPoolExecutor:
    """A pool whose threads have the default device of the caller's; a thread has one of its own otherwise."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]  # options are made at run time
    return ThreadPoolExecutor(count, initializer=lambda: jax.default_device(device).__enter__())


@contextlib.contextmanager
def side_by_side() -> Iterator[Callable[..., Any]]:
    """Compiles programs on as many cores as there are, while further ones are traced; all are ready at the end.

    Gives a function of a program and arguments like its own; it returns what `PlannerProgram` will, as `jax.ShapeDtypeStruct`s.
    """
    waiting: list[Future[None]] = []

    def prepare(program: PlannerProgram, *args: Any) -> Any:
        lowered = program.lower(*args)
        waiting.append(pool.submit(program.compile, lowered))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info)

    with threads(os.cpu_count()) as pool:
        yield prepare
        for each in waiting:
            each.result()


def program_folder() -> Path | None:
    """Where programs are kept; None where the user wants none kept."""
    said = os.environ.get("SOAPJAX_PROGRAM_CACHE", "")
    if said.lower() in ("off", "0", "no", "false"):
        return None
    return cached("programs") if said.lower() in ("", "on", "1", "yes", "true") else Path(said).absolute()


def _own_device() -> jax.Device | None:
    """In a job of several processes, this one's; None where it is no CPU.

    What is kept is named by its number too: an executable runs on no other device than it was compiled for.
    """
    device = jax.config.jax_default_device or jax.local_devices()[0]  # type: ignore[attr-defined]  # options are made at run time
    return device if getattr(device, "platform", None) == "cpu" else None


def _loaded(folder: Path, key: str, in_tree: Any, out_tree: Any, device: jax.Device) -> Callable[..., Any] | None:
    if (kept := read_program(folder, key)) is not None:
        with contextlib.suppress(Exception):  # whatever another machine's executable may raise: it is compiled anew
            return serialize_executable.deserialize_and_load(
                kept, in_tree, out_tree, backend="cpu", execution_devices=[device]
            )  # fmt: skip
    return None


def _compiled(
    lowered: jax.stages.Lowered, options: dict[str, bool | int], *, key: str | None, anew: bool = False
) -> tuple[Callable[..., Any], bool]:  # fmt: skip
    """An executable, and whether it was compiled here; else it was read. `anew` where what is kept does not run."""
    folder, device = program_folder(), _own_device()
    if folder is None or device is None:
        return compiled_with(lowered, options), True
    if key is None:
        # The text leaves out arguments that nothing reads; the executable wants them all the same.
        asked = f"{_surroundings()}\n{device.id}\n{options}\n{lowered.in_tree}\n{lowered.in_avals}\n{lowered.as_text()}"
        key = hashlib.sha256(asked.encode()).hexdigest()
    if anew:
        drop_program(folder, key)
    elif (loaded := _loaded(folder, key, lowered.in_tree, lowered.out_tree, device)) is not None:
        return loaded, False
    _from_jax.is_hit = False
    compiled = compiled_with(lowered, options)
    if not _from_jax.is_hit:
        with contextlib.suppress(Exception):  # an executable that cannot be written down
            write_program(folder, key, serialize_executable.serialize(compiled)[0])
    return compiled, True


def know_surroundings() -> None:
    """Reads what names of programs on disk are made of, once for all."""
    if program_folder() is not None:
        _source(), _surroundings()


@functools.cache
def _source() -> str:
    """The sum of what programs with names are made of."""
    root, found = Path(__file__).parent.parent, hashlib.sha256()
    for package in ("jit", "costs", "simulate", "strategy", "search"):
        for path in sorted((root / package).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


# What JAX read from a compilation cache of the user's, XLA (0.10) writes down without its functions: it would not run again.
_from_jax = threading.local()


def _note_hit(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _from_jax.is_hit = True


jax.monitoring.register_event_listener(_note_hit)


@functools.cache
def _surroundings() -> str:
    """What decides on machine code beside the program: versions, the processor, and flags."""
    processor = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((x for x in lines if x.startswith(("flags", "Features"))), processor)
    # How many devices a CPU is taken for says nothing about a program of one device.
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith("--xla_force_host_platform_device_count")]
    asked = " ".join(flags), jax.config.read("jax_disable_most_optimizations")
    return "\n".join(map(str, (jax.__version__, jaxlib.__version__, platform.machine(), processor, *asked)))
