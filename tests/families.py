"""Families of alike cases: the long ones of them, or most of many, are left out of the default run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def family(members: Iterable[Any], *, slow: Collection[Any]) -> list[Any]:
    """Parameters of a test, those in `slow` marked as such. A tuple holds several arguments."""
    members = list(members)
    if unknown := [s for s in slow if s not in members]:
        raise ValueError(f"{unknown} are no members of {members}")
    return [pytest.param(*(m if type(m) is tuple else (m,)), marks=pytest.mark.slow) if m in slow else m for m in members]


def sampled(members: Iterable[Any], every: int) -> list[Any]:
    """Parameters of a test, of which the default run has one of `every`, from the first; the others are slow."""
    members = list(members)
    return family(members, slow=[m for k, m in enumerate(members) if k % every])
