"""The Dockerfile, as far as a machine without a Docker engine can tell: its text, its files, its wheel."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
TORCH = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)[1]


def instructions() -> list[tuple[str, str]]:
    """(INSTRUCTION, its arguments) in order, continued lines put together."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]  # type: ignore[misc]


def of(kind: str) -> list[str]:
    return [arguments for name, arguments in instructions() if name == kind]


def sources(copy: str) -> list[str]:
    """What a COPY takes from the build's context."""
    words = shlex.split(copy)
    if any(word.startswith("--from=") for word in words):
        return []
    return [word for word in words if not word.startswith("--")][:-1]


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets a file of the context through: the last pattern that fits decides."""
    sent = True
    parents = [str(p) for p in (Path(path), *Path(path).parents) if str(p) != "."]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        bare = pattern.removeprefix("!")
        names = [bare, bare.removeprefix("**/")] if bare.startswith("**/") else [bare]
        if any(fnmatch(p, n) or fnmatch(Path(p).name, n) for p in parents for n in names):
            sent = pattern.startswith("!")
    return sent


def test_the_base_is_the_pinned_official_one() -> None:
    (base,) = (value for name, value in (a.split("=", 1) for a in of("ARG")) if name == "BASE")
    assert re.fullmatch(rf"pytorch/pytorch:{re.escape(TORCH)}-cuda[\d.]+-cudnn\d+-runtime", base)
    stages = [stage.split() for stage in of("FROM")]
    assert [stage[0] for stage in stages] == ["${BASE}", "${BASE}"]
    assert stages[0][1:] == ["AS", "wheel"]
    assert any("--from=wheel" in copy for copy in of("COPY"))


def test_it_does_not_run_as_root() -> None:
    names = [name for name, _ in instructions()]
    assert re.fullmatch(r"[1-9]\d*", of("USER")[-1])
    after = names[len(names) - 1 - names[::-1].index("USER") :]
    assert "CMD" in after
    assert not {"RUN", "FROM"} & set(after)
    assert f"--uid {of('USER')[-1]} " in " ".join(of("RUN"))


@pytest.mark.parametrize("copy", of("COPY"))
def test_whatever_is_copied_is_there_and_sent(copy: str) -> None:
    for source in sources(copy):
        assert (ROOT / source).exists()
        assert is_sent(source)
        below = (ROOT / source).rglob("*.py") if (ROOT / source).is_dir() else ()
        for path in below:
            assert is_sent(str(path.relative_to(ROOT)))


@pytest.mark.parametrize(
    "path", [".venv/bin/python", "tests/conftest.py", ".git/HEAD", "runs/demo/memory.svg"]
)
def test_nothing_else_is_sent(path: str) -> None:
    assert not is_sent(path)
    assert not is_sent("dtr_integrations/__pycache__/api.cpython-312.pyc")


def test_by_default_a_recipe_is_launched() -> None:
    (command,) = of("CMD")
    words = json.loads(command)
    assert words[:3] == ["accelerate", "launch", "--config"]
    copied = {source for copy in of("COPY") for source in sources(copy)}
    for path in words[3:]:
        assert (ROOT / path).is_file()
        assert Path(path).parts[0] in copied


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed (it is for Linux on x86-64)")
def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run(
        [str(HADOLINT), "--no-color", str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stdout


def test_its_steps_build_a_wheel_of_the_whole_package(tmp_path: Path) -> None:
    """The first stage, but for what it installs: its COPYs, then its `pip wheel`."""
    stage = instructions()[: [name for name, _ in instructions()].index("FROM", 2)]
    for name, arguments in stage:
        for source in sources(arguments) if name == "COPY" else ():
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / source)
            else:
                shutil.copy(ROOT / source, tmp_path)
    (command,) = (arguments for name, arguments in stage if name == "RUN" and "pip wheel" in arguments)
    assert {"--no-deps", "--no-build-isolation"} <= set(command.split())
    wheels = tmp_path / "wheels"
    command = command.replace("/wheels", shlex.quote(str(wheels)))
    command = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", command)
    done = subprocess.run(["sh", "-ec", command], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = wheels.glob("dtr_integrations-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (points,) = (name for name in names if name.endswith("/entry_points.txt"))
        text = archive.read(points).decode()
    package = ROOT / "dtr_integrations"
    assert {str(path.relative_to(ROOT)) for path in package.rglob("*.py")} <= names
    assert "dtr_integrations/py.typed" in names
    assert re.search(r"\[torch\.backends\]\s+dtr = dtr_integrations\._autoload:autoload", text)
    assert "dtr = dtr_integrations.cli:main" in text


@pytest.mark.slow
def test_the_recipe_trains_under_a_budget_of_the_yaml(tmp_path: Path) -> None:
    """The default command with the config and the sizes of a small machine."""
    pytest.importorskip("accelerate")
    pytest.importorskip("lightning")
    (command,) = (json.loads(arguments) for arguments in of("CMD"))
    command[3] = str(ROOT / "configs" / "cpu-2proc.yaml")
    command[4] = str(ROOT / command[4])
    sizes = ["--layers", "1", "--width", "64", "--sequence", "64", "--batch", "4", "--steps", "3"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        [*command, *sizes], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1: " in done.stdout
    for rank in range(2):
        lines = (tmp_path / "runs" / "cpu-2proc" / f"peaks-rank{rank}.jsonl").read_text().splitlines()
        reports = [json.loads(line) for line in lines]
        assert reports
        assert all(r["peak_allocated_bytes"] <= r["budget_bytes"] == 2_000_000_000 for r in reports)
