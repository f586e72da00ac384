"""A step's regions as the phases that a reader knows, and two curves of one step on one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.profile import RegionProfile, StepProfile

__all__ = ["Phase", "aligned", "phases"]

Curve = tuple[tuple[float, int], ...]

_POINTS = 2000
# Most happens in forward and backward; the optimizer repeats itself once per parameter.
_WIDTHS = {"forward": 4.0, "loss": 1.0, "backward": 5.0, "optimizer": 1.5}


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A stretch of the step: `forward`, `loss`, `backward` or `optimizer`; bounds in events of the
    timeline, or 0 to 1."""

    name: str
    start: float
    end: float


def phases(profile: StepProfile) -> tuple[Phase, ...]:
    """The phases of a step in order, without gaps. With accumulation, forward, loss and backward come
    several times.

    What is eager takes its name from where it stands: before or among forwards `forward`, between forward
    and backward `loss`, among backwards `backward`, after the last `optimizer`. A step without a compiled
    graph is one `step`.
    """
    last = len(profile.timeline) - 1
    regions = profile.regions
    compiled = [index for index, region in enumerate(regions) if region.kind != "eager"]
    if not compiled:
        return (Phase(name="step", start=0, end=last),)
    found: list[Phase] = []
    for index, region in enumerate(regions):
        name = _name(regions, index)
        start = found[-1].end if found else 0
        if found and found[-1].name == name:
            start = found.pop().start
        found.append(Phase(name=name, start=start, end=region.end))
    tail = found.pop()
    return (*found, Phase(name=tail.name, start=tail.start, end=last))


def aligned(default: StepProfile, planned: StepProfile) -> tuple[tuple[Phase, ...], Curve, Curve]:
    """Both curves with the phases at the same places: (phases from 0 to 1, the default's points, the plan's
    points).

    A plan's backward has more events than the default's, and the optimizer may have most of all, so that
    equal positions would mean different things. Each phase has a width of its own (`_WIDTHS`, not time),
    and within it the events follow one another. Where the default's phases are others, its curve simply
    goes from 0 to 1.
    """
    ours, theirs = phases(planned), phases(default)
    widths = [_WIDTHS.get(phase.name, 1.0) for phase in ours]
    edges = [sum(widths[:i]) / sum(widths) for i in range(len(widths) + 1)]
    bands = tuple(Phase(name=p.name, start=edges[i], end=edges[i + 1]) for i, p in enumerate(ours))
    if [p.name for p in ours] == [p.name for p in theirs]:
        return bands, _curve(default, theirs, bands), _curve(planned, ours, bands)
    whole = Phase(name="step", start=0, end=theirs[-1].end), Phase(name="step", start=0, end=1)
    return bands, _curve(default, whole[:1], whole[1:]), _curve(planned, ours, bands)


def _name(regions: Sequence[RegionProfile], index: int) -> str:
    if regions[index].kind != "eager":
        return regions[index].kind
    before = next((r.kind for r in reversed(regions[:index]) if r.kind != "eager"), None)
    after = next((r.kind for r in regions[index:] if r.kind != "eager"), None)
    if before is None:
        return after or "step"
    if after is None:
        return "optimizer" if before == "backward" else before
    if before == after:
        return before
    # Between two micro-batches (backward, then forward) the eager stretch belongs to the next forward.
    return "loss" if before == "forward" else "forward"


def _curve(profile: StepProfile, own: Sequence[Phase], shared: Sequence[Phase]) -> Curve:
    """The timeline, phase by phase from `own` bounds (events) to `shared` ones; the highest of each stretch
    is kept."""
    stretch = max(1, len(profile.timeline) // _POINTS)
    points: list[tuple[float, int]] = []
    for mine, band in zip(own, shared, strict=True):
        width = mine.end - mine.start
        for start in range(int(mine.start), int(mine.end) + 1, stretch):
            chunk = profile.timeline[start : min(start + stretch, int(mine.end) + 1)]
            at = band.start + (band.end - band.start) * ((start - mine.start) / width if width else 0)
            points.append((at, max(chunk)))
    return tuple(points)
