"""`dtr launch`: the explicit form of `accelerate launch --config dtr.yaml`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtr_integrations._autoload import CONFIG, SWITCH
from dtr_integrations.cli import main

pytest.importorskip("accelerate")

ON_CPU = "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\nmain_process_port: 0\n"
SCRIPT = """
import json, os, sys
from dtr_integrations.config import DTRConfig
config = DTRConfig.from_any(os.environ["DTR_CONFIG_FILE"])
place = [int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))]
seen = [*place, config.budget, config.targets, sys.argv[1:]]
with open(f"seen{seen[0]}.json", "w") as file:
    json.dump(seen, file)
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a command line says does not outlive its test."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.chdir(tmp_path)


def launched(*arguments: str) -> list[list[object]]:
    """What the script saw on each rank."""
    Path("train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "dtr_integrations.cli", "launch", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return [json.loads(path.read_text()) for path in sorted(Path().glob("seen*.json"))]


def test_ranks_get_the_yamls_section_and_the_command_lines_budget() -> None:
    Path("dtr.yaml").write_text(f"dtr:\n  budget: 70GB\n  targets: [encoder]\n{ON_CPU}")
    expected = [[rank, 2, "3GB", ["encoder"], ["--budget", "mine"]] for rank in range(2)]
    assert launched("--budget", "3GB", "--config", "dtr.yaml", "train.py", "--budget", "mine") == expected


def test_a_budget_alone_is_enough() -> None:
    assert launched("--cpu", "--num_processes", "1", "--budget=3GB", "train.py") == [[0, 1, "3GB", None, []]]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("train.py", "no --config is given"),
        ("train.py --budget 3GB", "no --config is given"),
        ("--config plain.yaml train.py", "'plain.yaml' has no section `dtr:`"),
        ("--config missing.yaml train.py", "there is no file 'missing.yaml'"),
        ("--budget 70 train.py", "70"),
        ("--config wrong.yaml train.py", "budgett"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    arguments: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("plain.yaml").write_text(ON_CPU)
    Path("wrong.yaml").write_text(f"dtr:\n  budgett: 70GB\n{ON_CPU}")
    assert main(["launch", *arguments.split()]) == 2
    assert text in capsys.readouterr().err


def test_switched_off_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ[SWITCH] = "0"
    assert main(["launch", "--budget", "3GB", "train.py"]) == 2
    assert "unset it" in capsys.readouterr().err
    assert CONFIG not in os.environ


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--help"], 0), (["launch", "-h"], 0), ([], 2), (["x"], 2)]
)
def test_usage(arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == status
    assert "usage: dtr launch" in "".join(capsys.readouterr())
