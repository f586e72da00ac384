"""An operator call as it can be run again: what it read, and the state that it ran in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["Anchor", "Geometry", "Node", "geometry_of", "same_dispatch", "view_of"]

_UPPER_LAYERS = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradOther)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradNestedTensor)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
)


def same_dispatch() -> Any:
    """A scope in which operators start where a dispatch mode sees them: below autograd and autocast, and
    unseen by any mode."""
    return torch._C._ExcludeDispatchKeyGuard(_UPPER_LAYERS)


class Geometry(NamedTuple):
    """Where in its storage a tensor lies, and how its bytes are read."""

    size: Any
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """The geometry of a strided tensor."""
    return Geometry(
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def view_of(storage: torch.UntypedStorage, geometry: Geometry) -> torch.Tensor:
    """A tensor of `geometry` on `storage`, with a version counter of its own. Inside `same_dispatch`."""
    tensor = torch.empty(0, dtype=geometry.dtype, device=storage.device)
    tensor.set_(storage, geometry.offset, geometry.size, geometry.stride)
    if geometry.is_conj:
        torch._C._set_conj(tensor, True)
    if geometry.is_neg:
        torch._C._set_neg(tensor, True)
    return tensor


class Anchor:
    """Keeps a constant's storage alive while a node may read it again, and knows whether it has changed.

    Attributes:
        tensor: on the storage; as the program passed it, for its version counter is the program's.
        version: when it was read first.
    """

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version


class _Ref(NamedTuple):
    # Stands for a tensor among frozen arguments.
    position: int
    geometry: Geometry


class Node:
    """A call.

    Args:
        function: the overload.
        args, kwargs: of the first run.
        positions: by the id of a tensor among them, its value's position among the operator's arguments;
            negative, and different for each, for what is written and not read.
        written: positions of what the call writes to and its outputs begin with.
        random_state: of the default generator before the first run; None where none is drawn from.
        anchors: of the constants among the arguments.

    Attributes:
        leaves: for each output of the operator that is not a written argument, which leaf of the result has
            its storage; set by the owner.
    """

    __slots__ = (
        "anchors",
        "args",
        "function",
        "generator",
        "grad_enabled",
        "kwargs",
        "leaves",
        "random_state",
        "written",
    )

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        positions: Mapping[int, int],
        *,
        written: Sequence[int],
        random_state: torch.Tensor | None,
        generator: torch.Generator | None,
        anchors: list[Anchor],
    ) -> None:
        self.function = function
        self.args = tuple([_frozen(arg, positions) for arg in args])
        self.kwargs = {name: _frozen(arg, positions) for name, arg in kwargs.items()} if kwargs else kwargs
        self.written = tuple(written)
        self.random_state = random_state
        self.generator = generator
        self.grad_enabled = torch.is_grad_enabled()
        self.anchors = anchors
        self.leaves: tuple[int, ...] = ()

    def run(self, storages: Sequence[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
        """Run again on `storages`, one for each of the operator's arguments; a storage for each output, the
        written arguments' first. What is written is a copy."""
        with same_dispatch(), torch.set_grad_enabled(self.grad_enabled):
            used = list(storages)
            for index in self.written:
                if index >= 0:
                    used[index] = used[index].clone()
            spare: dict[int, torch.UntypedStorage] = {}

            args = [_thawed(arg, used, spare) for arg in self.args]
            kwargs = {name: _thawed(arg, used, spare) for name, arg in self.kwargs.items()}
            if self.random_state is None:
                result = self.function(*args, **kwargs)
            else:
                result = self._drawn(args, kwargs)
            found = [used[index] if index >= 0 else spare[index] for index in self.written]
            if self.leaves:
                leaves = tree_leaves(result)
                found += [leaves[leaf].untyped_storage() for leaf in self.leaves]
            return found

    def _drawn(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        generator = self.generator or torch.default_generator
        now = generator.get_state()
        generator.set_state(self.random_state)
        try:
            return self.function(*args, **kwargs)
        finally:
            generator.set_state(now)


def _thawed(arg: Any, used: list[torch.UntypedStorage], spare: dict[int, torch.UntypedStorage]) -> Any:
    # A function of its own: a closure that calls itself is a cycle, and would keep the storages alive.
    kind = arg.__class__
    if kind is _Ref:
        storage = used[arg.position] if arg.position >= 0 else _spare(spare, arg)
        return view_of(storage, arg.geometry)
    if kind is list or kind is tuple:
        return kind([_thawed(element, used, spare) for element in arg])
    return arg


def _spare(spare: dict[int, torch.UntypedStorage], ref: _Ref) -> torch.UntypedStorage:
    # Memory for what is written only; one for each such argument.
    last = ref.geometry.offset + sum(
        (n - 1) * step for n, step in zip(ref.geometry.size, ref.geometry.stride, strict=True)
    )
    if ref.position not in spare:
        spare[ref.position] = torch.UntypedStorage((last + 1) * ref.geometry.dtype.itemsize)
    return spare[ref.position]


def _frozen(arg: Any, positions: Mapping[int, int]) -> Any:
    kind = arg.__class__
    if isinstance(arg, torch.Tensor):
        return _Ref(positions[id(arg)], geometry_of(arg))
    if kind is list or kind is tuple:
        return kind([_frozen(element, positions) for element in arg])
    return arg
