"""Models with compiled parts around one that is left to the online runtime, each for another reason."""

from __future__ import annotations

import torch
from failing_models import no_fake
from hard_models import WIDTH, Tanh
from torch import nn

ROWS = 4096


class Body(nn.Module):
    """A stack with enough in it to evict; subclasses say why it cannot be compiled."""

    def __init__(self, layers: int = 6, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Fails(Body):
    """Does not compile."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(no_fake(x))


class Routes(Body):
    """Shapes depend on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stack(x)
        rows = (x.sum(1) > 0).nonzero().squeeze(1)
        return x.index_add(0, rows, torch.sin(x[rows]))


class Chooses(Body):
    """Branches on a number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stack(x)
        return torch.sin(x) if x.sum() > 0 else torch.cos(x)


class Packs(nn.Module):
    """Cannot be run on tensors without data."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.arange(16, 0, -1)
        packed = nn.utils.rnn.pack_padded_sequence(x.view(16, -1, WIDTH)[:, :16], lengths)
        return self.rnn(packed)[0].data


class Between(nn.Module):
    """Compiled, online, compiled."""

    def __init__(self, middle: nn.Module, layers: int = 3) -> None:
        super().__init__()
        self.first, self.middle, self.last = Tanh(layers), middle, Tanh(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))
