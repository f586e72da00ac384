"""An operator call as it can be run again: what it read, and the state that it ran in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["Anchor", "Geometry", "Node", "Ref", "geometry_of", "same_dispatch", "view_of"]

_KEYS = torch._C.DispatchKey
_UPPER_LAYERS = torch._C.DispatchKeySet(_KEYS.Python)
for _key in (
    _KEYS.PythonTLSSnapshot,
    _KEYS.AutogradFunctionality,
    _KEYS.AutogradOther,
    _KEYS.AutogradNestedTensor,
    _KEYS.ADInplaceOrView,
    _KEYS.AutocastCPU,
    _KEYS.AutocastCUDA,
):
    _UPPER_LAYERS = _UPPER_LAYERS | torch._C.DispatchKeySet(_key)

Geometry: TypeAlias = tuple[Any, tuple[int, ...], int, torch.dtype, bool, bool]
"""Where in its storage a tensor lies: size, stride, offset, dtype; whether it is to be read conjugated or
negated. A plain tuple: one is made for every argument of every operator."""


class Ref(tuple):  # type: ignore[type-arg]
    """Stands for a tensor among frozen arguments: its value's position among the operator's arguments
    (negative, and different for each, for what is written and not read), and its geometry."""

    __slots__ = ()


def same_dispatch() -> Any:
    """A scope in which operators start where a dispatch mode sees them: below autograd and autocast, and
    unseen by any mode."""
    return torch._C._ExcludeDispatchKeyGuard(_UPPER_LAYERS)


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """The geometry of a strided tensor."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def view_of(storage: torch.UntypedStorage, geometry: Geometry) -> torch.Tensor:
    """A tensor of `geometry` on `storage`, with a version counter of its own. Inside `same_dispatch`."""
    size, stride, offset, dtype, is_conj, is_neg = geometry
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, offset, size, stride)
    if is_conj:
        torch._C._set_conj(tensor, True)
    if is_neg:
        torch._C._set_neg(tensor, True)
    return tensor


class Anchor:
    """Keeps a constant's storage alive while a node may read it again, and knows whether it has changed.

    Attributes:
        tensor: on the storage; as the program passed it, for its version counter is the program's.
        storage: the tensor's when it was read; the program may give the tensor another one.
        version: when it was read first.
    """

    __slots__ = ("__weakref__", "storage", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.storage = tensor.untyped_storage()
        self.version = self.version_now

    @property
    def version_now(self) -> int:
        """The tensor's version; inference tensors have none."""
        return 0 if self.tensor.is_inference() else self.tensor._version


class Node:
    """A call.

    Attributes:
        function: the overload.
        args, kwargs: of the first run, each tensor replaced by its `Ref`.
        anchors: of the constants among them.
        leaves: for each output of the operator that is not a written argument, which leaf of the result has
            its storage.
        written: positions of what the call writes to; the operator's outputs begin with these.
        random: the generator that is drawn from and its state before the first run; None where none is.
        origin: whose call it is, for the accounts.
    """

    __slots__ = (
        "anchors",
        "args",
        "function",
        "grad_enabled",
        "kwargs",
        "leaves",
        "origin",
        "random",
        "written",
    )

    def __init__(
        self,
        function: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        anchors: Sequence[Anchor],
        leaves: Sequence[int],
        written: Sequence[int],
        random: tuple[torch.Generator, torch.Tensor] | None,
        origin: str = "",
    ) -> None:
        self.function = function
        self.origin = origin
        self.args = args
        self.kwargs = kwargs
        self.anchors = anchors
        self.leaves = leaves
        self.written = written
        self.random = random
        self.grad_enabled = torch.is_grad_enabled()

    def run(self, storages: Sequence[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
        """Run again on `storages`, one for each of the operator's arguments; a storage for each output. What
        is written is a copy."""
        # In the first run's grad mode: some operators leave out what only a backward needs.
        with same_dispatch(), torch.set_grad_enabled(self.grad_enabled):
            used = dict(enumerate(storages))
            for position in self.written:
                if position >= 0:
                    used[position] = used[position].clone()
            args = [_thawed(arg, used) for arg in self.args]
            kwargs = {name: _thawed(arg, used) for name, arg in self.kwargs.items()}
            result = self.function(*args, **kwargs) if self.random is None else self._drawn(args, kwargs)
            found = [used[position] for position in self.written]
            if self.leaves:
                leaves = tree_leaves(result)
                found += [leaves[leaf].untyped_storage() for leaf in self.leaves]
            return found

    def _drawn(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        assert self.random is not None
        generator, state = self.random
        now = generator.get_state()
        generator.set_state(state)
        try:
            return self.function(*args, **kwargs)
        finally:
            generator.set_state(now)


def _thawed(arg: Any, used: dict[int, torch.UntypedStorage]) -> Any:
    # A function of its own: a closure that calls itself is a cycle, and would keep the storages alive.
    kind = arg.__class__
    if kind is Ref:
        position, geometry = arg
        if position < 0 and position not in used:
            used[position] = _blank(geometry)
        return view_of(used[position], geometry)
    if kind is list or kind is tuple:
        return kind([_thawed(element, used) for element in arg])
    return arg


def _blank(geometry: Geometry) -> torch.UntypedStorage:
    # Memory for what is written only.
    size, stride, offset, dtype, *_ = geometry
    last = offset + sum([(n - 1) * step for n, step in zip(size, stride, strict=True)])
    return torch.UntypedStorage((last + 1) * dtype.itemsize)
