"""Several ranks, real processes over gloo: they begin together, or all end with one error."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("rank_cases.py")
SILENT_SECONDS = 6.0


def launch(case: str, *, limit_seconds: float = 240) -> list[dict[str, Any] | int]:
    """What each of two ranks printed, or the code with which it ended. A rank that is left is a hang."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "DTR_RANK_TIMEOUT": str(SILENT_SECONDS),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",  # or nothing is compiled in which a rank could die
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), case, str(rank), "2", str(port)],
            cwd=SCRIPT.parents[1],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [result_of(process, limit_seconds) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.communicate()


def result_of(process: subprocess.Popen[str], limit_seconds: float) -> dict[str, Any] | int:
    until = time.monotonic() + limit_seconds
    while process.poll() is None:
        if is_stopped(process):
            return -signal.SIGSTOP
        assert time.monotonic() < until, "a rank hangs"
        time.sleep(0.1)
    out, err = process.communicate()
    if process.returncode == -signal.SIGKILL:
        return process.returncode
    assert out, err
    return json.loads(out.splitlines()[-1])


def is_stopped(process: subprocess.Popen[str]) -> bool:
    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T"


def test_both_ranks_train_by_one_plan() -> None:
    first, second = launch("none")
    assert first["digest"] == second["digest"]
    assert first["gradients"] == second["gradients"]


@pytest.mark.slow
def test_each_rank_has_its_own_plan_for_its_own_shapes() -> None:
    first, second = launch("shapes")
    assert first["graphs"] != second["graphs"]
    assert first["digest"] != second["digest"]
    assert first["gradients"] == second["gradients"]


@pytest.mark.slow
def test_slow_is_not_dead() -> None:
    """Planning takes longer than a rank may be silent; compiling does on a loaded machine."""
    first, second = launch("slow planning")
    assert first["digest"] == second["digest"]


@pytest.mark.parametrize(
    ("case", "signal_number"),
    [
        ("die planning", signal.SIGKILL),
        pytest.param("stall planning", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("die compiling", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("stall compiling", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_gone_is_the_others_error(case: str, signal_number: int) -> None:
    first, second = launch(case)
    assert second == -signal_number
    assert first["error"] == "RankFailed"
    assert f"rank 1 cannot go on, found while {case.split()[1]}" in first["text"]
    assert f"no sign of life for {SILENT_SECONDS:.0f} s" in first["text"]


def test_a_rank_for_which_no_plan_fits_is_the_others_error() -> None:
    first, second = launch("infeasible")
    assert second["error"] == "BudgetInfeasible"
    assert first["error"] == "RankFailed"
    assert "rank 1 cannot go on, found while planning; no rank trains" in first["text"]
    assert "BudgetInfeasible: no plan fits the budget of 1 KB" in first["text"]


@pytest.mark.slow
def test_a_rank_that_trains_other_parameters_is_an_error_on_all() -> None:
    first, second = launch("another step")
    assert first["error"] == second["error"] == "RankFailed"
    assert first["text"] == second["text"]
    assert "rank 1 cannot go on" in first["text"]
    assert "it trains other parameters than rank 0" in first["text"]
