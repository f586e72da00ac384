"""Models with a part that torch.compile cannot take, each in another way; the rest of each can be planned."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from hard_models import WIDTH, Tanh
from torch import nn
from torch._inductor.lowering import register_lowering


@torch.library.custom_op("dtr_tests::no_fake", mutates_args=())
def no_fake(x: torch.Tensor) -> torch.Tensor:
    """A custom op that nobody wrote a fake implementation for."""
    return x * 2


no_fake.register_autograd(lambda ctx, grad: grad * 2)


@torch.library.custom_op("dtr_tests::wrong_fake", mutates_args=())
def wrong_fake(x: torch.Tensor) -> torch.Tensor:
    """A custom op whose fake implementation lies about the strides: generated code asserts them."""
    return x.t().contiguous().t() * 2


wrong_fake.register_fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
wrong_fake.register_autograd(lambda ctx, grad: grad * 2)


@torch.library.custom_op("dtr_tests::reads_gradient", mutates_args=())
def reads_gradient(x: torch.Tensor) -> torch.Tensor:
    """A custom op whose backward reads a number off the gradient: Dynamo breaks its graph for it."""
    return x * 2


reads_gradient.register_fake(torch.empty_like)
reads_gradient.register_autograd(lambda ctx, grad: grad * (2 if float(grad.sum()) < 1e9 else 3))


@torch.library.custom_op("dtr_tests::no_fake_in_backward", mutates_args=())
def no_fake_in_backward(x: torch.Tensor) -> torch.Tensor:
    """A custom op whose backward cannot be traced."""
    return x * 2


no_fake_in_backward.register_fake(torch.empty_like)
no_fake_in_backward.register_autograd(lambda ctx, grad: no_fake(grad))


@torch.library.custom_op("dtr_tests::bad_lowering", mutates_args=())
def bad_lowering(x: torch.Tensor) -> torch.Tensor:
    """A custom op for which somebody registered a lowering with a fault."""
    return x * 2


bad_lowering.register_fake(torch.empty_like)
bad_lowering.register_autograd(lambda ctx, grad: grad * 2)


@register_lowering(torch.ops.dtr_tests.bad_lowering.default)
def _(x: Any) -> Any:
    raise NotImplementedError("no kernel for this dtype")


class Middle(nn.Module):
    """Two stacks that compile with something in between that may not."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = Tanh(), middle, Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


class Looped(nn.Module):
    """Blocks in a loop, the second of which is different."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Tanh(), middle, Tanh()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class CallsOp(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op, self.lin = op, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(self.lin(x))


class Nonzero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x.sum(1) > 0).nonzero().squeeze(1)
        return self.lin(x[rows])


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x[x.sum(1) > 0])


class Branches(nn.Module):
    """Data-dependent control flow."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        return torch.sin(x) if x.sum() > 0 else torch.cos(x)


class Generates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def pieces(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for piece in x.chunk(4):
            yield self.lin(piece)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.pieces(x)))


class Locks(nn.Module):
    """Python that Dynamo does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with threading.Lock():
            x = self.lin(x)
        return torch.sin(x)


class Refuses(nn.Module):
    """A check of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.allowed = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.allowed:
            raise ValueError("this is not allowed")
        return self.lin(x)


class Disabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.lin(x))


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        torch._dynamo.graph_break()
        return torch.sin(x)
