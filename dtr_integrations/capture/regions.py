"""Calls of generated code as regions of the step: what was live at entry, what rose inside, what stays."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .._compat import GraphLowering, keeps_graph
from ..core.profile import RegionProfile
from .dryrun import Call, buffer_names, draws_of
from .fake import FakeWorld
from .joint import Draft

_STATIC_KINDS = ("parameters", "buffers", "optimizer", "batch")


@dataclass(kw_only=True)
class _Open:
    """A call whose last backward has not run yet, and what it holds until then."""

    number: int
    saved_bytes: int
    storages: list[weakref.ref[Any]]  # those saved for the backward
    retained: bool = False  # a backward has run and will run again (`retain_graph`)

    def holds_any(self, args: Sequence[Any]) -> bool:
        """Whether one of the tensors lies in a storage that this call saved."""
        given = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, torch.Tensor)}
        held = (storage() for storage in self.storages)
        return any(storage._cdata in given for storage in held if storage is not None)

    def is_over(self) -> bool:
        """Whether the program has dropped what it had retained."""
        return self.retained and all(storage() is None for storage in self.storages)


@dataclass(kw_only=True)
class _Compiled:
    """One joint graph during the dry run: how often its two halves ran, and what is open."""

    index: int
    fingerprint: str
    num_forward_outputs: int
    draft: Draft | None
    calls: int = 0
    open: list[_Open] = field(default_factory=list)


class RegionWatcher:
    """Turns calls of generated code into regions of the ledger."""

    def __init__(self, world: FakeWorld) -> None:
        self.world = world
        self.graphs: list[_Compiled] = []
        self._split_last: _Compiled | None = None
        self.by_lowering: dict[Any, _Compiled] = {}
        self.regions: list[RegionProfile] = []
        self._held: list[dict[tuple[int, int], int]] = []  # for each region, by call that is open
        self._started: tuple[str, int, int, dict[tuple[int, int], int]] | None = None

    def partitioned(self, fingerprint: str, num_forward_outputs: int, draft: Draft | None) -> None:
        """A joint graph was split. One that was split before (a recompile for another reason) is the same
        graph."""
        known = next((g for g in self.graphs if g.fingerprint == fingerprint), None)
        if known is None:
            known = _Compiled(
                index=len(self.graphs),
                fingerprint=fingerprint,
                num_forward_outputs=num_forward_outputs,
                draft=draft,
            )
            self.graphs.append(known)
        self._split_last = known

    def generated(self, lowering: GraphLowering, call: Call) -> Call:
        """Wrap a dry call so that it is a region. Graphs without a backward belong to the eager region around
        them."""
        if lowering.is_inference or self._split_last is None:
            return self._followed(lowering, call, None)
        if not lowering.is_backward:
            self.by_lowering[lowering.graph_id] = self._split_last
        graph = self.by_lowering[lowering.graph_id]
        if graph.draft is not None:
            names = buffer_names(lowering)
            if lowering.is_backward:
                graph.draft.backward_buffers = names
            else:
                graph.draft.forward_buffers = names
                graph.draft.draws = draws_of(lowering)
        if not lowering.is_backward:
            call = self._followed(lowering, call, graph.num_forward_outputs)
        run = self._backward if lowering.is_backward else self._forward
        return lambda args: run(graph, call, args)

    def _followed(self, lowering: GraphLowering, call: Call, outputs: int | None) -> Call:
        """The call, with what can be known of its first `outputs` results noted."""
        graph, stand_ins = lowering.module.graph, self.world.counter.stand_ins

        def followed(args: list[Any]) -> Any:
            inputs = stand_ins.inputs(args)
            out = call(args)
            stand_ins.follow_graph(graph, inputs, out[:outputs])
            return out

        return followed

    def reset(self) -> None:
        self.regions, self._held, self._started = [], [], None
        for graph in self.graphs:
            graph.calls, graph.open = 0, []
        self.begin("eager", -1, -1)

    def begin(self, kind: str, graph: int, call: int) -> None:
        """The region before ends, this one starts."""
        self.end()
        self.world.ledger.mark(kind)
        self._started = (kind, graph, call, self._open_calls())

    def end(self) -> None:
        """Write down the region that is open."""
        if self._started is None:
            return
        ledger = self.world.ledger
        ledger.close_mark()
        mark = ledger.marks[-1]
        kind, graph, call, held = self._started
        self._started = None
        if kind == "eager" and mark.end == mark.start:
            return
        self._held.append(held)
        self.regions.append(
            RegionProfile(
                kind=kind,
                graph=graph,
                call=call,
                entry_bytes=mark.entry_bytes,
                exit_bytes=mark.exit_bytes,
                peak_bytes=mark.peak_bytes,
                saved_bytes=sum(held.values()),
                start=mark.start,
                end=mark.end,
            )
        )

    def finish(self) -> None:
        """The step is over.

        A forward whose backward never ran (its output was detached) is not half of a pair. It counts as a
        part of the eager program, with the default's bytes. Of several backwards of one call (`retain_graph`)
        the last one closes it.
        """
        self.end()
        widowed = {
            (graph.index, call.number) for graph in self.graphs for call in graph.open if not call.retained
        }
        last = {(r.graph, r.call): i for i, r in enumerate(self.regions) if r.kind == "backward"}
        for number, region in enumerate(self.regions):
            if region.kind == "backward" and last[region.graph, region.call] != number:
                self.regions[number] = replace(region, closes=False)
        if not widowed:
            return
        for number, (region, held) in enumerate(zip(self.regions, self._held, strict=True)):
            saved_bytes = sum(size for key, size in held.items() if key not in widowed)
            region = replace(region, saved_bytes=saved_bytes)
            if region.kind == "forward" and (region.graph, region.call) in widowed:
                region = replace(region, kind="eager", graph=-1, call=-1)
            self.regions[number] = region

    def _open_calls(self) -> dict[tuple[int, int], int]:
        for graph in self.graphs:
            graph.open = [call for call in graph.open if not call.is_over()]
        return {(graph.index, call.number): call.saved_bytes for graph in self.graphs for call in graph.open}

    def _forward(self, graph: _Compiled, call: Call, args: list[Any]) -> Any:
        number = graph.calls
        graph.calls += 1
        self.begin("forward", graph.index, number)
        self._note_static(graph, args)
        out = call(args)
        saved = self._label_saved(out, graph.num_forward_outputs)
        self.end()
        graph.open.append(
            _Open(
                number=number,
                saved_bytes=sum(storage.nbytes() for storage in saved),
                storages=[weakref.ref(storage) for storage in saved],
            )
        )
        del saved
        self.begin("eager", -1, -1)
        return out

    def _backward(self, graph: _Compiled, call: Call, args: list[Any]) -> Any:
        opened = next((c for c in reversed(graph.open) if c.holds_any(args)), None)
        opened = opened or (graph.open[-1] if graph.open else None)
        self.begin("backward", graph.index, opened.number if opened is not None else graph.calls - 1)
        if opened is not None and keeps_graph():
            opened.retained = True
        elif opened is not None:
            graph.open.remove(opened)
        out = call(args)
        self.end()
        self.begin("eager", -1, -1)
        return out

    def _kind_of(self, tensor: torch.Tensor) -> str:
        ledger = self.world.ledger
        key = tensor.untyped_storage()._cdata
        return ledger.kind_of(key)

    def _note_static(self, graph: _Compiled, args: Sequence[Any]) -> None:
        if graph.draft is None:
            return
        for storage, arg in zip(graph.draft.input_storages, args, strict=False):
            if storage >= 0 and isinstance(arg, torch.Tensor) and self._kind_of(arg) in _STATIC_KINDS:
                graph.draft.static.add(storage)

    def _label_saved(self, out: Sequence[Any], num_forward_outputs: int) -> list[Any]:
        """The storages that this call holds for its backward: each once, without outputs that the program
        holds too."""
        outputs = {
            t.untyped_storage()._cdata for t in out[:num_forward_outputs] if isinstance(t, torch.Tensor)
        }
        saved, seen = [], set(outputs)
        for tensor in out[num_forward_outputs:]:
            if not isinstance(tensor, torch.Tensor):
                continue
            key = tensor.untyped_storage()._cdata
            if key in seen or self._kind_of(tensor) in _STATIC_KINDS:
                continue
            seen.add(key)
            self.world.counter.label(tensor, "saved activations")
            saved.append(tensor.untyped_storage())
        return saved
