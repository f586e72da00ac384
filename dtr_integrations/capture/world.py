"""A world of twins: copies of a step's model, optimizers and batch, on which the step runs and the real ones
stay as they are.

`FakeWorld` (see `fake`) makes twins without data, to plan with; `RealWorld` twins with data, to compare
with.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..errors import CaptureError
from .buckets import ParallelTwin
from .shards import Shards
from .stage import Stage

_OPS = (torch._ops.OperatorBase, torch._ops.OpOverloadPacket, torch.library.CustomOpDef)


class World:
    """Twins of real objects, made by one deep copy in several calls; the real ones are never written to."""

    def __init__(self) -> None:
        self._memo: dict[int, Any] = {}
        self.stage = Stage()  # for functions over twins

    def copy(self, thing: Any, *, shared: tuple[Any, ...] = ()) -> Any:
        """A deep copy of `thing` with twins of every tensor; objects in `shared` stay the real ones.

        Several calls share one memo, so an optimizer's copy points at the parameters of the module's copy.
        Raises `CaptureError` when something in it cannot be copied.
        """
        for item in shared:
            self._memo[id(item)] = item
        self._prepare(thing)
        shards = Shards.of(thing, self._memo) if isinstance(thing, nn.Module) else None
        try:
            with self._copying():
                if shards is None:
                    return copy.deepcopy(thing, self._memo)
                return self._sharded(thing, shards)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"a {type(thing).__name__} cannot be copied for planning ({type(error).__name__}: {error}). "
                "Keep locks, open files and loaders out of the module's attributes, "
                "or give them a __deepcopy__."
            ) from error

    def _sharded(self, module: nn.Module, shards: Shards) -> nn.Module:
        """A copy of `module`, of which `shards` says how it is sharded."""
        raise CaptureError(
            "a model whose parameters are sharded (FSDP2) cannot be compared with itself: each rank has a "
            "part of it. Verify it before fully_shard, on one rank"
        )

    def _prepare(self, thing: Any) -> None:
        """What a deep copy cannot do, of a module's attributes too: ops are code and stay the same, a
        generator of torch's is not copied among fake tensors, and a DDP would have ranks reduce."""
        modules = list(thing.modules()) if isinstance(thing, nn.Module) else []
        for module in modules:
            if isinstance(module, DistributedDataParallel) and id(module) not in self._memo:
                self._memo[id(module)] = ParallelTwin(module, self)
        for value in (thing, *(value for module in modules for value in vars(module).values())):
            if isinstance(value, _OPS):
                self._memo[id(value)] = value
            elif isinstance(value, torch.Generator) and id(value) not in self._memo:
                self._memo[id(value)] = torch.Generator(value.device).set_state(value.get_state())

    def place(self, thing: Any) -> None:
        """Called with whatever is copied next: a world may decide here what stands for its tensors."""

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer's twin: same class, hyper-parameters and state, stepping the copied parameters only.

        Only the state that `Optimizer.__getstate__` names is copied: a scheduler replaces `step` on the
        instance by a closure over the *real* optimizer.
        """
        twin: torch.optim.Optimizer = self.copy(optimizer)
        for name, value in vars(optimizer).items():
            # What a subclass keeps besides (LBFGS's parameters, SAM's base optimizer); not functions: see
            # above.
            if name not in vars(twin) and not callable(value):
                is_optimizer = isinstance(value, torch.optim.Optimizer)
                setattr(twin, name, self.optimizer(value) if is_optimizer else self.copy(value))
        return twin

    def empty(
        self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor of this world that stands for one that is no longer there."""
        return torch.empty_strided(size, stride, dtype=dtype, device=device).zero_()

    def making(self, kind: str) -> contextlib.AbstractContextManager[None]:
        """Whatever is made inside is of this kind, in worlds that count."""
        return contextlib.nullcontext()

    def release(self) -> None:
        """Let go of the real objects: torch keeps compiled code, and through it this world, longer than
        anyone wants."""
        self._memo = {}

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        yield


class RealWorld(World):
    """Twins with data: the step runs on them for real, from where the real objects stand now.

    They take as much memory again as the real ones. Hooks on parameters come along (a deep copy leaves them
    behind) and, like those of modules, work on twins of what they refer to.
    """

    def __init__(self) -> None:
        super().__init__()
        self._carried: set[int] = set()  # ids of the parameters and modules whose hooks are there

    def copy(self, thing: Any, *, shared: tuple[Any, ...] = ()) -> Any:
        """See `World.copy`."""
        twin = super().copy(thing, shared=shared)
        if isinstance(thing, nn.Module):
            self._carry_hooks(thing)
        return twin

    def place(self, thing: Any) -> None:
        """Raises `CaptureError` for a module or tensor without data."""
        leaves = thing.parameters() if isinstance(thing, nn.Module) else pytree.tree_leaves(thing)
        if any(isinstance(leaf, torch.Tensor) and leaf.device.type == "meta" for leaf in leaves):
            raise CaptureError(
                "the model or its input is on the meta device and cannot be run, only planned; "
                "build it with data to compare what it computes"
            )

    def _carry_hooks(self, module: nn.Module) -> None:
        from .closure import twin_function  # which builds on this module

        def twin_of(hook: Any) -> Any:
            return twin_function(hook, self)

        parameters = [parameter for parameter in module.parameters() if id(parameter) not in self._carried]
        modules = [part for part in module.modules() if id(part) not in self._carried]
        self._carried.update(map(id, [*parameters, *modules]))
        for parameter in parameters:
            twin = self._memo[id(parameter)]
            for hook in (parameter._backward_hooks or {}).values():
                twin.register_hook(twin_of(hook))
            for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
                twin.register_post_accumulate_grad_hook(twin_of(hook))
        for real in modules:
            copied = self._memo[id(real)]
            for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                for key, hook in getattr(real, kind).items():
                    getattr(copied, kind)[key] = twin_of(hook)

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        with _NonLeaves():
            yield


class _NonLeaves(TorchFunctionMode):
    """Lets results of autograd be copied too: as leaves of their own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            if id(tensor) not in memo:
                twin = copy.deepcopy(tensor.detach(), memo).requires_grad_(tensor.requires_grad)
                memo[id(tensor)] = twin
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))
