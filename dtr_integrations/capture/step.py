"""Run a whole step dry and write down what happened: `dry_step`, from which both `capture` and `certify` are
made.

`capture` runs the step with torch's own partition and returns the `StepGraph` that the search works on, with
the default's exact peak. `certify` runs it with a given partitioner and returns the exact `StepProfile` of
that plan.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .._compat import (
    CustomPartitionerFn,
    GraphLowering,
    canonical,
    compile_call,
    compile_fx,
    copied_graph,
    inductor_config,
    partitioners,
)
from ..core.graph import Region, RegionKind, StaticMemory, StepGraph
from ..core.profile import RegionProfile, StepProfile
from ..errors import CaptureError
from .costs import Rates, measured_rates
from .dryrun import Call, buffer_names, dry_codegen
from .fake import FakeWorld, StorageCounter
from .joint import Draft, describe, fingerprint, saved_indices
from .source import FakeStep, StepSource

_STATIC_KINDS = ("parameters", "buffers", "optimizer", "batch")
# Other strictnesses of torch's min-cut, as starts for the search. Keys of torch._functorch.config.
_STRICTNESS = {
    "far_apart": {
        "ban_recompute_used_far_apart": False,
        "ban_recompute_long_fusible_chains": False,
        "ban_recompute_materialized_backward": False,
    },
    "aggressive": {"aggressive_recomputation": True},
}


class Recorder(CustomPartitionerFn):  # type: ignore[misc, unused-ignore]
    """Torch's own partition, written down: the joint graph, the min-cut save set and those of other
    strictnesses."""

    def __init__(self, rates: Rates, *, strictnesses: bool = True) -> None:
        self.rates = rates
        self.strictnesses = strictnesses
        self.drafts: dict[str, Draft] = {}  # by fingerprint, in the order of their first appearance

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        num_forward_outputs = kwargs["num_fwd_outputs"]
        copies = [
            torch.fx.GraphModule(gm, copied_graph(gm.graph))
            for _ in (_STRICTNESS if self.strictnesses else ())
        ]
        draft = describe(
            canonical(gm),
            num_forward_outputs,
            kwargs.get("static_lifetime_input_indices"),
            self.rates,
        )
        forward, backward = partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        draft.default_saved = saved_indices(backward, draft)
        for (name, options), copy in zip(_STRICTNESS.items(), copies, strict=False):
            with torch._functorch.config.patch(options):
                _, other = partitioners.min_cut_rematerialization_partition(copy, joint_inputs, **kwargs)
            draft.save_sets[name] = saved_indices(other, draft)
        self.drafts.setdefault(draft.fingerprint, draft)
        return forward, backward

    def uuid(self) -> Any:
        return "dtr-recorder"


@dataclass(kw_only=True)
class _Compiled:
    """One joint graph during the dry run: how often its two halves ran, and what is open."""

    index: int
    fingerprint: str
    num_forward_outputs: int
    draft: Draft | None
    calls: int = 0
    open: list[tuple[int, int]] = field(default_factory=list)  # (call, saved bytes)


class _Watcher:
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
            return call
        if not lowering.is_backward:
            self.by_lowering[lowering.graph_id] = self._split_last
        graph = self.by_lowering[lowering.graph_id]
        if graph.draft is not None:
            names = buffer_names(lowering)
            if lowering.is_backward:
                graph.draft.backward_buffers = names
            else:
                graph.draft.forward_buffers = names
        run = self._backward if lowering.is_backward else self._forward
        return lambda args: run(graph, call, args)

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
        part of the eager program, with the default's bytes.
        """
        self.end()
        widowed = self._open_calls().keys()
        if not widowed:
            return
        for number, (region, held) in enumerate(zip(self.regions, self._held, strict=True)):
            saved_bytes = sum(size for key, size in held.items() if key not in widowed)
            region = replace(region, saved_bytes=saved_bytes)
            if region.kind == "forward" and (region.graph, region.call) in widowed:
                region = replace(region, kind="eager", graph=-1, call=-1)
            self.regions[number] = region

    def _open_calls(self) -> dict[tuple[int, int], int]:
        return {(graph.index, call): saved for graph in self.graphs for call, saved in graph.open}

    def _forward(self, graph: _Compiled, call: Call, args: list[Any]) -> Any:
        number = graph.calls
        graph.calls += 1
        self.begin("forward", graph.index, number)
        self._note_static(graph, args)
        out = call(args)
        saved_bytes = self._label_saved(out, graph.num_forward_outputs)
        self.end()
        graph.open.append((number, saved_bytes))
        self.begin("eager", -1, -1)
        return out

    def _backward(self, graph: _Compiled, call: Call, args: list[Any]) -> Any:
        number = graph.open[-1][0] if graph.open else graph.calls - 1
        self.begin("backward", graph.index, number)
        if graph.open:
            graph.open.pop()
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

    def _label_saved(self, out: Sequence[Any], num_forward_outputs: int) -> int:
        """Bytes that this call holds for its backward: each storage once, without outputs that the program
        holds too."""
        outputs = {
            t.untyped_storage()._cdata for t in out[:num_forward_outputs] if isinstance(t, torch.Tensor)
        }
        total, seen = 0, set(outputs)
        for tensor in out[num_forward_outputs:]:
            if not isinstance(tensor, torch.Tensor):
                continue
            key = tensor.untyped_storage()._cdata
            if key in seen or self._kind_of(tensor) in _STATIC_KINDS:
                continue
            seen.add(key)
            self.world.counter.label(tensor, "saved activations")
            total += tensor.untyped_storage().nbytes()
        return total


class _Observed(CustomPartitionerFn):  # type: ignore[misc, unused-ignore]
    """A partitioner that tells the watcher about every graph it splits."""

    def __init__(self, inner: CustomPartitionerFn, watcher: _Watcher) -> None:
        self.inner, self.watcher = inner, watcher

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        outputs = kwargs["num_fwd_outputs"]
        name = fingerprint(canonical(gm), outputs)
        out = self.inner(gm, joint_inputs, **kwargs)
        drafts = self.inner.drafts if isinstance(self.inner, Recorder) else {}
        self.watcher.partitioned(name, outputs, drafts.get(name))
        return out

    def uuid(self) -> Any:
        return self.inner.uuid()

    def release(self) -> None:
        """Let go of the fake world: Dynamo keeps every backend that it has seen, and through it would keep
        the model."""
        del self.inner, self.watcher


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What `dry_step` saw: the profile of the steady step and how often each graph ran."""

    profile: StepProfile
    static: StaticMemory
    called: tuple[str, ...]  # target modules that the step really called
    fingerprints: tuple[str, ...]  # of the graphs, by the index that regions use


def dry_step(
    source: StepSource,
    partitioner: CustomPartitionerFn,
    *,
    options: dict[str, Any] | None = None,
    warm_up_steps: int = 1,
) -> DryRun:
    """Run the step `warm_up_steps` + 1 times on fake tensors, with Inductor's generated code, and profile the
    last.

    Nothing real is touched: parameters, buffers, gradients, random state and caches are as before. Raises
    `CaptureError` when the step cannot be run without data.
    """
    world = FakeWorld()
    watcher = _Watcher(world)
    observed = _Observed(partitioner, watcher)
    called: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.callback(observed.release)
        stack.callback(world.release)
        step = _built(source, world)
        _label_static(world.counter, step)
        stack.enter_context(_compiled(step, observed, options or {}, called))
        stack.enter_context(dry_codegen(world.counter, watcher.generated))
        stack.enter_context(_no_caches())
        stack.enter_context(_quiet())
        stack.enter_context(world.active())
        for _ in range(warm_up_steps):
            _run(step)
        _label_static(world.counter, step)
        gc.collect()  # cycles that the warm-up left (autograd graphs in frames) would count as live
        world.ledger.restart()
        watcher.reset()
        before = dict(world.ledger.live_by_kind())
        _run(step)
        _label_gradients(world.counter, step)
        watcher.finish()
        static = StaticMemory(
            parameter_bytes=before.get("parameters", 0),
            buffer_bytes=before.get("buffers", 0),
            optimizer_bytes=before.get("optimizer", 0),
            gradient_bytes=world.ledger.live_by_kind().get("gradients", 0),
            batch_bytes=before.get("batch", 0),
        )
        profile = StepProfile(
            peak_bytes=world.ledger.peak_bytes,
            static_bytes=static.static_bytes,
            breakdown=world.ledger.held_at_peak(),
            regions=tuple(watcher.regions),
            timeline=tuple(world.ledger.curve),
        )
        del step
    return DryRun(
        profile=profile,
        static=static,
        called=tuple(dict.fromkeys(called)),
        fingerprints=tuple(graph.fingerprint for graph in watcher.graphs),
    )


def _built(source: StepSource, world: FakeWorld) -> FakeStep:
    try:
        return source.build(world)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"the step cannot be copied for planning: {type(error).__name__}: {error}"
        ) from error


def _run(step: FakeStep) -> None:
    try:
        step.run()
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"the training step of {type(step.model).__name__} cannot be run on tensors without data: "
            f"{type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _compiled(step: FakeStep, partitioner: Any, options: dict[str, Any], called: list[str]) -> Iterator[None]:
    """Compile the twin's targets in place, as `apply.dispatch` does with the real ones."""

    def backend(gm: Any, inputs: Any) -> Any:
        return compile_fx(gm, inputs, config_patches={**options, "custom_partitioner_fn": partitioner})

    for name in step.targets:
        module = step.model.get_submodule(name)
        _compile_in_place(module, name, backend, called)
    yield


def _compile_in_place(module: nn.Module, name: str, backend: Any, called: list[str]) -> None:
    eager = module._call_impl
    compiled = compile_call(eager, backend)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not module.training or not torch.is_grad_enabled():
            return eager(*args, **kwargs)
        called.append(name)
        return compiled(*args, **kwargs)

    module._compiled_call_impl = call


@contextlib.contextmanager
def _no_caches() -> Iterator[None]:
    """Generated code that was never compiled must not reach a cache, and a cached graph would skip the
    partitioner."""
    from torch._functorch import config as functorch_config

    with (
        inductor_config.patch({"fx_graph_cache": False, "fx_graph_remote_cache": False}),
        functorch_config.patch({"enable_autograd_cache": False}),
        torch._dynamo.config.patch({"recompile_limit": 64}),
    ):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Warnings of a dry run come again with the real compile, or are about fake tensors (their `.grad` being
    looked at)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _label_static(counter: StorageCounter, step: FakeStep) -> None:
    for parameter in step.model.parameters():
        counter.label(parameter, "parameters")
    for buffer in step.model.buffers():
        counter.label(buffer, "buffers")
    for optimizer in step.optimizers:
        for state in optimizer.state.values():
            for leaf in pytree.tree_leaves(state):
                if isinstance(leaf, torch.Tensor):
                    counter.label(leaf, "optimizer")
    for leaf in pytree.tree_leaves(step.batch):
        if isinstance(leaf, torch.Tensor):
            counter.label(leaf, "batch")
    _label_gradients(counter, step)


def _label_gradients(counter: StorageCounter, step: FakeStep) -> None:
    for parameter in step.model.parameters():
        if parameter.grad is not None:
            counter.label(parameter.grad, "gradients")


@dataclass(frozen=True, kw_only=True)
class Captured:
    """The step as plain data, the default's exact profile, and which target modules the step called."""

    step: StepGraph
    default: StepProfile
    called: tuple[str, ...]
    checkpointed: tuple[str, ...] = ()  # module paths inside the user's own activation checkpointing


def capture(source: StepSource, *, options: dict[str, Any] | None = None, device: str = "cpu") -> Captured:
    """One fake run of the whole step with torch's own partition (design §3). Raises `CaptureError`."""
    recorder = Recorder(measured_rates(device))
    run = dry_step(source, recorder, options=options)
    regions = tuple(
        Region(
            kind=RegionKind(r.kind),
            graph=r.graph,
            call=r.call,
            base_bytes=r.entry_bytes - r.saved_bytes,
            rise_bytes=r.rise_bytes,
            open_bytes=r.saved_bytes,
        )
        for r in run.profile.regions
    )
    step = StepGraph(
        graphs=tuple(draft.finish() for draft in recorder.drafts.values()),
        regions=regions,
        static=run.static,
        default_peak_bytes=run.profile.peak_bytes,
    )
    checkpointed = dict.fromkeys(path for draft in recorder.drafts.values() for path in draft.checkpointed)
    return Captured(step=step, default=run.profile, called=run.called, checkpointed=tuple(checkpointed))


def certify(
    source: StepSource, partitioner: CustomPartitionerFn, *, options: dict[str, Any] | None = None
) -> DryRun:
    """The exact profile of the step under `partitioner` (design §4, second tier). Raises `CaptureError`."""
    return dry_step(source, partitioner, options=options)
