"""Plans, proves and runs public training steps that nobody here wrote, and writes the table.

    python scripts/foreign_models.py --sources ~/public --list
    python scripts/foreign_models.py --sources ~/public --only neural_ode gcn_karate
    python scripts/foreign_models.py --sources ~/public --plain        # the adapters alone, under jax.jit

`--sources` is a folder with one folder `owner+name` for each public repository (scripts/foreign/README.md lists them; nothing
of them is committed here). A case whose repository or packages are not at hand is skipped, and counted as skipped. Every case
is planned for `cpu8` by `mcmc` and by `fsdp`, runs four steps on 8 fake devices beside `jax.jit`, and is verified, in a process
of its own with a time limit, so that one broken case ends nothing. JAX_DISABLE_MOST_OPTIMIZATIONS=1 compiles quicker, and makes
times that say little; the table tells which rows were made so. Rows are kept in foreign_models.csv: the same command
goes on where it stopped; `--retry` computes what is not proven again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts")]
PLANNERS = ("fsdp", "mcmc")
NUM_DEVICES = 8


def main(argv: list[str] | None = None) -> int:
    parser = parser_for()
    options = parser.parse_args(argv)
    if options.child:
        return child(options)
    from foreign.registry import all_cases
    from paper_tables import guarded

    cases = all_cases()
    if unknown := [n for n in options.only if n not in cases]:
        parser.error(f"no case {', '.join(unknown)}; --list names them all")
    wanted = [c for c in cases.values() if not options.only or c.name in options.only]
    if options.list:
        for c in wanted:
            print(f"{c.name:28} {c.family:16} {c.source or 'packages: ' + ' '.join(c.packages):42} {c.missing(options.sources)}")
        return 0
    return guarded(lambda _: (plain if options.plain else table)(wanted, options), options)


def parser_for() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, default=Path("sources"), help="folder with one folder owner+name each")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="names, families and where they come from")
    parser.add_argument("--plain", action="store_true", help="only run the adapters under jax.jit")
    parser.add_argument("--planners", nargs="*", default=list(PLANNERS))
    parser.add_argument("--proposals", type=int, default=64, help="of mcmc")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each row")
    parser.add_argument("--again", action="store_true", help="compute also what the CSV has already")
    parser.add_argument("--retry", action="store_true", help="compute anew what the CSV has as not proven")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the CSV and the Markdown table")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)  # one case, its row as JSON into this file
    return parser


def child(options: argparse.Namespace) -> int:
    """One row, in this process."""
    import foreign_measure
    from foreign import sources
    from foreign.registry import all_cases

    sources.use(options.sources)
    (name,) = options.only
    found = all_cases()[name]
    if options.plain:
        row = foreign_measure.plain_row(found)
    else:
        row = foreign_measure.measured(found, options.planners[0], proposals=options.proposals)
    Path(options.child).write_text(json.dumps(row))
    return 0


def row_of(name: str, planner: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of a case, from a process of its own; what became of the process is a status too."""
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
    environment = os.environ | {
        "XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={NUM_DEVICES}"]),
        "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "USE_TF": "0",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--child", str(out), "--only", name, "--planners", planner]
        command += ["--sources", str(options.sources.resolve()), "--proposals", str(options.proposals)]
        command += ["--plain"] * options.plain
        with (Path(folder) / "log").open("w+") as log:
            try:
                code = subprocess.run(
                    command, env=environment, cwd=folder, timeout=options.timeout, stdout=log, stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                return {"status": "timeout", "error": f"not done in {options.timeout:g} s"}
            if out.exists():
                return json.loads(out.read_text())
            log.seek(0)
            return {"status": "crashed", "error": f"exit status {code}: {log.read()[-400:].strip()}".replace("\n", " ")}


def plain(cases: list[Any], options: argparse.Namespace) -> None:
    """The adapters alone: what runs under jax.jit, and what does not."""
    count: Counter[str] = Counter()
    for c in cases:
        reason = c.missing(options.sources)
        row = {"status": "skipped", "error": reason} if reason else row_of(c.name, "", options)
        count[row["status"]] += 1
        print(f"{c.name:28} {row['status']:14} {row.get('jit_compilations', '')} {row.get('error', '')}", flush=True)
    print(", ".join(f"{n} {status}" for status, n in count.items()))


def table(cases: list[Any], options: argparse.Namespace) -> None:
    from paper_tables import Rows, note

    rows = Rows(options.results / "foreign_models.csv", ("name", "planner", "proposals"), again=options.again)
    skipped: dict[str, str] = {}
    for c in cases:
        if reason := c.missing(options.sources):
            skipped[c.name] = reason
            note(f"{c.name}: skipped, {reason}")
            continue
        for planner in options.planners:
            arguments = {"name": c.name, "planner": planner, "proposals": options.proposals}
            known = rows.find(arguments)
            if known is not None and options.retry and not known["status"].startswith("proven"):
                known = None
            if known is None:
                facts = {"family": c.family, "source": c.source or " ".join(c.packages), "is_listed": int(c.is_listed)}
                facts["is_optimized"] = int(not os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS"))
                known = rows.add({**arguments, **facts, **row_of(c.name, planner, options)})
            note(f"{c.name} {planner}: {known['status']} {known.get('error', '')[:200]}")
            write_report(rows, skipped, options)
    write_report(rows, skipped, options)


def write_report(rows: Any, skipped: dict[str, str], options: argparse.Namespace) -> None:
    import foreign_report

    from soapjax.helpers.files import write_text_atomic

    write_text_atomic(options.results / "foreign_models.md", foreign_report.text(rows.rows, skipped))


if __name__ == "__main__":
    sys.exit(main())
