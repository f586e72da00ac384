"""`auto_checkpoint`'s session: a training loop of one's own, seen from the module's call and the optimizer's
step."""

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


class ModuleSession(BudgetSession):
    """The session of `auto_checkpoint`: plans at the model's first training call.

    It sees the module's call and not the loss around it, so the loss is taken to be `default_loss` of the
    output, which costs next to nothing; use `session.step(fn)` to have the whole step planned. Whether old
    gradients live beside the activations is only known at the second call; when they do, the step is planned
    again with them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._zero_after_forward = False
        self._micro_batches = 1
        self._calls = 0
        self._optimizer_steps = 0
        self._in_step = False
        self._hooks: list[Any] = []
        self.install(_not_compiled(target_modules(self.model, self._targets())), self._before_call)
        for optimizer in self.optimizers:
            self._hooks.append(optimizer.register_step_post_hook(self._stepped))

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
        if self._calls == 2 and not self._in_step:
            self._look_at_gradients()
        if not self._in_step and self.plans_for((args, kwargs)):
            self.prepare(
                ModuleStep(
                    model=self.model,
                    args=args,
                    kwargs=kwargs,
                    optimizer=self.optimizers[0] if self.optimizers else None,
                    targets=self._targets(),
                    context=_live_autocast(self.device.type),
                    zero_after_forward=self._zero_after_forward,
                    micro_batches=self._micro_batches,
                )
            )

    def _look_at_gradients(self) -> None:
        if self.plan is None or not any(p.grad is not None for p in self.model.parameters()):
            return
        if self._optimizer_steps:
            self._zero_after_forward = True
            seen = "old gradients are still there when the next forward runs"
        else:
            self._micro_batches = 2
            seen = "gradients accumulate over several backwards"
        log.warning(
            "%s: planning again with them (zero_grad before the forward would save their bytes)", seen
        )
        self._settled = False


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
