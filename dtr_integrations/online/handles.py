"""What autograd holds in place of the tensors that it saves."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from .nodes import Geometry

__all__ = ["Cell", "Handle", "stale"]


class Cell:
    """One saved tensor, as long as autograd keeps it.

    Attributes:
        value: what it is a view of; None for a constant, which is never evicted.
        tensor: it, sharing the version counter of the one that was saved; None while evicted.
        version: of that counter when it was saved. PyTorch leaves this check to whoever sets hooks.
        geometry: to make it anew; set when it is evicted.
        is_stale: it was written over before it was evicted.
    """

    __slots__ = ("geometry", "is_stale", "tensor", "value", "version")

    def __init__(self, value: Any, tensor: torch.Tensor) -> None:
        self.value = value
        self.tensor: torch.Tensor | None = tensor
        self.version = tensor._version
        self.geometry: Geometry | None = None
        self.is_stale = False


class Handle:
    """Tells by its death that autograd needs a cell no longer."""

    __slots__ = ("_gone", "cell")

    def __init__(self, cell: Cell, gone: deque[Any]) -> None:
        self.cell = cell
        self._gone = gone

    def __del__(self) -> None:
        # In the middle of anything: free the bytes, and leave the accounts for later.
        cell = self.cell
        cell.tensor = None
        if cell.value is not None:
            self._gone.append(cell)


def stale(cell: Cell) -> RuntimeError:
    """PyTorch's own error for a saved tensor that was written to."""
    now = cell.tensor._version if cell.tensor is not None else "a later one"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a "
        f"saved tensor is at version {now}; expected version {cell.version} instead"
    )
