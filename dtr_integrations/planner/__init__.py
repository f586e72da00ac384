"""Search: from a captured step to the Pareto set of plans. `search(problem) -> Frontier`.

One algorithm a file: `greedy` (the second seed's), `blocks` (whole-block starts), `baselines` (what torch
would save), `mincut` (minimum cuts at every price of a byte), `local` (descent by excess, adding back,
swapping, tabu search); `state` is the incremental simulator that scores them all, `archive` the Pareto set.
`relaxation` is the same model as linear rows: `bound` gets lower bounds from them, `exact` the optimum of
small graphs. No randomness: the same problem gives the same frontier.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..core.schedule import default_schedules
from . import baselines, blocks, greedy, local, mincut
from .archive import Archive, Entry, Frontier, FrontierPoint
from .infeasible import holders
from .problem import Problem, SaveSets
from .state import StepState

__all__ = ["Frontier", "FrontierPoint", "Problem", "holders", "search"]

_LEVELS = 12  # targets between the lowest peak and the default's at which the local search is run
_POLISH = 6  # swaps tried at the focus
_EFFORT = 2000  # moves tried there to escape from the best that the rest found, at most,
_EFFORT_OPS = 600_000  # and times the ops of the step: a move's price goes with these


def search(problem: Problem) -> Frontier:
    """The Pareto set of (peak, slowdown) for one step.

    The default is always the last point, with its exact peak and slowdown 1. Raises ValueError when a graph
    needs a value in its backward that can neither be saved nor recomputed.
    """
    step = problem.step
    archive = Archive()
    if step.graphs:
        state = StepState(
            step, problem.correction, [g.default_saved for g in step.graphs], policy=problem.policy
        )
        _explore(problem, state, archive)
    return _frontier(problem, archive)


def _explore(problem: Problem, state: StepState, archive: Archive) -> None:
    _add(state, archive, (*baselines.starts(problem), *blocks.starts(problem)))
    state.assign([g.default_saved for g in problem.step.graphs])
    greedy.descend(state, archive)
    for _ in range(2):
        if (low := archive.lowest) is not None:
            state.assign(low.saved)
            greedy.descend(state, archive)
    targets = _targets(problem, archive)
    for target in targets:
        _improve_at(state, archive, target)
    known = {target: archive.around(target) for target in targets}
    # Only now: these must not keep the others from being improved.
    _add(state, archive, mincut.starts(problem))
    for target in targets:
        if archive.around(target) != known[target]:
            _improve_at(state, archive, target)
    if problem.focus_bytes in targets:
        _focus(state, archive, problem.focus_bytes)


def _add(state: StepState, archive: Archive, starts: Iterable[SaveSets]) -> None:
    for saved in starts:
        state.assign(saved)
        archive.add(state)


def _focus(state: StepState, archive: Archive, target: int) -> None:
    """Where the budget lies: swaps, and tabu searches from the best known plan and from the next one over."""
    if (entry := archive.at(target)) is not None:
        state.assign(entry.saved)
        local.polish(state, archive, target, tries=_POLISH)
    ops = sum(len(graph.graph.ops) for graph in state.graphs)
    for entry in archive.around(target):
        state.assign(entry.saved)
        local.escape(state, archive, target, effort=min(_EFFORT, _EFFORT_OPS // ops))
    if (entry := archive.at(target)) is not None:
        state.assign(entry.saved)
        local.fill(state, archive, target)


def _targets(problem: Problem, archive: Archive) -> list[int]:
    low = archive.lowest
    if low is None:
        return []
    span = problem.step.default_peak_bytes - low.peak_bytes
    levels = {low.peak_bytes + span * k // _LEVELS for k in range(_LEVELS)}
    if problem.focus_bytes is not None and problem.focus_bytes < problem.step.default_peak_bytes:
        levels.add(problem.focus_bytes)
    return sorted(levels)


def _improve_at(state: StepState, archive: Archive, target: int) -> None:
    """Fill from the best known plan under the target, and descend to it from the best known plan above."""
    if (entry := archive.at(target)) is not None:
        state.assign(entry.saved)
        local.fill(state, archive, target)
    above = next((e for e in archive.entries if e.peak_bytes > target), None)
    if above is not None:
        state.assign(above.saved)
        if local.descend(state, archive, target):
            local.fill(state, archive, target)


def _frontier(problem: Problem, archive: Archive) -> Frontier:
    step = problem.step
    default = FrontierPoint(
        peak_bytes=step.default_peak_bytes, slowdown=1.0, schedules=default_schedules(step.graphs)
    )
    points: list[FrontierPoint] = []
    for entry in archive.entries:  # ascending peak, descending time
        if entry.peak_bytes >= step.default_peak_bytes:
            break
        points.append(_point(problem, entry))
        if points[-1].slowdown <= 1.0:
            break  # whatever follows is no faster for this purpose
    points.append(default)
    lowest = points[0]
    return Frontier(
        points=tuple(points), holders=holders(step, lowest.schedules, correction=problem.correction)
    )


def _point(problem: Problem, entry: Entry) -> FrontierPoint:
    from ..core.schedule import schedule_for

    step = problem.step
    default_ms = step.cost_ms
    return FrontierPoint(
        peak_bytes=entry.peak_bytes,
        slowdown=max(1.0, entry.cost_ms / default_ms) if default_ms else 1.0,
        schedules=tuple(schedule_for(g, s) for g, s in zip(step.graphs, entry.saved, strict=True)),
    )
