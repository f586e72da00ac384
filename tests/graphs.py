"""Joint graphs for tests: random small ones, a chain that stalls the greedy, and a GPT-like stack."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from dtr_integrations.core.graph import (
    JointGraph,
    Op,
    OpKind,
    Phase,
    Region,
    RegionKind,
    StaticMemory,
    StepGraph,
)
from dtr_integrations.core.schedule import default_schedules
from dtr_integrations.core.simulate import (
    NO_CORRECTION,
    Correction,
    Observation,
    correct,
    simulate_graph,
    simulate_step,
)

# So that random graphs have products that are folded into sums.
_TARGETS = {OpKind.EXTERN: "aten.mm.default", OpKind.POINTWISE: "aten.add.Tensor"}


@dataclass
class Builder:
    """Adds ops one by one; phases are worked out at the end."""

    ops: list[Op] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    static: set[int] = field(default_factory=set)
    tangents: set[int] = field(default_factory=set)

    def add(
        self,
        kind: OpKind,
        inputs: Sequence[int] = (),
        size: int | Sequence[int] = 0,
        *,
        cost: float = 1.0,
        name: str = "",
        target: str = "",
        module: str = "",
        value: int | None = None,
        replayable: bool = True,
        saveable: bool = True,
    ) -> int:
        index = len(self.ops)
        sizes = (size,) if isinstance(size, int) else tuple(size)
        storages: tuple[int, ...] = ()
        if kind is OpKind.VIEW:
            value = self.ops[inputs[0]].value if value is None else value
            cost = 0.0
        elif kind is OpKind.SYMBOL:
            value, cost = -1, 0.0
        else:
            storages = tuple(range(len(self.sizes), len(self.sizes) + len(sizes)))
            self.sizes.extend(sizes)
            value = storages[0] if isinstance(size, int) else -1
            saveable = saveable and isinstance(size, int)
        self.ops.append(
            Op(
                index=index,
                name=name or f"{kind.value}_{index}",
                target=target or _TARGETS.get(kind, f"aten.{kind.value}"),
                module=module,
                kind=kind,
                phase=Phase.INPUT if kind is OpKind.INPUT else Phase.FREE,
                inputs=tuple(dict.fromkeys(inputs)),
                storages=storages,
                value=value,
                cost_ms=0.0 if kind is OpKind.INPUT else cost,
                replayable=replayable,
                saveable=saveable and kind is not OpKind.INPUT,
            )
        )
        return index

    def input(self, size: int, *, static: bool = False, name: str = "") -> int:
        index = self.add(OpKind.INPUT, (), size, name=name or f"primals_{len(self.ops)}")
        if static:
            self.static.add(self.ops[index].value)
        return index

    def tangent(self, size: int) -> int:
        index = self.add(OpKind.INPUT, (), size, name=f"tangents_{len(self.tangents) + 1}")
        self.tangents.add(index)
        return index

    def finish(
        self,
        forward_outputs: Sequence[int],
        backward_outputs: Sequence[int],
        *,
        fingerprint: str = "graph",
        default_saved: Sequence[int] | None = None,
        buffers: tuple[frozenset[int], frozenset[int]] | None = None,
    ) -> JointGraph:
        needed = set(forward_outputs)
        alive = {*forward_outputs, *backward_outputs}
        for op in reversed(self.ops):
            if op.index in needed:
                needed.update(op.inputs)
            if op.index in alive:
                alive.update(op.inputs)
        late = set(self.tangents)
        ops = []
        for op in self.ops:
            if late.intersection(op.inputs):
                late.add(op.index)
            if op.phase is not Phase.INPUT:
                phase = (
                    Phase.BACKWARD
                    if op.index in late
                    else Phase.FORWARD
                    if op.index in needed
                    else Phase.FREE
                )
                op = dataclasses.replace(op, phase=phase)
            ops.append(op)
        assert not late.intersection(forward_outputs)
        if default_saved is None:
            read_back = {i for op in ops if op.phase is Phase.BACKWARD for i in op.inputs}
            default_saved = [
                i for i in sorted(read_back) if ops[i].phase is Phase.FORWARD and ops[i].saveable
            ]
        return JointGraph(
            fingerprint=fingerprint,
            ops=tuple(ops),
            storage_bytes=tuple(self.sizes),
            static=frozenset(self.static),
            forward_outputs=tuple(forward_outputs),
            backward_outputs=tuple(backward_outputs),
            default_saved=tuple(default_saved),
            buffers=buffers,
        )


_KINDS = (
    OpKind.POINTWISE,
    OpKind.POINTWISE,
    OpKind.POINTWISE,
    OpKind.EXTERN,
    OpKind.EXTERN,
    OpKind.VIEW,
    OpKind.REDUCTION,
    OpKind.CONSTANT,
    OpKind.SYMBOL,
)


@st.composite
def joint_graphs(draw: st.DrawFn, *, max_ops: int = 14, fingerprint: str = "graph") -> JointGraph:
    """Small joint graphs with every kind of op: tuples, views, free ops, ops that must not run twice."""
    b = Builder()
    sizes = st.sampled_from([1, 2, 4, 8, 16])
    for i in range(draw(st.integers(1, 3))):
        b.input(draw(sizes), static=draw(st.booleans()), name=f"primals_{i}")
    tangents = [b.tangent(draw(sizes)) for _ in range(draw(st.integers(1, 2)))]

    def grow(readable: list[int]) -> int:
        kind = draw(st.sampled_from(_KINDS))
        if kind is OpKind.VIEW and draw(st.booleans()):  # a tuple op and one part of it at once
            whole = b.add(
                OpKind.EXTERN,
                pick(readable),
                [draw(sizes), draw(sizes)],
                cost=draw(costs),
                replayable=draw(st.integers(0, 5)) > 0,
            )
            readable.append(whole)
            # As capture does: a part of a tuple that must not run again is not to be run again either.
            again = b.ops[whole].replayable
            parts = [b.add(OpKind.VIEW, [whole], value=s, replayable=again) for s in b.ops[whole].storages]
            readable.remove(whole)
            readable.extend(parts)
            return parts[0]
        inputs = [] if kind is OpKind.CONSTANT else pick(readable)
        if kind is OpKind.VIEW:
            inputs = inputs[:1]
        random = kind is OpKind.CONSTANT and draw(st.booleans())
        index = b.add(
            OpKind.POINTWISE if random else kind,
            inputs,
            draw(sizes),
            cost=draw(costs),
            target="prims.inductor_random.default" if random else "",
            replayable=draw(st.integers(0, 9)) > 0,
        )
        readable.append(index)
        return index

    costs = st.sampled_from([0.5, 1.0, 2.0, 5.0])

    def pick(readable: list[int]) -> list[int]:
        recent = readable[-6:] if draw(st.booleans()) else readable
        return draw(st.lists(st.sampled_from(recent), min_size=1, max_size=3))

    readable = [op.index for op in b.ops if op.index not in tangents]
    for _ in range(draw(st.integers(1, max_ops))):
        grow(readable)
    forward = [i for i in readable if b.ops[i].kind is not OpKind.INPUT] or readable
    forward_outputs = draw(st.lists(st.sampled_from(forward), min_size=1, max_size=2, unique=True))
    late = list(tangents)
    for _ in range(draw(st.integers(1, max_ops))):
        if draw(st.integers(0, 4)) == 0:
            grow(readable)
            continue
        inputs = pick(late) + (pick(readable) if draw(st.booleans()) else [])
        kind = draw(st.sampled_from([OpKind.POINTWISE, OpKind.EXTERN, OpKind.REDUCTION, OpKind.VIEW]))
        inputs = inputs[:1] if kind is OpKind.VIEW else inputs
        late.append(b.add(kind, inputs, draw(sizes), cost=draw(costs)))
    outputs = draw(st.lists(st.sampled_from(late[-4:]), min_size=1, max_size=3, unique=True))
    if draw(st.booleans()):
        outputs = [*outputs, *draw(st.lists(st.sampled_from(readable), max_size=1))]
    graph = b.finish(forward_outputs, outputs, fingerprint=fingerprint)
    if draw(st.booleans()):
        made = st.frozensets(st.sampled_from(range(len(graph.ops))))
        graph = dataclasses.replace(graph, buffers=(draw(made), draw(made)))
    inputs = {op.value for op in graph.ops if op.phase is Phase.INPUT}
    made_here = {graph.ops[i].value for i in forward_outputs} - inputs - {-1}
    if made_here and draw(st.booleans()):
        graph = dataclasses.replace(
            graph, dropped=draw(st.frozensets(st.sampled_from(sorted(made_here)), min_size=1))
        )
    return graph


def saveable(graph: JointGraph) -> list[int]:
    """Every op that a save set may name."""
    return [op.index for op in graph.ops if op.phase in (Phase.FORWARD, Phase.FREE) and op.saveable]


@st.composite
def save_sets(draw: st.DrawFn, graph: JointGraph) -> list[int]:
    """Any save set of `graph`."""
    candidates = saveable(graph)
    return draw(st.lists(st.sampled_from(candidates), unique=True)) if candidates else []


@st.composite
def steps(draw: st.DrawFn, *, max_ops: int = 12) -> StepGraph:
    """Steps of one or two graphs, one of which may be called twice, with an eager region in the middle."""
    graphs = [
        draw(joint_graphs(max_ops=max_ops, fingerprint=f"g{i}")) for i in range(draw(st.integers(1, 2)))
    ]
    order = [0, *([1] if len(graphs) == 2 else []), *([0] if draw(st.booleans()) else [])]
    return step_of(graphs, order, eager_rise=draw(st.integers(0, 20)))


def step_of(
    graphs: Sequence[JointGraph],
    order: Sequence[int] | None = None,
    *,
    base_bytes: int = 100,
    eager_rise: int = 0,
    error_bytes: int = 3,
) -> StepGraph:
    """A step that calls `graphs` in `order` and runs the backwards in reverse.

    Its "exact" rises are the simulator's own plus `error_bytes`, so that a correction has something to do.
    """
    order = list(range(len(graphs))) if order is None else list(order)
    profiles = [simulate_graph(g, s) for g, s in zip(graphs, default_schedules(graphs), strict=True)]
    regions = []
    calls: list[tuple[int, int]] = []
    for g in order:
        calls.append((g, sum(c[0] == g for c in calls)))
    for g, call in calls:
        rise = profiles[g].forward_rise_bytes + error_bytes
        regions.append(
            Region(kind=RegionKind.FORWARD, graph=g, call=call, base_bytes=base_bytes, rise_bytes=rise)
        )
    regions.append(
        Region(
            kind=RegionKind.EAGER,
            graph=-1,
            call=-1,
            base_bytes=base_bytes,
            rise_bytes=eager_rise,
            cost_ms=1.0,
        )
    )
    for g, call in reversed(calls):
        rise = profiles[g].backward_rise_bytes + error_bytes
        regions.append(
            Region(kind=RegionKind.BACKWARD, graph=g, call=call, base_bytes=base_bytes, rise_bytes=rise)
        )
    memory = StaticMemory(
        parameter_bytes=base_bytes // 2, buffer_bytes=0, optimizer_bytes=0, gradient_bytes=0, batch_bytes=0
    )
    draft = StepGraph(graphs=tuple(graphs), regions=tuple(regions), static=memory, default_peak_bytes=0)
    levels = simulate_step(draft, default_schedules(graphs)).levels
    return dataclasses.replace(draft, default_peak_bytes=max(level.peak_bytes for level in levels))


def chain(length: int = 6, size: int = 16) -> JointGraph:
    """A chain of library kernels of which the backward reads every link through two views.

    The default saves both views of a link, one storage: dropping either frees nothing, dropping both does.
    """
    b = Builder()
    x = b.input(size, static=True)
    t = b.tangent(size)
    link = x
    views = []
    for i in range(length):
        made = b.add(OpKind.EXTERN, [link], size, name=f"link{i}", module=f"blocks.{i}", cost=10.0)
        views.append((b.add(OpKind.VIEW, [made]), b.add(OpKind.VIEW, [made])))
        link = views[-1][0]
    out = b.add(OpKind.REDUCTION, [link], 1, name="out")
    grad = t
    grads = []
    for i in range(length - 1, -1, -1):
        left, right = views[i]
        grads.append(b.add(OpKind.EXTERN, [grad, left], 1, name=f"dw{i}", cost=10.0))
        grad = b.add(OpKind.EXTERN, [grad, right], size, name=f"dlink{i}", cost=10.0)
    saved = [i for pair in views for i in pair]
    return b.finish([out], [*grads, grad], fingerprint="chain", default_saved=saved)


def gpt_like(layers: int = 6, d: int = 16, fingerprint: str = "gpt") -> JointGraph:
    """The shape of a GPT's joint graph (about 100 ops a layer); a residual stream is `d` bytes."""
    b = Builder()
    tokens = b.input(1, static=True)
    table = b.input(4 * d, static=True)
    params = [
        {k: b.input(s * d // 4, static=True) for k, s in (("qkv", 3), ("proj", 1), ("fc", 4), ("out", 4))}
        for _ in range(layers)
    ]
    scale = b.input(1, static=True)
    t = b.tangent(d)

    def norm(x: int, module: str) -> tuple[int, int, int]:
        whole = b.add(OpKind.REDUCTION, [x], [1, 1], cost=0.05, module=module)
        var, mean = (b.add(OpKind.VIEW, [whole], value=s, module=module) for s in b.ops[whole].storages)
        eps = b.add(OpKind.POINTWISE, [var], 1, cost=0.0, module=module)
        rstd = b.add(OpKind.POINTWISE, [eps], 1, cost=0.0, target="aten.rsqrt.default", module=module)
        centred = b.add(OpKind.POINTWISE, [x, mean], d, cost=0.06, module=module)
        unit = b.add(OpKind.POINTWISE, [centred, rstd], d, cost=0.06, module=module)
        scaled = b.add(OpKind.POINTWISE, [unit, scale], d, cost=0.06, module=module)
        return b.add(OpKind.POINTWISE, [scaled, scale], d, cost=0.06, module=module), unit, rstd

    def linear(x: int, weight: int, size: int, cost: float, module: str) -> int:
        flat = b.add(OpKind.VIEW, [x], module=module)
        turned = b.add(OpKind.VIEW, [weight], module=module)
        made = b.add(OpKind.EXTERN, [flat, turned], size, cost=cost, module=module)
        return b.add(OpKind.VIEW, [made], module=module)

    seeds = b.add(OpKind.POINTWISE, [], 1, cost=0.0, replayable=False, target="prims.inductor_seeds.default")

    def drop(x: int, module: str) -> tuple[int, int]:
        seed = b.add(OpKind.POINTWISE, [seeds], 1, cost=0.0, module=module)
        noise = b.add(
            OpKind.POINTWISE, [seed], d, cost=0.03, module=module, target="prims.inductor_random.default"
        )
        mask = b.add(OpKind.POINTWISE, [noise], d // 4, cost=0.03, module=module)
        kept = b.add(OpKind.POINTWISE, [mask, x], d, cost=0.06, module=module)
        return b.add(OpKind.POINTWISE, [kept], d, cost=0.06, module=module), mask

    x = b.add(OpKind.POINTWISE, [tokens, table], d, cost=0.03, module="tok")
    tape = []
    for i, p in enumerate(params):
        name = f"blocks.{i}"
        y, unit1, rstd1 = norm(x, f"{name}.ln1")
        qkv = linear(y, p["qkv"], 3 * d, 3.0, f"{name}.qkv")
        q, k, v = (
            b.add(OpKind.VIEW, [b.add(OpKind.VIEW, [qkv], module=name)], module=name) for _ in range(3)
        )
        whole = b.add(OpKind.EXTERN, [q, k, v], [d, 1], cost=4.0, module=name)
        att, lse = (b.add(OpKind.VIEW, [whole], value=s, module=name) for s in b.ops[whole].storages)
        proj = linear(att, p["proj"], d, 1.0, f"{name}.proj")
        dropped1, mask1 = drop(proj, f"{name}.drop")
        mid = b.add(OpKind.POINTWISE, [x, dropped1], d, cost=0.09, module=name)
        z, unit2, rstd2 = norm(mid, f"{name}.ln2")
        fc = linear(z, p["fc"], 4 * d, 4.0, f"{name}.fc")
        half = b.add(OpKind.POINTWISE, [fc], 4 * d, cost=0.2, module=name)
        erf = b.add(OpKind.POINTWISE, [fc], 4 * d, cost=0.2, target="aten.erf.default", module=name)
        gelu = b.add(OpKind.POINTWISE, [half, erf], 4 * d, cost=0.3, module=name)
        out = linear(gelu, p["out"], d, 4.0, f"{name}.out")
        dropped2, mask2 = drop(out, f"{name}.drop")
        new = b.add(OpKind.POINTWISE, [mid, dropped2], d, cost=0.09, module=name)
        tape.append((p, y, unit1, rstd1, q, k, v, att, lse, mask1, z, unit2, rstd2, fc, erf, gelu, mask2))
        x = new
    result = b.add(OpKind.EXTERN, [x, table], d, cost=1.0, module="head")
    grads: list[int] = []

    def linear_back(g: int, weight: int, x: int, size: int, cost: float) -> int:
        back = b.add(OpKind.EXTERN, [g, weight], size, cost=cost)
        turned = b.add(OpKind.VIEW, [g])
        grads.append(b.add(OpKind.EXTERN, [turned, x], b.sizes[b.ops[weight].value], cost=cost))
        grads.append(b.add(OpKind.REDUCTION, [g], 1, cost=0.05))
        return back

    def norm_back(g: int, unit: int, rstd: int) -> int:
        scaled = b.add(OpKind.POINTWISE, [g, scale], d, cost=0.06)
        a = b.add(OpKind.REDUCTION, [scaled], 1, cost=0.05)
        weighted = b.add(OpKind.POINTWISE, [scaled, unit], d, cost=0.06)
        c = b.add(OpKind.REDUCTION, [weighted], 1, cost=0.05)
        grads.append(b.add(OpKind.REDUCTION, [weighted], 1, cost=0.05))
        inner = b.add(OpKind.POINTWISE, [scaled, a, unit, c], d, cost=0.06)
        return b.add(OpKind.POINTWISE, [inner, rstd], d, cost=0.06)

    grads.append(b.add(OpKind.EXTERN, [t, x], 4 * d, cost=1.0))
    g = b.add(OpKind.EXTERN, [t, table], d, cost=1.0)
    for p, y, unit1, rstd1, q, k, v, att, lse, mask1, z, unit2, rstd2, fc, erf, gelu, mask2 in reversed(tape):
        masked = b.add(OpKind.POINTWISE, [g, mask2], d, cost=0.06)
        g_gelu = linear_back(masked, p["out"], gelu, 4 * d, 4.0)
        density = b.add(OpKind.POINTWISE, [fc], 4 * d, cost=0.2, target="aten.exp.default")
        slope = b.add(OpKind.POINTWISE, [erf, density], 4 * d, cost=0.2)
        g_fc = b.add(OpKind.POINTWISE, [g_gelu, slope], 4 * d, cost=0.3)
        g_z = linear_back(g_fc, p["fc"], z, d, 4.0)
        g = b.add(OpKind.POINTWISE, [g, norm_back(g_z, unit2, rstd2)], d, cost=0.09)
        masked = b.add(OpKind.POINTWISE, [g, mask1], d, cost=0.06)
        g_att = linear_back(masked, p["proj"], att, d, 1.0)
        parts = b.add(OpKind.EXTERN, [g_att, q, k, v, att, lse], [d, d, d], cost=8.0)
        joined = b.add(
            OpKind.POINTWISE,
            [b.add(OpKind.VIEW, [parts], value=s) for s in b.ops[parts].storages],
            3 * d,
            cost=0.2,
        )
        g_y = linear_back(joined, p["qkv"], y, d, 3.0)
        g = b.add(OpKind.POINTWISE, [g, norm_back(g_y, unit1, rstd1)], d, cost=0.09)
    grads.append(b.add(OpKind.EXTERN, [g, tokens], 4 * d, cost=1.0))
    saved = [seeds, x]
    for _, y, unit1, rstd1, q, k, v, att, lse, mask1, z, unit2, rstd2, fc, _, gelu, mask2 in tape:
        saved += [y, unit1, rstd1, q, k, v, att, lse, mask1, z, unit2, rstd2, fc, gelu, mask2]
    return b.finish([result], grads, fingerprint=fingerprint, default_saved=sorted(saved))


def training_graph(seed: int, ops: int, *, views: bool = True) -> JointGraph:
    """A random network of about `ops` ops and its backward: each op's gradient reads some of what the op read
    and made; sizes and costs vary by a factor of 16. Half of them carry what generated code would say."""
    rng = random.Random(seed)
    b = Builder()
    values = [b.input(rng.choice([4, 8, 16]), static=rng.random() < 0.5) for _ in range(2)]
    weights = {b.input(rng.choice([2, 4]), static=True) for _ in range(3)}
    t = b.tangent(8)
    tape: list[tuple[int, list[int], bool]] = []
    while len(b.ops) < ops * 2 // 5:
        recent = values[-4:] if rng.random() < 0.8 else values
        inputs = list(dict.fromkeys(rng.choice(recent) for _ in range(rng.choice([1, 1, 2]))))
        size = rng.choice([4, 8, 16, 32, 64])
        roll = rng.random()
        if roll < 0.35:
            made = b.add(
                OpKind.EXTERN, [*inputs, rng.choice(sorted(weights))], size, cost=rng.choice([4, 16, 32])
            )
        elif roll < 0.8:
            size = max(b.sizes[b.ops[i].value] for i in inputs)
            once = rng.random() < 0.03
            made = b.add(OpKind.POINTWISE, inputs, size, cost=rng.choice([0.5, 1, 2]), replayable=not once)
        elif roll < 0.9 and views:
            made = b.add(OpKind.VIEW, inputs[:1])
        else:
            made = b.add(OpKind.REDUCTION, inputs, rng.choice([1, 2]), cost=rng.choice([0.5, 1]))
        tape.append((made, inputs, roll < 0.35))
        values.append(made)
    out = values[-1]
    incoming: dict[int, list[int]] = {out: [t]}
    results: list[int] = []
    for made, inputs, extern in reversed(tape):
        if not (grads := incoming.get(made)):
            continue
        size = b.sizes[b.ops[made].value]
        g = grads[0] if len(grads) == 1 else b.add(OpKind.POINTWISE, grads, size, cost=1)
        for i in inputs:
            if i in values[:2] and b.ops[i].kind is OpKind.INPUT:
                continue
            reads = [g, *([rng.choice([made, i])] if rng.random() < 0.8 else [])]
            kind = OpKind.EXTERN if extern else OpKind.POINTWISE
            size = b.sizes[b.ops[i].value]
            incoming.setdefault(i, []).append(b.add(kind, reads, size, cost=16 if extern else 1))
        if extern:
            results.append(b.add(OpKind.EXTERN, [g, inputs[0]], 4, cost=16))
    results = results or [g for grads in incoming.values() for g in grads[-1:]]
    graph = b.finish([out], results)
    if rng.random() < 0.5:
        made_too = [frozenset(op.index for op in graph.ops if rng.random() < 0.6) for _ in range(2)]
        graph = dataclasses.replace(graph, buffers=(made_too[0], made_too[1]))
    return graph


def calibrate(step: StepGraph) -> Correction:
    """The correction that the default's rises suggest, where the simulator was too low."""
    schedules = default_schedules(step.graphs)
    seen = [
        Observation(
            graph=step.graphs[region.graph],
            schedule=schedules[region.graph],
            direction=region.kind,
            rise_bytes=region.rise_bytes,
        )
        for region in step.regions
        if region.kind is not RegionKind.EAGER
    ]
    found = correct(NO_CORRECTION, seen).points
    return Correction(points=tuple((name, where, saved, max(0, by)) for name, where, saved, by in found))
