"""A profile: what tasks, links and whole steps took on a real machine, as an immutable JSON file.

    {"sha256": "...", "profile": {"device": {...}, "versions": {...}, "operators": [...], "links": [...], ...}}

A file is named by the hash of what it holds, so that writers cannot meet in one file, and carries the hash,
so that a torn or changed one is recognised. Files are never changed: measuring again adds one, and all that fit
a device and its versions are read as one profile. A plan carries the measurements that it was costed with.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic

from soapjax.costs.measured.fit import fitted_rates
from soapjax.costs.measured.profile_parts import Calibration, Device, Link, Measurement, ProfilePart, Rates
from soapjax.errors import Problem, SoapjaxError
from soapjax.helpers.canonical_json import canonical, sha256_of
from soapjax.helpers.file_numbers import read_float, read_int
from soapjax.helpers.files import cached, read_text, write_new_text
from soapjax.topology import DeviceKind

MAX_PROFILE_BYTES = 16 * 2**20  # some 30,000 measurements
VERSIONED = ("jax", "jaxlib")  # what compiles: with other versions the times are others
_REMEDY = "measure again with `soapjax profile`"


class Profile(ProfilePart):
    schema_version: Literal[1] = 1
    device: Device
    versions: dict[str, str]
    created: str = ""  # ISO 8601, UTC
    commands: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()  # hashes of the files that were read as one
    operators: tuple[Measurement, ...] = ()
    rates: Rates | None = None
    links: tuple[Link, ...] = ()
    calibration: Calibration | None = None

    @property
    def sha256(self) -> str:
        return sha256_of(self.model_dump(mode="json"))

    def to_text(self) -> str:
        """The file's contents."""
        return f'{{"sha256": "{self.sha256}", "profile": {canonical(self.model_dump(mode="json"))}}}\n'

    @property
    def error(self) -> float:
        """The calibrated relative error of a predicted step time, 0 where nothing was calibrated."""
        return self.calibration.residual if self.calibration is not None else 0.0

    def for_cluster(self, topology_fingerprint: str) -> Profile:
        """Without scalars that were fitted on another cluster."""
        is_other = self.calibration is not None and self.calibration.topology not in ("", topology_fingerprint)
        return self.model_copy(update={"calibration": None, "sources": self.sources or (self.sha256,)}) if is_other else self


def carried(profile: Profile | None, structures: set[str]) -> dict[str, Any] | None:
    """What a plan carries of the profile that it was costed with, as JSON data: measurements of these tasks only."""
    if profile is None:
        return None
    kept = tuple(m for m in profile.operators if m.structure in structures)
    return profile.model_copy(update={"operators": kept, "sources": profile.sources or (profile.sha256,)}).model_dump(mode="json")


def installed_versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in VERSIONED}


def cache_folder() -> Path:
    """`$SOAPJAX_CACHE/profiles`, or `~/.cache/soapjax/profiles` (`$XDG_CACHE_HOME` for `~/.cache`)."""
    return cached("profiles")


def save_profile(profile: Profile, folder: Path | None = None) -> Path:
    """Adds a profile to a folder (the cache by default) and returns its path.

    Raises: SoapjaxError where the folder cannot be made or written to, or is full; nothing is left there then.
    """
    folder = cache_folder() if folder is None else folder
    sha256 = profile.sha256
    word = re.sub(r"[^a-z0-9]+", "-", profile.device.name.lower()).strip("-") or "device"
    path = folder / f"{word}-{sha256}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        remedy = "set SOAPJAX_CACHE to a folder that you may write to"
        raise SoapjaxError(Problem(str(folder), e.strerror or str(e), "a cache folder", remedy)) from None
    write_new_text(path, profile.to_text(), is_same=lambda: _is_intact(path))
    return path


def _is_intact(path: Path) -> bool:
    try:
        load_profile(path)
    except SoapjaxError:
        return False
    return True


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Reads a profile file.

    Raises: SoapjaxError where it is none, was changed or torn (its hash says so), or holds something unexpected.
    """
    place = str(path)
    text = read_text(path, max_bytes=MAX_PROFILE_BYTES)
    try:
        data = json.loads(text, parse_float=read_float, parse_int=read_int)
    except (ValueError, RecursionError) as e:
        raise SoapjaxError(Problem(place, f"text that is not JSON ({str(e)[:80]})", "a profile", _REMEDY)) from None
    if not isinstance(data, dict) or data.keys() != {"sha256", "profile"}:
        raise SoapjaxError(Problem(place, "no profile", '{"sha256": ..., "profile": {...}}', "give a file of `soapjax profile`"))
    profile = profile_of(data["profile"], place=place)
    found = profile.sha256
    named = re.search(r"[0-9a-f]{64}", Path(place).name)
    if found != data["sha256"]:
        expected = f"contents with the hash {str(data['sha256'])[:12]} that the file names"
        raise SoapjaxError(Problem(place, f"contents with the hash {found[:12]}", expected, f"the file was damaged: {_REMEDY}"))
    if named is not None and named[0] != found:
        expected = f"contents with the hash {named[0][:12]} of its name"
        remedy = f"the file was damaged, or has another's name: {_REMEDY}"
        raise SoapjaxError(Problem(place, f"contents with the hash {found[:12]}", expected, remedy))
    return profile


def profile_of(data: Any, *, place: str = "profile") -> Profile:
    """The profile in parsed JSON.

    Raises: SoapjaxError with everything that is not as expected.
    """
    try:
        return Profile.model_validate(data)
    except pydantic.ValidationError as e:
        raise SoapjaxError(
            Problem(f"{place}: {'.'.join(map(str, error['loc']))}", repr(error.get("input"))[:80], error["msg"], _REMEDY)
            for error in e.errors()[:10]
        ) from None


def is_same_kind(topology_device: DeviceKind, device: Device) -> bool:
    """Whether a device is of the kind that a topology names: "H200" is JAX's "NVIDIA H200", and no "NVIDIA GH200 480GB"."""
    a, b = topology_device.name.lower(), device.name.lower()
    is_named = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", other) for name, other in ((a, b), (b, a)))
    return topology_device.platform == device.platform and (device.platform == "cpu" or is_named)


def mismatches(profile: Profile, kind: DeviceKind, *, place: str, processor: str | None = None) -> list[Problem]:
    """Why a profile says nothing about a device kind; `processor`: of the CPU at hand."""
    if not is_same_kind(kind, profile.device):
        found, wanted = f"{profile.device.name} ({profile.device.platform})", f"{kind.name} ({kind.platform}), the topology's"
        return [Problem(f"{place}: device", found, wanted, "choose a profile of that device, or measure one on it")]
    if processor is not None and profile.device.processor != processor:
        return [Problem(f"{place}: device.processor", profile.device.processor, processor, _REMEDY)]
    return []


def other_versions(profile: Profile) -> str:
    """With which versions a profile was measured, where those installed are others; else ""."""
    other = {name: v for name, v in installed_versions().items() if profile.versions.get(name) != v}
    if not other:
        return ""
    measured = ", ".join(f"{name} {profile.versions.get(name)}" for name in other)
    return f"measured with {measured}; installed: {', '.join(f'{name} {v}' for name, v in other.items())}; times may differ"


def cached_profile(
    kind: DeviceKind, *, folder: Path | None = None, processor: str | None = None, topology_fingerprint: str = ""
) -> tuple[Profile | None, tuple[str, ...]]:
    """All profiles of a folder that fit a device kind and the installed versions, as one; and what was left out, and why."""
    folder = cache_folder() if folder is None else folder
    fitting, notes = [], []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            found = load_profile(path)
        except SoapjaxError as e:
            notes.append(f"profile ignored: {e.problems[0]}")
            continue
        if not mismatches(found, kind, place=str(path), processor=processor) and not other_versions(found):
            fitting.append(found.for_cluster(topology_fingerprint))
    return (merged(fitting) if fitting else None), tuple(notes)


def merged(profiles: Sequence[Profile]) -> Profile:
    """Several profiles of one device kind as one: of what was measured twice, the later counts."""
    ordered = sorted(profiles, key=lambda p: (p.created, p.sha256))
    if len(ordered) == 1:
        return ordered[0]
    operators = {m.identity: m for p in ordered for m in p.operators}
    links = {link.level: link for p in ordered for link in p.links}
    last = ordered[-1]
    return Profile(
        device=last.device,
        versions=last.versions,
        created=last.created,
        commands=_unique(c for p in ordered for c in p.commands),
        sources=_unique(s for p in ordered for s in (p.sources or (p.sha256,))),
        operators=tuple(operators.values()),
        rates=fitted_rates(tuple(operators.values()), _taken_before(ordered)),
        links=tuple(links.values()),
        calibration=next((p.calibration for p in reversed(ordered) if p.calibration is not None), None),
    )


def _taken_before(profiles: Sequence[Profile]) -> Rates | None:
    """What several profiles took each class of tasks for, the last one that met it."""
    known = [p.rates for p in profiles if p.rates is not None]
    return known[-1].model_copy(update={"flops_per_s": {n: r for k in known for n, r in k.flops_per_s.items()}}) if known else None


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))
