"""Sessions that see a model's calls, and not the batch or the loss around them: `auto_checkpoint`'s, and what
front doors without a batch in their hooks are built on."""

from __future__ import annotations

import dataclasses
import logging
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ._compat import active_ddp
from .capture.called import calls_inside
from .capture.seen import LoopWatch, SeenForward, give_way
from .capture.shards import held_back
from .capture.source import AssumedLoss, ModuleStep, tensors_of
from .capture.step import reason
from .core.peak import PeakReport
from .errors import BudgetInfeasible, ConfigError, NothingPlanned
from .measure import live_bytes
from .pipeline import Planned
from .session import BudgetSession
from .units import format_bytes

log = logging.getLogger("dtr_integrations")
_NEGLIGIBLE = 0.001  # of a step's dynamic bytes
OLD_GRADIENTS = "old gradients are still there when the next forward runs"
ACCUMULATED = "gradients accumulate over several backwards"


class CalledSession(BudgetSession):
    """Plans at the module's first training call, from its arguments.

    It sees the call and not the loss around it. So in the first step it watches what the loop makes of the
    output and how long it holds that (`LoopWatch`), and if that is anything the second step is planned with
    it. In the first, an output without a loss in it is taken to get one as large as a cross-entropy.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.zero_after_forward = False  # whether old gradients live beside the activations
        self.micro_batches = 1
        self._unreduced: tuple[str, ...] = ()  # in a micro-batch that was not the last
        self._watch: LoopWatch | None = None
        self._watches = self._assumes = self._targets() == ("",)  # what the loop does is not known yet
        self._seen: SeenForward | None = None
        self._last_output: list[weakref.ref[torch.Tensor]] = []
        modules = _not_compiled(target_modules(self.model, self._targets()))
        self.install(modules, self._before_call, self._after_call)

    def holds_gradients(self) -> bool:
        """Whether a parameter has a gradient now."""
        return any(parameter.grad is not None for parameter in self.model.parameters())

    def plan_again(self, seen: str) -> None:
        """Gradients were seen that the plan does not know of: the next call is planned with them."""
        log.warning(
            "%s: planning again with them (zero_grad before the forward would save their bytes)", seen
        )
        self._settled = False

    def close(self) -> None:
        """See `BudgetSession.close`."""
        self._look_away()
        super().close()

    def _before_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        give_way(self._watch)
        if self._watch is not None and self._watch.over:
            self._look_at_loop(self._watch)
        if self.plan is None:  # a model may be wrapped later than it is given to a session
            self.wrapped_in(active_ddp())
        settled = self._settled
        if self.plans_for((args, kwargs)):
            if settled:  # the batch has grown, and what was seen belongs to a smaller one
                self._seen = None
                self._assumes = self._watches = self._targets() == ("",)
            self._unreduced = self._unreduced or held_back(self.model)
            self.prepare(self._source(args, kwargs))
            if self._seen is not None:
                self._seen = self._seen.forget_batch()
        if self._watches and self.plan is not None:
            self._watch = self._watch or LoopWatch(self.model, lambda: _live_autocast(self.device.type))
            self._watch.called(args, kwargs)

    def _after_call(self, name: str, out: Any) -> None:
        self.compiled()
        self._last_output = [weakref.ref(tensor) for tensor in tensors_of(out)]
        if self._watch is not None:
            self._watch.returned(out)

    def _source(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleStep:
        seen = self._seen
        return ModuleStep(
            model=self.model,
            args=args if seen is None else (),
            kwargs=kwargs if seen is None else {},
            optimizer=self.optimizers[0] if self.optimizers else None,
            targets=self._targets(),
            context=_live_autocast(self.device.type),
            zero_after_forward=self.zero_after_forward,
            micro_batches=self.micro_batches,
            assumed_loss=AssumedLoss() if self._assumes else None,
            seen=seen,
            buckets=self.buckets,
            unreduced=self._unreduced if self.micro_batches > 1 else (),
        )

    def _planned_for(self, source: Any, *, best_effort: bool, **others: Any) -> Planned:
        assumed = source.assumed_loss if isinstance(source, ModuleStep) and source.seen is None else None
        if assumed is None:
            return super()._planned_for(source, best_effort=best_effort, **others)
        try:
            return super()._planned_for(source, best_effort=False, **others)
        except BudgetInfeasible as error:
            if not assumed.used and not best_effort:
                raise
            without = dataclasses.replace(source, assumed_loss=None)
            try:
                planned = super()._planned_for(without, best_effort=best_effort, **others)
            except BudgetInfeasible:
                raise error from None
        log.warning(
            "the budget leaves no room for a loss outside of %s as large as a cross-entropy over its output: "
            "the first step is planned without one",
            type(self.model).__name__,
        )
        return planned

    def _look_at_loop(self, watch: LoopWatch) -> None:
        """The first step's loop was watched to its end: plan again if there was anything in it."""
        assert self.plan is not None
        self._watch, self._watches = None, False
        seen, fault = watch.seen(), watch.fault
        dynamic_bytes = self.plan.predicted_allocated_bytes - self.plan.static_bytes
        if seen is not None and seen.largest_bytes <= _NEGLIGIBLE * dynamic_bytes:
            self._assumes = False
            return
        self._seen = seen
        if seen is not None:
            try:
                calls_inside(self._source((), {}))
            except Exception as error:
                seen, fault = None, reason(error)
        if seen is None:
            self._seen = None
            log.warning(
                "the loss outside of %s is counted as large as a cross-entropy over its output: what the "
                "loop does with that cannot be done again on tensors without data (%s)",
                type(self.model).__name__,
                fault,
            )
            return
        log.info(
            "the loop makes a loss of the output by %d operations on tensors of up to %s: planning again "
            "with them",
            seen.functions,
            format_bytes(seen.largest_bytes),
        )
        self._settled, self._grown = False, True
        # A trace on the CPU does not see the loop's own tensors, such as targets; each step's are as large.
        self._unseen_batch_bytes = live_bytes(seen.besides_the_model())

    def _end_of_step(self) -> None:
        if self._watch is not None:
            self._watch.stepped()

    def _look_away(self) -> None:
        if self._watch is not None:
            self._watch.suspend()
            self._watch = None


class ModuleSession(CalledSession):
    """The session of `auto_checkpoint`: a training loop of one's own.

    Use `session.step(fn)` to have the whole step planned. Without it, whether old gradients live beside the
    activations is only known at the second call; when they do, the step is planned again with them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._calls = 0
        self._optimizer_steps = 0
        self._in_step = False
        self._hooks = [optimizer.register_step_post_hook(self._stepped) for optimizer in self.optimizers]

    def step(self, fn: Callable[[], Any]) -> Any:
        """See `BudgetSession.step`."""
        self._in_step = True
        try:
            return super().step(fn)
        finally:
            self._in_step = False

    def close(self) -> None:
        """See `BudgetSession.close`."""
        super().close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _stepped(self, *_: Any) -> None:
        self._end_of_step()
        self._optimizer_steps += 1
        if not self._in_step:
            self.step_count += 1
        if self._optimizer_steps == 1 and not self._calls:
            warnings.warn(
                f"the optimizer has stepped, but {type(self.model).__name__} was not called in training mode "
                "(with gradients on): it ran eagerly and the budget is not enforced. Call model.train(); "
                "submodules may stay in eval mode.",
                NothingPlanned,
                stacklevel=4,
            )

    def _before_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls += 1
        if self._in_step:  # planned from the whole step
            return
        if self._calls == 2:
            self._look_at_gradients()
        super()._before_call(name, args, kwargs)

    def _look_at_gradients(self) -> None:
        if self.plan is None or not self.holds_gradients():
            return
        if self._optimizer_steps:
            self.zero_after_forward = True
            self.plan_again(OLD_GRADIENTS)
        else:
            self.micro_batches = 2
            self.plan_again(ACCUMULATED)


class TrainerSession(CalledSession):
    """A loop that somebody else runs and whose hooks say when an optimizer step begins and ends, but not with
    which batch."""

    def __init__(self, *args: Any, micro_batches: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_batches = micro_batches
        self._begins = True
        self._last_step: int | None = None
        self._trace: Any = None

    def begin_step(self, *, last_step: int | None = None) -> None:
        """An optimizer step begins. If it is one to measure, it is measured from its first call on, which may
        plan before."""
        self._abandon()
        self._begins, self._last_step = True, last_step

    def end_step(self) -> Any:
        """The optimizer has stepped. Returns the step's `PeakReport` if it was measured, else None."""
        self._end_of_step()
        self.leave_step()
        trace, self._trace = self._trace, None
        if trace is not None:
            self.close_trace(trace)
        return self.finish_step()

    def prepare(self, source: Any) -> None:
        """See `BudgetSession.prepare`; a step in the middle of which something is planned is not measured."""
        self._abandon()
        super().prepare(source)

    def close(self) -> None:
        """See `BudgetSession.close`."""
        self._abandon()
        super().close()

    def _before_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        begins, self._begins = self._begins, False
        if begins and self.step_count and not self.zero_after_forward and self.holds_gradients():
            self.zero_after_forward = True
            self.plan_again(OLD_GRADIENTS)
        elif not begins and self.micro_batches == 1 and self.plan is not None and self.holds_gradients():
            self.micro_batches = 2
            self.plan_again(ACCUMULATED)
        super()._before_call(name, args, kwargs)
        if begins and self.should_measure(last_step=self._last_step):
            still_held = [tensor for ref in self._last_output if (tensor := ref()) is not None]
            self._trace = self.open_trace((args, kwargs, still_held))
        self.enter_step((args, kwargs))

    def _abandon(self) -> None:
        self.leave_step()
        if self._trace is not None:
            self._trace.abandon()
            self._trace = None


class UnannouncedSession(TrainerSession):
    """A loop whose steps nobody announces: one lies between the model's first call and its optimizer's step.

    `reported` gets the `PeakReport` of each step that was measured.
    """

    def __init__(self, *args: Any, reported: Callable[[PeakReport], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reported = reported
        self._hook = self.optimizers[0].register_step_post_hook(self._stepped)
        self.begin_step()

    def close(self) -> None:
        """See `BudgetSession.close`."""
        self._hook.remove()
        super().close()

    def _stepped(self, *_: Any) -> None:
        report = self.end_step()
        if report is not None:
            self._reported(report)
        self.begin_step()


def _live_autocast(device_type: str) -> Callable[[], Any] | None:
    if not torch.is_autocast_enabled(device_type):
        return None
    dtype, cached = torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device_type, dtype=dtype, cache_enabled=cached)


def target_modules(model: torch.nn.Module, names: tuple[str, ...]) -> dict[str, torch.nn.Module]:
    """The modules to compile, by name.

    Raises `ConfigError` for a name that is not there, is named twice or lies inside another.
    """
    modules = {}
    for name in names:
        try:
            modules[name] = model.get_submodule(name)
        except AttributeError as error:
            text = f"targets={list(names)!r}: {error}. Names as in model.named_modules()."
            raise ConfigError(text) from error
        inside = [n for n in names if n != name and (not n or name.startswith(f"{n}."))]
        if inside or names.count(name) > 1:
            raise ConfigError(f"targets={list(names)!r}: {name!r} is named twice or lies inside {inside[:1]}")
    return modules


def _not_compiled(modules: dict[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    for name, module in modules.items():
        if module._compiled_call_impl is not None:
            raise ConfigError(
                f"{name or type(module).__name__} is compiled in place already, by module.compile() or by "
                "another session. Leave module.compile() out (compile_options= takes its options), or close "
                "that session."
            )
    return modules
