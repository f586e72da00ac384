"""The buckets in which `DistributedDataParallel` reduces gradients, beside twins of its module.

From its construction on DDP holds a flat copy of all gradients. With `gradient_as_bucket_view` each gradient
becomes a view of it when it is reduced, in the last micro-batch of a step; without, it stays a tensor of its
own. What the reduction itself takes is not torch's (torch/csrc/distributed/c10d/reducer.cpp).
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .._compat import inside_ddp_forward

if TYPE_CHECKING:
    from .world import World

DDP_BUCKETS = "DDP buckets"


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Those of one model. `names`: its parameters whose gradients are in them."""

    names: frozenset[str]
    as_views: bool

    @classmethod
    def of(cls, parallel: Any, model: nn.Module) -> Buckets | None:
        """Those of `parallel` for `model`, which it wraps; None if it is no DDP, or wraps something else."""
        if not isinstance(parallel, DistributedDataParallel):
            return None
        ignored = set(parallel.parameters_to_ignore)
        reduced = {id(p) for name, p in parallel.module.named_parameters() if name not in ignored}
        names = frozenset(
            name for name, p in model.named_parameters() if id(p) in reduced and p.requires_grad
        )
        return cls(names=names, as_views=parallel.gradient_as_bucket_view) if names else None

    def bytes_of(self, model: nn.Module) -> int:
        """Of all buckets: as many as those of the gradients."""
        return sum(p.numel() * p.element_size() for name, p in model.named_parameters() if name in self.names)

    def twin(self, world: World, model: nn.Module) -> BucketsTwin:
        """Buckets in `world`, for its twin of the model."""
        return BucketsTwin(self, world, [p for name, p in model.named_parameters() if name in self.names])


class BucketsTwin:
    """Buckets of twins. They live as long as this does.

    Attributes:
        reduces: whether the backward that comes is the last before the optimizer's step.
    """

    def __init__(self, buckets: Buckets, world: World, parameters: list[nn.Parameter]) -> None:
        self.reduces = True
        self._flat: list[torch.Tensor] = []
        alike: dict[Any, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            alike[parameter.dtype, parameter.device].append(parameter)
        for (dtype, device), members in alike.items():
            size = sum(parameter.numel() for parameter in members)
            with world.making(DDP_BUCKETS):
                flat = world.empty((size,), (1,), dtype, device)
            self._flat.append(flat)
            if buckets.as_views:
                for parameter, part in zip(members, flat.split([p.numel() for p in members]), strict=True):
                    parameter.register_post_accumulate_grad_hook(self._reduced_into(part))

    def _reduced_into(self, part: torch.Tensor) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            if self.reduces:
                parameter.grad = part.view(parameter.shape)

        return hook


class ParallelTwin(DistributedDataParallel):
    """A `DistributedDataParallel` around the twin of its module: its buckets are there, and nothing is sent.

    torch.compile splits graphs at the buckets as in the real one's forward.
    """

    def __init__(self, real: DistributedDataParallel, world: World) -> None:
        nn.Module.__init__(self)
        self.module = world.copy(real.module)
        self.training = real.training
        self.require_backward_grad_sync = real.require_backward_grad_sync
        buckets = Buckets.of(real, real.module)
        self.buckets = buckets.twin(world, self.module) if buckets is not None else None
        self._inside = functools.partial(inside_ddp_forward, real)  # which is no submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the module."""
        if self.buckets is not None:
            self.buckets.reduces = self.require_backward_grad_sync
        with self._inside():
            return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients are not reduced after forwards inside."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before
