"""Which torch versions are taken: an untested one with one warning, one that lacks something not at all."""

from __future__ import annotations

import ast
import importlib
import operator
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dtr_integrations import _compat

PACKAGE = Path(_compat.__file__).parent

USE = """
import dtr_integrations, torch
model, x = torch.nn.Linear(4, 4), torch.randn(8, 4)
try:
    plan = dtr_integrations.plan(model, x, budget="1GB", progress=False)
    with dtr_integrations.auto_checkpoint(model, budget="1GB"):
        pass
    print("planned", plan.is_default)
except ImportError as error:
    print(type(error).__name__, error)
"""


def run(source: str, where: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source], cwd=where, capture_output=True, text=True, timeout=600, check=True
    )


def test_the_version_here_is_a_tested_one() -> None:
    assert _compat.torch.__version__.startswith(tuple(f"{v}." for v in _compat.TESTED))


def test_an_untested_version_that_has_everything_is_taken_with_one_warning(tmp_path: Path) -> None:
    copy = tmp_path / "dtr_integrations"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / "_compat.py").read_text()
    changed = re.sub(r"^TESTED = .*$", 'TESTED = ("1.0",)', text, flags=re.MULTILINE)
    assert changed != text
    (copy / "_compat.py").write_text(changed)
    done = run(USE, tmp_path)
    assert done.stdout.startswith("planned True")
    assert done.stderr.count("PlanWarning") == 1
    assert f"torch {_compat.torch.__version__} is untested" in done.stderr
    assert "(tested: 1.0)" in done.stderr


@pytest.mark.parametrize(
    ("remove", "names"),
    [
        (
            "from torch._functorch import partitioners; del partitioners.raise_getitems",
            "torch._functorch.partitioners.raise_getitems",
        ),
        (
            "import torch._inductor.graph as g; del g.GraphLowering.codegen_with_cpp_wrapper",
            "torch._inductor.graph.GraphLowering.codegen_with_cpp_wrapper",
        ),
    ],
)
def test_a_version_that_lacks_something_is_refused_with_its_name(remove: str, names: str) -> None:
    done = run(f"import torch; {remove}\n{USE}", PACKAGE.parent)
    assert done.stdout.startswith("UnsupportedTorch torch ")
    assert f"lacks what this package is built on: {names}. " in done.stdout
    assert f"Tested versions: {', '.join(_compat.TESTED)}; install one of them" in done.stdout
    assert "Traceback" not in done.stderr


def test_what_is_used_of_torchs_partitioners_is_what_is_probed() -> None:
    text = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    used = {a or b for a, b in re.findall(r"\bpartitioners(?:\.(\w+)|, \"(\w+)\")", text)}
    used -= {"py", "is_opaque_node"}  # a file's name, and a name that is used where it exists
    assert used == set(_compat._NEEDED["torch._functorch.partitioners"])


def test_private_modules_of_torch_are_probed() -> None:
    """Whoever imports or patches one outside of `_compat` has it in the list."""
    probed = {f"{module}.{name}" for module, names in _compat._NEEDED.items() for name in names}
    modules = _compat._NEEDED.keys() - {"torch._dynamo"}  # which holds the others
    private = re.compile(r"torch(?:\.\w+)*\.(?:_dynamo|_inductor|_functorch|_subclasses)[\w.]*")
    for path in PACKAGE.rglob("*.py"):
        code = ast.parse(path.read_text())
        imported = {n.module for n in ast.walk(code) if isinstance(n, ast.ImportFrom) and n.module}
        imported |= {ast.unparse(n) for n in ast.walk(code) if isinstance(n, ast.Attribute)}
        for name in filter(private.fullmatch, imported):
            known = name in probed or any(f"{name}.".startswith(f"{module}.") for module in modules)
            known = known or any(f"{module}.".startswith(f"{name}.") for module in modules)
            assert known, f"{path.name} uses {name}"


def test_the_probe_finds_its_names() -> None:
    for module, names in _compat._NEEDED.items():
        for name in names:
            operator.attrgetter(name)(importlib.import_module(module))
