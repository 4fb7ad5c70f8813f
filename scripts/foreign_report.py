"""The Markdown page of `foreign_models.py`, from its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from paper_tables import markdown

WELL_SPLIT = 0.95
SHOWN = (
    "name",
    "family",
    "planner",
    "status",
    "float64",
    "4_steps",
    "FLOPs_split",
    "compilations",
    "first_call_s",
    "second_call_ms",
)
SUMS = ("planner", "rows", "proven", "compile_as_often_as_jit", "FLOPs_split_≥_95_%", "replicated_without_a_note", "other")
Row = Mapping[str, str]


def text(rows: Sequence[Row], skipped: Mapping[str, str]) -> str:
    """The page: sums first, then a row for every case and planner, then what is not proven with its message."""
    names = {r["name"] for r in rows}
    chosen = {r["name"] for r in rows if r.get("is_listed") == "0"}
    lines = [
        "# Public models and training steps that nobody here wrote\n",
        f"`python scripts/foreign_models.py --sources FOLDER`: {len(names)} steps, {len(chosen)} of them not named by the issue "
        f"that asked for this table, each planned for `cpu8`, run for four steps on 8 fake CPU devices beside `jax.jit`, and "
        f"verified. {len(skipped)} skipped.\n",
        markdown(SUMS, [summary(p, [r for r in rows if r["planner"] == p]) for p in dict.fromkeys(r["planner"] for r in rows)]),
        "\nProven: loss and gradients in float64 within 1e-9 of one device, or in the step's precision within the bound of "
        "`soapjax verify`, and the results of four steps as near to `jax.jit`'s as rounding allows; \"proven, drifts\" is a "
        "proven step whose optimizer divides rounding by tiny gradients (an Adam moment that is zero), so that four steps end "
        "up to 1e-2 apart. Compilations are counted call by call; the sums leave out the first call, which in "
        f"{sum(map(lays_out_by_programs, rows))} rows compiled more programs than `jax.jit`'s: JAX's own, by which it cuts up an "
        "array that lies on one device. Times are of two shared cores, planned / `jax.jit`.\n",
        markdown(SHOWN, map(shown, rows)),
    ]  # fmt: skip
    if quick := sum(r.get("is_optimized") == "0" for r in rows):
        lines.insert(3, f"\n{quick} of {len(rows)} rows with JAX_DISABLE_MOST_OPTIMIZATIONS=1: their times say little.\n")
    if failed := [r for r in rows if not is_proven(r)]:
        lines += ["\n## Not proven\n", markdown(("name", "planner", "status", "error"), map(escaped, failed))]
    if remarked := [r for r in rows if r.get("notes") or r.get("warnings")]:
        lines += ["\n## Notes and warnings\n", markdown(("name", "planner", "notes", "warnings"), map(escaped, remarked))]
    if skipped:
        lines += ["\n## Skipped\n", markdown(("name", "why"), [{"name": n, "why": w} for n, w in skipped.items()])]
    return "\n".join(lines)


def summary(planner: str, rows: Sequence[Row]) -> dict[str, str]:
    ran = [r for r in rows if r.get("compilations")]
    planned = [r for r in rows if r.get("flops_split")]
    low = [r for r in planned if float(r["flops_split"]) < WELL_SPLIT]
    others = Counter(r["status"] for r in rows if not is_proven(r))
    num_drifting = sum(r["status"] != "proven" for r in rows if is_proven(r))
    return {
        "planner": planner,
        "rows": str(len(rows)),
        "proven": f"{len(rows) - others.total()}" + (f" ({num_drifting} drift)" if num_drifting else ""),
        "compile_as_often_as_jit": f"{sum(as_often(r) for r in ran)} of {len(ran)}",
        "FLOPs_split_≥_95_%": f"{len(planned) - len(low)} of {len(planned)}",
        "replicated_without_a_note": str(sum(not r.get("notes") and not r.get("warnings") for r in low)),
        "other": ", ".join(f"{n} {s}" for s, n in others.most_common()),
    }


def is_proven(row: Row) -> bool:
    return row["status"].startswith("proven")


def compilations(row: Row) -> list[tuple[int, int]]:
    """Of every call: programs compiled by the planned step, and by jax.jit."""
    return list(zip(*([int(n) for n in row[c].split()] for c in ("compilations", "jit_compilations")), strict=True))


def as_often(row: Row) -> bool:
    """Whether no call compiled more programs than the same call of jax.jit, but for the first: it may lay arguments out too."""
    return all(planned <= plain for planned, plain in compilations(row)[1:])


def lays_out_by_programs(row: Row) -> bool:
    """Whether the first call compiled more than one program, and more than jax.jit's."""
    return bool(row.get("compilations")) and (first := compilations(row)[0])[0] > max(first[1], 1)


def shown(row: Row) -> dict[str, str]:
    def number(column: str, form: str, scale: float = 1.0) -> str:
        return format(scale * float(row[column]), form) if row.get(column) else ""

    def beside(column: str, form: str, scale: float = 1.0) -> str:
        return f"{number(column, form, scale)} / {number('jit_' + column, form, scale)}" if row.get(column) else ""

    return {
        "name": row["name"], "family": row.get("family", ""), "planner": row["planner"], "status": row["status"],
        "float64": number("float64_error", ".0e"), "4_steps": number("difference", ".0e"),
        "FLOPs_split": number("flops_split", ".0%"),
        "compilations": f"{row['compilations']} / {row['jit_compilations']}" if row.get("compilations") else "",
        "first_call_s": beside("first_s", ".1f"), "second_call_ms": beside("second_s", ".0f", 1e3),
    }  # fmt: skip


def escaped(row: Row) -> dict[str, str]:
    return {k: str(v).replace("|", "\\|") for k, v in row.items()}
