"""Small models whose steps are recorded: GPT, ResNet, LSTM, and a child-sum TreeLSTM over syntax trees."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Step = Callable[[], Any]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def gpt(seed: int) -> Step:
    torch.manual_seed(seed)
    embed, head = nn.Embedding(64, 32), nn.Linear(32, 64)
    blocks = nn.Sequential(*(Attention(32, 4) for _ in range(8)))
    tokens = torch.randint(64, (16, 25 + seed % 3 * 4))

    def step() -> Any:
        logits = head(blocks(embed(tokens[:, :-1])))
        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

    return step


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.norm2(self.two(self.norm(self.one(x)).relu()))).relu()


def resnet(seed: int) -> Step:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *(Residual(8) for _ in range(9)), nn.Flatten(), nn.Linear(8 * 64, 10)
    )
    x, y = torch.rand(48 + seed % 3 * 8, 3, 8, 8), torch.randint(10, (48 + seed % 3 * 8,))
    return lambda: functional.cross_entropy(net(x), y).backward()


def lstm(seed: int) -> Step:
    torch.manual_seed(seed)
    cell, head = nn.LSTMCell(16, 32), nn.Linear(32, 8)
    x = torch.rand(40 + seed % 3 * 5, 64, 16)

    def step() -> Any:
        h = c = torch.zeros(64, 32)
        loss = torch.zeros(())
        for frame in x:
            h, c = cell(frame, (h, c))
            loss = loss + head(h).square().mean()
        loss.backward()

    return step


class TreeLSTM(nn.Module):
    """Child-sum (Tai et al., ACL 2015): a node's state from its kind and its children's states, on `batch`
    noisy copies of the tree."""

    def __init__(self, kinds: int, width: int, batch: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(kinds, width)
        self.gates = nn.Linear(2 * width, 3 * width)
        self.forget = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, kinds)
        self.register_buffer("noise", 0.1 * torch.randn(batch, width))

    def forward(self, node: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kind, children = node
        x = self.embed(torch.tensor([kind])) + self.noise
        states = [self(child) for child in children]
        h = sum((h for h, _ in states), torch.zeros_like(x))
        i, o, u = self.gates(torch.cat((x, h), 1)).chunk(3, 1)
        c = i.sigmoid() * u.tanh()
        for child_h, child_c in states:
            c = c + self.forget(torch.cat((x, child_h), 1)).sigmoid() * child_c
        return o.sigmoid() * c.tanh(), c


KINDS = sorted(
    name for name, kind in vars(ast).items() if isinstance(kind, type) and issubclass(kind, ast.AST)
)


def syntax_tree(seed: int, nodes: int = 40) -> Any:
    """A piece of the syntax tree of a module of the standard library, of about `nodes` nodes."""
    rng = random.Random(seed)
    with open(ast.__file__) as file:
        parsed = ast.parse(file.read())

    def size(node: ast.AST) -> int:
        return 1 + sum(map(size, ast.iter_child_nodes(node)))

    fitting = [node for node in ast.walk(parsed) if nodes // 2 <= size(node) <= 2 * nodes]

    def build(node: ast.AST) -> Any:
        return KINDS.index(type(node).__name__), [build(child) for child in ast.iter_child_nodes(node)]

    return build(rng.choice(fitting))


def treelstm(seed: int) -> Step:
    torch.manual_seed(0)
    net = TreeLSTM(len(KINDS), 16, 256)
    tree = syntax_tree(seed)
    return lambda: functional.cross_entropy(net.head(net(tree)[0]), torch.full((256,), tree[0])).backward()


MODELS: dict[str, Callable[[int], Step]] = {"gpt": gpt, "resnet": resnet, "lstm": lstm, "treelstm": treelstm}
