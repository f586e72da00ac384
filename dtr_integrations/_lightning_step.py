"""One optimizer step of a Lightning run on fake twins: the `StepSource` of both Lightning namespaces.

Lightning's own optimization loops drive the twins. So the order of things (gradients zeroed after the
forward, clipping before the step), what stays alive between them, precision plugins and overridden hooks
are its own.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ._compat import inside_ddp_forward
from ._lightning_twin import is_metric, silence, trainer_for
from .capture.buckets import Buckets, BucketsTwin
from .capture.called import called_modules
from .capture.source import FakeStep, zero_gradients
from .capture.world import World
from .errors import CaptureError

# A manual `training_step` may step an optimizer only every few batches (accumulation, a critic's extra
# steps).
_MAX_MANUAL_BATCHES = 64

# What Dynamo cannot trace in a LightningModule: they reach into the trainer.
_NOT_COMPILABLE = ("log", "log_dict", "print", "optimizers", "lr_schedulers", "manual_backward", "all_gather")


@dataclass(frozen=True, kw_only=True)
class LightningStep:
    """The step that `trainer` performs next on `module` with batches like `batch`.

    Automatic optimization: `accumulate_grad_batches` micro-batches, then clipping and the optimizer. Manual:
    `training_step` until every optimizer has stepped. Of the hooks, those around backward and optimizer
    run, on the twin; those around the batch do not.

    Attributes:
        namespace: `lightning.pytorch` or `pytorch_lightning`.
        trainer, module, batch: the real ones; none is changed.
        targets: names in `module` to compile.
        buckets: those of a DDP around the module.
    """

    namespace: Any
    trainer: Any
    module: nn.Module
    batch: Any
    targets: tuple[str, ...] = ()
    buckets: Buckets | None = None

    def build(self, world: World) -> FakeStep:
        """See `StepSource.build`."""
        if self.batch is None:
            raise CaptureError(
                "the batch is not known before training_step fetches it (dataloader_iter); "
                "write training_step(self, batch, batch_idx)"
            )
        module = world.copy(self.module, shared=_not_to_copy(self.trainer, self.module))
        zero_gradients(module.parameters())
        silence(module, self.namespace)
        optimizers = [world.optimizer(optimizer) for optimizer in self.trainer.optimizers]
        batch = world.copy(self.batch)
        trainer = trainer_for(module, optimizers, self.trainer, self.namespace)
        module.trainer = trainer
        buckets = self.buckets.twin(world, module) if self.buckets is not None else None
        run = _automatic if self.module.automatic_optimization else _manual
        return FakeStep(
            model=module,
            targets=self.targets,
            run=_inside(self.trainer.strategy.model, run(trainer, batch, buckets)),
            optimizers=optimizers,
            batch=lambda: batch,
        )

    def called(self) -> tuple[str, ...]:
        """What to compile: the outermost modules that the step calls. Metrics are left alone.

        Never the LightningModule itself under a wrapper such as DDP: Lightning reroutes `training_step`
        through the wrapper by putting it in the place of the module's `forward`.
        """
        return called_modules(
            self,
            leave_alone=is_metric,
            outside_only=_NOT_COMPILABLE,
            may_be_whole=self.trainer.strategy.model is self.module,
        )


def _inside(parallel: Any, run: Callable[[], None]) -> Callable[[], None]:
    """`run`, as inside of the forward of a DDP: there torch.compile splits graphs at its buckets."""
    if not isinstance(parallel, DistributedDataParallel):
        return run

    def inside() -> None:
        with inside_ddp_forward(parallel):
            run()

    return inside


def _automatic(trainer: Any, batch: Any, buckets: BucketsTwin | None) -> Callable[[], None]:
    epoch_loop = trainer.fit_loop.epoch_loop
    micro_batches = trainer.accumulate_grad_batches
    batch_numbers = itertools.count(micro_batches)  # not the first of the run, which may be special

    def run() -> None:
        for micro in range(micro_batches):
            trainer.fit_loop.accumulating = micro < micro_batches - 1
            if buckets is not None:
                buckets.reduces = not trainer.fit_loop.accumulating
            number = next(batch_numbers)
            arguments = epoch_loop._build_kwargs(OrderedDict(), batch, number)
            epoch_loop.automatic_optimization.run(trainer.optimizers[0], number, arguments)

    return run


def _manual(trainer: Any, batch: Any, buckets: BucketsTwin | None) -> Callable[[], None]:
    epoch_loop = trainer.fit_loop.epoch_loop
    batch_numbers = itertools.count(1)
    waiting: set[int] = set()
    for optimizer in trainer.optimizers:
        optimizer.register_step_post_hook(lambda stepped, *_: waiting.discard(id(stepped)))

    def run() -> None:
        assert buckets is None or buckets.reduces  # every backward of a manual step does
        waiting.update(id(optimizer) for optimizer in trainer.optimizers)
        for _ in range(_MAX_MANUAL_BATCHES):
            arguments = epoch_loop._build_kwargs(OrderedDict(), batch, next(batch_numbers))
            epoch_loop.manual_optimization.run(arguments)
            if not waiting:
                break

    return run


def _not_to_copy(trainer: Any, module: nn.Module) -> tuple[Any, ...]:
    loaders = [value for value in vars(module).values() if isinstance(value, DataLoader)]
    things = (trainer, trainer.strategy, trainer.profiler, trainer.datamodule, trainer.fit_loop)
    return (*things, *trainer.loggers, *trainer.callbacks, *loaders)
