"""A user's whole step, given as a function, in the fake world.

`session.step(fn)` gets a function over real objects: the model, the optimizer, a batch, perhaps a scheduler,
found in closures, globals, defaults, class attributes or as `self` of a method, by this function or by any
that it calls. Its twin is the function itself, run while all of those places hold twins (`Stage`): running it
changes nothing real, not even a scheduler's counter. What cannot be copied (an open file, a loader) is
shared.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import types
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .._python_state import referred_to
from ..errors import CaptureError
from .source import FakeStep, zero_gradients
from .world import World

_CODE_TYPES = (type, types.ModuleType, types.FunctionType)
_PLAIN_TYPES = (str, bytes, int, float, complex)


def twin_function(function: Callable[..., Any], world: World) -> Callable[..., Any]:
    """`function`, run over twins of everything to which it refers. Nothing real is changed."""
    target = _staged(function, world)

    @functools.wraps(function, updated=())
    def twin(*args: Any, **kwargs: Any) -> Any:
        with world.stage.entered():
            return target(*args, **kwargs)

    return twin


def _staged(function: Callable[..., Any], world: World) -> Callable[..., Any]:
    """What is to be run on the world's stage: `function`, or its twin if it holds something itself (a method,
    a partial, a callable object)."""
    twins = _Twins(world)
    world.stage.add(function, twins.of)
    target: Callable[..., Any] = twins.of(function)
    return target


class _Twins:
    """Twins of what functions refer to, each made once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._done: dict[int, tuple[Any, Any]] = {}  # (value, twin) by the value's id

    def of(self, value: Any) -> Any:
        """A twin of what may hold tensors; code and plain data are themselves."""
        if value is None or isinstance(value, (*_CODE_TYPES, *_PLAIN_TYPES)):
            return value
        if isinstance(value, torch.optim.Optimizer):
            return self._once(value, self._world.optimizer)
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.of(value.__self__))
        if isinstance(value, types.BuiltinMethodType):  # a list's `append`
            return getattr(self.of(value.__self__), value.__name__, value)
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
            return self._once(value, self._world.copy)
        except CaptureError:
            return self._once(value, self._by_parts)

    def _by_parts(self, value: Any) -> Any:
        """What cannot be copied whole (there is a lock in it, a file): a shallow copy over twins of its
        parts."""
        if type(value) in (list, tuple):
            return type(value)(self.of(part) for part in value)
        if type(value) is dict:
            return {key: self.of(part) for key, part in value.items()}
        if not hasattr(value, "__dict__"):
            return value
        try:
            twin = copy.copy(value)
        except Exception:
            return value
        self._done[id(value)] = value, twin  # before its parts, which may refer to it
        for name, part in vars(value).items():
            with contextlib.suppress(AttributeError):
                setattr(twin, name, self.of(part))
        return twin

    def _once(self, value: Any, make: Callable[[Any], Any]) -> Any:
        if id(value) not in self._done:
            self._done[id(value)] = value, make(value)
        return self._done[id(value)][1]


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
        target = _staged(self.fn, world)
        seen: list[dict[nn.Parameter, torch.Tensor]] = []

        def run() -> None:
            with world.stage.entered():
                target()

        def batch() -> list[torch.Tensor]:
            with world.stage.entered():
                return referred_to(target).tensors

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
            model=model, targets=self.targets, run=run, between=between, optimizers=optimizers, batch=batch
        )
