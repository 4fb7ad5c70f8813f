"""What setup.cfg installs: every package (an editable install would hide a forgotten one), and no top-level name but soapjax."""

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

from soapjax.strategy.plan import Plan

ROOT = Path(__file__).parent.parent
ELSEWHERE = {"soapjax.models": "models", "soapjax.topologies": "topologies"}  # packages that lie beside soapjax/
TINY = ["--topology", "cpu8", "--planner", "data_parallel"]


def setup_cfg():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def test_setup_cfg_lists_every_package():
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "soapjax").rglob("*.py")}
    assert sorted(setup_cfg()["options"]["packages"].split()) == sorted(found | ELSEWHERE.keys())


def test_packages_that_lie_elsewhere():
    lines = setup_cfg()["options"]["package_dir"].strip().splitlines()
    assert dict(line.split(" = ") for line in lines) == ELSEWHERE
    assert {p.parent for p in (ROOT / "models").rglob("*.py")} == {ROOT / "models"}


def test_setup_cfg_ships_every_topology():
    assert setup_cfg()["options.package_data"]["soapjax.topologies"] == "*.toml"
    assert {p.suffix for p in (ROOT / "topologies").iterdir() if not p.name.startswith("__")} == {".toml"}


def test_setup_cfg_ships_the_page():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["options.package_data"]["soapjax.report"] == "page/*"
    assert {p.name for p in (ROOT / "soapjax" / "report" / "page").iterdir()} == {"page.html", "page.css", "page.js"}


def test_mypy_looks_at_every_module():
    assert [name for name in setup_cfg().sections() if name.startswith("mypy-")] == []


def run(arguments, *, path, cwd):
    """A Python process that finds soapjax in `path`, before any installed one."""
    env = os.environ | {"PYTHONPATH": str(path)}
    ended = subprocess.run([sys.executable, *map(str, arguments)], env=env, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what an installed wheel has."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("installed")
    build = ["build", "--build-base", folder / "base", "--build-lib", folder / "lib"]
    run(["-c", "import setuptools; setuptools.setup()", "egg_info", "--egg-base", folder, *build], path="", cwd=ROOT)
    return folder / "lib"


@pytest.fixture
def users_folder(tmp_path):
    """A project with a package `models` of its own, as most have."""
    own = tmp_path / "models"
    own.mkdir()
    (own / "__init__.py").touch()
    (own / "own.py").write_text((ROOT / "models" / "mlp.py").read_text().replace("from .", "from soapjax.models."))
    return tmp_path


# One process, since most of its time goes into importing jax.
COMMANDS = f"""
import sys
import soapjax
from soapjax import cli
for argv in (
    ["plan", "soapjax.models.mlp", *{TINY}, "-o", "shipped.json"],
    ["plan", "models.own", *{TINY}, "-o", "own.json"], ["simulate", "own.json"],
):
    try:
        cli.main(argv)
    except SystemExit as e:
        assert not e.code, argv
print("from", soapjax.__file__, sys.modules["soapjax.models"].__file__, sys.modules["models"].__file__)
"""


def test_an_installed_soapjax_lives_beside_the_users_own_models(installed, users_folder):
    assert [p.name for p in installed.iterdir()] == ["soapjax"]
    assert (installed / "soapjax" / "topologies" / "cpu8.toml").is_file()
    printed = run(["-c", COMMANDS], path=installed, cwd=users_folder)
    package = installed / "soapjax"
    found = [package / "__init__.py", package / "models" / "__init__.py", users_folder / "models" / "__init__.py"]
    assert printed.splitlines()[-1].split() == ["from", *map(str, found)]
    plans = [Plan.load(users_folder / name) for name in ("shipped.json", "own.json")]
    assert [p.model.path for p in plans] == ["soapjax.models.mlp", "models.own"]
    assert plans[0].graph.fingerprint == plans[1].graph.fingerprint


@pytest.mark.slow
def test_a_checkout_on_the_path_has_them_too(users_folder):
    printed = run(["-c", COMMANDS], path=ROOT, cwd=users_folder)
    found = [ROOT / "soapjax" / "__init__.py", ROOT / "models" / "__init__.py", users_folder / "models" / "__init__.py"]
    assert printed.splitlines()[-1].split() == ["from", *map(str, found)]
