"""Sessions that see a model's calls, and not the batch or the loss around them: `auto_checkpoint`'s, and what
front doors without a batch in their hooks are built on."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

from .capture.source import ModuleStep
from .errors import ConfigError, NothingPlanned
from .session import BudgetSession

log = logging.getLogger("dtr_integrations")
OLD_GRADIENTS = "old gradients are still there when the next forward runs"


class CalledSession(BudgetSession):
    """Plans at the module's first training call, from its arguments.

    It sees the call and not the loss around it, so the loss is taken to be `default_loss` of the output,
    which costs next to nothing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.zero_after_forward = False  # whether old gradients live beside the activations
        self.micro_batches = 1
        self.install(_not_compiled(target_modules(self.model, self._targets())), self._before_call)

    def holds_gradients(self) -> bool:
        """Whether a parameter has a gradient now."""
        return any(parameter.grad is not None for parameter in self.model.parameters())

    def plan_again(self, seen: str) -> None:
        """Gradients were seen that the plan does not know of: the next call is planned with them."""
        log.warning(
            "%s: planning again with them (zero_grad before the forward would save their bytes)", seen
        )
        self._settled = False

    def _before_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.plans_for((args, kwargs)):
            self.prepare(
                ModuleStep(
                    model=self.model,
                    args=args,
                    kwargs=kwargs,
                    optimizer=self.optimizers[0] if self.optimizers else None,
                    targets=self._targets(),
                    context=_live_autocast(self.device.type),
                    zero_after_forward=self.zero_after_forward,
                    micro_batches=self.micro_batches,
                )
            )


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
            self.plan_again("gradients accumulate over several backwards")


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
        super()._before_call(name, args, kwargs)
        if begins and self.should_measure(last_step=self._last_step):
            self._trace = self.open_trace((args, kwargs))

    def _abandon(self) -> None:
        if self._trace is not None:
            self._trace.abandon()
            self._trace = None


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
