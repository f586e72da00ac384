"""Whose bytes are these: tensors in nested values, and their storages, each counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from .._plain_tensors import plain_tensors

__all__ = ["live_bytes", "optimizer_state_tensors", "static_bytes", "storages_of", "tensors_in"]


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tensor, mapping, list, tuple or set, at any depth; anything else holds none."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple, set, frozenset)):
        for value in tree:
            yield from tensors_in(value)


def optimizer_state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors of an optimizer's state, and those among its hyperparameters (a learning rate can be one).

    Empty before the first `step()` of most optimizers, which make their state in it.
    """
    yield from tensors_in(dict(optimizer.state))
    for group in optimizer.param_groups:
        yield from tensors_in({name: value for name, value in group.items() if name != "params"})


def static_bytes(
    modules: torch.nn.Module | Iterable[torch.nn.Module],
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
) -> int:
    """Bytes of parameters + buffers + optimizer state as of now, no gradients; tied ones count once."""
    modules = [modules] if isinstance(modules, torch.nn.Module) else list(modules)
    optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    tensors: list[torch.Tensor] = []
    for module in modules:
        tensors += [*module.parameters(), *module.buffers()]
    for optimizer in optimizers:
        tensors += optimizer_state_tensors(optimizer)
    return live_bytes(tensors)


def live_bytes(tensors: Iterable[torch.Tensor], *, device_type: str | None = None) -> int:
    """Sum of the storage bytes behind `tensors`, each storage once, whatever views and ties there are.

    Args:
        tensors: any, DTensors (their local shard counts), sparse, meta and fake ones included. A small view
            of a large storage keeps the whole of it alive, so the whole counts.
        device_type: count only the storages there, e.g. `"cuda"` (an optimizer's step counters live on the
            host).
    """
    return sum(
        storage.nbytes()
        for storage in storages_of(tensors)
        if device_type is None or storage.device.type == device_type
    )


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The distinct storages behind `tensors`, in order of first sight."""
    by_identity: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            # Not the data pointer: it is 0 for meta and fake storages.
            by_identity.setdefault(storage._cdata, storage)
    return list(by_identity.values())
