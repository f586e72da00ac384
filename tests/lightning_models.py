"""Small LightningModules for the tests of both namespaces, and a `fit` that shows nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, CLASSES, BATCH = 64, 10, 512


class Stack(nn.Module):
    """Linear layers with dropout and a BatchNorm; counts its calls that are not compiled."""

    def __init__(self, layers: int = 6, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width)
        self.eager_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.eager_calls += 1
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), 0.1, self.training)
        return self.norm(x)


def loader(batches: int = 4, width: int = WIDTH, batch: int = BATCH) -> DataLoader:
    made = torch.Generator().manual_seed(1)
    x = torch.randn(batches * batch, width, generator=made)
    y = torch.randint(0, CLASSES, (batches * batch,), generator=made)
    return DataLoader(TensorDataset(x, y), batch_size=batch)


def models(pl: Any) -> SimpleNamespace:
    """The LightningModules over one namespace."""

    class Classifier(pl.LightningModule):
        """Two children, a scheduler, logging, a Python counter; `losses` in order."""

        def __init__(self, width: int = WIDTH) -> None:
            super().__init__()
            self.net, self.head = Stack(width=width), nn.Linear(width, CLASSES)
            self.losses: list[float] = []
            self.training_steps = 0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.training_steps += 1
            x, y = batch
            loss = F.cross_entropy(self.head(self.net(x)), y)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    class Own(pl.LightningModule):
        """Computes in `training_step` with a parameter of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(WIDTH))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.tanh(batch[0] @ self.weight).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Whole(Own):
        """`training_step` calls `self(x)`; a dictionary with a large extra lives until the batch ends."""

        def __init__(self, *, logs_in_forward: bool = False) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
            self.logs_in_forward = logs_in_forward

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = F.gelu(layer(x))
            if self.logs_in_forward:
                self.log("mean", x.mean())
            return x @ self.weight

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
            out = self(batch[0])
            return {"loss": out.square().mean(), "out": out.detach() * 2}

    class Adversarial(pl.LightningModule):
        """Manual optimization: two optimizers, two schedulers, toggling, clipping by hand."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.maker, self.judge = Stack(2), nn.Sequential(Stack(2), nn.Linear(WIDTH, 1))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            real = batch[0]
            making, judging = self.optimizers()
            self.toggle_optimizer(making)
            loss = F.softplus(-self.judge(self.maker(torch.randn_like(real)))).mean()
            making.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(making, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            making.step()
            self.untoggle_optimizer(making)

            self.toggle_optimizer(judging)
            made = self.maker(torch.randn_like(real)).detach()
            loss = F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(made)).mean()
            judging.zero_grad()
            self.manual_backward(loss)
            judging.step()
            self.untoggle_optimizer(judging)
            for scheduler in self.lr_schedulers():
                scheduler.step()
            self.log_dict({"loss": loss})

        def configure_optimizers(self) -> Any:
            making = torch.optim.AdamW(self.maker.parameters())
            judging = torch.optim.SGD(self.judge.parameters(), lr=1e-3, momentum=0.9)
            return [making, judging], [
                torch.optim.lr_scheduler.StepLR(making, 2),
                torch.optim.lr_scheduler.ExponentialLR(judging, 0.9),
            ]

    return SimpleNamespace(Classifier=Classifier, Own=Own, Whole=Whole, Adversarial=Adversarial)


def fit(
    pl: Any,
    module: Any,
    *callbacks: Any,
    train: DataLoader | None = None,
    validate: DataLoader | None = None,
    ckpt_path: str | None = None,
    **trainer: Any,
) -> Any:
    """Train on CPU with a fixed seed; returns the trainer."""
    torch.manual_seed(7)
    settings = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    made = pl.Trainer(callbacks=list(callbacks), **{**settings, **trainer})
    made.fit(module, train or loader(), validate, ckpt_path=ckpt_path)
    return made
