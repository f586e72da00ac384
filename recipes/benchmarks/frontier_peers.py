"""What people do today to need less memory, each as a way to build and compile one of the models."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from frontier_models import Model
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_aten = torch.ops.aten
# What selective checkpointing keeps: products, convolutions and attention.
DEAR = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
)
RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)  # of torch's activation_memory_budget
SOLVERS = ("dp", "greedy", "ilp")


class Checkpointed(nn.Module):
    """A block under `torch.utils.checkpoint`."""

    def __init__(self, inner: nn.Module, context: Callable[[], Any] | None) -> None:
        super().__init__()
        self.inner = inner
        self.options = {} if context is None else {"context_fn": context}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False, **self.options)


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in DEAR else CheckpointPolicy.PREFER_RECOMPUTE


_SELECTIVE = functools.partial(create_selective_checkpoint_contexts, _policy)


def checkpoint_blocks(net: nn.Module, blocks: tuple[str, ...], context: Any = None) -> None:
    """Put every block of the named lists under activation checkpointing, in place."""
    for name in blocks:
        group = net.get_submodule(name)
        for key, block in list(group.named_children()):
            setattr(group, key, Checkpointed(block, context))


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One way to run a model.

    Attributes:
        name: e.g. `"torch's budget, dp, 0.5"`.
        compiled: to be compiled by `torch.compile`.
        change: what is done to the model before.
        config: of torch's partitioner, while it is compiled.
    """

    name: str
    compiled: bool = True
    change: Callable[[nn.Module, Model], None] | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def build(self, model: Model) -> nn.Module:
        """The model in training mode, not yet compiled; from the same seed whoever builds it."""
        torch.manual_seed(0)
        net = model.make().train()
        if self.change is not None:
            self.change(net, model)
        return net

    def settings(self) -> contextlib.AbstractContextManager[Any]:
        """In which the peer's first step has to run."""
        return torch._functorch.config.patch(**self.config)


DEFAULT = Peer(name="default compile")


def _whole_blocks(net: nn.Module, model: Model) -> None:
    checkpoint_blocks(net, model.blocks)


def _selective(net: nn.Module, model: Model) -> None:
    checkpoint_blocks(net, model.blocks, _SELECTIVE)


def peers(*, ratios: tuple[float, ...] = RATIOS, solvers: tuple[str, ...] = SOLVERS) -> list[Peer]:
    """All peers but the default compile."""
    found = [
        Peer(name="eager", compiled=False),
        Peer(name="checkpointed blocks, eager", compiled=False, change=_whole_blocks),
        Peer(name="checkpointed blocks, compiled", change=_whole_blocks),
        Peer(name="selective checkpointing, eager", compiled=False, change=_selective),
        Peer(name="selective checkpointing, compiled", change=_selective),
    ]
    for solver in solvers:
        for ratio in ratios:
            config = {"activation_memory_budget": ratio, "activation_memory_budget_solver": solver}
            found.append(Peer(name=f"torch's budget, {solver}, {ratio:g}", config=config))
    return found
