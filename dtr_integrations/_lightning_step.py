"""One optimizer step of a Lightning run on fake twins: the `StepSource` of both Lightning namespaces.

Lightning's own optimization loops drive the twins, so the order of things (gradients zeroed after the forward,
clipping before the step), what stays alive between them, precision plugins and overridden hooks are Lightning's,
not a copy of it. What the loops and the user's `training_step` reach through `self.trainer` is a stand-in: reads
fall through to the real trainer; writes, logging, files and collectives do not.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from .capture.fake import FakeWorld
from .capture.source import FakeStep, zero_gradients
from .errors import CaptureError

# A manual `training_step` may step an optimizer only every few batches (accumulation, a critic's extra steps).
_MAX_MANUAL_BATCHES = 64


@dataclass(frozen=True, kw_only=True)
class LightningStep:
    """The step that `trainer` performs next on `module` with batches like `batch`.

    `namespace` is `lightning.pytorch` or `pytorch_lightning`; `targets` are names in `module`. Automatic
    optimization: `accumulate_grad_batches` micro-batches, then clipping and the optimizer. Manual: `training_step`
    until every optimizer has stepped. Of the hooks, those around backward and optimizer run, on the twin; those
    around the batch do not.
    """

    namespace: Any
    trainer: Any
    module: nn.Module
    batch: Any
    targets: tuple[str, ...]

    def build(self, world: FakeWorld) -> FakeStep:
        """See `StepSource.build`."""
        trainer = self.trainer
        if self.batch is None:
            raise CaptureError(
                "the batch is not known before training_step fetches it (dataloader_iter); "
                "write training_step(self, batch, batch_idx)"
            )
        module = world.copy(self.module, shared=_not_to_copy(trainer, self.module))
        zero_gradients(module.parameters())
        _silence(module, self.namespace)
        optimizers = [world.optimizer(optimizer) for optimizer in trainer.optimizers]
        batch = world.fake(self.batch)
        stand_in = _trainer_for(module, optimizers, trainer, self.namespace)
        module.trainer = stand_in
        run = _automatic if self.module.automatic_optimization else _manual
        return FakeStep(
            model=module,
            targets=self.targets,
            run=run(stand_in, batch),
            optimizers=optimizers,
            batch=batch,
        )


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


def _automatic(trainer: Any, batch: Any) -> Callable[[], None]:
    epoch_loop = trainer.fit_loop.epoch_loop
    micro_batches = trainer.accumulate_grad_batches
    batch_numbers = itertools.count(micro_batches)  # not the first of the run, which may be special

    def run() -> None:
        for micro in range(micro_batches):
            trainer.fit_loop.accumulating = micro < micro_batches - 1
            number = next(batch_numbers)
            arguments = epoch_loop._build_kwargs(OrderedDict(), batch, number)
            epoch_loop.automatic_optimization.run(trainer.optimizers[0], number, arguments)

    return run


def _manual(trainer: Any, batch: Any) -> Callable[[], None]:
    epoch_loop = trainer.fit_loop.epoch_loop
    batch_numbers = itertools.count(1)
    waiting: set[int] = set()
    for optimizer in trainer.optimizers:
        optimizer.register_step_post_hook(lambda stepped, *_: waiting.discard(id(stepped)))

    def run() -> None:
        waiting.update(id(optimizer) for optimizer in trainer.optimizers)
        for _ in range(_MAX_MANUAL_BATCHES):
            arguments = epoch_loop._build_kwargs(OrderedDict(), batch, next(batch_numbers))
            epoch_loop.manual_optimization.run(arguments)
            if not waiting:
                break

    return run


def _trainer_for(module: nn.Module, optimizers: list[Any], real: Any, namespace: Any) -> Any:
    """The trainer that the twin sees."""
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
    loops = real.fit_loop.epoch_loop
    fit_loop.epoch_loop = _StandIn(
        loops,
        automatic_optimization=type(loops.automatic_optimization)(trainer),
        manual_optimization=type(loops.manual_optimization)(trainer),
    )
    return trainer


def _strategy_for(module: nn.Module, optimizers: list[Any], real: Any) -> Any:
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
    # Not copy.copy: a strategy's __setstate__ would point wrapped optimizers at the copy.
    twin = object.__new__(type(thing))
    vars(twin).update(vars(thing), **replaced)
    return twin


def _not_to_copy(trainer: Any, module: nn.Module) -> tuple[Any, ...]:
    loaders = [value for value in vars(module).values() if isinstance(value, DataLoader)]
    things = (trainer, trainer.strategy, trainer.profiler, trainer.datamodule, trainer.fit_loop)
    return (*things, *trainer.loggers, *trainer.callbacks, *loaders)


def _silence(module: nn.Module, namespace: Any) -> None:
    """The twin logs and prints nothing, and a metric that needs data gives a stand-in value."""
    for part in module.modules():
        if isinstance(part, namespace.LightningModule):
            part.log = part.log_dict = part.print = _nothing
        elif is_metric(part):
            part.forward = _tolerant(part.forward)


def is_metric(module: nn.Module) -> bool:
    """Whether it is a torchmetrics metric or collection, which is not compiled."""
    return any(base.__module__.partition(".")[0] == "torchmetrics" for base in type(module).__mro__)


def _tolerant(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Exception:  # data-dependent: checks of labels, bincount
            return torch.zeros(())

    return call


def _nothing(*_: Any, **__: Any) -> None:
    """Takes the place of what must not happen in the fake step."""
