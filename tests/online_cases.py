"""Training steps that are hard to run again bit by bit, each as (modules, step): `step()` runs forward, loss
and backward and returns what else must be equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Step = Callable[[], Any]
Case = tuple[nn.Module, Step]

ROWS = 512


def mlp() -> Case:
    net = nn.Sequential(*(m for _ in range(12) for m in (nn.Linear(32, 32), nn.Tanh())), nn.Linear(32, 1))
    x = torch.rand(ROWS, 32)
    return net, lambda: net(x).square().mean().backward()


def dropout() -> Case:
    net = nn.Sequential(
        *(m for _ in range(8) for m in (nn.Linear(32, 32), nn.Dropout(0.3), nn.GELU())), nn.Linear(32, 1)
    )
    x = torch.rand(ROWS, 32)
    return net, lambda: net(x).square().mean().backward()


def own_generator() -> Case:
    net = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
    x = torch.rand(ROWS, 32)

    def step() -> Any:
        generator = torch.Generator().manual_seed(3)
        h = x
        for layer in net:
            h = layer(h)
            h = h * torch.rand(h.shape, generator=generator) + torch.randn_like(h)
        h.square().mean().backward()
        return generator.get_state()

    return net, step


def batch_norm() -> Case:
    net = nn.Sequential(
        *(
            m
            for _ in range(6)
            for m in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        )
    )
    x = torch.rand(16, 4, 12, 12)
    return net, lambda: net(x).square().mean().backward()


def batch_norm_in_evaluation_then_training() -> Case:
    net = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh())))
    x = torch.rand(ROWS, 16)

    def step() -> None:
        frozen = net.eval()(x)
        trained = net.train()(x)  # overwrites the statistics that `frozen` was computed with
        (frozen * trained).mean().backward()

    return net, step


def in_place() -> Case:
    net = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
    x = torch.rand(ROWS, 32)

    def step() -> None:
        h = x * 1.5
        for layer in net:
            h = layer(h)
            h += 0.1
            h.sigmoid_()
            h = h * 0.5
            h[:, ::2] = h[:, 1::2] * 2
            h = h.clone().mul_(0.5).t().contiguous().t()
        h.square().mean().backward()

    return net, step


def views() -> Case:
    net = nn.ModuleList(nn.Linear(16, 48) for _ in range(8))
    x = torch.rand(ROWS, 16)

    def step() -> None:
        h = x
        for layer in net:
            a, b, c = layer(h).chunk(3, 1)
            d = (a.unsqueeze(2) * b.unsqueeze(1)).transpose(1, 2)
            h = (d @ c.unsqueeze(2)).squeeze(2).tanh() + h.flip(1)[:, torch.arange(16)]
        h.square().mean().backward()

    return net, step


def autocast() -> Case:
    net = nn.Sequential(
        *(m for _ in range(8) for m in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())), nn.Linear(32, 1)
    )
    x = torch.rand(ROWS, 32)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(x).square().mean()
        loss.backward()

    return net, step


class _Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.rnn = kind(16, 24, num_layers=2, dropout=0.2)
        self.head = nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(x).tanh())[0].tanh().exp())


def _recurrent(kind: Any) -> Case:
    net = _Recurrent(kind)
    x = torch.rand(12, 32, 16)
    return net, lambda: net(x).square().mean().backward()


def lstm() -> Case:
    return _recurrent(nn.LSTM)


def gru() -> Case:
    return _recurrent(nn.GRU)


def lstm_cell() -> Case:
    net = nn.ModuleDict({"cell": nn.LSTMCell(16, 16), "head": nn.Linear(16, 1)})
    x = torch.rand(12, ROWS, 16)

    def step() -> None:
        h = c = torch.zeros(ROWS, 16)
        loss = torch.zeros(())
        for frame in x:
            h, c = net["cell"](frame, (h, c))
            loss = loss + net["head"](h).square().mean()
        loss.backward()

    return net, step


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        y = (x * weight).tanh()
        ctx.save_for_backward(x, weight, y)
        return y, y.sign()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        x, weight, y = ctx.saved_tensors
        inner = grad * (1 - y * y)
        return inner * weight, (inner * x).sum(0)


def custom_function() -> Case:
    net = nn.ParameterList(torch.rand(32) for _ in range(10))
    x = torch.rand(ROWS, 32)

    def step() -> None:
        h = x
        for weight in net:
            h, sign = _Scaled.apply(h, weight)
            h = h.exp() * sign
        h.square().mean().backward()

    return net, step


def sparse_embedding() -> Case:
    net = nn.ModuleList(
        [nn.Embedding(40, 32, sparse=True), *(nn.Linear(32, 32) for _ in range(6)), nn.Linear(32, 1)]
    )
    tokens = torch.randint(40, (ROWS,))

    def step() -> None:
        h = net[0](tokens)
        for layer in net[1:]:
            h = layer(h).tanh()
        h.square().mean().backward()

    return net, step


def complex_numbers() -> Case:
    net = nn.ParameterList(torch.randn(32, 32, dtype=torch.complex64) / 6 for _ in range(8))
    x = torch.randn(ROWS, 32, dtype=torch.complex64)

    def step() -> None:
        h = x
        for weight in net:
            h = (h.conj() @ weight.mH) * h.conj().imag + torch.view_as_real(h).sum(-1).neg() * h.imag
            h = h / (1 + h.abs())
        h.abs().mean().backward()

    return net, step


def higher_order() -> Case:
    """As in unrolled GANs: the gradient of a gradient, through updates of the parameters."""
    net = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(24, 24), nn.Tanh())), nn.Linear(24, 1))
    x = torch.rand(ROWS, 24)

    def step() -> None:
        values = dict(net.named_parameters())
        for _ in range(2):
            loss = torch.func.functional_call(net, values, (x,)).square().mean()
            gradients = torch.autograd.grad(loss, list(values.values()), create_graph=True)
            values = {
                name: value - 0.1 * gradient
                for (name, value), gradient in zip(values.items(), gradients, strict=True)
            }
        torch.func.functional_call(net, values, (x,)).square().mean().backward()

    return net, step


def retained_graph() -> Case:
    net = nn.Sequential(*(m for _ in range(10) for m in (nn.Linear(32, 32), nn.Tanh())), nn.Linear(32, 1))
    x = torch.rand(ROWS, 32)

    def step() -> None:
        y = net(x)
        y.mean().backward(retain_graph=True)
        y.square().mean().backward()

    return net, step


def data_dependent() -> Case:
    """A mixture of experts: `nonzero`, and results gathered in place."""
    net = nn.ModuleList(nn.ModuleList(nn.Linear(32, 32) for _ in range(4)) for _ in range(4))
    router = nn.Linear(32, 4)
    x = torch.rand(ROWS, 32)

    def step() -> None:
        h = x
        for experts in net:
            scores = router(h).softmax(1)
            weight, choice = scores.max(1)
            out = torch.zeros_like(h)
            for index, expert in enumerate(experts):
                rows = (choice == index).nonzero().flatten()
                out.index_add_(0, rows, expert(h[rows]).tanh() * weight[rows, None])
            h = h + out + out[choice == 0].sum(0)
        h.square().mean().backward()

    return nn.ModuleList([net, router]), step


def checkpointed() -> Case:
    from torch.utils.checkpoint import checkpoint

    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        for _ in range(6)
    )
    x = torch.rand(ROWS, 32)

    def step() -> None:
        h = x
        for i, block in enumerate(blocks):
            h = checkpoint(block, h, use_reentrant=False) if i % 2 else block(h)
        h.square().mean().backward()

    return blocks, step


def rectified_at_random() -> Case:
    net = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(32, 32), nn.RReLU())), nn.Linear(32, 1))
    x = torch.rand(ROWS, 32) - 0.5
    return net, lambda: net(x).square().mean().backward()


def attention() -> Case:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    net = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    x = torch.rand(8, 24, 32)
    return net, lambda: net(x).square().mean().backward()


def optimizer_inside() -> Case:
    net = nn.Sequential(*(m for _ in range(10) for m in (nn.Linear(32, 32), nn.Tanh())), nn.Linear(32, 1))
    x = torch.rand(ROWS, 32)
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> Any:
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    return net, step


CASES: dict[str, Callable[[], Case]] = {
    case.__name__: case
    for case in (
        mlp,
        dropout,
        own_generator,
        batch_norm,
        batch_norm_in_evaluation_then_training,
        in_place,
        views,
        autocast,
        lstm,
        gru,
        lstm_cell,
        custom_function,
        sparse_embedding,
        complex_numbers,
        higher_order,
        retained_graph,
        data_dependent,
        checkpointed,
        rectified_at_random,
        attention,
        optimizer_inside,
    )
}
