"""Eager PyTorch under a byte budget, operator by operator: the runtime `DTR`, and the recorder of operator
logs that the simulator runs."""

from __future__ import annotations

from .scope import DTR, Stats
from .step import OnlineReport, OnlineStep

__all__ = ["DTR", "OnlineReport", "OnlineStep", "Stats"]
