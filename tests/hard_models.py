"""Models that strangers bring: one for each thing that could go wrong under a planner. Tiny, yet with more
activations than gradients, so that a budget can bind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, ROWS = 32, 512


class Tanh(nn.Module):
    """`layers` × (Linear, dropout, tanh)."""

    def __init__(self, layers: int = 4, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(F.dropout(layer(x), self.dropout, self.training))
        return x


class TiedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(64, WIDTH), Tanh()
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids)))


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.body(x) + 1)


class CountsThenReads(nn.Module):
    """A buffer that the forward writes to before it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Tanh()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        for layer in self.body.layers:
            x = torch.tanh(layer(x)) * (1 + 0.5 * self.calls)
        return x


class LoRA(nn.Module):
    """Frozen layers, each with a trainable low-rank path beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(4, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = torch.tanh(frozen(x) + up(down(x)))
        return x


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad.clamp(-0.01, 0.01)  # not the true gradient: it has to be this one


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Tanh(), Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Cubed.apply(self.first(x)))


class InPlace(nn.Module):
    """Activations, views and a buffer, all written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x[:, : WIDTH // 2].mul_(2.0).add_(1.0)
            x = F.relu(x.sigmoid_().mul(2.0), inplace=True)
            self.seen.add_(x.detach().mean(0))
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.lstm, self.head = Tanh(), nn.LSTM(WIDTH, WIDTH, batch_first=True), Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.lstm(self.body(x))
        return self.head(out)


class WeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList(norm(nn.Linear(WIDTH, WIDTH)) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(64, WIDTH, sparse=True), Tanh()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.embed(ids))


@dataclass
class Outputs:
    hidden: torch.Tensor
    extra: torch.Tensor | None = None
    count: int = 0


class Structured(nn.Module):
    """Returns a dict of a dataclass and a tuple with None in it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Tanh()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        x = self.body(x)
        return {"out": Outputs(hidden=x, count=3), "pair": (None, x * 2, [x.mean()]), "none": None}


class KeywordOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Tanh()

    def forward(
        self, *, x: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.body(x) * scale
        return x if mask is None else x * mask


class OddSizes(nn.Module):
    """A 0-d parameter, a 0-d input and tensors without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, WIDTH))
        self.body = Tanh()

    def forward(self, x: torch.Tensor, empty: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.body(x * self.scale), self.nothing, empty]) / temperature
        return self.body(x) + empty.sum()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Tanh(), Tanh(), Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)
        return self.third(torch.utils.checkpoint.checkpoint(self.second, x, use_reentrant=False))
