"""The gate's models: small enough to compile, large enough that activations outweigh gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """The demo's shape: 6 layers, d=256, sequence 256, dropout on the residual."""

    def __init__(self, layers: int = 6, width: int = 256, length: int = 256, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ConvNet(nn.Module):
    """8 residual blocks, 32 channels, 64 × 64, BatchNorm."""

    def __init__(self, blocks: int = 8, channels: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(blocks))
        self.head = nn.Linear(channels, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Stack(nn.Module):
    """`layers` × (Linear, GELU)."""

    def __init__(self, layers: int = 16, width: int = 1024) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for (
            layer
        ) in self.layers:  # torch's default would shrink signal and gradients to where Adam's eps rules
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


class Broken(nn.Module):
    """A graph break in the middle: two graphs, each with dropout."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first, self.second = Stack(4, width), Stack(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.first(x), 0.1, self.training)
        torch._dynamo.graph_break()
        return self.second(x)


@dataclass(frozen=True)
class Case:
    """A model, one batch and a loss."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]
    loss: Callable[[torch.Tensor], torch.Tensor]

    def build(self) -> tuple[nn.Module, torch.Tensor, Any]:
        torch.manual_seed(0)
        model = self.make()
        return model, self.batch(), torch.optim.AdamW(model.parameters(), lr=1e-3)


def _token_loss(out: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), out.new_zeros(out.shape[0] * out.shape[1], dtype=torch.long))


def _class_loss(out: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, out.new_zeros(out.shape[0], dtype=torch.long))


def _square_loss(out: torch.Tensor) -> torch.Tensor:
    return (out - 1).square().mean()


def _cases(*, gpt: int, conv: int, mlp: int) -> dict[str, Case]:
    """The gate's models with so many layers."""

    def tokens() -> torch.Tensor:
        return torch.randint(0, 256, (8, 256))

    def images() -> torch.Tensor:
        return torch.randn(16, 3, 64, 64)

    cases = (
        Case("gpt", lambda: GPT(layers=gpt), tokens, _token_loss),
        Case("conv", lambda: ConvNet(blocks=conv), images, _class_loss),
        Case("mlp", lambda: Stack(layers=mlp), lambda: torch.randn(2048, 1024), _square_loss),
        Case("broken", Broken, lambda: torch.randn(4096, 256), _square_loss),
    )
    return {case.name: case for case in cases}


FULL = _cases(gpt=6, conv=8, mlp=16)
CASES = _cases(gpt=2, conv=4, mlp=8)  # for every change: planning and compiling cost what layers cost
