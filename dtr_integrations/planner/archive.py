"""The Pareto set of what a search has seen, and the frontier that it hands out."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from ..core.plan import GraphSchedule
from .state import StepState

__all__ = ["Archive", "Entry", "Frontier", "FrontierPoint"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One state of the search: peak in bytes, modelled time in ms, save set of each graph."""

    peak_bytes: int
    cost_ms: float
    saved: tuple[tuple[int, ...], ...]


class Archive:
    """States of which none is both lower and faster than another, by ascending peak."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._peaks: list[int] = []

    def add(self, state: StepState) -> bool:
        """Remember the state unless a known one is as low and as fast. Returns whether it was new."""
        peak_bytes, cost_ms = state.peak_bytes, state.cost_ms
        best = self.at(peak_bytes)
        if best is not None and best.cost_ms <= cost_ms:
            return False
        self._insert(Entry(peak_bytes, cost_ms, state.saved()))
        return True

    def _insert(self, entry: Entry) -> None:
        start = bisect_left(self._peaks, entry.peak_bytes)
        stop = start
        while stop < len(self.entries) and self.entries[stop].cost_ms >= entry.cost_ms:
            stop += 1
        self.entries[start:stop] = [entry]
        self._peaks[start:stop] = [entry.peak_bytes]

    def at(self, peak_bytes: int) -> Entry | None:
        """The fastest state at or under `peak_bytes`."""
        index = bisect_right(self._peaks, peak_bytes)
        return self.entries[index - 1] if index else None

    def around(self, peak_bytes: int) -> tuple[Entry, ...]:
        """The fastest state at or under `peak_bytes` and the lowest one over it, as far as they are known."""
        index = bisect_right(self._peaks, peak_bytes)
        return tuple(self.entries[max(index - 1, 0) : index + 1])

    @property
    def lowest(self) -> Entry | None:
        """The state with the lowest peak."""
        return self.entries[0] if self.entries else None


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """One plan on the frontier.

    `peak_bytes` is simulated and corrected (exact for the default), static memory included. `slowdown` is
    modelled time over the default's; a plan that models faster than the default counts as 1, because the
    default stays the last point. `slowdown_lower_bound`: no schedule that the search could have chosen is
    faster at this peak (`bound.with_bounds`); None when no bound was computed.
    """

    peak_bytes: int
    slowdown: float
    schedules: tuple[GraphSchedule, ...]
    slowdown_lower_bound: float | None = None

    @property
    def is_default(self) -> bool:
        """Whether this is torch's own partition."""
        return all(schedule.default for schedule in self.schedules)


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The Pareto set of (peak, slowdown): ascending peak, descending slowdown; the default is the last point.

    `holders` names what is held at the lowest point's peak: (name, bytes), largest first.
    """

    points: tuple[FrontierPoint, ...]
    holders: tuple[tuple[str, int], ...] = ()

    @property
    def default(self) -> FrontierPoint:
        """torch's own partition: its exact peak, slowdown 1."""
        return self.points[-1]

    @property
    def lowest(self) -> FrontierPoint:
        """The plan with the lowest peak that was found."""
        return self.points[0]

    def at(self, budget_bytes: int) -> FrontierPoint | None:
        """The fastest plan whose peak is at most `budget_bytes`; None if there is none.

        A budget that the default meets gives the default.
        """
        if budget_bytes >= self.default.peak_bytes:
            return self.default
        index = bisect_right([point.peak_bytes for point in self.points], budget_bytes)
        return self.points[index - 1] if index else None
