"""What tensors are made of: sparse ones, DTensors and other wrappers have no storage of their own."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["plain_tensors"]


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
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
                yield from plain_tensors(part)
    else:
        yield tensor
