"""What is measured on a real machine, and what is fitted to it: the parts of a profile."""

from __future__ import annotations

from typing import Annotated, Any

import pydantic

# Bounds within which products and quotients of two figures are finite, far from anything that is measured.
Amount = Annotated[float, pydantic.Field(ge=0, le=1e30)]
Time = Annotated[float, pydantic.Field(ge=1e-15, le=1e9)]
Latency = Annotated[float, pydantic.Field(ge=0, le=1e9)]
Rate = Annotated[float, pydantic.Field(ge=1e-9, le=1e30)]
Scale = Annotated[float, pydantic.Field(ge=1e-9, le=1e9)]


class ProfilePart(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Device(ProfilePart):
    """The device that was measured, as JAX names it; `processor` tells CPUs apart."""

    name: str
    platform: str
    processor: str = ""


class Measurement(ProfilePart):
    """One task at local shapes on one device: its own equations, compiled alone."""

    label: str  # where it was met first, for people
    structure: str  # of what is computed (graph/passes/structure.py)
    kind: str
    dtype: str
    reads: tuple[tuple[int, ...], ...]  # local shapes
    writes: tuple[tuple[int, ...], ...]
    elements: int = 0  # of an update: parameter elements on the device
    flops: Amount
    moved_bytes: Amount
    seconds: Time  # of one run, median
    spread: float = 0.0  # (upper - lower quartile) / median
    num_runs: int = 1

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.structure, self.reads, self.writes, self.elements, f"{self.flops:.6g}"


class Rates(ProfilePart):
    """The roofline that fits the measurements: for tasks and splits that were not measured."""

    flops_per_s: dict[str, Rate] = {}  # "dot float32" -> achieved
    memory_bytes_per_s: Rate
    launch_s: Latency
    median_error: float = 0.0  # of the fit over the measured tasks, relative


class Link(ProfilePart):
    """What collectives over one level achieve: seconds = steps · latency + bytes sent / (rate · fraction of the kind)."""

    level: str
    latency_s: Latency
    bytes_per_s: Rate
    fractions: dict[str, Scale] = {}  # by collective; 1 where it is absent
    median_error: float = 0.0
    points: tuple[tuple[str, int, float, float], ...] = ()  # collective, devices, bytes each holds before or after, seconds


class Calibration(ProfilePart):
    """At most two scalars of one cluster, fitted on whole steps, and how far off predictions with them are."""

    topology: str = ""  # the cluster's fingerprint; the scalars say nothing about another
    compute_scale: Scale = 1.0
    network_scale: Scale = 1.0
    residual: float = pydantic.Field(default=0.0, ge=0)  # median |predicted / measured - 1|
    worst: float = pydantic.Field(default=0.0, ge=0)
    steps: tuple[tuple[str, float, float], ...] = ()  # what ran, predicted with the scalars, measured seconds
