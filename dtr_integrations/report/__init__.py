"""What a reader sees: terminal tables and plots, made from values of `core`.

| to show | use |
|---|---|
| who holds the memory at the peak | `breakdown_table` |
| prediction against measurement, per rank | `peaks_table` |
| the reserve, modelled and measured | `reserve_table` |
| slowdown, predicted and measured | `slowdown_table`, from a `paired_ratio` |
| memory over one step | `plot_step` (needs the extra `plot`) |
| a whole session | `session_text` |
| what `verify` found | `verify_table`, `verify_text` |
| any of the tables as plain text | `to_text` |
"""

from __future__ import annotations

from .pairs import PairedRatio, paired_ratio
from .plots import plot_step
from .session import session_text
from .tables import (
    breakdown_rows,
    breakdown_table,
    peaks_table,
    reserve_table,
    slowdown_table,
    to_text,
    worst_per_rank,
)
from .verdict import verify_table, verify_text

__all__ = [
    "PairedRatio",
    "breakdown_rows",
    "breakdown_table",
    "paired_ratio",
    "peaks_table",
    "plot_step",
    "reserve_table",
    "session_text",
    "slowdown_table",
    "to_text",
    "verify_table",
    "verify_text",
    "worst_per_rank",
]
