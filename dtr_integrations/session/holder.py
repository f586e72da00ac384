"""What every front door that holds a session lets users read."""

from __future__ import annotations

from typing import Any

from ..core.peak import PeakReport
from ..core.plan import Plan
from ..online import OnlineReport


class SessionHolder:
    """`session` is the run's `BudgetSession`; None before training starts."""

    session: Any = None

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first training step, or when nothing could be planned."""
        return self.session.plan if self.session is not None else None

    @property
    def online(self) -> tuple[OnlineReport, ...]:
        """What the online runtime did so far, module by module (`fallback="dtr"`)."""
        return self.session.online if self.session is not None else ()

    @property
    def reports(self) -> list[PeakReport]:
        """One `PeakReport` for each measured optimizer step."""
        return self.session.reports if self.session is not None else []
