"""What the recipes share for the terminal: one console, progress lines of planning, and quiet third
parties."""

from __future__ import annotations

import logging
import os
import platform
import warnings

import torch
from rich import get_console
from rich.console import Console
from rich.logging import RichHandler


def terminal() -> Console:
    """The console on which everything appears: planning reports there, Lightning draws its progress bar
    there."""
    console = get_console()
    if not console.is_terminal:
        console.width = max(console.width, 110)  # a log file: tables should not be squeezed into 80 columns
    handler = RichHandler(console=console, show_path=False, show_level=False, log_time_format="[%X]")
    planning = logging.getLogger("dtr_integrations")
    planning.addHandler(handler)
    planning.setLevel(logging.INFO)
    planning.propagate = False
    # Advice about loader workers and accelerators, which a demo on a CPU does not follow.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
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
