"""What an operator call reads, taken down in one pass over its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .memory import Memory, Value
from .nodes import Anchor, Ref, geometry_of
from .operators import OperatorKind

__all__ = ["Reading", "storage_of"]

_PLAIN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}


class Reading:
    """One call's arguments.

    Args:
        memory: knows the values.
        kind: of the operator.
        unread: tensors among the arguments that are written only.
        keep: whether the arguments are to be frozen, for a node.

    Attributes:
        key: what output sizes and cost follow from: the operator, shapes, dtypes and other arguments.
        values: what is read, each once, and its position.
        anchors: of the constants among them.
        args, kwargs: frozen; see `Node`.
        is_whole: every tensor has one plain storage.
    """

    __slots__ = ("_keep", "_memory", "_unread", "anchors", "args", "is_whole", "key", "kwargs", "values")

    def __init__(
        self,
        memory: Memory,
        kind: OperatorKind,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        unread: Sequence[torch.Tensor],
        keep: bool,
    ) -> None:
        self._memory = memory
        self._unread = unread
        self._keep = keep
        self.key: list[Any] = [kind]
        self.values: dict[Value, int] = {}
        self.anchors: list[Anchor] = []
        self.is_whole = True
        numbers = kind.numbers
        if numbers:
            self.args = [self._number(arg) if i in numbers else self._read(arg) for i, arg in enumerate(args)]
        else:
            self.args = [self._read(arg) for arg in args]
        self.kwargs = kwargs
        if kwargs:
            self.key.extend(kwargs)
            self.kwargs = {
                name: self._number(arg) if name in numbers else self._read(arg)
                for name, arg in kwargs.items()
            }

    def _number(self, arg: Any) -> Any:
        # A learning rate or a count of steps is another one each time.
        self.key.append(arg.__class__)
        return arg

    def _read(self, arg: Any) -> Any:
        kind = arg.__class__
        key = self.key
        if kind in _PLAIN:
            storage = storage_of(arg)
            if storage is None:
                self.is_whole = False
                key.append(None)
                return None
            key.append(arg.shape)
            key.append(arg.dtype)
            memory = self._memory
            if memory.device_type != "cpu":  # two kinds of memory, and what is on the CPU does not count
                key.append(arg.device)
            slot = memory.slots.get(storage._cdata)
            value = slot.value if slot is not None else None
            if value is None:
                if slot is not None and not self._keep:
                    return None
                value = memory.value_of(storage)
            if self._unread and any(arg is tensor for tensor in self._unread):
                return Ref((-len(key), geometry_of(arg)))
            position = self.values.setdefault(value, len(self.values))
            if not self._keep:
                return None
            if value.constant:
                if arg._is_zerotensor():  # has no bytes
                    self.is_whole = False
                self.anchors.append(memory.anchor(value, arg))
            return Ref((position, geometry_of(arg)))
        if kind is list or kind is tuple:
            key.append(len(arg))
            return kind([self._read(element) for element in arg])
        if isinstance(arg, torch.Tensor):
            self.is_whole = False
            key.append(None)
            return None
        key.append(kind)
        if kind is not torch.Generator:
            key.append(arg)
        return arg


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage that has a tensor's bytes; None where that is not one plain storage (sparse, nested, meta,
    subclasses, wrapped by functorch)."""
    if tensor.__class__ not in _PLAIN or tensor.is_nested or tensor.is_meta:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
