"""A user's whole step, given as a function, in the fake world.

`session.step(fn)` gets a function over real objects: the model, the optimizer, a batch, perhaps a scheduler,
found in its closure, its defaults, its globals or as `self` of a bound method. `twin_function` rebuilds the
function over fake twins of all of them, so that running it changes nothing real, not even a scheduler's
counter. Functions that it calls and that refer to such objects are rebuilt too. What cannot be copied (an
open file, a loader) is shared.
"""

from __future__ import annotations

import contextlib
import copy
import io
import types
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..errors import CaptureError
from .source import FakeStep, batch_tensors, zero_gradients
from .world import World

_CODE_TYPES = (type, types.ModuleType, types.BuiltinFunctionType)


def twin_function(fn: Callable[..., Any], world: World) -> Callable[..., Any]:
    """`fn` over twins of everything it refers to. `fn` and the objects are not changed."""
    return _Rebuild(world).callable(fn)


class _Rebuild:
    def __init__(self, world: World) -> None:
        self.world = world
        self.done: dict[int, Any] = {}
        self.data: list[tuple[Any, Any]] = []  # (real, twin) of what is neither module, optimizer nor code

    def callable(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(fn, types.MethodType):
            return types.MethodType(fn.__func__, self.value(fn.__self__))
        if isinstance(fn, types.FunctionType):
            return self.function(fn)
        return self.value(fn)

    def function(self, fn: types.FunctionType) -> types.FunctionType:
        if id(fn) in self.done:
            return self.done[id(fn)]
        scope = dict(fn.__globals__)
        cells = None if fn.__closure__ is None else tuple(types.CellType() for _ in fn.__closure__)
        twin = types.FunctionType(fn.__code__, scope, fn.__name__, None, cells)
        twin.__module__ = fn.__module__
        self.done[id(fn)] = twin  # before its parts: functions may refer to one another
        for cell, old in zip(twin.__closure__ or (), fn.__closure__ or (), strict=True):
            try:
                cell.cell_contents = self.value(old.cell_contents)
            except ValueError:  # a cell that is not filled yet
                continue
        twin.__defaults__ = tuple(self.value(v) for v in fn.__defaults__) if fn.__defaults__ else None
        twin.__kwdefaults__ = (
            {k: self.value(v) for k, v in fn.__kwdefaults__.items()} if fn.__kwdefaults__ else None
        )
        for name in fn.__code__.co_names:
            if name in fn.__globals__:
                scope[name] = self.value(fn.__globals__[name])
        return twin

    def value(self, value: Any) -> Any:
        """A twin of what may hold tensors; code and plain data are themselves."""
        if (
            isinstance(value, _CODE_TYPES)
            or value is None
            or isinstance(value, (str, bytes, int, float, complex))
        ):
            return value
        if isinstance(value, torch.optim.Optimizer):
            return self._once(value, self.world.optimizer)
        if isinstance(value, types.FunctionType):
            # Library functions hold no user state; rebuilding them would copy the library's globals.
            return self.function(value) if _is_users(value) else value
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.value(value.__self__))
        if isinstance(value, io.IOBase):
            return io.StringIO() if isinstance(value, io.TextIOBase) else io.BytesIO()
        if isinstance(value, (_BaseDataLoaderIter, Generator)):
            raise CaptureError(
                f"the step draws its batch from a {type(value).__name__}, and planning would use batches up. "
                "Fetch it outside of the function: for batch in loader: session.step(lambda: train(batch))"
            )
        if isinstance(value, (DataLoader, Dataset)):
            return value
        try:
            return self._once(value, self.world.copy)
        except CaptureError:
            return self._once(value, self._by_attribute)

    def _by_attribute(self, value: Any) -> Any:
        """An object that cannot be copied whole (it holds a lock, a file): a shallow copy over twins of its
        parts."""
        if not hasattr(value, "__dict__"):
            return value
        try:
            twin = copy.copy(value)
        except Exception:
            return value
        self.done[id(value)] = twin
        for name, part in vars(value).items():
            with contextlib.suppress(AttributeError):
                setattr(twin, name, self.value(part))
        return twin

    def _once(self, value: Any, make: Callable[[Any], Any]) -> Any:
        if id(value) not in self.done:
            self.done[id(value)] = twin = make(value)
            if not isinstance(value, (nn.Module, torch.optim.Optimizer)):
                self.data.append((value, twin))
        return self.done[id(value)]


def _is_users(fn: types.FunctionType) -> bool:
    return (fn.__module__ or "").partition(".")[0] not in (
        "torch",
        "lightning",
        "pytorch_lightning",
        "builtins",
        "numpy",
    )


def tensors_of(fn: Callable[..., Any]) -> list[torch.Tensor]:
    """The real tensors that `fn` refers to besides modules and optimizers: the batch that lives through its
    step."""
    rebuild = _Rebuild(_Uncopied())
    with contextlib.suppress(CaptureError):  # building the step will say it
        rebuild.callable(fn)
    return [leaf for real, _ in rebuild.data for leaf in batch_tensors(real)]


class _Uncopied(World):
    """A world in which everything is its own twin: to walk a function without copying what it refers to."""

    def copy(self, thing: Any, *, shared: tuple[Any, ...] = ()) -> Any:
        return thing

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer


@dataclass(kw_only=True)
class BetweenSteps:
    """What a loop does with gradients between two steps. `zeroed`: it drops them there, since the step itself
    does not; None: not known yet, found out by the first dry run."""

    zeroed: bool | None = None


@dataclass(kw_only=True)
class BetweenSteps:
    """What a loop does with gradients between two steps. `zeroed`: it drops them there, as the step itself
    does not; None: not known yet, the first dry run finds it out."""

    zeroed: bool | None = None


@dataclass(frozen=True, kw_only=True)
class FunctionStep:
    """A `StepSource` for `session.step(fn)`: `fn()` performs one whole step over `model` and `optimizers`."""

    fn: Callable[[], Any]
    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    targets: tuple[str, ...] = ("",)
    between: BetweenSteps = field(default_factory=BetweenSteps)

    def build(self, world: World) -> FakeStep:
        """See `StepSource.build`."""
        model = world.copy(self.model)
        zero_gradients(model.parameters())
        optimizers = tuple(world.optimizer(o) for o in self.optimizers)
        rebuild = _Rebuild(world)
        for real, twin in zip(self.optimizers, optimizers, strict=True):
            rebuild.done[id(real)] = twin
        run = rebuild.callable(self.fn)
        seen: list[dict[nn.Parameter, torch.Tensor]] = []

        def step() -> None:
            run()

        def between() -> bool:
            gradients = {p: p.grad for p in model.parameters() if p.grad is not None}
            if self.between.zeroed is None and not seen:
                seen.append(gradients)
                return bool(gradients)
            if self.between.zeroed is None:
                (before,) = seen
                self.between.zeroed = all(before.get(p) is gradient for p, gradient in gradients.items())
            seen.clear()
            if self.between.zeroed:
                zero_gradients(model.parameters())
            return False

        return FakeStep(
            model=model,
            targets=self.targets,
            run=step,
            between=between,
            optimizers=optimizers,
            batch=lambda: tensors_of(run),
        )
