"""What importing the package costs, and what it needs. Each test looks from a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

HEAVY = [
    "torch",
    "numpy",
    "omegaconf",
    "yaml",
    "rich",
    "lightning",
    "pytorch_lightning",
    "scipy",
    "matplotlib",
]

BLOCKED = """
import importlib.abc, pkgutil, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCK:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run(source: str, *block: str) -> str:
    prelude = f"BLOCK = {set(block)!r}\n{BLOCKED}\n" if block else ""
    done = subprocess.run(
        [sys.executable, "-c", prelude + source], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = run(f"import sys, dtr_integrations; print([m for m in {HEAVY!r} if m in sys.modules])")
    assert loaded.strip() == "[]"


def test_importing_the_package_is_quick() -> None:
    source = "import time; t = time.perf_counter(); import dtr_integrations; print(time.perf_counter() - t)"
    assert min(float(run(source)) for _ in range(5)) < 0.3  # the best of five: the machine may be busy


def test_errors_units_and_config_need_no_torch() -> None:
    run("import dtr_integrations.errors, dtr_integrations.units", *HEAVY)
    run(
        "from dtr_integrations import BudgetInfeasible, DTRConfig, parse_bytes\n"
        "assert DTRConfig.from_any(budget='70GB').budget == '70GB'",
        "torch",
        "numpy",
        "lightning",
    )


def test_core_planner_and_dtr_need_no_torch() -> None:
    modules = run(
        """
import importlib
for package in ("core", "planner", "dtr"):
    top = importlib.import_module(f"dtr_integrations.{package}")
    for info in pkgutil.walk_packages(top.__path__, top.__name__ + "."):
        importlib.import_module(info.name)
        print(info.name)
assert "torch" not in sys.modules
import dtr_integrations
dtr_integrations.Plan
""",
        "torch",
        "omegaconf",
        "rich",
        "lightning",
        "pytorch_lightning",
        "matplotlib",
    )
    for package in ("core", "planner", "dtr"):
        assert f"dtr_integrations.{package}." in modules


def test_a_front_door_without_its_framework_names_the_extra() -> None:
    run(
        """
import dtr_integrations
for ask in (
    lambda: dtr_integrations.AutoCheckpoint,
    lambda: dtr_integrations.lightning,
):
    try:
        ask()
    except ImportError as error:
        assert "pip install 'dtr-integrations[lightning]'" in str(error), error
    else:
        raise AssertionError("no error")
""",
        "lightning",
        "pytorch_lightning",
    )
