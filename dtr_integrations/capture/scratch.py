"""Memory that a CPU kernel takes while it runs and gives back before it returns: nothing fake can know it.

A convolution copies its operands into oneDNN's layout, matrix products in bfloat16 take up to a few hundred
kB, and some eager losses make full-size copies inside (the mean of a bfloat16 tensor sums a float32 copy of
it). Each op that may do such a thing is run for real, on zeros of the same shapes and strides, and the most
that it held is noted per signature, for the life of the process. Ops that are known to take nothing (views,
pointwise ones, float32 reductions and matrix products) are not tried.
"""

from __future__ import annotations

from collections.abc import Callable
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
}
_MOVES = {"cat", "copy_", "_to_copy", "clone", "constant_pad_nd", "embedding", "stack", "set_"}
_LARGEST_BYTES = 512 << 20  # what is larger is not tried: trying must not be what runs out of memory


class Scratch:
    """Scratch bytes by op and signature. `measure=None` knows nothing and always says 0."""

    def __init__(self, measure: Measure | None) -> None:
        self._measure = measure
        self._known: dict[Any, int] = {}

    def bytes_of(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> int:
        """Scratch of `run(*args, **kwargs)`, an op called `name` (without overload); 0 for ops that take
        none."""
        if self._measure is None:
            return 0
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not _takes_scratch(name, run, tensors):
            return 0
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (name, str(spec), *(_signature(leaf) for leaf in leaves))
        if key not in self._known:
            self._known[key] = self._try(run, args, kwargs)
        return self._known[key]

    def _try(self, run: Callable[..., Any], args: Any, kwargs: Any) -> int:
        assert self._measure is not None
        sizes: list[int] = []

        def once() -> Any:
            out = run(*real_args, **real_kwargs)
            given = {
                t.untyped_storage()._cdata for t in pytree.tree_leaves((real_args, real_kwargs)) if _is(t)
            }
            made = {
                t.untyped_storage()._cdata: t.untyped_storage().nbytes()
                for t in pytree.tree_leaves(out)
                if _is(t)
            }
            sizes.append(sum(size for key, size in made.items() if key not in given))

        try:
            with _disable_current_modes(), torch.no_grad():
                real_args, real_kwargs = pytree.tree_map_only(torch.Tensor, _zeros, (args, kwargs))
                peak_bytes = self._measure(once)
        except (
            Exception
        ):  # a kernel that does not run on zeros, a profiler of the user's: then it is not known
            return 0
        return max(0, peak_bytes - sizes[-1])


def _takes_scratch(name: str, run: Any, tensors: list[torch.Tensor]) -> bool:
    if not tensors or any(t.device.type != "cpu" for t in tensors):
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
    if not isinstance(run, torch._ops.OpOverload) or run.namespace != "aten" or name in _MOVES:
        return False
    tags = run.tags
    if run.is_view or torch.Tag.pointwise in tags or name.startswith(("_foreach", "_fused")):
        return False
    if torch.Tag.reduction in tags:
        return low
    return torch.Tag.nondeterministic_seeded not in tags or "attention" in name


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).zero_()


def _is(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _signature(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
