"""Tables for the terminal: pure functions from values to rich renderables; `to_text` makes plain text of any.

One table has one unit, MB (10⁶ bytes) or, from 10 GB on, GB (10⁹ bytes), and its columns add up.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from ..core.peak import PeakReport
from ..core.plan import Plan
from ..core.profile import StepProfile
from .pairs import PairedRatio

if TYPE_CHECKING:
    from ..online import OnlineReport

__all__ = [
    "BreakdownRow",
    "breakdown_rows",
    "breakdown_table",
    "online_table",
    "peaks_table",
    "reserve_table",
    "slowdown_table",
    "to_text",
    "worst_per_rank",
]

# Kind in a breakdown -> the word for a reader. Kinds that are not named here follow under their own name.
_KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "buffers": "buffers",
    "batch": "batch",
    "saved activations": "saved activations",
    "transient": "transients",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakdownRow:
    """One line of the breakdown, in bytes. `default_bytes` is None where no default was given."""

    name: str
    planned_bytes: int
    default_bytes: int | None = None
    is_total: bool = False


def breakdown_rows(plan: Plan, default: StepProfile | None = None) -> tuple[BreakdownRow, ...]:
    """Who holds the memory at the peak, then the totals: allocated, reserve, required, budget, left.

    The rows above `allocated` add up to it in each column: what a breakdown leaves out stands as
    `unattributed`. `allocated` is `plan.predicted_allocated_bytes`, `required` is `plan.required_bytes`.
    The default needs the same reserve. `left` is negative when the budget is exceeded.
    """
    held = dict(plan.breakdown)
    beside = None if default is None else dict(default.breakdown)
    kinds = list(dict.fromkeys([*_KINDS, *held, *(beside or ())]))

    def row(name: str, planned: int, other: int | None, is_total: bool = False) -> BreakdownRow:
        other = None if default is None else other
        return BreakdownRow(name=name, planned_bytes=planned, default_bytes=other, is_total=is_total)

    rows = [
        row(_KINDS.get(k, k), held.get(k, 0), None if beside is None else beside.get(k, 0)) for k in kinds
    ]
    allocated = plan.predicted_allocated_bytes
    other = 0 if default is None else default.peak_bytes
    gaps = allocated - sum(held.values()), other - sum((beside or {}).values())
    if any(gaps):
        rows.append(row("unattributed", *gaps))
    rows.append(row("allocated", allocated, other, True))
    lines = {name: size for name, size in plan.reserve.items() if size}
    if len(lines) > 1 and sum(lines.values()) == plan.reserve_bytes:
        rows += [row(f"reserve: {name}", size, size) for name, size in lines.items()]
    else:
        rows.append(row("reserve", plan.reserve_bytes, plan.reserve_bytes))
    required, budget = plan.required_bytes, plan.budget_bytes
    rows.append(row("required", required, other + plan.reserve_bytes, True))
    rows.append(row("budget", budget, budget, True))
    rows.append(row("left", budget - required, budget - other - plan.reserve_bytes, True))
    return tuple(rows)


def breakdown_table(plan: Plan, default: StepProfile | None = None, *, title: str | None = None) -> Table:
    """`breakdown_rows` as a table, with each row's share of the budget. Each column is at its own peak."""
    rows = breakdown_rows(plan, default)
    unit, factor = _unit([plan.required_bytes])
    columns = ["held by", f"planned {unit}", "of budget"]
    if default is not None:
        columns += [f"default {unit}", "of budget"]
    table = _table(title or "Memory at the peak of one step, predicted", *columns, words=[0])
    table.caption, table.caption_justify = f"1 {unit} = {factor:,} bytes", "left"
    for row, after in zip(rows, (*rows[1:], None), strict=True):
        cells = [row.name, *_amount_and_share(row.planned_bytes, plan.budget_bytes, factor)]
        if row.default_bytes is not None:
            cells += _amount_and_share(row.default_bytes, plan.budget_bytes, factor)
        table.add_row(
            *cells,
            style="bold" if row.is_total else "",
            end_section=after is not None and after.name in ("allocated", "budget"),
        )
    return table


def reserve_table(plan: Plan, reports: Sequence[PeakReport]) -> Table | None:
    """The lines of the reserve beside what the measured steps took besides the predicted bytes, the most of
    each.

    Context and NCCL are measured as one. None where nothing of it was measured: on CPU, or before a step was.
    """
    measured: dict[str, int] = {}
    for report in reports:
        for name, size in report.beside_prediction.items():
            measured[name] = max(size, measured.get(name, 0))
    if not measured:
        return None
    unit, factor = _unit([plan.reserve_bytes, *measured.values()])
    table = _table("Reserve", "line", f"in the plan {unit}", f"measured {unit}", words=[0])
    for name in dict.fromkeys([*plan.reserve, *measured]):
        cells = (_amount(sizes.get(name), factor) for sizes in (plan.reserve, measured))
        table.add_row(name, *cells)
    total = _amount(sum(measured.values()), factor)
    table.add_section()
    table.add_row("all", _amount(plan.reserve_bytes, factor), total, style="bold")
    return table


def worst_per_rank(reports: Iterable[PeakReport]) -> tuple[PeakReport, ...]:
    """Of each rank the report of the step that took the largest share of the budget, by rank."""
    worst: dict[int, PeakReport] = {}
    for report in reports:
        if report.rank not in worst or _share(report) > _share(worst[report.rank]):
            worst[report.rank] = report
    return tuple(worst[rank] for rank in sorted(worst))


def online_table(reports: Sequence[OnlineReport]) -> Table:
    """What the online runtime did so far, one row a module."""
    table = _table(
        "Modules under the online runtime", "module", "evictions", "rematerialisations", "added s", words=[0]
    )
    for report in reports:
        table.add_row(
            report.module or "(the model)",
            str(report.evictions),
            str(report.rematerialisations),
            f"{report.added_seconds:.3f}",
        )
    return table


def peaks_table(reports: Sequence[PeakReport], *, title: str | None = None) -> Table:
    """Prediction against measurement, one row a rank: its highest measured step. `worst` marks the fullest
    rank.

    The error is of the dynamic part: |predicted − measured| / (measured − static). A dash: not known there.
    """
    rows = worst_per_rank(reports)
    unit, factor = _unit(report.used_bytes for report in rows)
    columns = (
        "rank",
        "step",
        "predicted",
        "allocated",
        "error",
        "reserved",
        "non-torch",
        "budget",
        "used",
        "",
    )
    table = _table(
        title or f"Predicted and measured peak, {unit} (highest of {len(reports)} measured steps)",
        *columns,
        words=[9],
    )
    fullest = max(rows, key=_share) if rows else None
    for report in rows:
        error = report.prediction_error
        mark = "over budget" if not report.within_budget else ""
        if report is fullest and len(rows) > 1:
            mark = f"worst, {mark}" if mark else "worst"
        table.add_row(
            str(report.rank),
            str(report.step),
            _amount(report.predicted_allocated_bytes, factor),
            _amount(report.peak_allocated_bytes, factor),
            "–" if error is None else f"{error:.3%}",
            _amount(report.peak_reserved_bytes, factor),
            _amount(report.non_torch_bytes, factor),
            _amount(report.budget_bytes, factor),
            f"{_share(report):.1%}",
            mark,
            style="bold red" if not report.within_budget else "",
        )
    return table


def slowdown_table(plan: Plan, measured: PairedRatio | None = None, *, title: str | None = None) -> Table:
    """The slowdown against the default compile, predicted and measured: ratios, ×1.04 = 4 % more time."""
    table = _table(title or "Slowdown against the default compile", "", "ratio", "", words=[0, 2])
    table.add_row("predicted", f"×{plan.slowdown:.3f}", "from the cost model, before step 1")
    if plan.slowdown_lower_bound is not None:
        gap = plan.slowdown / plan.slowdown_lower_bound - 1.0
        table.add_row(
            "lower bound", f"×{plan.slowdown_lower_bound:.3f}", f"the plan is at most {gap:.1%} from optimal"
        )
    if measured is not None:
        span = f"×{measured.low:.3f} to ×{measured.high:.3f}"
        level = "95 % interval" if measured.coverage else "range"
        table.add_row("measured", f"×{measured.ratio:.3f}", f"{level} {span}, {measured.pairs} paired steps")
        table.add_row(
            "", "", f"median step {measured.base_ms:.0f} ms default, {measured.other_ms:.0f} ms planned"
        )
    return table


def to_text(*renderables: RenderableType, width: int = 110) -> str:
    """The renderables as plain text, without colours, `width` characters wide at most."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, highlight=False)
    for renderable in renderables:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _table(title: str, *columns: str, words: Iterable[int] = ()) -> Table:
    """An empty table; the columns numbered in `words` hold words, the others numbers."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    left = set(words)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number in left else "right", no_wrap=True)
    return table


def _unit(sizes: Iterable[int]) -> tuple[str, int]:
    return ("GB", 10**9) if max(map(abs, sizes), default=0) >= 10**10 else ("MB", 10**6)


def _amount(size: int | None, factor: int) -> str:
    return "–" if size is None else f"{size / factor:,.2f}"


def _amount_and_share(size: int, whole: int, factor: int) -> list[str]:
    return [_amount(size, factor), f"{size / whole:.1%}" if whole else "–"]


def _share(report: PeakReport) -> float:
    return report.used_bytes / report.budget_bytes
