"""setup.cfg names every package one by one; this keeps it from forgetting one, which an editable install would hide."""

import configparser
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_setup_cfg_lists_every_package():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = config["options"]["packages"].split()
    found = {".".join(p.parent.relative_to(ROOT).parts) for top in ("soapjax", "models") for p in (ROOT / top).rglob("*.py")}
    assert sorted(listed) == sorted(found | {"soapjax.topologies"})


def test_setup_cfg_ships_every_topology():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["options"]["package_dir"].split() == ["soapjax.topologies", "=", "topologies"]
    assert config["options.package_data"]["soapjax.topologies"] == "*.toml"
    assert {p.suffix for p in (ROOT / "topologies").iterdir() if not p.name.startswith("__")} == {".toml"}


def test_setup_cfg_ships_the_page():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["options.package_data"]["soapjax.report"] == "page/*"
    assert {p.name for p in (ROOT / "soapjax" / "report" / "page").iterdir()} == {"page.html", "page.css", "page.js"}
