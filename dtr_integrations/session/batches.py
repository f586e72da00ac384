"""Which batches have been planned for, and when the next one asks for another plan."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch

from ..measure.storages import storages_of

_MAX_GROWTHS = 4
_MAX_RETRIES = 2


class Batches:
    """The tensors that steps came with, as sizes and shapes; no tensor is kept."""

    def __init__(self) -> None:
        self.planned_bytes = 0
        self._largest: list[int] = []  # bytes of the storages, the largest first
        self._shapes: list[Any] = []  # of the last that was planned for, or tried
        self._growths = self._retries = 0

    def outgrown_by(self, tensors: Iterable[torch.Tensor], *, left_bytes: int) -> bool:
        """Whether the plan does not hold for a step with these tensors: one is larger than its counterpart,
        or further ones (a list of losses) take more than `left_bytes`, what the plan leaves of the budget. A
        bounded number of times."""
        sizes = _sizes(tensors)
        larger = any(now > planned for now, planned in zip(sizes, self._largest, strict=False))
        further_bytes = sum(sizes) - max(self.planned_bytes, sum(self._largest))
        if (larger or further_bytes > max(left_bytes, 0)) and self._growths < _MAX_GROWTHS:
            self._growths += 1
            return True
        return False

    def differ_from(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether a step with these tensors is worth planning though the last one could not be: they have
        other shapes. A bounded number of times."""
        if _shapes(tensors) != self._shapes and self._retries < _MAX_RETRIES:
            self._retries += 1
            return True
        return False

    def plan_for(self, tensors: list[torch.Tensor]) -> None:
        """These are planned for now."""
        pairs = zip_longest(self._largest, _sizes(tensors), fillvalue=0)
        self._largest = [max(pair) for pair in pairs]
        self._shapes = _shapes(tensors)


def _sizes(tensors: Iterable[torch.Tensor]) -> list[int]:
    return sorted((storage.nbytes() for storage in storages_of(tensors)), reverse=True)


def _shapes(tensors: Iterable[torch.Tensor]) -> list[Any]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]
