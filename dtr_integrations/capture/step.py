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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .._backend import DIFFERENTIATED_AGAIN, inductor_backend, when_used_again
from .._compat import (
    ISOLATES_RECOMPILES,
    CustomPartitionerFn,
    canonical,
    compile_call,
    compiler_lock,
    copied_graph,
    ddp_frames_without_modes,
    forgetting_code,
    inductor_config,
    leave_out,
    partitioners,
    unlogged,
)
from .._python_state import preserved
from ..core.graph import Region, RegionKind, StaticMemory, StepGraph
from ..core.profile import ONLINE, StepProfile
from ..errors import CaptureError
from .costs import Rates, measured_rates
from .dryrun import dry_codegen
from .fake import FakeWorld, StorageCounter, wind_to_medians
from .garbage import own_garbage
from .joint import Draft, describe, fingerprint, saved_indices
from .regions import RegionWatcher
from .scratch import Scratch
from .source import FakeStep, StepSource, batch_tensors, functions_of

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


class _Observed(CustomPartitionerFn):  # type: ignore[misc, unused-ignore]
    """A partitioner that tells the watcher about every graph it splits."""

    def __init__(self, inner: CustomPartitionerFn, watcher: RegionWatcher) -> None:
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
class Parts:
    """What of a step is compiled. `targets`: each in place; `excluded` (module, and why): run eagerly, also
    where a target calls them. `donates`: a backward may overwrite what its forward handed to it, which it
    cannot where a call has several backwards (`retain_graph`). `holds`: how a dry run takes conditions that
    depend on parameters. `online`: the excluded run under the online runtime, which may evict what autograd
    saves there; not `sized`: shapes there follow from data, and a dry run takes them at their largest."""

    targets: tuple[str, ...]
    excluded: Mapping[str, str] = field(default_factory=dict)
    donates: bool = True
    holds: bool = True
    online: bool = False
    sized: bool = True


class TargetsFailed(CaptureError):
    """Targets that torch.compile could not take in a dry run; `reasons` by name. The step itself can be run.
    `whole`: those of which no part could be compiled either."""

    def __init__(self, reasons: Mapping[str, str], *, whole: Iterable[str] = ()) -> None:
        self.reasons = dict(reasons)
        self.whole = frozenset(whole)
        super().__init__("; ".join(f"{name or 'the model'}: {why}" for name, why in reasons.items()))


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What `dry_step` saw: the profile of the steady step and how often each graph ran."""

    profile: StepProfile
    static: StaticMemory
    parts: Parts
    called: tuple[str, ...]  # target modules that the step really called
    without_graph: tuple[str, ...]  # those of them of which torch.compile made no graph
    fingerprints: tuple[str, ...]  # of the graphs, by the index that regions use
    skips: bool = False  # there are optimizers, and none of them made a step
    trained: tuple[str, ...] = ()  # parameters that have a gradient at the end


@own_garbage()
def dry_step(
    source: StepSource,
    partitioner: CustomPartitionerFn,
    *,
    options: dict[str, Any] | None = None,
    warm_up_steps: int = 1,
    scratch: Scratch | None = None,
    parts: Parts | None = None,
) -> DryRun:
    """Run the step `warm_up_steps` + 1 times on fake tensors, with Inductor's generated code, and profile the
    last.

    `parts` says what is compiled; None: the source's targets. Nothing real is touched: parameters, buffers,
    gradients, random state and caches are as before. Raises `TargetsFailed` when torch.compile fails,
    `CaptureError` when the step cannot be run without data.
    """
    world = FakeWorld(scratch)
    watcher = RegionWatcher(world)
    observed = _Observed(partitioner, watcher)
    targets = _Targets()
    with contextlib.ExitStack() as stack:
        stack.enter_context(compiler_lock)
        stack.enter_context(forgetting_code())
        stack.callback(observed.release)
        stack.callback(world.release)
        step = _built(source, world)
        world.release()  # a twin lives as long as the step holds it
        parts = parts or Parts(targets=tuple(step.targets))
        world.counter.stand_ins.holds = parts.holds
        stepped: list[Any] = []
        for optimizer in step.optimizers:
            optimizer.register_step_post_hook(lambda *_: stepped.append(None))
        stack.enter_context(preserved(step.model, *functions_of(source)))
        _label_static(world.counter, step)
        targets.install(step, parts, observed, options or {}, world)
        stack.enter_context(dry_codegen(world.counter, watcher.generated))
        stack.enter_context(_no_caches())
        stack.enter_context(ddp_frames_without_modes())
        stack.enter_context(_quiet())
        stack.enter_context(world.active())
        for _ in range(warm_up_steps):
            _run(step, targets)
            while step.between():
                _run(step, targets)
        _label_static(world.counter, step)
        world.counter.forget_numbers()
        gc.collect()  # cycles that the warm-up left (autograd graphs in frames) would count as live
        world.ledger.restart()
        watcher.reset()
        stepped.clear()
        before = dict(world.ledger.live_by_kind())
        _run(step, targets)
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
            lifetimes=tuple(world.ledger.lifetimes) if parts.online and parts.excluded else (),
        )
        skips = bool(step.optimizers) and not stepped
        trained = tuple(name for name, p in step.model.named_parameters() if p.grad is not None)
        del step
    return DryRun(
        profile=profile,
        static=static,
        parts=parts,
        called=tuple(targets.called),
        without_graph=tuple(name for name in targets.called if name not in targets.with_graph),
        fingerprints=tuple(graph.fingerprint for graph in watcher.graphs),
        skips=skips,
        trained=trained,
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


def _run(step: FakeStep, targets: _Targets) -> None:
    wind_to_medians()  # every run of the step takes the same branches, and those that most steps take
    try:
        step.run()
    except CaptureError:
        raise
    except Exception as error:
        if targets.failed or targets.differentiated:
            raise TargetsFailed(
                targets.failed | targets.differentiated, whole=targets.differentiated
            ) from error
        raise CaptureError(
            f"the training step of {type(step.model).__name__} cannot be run on tensors without data: "
            f"{in_words(error, step.model)}"
        ) from error
    if targets.failed:
        raise TargetsFailed(targets.failed)


class _Targets:
    """The twin's targets, compiled in place as `apply.dispatch` does with the real ones, and what became of
    them."""

    def __init__(self) -> None:
        self.called: dict[str, None] = {}
        self.with_graph: set[str] = set()
        self.failed: dict[str, str] = {}
        self.differentiated: dict[str, str] = {}  # their gradient is computed with create_graph=True

    def install(
        self,
        step: FakeStep,
        parts: Parts,
        partitioner: Any,
        options: Mapping[str, Any],
        world: FakeWorld,
    ) -> None:
        for name in parts.excluded:
            module = step.model.get_submodule(name)
            leave_out(module, _noting_online(module, world) if parts.online else None)
        for name in parts.targets:
            self._compile(step.model.get_submodule(name), name, partitioner, options, parts.donates)

    def _compile(
        self, module: nn.Module, name: str, partitioner: Any, options: Mapping[str, Any], donates: bool
    ) -> None:
        def graph_failed(error: Exception, is_backward: bool, draws_from_seeds: bool) -> bool:
            if is_backward:  # nobody could catch it in the backward; the step goes on, to see the rest
                self.failed[name] = reason(error)
            return is_backward

        inner = inductor_backend(partitioner, options, graph_failed, donates=donates)

        def backend(gm: Any, inputs: Any) -> Any:
            self.with_graph.add(name)
            return inner(gm, inputs)

        eager = module._call_impl
        compiled = compile_call(eager, backend)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not module.training or not torch.is_grad_enabled() or name in self.failed:
                return eager(*args, **kwargs)
            self.called[name] = None
            try:
                out = compiled(*args, **kwargs)
            except Exception as error:
                out = eager(*args, **kwargs)  # if this raises too, the error is the model's own
                self.failed[name] = reason(error)
                return out
            when_used_again(out, differentiated=lambda: self._differentiates(name))
            return out

        module._compiled_call_impl = call

    def _differentiates(self, name: str) -> None:
        self.differentiated[name] = DIFFERENTIATED_AGAIN


def _noting_online(module: nn.Module, world: FakeWorld) -> Any:
    """The module's call, after which what it made and autograd has saved counts as `ONLINE`. What it returns
    is the program's, too."""
    run = module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = world.ledger.now
        out = run(*args, **kwargs)
        if module.training and torch.is_grad_enabled():
            leaves = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            returned = {leaf.untyped_storage()._cdata for leaf in leaves if leaf.layout is torch.strided}
            world.ledger.label_since(begin, ONLINE, but=frozenset(returned))
        return out

    return call


def in_words(error: BaseException, model: nn.Module) -> str:
    """What was raised, and in the code of which module of `model`."""
    names = {id(module): name for name, module in model.named_modules()}
    where, trace = "", error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if names.get(id(module)):
            where = f"in {names[id(module)]} ({type(module).__name__}): "
        trace = trace.tb_next
    what = f"{type(error).__name__}: {error}"
    if "data is not allocated yet" in what:
        what = "an operator reads the data of its input to know the shape of its output (a packed sequence)"
    return where + what


def reason(error: BaseException) -> str:
    """An exception of torch's compiler in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:300]}"


@contextlib.contextmanager
def _no_caches() -> Iterator[None]:
    """Generated code that was never compiled must not reach a cache, and a cached graph would skip the
    partitioner.

    A frame that recompiles too often is left to eager: here after as many times as in the real run, which has
    a count of its own only where torch keeps them apart.
    """
    from torch._functorch import config as functorch_config

    limit = {} if ISOLATES_RECOMPILES else {"recompile_limit": 64}

    with (
        inductor_config.patch({"fx_graph_cache": False, "fx_graph_remote_cache": False}),
        functorch_config.patch({"enable_autograd_cache": False}),
        torch._dynamo.config.patch(limit),
    ):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Warnings of a dry run come again with the real compile, or are about fake tensors (their `.grad` being
    looked at)."""
    with warnings.catch_warnings(), unlogged():
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
    for tensor in batch_tensors(step.batch()):
        counter.label(tensor, "batch")
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
    without_graph: tuple[str, ...] = ()  # called targets of which torch.compile made no graph
    checkpointed: tuple[str, ...] = ()  # module paths inside the user's own activation checkpointing
    parts: Parts | None = None  # None: the source's targets
    trained: tuple[str, ...] = ()  # parameters that have a gradient at the end of a step

    @property
    def left_out(self) -> Mapping[str, str]:
        """Modules that torch.compile cannot take, and why."""
        return {} if self.parts is None else self.parts.excluded

    def holding(self, share: float) -> Captured:
        """The step in which an online runtime holds `share` of what it may evict; see `StepProfile`."""
        default = self.default.holding(share)
        regions = _regions(default)
        step = replace(self.step, regions=regions, default_peak_bytes=default.peak_bytes)
        return replace(self, step=step, default=default)


def capture(
    source: StepSource,
    *,
    options: dict[str, Any] | None = None,
    device: str = "cpu",
    scratch: Scratch | None = None,
    parts: Parts | None = None,
) -> Captured:
    """One fake run of the whole step with torch's own partition (design §3). Raises as `dry_step`."""
    recorder = Recorder(measured_rates(device))
    run = dry_step(source, recorder, options=options, scratch=scratch, parts=parts)
    again = _otherwise(source, run, options, device, scratch)
    if again is not None:
        return capture(source, options=options, device=device, scratch=scratch, parts=again)
    step = StepGraph(
        graphs=tuple(draft.finish() for draft in recorder.drafts.values()),
        regions=_regions(run.profile),
        static=run.static,
        default_peak_bytes=run.profile.peak_bytes,
    )
    checkpointed = dict.fromkeys(path for draft in recorder.drafts.values() for path in draft.checkpointed)
    return Captured(
        step=step,
        default=run.profile,
        called=run.called,
        without_graph=run.without_graph,
        checkpointed=tuple(checkpointed),
        parts=parts,
        trained=run.trained,
    )


def _regions(profile: StepProfile) -> tuple[Region, ...]:
    return tuple(
        Region(
            kind=RegionKind(r.kind),
            graph=r.graph,
            call=r.call,
            base_bytes=r.entry_bytes - r.saved_bytes,
            rise_bytes=r.rise_bytes,
            open_bytes=r.saved_bytes,
            closes=r.closes,
        )
        for r in profile.regions
    )


def _otherwise(
    source: StepSource,
    run: DryRun,
    options: dict[str, Any] | None,
    device: str,
    scratch: Scratch | None,
) -> Parts | None:
    """How the step has to be run instead, if it cannot be as it was or no optimizer made a step in it."""
    if run.parts.donates and not all(region.closes for region in run.profile.regions):
        return replace(run.parts, donates=False)
    if run.parts.holds and run.skips:  # such as: if norm > limit: skip this step
        parts = replace(run.parts, holds=False)
        recorder = Recorder(measured_rates(device), strictnesses=False)
        if not dry_step(source, recorder, options=options, scratch=scratch, parts=parts).skips:
            return parts
    return None


def certify(
    source: StepSource,
    partitioner: CustomPartitionerFn,
    *,
    options: dict[str, Any] | None = None,
    scratch: Scratch | None = None,
    parts: Parts | None = None,
) -> DryRun:
    """The exact profile of the step under `partitioner` (design §4, second tier). Raises as `dry_step`."""
    return dry_step(source, partitioner, options=options, scratch=scratch, parts=parts)
