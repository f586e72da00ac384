"""Writes down what the runtime does with its cache in a step without a budget; see `dtr.journal`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..dtr.cache import Cache
from ..dtr.journal import Entry, Known, Needed, Pinned, Ran, Released, Saved, online_policies
from ..dtr.policies import Policies
from ..dtr.values import Tensor
from .runtime import Cost, Runtime
from .scope import DTR

__all__ = ["journal"]


def journal(module: torch.nn.Module, step: Callable[[], Any], *, cost: Cost | None = None) -> list[Entry]:
    """Run `step` once, for real and without a budget, and return its journal.

    Args:
        module: what `online.DTR` would be given.
        step: what would run in its scope: forward, loss and backward.
        cost: as of `online.DTR`.
    """
    dtr = DTR(module, budget="1TB", cost=cost)
    written: list[Entry] = []
    dtr._runtime = _Journaling(written, cost, dtr._runtime.memory.device_type)
    with dtr:
        step()
        written = list(written)  # what follows when the scope ends is not the step's
    return written


class _Journaling(Runtime):
    def __init__(self, written: list[Entry], cost: Cost | None, device_type: str) -> None:
        super().__init__(math.inf, online_policies(Policies(), "lru"), cost, device_type=device_type)
        self.cache = self.memory.cache = _JournalingCache(written, self.cache)
        self.before_room = self.cache.look


class _JournalingCache(Cache):
    def __init__(self, written: list[Entry], like: Cache) -> None:
        super().__init__(math.inf, like.policies, driver=like.driver)
        self._written = written
        self._numbers: dict[Tensor, int] = {}
        self._saved: dict[Tensor, bool] = {}
        self._may_evict_now = like._may_evict

    def look(self) -> None:
        """Note which saved tensors the program has got hold of, or let go, since the last look."""
        assert self._may_evict_now is not None
        for tensor, before in self._saved.items():
            now = not self._may_evict_now(tensor.storage)
            if now != before:
                self._saved[tensor] = now
                self._written.append(Pinned(self._numbers[tensor], now))

    def constant(self, size_bytes: int, *, handle: Any = None) -> Tensor:
        """See `Cache`."""
        self._written.append(Known(size_bytes))
        return self._number([super().constant(size_bytes, handle=handle)])[0]

    def adopt(self, args: Sequence[Tensor], sizes: Sequence[int], **options: Any) -> Sequence[Tensor]:
        """See `Cache`."""
        numbers, taken = self._numbers, options.get("taken", ())
        entry = Ran(
            options["name"],
            tuple([numbers[arg] for arg in args]),
            tuple(sizes),
            options["cost"],
            tuple([numbers[tensor] for tensor in taken]),
            options.get("lineage", True),
        )
        # What is taken over is released in the call: part of the entry.
        length = len(self._written)
        outputs = super().adopt(args, sizes, **options)
        self._written[length:] = [entry]
        return self._number(outputs)

    def expose(self, tensor: Tensor) -> None:
        """See `Cache`."""
        if tensor.storage.held:
            self._written.append(Saved(self._numbers[tensor]))
            self._saved[tensor] = False
        super().expose(tensor)

    def materialize(self, tensor: Tensor) -> None:
        """See `Cache`."""
        self._written.append(Needed(self._numbers[tensor]))
        super().materialize(tensor)

    def release(self, tensor: Tensor) -> None:
        """See `Cache`."""
        self._written.append(Released(self._numbers[tensor]))
        self._saved.pop(tensor, None)
        super().release(tensor)

    def _number(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        for tensor in tensors:
            self._numbers[tensor] = len(self._numbers)
        return tensors
