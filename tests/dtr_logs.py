"""Operator logs for the tests: the paper's authors' (read where they lie, never copied), and random ones."""

from __future__ import annotations

import json
import os
import random
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from dtr_integrations.dtr.oplog import Call, Constant, Copy, CopyFrom, Instruction, Mutate, Release, parse_log
from dtr_integrations.dtr.program import Program, resolve

AUTHORS = Path(__file__).resolve().parents[2] / "shared" / "data" / "simrd"


def authors_data() -> Path:
    """The folder of the authors' logs; a test without it is skipped, or fails where CI is set."""
    if not AUTHORS.is_dir():
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(f"{AUTHORS} is missing, and continuous integration must have it")
        pytest.skip(f"{AUTHORS} is missing")
    return AUTHORS


@cache
def golden() -> list[tuple[str, str, dict[str, Any]]]:
    """(model, prefix of the log's name, cell) for every golden cell; empty without the data."""
    if not AUTHORS.is_dir():
        return []
    models = json.loads((AUTHORS / "golden.json").read_text())["models"]
    return [(model, row["log_prefix"], cell) for model, row in models.items() for cell in row["cells"]]


@cache
def authors_program(prefix: str) -> Program:
    """One of the authors' logs."""
    with zipfile.ZipFile(authors_data() / "logs.zip") as archive:
        (name,) = [name for name in archive.namelist() if name.startswith(f"logs/{prefix}")]
        return resolve(parse_log(archive.read(name).decode().splitlines()))


def random_log(seed: int) -> list[Instruction]:
    """A small log with views, several outputs, mutation, second names, releases and repeated arguments."""
    rng = random.Random(seed)
    log: list[Instruction] = [Constant("c0", rng.randint(0, 8)), Constant("c1", rng.randint(1, 8))]
    live = ["c0", "c1"]
    made = 0
    for _ in range(rng.randint(1, 30)):
        kind = rng.choice("cccccmrrryf") if live else "c"
        if kind == "c":
            args = rng.choices(live, k=rng.randint(0, 3)) if live else []
            results = [f"t{made + i}" for i in range(rng.randint(1, 3))]
            made += len(results)
            sizes = [rng.randint(0, 8) for _ in results]
            aliases = [rng.randrange(-1, len(args)) if rng.random() < 0.3 else -1 for _ in results]
            log.append(Call("op", args, results, sizes, aliases, rng.randint(0, 9)))
            live += results
        elif kind == "m":
            args = rng.sample(live, k=min(len(live), rng.randint(1, 3)))
            log.append(Mutate("op_", args, [rng.randrange(len(args))], rng.randint(1, 9)))
        elif kind == "r":
            log.append(Release(live.pop(rng.randrange(len(live)))))
        elif kind == "y":
            log.append(Copy(f"t{made}", rng.choice(live)))
            live.append(f"t{made}")
            made += 1
        else:
            log.append(CopyFrom(rng.choice(live), rng.choice(live)))
    rng.shuffle(live)
    log += [Release(name) for name in live[: rng.randint(0, len(live))]]
    return log


def logs() -> st.SearchStrategy[list[Instruction]]:
    """Random logs. Drawn from one seed each: drawn choice by choice they take longer than what they test."""
    return st.integers(0, 10**9).map(random_log)
