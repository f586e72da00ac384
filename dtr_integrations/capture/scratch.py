"""Memory that a CPU kernel takes and that nothing fake can know: scratch, which it gives back before it
returns, and storages of its results that are larger than their shapes say.

A convolution copies its operands into oneDNN's layout, matrix products in bfloat16 take up to a few hundred
kB, and some eager losses make full-size copies inside (the mean of a bfloat16 tensor sums a float32 copy of
it). The scalar that a loss returns may be the first element of a storage of full size, and the workspace of
an LSTM has a length that only oneDNN knows. Each op that may do such a thing is run for real, on zeros of the
same shapes and strides, and what it held is noted per signature, for the life of the process. Ops that are
known to take nothing (views, pointwise ones, float32 reductions and matrix products) are not tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

# bytes held at most while the given function runs, its result included
Measure = Callable[[Callable[[], Any]], int]

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
# Pointwise by their tags, but made of several steps inside.
_LOSSES = {
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "soft_margin_loss",
}
_COMPOSED = {"logsumexp"}  # reductions that keep what they reduce
_MOVES = {"cat", "copy_", "_to_copy", "clone", "constant_pad_nd", "embedding", "stack", "set_"}
_RECURRENT = {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}
_LARGEST_BYTES = 512 << 20  # what is larger is not tried: trying must not be what runs out of memory


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What an op held when it was run for real: `scratch_bytes` besides its results, and for each new tensor
    among its results, by position, (shape, bytes of its storage)."""

    scratch_bytes: int = 0
    results: tuple[tuple[tuple[int, ...], int] | None, ...] = ()


_NOTHING = Tried()


class Scratch:
    """What CPU ops hold, by op and signature. `measure=None` knows nothing and always says 0."""

    def __init__(self, measure: Measure | None) -> None:
        self._measure = measure
        self._known: dict[Any, Tried] = {}

    def bytes_of(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> int:
        """Scratch of `run(*args, **kwargs)`, an op called `name` (without overload); 0 for ops that take
        none."""
        return self.tried(name, run, args, kwargs).scratch_bytes

    def tried(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Tried:
        """What `run(*args, **kwargs)` holds, an op called `name`; nothing for ops that fakes know whole."""
        if self._measure is None:
            return _NOTHING
        tensors = _tensors((args, kwargs))
        if not _takes_scratch(name, run, tensors):
            return _NOTHING
        leaves, spec = pytree.tree_flatten((args, kwargs))
        # an LSTM has no workspace without gradients
        key = (name, str(spec), torch.is_grad_enabled(), *(_signature(leaf) for leaf in leaves))
        if key not in self._known:
            self._known[key] = self._try(run, args, kwargs)
        return self._known[key]

    def _try(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Tried:
        assert self._measure is not None
        seen: list[tuple[Any, ...]] = []

        def once() -> Any:
            given = {t.untyped_storage()._cdata for t in _tensors((real_args, real_kwargs))}
            out = pytree.tree_leaves(run(*real_args, **real_kwargs))
            seen.append(tuple(_described(leaf, given) for leaf in out))
            return out

        try:
            with _disable_current_modes():  # no input asks for a gradient
                real_args, real_kwargs = pytree.tree_map_only(torch.Tensor, _zeros, (args, kwargs))
                peak_bytes = self._measure(once)
        except (
            Exception
        ):  # a kernel that does not run on zeros, a profiler of the user's: then it is not known
            return _NOTHING
        made = {key: size for key, _, size in filter(None, seen[-1])}
        return Tried(
            scratch_bytes=max(0, peak_bytes - sum(made.values())),
            results=tuple(None if one is None else (one[1], one[2]) for one in seen[-1]),
        )


def _takes_scratch(name: str, run: Any, tensors: list[torch.Tensor]) -> bool:
    if not tensors or any(t.device.type != "cpu" or t.layout is not torch.strided for t in tensors):
        return False
    if sum(t.untyped_storage().nbytes() for t in tensors) > _LARGEST_BYTES:
        return False
    low = any(t.dtype in _LOW_PRECISION for t in tensors)
    if name in _PRODUCTS:
        # BLAS wants a unit stride in one of the last two dimensions; where there is none the operand is
        # copied.
        return low or any(t.ndim >= 2 and 1 not in t.stride()[-2:] and 1 not in t.shape[-2:] for t in tensors)
    if name.removesuffix("_backward") in _LOSSES:
        return True
    if name in _RECURRENT:  # without its workspace the kernel would read where nothing is
        return all(t.numel() for t in tensors)
    if not isinstance(run, torch._ops.OpOverload) or run.namespace != "aten" or name in _MOVES:
        return False
    tags = run.tags
    if run.is_view or torch.Tag.pointwise in tags or name.startswith(("_foreach", "_fused")):
        return False
    return low or torch.Tag.reduction not in tags or name in _COMPOSED


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).zero_()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _described(leaf: Any, given: set[int]) -> tuple[int, tuple[int, ...], int] | None:
    """(storage, shape, bytes of the storage) of a result in a storage of its own."""
    if not isinstance(leaf, torch.Tensor) or leaf.untyped_storage()._cdata in given:
        return None
    return leaf.untyped_storage()._cdata, tuple(leaf.shape), leaf.untyped_storage().nbytes()


def _signature(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
