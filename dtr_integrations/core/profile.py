"""What the dry run of a whole step saw: the exact peak, who held it, region by region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from .ledger import Lifetime

# The kind of what an online runtime may evict: saved by autograd within a module that it runs.
ONLINE = "online values"
# Values that a replay has to hold at once: what it reads, what comes in between, what it makes.
_TO_REPLAY = 3


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
    """One optimizer step in the steady state. `timeline` is the live bytes after each birth or death.

    `lifetimes`: every storage of the step; only where an online runtime is to evict some of them (kind
    `ONLINE`). `whole_peak_bytes`: the peak if it evicts nothing; 0 where that is `peak_bytes`.
    """

    peak_bytes: int
    static_bytes: int
    breakdown: dict[str, int]
    regions: tuple[RegionProfile, ...]
    timeline: tuple[int, ...]
    lifetimes: tuple[Lifetime, ...] = ()
    whole_peak_bytes: int = 0

    def holding(self, share: float) -> StepProfile:
        """The step in which an online runtime holds `share` (0 to 1) of what it may evict at any time, but no
        less than it takes to compute one value again."""
        if share >= 1 or not self.lifetimes:
            return self
        online = [life for life in self.lifetimes if life.kind == ONLINE]
        least_bytes = _TO_REPLAY * max((life.size_bytes for life in online), default=0)
        whole = _curve(online, len(self.timeline))
        kept = [max(int(share * level), min(level, least_bytes)) for level in whole]
        levels = [live - level + part for live, level, part in zip(self.timeline, whole, kept, strict=True)]
        moment = levels.index(max(levels))
        held: dict[str, int] = {}
        for life in self.lifetimes:
            if life.birth <= moment and (life.death < 0 or life.death > moment):
                held[life.kind] = held.get(life.kind, 0) + life.size_bytes
        if ONLINE in held:
            held[ONLINE] = kept[moment]
        return replace(
            self,
            peak_bytes=levels[moment],
            breakdown=held,
            regions=tuple(_region_on(levels, region) for region in self.regions),
            timeline=tuple(levels),
            whole_peak_bytes=self.peak_bytes,
        )

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


def _curve(lifetimes: Sequence[Lifetime], length: int) -> list[int]:
    """Their bytes after each event."""
    steps = [0] * length
    for life in lifetimes:
        steps[life.birth] += life.size_bytes
        if life.death >= 0:
            steps[life.death] -= life.size_bytes
    return list(accumulate(steps))


def _region_on(levels: list[int], region: RegionProfile) -> RegionProfile:
    """The region on another timeline."""
    inside = levels[max(region.start - 1, 0) : region.end]
    if not inside:
        return region
    return replace(region, entry_bytes=inside[0], exit_bytes=inside[-1], peak_bytes=max(inside))
