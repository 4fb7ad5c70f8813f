"""A plan as HTML: one page that needs no network (`soapjax report`), and what a notebook shows of a plan.

The page's text, tables and bars are there without scripts; a script of its own draws the timeline, memory over the step and the
operators' graph on canvas and SVG from the data that the page carries. Names are data: they are escaped wherever they stand.

    page(plan, extras)      a file of its own; `extras` has what the plan file lacks (soapjax/planning/page_data.py)
    fragment(plan)          tables alone, for the output of a notebook's cell; `Plan._repr_html_` gives it
"""

from __future__ import annotations

import html
import importlib.resources
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from soapjax.helpers.sizes import size
from soapjax.report.explanation import limit_lines
from soapjax.report.plan_tables import FOLDED, folded, gains, meshes_of, operator_rows, percent, seconds, short_storage, split_of
from soapjax.report.plan_tables import caveat as caveat_of
from soapjax.strategy.plan import Plan

MOST_SPLITS = 8  # that get a colour of their own; "other" is one more


class TimelineView(NamedTuple):
    """What runs when; times are numbers of `unit_s` seconds."""

    makespan_s: float
    unit_s: float
    tracks: tuple[str, ...]
    names: tuple[str, ...]
    spans: tuple[tuple[int, int, int, int, int, int], ...]  # track, start, duration, name, kind, 1 on the critical path
    note: str


class MemoryOverStep(NamedTuple):
    """Bytes on one device while each task runs."""

    title: str
    times_s: tuple[float, ...]  # when each task starts
    persistent: int
    alive: tuple[int, ...]
    transient: tuple[int, ...]
    names: tuple[str, ...]
    name: tuple[int, ...]  # per task
    usable_bytes: int


class Extras(NamedTuple):
    """What a page can show beside the plan file."""

    timeline: TimelineView | None = None
    memory: MemoryOverStep | None = None
    edges: tuple[tuple[int, int], ...] = ()  # positions of operators in the plan: the first's results are read by the second
    path: tuple[tuple[str, float], ...] = ()  # seconds of the critical path by stream, largest first


def page(plan: Plan, extras: Extras = Extras(), *, title: str | None = None) -> str:
    """The whole page."""
    title = title or f"Plan for {plan.topology.get('name', '?')}, {plan.num_devices} devices"
    parts = {
        "title": html.escape(title), "css": _asset("page.css"), "js": _asset("page.js"), "summary": _summary(plan, extras),
        "costs": _costs(plan), "footer": _footer(plan),
        # "<" would end the script, or begin a comment in it, wherever a name has it.
        "data": json.dumps(_data(plan, extras), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }  # fmt: skip
    pieces = _asset("page.html").split("{{")
    out = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        out += [parts[name], rest]
    return "".join(out)


def fragment(plan: Plan) -> str:
    """The plan's tables, without a script."""
    return (
        f'<div class="soapjax"><style>{_asset("page.css")}</style>{_summary(plan, Extras())}'
        f"<details><summary>{len(plan.operators)} operators</summary>{_costs(plan)}</details>{_footer(plan)}</div>"
    )


def framed(plan: Plan, whole: str) -> str:
    """`fragment`, and a whole page folded under it, in a frame of its own."""
    frame = f'<iframe srcdoc="{html.escape(whole)}" style="width:100%;height:720px;border:0" loading="lazy"></iframe>'
    return f"{fragment(plan)}<details><summary>timeline, memory, operators as a graph</summary>{frame}</details>"


Plan.notebook_html = fragment  # the plan's package is below this one, and cannot import it


def _asset(name: str) -> str:
    return importlib.resources.files("soapjax.report").joinpath("page", name).read_text(encoding="utf-8")


def _summary(plan: Plan, extras: Extras) -> str:
    p = plan.prediction
    cards = [(seconds(p.step_time_s), "predicted step")]
    if p.without_overlap_s is not None:
        cards += [
            (seconds(p.hidden_communication_s), "communication hidden"), (seconds(p.without_overlap_s), "step if none were"),
            (percent(p.split_flops_share), "of the FLOPs split"),
        ]  # fmt: skip
    cards += [
        (size(_sent(plan)), "sent per device" if p.peak_sent_bytes is None else "sent by a device in a step, at most"),
        (size(p.memory_bytes_per_device), f"of {size(p.usable_memory_bytes)} memory" + ("" if p.feasible else ": does not fit")),
        (str(plan.graph.num_operators), f"operators on {plan.num_devices} devices"),
    ]
    found = "".join(f"<li><b>{html.escape(value)}</b><span>{html.escape(what)}</span></li>" for value, what in cards)
    out = [f'<ul class="cards">{found}</ul>']
    if own := caveat_of(p.split_flops_share, plan.num_devices):
        out.append(f'<p class="caveat">This plan {html.escape(own)}.</p>')
    lines = limit_lines(plan, dict(extras.path))
    out.append(f"<p>{'<br>'.join(html.escape(line[0].upper() + line[1:]) + '.' for line in lines)}</p>")
    out.append(f"<section><h2>Against the baselines</h2>{_baselines(plan)}</section>")
    if plan.pipeline is not None:
        out.append(_stages(plan))
    return "\n".join(out)


def _sent(plan: Plan) -> int:
    """By the device that sends most; in plans of older versions by each, on average."""
    p = plan.prediction
    return sum(p.bytes_by_collective.values()) if p.peak_sent_bytes is None else p.peak_sent_bytes


def _baselines(plan: Plan) -> str:
    p, source = plan.prediction, plan.provenance
    rows = [(f"this plan ({source.planner})", p.step_time_s, p.without_overlap_s, p.split_flops_share,
             p.memory_bytes_per_device, _sent(plan), "", "")]  # fmt: skip
    found = gains(plan)
    for name, s in source.baselines.items():
        if s is not None:
            f = source.baseline_figures.get(name)
            figures = (None,) * 4 if f is None else (
                f.without_overlap_s, f.split_flops_share, f.memory_bytes_per_device,
                f.sent_bytes if f.peak_sent_bytes is None else f.peak_sent_bytes,
            )  # fmt: skip
            gain, words = found.get(name, (None, ""))
            rows.append((name, s, *figures, f"{gain:.2f} ×" if gain else "", f"which {words}" if words else ""))
    longest = max(max(r[1], r[2] or 0) for r in rows) or 1.0
    body = []
    for name, s, serial, share, memory, sent, factor, words in rows:
        meter = f'<span class="meter" style="width:{s / longest * 160:.1f}px"></span>'
        hidden = max((serial or s) - s, 0.0)
        meter += f'<span class="meter hidden" style="width:{hidden / longest * 160:.1f}px"></span>'
        known = ("", "", "") if serial is None else (seconds(hidden), seconds(serial), percent(share))
        numbers = (seconds(s), *known, "" if sent is None else size(sent), "" if memory is None else size(memory))
        clause = f'<br><span class="caveat">{html.escape(words)}</span>' if words else ""
        cells = "".join(f'<td class="n">{html.escape(v)}</td>' for v in numbers)
        first = f'<td>{html.escape(name)}</td><td class="meters">{meter}</td>'
        body.append(f'<tr>{first}{cells}<td class="speed">{html.escape(factor)}{clause}</td></tr>')
    heads = ("step", "hidden", "if none were", "FLOPs split", "sends", "memory")
    head = "".join(f'<th class="n" scope="col">{h}</th>' for h in heads)
    return (
        '<p class="hint">Seconds per step by the same simulator. Hidden: communication that is assumed to pass while the device '
        'computes, the pale part of a bar.</p><div class="scroll"><table><thead><tr><th scope="col">strategy</th><th></th>'
        f'{head}<th scope="col">this plan\'s speed</th></tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def _stages(plan: Plan) -> str:
    body = []
    for i, stage in enumerate(plan.pipeline.stages):
        memory = plan.prediction.memory_parts_bytes.get(f"stage {i}")
        operators = f"{stage.operators[0]} … {stage.operators[-1]} ({len(stage.operators)})"
        cells = (str(i), operators, ", ".join(map(str, stage.devices)))
        body.append(
            "<tr>" + "".join(f'<td class="name">{html.escape(c)}</td>' for c in cells)
            + f'<td class="n">{"" if memory is None else size(memory)}</td></tr>'
        )  # fmt: skip
    heads = "".join(f'<th scope="col">{h}</th>' for h in ("stage", "operators", "devices"))
    title = f"{len(plan.pipeline.stages)} stages, {plan.pipeline.num_microbatches} micro-batches, {plan.pipeline.schedule}"
    return (
        f'<section><h2>{html.escape(title)}</h2><div class="scroll"><table><thead><tr>{heads}<th class="n" scope="col">memory'
        f"</th></tr></thead><tbody>{''.join(body)}</tbody></table></div></section>"
    )


def _costs(plan: Plan) -> str:
    rows = operator_rows(plan)
    small = folded(rows)
    body = []
    for row in rows:
        costs = [c for c in (plan.operators[name].cost for name in row.names) if c is not None]
        sums = [sum(getattr(c, f) for c in costs) for f in ("compute_s", "communication_s", "sent_bytes", "memory_bytes")]
        share = row.time_share if row.time_share is not None else 0.0
        numbers = [(share, f"{share:.1%}" if costs else "")]
        numbers += [(v, show(v) if costs else "") for v, show in zip(sums, (seconds, seconds, size, size), strict=True)]
        cells = "".join(f'<td class="n" data-v="{v:.6g}">{html.escape(text)}</td>' for v, text in numbers)
        names = html.escape(" ".join(row.names).lower(), quote=True)
        fold = " data-small hidden" if row in small else ""
        words = "".join(f"<td{c}>{html.escape(t)}</td>" for c, t in (
            (' class="name"', row.title), ("", row.kind), ("", row.split), ("", row.storage)))  # fmt: skip
        body.append(f'<tr data-names="{names}"{fold}>{words}{cells}</tr>')
    heads = "".join(f'<th scope="col">{h}</th>' for h in ("operators", "kind", "split", "parameters stored"))
    heads += "".join(f'<th class="n" scope="col">{h}</th>' for h in ("time", "computing", "communicating", "sends", "memory"))
    foot = ""
    if small:
        count, share = sum(len(r.names) for r in small), sum(r.time_share for r in small)
        text = f"{count} other operators in {len(small)} rows, each under {FOLDED:.1%} of the time, together {share:.1%}"
        foot = f'<p><button type="button" id="more" aria-expanded="false">{html.escape(text)}</button></p>'
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(body)}</tbody></table></div>{foot}'


def _footer(plan: Plan) -> str:
    source, p = plan.provenance, plan.prediction
    figures = ", ".join(f"{share:.0%} {name}" for name, share in p.compute_figures.items())
    lines = [
        *([f"compute seconds: {figures}"] if figures else []), *(f"note: {note}" for note in source.notes),
        f"planned by {source.planner or '?'}, seed {source.seed}, {source.num_proposals} proposals; plan_sha256 {plan.plan_sha256}",
    ]  # fmt: skip
    return "<footer>" + "<br>".join(html.escape(line) for line in lines) + "</footer>"


def _data(plan: Plan, extras: Extras) -> dict[str, Any]:
    """What the script draws."""
    meshes = meshes_of(plan)
    how = [split_of(part, meshes[name]) for name, part in plan.operators.items()]
    splits, index = _colours(plan, how)
    operators = []
    for (name, part), words, split in zip(plan.operators.items(), how, index, strict=True):
        cost = part.cost.model_dump() if part.cost is not None else dict.fromkeys(
            ("compute_s", "communication_s", "sent_bytes", "memory_bytes", "flops", "split_flops_share"), 0)  # fmt: skip
        dims = ", ".join(f"{d}={n}" for d, n in part.dims.items())
        storage = short_storage(part.storage, meshes[name])
        operators.append({"name": name, "kind": part.kind, "dims": dims, "how": words, "split": split, "storage": storage, **cost})
    return {
        "operators": operators, "splits": splits, "edges": extras.edges,
        "timeline": None if extras.timeline is None else extras.timeline._asdict(),
        "memory": None if extras.memory is None else extras.memory._asdict(),
    }  # fmt: skip


def _colours(plan: Plan, how: Sequence[str]) -> tuple[list[str], list[int]]:
    """The ways to split that take most of the time, and per operator which is its; the last one is all others.

    Without the axes' names: "sample/4 param0/2" is one colour, whatever links it is split over.
    """
    plain = [" ".join(word for word in text.split() if "(" not in word and ")" not in word) or text for text in how]
    took: dict[str, float] = {}
    for text, part in zip(plain, plan.operators.values(), strict=True):
        took[text] = took.get(text, 0.0) + (part.cost.compute_s + part.cost.communication_s if part.cost is not None else 1.0)
    first = sorted(took, key=lambda text: -took[text])[:MOST_SPLITS]
    index = [first.index(text) if text in first else MOST_SPLITS for text in plain]
    if len(took) > MOST_SPLITS:
        first += ["others"] if MOST_SPLITS in index else []
    return first, index
