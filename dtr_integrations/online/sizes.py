"""What an operator allocates for its outputs, known before it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["Known", "SizeTable"]

_MOST_KNOWN = 50_000
_MEASURED = 5


class Known:
    """Of one operator on arguments of given shapes.

    Attributes:
        bytes: of all new outputs together; None until it has run, where neither its meta implementation nor a
            bound on what follows from data says so.
        cost: nanoseconds; where it is measured, the least of the first runs, because the very first may be
            ten times as long.
        to_measure: how many more runs are to be measured.
    """

    __slots__ = ("bytes", "cost", "to_measure")

    def __init__(self, size_bytes: int | None) -> None:
        self.bytes = size_bytes
        self.cost = 0
        self.to_measure = _MEASURED

    @property
    def is_new(self) -> bool:
        """Whether it has not run yet."""
        return self.to_measure == _MEASURED

    def measured(self, nanoseconds: int) -> None:
        """One more run has taken so long."""
        self.cost = nanoseconds if self.is_new else min(self.cost, nanoseconds)
        self.to_measure -= 1


class SizeTable:
    """Output sizes by operator, shapes and dtypes of its arguments, and its other arguments.

    Args:
        device_type: what is made elsewhere does not count.
    """

    def __init__(self, device_type: str) -> None:
        self._known: dict[Any, Known] = {}
        self._device_type = device_type

    def look_up(self, key: Sequence[Any], function: Any, args: Any, kwargs: dict[str, Any]) -> Known:
        """What is known of a call; see `Reading.key`. The first of its kind is run on meta tensors."""
        whole = tuple(key)
        try:
            known = self._known.get(whole)
        except TypeError:  # an argument that cannot be hashed
            return Known(self._allocated(function, args, kwargs))
        if known is not None:
            return known
        bound = _BOUNDS.get(function._schema.name)
        size_bytes = bound(args, kwargs) if bound is not None else None
        if size_bytes is not None:
            return Known(size_bytes)  # it follows from data: each call has its own
        if len(self._known) >= _MOST_KNOWN:  # shapes without end: what comes back is learnt again
            self._known.clear()
        known = self._known[whole] = Known(self._allocated(function, args, kwargs))
        return known

    def _allocated(self, function: Any, args: Any, kwargs: dict[str, Any]) -> int | None:
        leaves = tree_leaves((args, kwargs))
        devices = [leaf.type for leaf in leaves if isinstance(leaf, torch.device)]
        devices = devices or [leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if devices and self._device_type not in devices:
            return 0
        return _allocated(function, args, kwargs)


def _allocated(function: Any, args: Any, kwargs: dict[str, Any]) -> int | None:
    given: set[int] = set()

    def to_meta(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            meta = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
            given.add(meta.untyped_storage()._cdata)
            return meta
        if isinstance(leaf, torch.device):
            return torch.device("meta")
        return None if isinstance(leaf, torch.Generator) else leaf

    try:
        result = function(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
        storages = {
            leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes()
            for leaf in tree_leaves(result)
            if isinstance(leaf, torch.Tensor)
        }
    except Exception:  # no meta implementation, or sizes that follow from data
        return None
    return sum(size for storage, size in storages.items() if storage not in given)


def _nonzero(args: Any, kwargs: dict[str, Any]) -> int:
    return 8 * args[0].dim() * int(args[0].count_nonzero())


def _masked_select(args: Any, kwargs: dict[str, Any]) -> int:
    return args[0].element_size() * max(args[0].numel(), args[1].numel())


def _repeat_interleave(args: Any, kwargs: dict[str, Any]) -> int:
    return 8 * int(args[0].sum())


def _unique(args: Any, kwargs: dict[str, Any]) -> int:
    return args[0].numel() * (args[0].element_size() + 16)


def _indexed(args: Any, kwargs: dict[str, Any]) -> int | None:
    # Boolean masks select; without one the size follows from shapes.
    source, indices = args[0], args[1]
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    size = source.element_size()
    dims = list(source.shape)
    counts = []
    dim = 0
    for index in indices:
        if index is None:
            size *= dims[dim]
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            counts.append(int(index.count_nonzero()))
            dim += index.dim()
        else:
            counts.append(index.numel())
            dim += 1
    for left in dims[dim:]:
        size *= left
    return size * max(counts)


_BOUNDS: dict[str, Callable[[Any, dict[str, Any]], int | None]] = {
    "aten::nonzero": _nonzero,
    "aten::masked_select": _masked_select,
    "aten::repeat_interleave": _repeat_interleave,
    "aten::index": _indexed,
    "aten::_unique2": _unique,
    "aten::unique_dim": _unique,
    "aten::unique_consecutive": _unique,
    "aten::unique_dim_consecutive": _unique,
}
