"""Whose bytes are these: tensors in nested values, and their storages, each counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

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
        for plain in _plain_tensors(tensor):
            storage = plain.untyped_storage()
            # Not the data pointer: it is 0 for meta and fake storages.
            by_identity.setdefault(storage._cdata, storage)
    return list(by_identity.values())


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with a storage of their own that `tensor` is made of: mostly itself."""
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
        # DTensor, and every other subclass that wraps tensors: its own storage is a hollow one.
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # of a DTensor the mesh is named too
                yield from _plain_tensors(part)
    else:
        yield tensor
