"""Train a byte-level GPT with Lightning, without and with a binding memory budget; hold prediction against
measurement.

`make demo` runs it. Exit code 0: the measured peak stayed within the budget, the prediction was right to 1
% of the dynamic memory, and both runs had the same losses. `runs/demo` then holds the run under the binding
budget.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import lightning
from display import machine, terminal
from findings import all_hold, draw
from gpt import LitGPT, next_byte_loss
from paired import paired_steps
from rich.console import Console
from stdlib_data import stdlib_loader

from dtr_integrations import AutoCheckpoint
from dtr_integrations.report import slowdown_table
from dtr_integrations.units import format_bytes

STEPS, PAIRS = 12, 30
RUN_DIR = Path(__file__).resolve().parents[1] / "runs" / "demo"


class Losses(lightning.Callback):
    """Keeps every step's loss."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        """Lightning's hook."""
        self.values.append(outputs["loss"].item())


def train(budget: str, run_dir: Path | None = None) -> tuple[AutoCheckpoint, list[float]]:
    """One training run from the same seed: the callback with its plan and measured peaks, and the losses."""
    lightning.seed_everything(0, verbose=False)
    losses = Losses()
    under_budget = AutoCheckpoint(budget=budget, run_dir=run_dir and str(run_dir), log_every_n_steps=5)
    off = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    run = {"accelerator": "cpu", "max_epochs": 1, "limit_train_batches": STEPS}
    lightning.Trainer(callbacks=[under_budget, losses], **run, **off).fit(LitGPT(), stdlib_loader())
    return under_budget, losses.values


def main(console: Console) -> int:
    """The demo; returns the exit code."""
    started = time.perf_counter()
    console.print(
        f"[bold]Byte-level GPT, trained on the source text of Python's standard library[/]\n{machine()}"
    )
    console.print(f"\n[bold]1. {STEPS} steps, budget='auto'[/]: all of this machine's memory, does not bind")
    free, free_losses = train("auto")
    plan = free.plan
    dynamic = plan.default_allocated_bytes - plan.static_bytes
    budget = f"{plan.static_bytes + dynamic // 2}B"
    console.print(
        f"\n[bold]2. The same {STEPS} steps, budget='{budget}'[/]: {format_bytes(plan.static_bytes)} static"
    )
    console.print(f"   memory and half of the {format_bytes(dynamic)} that the default compile adds to it")
    bound, bound_losses = train(budget, RUN_DIR)
    console.print(f"\n[bold]3. {PAIRS} pairs of steps[/], default compile and planned in alternation")
    batch, plan_file = next(iter(stdlib_loader())), str(RUN_DIR / "plan-rank0.json")
    ratio = paired_steps(
        LitGPT().net, batch, next_byte_loss, budget=budget, plan=plan_file, pairs=PAIRS, console=console
    )
    console.print(slowdown_table(bound.plan, ratio))
    draw(bound.session, RUN_DIR / "memory.svg")
    holds = all_hold(console, bound.session, free_losses, bound_losses)
    files = ", ".join(path.name for path in sorted(RUN_DIR.iterdir()))
    console.print(f"{RUN_DIR}: {files}\n{time.perf_counter() - started:.0f} s in all", soft_wrap=True)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(terminal()))
