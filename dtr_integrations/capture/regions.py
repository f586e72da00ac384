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
from .shards import FSDP_GATHERS

_STATIC_KINDS = ("parameters", "buffers", "optimizer", "batch", FSDP_GATHERS)  # there whatever is saved


@dataclass(kw_only=True)
class _Output:
    """A storage that a forward hands to the program: the tensors that hold it there, and what it counts if
    the backward keeps it too (0: it does not)."""

    tensors: list[weakref.ref[Any]]
    saved_bytes: int = 0


@dataclass(kw_only=True)
class _Open:
    """A call whose last backward has not run yet, and what it holds until then."""

    number: int
    saved_bytes: int  # without outputs
    storages: list[weakref.ref[Any]]  # those saved for the backward
    outputs: dict[int, _Output]  # by the first position of their storage among the results
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
    dropped: set[int] | None = None  # positions of outputs that the program lets go at once, in all calls


_Held = list[tuple[_Compiled, _Open]]  # the calls that are open


class RegionWatcher:
    """Turns calls of generated code into regions of the ledger."""

    def __init__(self, world: FakeWorld) -> None:
        self.world = world
        self.graphs: list[_Compiled] = []
        self._split_last: _Compiled | None = None
        self.by_lowering: dict[Any, _Compiled] = {}
        self.regions: list[RegionProfile] = []
        self._held: list[_Held] = []  # for each region
        self._started: tuple[str, int, int, _Held] | None = None
        self._to_settle: list[tuple[_Compiled, _Open]] = []  # calls after which no generated code has run yet

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
        self.regions, self._held, self._started, self._to_settle = [], [], None, []
        for graph in self.graphs:
            graph.calls, graph.open, graph.dropped = 0, [], None
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
                saved_bytes=0,  # known when the step is over
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
        for graph in self.graphs:
            if graph.draft is not None:
                graph.draft.dropped = frozenset(graph.dropped or ())
        last = {(r.graph, r.call): i for i, r in enumerate(self.regions) if r.kind == "backward"}
        for number, region in enumerate(self.regions):
            if region.kind == "backward" and last[region.graph, region.call] != number:
                self.regions[number] = replace(region, closes=False)
        for number, (region, held) in enumerate(zip(self.regions, self._held, strict=True)):
            saved_bytes = sum(
                call.saved_bytes
                + sum(out.saved_bytes for i, out in call.outputs.items() if i in (graph.dropped or ()))
                for graph, call in held
                if (graph.index, call.number) not in widowed
            )
            region = replace(region, saved_bytes=saved_bytes)
            if region.kind == "forward" and (region.graph, region.call) in widowed:
                region = replace(region, kind="eager", graph=-1, call=-1)
            self.regions[number] = region

    def _open_calls(self) -> _Held:
        for graph in self.graphs:
            graph.open = [call for call in graph.open if not call.is_over()]
        return [(graph, call) for graph in self.graphs for call in graph.open]

    def _settle(self) -> None:
        """Generated code runs again: which outputs of the calls before it has the program let go?

        Only the tensors say it: a storage that the backward keeps lives on without the program.
        """
        for graph, call in self._to_settle:
            dropped = {
                i for i, output in call.outputs.items() if all(tensor() is None for tensor in output.tensors)
            }
            graph.dropped = dropped if graph.dropped is None else graph.dropped & dropped
        self._to_settle = []

    def _forward(self, graph: _Compiled, call: Call, args: list[Any]) -> Any:
        self._settle()
        number = graph.calls
        graph.calls += 1
        self.begin("forward", graph.index, number)
        self._note_static(graph, args)
        out = call(args)
        outputs = self._outputs(out[: graph.num_forward_outputs])
        saved = self._label_saved(out, graph.num_forward_outputs, outputs)
        self.end()
        opened = _Open(
            number=number,
            saved_bytes=sum(storage.nbytes() for storage in saved),
            storages=[weakref.ref(storage) for storage in saved],
            outputs=outputs,
        )
        graph.open.append(opened)
        self._to_settle.append((graph, opened))
        del saved
        self.begin("eager", -1, -1)
        return out

    def _backward(self, graph: _Compiled, call: Call, args: list[Any]) -> Any:
        self._settle()
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

    def _outputs(self, results: Sequence[Any]) -> dict[int, _Output]:
        """The storages of a forward's results, each by the position where it comes first."""
        outputs: dict[int, _Output] = {}
        for position, tensor in enumerate(results):
            if isinstance(tensor, torch.Tensor):
                holders = self.world.counter.holders(tensor)
                if holders[0]() is tensor:
                    outputs[position] = _Output(tensors=holders)
                else:
                    holders.append(weakref.ref(tensor))
        return outputs

    def _label_saved(
        self, out: Sequence[Any], num_forward_outputs: int, outputs: dict[int, _Output]
    ) -> list[Any]:
        """The storages that this call holds for its backward: each once, without outputs that the program
        holds too; of these `outputs` learns their size."""
        shared = {_key(out[i]): output for i, output in outputs.items()}
        saved, seen = [], set()
        for tensor in out[num_forward_outputs:]:
            if not isinstance(tensor, torch.Tensor):
                continue
            key = _key(tensor)
            if key in seen or self._kind_of(tensor) in _STATIC_KINDS:
                continue
            seen.add(key)
            if key in shared:
                shared[key].saved_bytes = tensor.untyped_storage().nbytes()
                continue
            self.world.counter.label(tensor, "saved activations")
            saved.append(tensor.untyped_storage())
        return saved


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
