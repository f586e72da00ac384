"""A whole session as text: `BudgetSession.report`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..core.peak import PeakReport
from .tables import breakdown_table, online_table, peaks_table, reserve_table, slowdown_table, to_text

if TYPE_CHECKING:
    from ..online import OnlineReport
    from ..pipeline import Planned

__all__ = ["session_text"]


def session_text(
    planned: Planned | None, reports: Sequence[PeakReport] = (), online: Sequence[OnlineReport] = ()
) -> str:
    """The plan's breakdown beside the default's, its slowdown, how it was found, the measured peaks, and what
    the online runtime did."""
    if planned is None:
        if online:
            return _what_ran_online(online)
        return "nothing is planned yet: the first training call plans\n"
    plan, default = planned.plan, planned.captured.default
    if plan.is_default:  # the default beside itself would say nothing
        parts = [to_text(breakdown_table(plan))]
    else:
        parts = [to_text(breakdown_table(plan, default)), to_text(slowdown_table(plan))]
    parts.append(_how_it_was_found(planned))
    if reports:
        parts.append(to_text(peaks_table(reports)))
        reserve = reserve_table(plan, reports)
        if reserve is not None:
            parts.append(to_text(reserve))
    if online:
        parts.append(_what_ran_online(online))
    return "\n".join(parts)


def _what_ran_online(online: Sequence[OnlineReport]) -> str:
    whys = [f"{report.module or 'the model'}: {report.why}" for report in online]
    return "\n".join([to_text(online_table(online)), *whys]) + "\n"


def _how_it_was_found(planned: Planned) -> str:
    plan = planned.plan
    if not plan.schedule:
        lines = ["Nothing is compiled: the whole step runs under the online runtime."]
    elif plan.is_default:
        lines = ["The budget does not bind: these are the default compile's own graphs."]
    else:
        saved = sum(len(schedule.saved) for schedule in plan.schedule)
        recomputed = sum(len(schedule.recompute) for schedule in plan.schedule)
        lines = [
            f"{saved} values saved, {recomputed} recomputations, {planned.rounds} plans certified by dry run."
        ]
    dynamic_bytes = plan.predicted_allocated_bytes - plan.static_bytes
    if plan.simulated_bytes is not None and dynamic_bytes > 0 and not plan.is_default:
        off = (plan.simulated_bytes - plan.predicted_allocated_bytes) / dynamic_bytes
        lines.append(
            f"The search tier thought {off:+.2%} of this plan's dynamic bytes; the dry run corrected that."
        )
    if planned.seconds:
        laps = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in planned.seconds.items())
        lines.append(f"Planning took: {laps}.")
    return "\n".join([*lines, *plan.notes]) + "\n"
