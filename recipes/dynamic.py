"""Train models that cannot be planned ahead, under half of the memory that they take: `dynamic.py trees`
or `dynamic.py experts`, with --small in a minute or two.

trees: a TreeLSTM over the syntax trees of Python's standard library, another program at each step; nothing is
compiled, and the online runtime takes the whole step. experts: a GPT with a mixture of experts; attention is
compiled and planned, the experts run online between it. Exit code 0: every measured peak was within the
budget, values were evicted and computed again, and the losses are those of the run without a budget.
"""

from __future__ import annotations

import argparse
import sys
import time

import lightning
from experts import LitExperts
from stdlib_data import stdlib_loader
from torch.utils.data import DataLoader
from trees import LitTrees, syntax_trees

from dtr_integrations import AutoCheckpoint
from dtr_integrations.units import format_bytes

STEPS = 8


class Losses(lightning.Callback):
    """Keeps every step's loss."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        """Lightning's hook."""
        self.values.append(outputs["loss"].item())


def made(what: str, small: bool) -> tuple[lightning.LightningModule, DataLoader]:
    """The module and its data."""
    if what == "trees":
        trees = list(syntax_trees(60 if small else 400, STEPS))
        module = LitTrees(width=64 if small else 256, readers=64 if small else 256)
        return module, DataLoader(trees, batch_size=None, collate_fn=lambda tree: tree)
    sizes = {"layers": 2, "width": 32, "heads": 2, "sequence": 64} if small else {"layers": 4}
    return LitExperts(**sizes), stdlib_loader(batch=16, sequence=sizes.get("sequence", 256))


def train(what: str, budget: str, *, small: bool) -> tuple[AutoCheckpoint, list[float], float]:
    """One run from the same seed: the callback, the losses, and the seconds that it took."""
    lightning.seed_everything(0, verbose=False)
    module, data = made(what, small)
    # The reserve is for what operators allocate within themselves.
    callback = AutoCheckpoint(budget=budget, fallback="dtr", log_every_n_steps=1, reserve="16KB")
    losses, started = Losses(), time.perf_counter()
    off = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    run = {"accelerator": "cpu", "max_epochs": 1, "limit_train_batches": STEPS}
    lightning.Trainer(callbacks=[callback, losses], **run, **off).fit(module, data)
    return callback, losses.values, time.perf_counter() - started


def main(what: str, *, small: bool) -> int:
    """Both runs; the exit code."""
    free, expected, plain_seconds = train(what, "auto", small=small)
    peak = max(report.peak_allocated_bytes for report in free.reports)
    bound, losses, seconds = train(what, f"{peak // 2} B", small=small)
    highest = max(report.peak_allocated_bytes for report in bound.reports)
    off = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    print(f"\nunconstrained {format_bytes(peak)}, {plain_seconds:.1f} s; budget {format_bytes(peak // 2)}:")
    print(f"highest measured peak {format_bytes(highest)}, {seconds:.1f} s, losses off by {off:.1e}")
    evicted = all(sum(getattr(r, n) for r in bound.online) for n in ("evictions", "rematerialisations"))
    return 0 if highest <= peak // 2 and evicted and off < 1e-5 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["trees", "experts"])
    parser.add_argument("--small", action="store_true")
    chosen = parser.parse_args()
    sys.exit(main(chosen.what, small=chosen.small))
