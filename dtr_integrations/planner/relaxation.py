"""The search tier's model as linear rows that every schedule of its class meets: what bounds are made of.

The class: one save set for each graph under its canonical schedule (`core.schedule.schedule_for`), as the
search has it. Peak and time: as `core.simulate.simulate_step` scores them, corrections included.

Of each value that may be kept or made again there are two numbers, 1 or 0: *saved* (handed to the backward
and needed there) and *rerun* (made again in the backward). What runs needs what it reads. Memory rows say
that at a place of the step no more is alive than the budget. They count what is alive in every schedule with
these numbers: what the backward itself makes (the same whatever is saved); a saved storage as long as an op
of the backward, or one that runs again later, will read it; a value made again, from the place where
something asks for it, as long. What depends on more than that (a buffer that is one only under some save
sets, an output that may be written over an input) is left out, and a correction counts with its least value:
rows may be too weak, never too strong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from ..core.fusion import FusionTables
from ..core.graph import OpKind, Phase, RegionKind
from ..core.schedule import is_tangent, may_run_again
from ..core.simulate import entry_weights
from .linear import ONE, Expr, Linear, add, increase
from .problem import Problem
from .state import GraphState, StepState

__all__ = ["GraphRows", "Relaxation"]

_DEEPEST = 6  # views and inlined values followed from a storage to the kernels that read it
_MOST_WAYS = 64  # ways from a storage to its readers in the forward
_CERTAIN: Expr = {ONE: 1.0}
_NOTHING: Mapping[int, Expr] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Reader:
    """A value by which a storage is read in the backward up to `until`: `op`, when none of `unless` is saved,
    and when `by` (if any) runs again later."""

    op: int
    unless: tuple[int, ...]
    until: int
    by: int = -1


class GraphRows:
    """One graph's variables, and what is alive at a place of its forward or backward.

    `saved[i]` and `rerun[i]` are expressions: a variable, or nothing where the op cannot be either.
    """

    def __init__(self, linear: Linear, state: GraphState, calls: int) -> None:
        self.linear = linear
        self.graph = graph = state.graph
        self.end = len(graph.ops)
        self._records = tuple(state._back.records)  # those of the backward's own ops never change
        self._width = state._back.width
        self.tables: FusionTables = state._back.tables
        self.weights = entry_weights(graph)
        self.forced = state.forced
        self.maker = {s: op.index for op in graph.ops for s in op.storages}
        self._read_by_backward()
        self.saved: list[Expr] = [{} for _ in graph.ops]
        self.rerun: list[Expr] = [{} for _ in graph.ops]
        self._decisions(calls, self.tables.policy.inlined_cost)
        self._chains()
        self._levels()
        self._made()
        self._forward_reads: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        self._behind: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        self._asked: dict[int, list[Expr]] = {}
        self._whole: set[int] = set()  # places whose `asked` is no more than is true, either
        self.handed: dict[int, Expr] = self._handed()

    # -- what is known whatever is saved

    def _read_by_backward(self) -> None:
        """First and last place at which ops of the backward read each value, and what may be needed."""
        ops, end = self.graph.ops, self.end
        self.kernel = [min(r[7][0] // self._width, end) for r in self._records]
        self.first, self.last = [end + 1] * end, [-1] * end
        for i in self.graph.backward_outputs:
            self.first[i] = self.last[i] = end
        for op in ops:
            if op.phase is Phase.BACKWARD:
                for i in op.inputs:
                    self.first[i] = min(self.first[i], op.index)
                    if self.tables.kinds[op.index] is not OpKind.SYMBOL:
                        self.last[i] = max(self.last[i], self.kernel[op.index])
        self.needed = [False] * end
        self.earliest = list(self.first)
        for op in reversed(ops):
            if op.phase is not Phase.BACKWARD:
                for u in self._rerunners(op.index):
                    self.earliest[op.index] = min(self.earliest[op.index], self.earliest[u])
                self.needed[op.index] = self.earliest[op.index] <= end
        self.until = list(self.last)
        for op in reversed(ops):
            if self.needed[op.index] and self.first[op.index] > end:
                self.until[op.index] = min(map(self._read_by, self._rerunners(op.index)))

    def _read_by(self, u: int) -> int:
        """A place up to which op `u` keeps what it reads alive when it runs again, wherever that is."""
        if self.tables.kinds[u] is OpKind.SYMBOL:
            return -1
        return self.until[u] if self._never(u) else self.earliest[u] - 1  # it runs just before that op

    def _rerunners(self, i: int) -> Iterator[int]:
        """Readers of op `i` that may run again."""
        for u in self.graph.users[i]:
            if self.needed[u] and u not in self.forced and may_run_again(self.graph.ops[u]):
                yield u

    def _decisions(self, calls: int, inlined_cost: float) -> None:
        linear, ops = self.linear, self.graph.ops
        for op in ops:
            if op.phase is Phase.FORWARD or op.phase is Phase.BACKWARD:
                linear.constant += calls * op.cost_ms * inlined_cost
            if not (self.needed[op.index] and may_run_again(op)):
                continue
            if op.saveable:
                self.saved[op.index] = {linear.variable(integer=True): 1.0}
            if op.index not in self.forced:
                cost = calls * op.cost_ms * inlined_cost
                self.rerun[op.index] = {linear.variable(integer=True, cost=cost): 1.0}
        early: dict[int, Expr] = {}  # FREE values made in the forward
        for op in reversed(ops):
            if op.phase is Phase.FREE:
                users = [early[u] for u in self.graph.users[op.index] if u in early]
                if self.saved[op.index] or users:
                    cost = calls * op.cost_ms * inlined_cost
                    early[op.index] = {linear.variable(cost=cost): 1.0}
                    for expr in (self.saved[op.index], *users):
                        linear.require((1, early[op.index]), (-1, expr))
            if not (self.needed[op.index] and may_run_again(op)):
                continue
            have = add((1, self.saved[op.index]), (1, self.rerun[op.index]))
            linear.require((1, _CERTAIN), (-1, have))
            if self.first[op.index] <= self.end:
                linear.require((1, have), (-1, _CERTAIN))
                continue
            readers = [self.rerun[u] for u in self._rerunners(op.index)]
            for expr in readers:
                linear.require((1, have), (-1, expr))
            linear.require(*((1, expr) for expr in readers), (-1, have))

    def _chains(self) -> None:
        """For each value the values that it is a free view of, itself first: of them one at most need be
        saved, since a view of a saved value is had for nothing and holds the same storage."""
        ops = self.graph.ops
        self.chain: list[tuple[int, ...]] = [() for _ in ops]
        self.of_input = [False] * len(ops)
        inner: set[int] = set()
        for op in ops:
            if op.phase is Phase.INPUT:
                self.of_input[op.index] = not is_tangent(op)
            if not (self.needed[op.index] and may_run_again(op)):
                continue
            self.chain[op.index] = (op.index,)
            if op.kind is OpKind.VIEW and not op.cost_ms and op.index not in self.forced and op.inputs:
                base = op.inputs[0]
                if ops[base].value == op.value:
                    self.chain[op.index] += self.chain[base]
                    self.of_input[op.index] = self.of_input[base]
                    inner.add(base)
        self.kept: list[Expr] = [add(*((1, self.saved[i]) for i in chain)) for chain in self.chain]
        for op in ops:
            if op.index not in inner and len(self.kept[op.index]) > 1:
                self.linear.require((1, _CERTAIN), (-1, self.kept[op.index]))
        self.holders: dict[int, list[int]] = {}
        for op in ops:
            if op.value >= 0 and self.needed[op.index] and not is_tangent(op):
                self.holders.setdefault(op.value, []).append(op.index)

    def _levels(self) -> None:
        """Bytes of the backward's own storages and of incoming gradients, at each of its ops."""
        graph, records, width, end = self.graph, self._records, self._width, self.end
        change = [0] * (end + 2)
        new = [0] * (end + 1)
        dying: dict[int, set[int]] = {}
        for op in graph.ops:
            if is_tangent(op) and op.value >= 0 and records[op.index][0] == 2:
                change[max(min(records[op.index][5][0] // width, end), -1) + 1] -= graph.storage_bytes[
                    op.value
                ]
            if op.phase is not Phase.BACKWARD or not records[op.index][6]:
                continue
            for storage in op.storages:
                reads = [records[op.index][5][0]] if op.value == storage else []
                if op.value != storage:
                    reads = [records[u][7][0] for u in graph.users[op.index] if graph.ops[u].value == storage]
                dies = max([op.index, *(min(read // width, end) for read in reads)])
                size = graph.storage_bytes[storage]
                new[op.index] += size
                change[op.index] += size
                change[dies + 1] -= size
                dying.setdefault(dies, set()).add(size)
        level, self.own, self.around = 0, [0] * (end + 1), [0] * (end + 1)
        for t in range(end + 1):
            level += change[t]
            self.own[t] = level
            self.around[t] = level - new[t]
        self.places = [op.index for op in graph.ops if op.phase is Phase.BACKWARD and new[op.index]]
        for t in self.places:
            if self._writes_over(t) and (new[t] in dying.get(t, ()) or self.may_write_over(t, new[t])):
                self.own[t] -= new[t]

    def _writes_over(self, i: int) -> bool:
        """Whether the op is of the kind that may write into an input that dies there."""
        return self.tables.kinds[i] is OpKind.POINTWISE and self.tables.policy.reuse_in_place

    def may_write_over(self, t: int, size: int) -> bool:
        """Whether op `t` may write over a forward value of that size, in the backward."""
        if not self._writes_over(t):
            return False
        graph, seen, stack = self.graph, {t}, [t]
        while stack:
            for i in graph.ops[stack.pop()].inputs:
                if i in seen:
                    continue
                seen.add(i)
                if graph.ops[i].phase is not Phase.BACKWARD and graph.value_bytes(i) == size:
                    return True
                if not self._always(i):
                    stack.append(i)
        return False

    def _never(self, i: int) -> bool:
        """Whether op `i`, run again, has no buffer of its own: its readers then read what it reads."""
        kind = self.tables.kinds[i]
        if kind is OpKind.VIEW:
            return True
        if kind is OpKind.SYMBOL or self.tables.backward[i] is not False:
            return False
        return kind is OpKind.EXTERN or i not in self.graph.backward_outputs

    def _always(self, i: int) -> bool:
        """Whether the value of op `i`, made in the backward, has a buffer of its own under every save set."""
        op, kind, known = self.graph.ops[i], self.tables.kinds[i], self.tables.backward[i]
        if op.phase is Phase.BACKWARD:
            return self._records[i][6]
        if kind is OpKind.EXTERN:
            return known is not False
        if kind is OpKind.VIEW or kind is OpKind.SYMBOL or op.phase is Phase.INPUT:
            return False
        if i in self.graph.backward_outputs:
            return True
        return known if known is not None else kind is OpKind.REDUCTION or self._feeds_library(i)

    def _feeds_library(self, i: int) -> bool:
        ops, kinds = self.graph.ops, self.tables.kinds
        return any(ops[u].phase is Phase.BACKWARD and kinds[u] is OpKind.EXTERN for u in self.graph.users[i])

    def _made(self) -> None:
        """For each storage that may be made again: by which values it is read, if it is a buffer then."""
        self.readers: dict[int, list[_Reader]] = {}
        for op in self.graph.ops:
            if not (self.needed[op.index] and may_run_again(op)) or op.index in self.forced:
                continue
            for storage in op.storages:
                if self.graph.storage_bytes[storage]:
                    found = list(self._read_through(op.index, storage))
                    if found:
                        self.readers[storage] = found

    def _read_through(self, maker: int, storage: int) -> Iterator[_Reader]:
        ops = self.graph.ops
        certain = self._always(maker)
        free = self.tables.backward[maker] is None and self.tables.kinds[maker] in (
            OpKind.POINTWISE,
            OpKind.CONSTANT,
        )
        stack: list[tuple[int, tuple[int, ...], bool]] = [(maker, (), True)]
        while stack:
            i, through, views = stack.pop()
            whole = i != maker or ops[i].value == storage
            if whole and self.until[i] >= 0 and (certain or (free and views and self._feeds_library(i))):
                yield _Reader(i, through, self.until[i])
            if len(through) >= _DEEPEST:
                continue
            for u in self._rerunners(i):
                if self._never(u) and (whole or ops[u].value == storage):
                    is_view = self.tables.kinds[u] is OpKind.VIEW
                    stack.append((u, (*through, i), views and is_view))
                elif certain and whole and self.until[i] < self.first[u]:
                    yield _Reader(i, through, self.first[u] - 1, u)

    def certain_bytes(self) -> list[int]:
        """Bytes alive at each op of the backward whatever is saved: its own, and what its ops read."""
        change = [0] * (self.end + 2)
        for op in self.graph.ops:
            if (
                op.phase is not Phase.BACKWARD
                and op.value >= 0
                and self.first[op.index] <= self.last[op.index]
            ):
                change[self.first[op.index]] += self.weights[op.value]
                change[self.last[op.index] + 1] -= self.weights[op.value]
        return [own + more for own, more in zip(self.own, accumulate(change), strict=False)]

    # -- expressions

    def _handed(self) -> dict[int, Expr]:
        """For each storage that counts when handed over: at least 1 when it is."""
        ops = self.graph.ops
        out: dict[int, Expr] = {}
        for storage, holders in self.holders.items():
            if not self.weights[storage]:
                continue
            exprs: list[Expr] = []
            for i in holders:
                if self.of_input[i] and self.first[i] <= self.end:
                    exprs.append(_CERTAIN)
                if ops[i].phase is Phase.INPUT:
                    exprs += [self.rerun[u] for u in self._rerunners(i)]
                else:
                    exprs.append(self.kept[i])
            if expr := self.linear.largest(_outer(exprs)):
                out[storage] = expr
        return out

    def handed_bytes(self) -> Expr:
        """Bytes handed to the backward, at least."""
        return add(*((self.weights[s], expr) for s, expr in self.handed.items()))

    def asked(self, t: int, *, most: int | None = None) -> list[Expr]:
        """For each op, 1 if it has been run again by the time that op `t` of the backward runs.

        `most`: variables spent on it; values further back may count as not asked for, others as asked for.
        """
        if (known := self._asked.get(t)) is not None:
            return known
        out: list[Expr] = [{} for _ in self.graph.ops]
        spent = 0
        for i in range(self.end - 1, -1, -1):
            if self.earliest[i] > t or not self.rerun[i]:
                continue
            if self.first[i] <= t:
                out[i] = self.rerun[i]
                continue
            users = [out[u] for u in self._rerunners(i) if out[u]]
            if len(users) == 1 and not self.saved[i]:
                out[i] = users[0]
            elif users and (most is None or spent < most):
                spent += 1
                out[i] = {self.linear.variable(): 1.0}
                for expr in users:
                    self.linear.require((1, out[i]), (1, self.saved[i]), (-1, expr))
                if most is None:  # no more than that, either
                    self.linear.require((1, self.rerun[i]), (-1, out[i]))
                    self.linear.require(*((1, expr) for expr in users), (-1, out[i]))
        if most is None:
            self._whole.add(t)
        self._asked[t] = out
        return out

    def backward_bytes(
        self,
        t: int,
        *,
        again: int | None = None,
        most: int | None = None,
        made: Mapping[int, Expr] = _NOTHING,
        held: Mapping[int, Expr] = _NOTHING,
    ) -> Expr:
        """Bytes alive at op `t` of the backward above those at its entry, at least.

        Args:
            t: An op of the backward.
            again: Not when `t` itself runs, but when this op is (or would be) run again just before it.
            most: As for `asked`.
            made, held: More reasons for storages to be alive, made again or handed over: at least 1 if so.
        """
        now = self.asked(t, most=most)
        before = now if again is None else self.asked(t - 1, most=most)
        total: Expr = {ONE: float(self.own[t] if again is None else self.around[t])}
        for storage in sorted({*self.handed, *held}):
            weight = self.weights[storage]
            alive = self.linear.largest(_outer([*self._held(storage, t), held.get(storage, {})]))
            increase(total, weight, alive)
            increase(total, -weight, self.handed.get(storage, {}))
        for storage in sorted({*self.readers, *made}):
            exprs = [made.get(storage, {})]
            for reader in self.readers.get(storage, ()):
                asked = now if again is None or reader.op <= again else before
                if t <= reader.until and asked[reader.op]:
                    minus = (self.saved[i] for i in reader.unless)
                    expr = add((1, asked[reader.op]), *((-1, expr) for expr in minus))
                    if reader.by >= 0:
                        if not (later := self._later(reader.by, t)):
                            continue
                        expr = add((1, expr), (1, later), (-1, _CERTAIN))
                    exprs.append(expr)
            increase(total, self.graph.storage_bytes[storage], self.linear.largest(exprs))
        return total

    def _held(self, storage: int, t: int) -> Iterator[Expr]:
        """What says that a storage that was handed over is alive at op `t` of the backward."""
        ops = self.graph.ops
        for i in self.holders[storage]:
            kept = _CERTAIN if self.of_input[i] else self.kept[i]
            if self.last[i] >= t and kept:
                yield kept
            elif ops[i].phase is not Phase.INPUT:
                yield add(*((1, self.saved[c]) for c in self.chain[i] if self.until[c] >= t))
            for u in self._rerunners(i):
                if ops[i].phase is Phase.INPUT:
                    if self._read_by(u) >= t:
                        yield self.rerun[u]
                elif kept and self._never(u) and self.last[u] >= t and ops[u].value != storage:
                    yield add((1, kept), (-1, self.saved[u]))
            if kept and ops[i].phase is not Phase.INPUT:
                for u, fused in self._readers_behind(i):
                    if later := self._later(u, t):
                        unless = ((-1, self.saved[f]) for f in fused)
                        yield add((1, kept), (1, later), (-1, _CERTAIN), *unless)

    def _readers_behind(self, i: int) -> list[tuple[int, tuple[int, ...]]]:
        """(op, what is fused in between) for what reads the value of op `i` when it runs again."""
        if (known := self._behind.get(i)) is None:
            known = self._behind[i] = []
            stack: list[tuple[int, tuple[int, ...]]] = [(i, ())]
            seen = {i}
            while stack:
                j, fused = stack.pop()
                for u in self._rerunners(j):
                    if u in seen:
                        continue
                    seen.add(u)
                    if not self._never(u):
                        known.append((u, fused))
                    elif len(fused) < _DEEPEST:
                        stack.append((u, (*fused, u)))
        return known

    def _later(self, u: int, t: int) -> Expr:
        """1 if op `u` runs again, but only after op `t` of the backward; nothing where that is not known."""
        if self.tables.kinds[u] is OpKind.SYMBOL or self.first[u] <= t:
            return {}
        if self.earliest[u] > t:
            return self.rerun[u]
        return add((1, self.rerun[u]), (-1, self.asked(t)[u])) if t in self._whole else {}

    def forward_places(self) -> list[int]:
        """Ops of the forward that make something."""
        return [
            op.index
            for op in self.graph.ops
            if op.phase is Phase.FORWARD and any(self.graph.storage_bytes[s] for s in op.storages)
        ]

    def forward_bytes(self, k: int, *, made: Mapping[int, Expr] = _NOTHING) -> Expr:
        """Bytes alive at op `k` of the forward above those at its entry, at least. `made` as for the
        backward."""
        graph = self.graph
        total: Expr = {}
        for op in graph.ops[: k + 1]:
            if op.phase is not Phase.FORWARD:
                continue
            for storage in op.storages:
                size = graph.storage_bytes[storage]
                alive = self.linear.largest([*self._in_forward(op.index, storage, k), made.get(storage, {})])
                if alive and not (op.index == k and self.may_write_over_in_forward(k, size)):
                    increase(total, size, alive)
        return total

    def may_write_over_in_forward(self, k: int, size: int) -> bool:
        """Whether op `k` may write over something of that size that dies there."""
        return self._writes_over(k) and any(size == self.graph.value_bytes(i) for i in self._ancestors(k))

    def _ancestors(self, k: int) -> Iterator[int]:
        seen, stack = {k}, [k]
        while stack:
            for i in self.graph.ops[stack.pop()].inputs:
                if i not in seen:
                    seen.add(i)
                    yield i
                    if self.tables.kinds[i] is not OpKind.EXTERN and not self.tables.forward[i]:
                        stack.append(i)

    def _in_forward(self, m: int, storage: int, k: int) -> Iterator[Expr]:
        """What says that a storage that op `m` makes is alive at op `k` of the forward (`m` or later)."""
        graph, kind, known = self.graph, self.tables.kinds[m], self.tables.forward[m]
        if kind is OpKind.VIEW or kind is OpKind.SYMBOL:
            return
        library = kind is OpKind.EXTERN
        leaves = m in graph.forward_outputs and not library
        out = any(graph.ops[i].value == storage for i in graph.forward_outputs)
        possible = known is not False
        always = (
            possible if library else leaves or bool(known) or (known is None and kind is OpKind.REDUCTION)
        )
        if always or (out and possible):  # what leaves, through a view too, is a buffer
            if out and (possible or leaves):
                yield _CERTAIN
                return
            for unless, until in self._read_in_forward(m, storage):
                if k <= until:
                    yield add((1, _CERTAIN), *((-1, self.saved[i]) for i in unless))
        if self.weights[storage]:
            if possible:
                yield self.handed.get(storage, {})
            elif not library and graph.ops[m].value == storage:
                yield self.saved[m]

    def _read_in_forward(self, m: int, storage: int) -> list[tuple[tuple[int, ...], int]]:
        """(ops, place): up to which op of the forward the storage is read unless one of `ops` is saved.

        A value that is fused into its readers reads when they run, but when it is saved, it is made at once.
        """
        if (known := self._forward_reads.get(storage)) is not None:
            return known
        latest: dict[tuple[int, ...], int] = {(): m}
        stack: list[tuple[int, tuple[int, ...]]] = [(m, ())]
        seen = set(stack)
        while stack:
            i, unless = stack.pop()
            for u in self.graph.users[i]:
                op, kind = self.graph.ops[u], self.tables.kinds[u]
                if op.phase is not Phase.FORWARD or kind is OpKind.SYMBOL:
                    continue
                if i == m and self.graph.ops[m].value != storage and op.value != storage:
                    continue
                latest[unless] = max(latest.get(unless, m), u)
                fused = kind is not OpKind.EXTERN and self.tables.forward[u] is False
                if kind is OpKind.VIEW:
                    further = (u, unless)
                elif fused and u not in self.graph.forward_outputs and len(unless) < _DEEPEST:
                    further = (u, (*unless, u) if self.saved[u] else unless)
                else:
                    continue
                if further not in seen and len(seen) < _MOST_WAYS:
                    seen.add(further)
                    stack.append(further)
        found = sorted(latest.items(), key=lambda item: (len(item[0]), -item[1]))
        kept: list[tuple[tuple[int, ...], int]] = []
        for unless, until in found:
            if not any(set(less) <= set(unless) and place >= until for less, place in kept):
                kept.append((unless, until))
        self._forward_reads[storage] = kept
        return kept


def _outer(exprs: Iterable[Expr]) -> list[Expr]:
    """`exprs` without those of which another one is a superset (all factors are positive)."""
    found = sorted((dict(e) for e in exprs if e), key=len, reverse=True)
    out: list[Expr] = []
    for expr in found:
        if min(expr.values()) <= 0 or not any(
            min(o.values()) > 0 and all(o.get(k, 0.0) >= by for k, by in expr.items()) for o in out
        ):
            out.append(expr)
    return out


class Relaxation:
    """The rows of a whole step. `budget` is a variable, so that a solution tells what a byte more is worth.

    `decisions` of a solution are the save sets that it means.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.linear = Linear()
        self.scale = float(max(problem.step.default_peak_bytes, 1))
        self.budget = self.linear.variable(upper=float("inf"))
        empty: list[tuple[int, ...]] = [() for _ in problem.step.graphs]
        self.state = StepState(problem.step, problem.correction, empty, policy=problem.policy)
        self.graphs = [
            GraphRows(self.linear, graph, calls)
            for graph, calls in zip(self.state.graphs, self.state.calls, strict=True)
        ]
        self.linear.constant += sum(r.cost_ms for r in problem.step.regions if r.kind is RegionKind.EAGER)
        self._handed = [rows.handed_bytes() for rows in self.graphs]
        for at in range(len(problem.step.regions)):
            self.within(self.entry(at), self.rise_floor(at))

    def entry(self, region: int) -> Expr:
        """Bytes alive at the entry of a region, at least."""
        calls = self.state._open[region]
        held = ((c, handed) for c, handed in zip(calls, self._handed, strict=True) if c)
        return add((1, {ONE: float(self.state._base[region])}), *held)

    def rise_floor(self, at: int) -> float:
        """What an eager region rises by."""
        region = self.problem.step.regions[at]
        return float(region.rise_bytes) if region.kind is RegionKind.EAGER else 0.0

    def offset_floor(self, at: int) -> float:
        """The least that the correction adds to a region's rise."""
        region = self.problem.step.regions[at]
        name = self.problem.step.graphs[region.graph].fingerprint
        curve = self.problem.correction.curve(name, region.kind)
        return float(min((by for _, by in curve), default=0))

    def within(self, expr: Expr, more: float = 0.0) -> None:
        """A row: `expr` and `more` bytes are within the budget."""
        by = 1.0 / self.scale
        self.linear.require((1, {self.budget: 1.0}), (-by, expr), (-by * more, _CERTAIN))

    def regions_of(self, graph: int, kind: RegionKind) -> list[int]:
        """The regions of one direction, without those that another one has as much and more open at."""
        found = [
            r
            for r, region in enumerate(self.problem.step.regions)
            if region.graph == graph and region.kind is kind
        ]

        def key(r: int) -> tuple[float, ...]:
            return (*self.state._open[r], self.state._base[r])

        kept: list[int] = []
        for r in sorted(found, key=key, reverse=True):
            if not any(all(a >= b for a, b in zip(key(o), key(r), strict=True)) for o in kept):
                kept.append(r)
        return kept

    def add_backward(self, graph: int, t: int, *, most: int | None = None) -> None:
        """A row for op `t` of that graph's backward, in each of its calls."""
        alive = self.graphs[graph].backward_bytes(t, most=most)
        for at in self.regions_of(graph, RegionKind.BACKWARD):
            self.within(add((1, self.entry(at)), (1, alive)), self.offset_floor(at))

    def add_forward(self, graph: int, k: int) -> None:
        """A row for op `k` of that graph's forward, in each of its calls."""
        alive = self.graphs[graph].forward_bytes(k)
        for at in self.regions_of(graph, RegionKind.FORWARD):
            self.within(add((1, self.entry(at)), (1, alive)), self.offset_floor(at))

    def save_sets(self, solution: Sequence[float]) -> list[tuple[int, ...]]:
        """The save set of each graph in an integral solution."""
        return [
            tuple(i for i, expr in enumerate(rows.saved) if any(solution[v] > 0.5 for v in expr))
            for rows in self.graphs
        ]
