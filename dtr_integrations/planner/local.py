"""Local search around what other starts found: add saves back, drop, swap, so that no budget lies far from a
good plan.

Source: design of this library (the second seed: "it never backtracks ... something like beam search might be
better"). Descents here follow the *excess*, the bytes above a target summed over the step, instead of the
peak: of two equal peaks the first one lowered counts as progress, so that the descent does not stall where
the greedy does.

What it does not do: it is no exact method (`exact` is), and it moves by single storages (and pairs, in a
swap). Values are recomputed once; a second copy is never tried.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from ..core.graph import OpKind
from .archive import Archive
from .state import StepState

__all__ = ["descend", "escape", "fill", "polish"]

_Move = tuple[int, tuple[int, ...]]  # a graph, and ops of it to save or to drop together
_TENURE = 6  # turns for which a move is not taken back
_REFRESH = 5  # turns after which all moves are looked at again
_SHORT = 16  # moves looked at in between
_PATIENCE = 60  # turns without progress
_PRICE = 0.1  # of the default's time, for all bytes between target and default: the first price of a byte
_DEARER, _CHEAPER = 1.3, 0.8
_MATTERS = 2e-3  # of the same: a move that changes less than that is left to `fill`


def addable(state: StepState) -> Iterator[tuple[int, int]]:
    """(graph, op) of recomputed values that could be saved instead; views are left to what they view."""
    for g, graph in enumerate(state.graphs):
        ops = graph.graph.ops
        for i in graph.recomputed():
            op = ops[i]
            if not op.saveable or op.kind is OpKind.CONSTANT:
                continue
            if op.kind is OpKind.VIEW and (ops[op.inputs[0]].saveable or op.value in graph.graph.static):
                continue
            yield g, i


def droppable(state: StepState) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(graph, ops) of saves that may be dropped, those of one storage together: one alone frees nothing."""
    for g, graph in enumerate(state.graphs):
        by_storage: dict[int, list[int]] = {}
        for i in graph.saved():
            if i not in graph.forced:
                by_storage.setdefault(graph.graph.ops[i].value, []).append(i)
        for group in by_storage.values():
            yield g, tuple(group)


def descend(state: StepState, archive: Archive, target_bytes: int) -> bool:
    """Drop saves until the peak is at most `target_bytes`, by least added ms per byte of excess removed.

    Returns whether the target was reached; `state` is left at the last step.
    """
    heap = [(-1.0, g, group) for g, group in droppable(state)]
    excess = state.excess_bytes(target_bytes)
    while heap and excess:
        idle = []
        found = False
        while heap:
            _, g, group = heapq.heappop(heap)
            graph = state.graphs[g]
            before = state.cost_ms
            mark = graph.mark()
            graph.flip(*group)
            freed = excess - state.excess_bytes(target_bytes)
            ratio = (state.cost_ms - before) / freed if freed > 0 else None
            if ratio is not None and (not heap or ratio <= heap[0][0]):
                graph.commit()
                found = True
                break
            graph.rollback(mark)
            if ratio is None:
                idle.append((float("inf"), g, group))
            else:
                heapq.heappush(heap, (ratio, g, group))
        if not found:
            return False
        for item in idle:
            heapq.heappush(heap, item)
        excess = state.excess_bytes(target_bytes)
        archive.add(state)
    return excess == 0


def fill(state: StepState, archive: Archive, target_bytes: int) -> bool:
    """Add saves back by most ms won per byte held, as long as the peak stays at or under `target_bytes`.

    Returns whether anything was added; every step is archived.
    """
    heap: list[tuple[float, int, int]] = [(float("-inf"), g, i) for g, i in addable(state)]
    changed = False
    while heap:
        _, g, i = heapq.heappop(heap)
        graph = state.graphs[g]
        before = state.cost_ms
        mark = graph.mark()
        graph.flip(i)
        won = before - state.cost_ms
        ratio = -won / (graph.graph.value_bytes(i) + 1)
        leads = not heap or ratio <= heap[0][0]
        if won > 0 and leads and state.peak_bytes <= target_bytes:
            graph.commit()
            archive.add(state)
            changed = True
            continue
        graph.rollback(mark)
        if won > 0 and not leads:
            heapq.heappush(heap, (ratio, g, i))
    return changed


def polish(state: StepState, archive: Archive, target_bytes: int, *, tries: int) -> None:
    """Drop each of `tries` saves with most bytes per ms, fill again, keep what is faster at the target."""
    best = state.cost_ms
    worth = []
    for g, group in droppable(state):
        graph = state.graphs[g]
        before = state.cost_ms
        mark = graph.mark()
        graph.flip(*group)
        worth.append(((state.cost_ms - before) / (graph.graph.value_bytes(group[0]) + 1), g, group))
        graph.rollback(mark)
    for _, g, group in heapq.nsmallest(tries, worth):
        start = state.saved()
        state.graphs[g].flip(*group)
        fill(state, archive, target_bytes)
        if state.peak_bytes <= target_bytes and state.cost_ms < best:
            best = state.cost_ms
        else:
            state.assign(start)


def escape(state: StepState, archive: Archive, target_bytes: int, *, effort: int) -> None:
    """Tabu search at the target (Glover 1989): the best single move, also where it is worse, never straight
    back.

    A byte over the target has a price, which rises while the state is over it and falls while it is not, so
    that the walk crosses the target again and again (strategic oscillation). Every state on the way is
    archived. `effort`: moves tried; most are tried on a short list of what looked best lately.
    """
    span_bytes = state.step.default_peak_bytes - target_bytes
    if span_bytes <= 0:
        return
    price = _PRICE * state.default_ms / span_bytes
    banned: dict[tuple[int, int], int] = {}
    listed: list[_Move] = []
    idle = 0
    for turn in range(effort):
        whole = turn % _REFRESH == 0 or not listed
        if whole:
            listed = [*droppable(state), *((g, (i,)) for g, i in addable(state))]
        peak, cost = state.peak_bytes, state.cost_ms
        scored: list[tuple[float, int, tuple[int, ...]]] = []
        for g, group in listed:
            if any(banned.get((g, i), -1) > turn for i in group):
                continue
            effort -= 1
            mark = state.graphs[g].mark()
            state.graphs[g].flip(*group)
            new_peak, new_cost = state.peak_bytes, state.cost_ms
            state.graphs[g].rollback(mark)
            if (
                abs(new_cost - cost) > _MATTERS * state.default_ms
                or abs(new_peak - peak) > _MATTERS * span_bytes
            ):
                scored.append((new_cost + price * max(0, new_peak - target_bytes), g, group))
        if effort <= 0 or idle > _PATIENCE or (whole and not scored):
            return
        listed = []
        if scored:
            _, g, group = min(scored)
            listed = [(g, group) for _, g, group in heapq.nsmallest(_SHORT + 1, scored)[1:]]
            state.graphs[g].flip(*group)
            state.graphs[g].commit()
            banned.update({(g, i): turn + _TENURE + turn % 5 for i in group})
        before = archive.at(target_bytes)
        archive.add(state)
        idle = 0 if archive.at(target_bytes) is not before else idle + 1
        price *= _DEARER if state.peak_bytes > target_bytes else _CHEAPER
