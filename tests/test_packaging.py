from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

import dtr_integrations
from dtr_integrations import _HOMES, _MODULES

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("name", dtr_integrations.__all__)
def test_every_exported_name_is_what_its_home_says(name: str) -> None:
    value = getattr(dtr_integrations, name)
    if name in _HOMES:
        home = importlib.import_module(f"dtr_integrations.{_HOMES[name]}")
        assert value is getattr(home, name)
    assert name in dir(dtr_integrations)


def test_names_stay_what_they_are_once_modules_are_loaded() -> None:
    importlib.import_module("dtr_integrations.core.plan")
    importlib.import_module("dtr_integrations.api")
    assert callable(dtr_integrations.plan)
    assert not set(_HOMES) & {path.stem for path in (ROOT / "dtr_integrations").iterdir()}
    assert not set(_HOMES) & _MODULES


def test_an_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'zzz'"):
        _ = dtr_integrations.zzz
    assert not hasattr(dtr_integrations, "zzz")


def test_the_version_is_said_once() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert importlib.metadata.version("dtr-integrations") == dtr_integrations.__version__


def test_every_requirement_is_pinned() -> None:
    pins = dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    pinned = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    project = PROJECT["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]
    assert {re.split(r"[^A-Za-z0-9-]", requirement)[0] for requirement in wanted} <= pinned
    assert pins["torch"] == "2.13.0"
    assert not any("+" in version for version in pins.values()), "a local version is on no index"


def test_the_makefile_installs_the_pinned_torch() -> None:
    assert "torch==2.13.0" in (ROOT / "Makefile").read_text()
