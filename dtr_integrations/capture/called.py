"""Which modules a step calls: the step is run once on fake tensors, nothing compiled, and watched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .._compat import compiler_lock
from .._python_state import preserved
from .fake import FakeWorld, wind_to_medians
from .source import StepSource, functions_of

_UNKNOWN = "?"  # a module that is not in the model, or that is to be left alone


def called_modules(
    source: StepSource,
    *,
    leave_alone: Callable[[nn.Module], bool] = lambda module: False,
    outside_only: Sequence[str] = (),
    may_be_whole: bool = True,
) -> tuple[str, ...]:
    """Names of the outermost modules with parameters that the step calls with gradients on, in order.

    "" is the model itself, where the step calls that. A module that is also called inside of another one of
    them is left out: it cannot be compiled both ways.

    Args:
        source: the step.
        leave_alone: modules that are not to be compiled, whatever they call.
        outside_only: names of methods of the model that cannot be compiled. If the model's own `forward`
            calls one, the modules that the `forward` calls stand in its place.
        may_be_whole: False: they stand in its place in any case.

    Returns:
        Possibly nothing; also when the step cannot be run without data (the capture then says why).
    """
    world = FakeWorld()
    try:
        step = source.build(world)
        calls = _Calls(step.model, leave_alone, with_parameters=True)
        if not may_be_whole:
            calls.transparent.add("")
        for name in outside_only:
            calls.note_use(name)
        with compiler_lock, preserved(step.model, *functions_of(source)), world.active(), calls.watched():
            step.run()
    except Exception:
        return ()
    return calls.outermost()


def calls_inside(source: StepSource) -> dict[str, tuple[str, ...]]:
    """For each module that the step calls with gradients on, the modules that it calls itself, in order.

    Raises what the step raises when it cannot be run on tensors without data.
    """
    world = FakeWorld()
    step = source.build(world)
    calls = _Calls(step.model)
    with compiler_lock, preserved(step.model, *functions_of(source)), world.active(), calls.watched():
        wind_to_medians()  # as in the dry run
        step.run()
    inside: dict[str, dict[str, None]] = {}
    for name, around in calls.seen:
        inside.setdefault(name, {})
        if around and around[-1] != _UNKNOWN:
            inside.setdefault(around[-1], {})[name] = None
    return {name: tuple(inner) for name, inner in inside.items()}


@dataclass(frozen=True, kw_only=True)
class ReadsData:
    """Why a module's program depends on data. `shapes`: those of its tensors do, so that each step may have
    others; else it reads a number, to branch on it or to compute with it."""

    operator: str
    shapes: bool

    def __str__(self) -> str:
        what = "the shape of a result follows from data" if self.shapes else "it reads a number off a tensor"
        return f"it depends on data: {what} ({self.operator.removeprefix('aten.')})"


def reads_of_data(source: StepSource) -> dict[str, ReadsData]:
    """The innermost modules whose own code reads data, with gradients on. What the step reads outside of
    modules (a loss to be logged) is not among it.

    Raises what the step raises when it cannot be run on tensors without data.
    """
    world = FakeWorld()
    step = source.build(world)
    calls = _Calls(step.model)
    found: dict[str, ReadsData] = {}

    def note(operator: str, shape: bool) -> None:
        known = [name for name in calls.around if name != _UNKNOWN]
        if known and torch.is_grad_enabled() and not (known[-1] in found and found[known[-1]].shapes):
            found[known[-1]] = ReadsData(operator=operator, shapes=shape)

    world.counter.on_data = note
    with compiler_lock, preserved(step.model, *functions_of(source)), world.active(), calls.watched():
        wind_to_medians()
        step.run()
    return found


class _Calls:
    """Every module call of one step, with the calls around it."""

    def __init__(
        self,
        model: nn.Module,
        leave_alone: Callable[[nn.Module], bool] = lambda module: False,
        *,
        with_parameters: bool = False,
    ) -> None:
        self.model = model
        self.names = {
            module: name
            for name, module in model.named_modules()
            if not leave_alone(module)
            and (not with_parameters or next(module.parameters(), None) is not None)
        }
        self.around: list[str] = []
        self.seen: list[tuple[str, tuple[str, ...]]] = []
        self.transparent: set[str] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def note_use(self, name: str) -> None:
        """The model's own call is no unit any more once it uses this method of the model."""
        method = getattr(self.model, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if self.around:
                self.transparent.add("")
            return method(*args, **kwargs)

        setattr(self.model, name, noted)

    def outermost(self) -> tuple[str, ...]:
        outer = {name: None for name, around in self.seen if self.transparent.issuperset(around)}
        inner = {name for name, around in self.seen if not self.transparent.issuperset(around)}
        return tuple(name for name in outer if name not in inner | self.transparent)

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self.names.get(module, _UNKNOWN)
        if name != _UNKNOWN and torch.is_grad_enabled():
            self.seen.append((name, tuple(self.around)))
        self.around.append(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.around.pop()
