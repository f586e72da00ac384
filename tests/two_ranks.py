"""Two ranks of a training over gloo, real processes of one script.

The test calls `launch`; the script (`ddp_cases.py`, `fsdp_cases.py`) gets DOOR RANK WORLD_SIZE PORT and what
else the test gives it, begins with `begin` and ends with `say`.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch


def launch(script: Path, door: str, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    """What each of two ranks said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, script, door, str(rank), "2", str(port), *arguments],
            cwd=script.parents[1],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        results = []
        for process in processes:
            out, err = process.communicate(timeout=280)
            assert process.returncode == 0, err
            results.append(json.loads(out.splitlines()[-1]))
        return results
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def begin(rank: str, world_size: str, port: str) -> None:
    """The environment that a launcher gives to a rank; quietly, and all ranks from the same seed."""
    os.environ |= {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "NODE_RANK": "0",
    }
    logging.getLogger("torch.__trace").disabled = True
    warnings.simplefilter("ignore")
    torch.manual_seed(0)


def say(held: Any, **more: Any) -> None:
    """Print one line of JSON: plan and measured steps of a session, or of what holds one, and `more`."""
    plan, session = held.plan, getattr(held, "session", held)
    result = {
        "static_bytes": plan.static_bytes,
        "default_bytes": plan.default_allocated_bytes,
        "is_default": plan.is_default,
        "digests": [report.plan_digest for report in held.reports],
        "graphs": len(plan.schedule),
        "on_the_spot": len(session._decisions._unknown),
        "breakdown": plan.breakdown,
        "errors": [report.prediction_error for report in held.reports],
        "within": [report.within_budget for report in held.reports],
        "predicted": [report.predicted_allocated_bytes for report in held.reports],
        "measured": [report.peak_allocated_bytes for report in held.reports],
    }
    print(json.dumps(result | more), flush=True)
    torch.distributed.destroy_process_group()
