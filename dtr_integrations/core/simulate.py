"""The search tier's memory model: what a schedule's peak will be, in milliseconds and without torch.

For each direction of each graph the bytes alive are followed from op to op: storages, not values (views are
free, a storage counts once), and only values that become buffers (`fusion`). An op that is inlined reads its
inputs when the kernel into which it was inlined runs, so a storage dies with the last *kernel* that reads it.
A step is the sum: what is live at a region's entry whatever the plan (`Region.base_bytes`), what open calls
hold for their backward, and how far the region rises above that. The second seed's planner counts the same
way across stacked graphs; fusion and the correction are ours.

What it does not do: kernel boundaries, scheduling and layout copies of the compiler are not modelled
(`fusion`), so rises are off by some percent. Nor is Inductor's pool of dead buffers that it keeps for later
ones of their size: it fills whatever room its own, higher estimate of the peak leaves, and a planned graph is
better compiled without (`allow_buffer_reuse=False`). `Correction` carries what exact dry runs said and shifts
the rises accordingly.

All sizes are bytes, all times milliseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .fusion import DEFAULT_POLICY, FusionPolicy, FusionTables, fusion_tables, is_buffer
from .graph import JointGraph, OpKind, Phase, RegionKind, StepGraph
from .plan import GraphSchedule
from .schedule import Program, backward_program, default_schedules, forward_program, is_tangent

__all__ = [
    "NO_CORRECTION",
    "Buffer",
    "Correction",
    "GraphProfile",
    "Observation",
    "RegionLevel",
    "StepSimulation",
    "correct",
    "default_cost_ms",
    "entry_weights",
    "held_at_peak",
    "open_shifts",
    "simulate_graph",
    "simulate_step",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """A storage in one direction of a graph: `born` and `dies` are nodes of the program (−1: at entry)."""

    op: int
    storage: int
    size_bytes: int
    born: int
    dies: int
    also: int = -1  # another node whose kernel reads it: the last one before `dies`


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trace:
    rise_bytes: int
    at: int  # node at which the live bytes are highest
    buffers: tuple[Buffer, ...]
    cost_ms: float
    again_ms: float  # the part of `cost_ms` that recomputes forward values


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphProfile:
    """One graph under one schedule.

    Attributes:
        forward_rise_bytes: How far live bytes rise above those at entry, inside the forward.
        saved_bytes: Storages that the forward hands to the backward: each once, without static ones and
            without outputs that the program around the graph holds. Inputs that the backward reads count.
        backward_rise_bytes: As the forward's; at entry the saved storages and the incoming gradients are
            live.
        forward_out_bytes: New storages among the forward's outputs.
        cost_ms: All ops that run in both directions.
        recompute_ms: The part of `cost_ms` that runs forward ops again.
    """

    forward_rise_bytes: int
    saved_bytes: int
    backward_rise_bytes: int
    forward_out_bytes: int
    cost_ms: float
    recompute_ms: float


def entry_weights(graph: JointGraph) -> tuple[int, ...]:
    """Bytes that each storage counts when handed to the backward; 0 if something else holds it anyway."""
    held = {graph.ops[i].value for i in graph.forward_outputs} - graph.dropped | graph.static
    return tuple(0 if s in held else size for s, size in enumerate(graph.storage_bytes))


def simulate_graph(
    graph: JointGraph, schedule: GraphSchedule, *, policy: FusionPolicy = DEFAULT_POLICY
) -> GraphProfile:
    """Profile of both directions. Raises ValueError when the schedule does not make what it reads."""
    tables = fusion_tables(graph, policy)
    weights = entry_weights(graph)
    program = backward_program(graph, schedule)
    forward = _trace(graph, tables, forward_program(graph, schedule), RegionKind.FORWARD, weights)
    backward = _trace(graph, tables, program, RegionKind.BACKWARD, weights)
    entries = [graph.ops[i] for i in program.ops[: program.entries]]
    saved = {op.value for op in entries if op.value >= 0 and not is_tangent(op)}
    outputs = {s for i in graph.forward_outputs if (s := graph.ops[i].value) >= 0}
    made = {s for op in graph.ops if op.phase is not Phase.INPUT for s in op.storages}
    return GraphProfile(
        forward_rise_bytes=forward.rise_bytes,
        saved_bytes=sum(weights[s] for s in saved),
        backward_rise_bytes=backward.rise_bytes,
        forward_out_bytes=sum(graph.storage_bytes[s] for s in outputs & made),
        cost_ms=forward.cost_ms + backward.cost_ms,
        recompute_ms=backward.again_ms,
    )


def _trace(
    graph: JointGraph,
    tables: FusionTables,
    program: Program,
    direction: RegionKind,
    weights: Sequence[int],
) -> _Trace:
    ops = [graph.ops[i] for i in program.ops]
    kinds = [tables.kinds[i] for i in program.ops]
    known = tables.forward if direction is RegionKind.FORWARD else tables.backward
    end = len(ops)
    # The last two kernels that read the node's value, and the last two in which the node itself runs.
    reach: list[tuple[int, int]] = [(-1, -1)] * end
    read_at: list[tuple[int, int]] = [(-1, -1)] * end
    extern = [False] * end
    readers = [0] * end
    buffered = [False] * end
    leaves = [False] * end
    users: list[list[int]] = [[] for _ in ops]
    for k in program.outputs:
        reach[k], extern[k], leaves[k] = (end, -1), True, True
    cost_ms = again_ms = 0.0
    for k in range(end - 1, -1, -1):
        op = ops[k]
        if k < program.entries:
            continue
        buffered[k] = is_buffer(
            kinds[k],
            known[op.index],
            leaves=leaves[k],
            reuse=tables.reuse[op.index],
            shared=tables.shared[op.index],
            extern_read=extern[k],
            readers=readers[k],
            kernels=(reach[k][0] >= 0) + (reach[k][1] >= 0),
        )
        read_at[k] = (k, -1) if buffered[k] or reach[k][0] < 0 else reach[k]
        cost = op.cost_ms * (1.0 if buffered[k] else tables.policy.inlined_cost)
        cost_ms += cost
        again_ms += cost if direction is RegionKind.BACKWARD and op.phase is Phase.FORWARD else 0.0
        for j in program.reads[k]:
            users[j].append(k)
            if kinds[k] is OpKind.SYMBOL:
                continue  # a size is read without the data
            reach[j] = last_two(reach[j], read_at[k])
            is_view = kinds[k] is OpKind.VIEW
            extern[j] = extern[j] or kinds[k] is OpKind.EXTERN or (is_view and extern[k])
            readers[j] += readers[k] if is_view else 1

    buffers: list[Buffer] = []
    if direction is RegionKind.BACKWARD:
        dies: dict[int, tuple[int, int]] = {}
        for k in range(program.entries):
            if (storage := ops[k].value) >= 0:
                dies[storage] = last_two(dies.get(storage, (-1, -1)), reach[k])
        gradients = {ops[k].value for k in range(program.entries) if is_tangent(ops[k])}
        for storage, (last, also) in dies.items():
            size = graph.storage_bytes[storage] if storage in gradients else weights[storage]
            op_index = next(o.index for o in ops if o.value == storage)
            buffers.append(
                Buffer(op=op_index, storage=storage, size_bytes=size, born=-1, dies=last, also=also)
            )
        donated = {s for s in dies if s not in gradients} if tables.policy.donate_saved else set()
    else:
        donated = set()
    for k in range(program.entries, end):
        if not buffered[k]:
            continue
        for storage in ops[k].storages:
            last, also = reach[k] if ops[k].value == storage else (-1, -1)
            if ops[k].value != storage:
                for u in users[k]:
                    if ops[u].value == storage:
                        last, also = last_two((last, also), read_at[u])
            buffers.append(
                Buffer(
                    op=ops[k].index,
                    storage=storage,
                    size_bytes=graph.storage_bytes[storage],
                    born=k,
                    dies=max(last, k),
                    also=also,
                )
            )
    rise_bytes, at = _peak(program.ops, buffers, donated, tables)
    return _Trace(rise_bytes=rise_bytes, at=at, buffers=tuple(buffers), cost_ms=cost_ms, again_ms=again_ms)


def last_two(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The two largest different numbers of two such pairs; -1 stands for none."""
    if b[0] > a[0]:
        a, b = b, a
    return a[0], max(a[1], b[1] if b[0] == a[0] else b[0])


def _peak(
    ops: Sequence[int], buffers: Sequence[Buffer], donated: set[int], tables: FusionTables
) -> tuple[int, int]:
    born: defaultdict[int, list[Buffer]] = defaultdict(list)
    died: defaultdict[int, list[Buffer]] = defaultdict(list)
    for buffer in buffers:
        if buffer.born >= 0:
            born[buffer.born].append(buffer)
        died[buffer.dies].append(buffer)
    rise, at = 0, -1
    live = -sum(b.size_bytes for b in died[-1])  # handed over for its size alone
    for k, op in enumerate(ops):
        new = sum(b.size_bytes for b in born[k])
        live += new
        in_place = (
            tables.policy.reuse_in_place
            and tables.kinds[op] is OpKind.POINTWISE
            and any(
                b.size_bytes == new
                and b.born < k
                and (b.born >= 0 or b.storage in donated)
                and (b.also < 0 or tables.frees_for(op, ops[b.also]))
                for b in died[k]
            )
        )
        if (level := live - new if in_place else live) > rise:
            rise, at = level, k
        live -= sum(b.size_bytes for b in died[k])
    return rise, at


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """An exact rise: of one direction of `graph` under `schedule`, from a dry run of its generated code."""

    graph: JointGraph
    schedule: GraphSchedule
    direction: RegionKind
    rise_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """What exact dry runs said about the simulator: `exact − simulated` rise at some saved bytes, per graph
    direction.

    `points` holds (fingerprint, direction, saved bytes of the schedule, offset bytes). Schedules in between
    get the linear interpolation, schedules outside the nearest point's offset; no points, no offset.
    """

    points: tuple[tuple[str, RegionKind, int, int], ...] = ()

    def curve(self, fingerprint: str, direction: RegionKind) -> tuple[tuple[int, int], ...]:
        """(saved bytes, offset bytes) for one direction, ascending; the larger offset where two coincide."""
        found: dict[int, int] = {}
        for name, where, saved, offset in self.points:
            if name == fingerprint and where is direction:
                found[saved] = max(offset, found.get(saved, offset))
        return tuple(sorted(found.items()))

    def offset_bytes(self, fingerprint: str, direction: RegionKind, saved_bytes: int) -> int:
        """Bytes to add to a simulated rise."""
        return interpolate(self.curve(fingerprint, direction), saved_bytes)


def interpolate(curve: Sequence[tuple[int, int]], at: int) -> int:
    """Piecewise linear through `curve` (ascending), constant outside, 0 without points; ints in, int out."""
    if not curve:
        return 0
    if at <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) // (x1 - x0)
    return curve[-1][1]


NO_CORRECTION = Correction()


def correct(
    correction: Correction, observations: Iterable[Observation], *, policy: FusionPolicy = DEFAULT_POLICY
) -> Correction:
    """`correction` with what `observations` add. Pure."""
    points = list(correction.points)
    for seen in observations:
        profile = simulate_graph(seen.graph, seen.schedule, policy=policy)
        forward = seen.direction is RegionKind.FORWARD
        simulated = profile.forward_rise_bytes if forward else profile.backward_rise_bytes
        point = (seen.graph.fingerprint, seen.direction, profile.saved_bytes, seen.rise_bytes - simulated)
        if point not in points:
            points.append(point)
    return Correction(points=tuple(points))


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionLevel:
    """Bytes of one region: at its entry (static memory included), and how far it rises above that."""

    entry_bytes: int
    rise_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive inside the region."""
        return self.entry_bytes + self.rise_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSimulation:
    """One step under one schedule per graph.

    Attributes:
        peak_bytes: The most bytes alive, static memory included.
        slowdown: Modelled time over the default's; may be below 1 when a schedule recomputes less than the
            default.
        cost_ms: Modelled time.
        levels: One for each region of the step.
        peak_region: Index of the region that holds the peak (−1: the step has none).
        graphs: Profile of each graph, uncorrected.
    """

    peak_bytes: int
    slowdown: float
    cost_ms: float
    levels: tuple[RegionLevel, ...]
    peak_region: int
    graphs: tuple[GraphProfile, ...]


def simulate_step(
    step: StepGraph,
    schedules: Sequence[GraphSchedule],
    *,
    correction: Correction = NO_CORRECTION,
    policy: FusionPolicy = DEFAULT_POLICY,
) -> StepSimulation:
    """The whole step's peak and time under `schedules` (one per graph, in any order).

    A graph whose schedule says `default` has the rises that its dry run measured. Raises ValueError when a
    graph has no schedule or a schedule cannot run.
    """
    by_name = {schedule.fingerprint: schedule for schedule in schedules}
    if missing := [g.fingerprint for g in step.graphs if g.fingerprint not in by_name]:
        raise ValueError(f"no schedule for graph {missing[0]}")
    chosen = [by_name[g.fingerprint] for g in step.graphs]
    graphs = [simulate_graph(g, s, policy=policy) for g, s in zip(step.graphs, chosen, strict=True)]
    levels = []
    open_bytes = 0
    for region, shift in zip(step.regions, open_shifts(step, policy=policy), strict=True):
        rise = region.rise_bytes
        if region.kind is not RegionKind.EAGER and not chosen[region.graph].default:
            rise = _rise(step.graphs[region.graph], graphs[region.graph], region.kind, correction)
        levels.append(RegionLevel(entry_bytes=region.base_bytes + open_bytes + shift, rise_bytes=rise))
        if region.kind is RegionKind.FORWARD:
            open_bytes += graphs[region.graph].saved_bytes
        elif region.kind is RegionKind.BACKWARD and region.closes:
            open_bytes -= graphs[region.graph].saved_bytes
    peak_region = max(range(len(levels)), key=lambda r: levels[r].peak_bytes, default=-1)
    cost_ms = _step_cost_ms(step, graphs)
    is_default = all(schedule.default for schedule in chosen)
    default_ms = cost_ms if is_default else default_cost_ms(step, policy=policy)
    return StepSimulation(
        peak_bytes=step.default_peak_bytes if is_default else levels[peak_region].peak_bytes,
        slowdown=cost_ms / default_ms if default_ms else 1.0,
        cost_ms=cost_ms,
        levels=tuple(levels),
        peak_region=peak_region,
        graphs=tuple(graphs),
    )


def open_shifts(step: StepGraph, *, policy: FusionPolicy = DEFAULT_POLICY) -> list[int]:
    """For each region, exact minus simulated bytes that open calls of the default hold at its entry; 0 if not
    known.

    What the compiler saves beside the save set (copies of inputs in another layout) is the same whatever the
    plan.
    """
    if all(region.open_bytes < 0 for region in step.regions):
        return [0] * len(step.regions)
    saved = [
        simulate_graph(g, s, policy=policy).saved_bytes
        for g, s in zip(step.graphs, default_schedules(step.graphs), strict=True)
    ]
    shifts = []
    simulated = 0
    for region in step.regions:
        shifts.append(region.open_bytes - simulated if region.open_bytes >= 0 else 0)
        if region.kind is RegionKind.FORWARD:
            simulated += saved[region.graph]
        elif region.kind is RegionKind.BACKWARD and region.closes:
            simulated -= saved[region.graph]
    return shifts


def _rise(graph: JointGraph, profile: GraphProfile, direction: RegionKind, correction: Correction) -> int:
    forward = direction is RegionKind.FORWARD
    rise = profile.forward_rise_bytes if forward else profile.backward_rise_bytes
    return max(0, rise + correction.offset_bytes(graph.fingerprint, direction, profile.saved_bytes))


def _step_cost_ms(step: StepGraph, graphs: Sequence[GraphProfile]) -> float:
    total = 0.0
    for region in step.regions:
        if region.kind is RegionKind.EAGER:
            total += region.cost_ms
        elif region.kind is RegionKind.FORWARD:
            total += graphs[region.graph].cost_ms
    return total


def default_cost_ms(step: StepGraph, *, policy: FusionPolicy = DEFAULT_POLICY) -> float:
    """Modelled time of the default step: every region's ops, the default's recomputation included."""
    schedules = default_schedules(step.graphs)
    return _step_cost_ms(
        step, [simulate_graph(g, s, policy=policy) for g, s in zip(step.graphs, schedules, strict=True)]
    )


def held_at_peak(
    graph: JointGraph,
    schedule: GraphSchedule,
    direction: RegionKind,
    *,
    policy: FusionPolicy = DEFAULT_POLICY,
) -> tuple[tuple[int, int], ...]:
    """(op index, bytes) of the storages alive where the direction's live bytes are highest, largest first.

    What the forward hands over is named in both directions; what lives outside the graph is not.
    """
    forward = direction is RegionKind.FORWARD
    program = forward_program(graph, schedule) if forward else backward_program(graph, schedule)
    trace = _trace(graph, fusion_tables(graph, policy), program, direction, entry_weights(graph))
    alive = [b for b in trace.buffers if b.born <= trace.at <= b.dies and b.size_bytes]
    entry = sum(b.size_bytes for b in trace.buffers if b.born < 0)
    if (
        twice := sum(b.size_bytes for b in alive) - entry - trace.rise_bytes
    ):  # written over at the peak itself
        alive.remove(next(b for b in alive if b.size_bytes == twice and b.born < b.dies == trace.at))
    return tuple(sorted(((b.op, b.size_bytes) for b in alive), key=lambda held: (-held[1], held[0])))
