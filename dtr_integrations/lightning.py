"""`AutoCheckpoint` for `lightning` (``import lightning``)."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from ._lightning_hooks import AutoCheckpointHooks

__all__ = ["AutoCheckpoint"]


class AutoCheckpoint(AutoCheckpointHooks, Callback):
    """Keeps a Lightning run under an absolute memory budget, at the least slowdown.

        Trainer(callbacks=[AutoCheckpoint(budget="70GB")])

    The first training batch is planned before it runs: the whole step (forward, loss, backward, clipping,
    optimizer, accumulation), on tensors without data. The outermost modules that `training_step` calls are
    then compiled in place by that plan. Validation, testing and prediction run eagerly, and checkpoint keys
    do not change. The peaks of sampled steps go to the trainer's loggers (`dtr/peak_bytes/rank{i}` and
    others) and, with a `run_dir` or a logger that has a directory, to `peaks-rank{i}.jsonl`.

    `Trainer.fit` raises `BudgetInfeasible` before the first training step when no plan fits.

    Attributes:
        session: the run's `BudgetSession`; None before training starts.
        plan: the `Plan` in force, or None.
        reports: one `PeakReport` for each measured optimizer step.
    """

    namespace = pl
