"""What a command says where its output, its folder or its files are odd: text, one line for what is wrong, and the right status."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import rich.table
from command_line import call, plan_text

from soapjax.cli import terminal
from soapjax.report.text_table import TextTable

SOAPJAX = [sys.executable, "-m", "soapjax"]
PLAIN = {k: v for k, v in os.environ.items() if k not in ("LC_ALL", "PYTHONIOENCODING", "PYTHONUTF8")}


def shell(line, *, cwd=None, **env):
    """Runs a line of sh in which "$@" is soapjax."""
    command = ["sh", "-c", line, "sh", *SOAPJAX]
    root = str(Path(__file__).parent.parent.parent)
    env = {**PLAIN, "PYTHONPATH": root, **env}
    ended = subprocess.run(command, cwd=cwd, env=env, capture_output=True, timeout=120)
    assert b"Traceback" not in ended.stderr and b"Exception ignored" not in ended.stderr
    return ended.returncode, ended.stdout, ended.stderr.decode()


@pytest.mark.parametrize(
    "line, words",
    [
        ('"$@" --help >&-', "standard output: got closed"),
        ('"$@" --help >/dev/full', "standard output: got No space left on device"),
        ('"$@" --help <&- >&- 2>&-', ""),
        ('mkdir gone && cd gone && rmdir ../gone && "$@" --help', "working folder: got No such file or directory"),
        ('ulimit -v 1000000; "$@" --help', "address space (ulimit -v): got 1024000000 bytes"),
    ],
    ids=["closed", "full", "all closed", "no folder", "no memory"],
)
def test_a_place_where_nothing_can_be_said_or_done(line, words, tmp_path):
    status, out, err = shell(line, cwd=tmp_path)
    assert status == 2 and out == b"" and words in err
    assert [x[:7] for x in err.splitlines()] == (["error: "] if words else [])


@pytest.mark.parametrize("line", ['("$@" --help; echo $? >&2) | true', '("$@" topologies; echo $? >&2) | true'])
def test_a_pipe_that_nobody_reads_ends_quietly(line):
    assert shell(line) == (0, b"", "0\n")


@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}], ids=["ascii", "C"])
def test_an_ascii_output_gets_ascii(env):
    status, out, err = shell('"$@" --help && "$@" paln', **env)
    assert status == 2 and out and out.isascii() and err.isascii() and "\\u" not in err and b"\\u" not in out


def printed(*renderables, encoding="utf-8"):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = terminal.console(out, width=60)
    for r in renderables:
        console.print(r)
    out.flush()
    return out.buffer.getvalue().decode(encoding)


def test_tables_are_drawn_with_what_the_output_has():
    table = TextTable(title="a … b")
    table.add_column("2 × 3")
    table.add_row("5 µs → ü")
    assert "…" in printed(table) and "│" in printed(table)
    text = printed(table, encoding="ascii")
    assert "a ... b" in text and "2 x 3" in text and "5 us -> \\xfc" in text and "|" in text


def test_markup_and_control_characters_are_text():
    name = "[red]a[/red]\x1b[2J\x9b\u202e\ud800\x00b"
    table = TextTable()
    table.add_column("name")
    table.add_row(name + "\nforged")
    shown = r"[red]a[/red]\x1b[2J\x9b\u202e\ud800\x00b"
    assert shown + r"\nforged" in printed(table) and shown in printed(name)
    plain = rich.table.Table("name")  # of somebody else: no markup either
    plain.add_row("[red]a")
    assert "[red]a" in printed(plain)


@pytest.mark.parametrize("command", [["explain", "--plan-only"], ["explain", "--plan-only", "--json"], ["simulate"]])
def test_what_a_plan_says_reaches_the_terminal_as_text(command, tmp_path):
    data = json.loads(plan_text())
    evil = "\x1b]0;title\x07\x1b[2J[red]dense0"
    data["operators"] = {evil if k == "dense0" else k: v for k, v in data["operators"].items()}
    data["provenance"]["notes"] = [evil]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    ended = call(*command, tmp_path / "plan.json")
    assert ended.status == (2 if command == ["simulate"] else 0)
    said = ended.out + ended.err
    assert not {"\x1b", "\x07"} & set(said) and "\\x1b" in said.replace("\\u001b", "\\x1b") and "[red]" in said


def test_an_output_behind_a_link(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(plan_text())
    Path("there").mkdir()
    Path("page.html").symlink_to("there/page.html")
    assert call("report", "--plan-only", "plan.json", "-o", "page.html").status == 0
    assert Path("page.html").is_symlink() and Path("there/page.html").read_text().startswith("<!")
    assert call("report", "--plan-only", "plan.json", "-o", "/dev/null").status == 0
    Path("lost.html").symlink_to("absent/page.html")
    ended = call("report", "--plan-only", "plan.json", "-o", "lost.html")
    assert ended.status == 2 and "existing folder" in ended.err
