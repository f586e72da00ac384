"""A small byte-level GPT and its Lightning module: the demo's model, written as one would without this
library."""

from __future__ import annotations

import lightning
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Pre-norm attention and MLP. Dropout stands on the residual branches only, so attention stays one
    kernel."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and the result: (batch, sequence, width)."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(2))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.mlp_norm(x)))))


class ByteGPT(nn.Module):
    """Bytes in, the logits of each next byte out: (batch, sequence) to (batch, sequence, 256)."""

    def __init__(
        self, *, layers: int = 6, width: int = 256, heads: int = 8, sequence: int = 256, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.byte_embedding, self.position = nn.Embedding(256, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens`: integers from 0 to 255, of the sequence length of the constructor at most."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.byte_embedding(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per byte."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LitGPT(lightning.LightningModule):
    """`ByteGPT` with its loss and AdamW. A batch is a pair of integer tensors (batch, sequence): bytes,
    next bytes."""

    def __init__(self, *, learning_rate: float = 3e-4, **sizes: int | float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = ByteGPT(**sizes)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """One step's loss; logged as `train_loss`."""
        tokens, targets = batch
        loss = next_byte_loss(self.net(tokens), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
