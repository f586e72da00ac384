"""A byte-level GPT with a mixture of experts after each block: each token goes to one of them (Fedus et al.,
JMLR 2022)."""

from __future__ import annotations

import torch
from gpt import ByteGPT, LitGPT
from torch import nn
from torch.nn import functional


class Experts(nn.Module):
    """Top-1 routing with `nonzero`: each expert gets as many tokens as chose it."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(experts))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and the result: (batch, sequence, width)."""
        tokens = self.norm(x).flatten(0, 1)
        weight, choice = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows = (choice == expert).nonzero().squeeze(1)
            out = out.index_put((rows,), down(functional.gelu(up(tokens[rows]))) * weight[rows, None])
        return x + out.view_as(x)


class ExpertsGPT(ByteGPT):
    """`ByteGPT` with `Experts` after each of its blocks."""

    def __init__(self, *, experts: int, **sizes: int | float) -> None:
        super().__init__(**sizes)
        width = self.norm.normalized_shape[0]
        self.experts = nn.ModuleList(Experts(width, experts) for _ in self.blocks)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """As `ByteGPT.forward`."""
        x = self.byte_embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block, experts in zip(self.blocks, self.experts, strict=True):
            x = experts(block(x))
        return self.head(self.norm(x))


class LitExperts(LitGPT):
    """`ExpertsGPT` with the loss and the optimizer of `LitGPT`."""

    def __init__(self, *, experts: int = 4, learning_rate: float = 3e-4, **sizes: int | float) -> None:
        super().__init__(learning_rate=learning_rate, layers=0)
        self.net = ExpertsGPT(experts=experts, **sizes)
