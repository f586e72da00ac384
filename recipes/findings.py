"""What a run under a budget showed: a picture, and the checks that decide the demo's exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dtr_integrations.report import plot_step
from dtr_integrations.session import BudgetSession
from dtr_integrations.units import format_bytes


def draw(session: BudgetSession, path: Path) -> None:
    """Memory over one step: the default's and the plan's dry runs, the last measured step, the budget."""
    static_bytes = session.reports[-1].static_bytes  # a trace counts what comes on top of it
    plot_step(
        path,
        default=session.planned.captured.default,
        planned=session.planned.profile,
        budget_bytes=session.budget_bytes,
        measured=[(time_ns, size + static_bytes) for time_ns, size in session.trace.timeline],
    )


def all_hold(
    console: Console, session: BudgetSession, free_losses: Sequence[float], bound_losses: Sequence[float]
) -> bool:
    """Print each check with its numbers; True if all hold. The losses are those of the same steps of two
    runs."""
    peak, budget = max(report.used_bytes for report in session.reports), session.budget_bytes
    error = max(report.prediction_error for report in session.reports)
    apart = max(abs(a - b) / abs(a) for a, b in zip(free_losses, bound_losses, strict=True))
    checks = {
        f"measured peak {format_bytes(peak)} is within the budget of {format_bytes(budget)}": peak <= budget,
        f"the prediction is {error:.3%} off, of the dynamic memory; at most 1 % is allowed": error <= 0.01,
        f"both runs have the same losses ({bound_losses[0]:.4f} to {bound_losses[-1]:.4f}) to {apart:.1e}; "
        "at most 1e-05 is allowed": apart <= 1e-5,
    }
    for text, holds in checks.items():
        console.print(f"[green]holds [/] {text}" if holds else f"[red]FAILS [/] {text}", highlight=False)
    return all(checks.values())
