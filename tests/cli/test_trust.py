"""What a plan from a stranger can do: nothing. The step comes from the user, and only from a module of the user's own."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from command_line import call, done, plan_text, step_of

from soapjax import Plan
from soapjax.errors import SoapjaxError
from soapjax.steps.factories import find_factory
from soapjax.steps.sourced_models import model_source, setting_pairs

TRAP = """
from pathlib import Path
Path("trapped").write_text("imported")
from os.path import join as imported_name
def make(**settings):
    Path("trapped").write_text("called")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder with a module that leaves a trace when it is imported or called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "trap.py").write_text(TRAP)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text(TRAP)
    (tmp_path / "pack" / "inner.py").write_text("")
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("trap", "pack", "library", "own", "leaves"):
            del sys.modules[name]


def hostile(path, settings=(), file="plan.json"):
    data = json.loads(plan_text())
    data["model"] = {"path": path, "settings": dict(settings)}
    Path(file).write_text(json.dumps(data))
    return file


def nothing_happened():
    return not Path("trapped").exists() and not Path("owned").exists()


STRANGERS = {
    "trap": {},
    "trap:make": {"a": 1},
    "pack.inner": {},
    "pack.inner:make": {},
    "numpy:save": {"file": "owned", "arr": 1},
    "soapjax.helpers.files:write_text_atomic": {"path": "owned", "text": "x"},
    "soapjax.distributed:leave": {"status": 0},
    "os:system": {"command": "touch owned"},
    "builtins:exec": {"object": "open('owned', 'w')"},
    "pathlib:Path": {},
}


def test_commands_need_nothing_that_a_plan_names():
    hostile("trap:make", STRANGERS["trap:make"])
    for argv in (["simulate"], ["explain"], ["explain", "--plan-only"], ["diff", "plan.json"], ["report", "-o", "page.html"]):
        assert call(argv[0], "plan.json", *argv[1:]).status == 0, argv
    assert nothing_happened() and "trap" not in sys.modules


@pytest.mark.parametrize("path", STRANGERS)
def test_commands_that_need_a_step_say_what_to_type(path):
    hostile(path, STRANGERS[path])
    for command in ("run", "verify"):
        ended = call(command, "plan.json")
        assert ended.status == 2 and ended.out == "" and f"--model {path}" in ended.err and "--trust" in ended.err
    assert nothing_happened() and not {"trap", "pack"} & set(sys.modules)


REFUSED = {
    "numpy:save": "installed package that declares factories",
    "soapjax.helpers.files:write_text_atomic": "installed package that declares factories",
    "soapjax.distributed:leave": "installed package that declares factories",
    "os:system": "installed package that declares factories",
    "builtins:exec": "a module of the standard library",
    "trap:imported_name": "written in trap itself",
    "trap:Path": "written in trap itself",
    "soapjax.models.mlp:get_dtype": "written in soapjax.models.mlp itself",
    "soapjax.modelsx:make": "No module named 'soapjax.modelsx'",
    "pack.absent:make": "No module named 'pack.absent'",
}


@pytest.mark.parametrize("trust", [True, False])
@pytest.mark.parametrize("path", REFUSED)
def test_only_functions_of_ones_own_modules_make_steps(path, trust):
    hostile(path, STRANGERS.get(path, {}))
    own = ["--trust"] if trust else ["--model", path]
    for command in ("simulate", "verify"):
        ended = call(command, "plan.json", *own)
        assert ended.status == 2 and REFUSED[path] in ended.err and "Traceback" not in ended.err, ended.err
    assert not Path("owned").exists()
    if "pack" in path:
        assert nothing_happened(), "not even a package above it is imported"


def test_what_to_type_is_printed_and_works():
    Path("plan.json").write_text(plan_text())
    for command in ("run", "verify"):
        ended = call(command, "plan.json", *(["--steps", 2] if command == "run" else []))
        assert ended.status == 2 and ended.err.count("\n") == 1
        line = ended.err.split("type: ")[1].split(" (--trust")[0]
        words = shlex.split(line)
        assert words[:3] == ["soapjax", command, "plan.json"] and ("--steps" in words) == (command == "run")
        assert call(*words[1:]).status == 0, line
    assert done("verify", "plan.json", "--trust")["proven"]


@pytest.mark.parametrize(
    "settings",
    [{"a": "$(touch owned); 'x' \"y\""}, {"a": "1", "b": 1, "c": 1.5, "d": True, "e": "true", "f": "", "g": "null", "h": "a=b c"}],
)
def test_settings_survive_the_shell(settings):
    hostile("trap", settings)
    line = call("run", "plan.json").err.split("type: ")[1].split(" (--trust")[0]
    words = shlex.split(line)
    pairs = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    assert pairs == setting_pairs(settings)
    read = model_source("trap", pairs).settings
    assert read == settings and [type(v) for v in read.values()] == [type(v) for v in settings.values()]


BAD_SOURCES = [
    {"path": "../evil"}, {"path": "a/b"}, {"path": "a.b:c.d"}, {"path": "a:b:c"}, {"path": ""}, {"path": ".mlp"}, {"path": "a..b"},
    {"path": "a b"}, {"path": "a\nb"}, {"path": "a\n"}, {"path": "x" * 300}, {"path": 3}, {"path": "trap", "settings": {"a": [1]}},
    {"path": "trap", "settings": {"a": {"b": 1}}}, {"path": "trap", "settings": {"a": None}},
    {"path": "trap", "settings": {"a": "\x1b[31m"}}, {"path": "trap", "settings": {"a": "x" * 300}},
    {"path": "trap", "settings": {"a b": 1}}, {"path": "trap", "settings": {"--trust": 1}}, {"path": "trap", "settings": [1]},
    {"path": "trap", "settings": {f"a{i}": 1 for i in range(101)}}, {"path": "trap", "code": "1"},
]  # fmt: skip


@pytest.mark.parametrize("source", BAD_SOURCES, ids=lambda s: str(s)[:40])
def test_what_a_plan_says_of_its_step_is_checked_where_it_is_read(source):
    data = json.loads(plan_text())
    data["model"] = source
    with pytest.raises(SoapjaxError) as error:
        Plan.loads(json.dumps(data))
    assert all(p.place.startswith("plan: model") for p in error.value.problems)


@pytest.mark.parametrize(
    "options, says",
    [
        (["--trust", "--model", "trap"], "one of them"),
        (["--set", "a=1"], "settings of --model"),
        (["--model", "../trap"], "package.module:factory"),
        (["--model", "trap", "--set", "a=[1]"], "a finite number, true, false or a word"),
    ],
)
def test_options_that_contradict_each_other_import_nothing(options, says):
    hostile("trap")
    for command in ("simulate", "run", "verify"):
        ended = call(command, "plan.json", *options)
        assert ended.status == 2 and says in ended.err
    assert nothing_happened()


def test_trust_needs_a_name():
    data = json.loads(plan_text())
    data["model"] = None
    Path("plan.json").write_text(json.dumps(data))
    for command in ("run", "verify"):
        assert "give the step with --model" in call(command, "plan.json", "--trust").err


def installed(folder, *, declares=None):
    """A library where an installer would put it, under the working folder as environments often are."""
    place = folder / "venv" / "lib" / "site-packages"
    place.mkdir(parents=True)
    (place / "library.py").write_text(TRAP)
    info = place / "library-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: library\nVersion: 1.0\n")
    if declares:
        (info / "entry_points.txt").write_text(f"[soapjax.models]\nany = {declares}\n")
    sys.path.append(str(place))


@pytest.mark.parametrize("declares", [None, "libra", "library.inner", "numpy"])
def test_an_installed_package_that_declares_nothing_is_not_imported(declares, folder):
    installed(folder, declares=declares)
    with pytest.raises(SoapjaxError, match="declares factories"):
        find_factory("library")
    assert nothing_happened() and "library" not in sys.modules


def test_an_installed_package_that_declares_factories_has_them(folder):
    installed(folder, declares="library")
    assert find_factory("library").__module__ == "library"


def test_what_lies_in_the_working_folder_declares_nothing_for_others(folder):
    installed(folder)
    (folder / "evil-1.0.dist-info").mkdir()
    (folder / "evil-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (folder / "evil-1.0.dist-info" / "entry_points.txt").write_text("[soapjax.models]\nany = library\n")
    with pytest.raises(SoapjaxError, match="declares factories"):
        find_factory("library")


def test_a_link_out_of_the_working_folder_is_no_module_of_it(folder, tmp_path_factory):
    away = tmp_path_factory.mktemp("away")
    (away / "linked.py").write_text(TRAP)
    os.symlink(away / "linked.py", folder / "linked.py")
    with pytest.raises(SoapjaxError, match="under the working folder"):
        find_factory("linked")
    assert nothing_happened()


def test_decorated_functions_are_factories():
    Path("own.py").write_text("import functools\n@functools.lru_cache\ndef make():\n    return 1\n")
    assert find_factory("own")() == 1


LEAVES = """
import sys
import jax.numpy as jnp
def make(*, batch=8):
    def step(state, batch):
        sys.exit(0)
    return step, {"w": jnp.ones((8, 8))}, jnp.ones((batch, 8))
"""
NOTHING = """
import jax.numpy as jnp
def make():
    return lambda state, batch: (state + batch.sum(), {}), jnp.zeros((), jnp.int32), jnp.ones((8,), jnp.int32)
"""


def test_verify_does_not_end_with_0_without_a_proof():
    Path("leaves.py").write_text(LEAVES)
    Path("plan.json").write_text(plan_text())
    for command in ("run", "verify", "simulate"):
        ended = call(command, "plan.json", "--model", "leaves")
        assert ended.status == 2 and "SystemExit" in ended.err
    Path("own.py").write_text(NOTHING)
    assert call("plan", "own", "--topology", "cpu8", "--planner", "data_parallel", "-o", "nothing.json").status == 0
    ended = call("verify", "nothing.json", *step_of("nothing.json"))
    assert ended.status == 1 and "nothing to compare" in ended.out and "NOT proven" in ended.out
