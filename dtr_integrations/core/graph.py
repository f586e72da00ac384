"""The training step as plain data: what every solver sees and all that it sees.

A `StepGraph` is one optimizer step as an ordered list of **regions**. A compiled region is the forward or the
backward of a `JointGraph` (what `torch.compile` hands to its partitioner: forward and backward in one list of
ops); an eager region is everything between two compiled ones (loss, clipping, optimizer). Indices are
positions in `JointGraph.ops`; they, not names, identify a value, because two captures of one model agree on
the order and not on the names.

No torch here: sizes are ints (bytes), costs are floats (milliseconds), names are for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from .plan import Draw


class OpKind(StrEnum):
    """How the compiler treats an op: decides what becomes a buffer of its own."""

    INPUT = "input"  # a placeholder: parameter, buffer, batch, activation of an earlier graph, tangent
    VIEW = "view"  # no bytes of its own: shares the storage of its first input (also `getitem` of a tuple op)
    POINTWISE = "pointwise"  # fused into its consumers unless something forces a buffer
    REDUCTION = "reduction"  # fused with producers; its (smaller) result is a buffer
    EXTERN = "extern"  # a library kernel (matmul, convolution, attention): reads and writes real buffers
    CONSTANT = "constant"  # made from nothing (`full`, `iota`): inlined
    SYMBOL = "symbol"  # a number, not a tensor


class Phase(StrEnum):
    """Where an op may run."""

    INPUT = "input"
    FORWARD = "forward"  # needed by the forward's outputs; may be run again in the backward if `replayable`
    BACKWARD = "backward"  # depends on a tangent: runs once, in the backward
    FREE = (
        "free"  # depends on no tangent and feeds no forward output: runs where it is needed (in the backward)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One node of a joint graph.

    `inputs` are op indices in argument order (duplicates removed). `storages` are the storages that this op
    *creates* (several for a tuple op, none for views and numbers); `value` is the storage in which the op's
    own value lives (−1: a number, a tuple or nothing). A view's `value` is the storage of what it views.
    """

    index: int
    name: str
    target: str
    module: str
    kind: OpKind
    phase: Phase
    inputs: tuple[int, ...]
    storages: tuple[int, ...]
    value: int
    cost_ms: float
    replayable: bool  # running it again gives the same bits and no side effect
    saveable: bool  # can be handed from the forward to the backward (a tensor or a number)


@dataclass(frozen=True, kw_only=True)
class JointGraph:
    """Forward and backward of one compiled graph, in the order in which autograd would run them.

    `static` are storages of inputs that live through the whole step whatever the plan (parameters, buffers,
    the batch); `default_saved` is the save set of torch's own min-cut, `save_sets` the same at other
    strictnesses, by name. `buffers` are the ops whose value Inductor gave a buffer of its own when it
    generated the default graphs (learnt from its codegen; `None` before that): (in the forward, in the
    backward). `draws` are the forward's ops that draw from a generator, in the order and with the layout
    that they have in the generated code of the default. `stale` are ops that read an input which the forward
    overwrites at its end: they cannot be run again in the backward. `dropped` are storages of forward
    outputs that the program lets go before any graph runs again (the logits and the key-value cache of a
    model of which only the loss is used): they live on only if they are saved.
    """

    fingerprint: str
    ops: tuple[Op, ...]
    storage_bytes: tuple[int, ...]
    static: frozenset[int]
    forward_outputs: tuple[int, ...]
    backward_outputs: tuple[int, ...]
    default_saved: tuple[int, ...]
    save_sets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    buffers: tuple[frozenset[int], frozenset[int]] | None = None
    draws: tuple[Draw, ...] = ()
    stale: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the ops that read its value, ascending."""
        out: list[list[int]] = [[] for _ in self.ops]
        for op in self.ops:
            for i in op.inputs:
                out[i].append(op.index)
        return tuple(tuple(u) for u in out)

    @cached_property
    def total_cost_ms(self) -> float:
        """Every op once, plus what the default plan computes again."""
        return sum(op.cost_ms for op in self.ops)

    def value_bytes(self, index: int) -> int:
        """Bytes of the storage in which the value of op `index` lives; 0 for a number."""
        value = self.ops[index].value
        return 0 if value < 0 else self.storage_bytes[value]


class RegionKind(StrEnum):
    """What runs in a region."""

    FORWARD = "forward"
    BACKWARD = "backward"
    EAGER = "eager"


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """One stretch of the step, with what the default dry run saw there.

    `graph` indexes `StepGraph.graphs` and `call` numbers the calls of that step (a graph shared by identical
    blocks has several); both are −1 for an eager region. `base_bytes` are live at entry *besides* what calls
    that are still open hold for their backward (static memory, gradients so far, the batch, eager values): it
    does not depend on the plan. `rise_bytes` is how far the live bytes rose above those at entry, inside the
    region, in the default dry run; `cost_ms` counts eager regions only. `open_bytes` is what open calls held
    at entry in the default dry run, where that is known (−1: not). `closes` is False for a backward after
    which another one of the same call runs (`retain_graph`): what is saved is held on.
    """

    kind: RegionKind
    graph: int
    call: int
    base_bytes: int
    rise_bytes: int
    cost_ms: float = 0.0
    open_bytes: int = -1
    closes: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticMemory:
    """What lives for good, in bytes. `batch_bytes` lives through the step; gradients are not static."""

    parameter_bytes: int
    buffer_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    batch_bytes: int

    @property
    def static_bytes(self) -> int:
        """Parameters + buffers + optimizer state, as in the public contract (no gradients, no batch)."""
        return self.parameter_bytes + self.buffer_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """One whole optimizer step: graphs (each once), regions in execution order, static memory, the default's
    exact peak."""

    graphs: tuple[JointGraph, ...]
    regions: tuple[Region, ...]
    static: StaticMemory
    default_peak_bytes: int  # of the dry run with torch's own partition: whole step, static memory included

    @cached_property
    def cost_ms(self) -> float:
        """Modelled time of the default step: every region's ops, the default's recomputation included."""
        from .simulate import default_cost_ms  # the simulator knows what the default computes twice

        return default_cost_ms(self)
