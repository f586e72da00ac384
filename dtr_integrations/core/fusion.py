"""Which values of a compiled graph become buffers, and which are fused away: the rule behind the simulator.

Inductor inlines pointwise ops into whatever reads them, so most values never exist. A value gets a buffer
when a library kernel makes or reads it, when it leaves the graph, when a reduction makes it, or when inlining
it would repeat too much work (`torch/_inductor/graph.py`, `run_node`: "Realize if"; `ir.py`,
`StorageBox.should_realize_on_reuse`). What a default compile did is known exactly (`JointGraph.buffers`); the
static rule stands in where nothing is known: recomputed values that the default saved, and graphs that were
never generated.

What the rule does not do: it knows no kernel boundaries (a value realised by the read count but consumed in
the same kernel still counts), no layouts (a copy made for a stride order is not seen) and no reordering by
the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from .graph import JointGraph, OpKind, Phase

__all__ = ["DEFAULT_POLICY", "FusionPolicy", "FusionTables", "fusion_tables", "is_buffer"]

# Inlining these twice is dearer than a buffer (`ir.py`, `heavy_ops`; on CPU only).
_HEAVY_TARGETS = ("exp", "log", "sigmoid", "tanh", "gelu", "silu", "softmax")
# The lowering realises these at once (`lowering.py`, `inductor_random`): a mask that two kernels compute from
# them is never inlined down to the seed, so the numbers themselves, in full precision, are kept.
_REALISED_TARGETS = ("inductor_random", "inductor_randint")


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionPolicy:
    """Named choices of the rule.

    Attributes:
        use_codegen: Prefer what the default's generated code did over the static rule.
        reuse_reads: A value read by several ops becomes a buffer when its expression reads more buffers than
            this.
        chain_reads: A value becomes a buffer whatever reads it when its expression reads more buffers than
            this.
        heavy_reuse: A transcendental op read by several ops becomes a buffer (Inductor on CPU).
        reuse_in_place: A pointwise kernel writes into an input of its own size that dies there.
        donate_saved: ... also if that input was handed over by the forward (AOT's donated buffers).
        inlined_cost: Share of an op's `cost_ms` that is charged when it has no buffer: its memory traffic is
            saved.
    """

    use_codegen: bool = True
    reuse_reads: int = 4
    chain_reads: int = 12
    heavy_reuse: bool = True
    reuse_in_place: bool = True
    donate_saved: bool = True
    inlined_cost: float = 1.0


DEFAULT_POLICY = FusionPolicy()


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionTables:
    """What the rule knows of one graph, per op: True, False, or None where the static rule decides."""

    policy: FusionPolicy
    kinds: tuple[OpKind, ...]
    forward: tuple[bool | None, ...]
    backward: tuple[bool | None, ...]  # the backward's own ops and those that it recomputes
    reuse: tuple[bool, ...]  # becomes a buffer when several ops read it
    shared: tuple[bool, ...]  # becomes a buffer when several kernels read it
    ancestors: tuple[int, ...]  # bit j of entry i: op i depends on op j

    def frees_for(self, last: int, other: int) -> bool:
        """Whether op `last` may write over an input that op `other` reads too.

        Two ops that read one buffer and do not depend on one another end up in one kernel, which then has a
        use for the buffer besides the write.
        """
        return self.kinds[other] is OpKind.EXTERN or bool(self.ancestors[last] >> other & 1)


def is_buffer(
    kind: OpKind,
    known: bool | None,
    *,
    leaves: bool,
    reuse: bool,
    shared: bool,
    extern_read: bool,
    readers: int,
    kernels: int,
) -> bool:
    """Whether a computed value has a buffer of its own.

    Args:
        kind: Of the op that makes it.
        known: What generated code says, if anything; for a library kernel False means that it is folded into
            its reader.
        leaves: It is an output of the program.
        reuse: `FusionTables.reuse` of the op.
        shared: `FusionTables.shared` of the op.
        extern_read: A library kernel or the end of the program reads it, directly or through views.
        readers: Ops that read it, directly or through views.
        kernels: Kernels that read it, through inlined values too: 0, 1, or 2 for more.
    """
    if kind is OpKind.EXTERN:
        return known is not False
    if kind is OpKind.VIEW or kind is OpKind.SYMBOL:
        return False
    if leaves:
        return True
    if known is not None:
        return known
    return kind is OpKind.REDUCTION or extern_read or (reuse and readers > 1) or (shared and kernels > 1)


def fusion_tables(graph: JointGraph, policy: FusionPolicy = DEFAULT_POLICY) -> FusionTables:
    """The rule's tables for `graph`."""
    forward: list[bool | None] = [None] * len(graph.ops)
    backward: list[bool | None] = [None] * len(graph.ops)
    if graph.buffers is not None and policy.use_codegen:
        made, made_back = graph.buffers
        left = _behind_views(graph, {*graph.default_saved, *graph.forward_outputs})
        saved = set(graph.default_saved)
        for op in graph.ops:
            if op.kind is OpKind.EXTERN:
                continue
            if op.phase is Phase.BACKWARD or (op.phase is Phase.FREE and op.index not in saved):
                backward[op.index] = op.index in made_back
            elif op.phase is Phase.FORWARD and op.index not in left:
                # A buffer only because it left the forward says nothing about a compile in which it does not.
                forward[op.index] = backward[op.index] = op.index in made
    shared = [any(name in op.target for name in _REALISED_TARGETS) for op in graph.ops]
    for index, is_shared in enumerate(shared):
        if is_shared:  # the default saves the mask, so its code says nothing about a mask that is made again
            backward[index] = None
    kinds = [op.kind for op in graph.ops]
    for product, total in _folded(graph):
        kinds[total] = OpKind.EXTERN
        forward[total] = backward[total] = None
        forward[product] = backward[product] = False
    return FusionTables(
        policy=policy,
        kinds=tuple(kinds),
        forward=tuple(forward),
        backward=tuple(backward),
        reuse=_reuse(graph, policy),
        shared=tuple(shared),
        ancestors=_ancestors(graph),
    )


def _folded(graph: JointGraph) -> list[tuple[int, int]]:
    """(product, sum) where Inductor turns `mm` + `add` into one `addmm`, which then runs in the place of the
    sum.

    `torch/_inductor/fx_passes/post_grad.py`, `addmm`: a product of two matrices that only an `add` of its
    shape reads, and that is no output. A tied embedding's gradient is such a sum, and its product then holds
    its inputs until the end of the backward.
    """
    found = []
    taken: set[int] = {*graph.forward_outputs, *graph.backward_outputs}
    for op in graph.ops:
        if not op.target.startswith("aten.add.") or op.kind is not OpKind.POINTWISE:
            continue
        for i in op.inputs:
            product = graph.ops[i]
            if (
                product.target.startswith("aten.mm.")
                and len(graph.users[i]) == 1
                and i not in taken
                and graph.value_bytes(i) == graph.value_bytes(op.index)
            ):
                found.append((i, op.index))
                taken.add(i)
                break
    return found


def _ancestors(graph: JointGraph) -> tuple[int, ...]:
    found: list[int] = []
    for op in graph.ops:
        bits = 0
        for i in op.inputs:
            bits |= found[i] | 1 << i
        found.append(bits)
    return tuple(found)


def _behind_views(graph: JointGraph, indices: set[int]) -> set[int]:
    """`indices` and what they are views of."""
    out = set(indices)
    for op in reversed(graph.ops):
        if op.index in out and op.kind is OpKind.VIEW:
            out.update(op.inputs[:1])
    return out


def _reuse(graph: JointGraph, policy: FusionPolicy) -> tuple[bool, ...]:
    """Whether each op's inlined expression reads many buffers: Inductor's lowering, emulated in order."""
    sources: list[frozenset[int]] = [frozenset()] * len(graph.ops)
    reuse = [False] * len(graph.ops)
    for op in graph.ops:
        read = frozenset().union(*(sources[i] for i in op.inputs))
        own = frozenset((op.value,)) if op.value >= 0 else frozenset()
        if op.kind is OpKind.VIEW:
            # A part of a tuple is a buffer; a view of an inlined value is inlined.
            is_part = graph.ops[op.inputs[0]].value < 0
            sources[op.index] = own if is_part else read
            continue
        if op.kind in (OpKind.POINTWISE, OpKind.CONSTANT):
            name = op.target.removeprefix("aten.").removeprefix("prims.").split(".")[0]
            heavy = policy.heavy_reuse and name in _HEAVY_TARGETS
            reuse[op.index] = heavy or len(read) > policy.reuse_reads
            realised = (reuse[op.index] and len(graph.users[op.index]) > 1) or len(read) > policy.chain_reads
            if not realised and not _read_by_extern(graph, op.index):
                sources[op.index] = read
                continue
        sources[op.index] = own
    return tuple(reuse)


def _read_by_extern(graph: JointGraph, index: int) -> bool:
    return any(
        graph.ops[u].kind is OpKind.EXTERN or (graph.ops[u].kind is OpKind.VIEW and _read_by_extern(graph, u))
        for u in graph.users[index]
    )
