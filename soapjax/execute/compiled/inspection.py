"""What the compiler made of a plan, without running it: collectives, local FLOPs, memory, what was replicated after all.

Works on any devices that programs can be compiled for: those at hand, fake CPU devices, and GPUs that are not there (aot.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from soapjax.execute.compiled.collectives import Collective, bytes_by_kind, collectives_of
from soapjax.execute.compiled.hlo import OpsCheck, check_ops, replicated_tasks
from soapjax.execute.spmd.planned_evaluator import BoundStep

_REMATERIALISED = re.compile(r"Involuntary full rematerialization.*?HLO operation %?([\w.\-]+).*?(?:op_name=\"([^\"]*)\")?", re.S)


class Inspection(NamedTuple):
    """Of one compiled program."""

    ops: OpsCheck
    collectives: tuple[Collective, ...]
    memory_bytes: int  # per device, at the peak
    rematerialised: tuple[str, ...]  # where the partitioner built a whole tensor to get from one layout to another
    replicated: tuple[str, ...]  # operators whose planned splits the program does not have
    compile_s: float

    @property
    def bytes_by_collective(self) -> dict[str, int]:
        """What each device sends in one step."""
        return bytes_by_kind(self.collectives)


def inspect(program: BoundStep) -> Inspection:
    """Compiles the step under the plan, the state donated, and reads the result.

    Raises: SoapjaxError where the program has collectives of an unknown kind.
    """
    start = time.perf_counter()
    step = program.step
    shardings = program.in_shardings()
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in zip(step.in_avals, shardings, strict=True)]
    jitted = jax.jit(
        lambda *leaves: program.evaluator().run(list(leaves))[0], in_shardings=tuple(shardings),
        out_shardings=program.out_shardings(), donate_argnums=tuple(step.state_pairs), keep_unused=True,
    )  # fmt: skip
    with compiler_messages() as messages:
        compiled = compiled_for(jitted.lower(*structs), program.mesh.devices.flat[0].platform)
    text = compiled.as_text()
    return Inspection(
        check_ops(program, text),
        tuple(collectives_of(text, program.mesh.size)),
        peak_memory_bytes(compiled, program.mesh.devices.flat[0].platform),
        rematerialised_in(messages),
        tuple(replicated_tasks(program, text)),
        time.perf_counter() - start,
    )


def rematerialised_in(messages: list[str]) -> tuple[str, ...]:
    """Where the compiler says that it builds a whole tensor to get from one layout to another."""
    return tuple(sorted({name or op for op, name in _REMATERIALISED.findall("".join(messages))}))


def compiled_for(lowered: Any, platform: str) -> Any:
    """Without a GPU XLA cannot try its Triton kernels, and picks one at times that it then fails to tile: without them, then."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        if platform == "cpu" or "tile" not in str(e):
            raise
        return lowered.compile({"xla_gpu_enable_triton_gemm": False})


def peak_memory_bytes(compiled: Any, platform: str) -> int:
    """Bytes per device. On CPUs XLA's own peak leaves temporary buffers out; there the sum is an upper bound of it."""
    found = compiled.memory_analysis()
    total = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes - found.alias_size_in_bytes
    return int(total if platform == "cpu" else found.peak_memory_in_bytes)


@contextlib.contextmanager
def compiler_messages() -> Iterator[list[str]]:
    """Collects what the compiler writes to standard error, which is C++ and knows no Python stream; the rest goes on its way."""
    found: list[str] = []
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile(mode="w+", errors="replace") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield found
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            for line in file:
                found.append(line)
                if not re.match(r"[WIE]\d{4} |WARNING: All log messages", line):
                    sys.stderr.write(line)
