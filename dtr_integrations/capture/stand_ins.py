"""Plain numbers for what a step reads off tensors that hold no data: `loss.item()`, `if torch.isnan(loss)`.

Numbers are 1. Conditions are as in a run that goes well: values are finite, comparisons hold.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

_aten = torch.ops.aten
_NEVER = (_aten.isnan.default, _aten.isinf.default)
_NOT = (_aten.logical_not.default, _aten.bitwise_not.default)
_OR = (_aten.logical_or.default, _aten.bitwise_or.Tensor)


class StandIns:
    """Follows conditions through the ops of a step; does not keep tensors alive."""

    def __init__(self) -> None:
        self._false: Any = WeakIdKeyDictionary()

    def number(self, tensor: torch.Tensor) -> float | int | bool:
        """What `tensor.item()` gives."""
        if tensor.dtype is torch.bool:
            return tensor not in self._false
        return 1.0 if tensor.dtype.is_floating_point else 1

    def follow(self, func: Any, args: Any, out: Any) -> None:
        """An op has given `out`."""
        if isinstance(out, torch.Tensor) and out.dtype is torch.bool and not self._holds(func, args):
            self._false[out] = True

    def _holds(self, func: Any, args: Any) -> bool:
        if func in _NEVER:
            return False
        if func is _aten.ne.Tensor and args[0] is args[1]:  # the other way to write isnan
            return False
        if func is _aten.eq.Scalar and isinstance(args[1], float) and math.isinf(args[1]):
            return False
        conditions = [
            self.number(leaf)
            for leaf in pytree.tree_leaves(args)
            if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.bool
        ]
        if func in _NOT:
            return not all(conditions)
        return any(conditions) if func in _OR else all(conditions)
