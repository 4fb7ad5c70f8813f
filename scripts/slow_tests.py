"""The tests that are marked `slow`, and left out by default: runs them, and writes when they last ran and what came of it.

    python scripts/slow_tests.py
    python scripts/slow_tests.py tests/search       # some of them; the page stays as it is

The page is results/slow_tests.md; the exit status is pytest's.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

from paper_tables import ROOT, markdown

from soapjax.helpers.files import write_text_atomic

VERSIONS = ("jax", "jaxlib", "flax", "numpy")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files or folders; all by default")
    parser.add_argument("--page", type=Path, default=ROOT / "results" / "slow_tests.md")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        report, begin = Path(folder) / "report.xml", time.monotonic()
        command = [sys.executable, "-m", "pytest", "-m", "slow", f"--junitxml={report}", *options.paths]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if report.exists() and not options.paths:
            write_text_atomic(options.page, page(ET.parse(report), time.monotonic() - begin))
    return status


def page(report: ET.ElementTree, seconds: float) -> str:
    """What ran, by file, and what failed."""
    rows: dict[str, dict[str, float]] = {}
    failed = []
    for case in report.iter("testcase"):
        row = rows.setdefault(case.get("classname", ""), {"ran": 0, "failed": 0, "skipped": 0, "seconds": 0.0})
        outcomes = {child.tag for child in case}
        is_failed, is_skipped = bool(outcomes & {"failure", "error"}), "skipped" in outcomes
        row["ran"] += not is_skipped
        row["failed"] += is_failed
        row["skipped"] += is_skipped
        row["seconds"] += float(case.get("time", 0))
        failed += [f"{case.get('classname')}::{case.get('name')}"] if is_failed else []
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in VERSIONS)
    ran, skipped = (int(sum(row[k] for row in rows.values())) for k in ("ran", "skipped"))
    lines = [
        "# Slow tests", "",
        f"`python scripts/slow_tests.py` last ran on {datetime.date.today():%d %B %Y} at {commit()}, with {versions} and Python "
        f"{platform.python_version()}: {ran} tests in {seconds / 60:.0f} minutes, {len(failed)} failed, {skipped} skipped.", "",
        *(f"- failed: `{name}`" for name in failed), *([""] if failed else []),
    ]  # fmt: skip
    table = ({"file": name, **row, "seconds": round(row["seconds"])} for name, row in sorted(rows.items()))
    return "\n".join([*lines, markdown(("file", "ran", "failed", "skipped", "seconds"), table)])


def commit() -> str:
    """The checkout's commit; "+" behind it where files differ."""
    found = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "an unknown commit"


if __name__ == "__main__":
    sys.exit(main())
