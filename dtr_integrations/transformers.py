"""`AutoCheckpoint` for the Hugging Face `Trainer`. No algorithm: it drives a session."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from transformers import TrainerCallback

from .config import DTRConfig
from .errors import ConfigError
from .own_loop import TrainerSession
from .pipeline import silent
from .session import SessionHolder

__all__ = ["AutoCheckpoint"]


class AutoCheckpoint(SessionHolder, TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Keeps a run of the Hugging Face `Trainer` under an absolute memory budget, at the least slowdown.

        Trainer(model, args, train_dataset=..., callbacks=[AutoCheckpoint(budget="70GB")])

    The model's first training call is planned before it runs: forward, the loss in its output, backward,
    gradient accumulation and the optimizer's step, on tensors without data. It is then compiled in place by
    that plan; checkpoint keys do not change, and evaluation and prediction run eagerly. What a
    `compute_loss_func` or an own `compute_loss` makes of the output is seen in the first step, and the second
    is planned with it; a measured step over the budget is planned again with what it showed.

    `Trainer.train` raises `BudgetInfeasible` before the first step when no plan fits. Peaks of sampled steps
    go to `state.log_history` (`dtr/peak_bytes/rank{i}` and others) and to `peaks-rank{i}.jsonl` in
    `run_dir`.

    Args:
        budget: total memory of one rank's device: ``"70GB"``, ``"65.2GiB"``, ``"90%"`` of it, ``"auto"``.
        **config: fields of `DTRConfig`; `run_dir` defaults to the trainer's `output_dir`.

    Attributes:
        session: the run's session; None before training starts.
        plan: the `Plan` in force, or None.
        reports: one `PeakReport` for each measured optimizer step.

    Raises:
        ConfigError: a wrong key or value (a `ValueError`); `torch_compile=True` in the trainer's arguments.
    """

    def __init__(self, budget: str, **config: Any) -> None:
        self.config = DTRConfig.from_any(budget=budget, **config)
        self.session: TrainerSession | None = None

    def close(self) -> None:
        """Restore the model after a `train` that raised (one that ends has done so)."""
        if self.session is not None:
            self.session.close()

    # -- events ----------------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what cannot work together, when the trainer is made."""
        if args.torch_compile:
            raise ConfigError(
                "torch_compile=True (or torch_compile_backend, torch_compile_mode) in TrainingArguments: "
                "AutoCheckpoint compiles the model itself, by its plan. Leave it out; "
                "compile_options= takes Inductor's options."
            )

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Begin a session: after everything is prepared, before the first batch. Nothing changes yet."""
        self.on_init_end(args, state, control)  # a callback may be added later
        self.close()
        self.session = TrainerSession(
            dataclasses.replace(self.config, run_dir=self.config.run_dir or args.output_dir),
            model,
            optimizers=[getattr(optimizer, "optimizer", optimizer)],  # accelerate wraps it
            device=args.device,
            rank=args.process_index,
            world_size=args.world_size,
            progress=None if state.is_world_process_zero else silent,
            micro_batches=args.gradient_accumulation_steps,
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure this optimizer step, if it is one to measure."""
        if self.session is not None:
            self.session.begin_step(last_step=state.max_steps if state.max_steps <= 1 else None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer has stepped: report what was measured."""
        report = self.session.end_step() if self.session is not None else None
        if report is not None:
            state.log_history.append({**report.metrics, "epoch": state.epoch, "step": state.global_step})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print what was planned and measured; restore the model."""
        if self.session is None:
            return
        if self.config.progress and self.plan is not None and state.is_world_process_zero:
            sys.stdout.write(f"{self.session.report}\n")
        self.session.close()
