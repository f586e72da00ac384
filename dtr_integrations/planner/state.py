"""The incremental simulator: what one more or one less saved value does, from the cone that it touches.

`GraphState` is `core.simulate` for the canonical schedule of a save set (`schedule_for`), kept up to date:
saving or dropping a value recomputes only the ops whose place, reader or buffer changes, walking from readers
to what they read. Sizes over time are then one sort and one cumulative sum over the storages. `StepState`
adds the graphs of a step up. Both agree with `simulate_graph` and `simulate_step` to the byte (tests, on
random graphs).

What it does not do: schedules that recompute a value more than once have no state here; `simulate_graph`
scores them.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from ..core.fusion import DEFAULT_POLICY, FusionPolicy, FusionTables, fusion_tables, is_buffer
from ..core.graph import JointGraph, OpKind, Phase, RegionKind, StepGraph
from ..core.plan import GraphSchedule
from ..core.schedule import is_tangent, may_run_again, must_save, schedule_for
from ..core.simulate import Correction, default_cost_ms, entry_weights, interpolate, last_two, open_shifts

__all__ = ["GraphState", "StepState"]

_ABSENT, _RUNS, _HELD = 0, 1, 2
# What is known of one op in one direction: mode, key (its time), before (the backward op that asks for it),
# whether a library kernel or the end reads it, how many ops read it, the last two kernels that read it,
# whether it is a buffer, and the last two kernels in which it runs itself.
_Record = tuple[int, int, int, bool, int, tuple[int, int], bool, tuple[int, int]]
_NEVER = (-1, -1)
_Journal = list[tuple[Any, Any, Any]]


class _Events:
    """Births and deaths of storages: made ones at [0, n), their deaths at [n, 2n), entries' at [2n, 3n)."""

    def __init__(self, graph: JointGraph, tables: FusionTables) -> None:
        policy = tables.policy
        n = len(graph.storage_bytes)
        self.n = n
        self.keys = np.zeros(3 * n, dtype=np.int64)
        self.weights = np.zeros(3 * n, dtype=np.int64)
        self.pointwise = np.zeros(3 * n, dtype=bool)
        self.reusable = np.ones(3 * n, dtype=bool)
        self.alone = np.ones(3 * n, dtype=bool)  # no sibling reads it in the kernel in which it dies
        self.slot = np.concatenate([np.arange(n), np.arange(n), np.arange(n, 2 * n)])
        for op in graph.ops:
            if policy.reuse_in_place and tables.kinds[op.index] is OpKind.POINTWISE:
                self.pointwise[list(op.storages)] = True
            if is_tangent(op) and op.value >= 0:
                self.reusable[2 * n + op.value] = False
        if not policy.donate_saved:
            self.reusable[2 * n :] = False

    def put(self, slot: int, key: int, weight: int, alone: bool, journal: _Journal) -> None:
        """Write one event, remembering what was there."""
        old_weight = int(self.weights[slot])
        if weight != old_weight:
            journal.append((self.weights, slot, old_weight))
            self.weights[slot] = weight
        if not weight:
            return
        if key != (old_key := int(self.keys[slot])):
            journal.append((self.keys, slot, old_key))
            self.keys[slot] = key
        if alone != (old_alone := bool(self.alone[slot])):
            journal.append((self.alone, slot, old_alone))
            self.alone[slot] = alone

    def levels(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Live bytes above those at entry, at each allocation, in order of time."""
        live = np.flatnonzero(self.weights)
        order = live[np.argsort(self.keys[live])]
        keys, weights = self.keys[order], self.weights[order]
        level = np.cumsum(weights)
        births = weights > 0
        # A pointwise kernel that writes into an input of its size that dies there adds nothing.
        at = np.flatnonzero(births & self.pointwise[order])
        reused = np.zeros(len(at), dtype=bool)
        step = 1
        while len(at):
            other = np.minimum(at + step, len(order) - 1)
            same = (keys[other] == keys[at] + 1) & (at + step < len(order))
            if not same.any():
                break
            reused |= (
                same
                & (weights[other] == -weights[at])
                & self.reusable[order[other]]
                & self.alone[order[other]]
                & (self.slot[order[other]] != self.slot[order[at]])
            )
            step += 1
        level[at[reused]] -= weights[at[reused]]
        result: np.ndarray[Any, np.dtype[np.int64]] = level[births]
        return result


class _Side:
    """One direction of a graph: the records of its ops and the events of its storages."""

    def __init__(self, graph: JointGraph, policy: FusionPolicy, direction: RegionKind) -> None:
        self.graph = graph
        self.n = len(graph.ops)
        self.forward = direction is RegionKind.FORWARD
        tables = fusion_tables(graph, policy)
        self.tables = tables
        self.known = tables.forward if self.forward else tables.backward
        self.cost = [op.cost_ms for op in graph.ops]
        self.inlined = policy.inlined_cost
        self.kind = tables.kinds
        self.phase = [op.phase for op in graph.ops]
        self.users = graph.users
        self.inputs = [op.inputs for op in graph.ops]
        self.width = self.n + 2
        self.end_key = (self.n + 2) * self.width
        self.leaves = [False] * self.n
        for i in graph.forward_outputs if self.forward else graph.backward_outputs:
            self.leaves[i] = True
        self.absent: _Record = (_ABSENT, -1, self.n + 1, False, 0, _NEVER, False, _NEVER)
        self.records: list[_Record] = [self.absent] * self.n
        self.events = _Events(graph, tables)
        self.cost_ms = 0.0
        self.keys = self._forward_keys() if self.forward else []
        self.tuples = [len(op.storages) > 1 or (bool(op.storages) and op.value < 0) for op in graph.ops]

    def _forward_keys(self) -> list[int]:
        base = [0] * self.n  # 1 + the forward op after which the value is there
        keys = [0] * self.n
        for op in self.graph.ops:
            if op.phase is Phase.FORWARD:
                base[op.index] = op.index + 1
                keys[op.index] = base[op.index] * self.width
            elif op.phase is Phase.FREE:
                base[op.index] = max((base[i] for i in op.inputs), default=0)
                keys[op.index] = base[op.index] * self.width + 1 + op.index
        return keys

    def record(self, i: int, keep: bool, held: bool) -> _Record:
        """What op `i` is now, from its readers. `keep`: saved if needed; `held`: it is (for the forward)."""
        records, kind = self.records, self.kind
        leaves = self.leaves[i] or (self.forward and held)
        before = self.n if leaves else self.n + 1
        last, also = self.end_key if leaves else -1, -1
        extern, readers, wanted = leaves, 0, leaves
        for u in self.users[i]:
            mode, _, at, u_extern, u_readers, _, _, u_read_at = records[u]
            if mode != _RUNS:
                continue
            wanted = True
            if at < before:
                before = at
            u_kind = kind[u]
            if u_kind is OpKind.SYMBOL:
                continue
            u_last, u_also = u_read_at
            if u_last > last:
                last, also = u_last, max(last, u_also)
            elif u_last < last:
                also = max(also, u_last)
            else:
                also = max(also, u_also)
            if u_kind is OpKind.VIEW:
                extern = extern or u_extern
                readers += u_readers
            else:
                extern = extern or u_kind is OpKind.EXTERN
                readers += 1
        reach = (last, also)
        phase = self.phase[i]
        if self.forward:
            if phase is Phase.INPUT or phase is Phase.BACKWARD or (phase is Phase.FREE and not wanted):
                return self.absent
            key, before = self.keys[i], 0
        elif phase is Phase.BACKWARD:
            key, before = i * self.width + self.n, i
        elif not wanted:
            return self.absent
        elif phase is Phase.INPUT or keep:
            return (_HELD, -1, self.n + 1, False, 0, reach, False, _NEVER)
        else:
            key = before * self.width + i
        buffer = is_buffer(
            kind[i],
            self.known[i],
            leaves=leaves,
            reuse=self.tables.reuse[i],
            shared=self.tables.shared[i],
            extern_read=extern,
            readers=readers,
            kernels=(last >= 0) + (also >= 0),
        )
        return (
            _RUNS,
            key,
            before,
            extern,
            readers,
            reach,
            buffer,
            (key, -1) if buffer or last < 0 else reach,
        )

    def matters(self, i: int, old: _Record, new: _Record) -> bool:
        """Whether what op `i` reads has to be looked at again."""
        if old[0] != _RUNS and new[0] != _RUNS:
            return False
        if old[0] != new[0] or old[2] != new[2] or old[7] != new[7]:
            return True
        return self.kind[i] is OpKind.VIEW and (old[3] != new[3] or old[4] != new[4])

    def op_cost(self, i: int, record: _Record) -> float:
        if record[0] != _RUNS:
            return 0.0
        return self.cost[i] if record[6] else self.cost[i] * self.inlined

    def place_made(self, i: int, journal: _Journal) -> None:
        """Bring the events of what op `i` creates up to date."""
        op = self.graph.ops[i]
        mode, key, _, _, _, reach, buffer, _ = self.records[i]
        events = self.events
        for storage in op.storages:
            size = self.graph.storage_bytes[storage] if mode == _RUNS and buffer else 0
            read = _NEVER
            if size:
                if op.value == storage:
                    read = reach
                else:
                    for u in self.users[i]:
                        if self.graph.ops[u].value == storage and self.records[u][0] == _RUNS:
                            read = last_two(read, self.records[u][7])
            events.put(storage, 2 * key + 1, size, True, journal)
            events.put(events.n + storage, 2 * max(read[0], key) + 2, -size, self.alone(read), journal)

    def alone(self, read: tuple[int, int]) -> bool:
        """Whether a storage that these two kernels read last may be written over by the last one."""
        last, also = read
        return also < 0 or last >= self.end_key or self.tables.frees_for(self.op_at(last), self.op_at(also))

    def op_at(self, key: int) -> int:
        """The op that runs at this time."""
        base, rest = divmod(key, self.width)
        if self.forward:
            return rest - 1 if rest else base - 1
        return rest if rest < self.n else base


class GraphState:
    """One graph under the canonical schedule of a save set that can be changed value by value.

    `forward_rise_bytes`, `backward_rise_bytes`, `saved_bytes`, `cost_ms` are as in
    `core.simulate.GraphProfile`.
    """

    def __init__(
        self, graph: JointGraph, saved: Collection[int] = (), *, policy: FusionPolicy = DEFAULT_POLICY
    ) -> None:
        self.graph = graph
        self.forced = must_save(graph)
        self.keep = [i in self.forced or i in saved for i in range(len(graph.ops))]
        self._back = _Side(graph, policy, RegionKind.BACKWARD)
        self._front = _Side(graph, policy, RegionKind.FORWARD)
        self._weights = entry_weights(graph)
        self._gradients = {op.value for op in graph.ops if is_tangent(op)}
        self._holders: dict[int, list[int]] = {}
        for op in graph.ops:
            if op.value >= 0 and op.phase is not Phase.BACKWARD:
                self._holders.setdefault(op.value, []).append(op.index)
        self.saved_bytes = 0
        self._levels: list[np.ndarray[Any, np.dtype[np.int64]] | None] = [None, None]
        self._journal: _Journal = []
        self._update(range(len(graph.ops)), range(len(graph.ops)))
        self._journal.clear()

    # -- reading
    # -------------------------------------------------------------------------------------------------

    def levels(self, direction: RegionKind) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Live bytes above those at entry, at each allocation of the direction, in order of time."""
        which = direction is RegionKind.BACKWARD
        found = self._levels[which]
        if found is None:
            side = self._back if which else self._front
            found = self._levels[which] = side.events.levels()
        return found

    def rise_bytes(self, direction: RegionKind) -> int:
        """How far the live bytes rise above those at entry."""
        levels = self.levels(direction)
        return max(0, int(levels.max())) if len(levels) else 0

    @property
    def forward_rise_bytes(self) -> int:
        """Of the forward."""
        return self.rise_bytes(RegionKind.FORWARD)

    @property
    def backward_rise_bytes(self) -> int:
        """Of the backward."""
        return self.rise_bytes(RegionKind.BACKWARD)

    @property
    def cost_ms(self) -> float:
        """All ops that run in both directions."""
        return self._front.cost_ms + self._back.cost_ms

    def saved(self) -> tuple[int, ...]:
        """What the backward is handed, ascending (no inputs)."""
        phase = self._back.phase
        return tuple(
            i for i, r in enumerate(self._back.records) if r[0] == _HELD and phase[i] is not Phase.INPUT
        )

    def recomputed(self) -> tuple[int, ...]:
        """What the backward computes again, ascending."""
        return tuple(
            i
            for i, r in enumerate(self._back.records)
            if r[0] == _RUNS and self._back.phase[i] is not Phase.BACKWARD
        )

    def schedule(self) -> GraphSchedule:
        """The state as an explicit schedule."""
        return schedule_for(self.graph, self.saved())

    # -- changing
    # ------------------------------------------------------------------------------------------------

    def flip(self, *indices: int) -> None:
        """Save what was not to be saved, and the other way round. Values that must be saved stay so."""
        touched = []
        for i in indices:
            if i not in self.forced and may_run_again(self.graph.ops[i]) and self.graph.ops[i].saveable:
                self._journal.append((self.keep, i, self.keep[i]))
                self.keep[i] = not self.keep[i]
                touched.append(i)
        self._update(touched, ())

    def assign(self, saved: Collection[int]) -> None:
        """Make `saved` the save set."""
        wanted = set(saved)
        self.flip(*(i for i, kept in enumerate(self.keep) if i not in self.forced and kept != (i in wanted)))

    def mark(self) -> int:
        """A point to which `rollback` can return."""
        self._journal.append((self.__dict__, "saved_bytes", self.saved_bytes))
        self._journal.append((self._front.__dict__, "cost_ms", self._front.cost_ms))
        self._journal.append((self._back.__dict__, "cost_ms", self._back.cost_ms))
        self._journal.append((self._levels, 0, self._levels[0]))
        self._journal.append((self._levels, 1, self._levels[1]))
        return len(self._journal) - 5

    def rollback(self, mark: int) -> None:
        """Undo everything since `mark`."""
        journal = self._journal
        while len(journal) > mark:
            container, key, old = journal.pop()
            container[key] = old

    def commit(self) -> None:
        """Forget how to undo."""
        self._journal.clear()

    def _update(self, back: Iterable[int], front: Iterable[int]) -> None:
        queue = sorted(back, reverse=True)
        released = self._walk(self._back, [-i for i in queue])
        released.update(front)
        if released:
            self._walk(self._front, [-i for i in sorted(released, reverse=True)])

    def _walk(self, side: _Side, heap: list[int]) -> set[int]:
        """Bring records up to date, from readers to what they read; returns ops that became or were held."""
        heapq.heapify(heap)
        queued = set(heap)
        made: set[int] = set()
        entries: set[int] = set()
        changed_held: set[int] = set()
        records, journal = side.records, self._journal
        held_records = self._back.records
        while heap:
            i = -heapq.heappop(heap)
            queued.discard(-i)
            old = records[i]
            held = side.forward and held_records[i][0] == _HELD and side.phase[i] is not Phase.INPUT
            new = side.record(i, self.keep[i], held)
            if side.tuples[i]:
                made.add(i)
            if new == old:
                continue
            journal.append((records, i, old))
            records[i] = new
            side.cost_ms += side.op_cost(i, new) - side.op_cost(i, old)
            if old[0] == _RUNS or new[0] == _RUNS:
                made.add(i)
            if old[0] == _HELD or new[0] == _HELD:
                entries.add(self.graph.ops[i].value)
                if old[0] != new[0]:
                    changed_held.add(i)
            if side.matters(i, old, new):
                for j in side.inputs[i]:
                    if -j not in queued:
                        queued.add(-j)
                        heapq.heappush(heap, -j)
        for i in made:
            side.place_made(i, journal)
        for storage in entries:
            self._place_entry(storage)
        self._levels[not side.forward] = None
        return changed_held

    def _place_entry(self, storage: int) -> None:
        if storage < 0:
            return
        events, records = self._back.events, self._back.records
        held = [records[i][5] for i in self._holders[storage] if records[i][0] == _HELD]
        read = reduce(last_two, held, _NEVER)
        gradient = storage in self._gradients
        size = self.graph.storage_bytes[storage] if gradient else self._weights[storage]
        weight = -size if held else 0
        slot = 2 * events.n + storage
        if not gradient:
            self.saved_bytes += int(events.weights[slot]) - weight
        events.put(slot, 2 * read[0] + 2, weight, self._back.alone(read), self._journal)


class StepState:
    """All graphs of a step under canonical schedules, with the step's peak and time."""

    def __init__(
        self,
        step: StepGraph,
        correction: Correction,
        saved: Sequence[Collection[int]],
        *,
        policy: FusionPolicy = DEFAULT_POLICY,
    ) -> None:
        self.step = step
        self.graphs = [GraphState(g, s, policy=policy) for g, s in zip(step.graphs, saved, strict=True)]
        self.default_ms = default_cost_ms(step, policy=policy)
        self._curves = [
            {d: correction.curve(g.fingerprint, d) for d in (RegionKind.FORWARD, RegionKind.BACKWARD)}
            for g in step.graphs
        ]
        self.calls = [
            sum(r.kind is RegionKind.FORWARD and r.graph == g for r in step.regions)
            for g in range(len(step.graphs))
        ]
        self._eager_ms = sum(r.cost_ms for r in step.regions if r.kind is RegionKind.EAGER)
        self._open = self._open_calls()
        self._base = [
            region.base_bytes + shift
            for region, shift in zip(step.regions, open_shifts(step, policy=policy), strict=True)
        ]

    def _open_calls(self) -> list[tuple[int, ...]]:
        """For each region, how many calls of each graph are open at its entry."""
        count = [0] * len(self.step.graphs)
        out = []
        for region in self.step.regions:
            out.append(tuple(count))
            if region.kind is RegionKind.FORWARD:
                count[region.graph] += 1
            elif region.kind is RegionKind.BACKWARD and region.closes:
                count[region.graph] -= 1
        return out

    @property
    def cost_ms(self) -> float:
        """Modelled time of the step."""
        return self._eager_ms + sum(c * g.cost_ms for c, g in zip(self.calls, self.graphs, strict=True))

    @property
    def slowdown(self) -> float:
        """Modelled time over the default's."""
        return self.cost_ms / self.default_ms if self.default_ms else 1.0

    def _entries(self) -> list[int]:
        saved = [g.saved_bytes for g in self.graphs]
        return [
            base + sum(c * s for c, s in zip(calls, saved, strict=True))
            for base, calls in zip(self._base, self._open, strict=True)
        ]

    def offset_bytes(self, graph: int, direction: RegionKind) -> int:
        """The correction of one direction's rise, under the present save set."""
        return interpolate(self._curves[graph][direction], self.graphs[graph].saved_bytes)

    @property
    def peak_bytes(self) -> int:
        """The step's peak, corrected."""
        best = 0
        for region, entry in zip(self.step.regions, self._entries(), strict=True):
            rise = region.rise_bytes
            if region.kind is not RegionKind.EAGER:
                rise = self.graphs[region.graph].rise_bytes(region.kind)
                rise = max(0, rise + self.offset_bytes(region.graph, region.kind))
            best = max(best, entry + rise)
        return best

    def excess_bytes(self, target_bytes: int) -> int:
        """How much lies above `target_bytes`, summed over the allocations of the step: 0 exactly if the peak
        does not.

        Smoother than the peak: one of two equal peaks lowered is progress here.
        """
        total = 0
        for region, entry in zip(self.step.regions, self._entries(), strict=True):
            room = target_bytes - entry
            if region.kind is RegionKind.EAGER:
                total += max(0, region.rise_bytes - room)
                continue
            room -= self.offset_bytes(region.graph, region.kind)
            levels = np.maximum(self.graphs[region.graph].levels(region.kind), 0)
            total += int(np.maximum(levels - room, 0).sum()) + max(0, -room, entry - target_bytes)
        return total

    def saved(self) -> tuple[tuple[int, ...], ...]:
        """Save set of each graph."""
        return tuple(g.saved() for g in self.graphs)

    def schedules(self) -> tuple[GraphSchedule, ...]:
        """Schedule of each graph."""
        return tuple(g.schedule() for g in self.graphs)

    def assign(self, saved: Sequence[Collection[int]]) -> None:
        """Make `saved` the save sets, for good."""
        for graph, wanted in zip(self.graphs, saved, strict=True):
            graph.assign(wanted)
            graph.commit()
