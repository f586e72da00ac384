"""The gate: proof, by running it, that a planned step computes what the unplanned one does.

`check` trains a few steps on twins of the real objects, planned, by torch's default compile and eagerly, and
compares everything that a step leaves behind (`run`). What counts as equal is in `compare`.
"""

from __future__ import annotations

from .check import check
from .compare import VerifyReport, VerifyRow

__all__ = ["VerifyReport", "VerifyRow", "check"]
