"""Greedy descent: drop the save with the cheapest recomputation per byte of true peak freed, until none frees
any.

Source: the second seed ("The new activation checkpointing procedure"): from the min-cut saves, derive the new
graphs, their recomputation cost and the change of the global peak for every candidate, remove the best ratio,
repeat. Candidates are evaluated lazily here (as in Minoux 1978, "Accelerated greedy algorithms"): the ratio
of the last round orders them, and one whose fresh ratio is still ahead is taken without looking at the rest.

What it does not do: it never puts a save back, so it stalls where two values must go for the peak to move
(several equal peaks, chains whose recomputation holds what was freed); `blocks` and `local` are there for
that. Being lazy, it may take a candidate that has been overtaken since another's ratio was last looked at.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from .archive import Archive
from .state import StepState

__all__ = ["descend"]


def held(state: StepState) -> Iterator[tuple[int, int]]:
    """(graph, op) of every save that may be dropped."""
    for g, graph in enumerate(state.graphs):
        for i in graph.saved():
            if i not in graph.forced:
                yield g, i


def descend(state: StepState, archive: Archive, *, target_bytes: int = 0) -> None:
    """Drop saves from `state` until the peak is at most `target_bytes` or no drop lowers it; archive every
    step.

    Leaves `state` at the last step.
    """
    peak = state.peak_bytes
    heap = [(-1.0, g, i) for g, i in held(state)]
    while heap and peak > target_bytes:
        chosen = _best(state, heap, peak)
        if chosen is None:
            return
        g, i = chosen
        state.graphs[g].flip(i)
        state.graphs[g].commit()
        peak = state.peak_bytes
        archive.add(state)


def _best(state: StepState, heap: list[tuple[float, int, int]], peak: int) -> tuple[int, int] | None:
    """Pop candidates until one's fresh ratio leads; those that free nothing now go to the back, not away."""
    idle: list[tuple[float, int, int]] = []
    found = None
    while heap:
        _, g, i = heapq.heappop(heap)
        ratio = _ratio(state, g, i, peak)
        if ratio is None:
            idle.append((float("inf"), g, i))
        elif not heap or ratio <= heap[0][0]:
            found = g, i
            break
        else:
            heapq.heappush(heap, (ratio, g, i))
    for item in idle:
        heapq.heappush(heap, item)
    return found


def _ratio(state: StepState, g: int, i: int, peak: int) -> float | None:
    """Added ms per byte of peak freed, or None if dropping frees nothing."""
    graph = state.graphs[g]
    before = state.cost_ms
    mark = graph.mark()
    graph.flip(i)
    freed = peak - state.peak_bytes
    added = state.cost_ms - before
    graph.rollback(mark)
    return added / freed if freed > 0 else None
