"""The one text that JSON data have, and its hash: by it files and processes know one another's data."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical(data: Any) -> str:
    """Keys in order, and no blanks."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def sha256_of(data: Any) -> str:
    """SHA-256 (hex) over `canonical`."""
    return hashlib.sha256(canonical(data).encode()).hexdigest()
