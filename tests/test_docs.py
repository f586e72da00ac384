"""Every code block of the pages in `docs/doors`, and of others that are named here, runs as it stands there.

A block that begins with `# NAME` is a file of that name. The other Python blocks of a page are one program,
and shell blocks run where the files are.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

for needed in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(needed)

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs" / "doors").glob("*.md")), ROOT / "docs" / "reserve.md"]
QUICK = ("fabric", "reserve")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"# ([\w.-]+\.\w+)\n")


def run(directory: Path, *command: str) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, id=p.stem, marks=() if p.stem in QUICK else pytest.mark.slow) for p in PAGES],
)
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    blocks = BLOCK.findall(page.read_text())
    assert blocks
    programs, commands = [], []
    for language, code in blocks:
        name = NAME.match(code)
        if name:
            (tmp_path / name[1]).write_text(code)
            if language == "sh":  # for a scheduler that is not here
                run(tmp_path, "bash", "-n", name[1])
        elif language == "python":
            programs.append(code)
        else:
            assert language == "sh", f"a block of {language!r}"
            commands.append(code)
        if language == "yaml":
            yaml.safe_load(code)
    if programs:
        (tmp_path / "page.py").write_text("\n".join(programs))
        run(tmp_path, sys.executable, "page.py")
    for command in commands:
        run(tmp_path, "bash", "-e", "-c", command)


def test_every_door_has_a_page() -> None:
    assert {page.stem for page in PAGES} >= {
        "accelerate", "fabric", "lightning", "own-loop", "torchrun-and-slurm", "trainer",
    }  # fmt: skip
