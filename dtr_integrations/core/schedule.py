"""From a save set to an explicit schedule, and from a schedule to the two programs that will run.

A **save set** says which forward values are handed to the backward. A `GraphSchedule` also says when each
other value is computed again. Here every such value is recomputed once, just before the first backward op
that (directly or through other recomputed values) reads it: building early layers up front and holding them
is what makes one-shot recomputation peak (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost",
section 4, recompute a segment only when its backward begins). Schedules that recompute a value several times
are valid too; each reader takes the latest copy that stands before it.

What a save set may hold: activations that are `saveable`, of phase FORWARD, and of phase FREE (torch's
min-cut likes to save a boolean mask that only the backward reads, instead of the activation from which it is
made): a saved FREE value is computed in the forward. FREE values that are not saved are listed in `recompute`
like any other, so that the backward runs exactly the BACKWARD ops and the recompute list. Inputs of the graph
are always at hand and never listed.

`before == len(graph.ops)` stands for the end of the backward (a value that is itself an output of the
backward).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from .graph import JointGraph, Op, Phase
from .plan import GraphSchedule, Recompute

__all__ = [
    "Program",
    "backward_program",
    "default_schedule",
    "default_schedules",
    "faithful_schedule",
    "forward_program",
    "is_tangent",
    "must_save",
    "schedule_for",
    "validate",
]


def is_tangent(op: Op) -> bool:
    """Whether this input is a gradient that comes in from outside at the start of the backward."""
    return op.phase is Phase.INPUT and op.name.startswith("tangents")


def may_run_again(op: Op) -> bool:
    """Whether the phase lets a schedule save or recompute the op at all."""
    return op.phase is Phase.FORWARD or op.phase is Phase.FREE


def must_save(graph: JointGraph) -> frozenset[int]:
    """Ops whose value has to be saved if the backward needs it, because it cannot be had again.

    That is an op that must not run twice, or one that reads such a value which itself cannot be handed over
    (the parts of a tuple that a non-replayable op returns). What reads a value that *can* be saved is free to
    be recomputed.
    """
    lost: set[int] = set()
    for op in graph.ops:
        if may_run_again(op) and (
            not op.replayable or any(i in lost and not graph.ops[i].saveable for i in op.inputs)
        ):
            lost.add(op.index)
    return frozenset(lost)


def schedule_for(graph: JointGraph, saved: Collection[int], *, default: bool = False) -> GraphSchedule:
    """The schedule that saves what is in `saved` and needed, and recomputes the rest just before its first
    reader.

    Args:
        graph: The joint graph.
        saved: Op indices. Values that the backward never reads are dropped; values that may not be recomputed
            are added; inputs are ignored (they are handed over anyway).
        default: Mark the schedule as torch's own partition.

    Raises:
        ValueError: The backward needs a value that can neither be saved nor recomputed.
    """
    end = len(graph.ops)
    keep = must_save(graph).union(saved)
    before = [end + 1] * end  # end + 1: nothing reads it
    for index in graph.backward_outputs:
        before[index] = end
    held: list[int] = []
    again: list[tuple[int, int]] = []
    for op in reversed(graph.ops):
        at = op.index
        if may_run_again(op):
            at = before[op.index]
            if at > end:
                continue
            if op.index in keep:
                if not op.saveable:
                    raise ValueError(
                        f"{_label(op)} is needed in the backward, but can neither be saved nor recomputed"
                    )
                held.append(op.index)
                continue
            again.append((at, op.index))
        elif op.phase is Phase.INPUT:
            continue
        for i in op.inputs:
            before[i] = min(before[i], at)
    return GraphSchedule(
        fingerprint=graph.fingerprint,
        saved=tuple(sorted(held)),
        recompute=tuple(Recompute(value=value, copy=0, before=at) for at, value in sorted(again)),
        default=default,
        draws=graph.draws,
    )


def default_schedule(graph: JointGraph) -> GraphSchedule:
    """torch's own partition as a schedule (`default=True`): its save set, recomputation just in time."""
    return schedule_for(graph, graph.default_saved, default=True)


def default_schedules(graphs: Iterable[JointGraph]) -> tuple[GraphSchedule, ...]:
    """`default_schedule` of each graph."""
    return tuple(default_schedule(graph) for graph in graphs)


def faithful_schedule(graph: JointGraph) -> GraphSchedule:
    """What stands for the default in a plan: torch's own partition, unless that computes wrong numbers.

    Torch's min-cut (2.13) runs ops again that read an input which the forward has overwritten since. Where
    the default does that, this is its save set and the values of those ops, and not `default`.
    """
    schedule = default_schedule(graph)
    run_again = graph.stale.intersection(schedule.saved).difference(graph.default_saved)
    return replace(schedule, default=not run_again)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One direction of a graph as it will run: nodes in execution order.

    Node k is op `ops[k]`; the first `entries` nodes are values that are there already. `reads[k]` are the
    nodes that node k reads, in argument order. `outputs` are the nodes that outlive the program.
    """

    ops: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    entries: int
    outputs: tuple[int, ...]


def forward_program(graph: JointGraph, schedule: GraphSchedule) -> Program:
    """The forward: its own ops in joint order; saved FREE values as soon as what they read is there.

    Outputs are the graph's outputs and the saved values. Raises ValueError when a saved value depends on a
    gradient.
    """
    wanted = set(schedule.saved)
    for op in reversed(graph.ops):
        if op.index in wanted and op.phase is Phase.FREE:
            wanted.update(op.inputs)
    at: dict[int, tuple[int, int]] = {}
    for op in graph.ops:
        if op.phase is Phase.INPUT:
            at[op.index] = (-1, op.index)
        elif op.phase is Phase.FORWARD:
            at[op.index] = (op.index, -1)
        elif op.phase is Phase.FREE and op.index in wanted:
            # Joint order puts such ops among the backward's; the compiler runs them when their inputs are
            # ready.
            at[op.index] = (max((at[i][0] for i in op.inputs), default=-1), op.index)
    order = sorted(at, key=at.__getitem__)
    position = {op: k for k, op in enumerate(order)}
    entries = sum(graph.ops[i].phase is Phase.INPUT for i in order)
    reads = []
    for index in order:
        op = graph.ops[index]
        if missing := [i for i in op.inputs if i not in position]:
            raise ValueError(f"{_label(op)} runs in the forward but reads {_label(graph.ops[missing[0]])}")
        reads.append(tuple(position[i] for i in op.inputs))
    outputs = dict.fromkeys((*graph.forward_outputs, *schedule.saved))
    for index in outputs:
        if index not in position:
            raise ValueError(
                f"{_label(graph.ops[index])} is handed over by the forward, which does not compute it"
            )
    return Program(
        ops=tuple(order), reads=tuple(reads), entries=entries, outputs=tuple(position[i] for i in outputs)
    )


def backward_program(graph: JointGraph, schedule: GraphSchedule) -> Program:
    """The backward: its own ops in joint order, each preceded by what the schedule recomputes before it.

    Raises ValueError naming a value that is read but neither saved nor recomputed before its reader.
    """
    end = len(graph.ops)
    ahead: dict[int, list[int]] = {}
    for item in schedule.recompute:
        ahead.setdefault(item.before, []).append(item.value)
    saved = set(schedule.saved)
    latest: dict[int, int] = {}  # op -> place in `run` of its latest copy
    entry: dict[int, int] = {}
    run: list[tuple[int, list[tuple[bool, int]]]] = []

    def source(reader: str, index: int) -> tuple[bool, int]:
        if index in latest:
            return True, latest[index]
        if graph.ops[index].phase is not Phase.INPUT and index not in saved:
            raise ValueError(
                f"{reader} reads {_label(graph.ops[index])}, which is neither saved nor recomputed before it"
            )
        return False, entry.setdefault(index, len(entry))

    for at in range(end + 1):
        own = [at] if at < end and graph.ops[at].phase is Phase.BACKWARD else []
        for index in [*ahead.get(at, ()), *own]:
            reader = _label(graph.ops[index])
            run.append((index, [source(reader, i) for i in graph.ops[index].inputs]))
            latest[index] = len(run) - 1
    ends = [source("the backward's result", i) for i in dict.fromkeys(graph.backward_outputs)]
    shift = len(entry)

    def node(made: bool, place: int) -> int:
        return shift + place if made else place

    return Program(
        ops=(*entry, *(index for index, _ in run)),
        reads=(*((),) * shift, *(tuple(node(*r) for r in reads) for _, reads in run)),
        entries=shift,
        outputs=tuple(node(*r) for r in ends),
    )


def validate(graph: JointGraph, schedule: GraphSchedule) -> None:
    """Check that `schedule` can run on `graph`. Raises ValueError naming the first thing that is wrong."""
    if schedule.fingerprint != graph.fingerprint:
        raise ValueError(f"the schedule is for graph {schedule.fingerprint}, this one is {graph.fingerprint}")
    end = len(graph.ops)
    _check_indices(schedule.saved, end, "saves")
    _check_indices([item.value for item in schedule.recompute], end, "recomputes")
    if len(set(schedule.saved)) < len(schedule.saved):
        raise ValueError("the schedule saves a value twice")
    for index in schedule.saved:
        op = graph.ops[index]
        if not (may_run_again(op) and op.saveable):
            raise ValueError(f"{_label(op)} cannot be saved")
    copies: dict[int, int] = {}
    for item in sorted(schedule.recompute, key=lambda item: (item.before, item.copy)):
        op = graph.ops[item.value]
        if not (may_run_again(op) and op.replayable):
            raise ValueError(f"{_label(op)} cannot be recomputed")
        if not (
            item.before == end or (0 <= item.before < end and graph.ops[item.before].phase is Phase.BACKWARD)
        ):
            raise ValueError(
                f"{_label(op)} is recomputed before {item.before}, which is no op of the backward"
            )
        if item.copy != copies.setdefault(item.value, 0):
            raise ValueError(
                f"copies of {_label(op)} are not numbered 0, 1, ... in the order in which they run"
            )
        copies[item.value] += 1
    forward_program(graph, schedule)
    backward_program(graph, schedule)


def _check_indices(indices: Sequence[int], end: int, verb: str) -> None:
    for index in indices:
        if not 0 <= index < end:
            raise ValueError(f"the schedule {verb} op {index}; the graph has ops 0 to {end - 1}")


def _label(op: Op) -> str:
    return f"op {op.index} ({op.name})"
