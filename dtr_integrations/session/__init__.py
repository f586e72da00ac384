"""One run under a budget, from the first training call to the last.

`lifecycle` plans before the first real forward and keeps to the budget afterwards, `decisions` says what each
graph saves, `peaks` measures steps, `notices` is what a user is told.
"""

from __future__ import annotations

from .holder import SessionHolder
from .lifecycle import BudgetSession, read_plan
from .notices import shown

__all__ = ["BudgetSession", "SessionHolder", "read_plan", "shown"]
