"""Whole-block starts: keep only what crosses some cuts of the forward, recompute the rest from there.

Sources: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4 (segments; about √N of
them), and what `torch.utils.checkpoint` around each block does. Where the cuts lie is not read from module
names: they are the places of the forward order where few bytes cross (on a residual network, the residual
stream between two sublayers).

What it does not do: it prices nothing. Every combination that is worth a look is yielded, and the caller
scores them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..core.graph import JointGraph, OpKind, Phase
from .problem import Problem

__all__ = ["Cuts", "block_save_sets", "cut_candidates", "starts"]

# A cut counts as a valley when the crossing bytes rise by this factor on both sides before falling lower.
_PROMINENCES = (1.1, 1.6, 3.0)
_MOST_STEPS = 12  # of a sweep over "the first k blocks": deep networks need not try every k


@dataclass(frozen=True, slots=True)
class Cuts:
    """Places of the forward order, ascending: `after[k]` is an op, `crossing[k]` what must be kept there."""

    after: tuple[int, ...]
    crossing: tuple[tuple[int, ...], ...]


def crossing_bytes(graph: JointGraph) -> list[tuple[int, int]]:
    """(op index, bytes made so far that later forward ops read) for each forward op that computes."""
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    last: dict[int, int] = {}
    for op in forward:
        for i in op.inputs:
            if (storage := graph.ops[i].value) >= 0:
                last[storage] = op.index
    dying: dict[int, int] = {}
    made = {s for op in forward for s in op.storages}
    live = 0
    out = []
    for op in forward:
        for storage in op.storages:
            if storage in last:
                live += graph.storage_bytes[storage]
                dying[last[storage]] = dying.get(last[storage], 0) + graph.storage_bytes[storage]
        live -= dying.pop(op.index, 0)
        if op.kind not in (OpKind.VIEW, OpKind.SYMBOL, OpKind.CONSTANT) and made:
            out.append((op.index, live))
    return out


def _valleys(levels: list[tuple[int, int]], prominence: float) -> list[int]:
    """Op indices of the minima between which the level rises by `prominence`; each one's first place."""
    found: list[int] = []
    low_at, low, high = -1, 0, 0
    falling = False
    for index, level in levels:
        if falling:
            if level < low:
                low_at, low = index, level
            elif level > low * prominence:
                found.append(low_at)
                falling, high = False, level
        elif level > high:
            high = level
        elif level * prominence < high:
            falling, low_at, low = True, index, level
    return found


def _plains(graph: JointGraph, levels: list[tuple[int, int]]) -> list[int]:
    """Op indices for a network without valleys (a chain): low places, one between two library kernels."""
    positive = sorted(level for _, level in levels if level)
    if not positive:
        return []
    low = positive[len(positive) // 4] * 1.05
    found: list[int] = []
    best: tuple[int, int] | None = None
    for index, level in levels:
        if graph.ops[index].kind is OpKind.EXTERN and best is not None:
            found.append(best[1])
            best = None
        if 0 < level <= low and (best is None or level < best[0]):
            best = (level, index)
    return found


def cut_candidates(graph: JointGraph) -> list[Cuts]:
    """Sets of cuts, each once: places between any two library kernels, then valleys from fine to coarse."""
    levels = crossing_bytes(graph)
    found: dict[tuple[int, ...], Cuts] = {}
    for after in (tuple(_plains(graph, levels)), *(tuple(_valleys(levels, p)) for p in _PROMINENCES)):
        if after and after not in found:
            found[after] = Cuts(after, tuple(_crossing(graph, index) for index in after))
    return list(found.values())


def _crossing(graph: JointGraph, after: int) -> tuple[int, ...]:
    """What the forward after op `after` reads of what was made before: enough to go on from there."""
    wanted: set[int] = set()
    for op in graph.ops:
        if op.phase is Phase.FORWARD and op.index > after:
            wanted.update(i for i in op.inputs if i <= after and graph.ops[i].phase is Phase.FORWARD)
    # A view or a constant is had again for nothing from what it views; a number as well.
    return tuple(sorted({_base(graph, i) for i in wanted if graph.ops[i].kind is not OpKind.CONSTANT}))


def _base(graph: JointGraph, index: int) -> int:
    """The value that `index` is a view of, as far as it can be saved in its place."""
    while graph.ops[index].kind is OpKind.VIEW:
        source = graph.ops[index].inputs[0]
        if not graph.ops[source].saveable or graph.ops[source].phase is Phase.INPUT:
            break
        index = source
    return index


def block_save_sets(graph: JointGraph) -> Iterator[tuple[int, ...]]:
    """Save sets: all cuts, every m-th, and the first or last k blocks recomputed beside the default."""
    for cuts in cut_candidates(graph):
        n = len(cuts.after)
        root = max(1, round(n**0.5))
        strides = sorted({1, 2, 3, 4, root, 2 * root, max(1, n // 3), max(1, n // 2)})
        for stride in strides:
            yield _kept(cuts, range(stride - 1, n, stride))
        step = max(1, -(-n // _MOST_STEPS))
        for k in range(0, n, step):
            bound = cuts.after[k]
            late = [i for i in graph.default_saved if i > bound]
            early = [i for i in graph.default_saved if i <= bound]
            for stride in sorted({1, 2, root}):
                yield (*_kept(cuts, range(k, -1, -stride)), *late)
            yield (*early, *_kept(cuts, range(k, n)))


def _kept(cuts: Cuts, which: range) -> tuple[int, ...]:
    return tuple(dict.fromkeys(i for k in which for i in cuts.crossing[k]))


def starts(problem: Problem) -> Iterator[list[tuple[int, ...]]]:
    """Save sets for the whole step: all graphs at once, and each beside the others' default."""
    graphs = problem.step.graphs
    default = [graph.default_saved for graph in graphs]
    sets = [list(dict.fromkeys(block_save_sets(graph))) for graph in graphs]
    if len(graphs) > 1:
        for k in range(max(map(len, sets), default=0)):
            yield [own[min(k, len(own) - 1)] if own else default[g] for g, own in enumerate(sets)]
    for g, own in enumerate(sets):
        for saved in own:
            yield [*default[:g], saved, *default[g + 1 :]]
