"""What the twin of a LightningModule sees instead of the run: a stand-in trainer and its parts.

Reads fall through to the real objects; writes, logging, files and collectives do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class _StandIn:
    """Reads that it does not answer itself go to the real object; writes stay here."""

    def __init__(self, real: Any, **own: Any) -> None:
        vars(self).update(own, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_real"], name)

    @property
    def __class__(self) -> type:  # for isinstance checks
        return type(vars(self)["_real"])

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("a stand-in has the class of what it stands for")


def trainer_for(module: nn.Module, optimizers: Sequence[Any], real: Any, namespace: Any) -> Any:
    """The trainer that `module` and Lightning's loops see, over the twins of module and optimizers."""
    strategy = _strategy_for(module, optimizers, real)
    fit_loop: Any = _StandIn(real.fit_loop, accumulating=False)
    fit_loop._should_accumulate = lambda: fit_loop.accumulating
    loggers = [namespace.loggers.logger.DummyLogger() for _ in real.loggers]
    trainer = _StandIn(
        real,
        strategy=strategy,
        precision_plugin=strategy.precision_plugin,
        lightning_module=module,
        model=module,
        optimizers=optimizers,
        lr_scheduler_configs=strategy.lr_scheduler_configs,
        fit_loop=fit_loop,
        callbacks=[],
        loggers=loggers,
        logger=loggers[0] if loggers else None,
        profiler=namespace.profilers.PassThroughProfiler(),
        print=_nothing,
        save_checkpoint=_nothing,
    )
    epoch_loop = real.fit_loop.epoch_loop
    fit_loop.epoch_loop = _StandIn(
        epoch_loop,
        automatic_optimization=type(epoch_loop.automatic_optimization)(trainer),
        manual_optimization=type(epoch_loop.manual_optimization)(trainer),
    )
    return trainer


def _strategy_for(module: nn.Module, optimizers: Sequence[Any], real: Any) -> Any:
    """A shallow copy of the strategy over the twins, in which collectives stay at home.

    Without a gradient scaler: what it does is in place, and whether it skips a step depends on data.
    """
    precision = _shallow(real.strategy.precision_plugin)
    if getattr(precision, "scaler", None) is not None:
        precision.scaler = None
    strategy = _shallow(real.strategy, _lightning_module=module, _model=module, _precision_plugin=precision)
    strategy.optimizers = optimizers
    twins = dict(zip(map(id, real.optimizers), optimizers, strict=True))
    strategy.lr_scheduler_configs = [
        _shallow(config, scheduler=_still(config.scheduler, twins))
        for config in real.strategy.lr_scheduler_configs
    ]
    size = real.world_size
    strategy.all_gather = lambda tensor, *_, **__: tensor if size == 1 else torch.stack([tensor] * size)
    strategy.reduce = strategy.broadcast = lambda value, *_, **__: value
    strategy.barrier = _nothing
    return strategy


def _still(scheduler: Any, twins: dict[int, Any]) -> Any:
    """The scheduler's interface, without effect: a learning rate changes no memory."""
    optimizer = getattr(scheduler, "optimizer", None)
    return _shallow(scheduler, optimizer=twins.get(id(optimizer), optimizer), step=_nothing)


def _shallow(thing: Any, **replaced: Any) -> Any:
    # Not copy.copy: a strategy's __setstate__ would point optimizers that the user wrapped at the copy.
    twin = object.__new__(type(thing))
    vars(twin).update(vars(thing), **replaced)
    return twin


def silence(module: nn.Module, namespace: Any) -> None:
    """Let the twin log and print nothing, and give a metric that needs data a stand-in value."""
    for part in module.modules():
        if isinstance(part, namespace.LightningModule):
            part.log = part.log_dict = part.print = _nothing
        elif is_metric(part):
            part.forward, part.update = _tolerant(part.forward), _tolerant(part.update)
            part.compute = _tolerant(part.compute)


def is_metric(module: nn.Module) -> bool:
    """Whether it is a torchmetrics metric or collection, which is not compiled."""
    return any(base.__module__.partition(".")[0] == "torchmetrics" for base in type(module).__mro__)


def _tolerant(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception:  # its checks and counts depend on data
            return torch.zeros(())

    return call


def _nothing(*_: Any, **__: Any) -> None:
    """Takes the place of what must not happen in the fake step."""
