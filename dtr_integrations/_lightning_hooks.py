"""The hooks of `AutoCheckpoint` for both Lightning namespaces. No algorithm: they drive a `BudgetSession`."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from ._lightning_step import LightningStep
from ._loggers import logger_directory
from .config import DTRConfig
from .core.peak import PeakReport
from .errors import ConfigError
from .measure import live_bytes, tensors_in
from .session import BudgetSession, SessionHolder


class AutoCheckpointHooks(SessionHolder):
    """Everything of `AutoCheckpoint` but its base class; see there."""

    namespace: Any  # `lightning.pytorch` or `pytorch_lightning`

    def __init__(
        self,
        budget: str,
        *,
        plan: str | None = None,
        targets: list[str] | None = None,
        reserve: str | dict[str, str] | None = None,
        fallback: str = "eager",
        on_infeasible: str = "error",
        mode: str = "schedule",
        compile_options: dict[str, Any] | None = None,
        run_dir: str | None = None,
        log_every_n_steps: int = 50,
        progress: bool = True,
        verify: bool = False,
    ) -> None:
        """Check the configuration; nothing else happens before `fit`.

        Args:
            budget: total memory of one rank's device: ``"70GB"``, ``"65.2GiB"``, ``"90%"`` of it, ``"auto"``.
            plan: a plan file made earlier, used instead of searching.
            targets: names of the modules to compile, as in ``pl_module.named_modules()``. None: the outermost
                ones that `training_step` calls. ``[""]`` is the LightningModule itself, as in ``self(x)``.
            reserve: memory for what torch does not allocate: a size, or a mapping of lines (see `DTRConfig`).
            fallback: what to do with a module that torch.compile cannot take, or with a whole step:
                ``"eager"`` leaves it alone with a warning, ``"dtr"`` runs it under the online runtime, and
                modules that depend on data too, ``"error"`` stops.
            on_infeasible: ``"error"`` or ``"best_effort"`` (train with the lowest plan, with a warning).
            mode: ``"schedule"`` or ``"tags"``.
            compile_options: passed to ``torch.compile(options=...)``.
            run_dir: where `plan-rank{i}.json` and `peaks-rank{i}.jsonl` are written. None: the first logger's
                directory, or nowhere without a logger.
            log_every_n_steps: how often the peak is measured, in optimizer steps; besides, one of the first
                three is.
            progress: say what planning is doing, and print the summary after `fit`.
            verify: prove before the first step that the plan changes nothing, on copies; `VerificationFailed`
                if it does.

        Raises:
            ConfigError: a wrong value (a `ValueError`).
        """
        self.config = DTRConfig.from_any(
            budget=budget,
            plan=plan,
            targets=targets,
            reserve=reserve,
            fallback=fallback,
            on_infeasible=on_infeasible,
            mode=mode,
            compile_options=compile_options or {},
            run_dir=run_dir,
            log_every_n_steps=log_every_n_steps,
            progress=progress,
            verify=verify,
        )
        self.session: BudgetSession | None = None
        self._trace: Any = None
        self._targets: tuple[str, ...] | None = None
        self._steps_seen = 0
        self._planned_bytes = 0

    # -- hooks -----------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a session: after the sanity check, before the first training batch. Nothing changes yet."""
        self._close()
        self._targets = None
        self._steps_seen = trainer.global_step
        directory = logger_directory(trainer.logger, trainer.strategy.broadcast)
        self.session = BudgetSession(
            dataclasses.replace(self.config, run_dir=self.config.run_dir or directory),
            pl_module,
            optimizers=trainer.optimizers,
            device=trainer.strategy.root_device,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            progress=self._show if self.config.progress else None,
        )
        self.session.wrapped_in(trainer.strategy.model)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Plan, if there is no plan yet; begin measuring, if this optimizer step is one to measure."""
        session = self.session
        if session is None:
            return
        self._abandon()
        if session.plans_for(batch):
            step = LightningStep(
                namespace=self.namespace,
                trainer=trainer,
                module=pl_module,
                batch=batch,
                buckets=session.buckets,
            )
            if self._targets is None:
                self._targets = tuple(self.config.targets or step.called())
                session.install(_modules(pl_module, self._targets), after_call=_nothing)
            session.prepare(dataclasses.replace(step, targets=self._targets))
            self._planned_bytes = live_bytes(tensors_in(batch))
        if session.should_measure(last_step=1 if _is_one_step(trainer) else None) and self._is_typical(batch):
            self._trace = session.open_trace(batch)
        session.enter_step(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """All targets are compiled by the first backward: wait for the other ranks there."""
        if self.session is not None:
            self.session.compiled()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End measuring; if the optimizer has stepped, report."""
        session = self.session
        if session is None:
            return
        session.leave_step()
        if self._trace is not None:
            trace, self._trace = self._trace, None
            session.close_trace(trace)
        if trainer.global_step != self._steps_seen:
            self._steps_seen = trainer.global_step
            report = session.finish_step()
            if report is not None:
                _log(trainer, report)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Print what was planned and measured; restore the modules."""
        if self.session is not None and self.config.progress and self.plan is not None:
            trainer.print(self.session.report)
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore the modules: Lightning calls no `teardown` after an exception."""
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore the modules."""
        self._close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _is_typical(self, batch: Any) -> bool:
        """Not smaller than the planned batch, as an epoch's last may be. Any, if a measurement is overdue."""
        assert self.session is not None
        overdue = self.session.step_count >= 2 and not self.session.reports
        return overdue or live_bytes(tensors_in(batch)) >= self._planned_bytes

    def _abandon(self) -> None:
        if self.session is not None:
            self.session.leave_step()
        if self._trace is not None:  # a batch that was begun and never ended
            self._trace.abandon()
            self._trace = None

    def _close(self) -> None:
        self._abandon()
        if self.session is not None:
            self.session.close()

    def _show(self, message: str) -> None:
        self.namespace.utilities.rank_zero_info(f"AutoCheckpoint: {message}")


# A wrong keyword is a TypeError of Python's: it should name the class that the user has called.
AutoCheckpointHooks.__init__.__qualname__ = "AutoCheckpoint.__init__"


def _modules(module: nn.Module, names: tuple[str, ...]) -> dict[str, nn.Module]:
    try:
        found = {name: module.get_submodule(name) for name in names}
    except AttributeError as error:
        raise ConfigError(f"targets={list(names)!r}: {error}. Names as in module.named_modules().") from error
    for name, target in found.items():
        if target._compiled_call_impl is not None or hasattr(target, "_orig_mod"):
            raise ConfigError(
                f"{name or 'the LightningModule'} is compiled with torch.compile already. Leave that out: "
                "AutoCheckpoint compiles it, with compile_options= as options."
            )
    return found


def _nothing(*_: Any) -> None:
    """Lightning says when the forward is over."""


def _is_one_step(trainer: Any) -> bool:
    one_epoch = trainer.max_epochs == 1 and trainer.num_training_batches <= trainer.accumulate_grad_batches
    return one_epoch or trainer.max_steps == 1


def _log(trainer: Any, report: PeakReport) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(report.metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
