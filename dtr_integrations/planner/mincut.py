"""Save sets that are optimal at a price: least recomputation plus bytes handed over times ms per byte.

For one price that is a minimum cut, as in torch's partitioner (`torch/_functorch/partitioners.py`,
`min_cut_rematerialization_partition`), but with this library's costs and bytes, and at every price that
matters: those at which the cut changes, found between two known cuts from the line through them (Eisner and
Severance 1976, "Mathematical techniques for efficient record segmentation"). Views are left to what they
view.

What it does not do: it knows of no peak inside the backward, only of what is handed over. It makes starts;
the caller scores and improves them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ..core.graph import JointGraph, OpKind, Phase
from ..core.schedule import is_tangent, may_run_again, must_save
from ..core.simulate import entry_weights
from .problem import Problem

__all__ = ["cheapest", "cut_save_sets", "starts"]

_MOST_OPS = 3000  # of a graph; beyond, a cut takes longer than it is worth here
_MOST_CUTS = 24
_NEVER = float("inf")


class _Network:
    """A flow network, with one capacity for each edge and its reverse at the next index."""

    def __init__(self) -> None:
        self.heads: list[int] = []
        self.room: list[float] = []
        self.out: list[list[int]] = []

    def node(self) -> int:
        self.out.append([])
        return len(self.out) - 1

    def edge(self, tail: int, head: int, room: float) -> int:
        self.out[tail].append(len(self.heads))
        self.out[head].append(len(self.heads) + 1)
        self.heads += [head, tail]
        self.room += [room, 0.0]
        return len(self.heads) - 2

    def source_side(self, source: int, sink: int) -> list[bool]:
        """The source's side of a minimum cut, the smallest one (Dinic 1970)."""
        while True:
            level = self._levels(source)
            if level[sink] < 0:
                return [depth >= 0 for depth in level]
            self._block(source, sink, level)

    def _levels(self, source: int) -> list[int]:
        level = [-1] * len(self.out)
        level[source] = 0
        queue = deque([source])
        while queue:
            at = queue.popleft()
            for e in self.out[at]:
                head = self.heads[e]
                if level[head] < 0 and self.room[e] > 1e-12:
                    level[head] = level[at] + 1
                    queue.append(head)
        return level

    def _block(self, source: int, sink: int, level: list[int]) -> None:
        """Push along shortest ways until none is left."""
        following = [0] * len(self.out)
        path: list[int] = []
        at = source
        while True:
            if at == sink:
                by = min(self.room[e] for e in path)
                full = 0
                for k, e in reversed(list(enumerate(path))):
                    self.room[e] -= by
                    self.room[e ^ 1] += by
                    if self.room[e] <= 1e-12:
                        full = k
                at = self.heads[path[full] ^ 1]
                del path[full:]
                continue
            edges, k = self.out[at], following[at]
            while k < len(edges):
                e = edges[k]
                if self.room[e] > 1e-12 and level[self.heads[e]] == level[at] + 1:
                    break
                k += 1
            following[at] = k
            if k < len(edges):
                path.append(edges[k])
                at = self.heads[edges[k]]
            elif path:
                at = self.heads[path.pop() ^ 1]
                following[at] += 1
            else:
                return


class _Cuts:
    """One graph as a network: each value is *there* in the backward and perhaps *rerun*; it is saved where it
    is there and not rerun."""

    def __init__(self, graph: JointGraph) -> None:
        self.graph = graph
        self.weights = entry_weights(graph)
        network = _Network()
        self.source, self.sink = network.node(), network.node()
        self.there: dict[int, int] = {}
        self.rerun: dict[int, int] = {}
        self.priced: list[tuple[int, int]] = []  # edge, bytes
        forced = must_save(graph)
        for op in graph.ops:
            if may_run_again(op):
                self._value(network, op.index, op.index in forced)
        for op in graph.ops:
            if op.phase is Phase.INPUT and not is_tangent(op) and self.weights[op.value]:
                there = self.there[op.index] = network.node()
                self.priced.append((network.edge(there, self.sink, 0.0), self.weights[op.value]))
        for op in graph.ops:
            for i in op.inputs:
                if i in self.there and op.index in self.rerun:
                    network.edge(self.rerun[op.index], self.there[i], _NEVER)
                elif i in self.there and op.phase is Phase.BACKWARD:
                    network.edge(self.source, self.there[i], _NEVER)
        for i in graph.backward_outputs:
            if i in self.there:
                network.edge(self.source, self.there[i], _NEVER)
        self.network = network
        self.room = tuple(network.room)

    def _value(self, network: _Network, i: int, forced: bool) -> None:
        op = self.graph.ops[i]
        there, rerun = self.there[i], self.rerun[i] = network.node(), network.node()
        network.edge(rerun, self.sink, _NEVER if forced else op.cost_ms)
        base = op.inputs[0] if op.kind is OpKind.VIEW and op.inputs else -1
        through = base >= 0 and not forced and (self.graph.ops[base].saveable or base not in self.rerun)
        if not op.saveable or (through and self.graph.ops[base].phase is not Phase.BACKWARD):
            network.edge(there, rerun, _NEVER)
        else:
            self.priced.append(
                (network.edge(there, rerun, 0.0), self.graph.value_bytes(i) and self.weights[op.value])
            )

    def at(self, price: float) -> tuple[float, int, tuple[int, ...]]:
        """(ms run again, bytes handed over, save set) of a minimum cut."""
        network = self.network
        network.room[:] = self.room
        for e, size in self.priced:
            network.room[e] = price * (size + 1)
        side = network.source_side(self.source, self.sink)
        saved = tuple(i for i in self.rerun if side[self.there[i]] and not side[self.rerun[i]])
        again = sum(self.graph.ops[i].cost_ms for i, node in self.rerun.items() if side[node])
        size = sum(
            size + 1 for e, size in self.priced if side[network.heads[e ^ 1]] and not side[network.heads[e]]
        )
        return again, size, saved


def cut_save_sets(graph: JointGraph) -> Iterator[tuple[int, ...]]:
    """Save sets of minimum cuts, from the least recomputation to the fewest bytes, at most `_MOST_CUTS`."""
    if sum(map(may_run_again, graph.ops)) > _MOST_OPS:
        return
    cuts = _Cuts(graph)
    total_ms = graph.total_cost_ms or 1.0
    total_bytes = sum(graph.storage_bytes) or 1
    ends = [cuts.at(1e-6 * total_ms / total_bytes), cuts.at(1e3 * total_ms)]
    yield from (saved for _, _, saved in ends)
    open_spans = deque([(ends[0], ends[1])])
    found = len(ends)
    while open_spans and found < _MOST_CUTS:
        many, few = open_spans.popleft()
        if many[1] <= few[1] or few[0] <= many[0]:
            continue
        price = (few[0] - many[0]) / (many[1] - few[1])
        between = cuts.at(price)
        if between[1] in (many[1], few[1]):
            continue
        found += 1
        yield between[2]
        open_spans += [(many, between), (between, few)]


def cheapest(graph: JointGraph, price_ms: float) -> tuple[int, ...]:
    """The save set of a minimum cut at a price: ms for each byte handed over, and for each value one more."""
    return _Cuts(graph).at(price_ms)[2]


def starts(problem: Problem) -> Iterator[list[tuple[int, ...]]]:
    """Save sets for the whole step: all graphs at about one price."""
    sets = [list(cut_save_sets(graph)) for graph in problem.step.graphs]
    for k in range(max(map(len, sets), default=0)):
        yield [
            own[min(k, len(own) - 1)] if own else graph.default_saved
            for own, graph in zip(sets, problem.step.graphs, strict=True)
        ]
