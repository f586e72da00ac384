"""What the recipes share for the terminal: one console, progress lines of planning, and quiet third
parties."""

from __future__ import annotations

import logging
import os
import platform
import sys
import warnings

import torch
from rich import get_console
from rich.console import Console
from rich.logging import RichHandler


def terminal() -> Console:
    """The console on which everything appears: Lightning draws its progress bar there, planning reports
    there."""
    if not sys.stdout.isatty():
        # A log file: no squeezed tables. Set in the environment, since Lightning makes the console anew.
        os.environ.setdefault("COLUMNS", "110")
    console = get_console()
    handler = RichHandler(console=console, show_path=False, show_level=False, log_time_format="[%X]")
    for name in ("dtr_integrations", "lightning.pytorch"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    # Of what Lightning logs at this level (devices, tips), only the lines about planning.
    handler.addFilter(lambda record: record.name == "dtr_integrations" or "AutoCheckpoint" in record.msg)
    # Advice about loader workers and accelerators, which a demo on a CPU does not follow.
    for advice in (
        ".*does not have many workers",
        "GPU available but not used",
        ".*LeafSpec.* is deprecated",
    ):
        warnings.filterwarnings("ignore", advice)
    return console


def machine() -> str:
    """One line on what this ran on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    python = platform.python_version()
    return f"{cores} cores, CPU ({platform.machine()}), Python {python}, torch {torch.__version__}"
