"""What `verify` found, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from .tables import _table, to_text

if TYPE_CHECKING:
    from ..gate import VerifyReport, VerifyRow

__all__ = ["verify_table", "verify_text"]

_SHOWN = 12


def verify_table(report: VerifyReport, *, most: int = _SHOWN, title: str | None = None) -> Table:
    """The worst `most` rows: relative difference in norm against what is allowed, by name."""
    table = _table(
        title or f"Planned training, compared: worst of {len(report.rows)} values in {report.steps} steps",
        "",
        "what",
        "against",
        "step",
        "difference",
        "allowed",
        "",
        words=[0, 1, 2, 6],
    )
    for row in report.rows[:most]:
        table.add_row(
            "ok" if row.ok else "WRONG",
            _what(row),
            row.against,
            str(row.step),
            _number(row.error),
            _number(row.allowed),
            row.note,
            style="" if row.ok else "bold red",
        )
    return table


def verify_text(report: VerifyReport, *, most: int = _SHOWN) -> str:
    """The table, the tolerance with its reason, and the verdict."""
    wrong = [row for row in report.rows if not row.ok]
    lines = [
        f"Differences are ‖a − b‖ / ‖b‖ per tensor. {report.dtype} is the coarsest dtype; rounding in "
        f"another order explains {report.tolerance:.1e},",
        "and more where eager training itself moves more when its parameters move by one rounding.",
        *(f"Note: {note}." for note in report.notes),
        "The plan changes nothing: every value is in order."
        if report.ok
        else f"NOT the same training: {len(wrong)} of {len(report.rows)} values are out of order.",
    ]
    shown = max(most, min(len(wrong), 2 * most))
    return to_text(verify_table(report, most=shown), width=160) + "\n" + "\n".join(lines) + "\n"


def _what(row: VerifyRow) -> str:
    return f"{row.kind} {row.name}".strip()


def _number(value: float) -> str:
    return "0" if not value else f"{value:.1e}"
