"""Who holds the peak: what an infeasible budget is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..core.graph import JointGraph, RegionKind, StepGraph
from ..core.plan import GraphSchedule
from ..core.schedule import is_tangent
from ..core.simulate import NO_CORRECTION, Correction, held_at_peak, simulate_step

__all__ = ["holders"]


def holders(
    step: StepGraph,
    schedules: Sequence[GraphSchedule],
    *,
    correction: Correction = NO_CORRECTION,
) -> tuple[tuple[str, int], ...]:
    """(name, bytes) of what is held at the step's peak under `schedules`, largest first.

    Names are module paths, with what holds besides (static memory, other open calls) under a name of its own.
    """
    by_name = {schedule.fingerprint: schedule for schedule in schedules}
    simulation = simulate_step(step, schedules, correction=correction)
    if simulation.peak_region < 0:
        return ()
    region = step.regions[simulation.peak_region]
    level = simulation.levels[simulation.peak_region]
    held: Counter[str] = Counter()
    held["parameters, buffers and optimizer state"] = step.static.static_bytes
    held["the batch"] = step.static.batch_bytes
    rest = region.base_bytes - step.static.static_bytes - step.static.batch_bytes
    own = 0
    if region.kind is RegionKind.EAGER:
        held["the eager part of the step (loss, clipping or optimizer)"] = level.rise_bytes
    else:
        graph = step.graphs[region.graph]
        own = simulation.graphs[region.graph].saved_bytes if region.kind is RegionKind.BACKWARD else 0
        for index, size in held_at_peak(graph, by_name[graph.fingerprint], region.kind):
            held[_name(graph, index)] += size
        if region.kind is RegionKind.BACKWARD:  # incoming gradients are named one by one instead
            incoming = {
                op.value for op in graph.ops if is_tangent(op) and op.value >= 0 and graph.users[op.index]
            }
            rest -= sum(graph.storage_bytes[storage] for storage in incoming)
    held["gradients and values outside compiled modules"] = max(0, rest)
    held["activations that other calls hold for their backward"] = level.entry_bytes - region.base_bytes - own
    return tuple(
        sorted(((name, size) for name, size in held.items() if size > 0), key=lambda h: (-h[1], h[0]))
    )


def _name(graph: JointGraph, index: int) -> str:
    op = graph.ops[index]
    return op.module or op.name
