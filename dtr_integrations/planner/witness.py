"""Why a schedule is over the budget, as a row that every schedule of the class meets and this one does not.

At the place of the peak some storages are alive. Some are by a rule that `relaxation` knows. Another one is
alive for a reason: what happens to the values that depend on it. Whenever the same happens to these, it is
made before that place and read after it, whatever else is decided. A reason holds or not, which is one
0-or-1 variable; the bytes of those that hold may not be more than the budget.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.graph import OpKind, Phase, RegionKind
from .linear import ONE, Expr, add, increase
from .relaxation import GraphRows, Relaxation
from .state import GraphState

__all__ = ["forbid"]

_RUNS, _HELD = 1, 2
_CERTAIN: Expr = {ONE: 1.0}


def forbid(relaxation: Relaxation, saved: Sequence[Sequence[int]], budget_bytes: int) -> None:
    """Add rows that rule `saved` out, whose peak is over the budget."""
    state = relaxation.state
    state.assign(saved)
    _rule_out(relaxation)
    for graph in range(len(state.graphs)):
        for kind in (RegionKind.FORWARD, RegionKind.BACKWARD):
            _rows(relaxation, graph, kind, budget_bytes)


def _rule_out(relaxation: Relaxation) -> None:
    """These decisions together are not allowed."""
    total: Expr = {ONE: -1.0}
    for rows, graph in zip(relaxation.graphs, relaxation.state.graphs, strict=True):
        for i, record in enumerate(graph._back.records):
            expr = rows.saved[i] if record[0] == _HELD else rows.rerun[i] if record[0] == _RUNS else {}
            if expr:
                increase(total, 1, _CERTAIN)
                increase(total, -1, expr)
    relaxation.linear.require((1, total))


def _rows(relaxation: Relaxation, graph: int, kind: RegionKind, budget_bytes: int) -> None:
    """A row for the place where the direction's level is highest, if that is over the budget."""
    state = relaxation.state
    rise = state.graphs[graph].rise_bytes(kind) + state.offset_bytes(graph, kind)
    over = [
        at
        for at in relaxation.regions_of(graph, kind)
        if state._entries()[at] + rise > budget_bytes and state.graphs[graph].rise_bytes(kind) > 0
    ]
    if not over:
        return
    rows, own = relaxation.graphs[graph], state.graphs[graph]
    alive = _backward(rows, own) if kind is RegionKind.BACKWARD else _forward(rows, own)
    for at in over:
        relaxation.within(add((1, relaxation.entry(at)), (1, alive)), relaxation.offset_floor(at))


def _peak(graph: GraphState, kind: RegionKind) -> int:
    """The time (event key) of the allocation at which the level is highest."""
    events = (graph._back if kind is RegionKind.BACKWARD else graph._front).events
    births = sorted(int(key) for key, weight in zip(events.keys, events.weights, strict=True) if weight > 0)
    return births[int(graph.levels(kind).argmax())]


def _forward(rows: GraphRows, graph: GraphState) -> Expr:
    side, events, n = graph._front, graph._front.events, graph._front.events.n
    key = _peak(graph, RegionKind.FORWARD)
    here = side.op_at((key - 1) // 2)
    made: dict[int, Expr] = {}
    for storage in range(n):
        if events.weights[storage] and events.keys[storage] <= key < events.keys[n + storage]:
            made[storage] = _reason(rows, graph, rows.maker[storage], forward=True)
    k = here
    if rows.graph.ops[here].phase is not Phase.FORWARD:  # a FREE value, just after the op that it waits for
        base = (key - 1) // 2 // side.width
        k = base - 1
    total = rows.forward_bytes(k, made=made) if k >= 0 else {}
    for storage, expr in made.items():
        maker = rows.maker[storage]
        if rows.graph.ops[maker].phase is not Phase.FORWARD and not (
            maker == here and rows.tables.kinds[here] is OpKind.POINTWISE
        ):
            increase(total, rows.graph.storage_bytes[storage], expr)
    return total


def _backward(rows: GraphRows, graph: GraphState) -> Expr:
    side, events, n = graph._back, graph._back.events, graph._back.events.n
    key = _peak(graph, RegionKind.BACKWARD)
    here = side.op_at((key - 1) // 2)
    t = min((key - 1) // 2 // side.width, rows.end)
    own = rows.graph.ops[here].phase is Phase.BACKWARD
    made: dict[int, Expr] = {}
    for storage in range(n):
        maker = rows.maker.get(storage, -1)
        if not events.weights[storage] or rows.graph.ops[maker].phase is Phase.BACKWARD:
            continue
        if events.keys[storage] <= key < events.keys[n + storage]:
            size = rows.graph.storage_bytes[storage]
            if maker == here and rows.may_write_over(here, size):
                continue
            made[storage] = _reason(rows, graph, maker)
    held: dict[int, Expr] = {}
    for storage in range(n):
        slot = 2 * n + storage
        if not (rows.weights[storage] and events.keys[slot] > key and events.weights[slot]):
            continue
        if storage not in graph._gradients:
            holders = [i for i in graph._holders[storage] if side.records[i][0] == _HELD]
            late = max(holders, key=lambda i: side.records[i][5][0])
            held[storage] = _reason(rows, graph, late)
    return rows.backward_bytes(t, again=None if own else here, made=made, held=held)


def _reason(rows: GraphRows, graph: GraphState, op: int, *, forward: bool = False) -> Expr:
    """1 if the values that depend on `op`, itself included, are saved, made again or neither as they are
    now; else it may be 0."""
    cone: set[int] = set()
    stack = [op]
    while stack:
        if (i := stack.pop()) not in cone:
            cone.add(i)
            stack.extend(u for u in rows.graph.users[i] if rows.graph.ops[u].phase is not Phase.BACKWARD)
    known: list[Expr] = []
    for i in sorted(cone):
        mode = graph._back.records[i][0]
        if mode == _HELD and rows.saved[i]:
            known.append(rows.saved[i])
        elif mode == _RUNS and rows.rerun[i] and not forward:
            known.append(rows.rerun[i])
        elif forward and rows.saved[i]:
            known.append(add((1, _CERTAIN), (-1, rows.saved[i])))
    if not known:
        return _CERTAIN
    if len(known) == 1:
        return known[0]
    holds = {rows.linear.variable(): 1.0}
    rows.linear.require((1, holds), *((-1, expr) for expr in known), (1, {ONE: len(known) - 1.0}))
    return holds
