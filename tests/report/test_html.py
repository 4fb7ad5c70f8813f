"""A plan as HTML: one file that fetches nothing, in which names are data; drawn by a real browser where there is one."""

import json
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser

import pytest
from command_line import plan_text

from soapjax import Plan
from soapjax.report.html import Extras, MemoryOverStep, TimelineView, fragment, framed, page
from soapjax.strategy.plan import OperatorCost

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</script><img src=x onerror=alert(1)>\"'&amp;<!--"


def plan_of(count, *, prefix=""):
    """A real plan with `count` operators in blocks of eight, that cost something."""
    plan = Plan.loads(plan_text())
    part = next(p for p in plan.operators.values() if p.kind == "dot")
    cost = OperatorCost(compute_s=1e-4, communication_s=5e-5, sent_bytes=10**6, memory_bytes=10**6, flops=1e9, split_flops_share=1)
    axes = [part.axes, dict.fromkeys(part.axes, "replicate")]
    operators = {
        f"{prefix}blk{i // 8}/part{i % 8}": part.model_copy(update={"cost": cost, "axes": axes[i % 3 == 0]}) for i in range(count)
    }
    return plan.model_copy(update={"operators": operators})


def extras_with(count):
    """A timeline of five tasks per operator, memory and a chain of edges."""
    num = 5 * count
    names = tuple(f"task {i}" for i in range(count))
    spans = tuple((i % 3, 10**7 // num * i, 10**7 // num, i % count, i % 6, int(i % 3 == 0)) for i in range(num))
    tracks = ("every device computes", "every device a link", "every device b link")
    timeline = TimelineView(1e-2, 1e-9, tracks, names, spans, "note")
    steps = range(count)
    memory = MemoryOverStep(
        "every device", tuple(1e-2 * i / count for i in steps), 10**6, tuple(10**6 + i for i in steps), (0,) * count, names,
        tuple(steps), 10**9,
    )  # fmt: skip
    return Extras(timeline, memory, tuple((i, i + 1) for i in range(count - 1)), (("compute", 8e-3), ("a link", 2e-3)))


class Checker(HTMLParser):
    """Gathers tags with their attributes; a page's elements close in order."""

    VOID = {"meta", "input", "br", "link", "img", "hr"}

    def __init__(self):
        super().__init__()
        self.tags, self.open, self.scripts, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open and self.open[-1] == "script" else self.text).append(data)


def checked(text):
    parser = Checker()
    parser.feed(text)
    parser.close()
    assert not parser.open
    return parser


def test_the_page_is_one_file_that_fetches_nothing():
    plan = plan_of(20)
    text = page(plan, extras_with(20))
    assert not re.search(r"\{\{\w+\}\}", text) and "None" not in text
    parser = checked(text)
    assert not [a for _, a in parser.tags if {"src", "href", "srcset", "action"} & a.keys()]
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|import\(", text)
    data = json.loads(parser.scripts[0])
    assert [o["name"] for o in data["operators"]] == list(plan.operators)
    assert len(data["timeline"]["spans"]) == 100 and len(data["edges"]) == 19
    assert len(data["splits"]) == 2 and {o["split"] for o in data["operators"]} == {0, 1}


def test_names_are_data():
    plan = plan_of(4, prefix=HOSTILE)
    provenance = plan.provenance.model_copy(update={"notes": (HOSTILE,), "baselines": {HOSTILE: 1.0}, "planner": HOSTILE})
    plan = plan.model_copy(update={"provenance": provenance, "topology": plan.topology | {"name": HOSTILE}})
    for text in (page(plan, extras_with(4), title=HOSTILE), fragment(plan), framed(plan, page(plan))):
        parser = checked(text)
        assert not [a for tag, a in parser.tags if tag == "img" or any(k.startswith("on") for k in a)]
        assert any(HOSTILE in x for x in parser.text)
    data = json.loads(checked(page(plan)).scripts[0])
    assert all(o["name"].startswith(HOSTILE) for o in data["operators"])


def test_a_notebook_shows_tables_without_a_script():
    plan = plan_of(3)
    text = plan._repr_html_()
    parser = checked(text)
    assert not parser.scripts and "fsdp" in text and "blk0/part0" in text


def test_small_rows_are_folded_in_the_table():
    plan = plan_of(2)
    small = next(iter(plan.operators.values())).cost.model_copy(update={"compute_s": 1e-8, "communication_s": 0.0})
    part = next(iter(plan.operators.values())).model_copy(update={"cost": small})
    plan = plan.model_copy(update={"operators": plan.operators | {f"penalty_{c}": part for c in "abcdefgh"}})
    parser = checked(page(plan))
    rows = [a for tag, a in parser.tags if tag == "tr" and "data-names" in a]
    assert len(rows) == 10 and sum("hidden" in a for a in rows) == 8
    assert any("8 other operators in 8 rows" in x for x in parser.text)


def dom(path, *options):
    """The page after its script ran, and what it complained about; [dom, complaints, seconds]."""
    argv = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=2000"]
    begin = time.monotonic()
    ran = subprocess.run([*argv, *options, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120)
    return ran.stdout, [line for line in ran.stderr.splitlines() if "CONSOLE" in line], time.monotonic() - begin


@pytest.mark.skipif(CHROMIUM is None, reason="no browser")
@pytest.mark.parametrize("count, nodes", [(20, 20), (2000, 7)])
def test_a_browser_draws_it(tmp_path, count, nodes):
    path = tmp_path / "report.html"
    path.write_text(page(plan_of(count), extras_with(count)))
    assert path.stat().st_size < 60_000 + 1000 * count
    text, complaints, seconds = dom(path)
    assert not complaints
    # A node and its strip's rects each; of 2,000 operators in 250 blocks runs of blocks are folded.
    assert len(re.findall(r'<g transform="translate', text)) == nodes
    assert f"{count} operators in {nodes} nodes" in text
    for section in ("timeline", "memory", "graph"):
        assert re.search(rf'<section id="{section}" aria-labelledby', text), f"{section} is hidden"
    assert re.search(r'<canvas id="timeline-canvas"[^>]*height="9[0-9]"|<canvas id="timeline-canvas"[^>]*height: 96px', text)
    assert seconds < 60


@pytest.mark.skipif(CHROMIUM is None, reason="no browser")
def test_a_browser_draws_a_plan_file_alone(tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page(Plan.loads(plan_text())))
    text, complaints, _ = dom(path)
    assert not complaints and '<section id="timeline" hidden' in text and "does not say who reads whom" in text
