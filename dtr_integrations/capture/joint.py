"""From torch's joint graph to plain data: `core.graph.JointGraph`.

It is described in its canonical form (`_compat.canonical`). `Draft` holds what is
known when the partitioner is called; what only the dry run can tell (which inputs live for good, which values
become buffers) is added by `finish`.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .._compat import COMPILED_ROOT, partitioners
from ..core.graph import JointGraph, Op, OpKind, Phase
from ..core.plan import Draw
from .costs import Rates, op_cost_ms

_aten = torch.ops.aten
_prims = torch.ops.prims

# Library kernels that Inductor has a lowering for, but that still read and write real buffers.
_EXTERN = {
    _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten._int_mm, _aten._scaled_mm, _aten.convolution,
    _aten.convolution_backward, _aten.index_put, _aten.index_put_, _aten._unsafe_index_put, _aten.scatter_add,
    _aten.scatter, _aten.scatter_reduce, _aten.sort, _aten.topk, _aten.cumsum, _aten.cumprod,
    _aten._embedding_bag,
}  # fmt: skip
_REDUCTION = {
    _aten.sum, _aten.mean, _aten.amax, _aten.amin, _aten.var_mean, _aten.var, _aten.std, _aten.any, _aten.all,
    _aten.prod, _aten.argmax, _aten.argmin, _aten.max, _aten.min, _aten.logsumexp, _prims.var, _prims.sum,
}  # fmt: skip
_VIEW = {_aten._unsafe_view, _aten.reshape, _aten.alias, _aten.detach, _aten.lift_fresh, _aten.view_as}
_SOURCE = {
    _aten.full,
    _aten.arange,
    _aten.scalar_tensor,
    _aten.zeros,
    _aten.ones,
    _aten.empty,
    _prims.iota,
}
# Values that decide a route (mixture of experts, sampling): computed again, a tie could fall the other way.
_ROUTING = {
    _aten.topk,
    _aten.sort,
    _aten.argsort,
    _aten.nonzero,
    _aten.multinomial,
    _aten._local_scalar_dense,
}


# How Dynamo writes a child that the code of a wrapper module reads past `__getattr__`.
_THROUGH_DICT = re.compile(r"\.__dict__\['_modules'\]\['([^']*)'\]")


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)


def _leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def fingerprint(gm: fx.GraphModule, num_forward_outputs: int) -> str:
    """A hash of the graph's structure: ops, arguments, shapes, dtypes, strides, devices; not the names of
    nodes."""
    index = {node: i for i, node in enumerate(gm.graph.nodes)}
    digest = hashlib.sha256(str(num_forward_outputs).encode())

    def describe(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            strides = value.stride() if value.layout is torch.strided else ""
            return f"{value.dtype}{tuple(value.shape)}{strides}{value.device.type}"
        return type(value).__name__ if value is not None else "-"

    for node in gm.graph.nodes:
        args = pytree.tree_map_only(fx.Node, lambda n: f"%{index[n]}", (node.args, dict(node.kwargs)))
        values = [describe(leaf) for leaf in pytree.tree_leaves(node.meta.get("val"))]
        what = node.op if node.op in ("placeholder", "output", "get_attr") else str(node.target)
        digest.update(f"{what}|{args}|{values}\n".encode())
    return digest.hexdigest()[:24]


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():
        path = str(entry[0]) if isinstance(entry, (tuple, list)) else str(entry)
    path = _THROUGH_DICT.sub(r".\1", path)
    return path.removeprefix(COMPILED_ROOT).removeprefix(".")  # the rest is a path as in `named_modules`


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    packet = _packet(node)
    return packet in _VIEW or bool(getattr(node.target, "is_view", False))


def _kind(node: fx.Node) -> OpKind:
    from torch._inductor.lowering import fallbacks, lowerings  # heavy: only when a graph is described

    if node.op in ("placeholder", "get_attr"):
        return OpKind.INPUT
    if not _leaves(node.meta.get("val")):
        return OpKind.SYMBOL
    if _is_view(node):
        return OpKind.VIEW
    packet = _packet(node)
    if packet in _SOURCE and not any(_leaves(n.meta.get("val")) for n in node.all_input_nodes):
        return OpKind.CONSTANT
    if packet in _REDUCTION:
        return OpKind.REDUCTION
    lowered = node.target in lowerings and node.target not in fallbacks
    return OpKind.EXTERN if packet in _EXTERN or not lowered else OpKind.POINTWISE


def is_replayable(node: fx.Node) -> bool:
    """Whether running the node again gives the same bits and no side effect."""
    if node.target is operator.getitem:
        source = node.args[0]
        return not isinstance(source, fx.Node) or is_replayable(source)
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return not isinstance(target, torch._ops.HigherOrderOperator)  # plain functions on numbers are fine
    if _packet(node) in _ROUTING:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags and not _without_dropout(node, target):
        return False
    if target.namespace in ("_c10d_functional", "c10d", "_dtensor") or target._schema.is_mutable:
        return False
    if "inductor_seed" in str(target) or "inductor_lookup_seed" in str(target):
        return "lookup" in str(target)  # seeds are drawn once and saved; reading one out of them is free
    values = _leaves(node.meta.get("val"))
    return not any(
        not isinstance(size, int) and size.node.expr.free_symbols and _unbacked(size)
        for v in values
        for size in v.shape
    )


def _without_dropout(node: fx.Node, target: torch._ops.OpOverload) -> bool:
    """Attention kernels carry the random tag for a dropout that is mostly 0."""
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return given == 0.0
    return False


def _unbacked(size: torch.SymInt) -> bool:
    return any(str(symbol).startswith("u") for symbol in size.node.expr.free_symbols)


@dataclass(kw_only=True)
class Draft:
    """A joint graph as the partitioner saw it, waiting for what the dry run will tell."""

    fingerprint: str
    ops: list[Op]
    storage_bytes: list[int]
    input_storages: list[int]  # of the forward's arguments, in order (−1: a number)
    results: tuple[int, ...]  # of the forward, in order (−1: nothing)
    backward_outputs: tuple[int, ...]
    index_by_name: dict[str, int]
    default_saved: tuple[int, ...] = ()
    save_sets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    static: set[int] = field(default_factory=set)
    checkpointed: tuple[str, ...] = ()  # module paths inside the user's own activation checkpointing
    forward_buffers: frozenset[str] | None = None
    backward_buffers: frozenset[str] | None = None
    draws: tuple[tuple[str, tuple[int, ...]], ...] = ()  # see `dryrun.draws_of`
    stale: frozenset[int] = frozenset()  # see `_read_overwritten`
    dropped: frozenset[int] = frozenset()  # positions among the results

    def finish(self) -> JointGraph:
        """The graph as plain data, with what the dry run added."""
        buffers = None
        if self.forward_buffers is not None and self.backward_buffers is not None:
            buffers = (self._indices(self.forward_buffers), self._indices(self.backward_buffers))
        return JointGraph(
            fingerprint=self.fingerprint,
            ops=tuple(self.ops),
            storage_bytes=tuple(self.storage_bytes),
            static=frozenset(self.static),
            forward_outputs=tuple(i for i in self.results if i >= 0),
            backward_outputs=self.backward_outputs,
            default_saved=self.default_saved,
            save_sets=dict(self.save_sets),
            buffers=buffers,
            draws=tuple(
                Draw(op=self.index_by_name[name], strides=strides)
                for name, strides in self.draws
                if name in self.index_by_name
            ),
            stale=self.stale,
            dropped=self._made(self.results[position] for position in self.dropped),
        )

    def _made(self, values: Iterable[int]) -> frozenset[int]:
        """The storages of these values that the graph itself makes."""
        given = {op.value for op in self.ops if op.phase is Phase.INPUT}
        return frozenset(self.ops[i].value for i in values if i >= 0) - given - {-1}

    def _indices(self, names: frozenset[str]) -> frozenset[int]:
        return frozenset(self.index_by_name[name] for name in names if name in self.index_by_name)


def describe(
    gm: fx.GraphModule, num_forward_outputs: int, static_inputs: list[int] | None, rates: Rates
) -> Draft:
    """The canonical joint graph as a `Draft`. Reads `gm` only."""
    nodes = [node for node in gm.graph.nodes if node.op != "output"]
    index = {node: i for i, node in enumerate(nodes)}
    static_positions = set(static_inputs or ())
    phases = _phases(gm, num_forward_outputs, static_inputs)
    stale = _read_overwritten(nodes, phases, _overwritten_outside(gm))
    ops: list[Op] = []
    storage_bytes: list[int] = []
    value_of: dict[fx.Node, int] = {}
    parts_of: dict[fx.Node, tuple[int, ...]] = {}
    aliases: dict[int, int] = {}  # torch storage -> ours, for inputs that share one (tied weights)
    draft_inputs: list[int] = []
    static: set[int] = set()

    def new_storage(size_bytes: int) -> int:
        storage_bytes.append(size_bytes)
        return len(storage_bytes) - 1

    for node in nodes:
        kind = _kind(node)
        value = node.meta.get("val")
        created: tuple[int, ...] = ()
        own = -1
        if kind is OpKind.INPUT and isinstance(value, torch.Tensor):
            key = value.untyped_storage()._cdata
            if key not in aliases:
                aliases[key] = new_storage(value.untyped_storage().nbytes())
                created = (aliases[key],)
            own = aliases[key]
            if node.op == "get_attr":
                static.add(own)
        elif kind is OpKind.VIEW:
            source = next((n for n in node.all_input_nodes if n in value_of or n in parts_of), None)
            if source is not None and node.target is operator.getitem and source in parts_of:
                parts = parts_of[source]
                own = parts[min(int(node.args[1]), len(parts) - 1)] if parts else -1
            elif source is not None:
                own = value_of.get(source, -1)
        elif kind is not OpKind.SYMBOL and kind is not OpKind.INPUT:
            if isinstance(value, torch.Tensor):
                own = new_storage(_allocated_bytes(value))
                created = (own,)
            else:
                parts = tuple(
                    new_storage(_allocated_bytes(v)) if isinstance(v, torch.Tensor) else -1
                    for v in (value or ())
                )
                created = tuple(s for s in parts if s >= 0)
                parts_of[node] = parts
        if isinstance(value, (tuple, list)) and kind is OpKind.VIEW and own >= 0:
            parts_of[node] = tuple(own for _ in value)  # `split`: all pieces are views of one storage
        value_of[node] = own
        if kind is OpKind.INPUT and not partitioners._is_tangent(node) and node.op == "placeholder":
            if len(draft_inputs) in static_positions and own >= 0:
                static.add(own)
            draft_inputs.append(own)
        free = kind in (OpKind.INPUT, OpKind.VIEW, OpKind.SYMBOL)
        ops.append(
            Op(
                index=index[node],
                name=node.name,
                target=str(node.target) if node.op == "call_function" else node.op,
                module=_module_path(node),
                kind=kind,
                phase=phases[node],
                inputs=tuple(dict.fromkeys(index[n] for n in node.all_input_nodes)),
                storages=created,
                value=own,
                cost_ms=0.0 if free else op_cost_ms(node, rates, extern=kind is OpKind.EXTERN),
                replayable=kind is OpKind.INPUT or (is_replayable(node) and node not in stale),
                saveable=isinstance(value, (torch.Tensor, torch.SymInt, int)) and kind is not OpKind.INPUT,
            )
        )
    forward, backward, _, _ = partitioners._extract_fwd_bwd_outputs(gm, num_fwd_outputs=num_forward_outputs)
    return Draft(
        fingerprint=fingerprint(gm, num_forward_outputs),
        ops=ops,
        storage_bytes=storage_bytes,
        input_storages=draft_inputs,
        results=tuple(index[n] if isinstance(n, fx.Node) else -1 for n in forward),
        backward_outputs=tuple(index[n] for n in backward if isinstance(n, fx.Node)),
        index_by_name={node.name: i for node, i in index.items()},
        static=static,
        checkpointed=tuple(dict.fromkeys(_module_path(n) for n in nodes if "ac_graph_id" in n.meta)),
        stale=frozenset(index[n] for n in stale),
    )


def _overwritten_outside(gm: fx.GraphModule) -> set[fx.Node]:
    """Inputs whose new value is an output of the graph, which torch copies into them after the forward: those
    that need a gradient (the weight of `nn.Embedding(max_norm=...)`)."""
    output = next(iter(gm.graph.find_nodes(op="output")))
    written = {getattr(result, "mutated_input", None) for result in output.meta.get("desc") or ()}
    return {
        node
        for node in gm.graph.find_nodes(op="placeholder")
        if (given := node.meta.get("desc")) is not None and given in written
    }


def _read_overwritten(
    nodes: list[fx.Node], phases: dict[fx.Node, Phase], outside: set[fx.Node]
) -> set[fx.Node]:
    """Ops that read an input which the forward overwrites at its end (a counter, a running statistic), or
    which torch does after it (`outside`).

    In the backward the input has its new value, so these cannot be run again. Torch's own min-cut does run
    them again (2.13): gradients of a compiled model that reads a buffer after writing to it are wrong.
    """
    old = outside | {
        node.args[0] for node in nodes if node.target is _aten.copy_.default and phases[node] is Phase.FORWARD
    }
    found: set[fx.Node] = set()
    for node in nodes:
        if node.target is _aten.copy_.default or old.isdisjoint(node.all_input_nodes):
            continue
        if node.op == "call_function":
            found.add(node)
            if _is_view(node):
                old.add(node)
    return found


def _allocated_bytes(value: torch.Tensor) -> int:
    """Bytes that `empty_strided` would allocate for the value; symbolic sizes at their hints."""
    if not value.numel():
        return 0
    extent = 1 + sum(
        (int(size) - 1) * int(stride) for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    return extent * value.element_size()


def _phases(
    gm: fx.GraphModule, num_forward_outputs: int, static_inputs: list[int] | None
) -> dict[fx.Node, Phase]:
    info = partitioners.classify_nodes(gm, static_inputs or [], num_forward_outputs)
    phases: dict[fx.Node, Phase] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        if node.op in ("placeholder", "get_attr"):
            phases[node] = Phase.INPUT
        elif info.is_required_fw(node):
            phases[node] = Phase.FORWARD
        elif node in info.tangents_closure or partitioners._must_be_in_backward(node):
            phases[node] = Phase.BACKWARD
        else:
            phases[node] = Phase.FREE
    return phases


def saved_indices(backward: fx.GraphModule, draft: Draft) -> tuple[int, ...]:
    """What a partition hands to its backward, as op indices: activations only, no inputs of the graph."""
    names = [node.name for node in backward.graph.nodes if node.op == "placeholder"]
    indices = (draft.index_by_name[name] for name in names if name in draft.index_by_name)
    return tuple(sorted(i for i in indices if draft.ops[i].kind is not OpKind.INPUT))
