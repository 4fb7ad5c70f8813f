"""Families of alike cases: the long ones of them are left out of the default run."""

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
