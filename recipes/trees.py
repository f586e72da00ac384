"""The syntax trees of Python's standard library, and a child-sum TreeLSTM that predicts what each node is."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import lightning
import torch
from stdlib_data import stdlib_sources
from torch import nn

KINDS = sorted(n for n, kind in vars(ast).items() if isinstance(kind, type) and issubclass(kind, ast.AST))
Node = tuple[int, list["Node"]]


def syntax_trees(nodes: int, limit: int) -> Iterator[Node]:
    """At most `limit` functions of the library, of `nodes` / 2 to `nodes` nodes: each node a kind (an index
    into KINDS) and its children."""
    for source in stdlib_sources():
        for found in ast.walk(ast.parse(source)):
            fits = isinstance(found, ast.FunctionDef) and nodes // 2 <= size(tree := _node(found)) <= nodes
            if limit and fits:
                limit -= 1
                yield tree
        if not limit:
            return


def _node(found: ast.AST) -> Node:
    return KINDS.index(type(found).__name__), [_node(child) for child in ast.iter_child_nodes(found)]


def size(tree: Node) -> int:
    """Nodes of a tree."""
    return 1 + sum(map(size, tree[1]))


class TreeLSTM(nn.Module):
    """Child-sum (Tai et al., ACL 2015); a tree to the mean loss of its nodes, in nats. A node's kind is
    predicted from what is below it, by `readers` with dropout masks of their own."""

    def __init__(self, width: int, readers: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed, self.width, self.readers = nn.Embedding(len(KINDS), width), width, readers
        self.gates, self.forget = nn.Linear(2 * width, 3 * width), nn.Linear(2 * width, width)
        self.head, self.dropout = nn.Linear(width, len(KINDS)), nn.Dropout(dropout)

    @torch.compiler.disable  # another program for each tree: it would be compiled at every step
    def forward(self, tree: Node) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        self._state(tree, losses)
        return torch.stack(losses).mean()

    def _state(self, tree: Node, losses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        kind, children = tree
        states = [self._state(child, losses) for child in children]
        below = sum((h for h, _ in states), self.embed.weight.new_zeros(self.readers, self.width))
        target = torch.full((self.readers,), kind)
        losses.append(nn.functional.cross_entropy(self.head(below), target))
        x = self.dropout(self.embed(target))
        i, o, u = self.gates(torch.cat((x, below), 1)).chunk(3, 1)
        c = i.sigmoid() * u.tanh()
        for h, child in states:
            c = c + self.forget(torch.cat((x, h), 1)).sigmoid() * child
        return o.sigmoid() * c.tanh(), c


class LitTrees(lightning.LightningModule):
    """`TreeLSTM` with its loss and Adam. A batch is a tree."""

    def __init__(self, *, width: int, readers: int, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.net, self.learning_rate = TreeLSTM(width, readers), learning_rate

    def training_step(self, batch: Node, batch_idx: int) -> torch.Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
