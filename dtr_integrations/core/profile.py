"""What the dry run of a whole step saw: the exact peak, who held it, region by region."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionProfile:
    """One region: `kind` as in `graph.RegionKind`; `graph` and `call` are −1 for an eager one.

    `entry_bytes`, `exit_bytes` and `peak_bytes` count everything that is alive; `saved_bytes` is what calls
    that are open at entry hold for their backward (each storage once, static memory and the batch not
    counted).
    """

    kind: str
    graph: int
    call: int
    entry_bytes: int
    exit_bytes: int
    peak_bytes: int
    saved_bytes: int
    start: int  # on the timeline
    end: int
    closes: bool = True  # False: a backward after which another one of the same call runs

    @property
    def rise_bytes(self) -> int:
        """How far the live bytes rose above those at entry."""
        return self.peak_bytes - self.entry_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """One optimizer step in the steady state. `timeline` is the live bytes after each birth or death."""

    peak_bytes: int
    static_bytes: int
    breakdown: dict[str, int]
    regions: tuple[RegionProfile, ...]
    timeline: tuple[int, ...]

    def downsampled(self, points: int = 2000) -> tuple[tuple[float, int], ...]:
        """(position in the step from 0 to 1, live bytes): at most about `points` pairs, the highest of each
        stretch kept."""
        n = len(self.timeline)
        width = max(1, n // points)
        out = []
        for start in range(0, n, width):
            chunk = self.timeline[start : start + width]
            out.append((start / max(n - 1, 1), max(chunk)))
        return tuple(out)
