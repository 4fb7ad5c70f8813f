"""The topology files that come with soapjax, by name, and what each is in a line."""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from importlib.resources.abc import Traversable
from pathlib import Path

LOCAL = "local"
LOCAL_DESCRIPTION = "the devices of this machine, as JAX sees them"


def shipped_topologies() -> tuple[str, ...]:
    """The names of the topologies that come with soapjax."""
    return tuple(sorted(shipped_files()))


def shipped_files() -> dict[str, Traversable]:
    """The shipped files by name: package data of an installed wheel, or in a checkout the folder beside the package."""
    folder: Traversable = importlib.resources.files("soapjax") / "topologies"
    if not folder.is_dir():
        folder = Path(__file__).resolve().parents[2] / "topologies"
    if not folder.is_dir():
        return {}
    return {f.name.removesuffix(".toml"): f for f in folder.iterdir() if f.name.endswith(".toml")}


@functools.cache
def shipped_descriptions() -> dict[str, str]:
    """A line on each shipped topology, by name."""
    files = shipped_files()
    return {name: tomllib.loads(files[name].read_text(encoding="utf-8"))["description"] for name in sorted(files)}


def remedy_with_names(remedy: str) -> str:
    """`remedy`, and below it every name that may be given."""
    known = {LOCAL: LOCAL_DESCRIPTION} | shipped_descriptions()
    width = max(map(len, known))
    return "\n".join([f"{remedy}:", *(f"  {name:<{width}}  {text}" for name, text in known.items())])
