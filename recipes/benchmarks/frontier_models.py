"""The models of the frontier benchmark: one batch, a loss, and the blocks that people checkpoint.

No optimizer: what is compared is forward and backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from models import ConvNet
from torch import nn

CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model, its batch and its loss.

    Attributes:
        make: builds the model; the harness seeds before it.
        batch: (input, target).
        loss: of the model's output and the target, outside of the model.
        blocks: names of the `nn.ModuleList`s or `nn.Sequential`s whose members are checkpointed one by one.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    blocks: tuple[str, ...] = ("blocks",)


class Attention(nn.Module):
    """Multi-head attention with grouped keys and values and, optionally, rotary positions."""

    def __init__(self, width: int, heads: int, groups: int, *, causal: bool, rotary: bool = False) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.causal, self.rotary = causal, rotary
        self.qkv = nn.Linear(width, (heads + 2 * groups) * self.size, bias=not rotary)
        self.out = nn.Linear(width, width, bias=not rotary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, -1, self.size).transpose(1, 2)
        q, k, v = parts.split((self.heads, self.groups, self.groups), dim=1)
        if self.rotary:
            q, k = _rotated(q), _rotated(k)
        if self.groups != self.heads:
            k, v = (t.repeat_interleave(self.heads // self.groups, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def _rotated(x: torch.Tensor) -> torch.Tensor:
    length, size = x.shape[-2:]
    rates = 10_000 ** -(torch.arange(0, size, 2, device=x.device) / size)
    angles = torch.outer(torch.arange(length, device=x.device), rates)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
    return torch.stack(turned, dim=-1).flatten(-2)


class Block(nn.Module):
    """A pre-norm transformer block with LayerNorm and GELU."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, heads, causal=causal)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """Embeddings, blocks, a head for each token: a GPT if `causal`, else BERT-like."""

    def __init__(
        self, *, layers: int, width: int, vocabulary: int, length: int, causal: bool, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, width // 64, causal=causal, dropout=dropout) for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LlamaBlock(nn.Module):
    """RMSNorm, rotary grouped-query attention, SwiGLU."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, groups, causal=True, rotary=True)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A Llama-style stack whose head is tied to the embedding."""

    def __init__(
        self,
        *,
        layers: int = 4,
        width: int = 256,
        heads: int = 4,
        groups: int = 2,
        hidden: int = 768,
        vocabulary: int = 32_000,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Level(nn.Module):
    """Two convolutions with GroupNorm at one resolution of a U-Net."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, outside), nn.GroupNorm(4, outside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    """Down and up again, with a skip from each level to its twin."""

    def __init__(self, *, width: int = 16, levels: int = 4) -> None:
        super().__init__()
        sizes = [3, *(width * 2**i for i in range(levels))]
        self.down = nn.ModuleList(Level(a, b) for a, b in itertools.pairwise(sizes))
        self.up = nn.ModuleList(Level(a + b, a) for a, b in zip(sizes[-2:0:-1], sizes[:1:-1], strict=False))
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x, skips = image, []
        for level in self.down[:-1]:
            x = level(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.down[-1](x)
        for level in self.up:
            x = level(torch.cat((F.interpolate(x, scale_factor=2.0), skips.pop()), dim=1))
        return self.head(x)


class MixerBlock(nn.Module):
    """An MLP over the patches, an MLP over the channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places = nn.Sequential(
            nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches)
        )
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.places(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """An MLP-Mixer on 64 × 64 images."""

    def __init__(self, *, layers: int = 6, width: int = 256, patch: int = 4) -> None:
        super().__init__()
        patches = (64 // patch) ** 2
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.ModuleList(MixerBlock(patches, width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def token_loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every token."""
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def tokens(batch: int, length: int, vocabulary: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """What makes random tokens and as many targets."""

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(vocabulary, (batch, length)), torch.randint(vocabulary, (batch, length))

    return make


def _images(batch: int, size: int, *dense: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    def make() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(batch, 3, size, size), torch.randint(CLASSES, (batch, *dense))

    return make


def _transformer(*, small: bool, causal: bool, dropout: float = 0.0) -> Callable[[], nn.Module]:
    layers, width = (2, 64) if small else (6, 256)
    return lambda: Transformer(
        layers=layers, width=width, vocabulary=1000, length=256, causal=causal, dropout=dropout
    )


def models(*, small: bool = False) -> dict[str, Model]:
    """The six models by name; `small`: a few layers and pixels, for tests."""
    rows, pixels = (2, 32) if small else (8, 64)
    found: tuple[Any, ...] = (
        Model(
            name="gpt",
            make=_transformer(small=small, causal=True),
            batch=tokens(rows, 256, 1000),
            loss=token_loss,
        ),
        Model(
            name="conv",
            make=lambda: ConvNet(blocks=2 if small else 8),
            batch=_images(2 * rows, pixels),
            loss=F.cross_entropy,
        ),
        Model(
            name="llama",
            make=lambda: Llama(layers=2 if small else 4, vocabulary=512 if small else 32_000),
            batch=tokens(2, 128 if small else 256, 512 if small else 32_000),
            loss=token_loss,
        ),
        Model(
            name="unet",
            make=lambda: UNet(levels=3 if small else 4),
            batch=_images(rows, 2 * pixels, 2 * pixels, 2 * pixels),
            loss=F.cross_entropy,
            blocks=("down", "up"),
        ),
        Model(
            name="mixer",
            make=lambda: Mixer(layers=2 if small else 6, width=64 if small else 256),
            batch=_images(rows, 64),
            loss=F.cross_entropy,
        ),
        Model(
            name="bert",
            make=_transformer(small=small, causal=False, dropout=0.1),
            batch=tokens(rows, 256, 1000),
            loss=token_loss,
        ),
    )
    return {model.name: model for model in found}
