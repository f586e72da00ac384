"""What a loop makes of a model's output, seen once: from the first call of a step to its backward.

A front door that is called with a model's calls does not see the loss that the loop computes from what they
return, nor for how long the loop holds that. `LoopWatch` writes down every torch function in between, as a
call and not as its values: of the step's tensors it keeps the batch alone. `SeenForward` does it again over
twins.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .._compat import remove_function_mode
from .._python_state import inside
from .source import tensors_of
from .world import World

LOSS_OUTSIDE = "the loss outside the model"
_MOST_ITEMS = 5_000
_SETTERS = ("__setitem__", "__set__")
_NOT_THE_LOOPS = (
    "CompiledFunctionBackward",
    "_DDPSinkBackward",
)  # autograd.Functions around the model itself


class Until(enum.IntEnum):
    """How long the loop holds a value that is alive when the backward begins."""

    BACKWARD = 0  # no longer than that: what autograd saves, it holds by itself
    STEP = 1  # when the backward is over, it is let go
    NEXT_CALL = 2  # the optimizer has stepped; gone when the model is called again
    REPLACED = 3  # a loop's variable: until the next step puts its own in its place


@dataclass(frozen=True)
class _Slot:
    number: int


@dataclass(frozen=True)
class _Outside:
    number: int


@dataclass(frozen=True)
class _Attribute:
    name: str


@dataclass(frozen=True, kw_only=True)
class _Item:
    """One call: of the model (`function` is None) or of a torch function. `slots`: for the tensors in its
    result, in order. `drops`: slots of which the loop lets go before it goes on."""

    function: Callable[..., Any] | None
    arguments: Any  # (args, kwargs) with places for tensors
    grad: bool
    autocast: Callable[[], Any] | None
    slots: tuple[int, ...] = ()
    drops: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Spec:
    """A tensor of the batch that is no longer there."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class SeenForward:
    """One forward of a loop, loss included, and its backward.

    Attributes:
        items: what the loop called, in order.
        backward: (args, kwargs) of `Tensor.backward`, the loss first.
        outside: tensors that it took from elsewhere: the batch, parameters of a criterion.
        until: how long each slot that is alive at the backward is held.
        functions: how many torch functions were called besides the model.
        largest_bytes: of the largest tensor that these read or made, or that the loop holds in the backward.
    """

    items: tuple[_Item, ...]
    backward: Any
    outside: tuple[torch.Tensor | _Spec, ...]
    until: Mapping[int, Until]
    functions: int
    largest_bytes: int

    def besides_the_model(self) -> list[torch.Tensor]:
        """The tensors of the batch that the model is not called with."""
        calls = (item.arguments for item in self.items if item.function is None)
        given = {place.number for place in pytree.tree_leaves(tuple(calls)) if isinstance(place, _Outside)}
        return [
            tensor
            for number, tensor in enumerate(self.outside)
            if number not in given and isinstance(tensor, torch.Tensor) and not tensor.requires_grad
        ]

    def forget_batch(self) -> SeenForward:
        """The same without the batch's tensors: from now on only their sizes are known."""
        return replace(self, outside=tuple(map(_without_data, self.outside)))

    def twin(self, world: World, model: nn.Module) -> ForwardTwin:
        """The same over twins; `model` is the model's."""
        outside = [world.empty(**vars(t)) if isinstance(t, _Spec) else world.copy(t) for t in self.outside]
        return ForwardTwin(self, outside, model, world)


class ForwardTwin:
    """A `SeenForward` over twins. It holds what the loop holds from one run to the next."""

    def __init__(
        self, seen: SeenForward, outside: list[torch.Tensor], model: nn.Module, world: World
    ) -> None:
        self.outside = outside
        self._seen = seen
        self._model = model
        self._world = world
        self._held: dict[int, Any] = {}

    def forward(self) -> None:
        """The model's call and what the loop makes of its output."""
        for item in self._seen.items:
            args, kwargs = self._filled(item.arguments)
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(item.grad))
                if item.autocast is not None:
                    stack.enter_context(item.autocast())
                if item.function is None:
                    out = self._model(*args, **kwargs)
                else:
                    stack.enter_context(self._world.making(LOSS_OUTSIDE))
                    out = item.function(*args, **kwargs)
            del args, kwargs
            self._held.update(zip(item.slots, tensors_of(out), strict=True))
            del out
            self._let_go(item.drops)

    def backward(self) -> None:
        """As the loop calls it."""
        self._let_go(slot for slot, until in self._seen.until.items() if until is Until.BACKWARD)
        args, kwargs = self._filled(self._seen.backward)
        args[0].backward(*args[1:], **kwargs)
        del args, kwargs
        self._let_go(slot for slot, until in self._seen.until.items() if until is Until.STEP)

    def stepped(self) -> None:
        """The optimizer has stepped."""
        self._let_go(slot for slot, until in self._seen.until.items() if until is Until.NEXT_CALL)

    def _let_go(self, slots: Any) -> None:
        for slot in slots:
            self._held.pop(slot, None)

    def _filled(self, arguments: Any) -> Any:
        def tensor(place: Any) -> Any:
            if isinstance(place, _Slot):
                return self._held[place.number]
            if isinstance(place, _Outside):
                return self.outside[place.number]
            if isinstance(place, _Attribute):
                return inside(self._model)[place.name].get()
            return place

        return pytree.tree_map(tensor, arguments)


class _Watching:
    """The watches at work. While there are any, torch.compile is off, and a backward is told to them before
    it begins: a mode that is left inside of its own call is put back after it."""

    def __init__(self) -> None:
        self._watches: list[LoopWatch] = []
        self._stack = contextlib.ExitStack()

    def add(self, watch: LoopWatch) -> None:
        if not self._watches:
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
            self._stack.enter_context(self._telling())
        self._watches.append(watch)

    def remove(self, watch: LoopWatch) -> None:
        if watch in self._watches:
            self._watches.remove(watch)
            if not self._watches:
                self._stack.close()

    def yield_to(self, caller: LoopWatch | None) -> None:
        for watch in tuple(self._watches):
            watch.suspend()
            if watch is not caller:
                watch.over, watch.fault = True, "another model under a budget is called in it"

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        backward = torch.Tensor.backward

        def told(*args: Any, **kwargs: Any) -> None:
            for watch in tuple(self._watches):
                watch.begins_backward(args, kwargs)
            backward(*args, **kwargs)

        torch.Tensor.backward = told  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.Tensor.backward = backward  # type: ignore[method-assign]


_watching = _Watching()


def give_way(watch: LoopWatch | None) -> None:
    """A model under a budget is about to be called, and runs compiled: whoever watches another model's loop
    meanwhile (all but `watch`) gives it up."""
    _watching.yield_to(watch)


class LoopWatch(TorchFunctionMode):
    """Writes down what a loop does, from a call of `model` to the backward.

    `called` and `returned` are told of each call of the model, `stepped` of the optimizer's step. Between
    such a call and the backward nothing else is compiled: torch.compile would trace this mode.

    Attributes:
        over: the backward has begun (or there is a `fault`); nothing is written down any more.
        fault: why what was seen cannot be done again; None if it can.
    """

    def __init__(self, model: nn.Module, autocast: Callable[[], Callable[[], Any] | None]) -> None:
        super().__init__()
        self.over = False
        self.fault: str | None = None
        self._model = model
        self._autocast = autocast
        self._items: list[_Item] = []
        self._outside: list[torch.Tensor] = []
        self._slots: list[weakref.ref[torch.Tensor]] = []
        self._slot_of: dict[int, int] = {}
        self._alive: set[int] = set()
        self._backward: Any = None
        self._until: dict[int, Until] = {}
        self._is_through = False
        self._functions = self._largest_bytes = 0

    # -- the model's calls -----------------------------------------------------------------------------------

    def called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model is about to be called."""
        self.suspend()
        if not self.over:
            self._drop_the_dead()
            self._add(None, (args, dict(kwargs)))

    def returned(self, out: Any) -> None:
        """It has returned `out`, of which the loop makes a loss from now on."""
        if self.over or not self._items:
            return
        self._results(out)
        for tensor in tensors_of(out):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._loss_is_through)
        _watching.add(self)
        self.__enter__()

    def suspend(self) -> None:
        """Stop watching, until the next `returned`."""
        remove_function_mode(self)
        _watching.remove(self)

    def stepped(self) -> None:
        """The optimizer has stepped."""
        self.suspend()
        self._note_deaths(Until.STEP)

    def seen(self) -> SeenForward | None:
        """All of it, once the model is called again (or would be); None where there is a `fault`."""
        self.suspend()
        self._note_deaths(Until.NEXT_CALL)
        if self.fault is None and self._backward is None:
            self.fault = "no backward was seen after the model's call"
        if self.fault is not None:
            return None
        self._until |= dict.fromkeys(self._alive - self._until.keys(), Until.REPLACED)
        return SeenForward(
            items=tuple(self._items),
            backward=self._backward,
            outside=tuple(self._outside),
            until=self._until,
            functions=self._functions,
            largest_bytes=self._largest_bytes,
        )

    # -- the loop's ------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.over:
            return func(*args, **kwargs)
        self._drop_the_dead()
        places = self._places((args, kwargs))  # before the call, which may change its arguments
        out = func(*args, **kwargs)
        tensors = list(tensors_of(out))
        if tensors or getattr(func, "__name__", "") in _SETTERS:
            self._add(func, None, places)
            self._results(out)
            self._functions += 1
            self._note_size(*tensors_of((args, kwargs)), *tensors)
        return out

    def begins_backward(self, args: Any, kwargs: Any) -> None:
        """`Tensor.backward` is about to be called: the loop is seen, and nothing is in the way any more."""
        self.suspend()
        if self.over:
            return
        self._drop_the_dead()
        self._backward = self._places((args, kwargs))
        self.over = True
        for node in _nodes_outside(args[0], self._outputs()):
            self.fault = f"it goes through {node}, an autograd.Function of its own"

    def _outputs(self) -> set[Any]:
        slots = [slot for item in self._items if item.function is None for slot in item.slots]
        tensors = [self._slots[slot]() for slot in slots]
        return {tensor.grad_fn for tensor in tensors if tensor is not None}

    def _loss_is_through(self, gradients: Any) -> None:
        """The backward has come to the model: what autograd saved for the loss is let go of by now."""
        self.over = True
        if not self._is_through:
            self._is_through = True
            self._note_deaths(Until.BACKWARD)
            held = [self._slots[slot]() for slot in self._alive]
            self._note_size(*(tensor for tensor in held if tensor is not None))

    def _note_deaths(self, until: Until) -> None:
        if not self.over:
            return
        for slot in self._sweep():
            self._until[slot] = until

    def _add(self, function: Any, arguments: Any, places: Any = None) -> None:
        if len(self._items) >= _MOST_ITEMS:
            self.over, self.fault = True, f"there are more than {_MOST_ITEMS} operations in it"
            self._items.clear()
            return
        self._items.append(
            _Item(
                function=function,
                arguments=self._places(arguments) if places is None else places,
                grad=torch.is_grad_enabled(),
                autocast=self._autocast(),
            )
        )

    def _results(self, out: Any) -> None:
        if not self._items:
            return
        first = len(self._slots)
        for slot, tensor in enumerate(tensors_of(out), first):
            self._slot_of[id(tensor)] = slot
            self._slots.append(weakref.ref(tensor))
        slots = range(first, len(self._slots))
        self._alive.update(slots)
        self._items[-1] = replace(self._items[-1], slots=tuple(slots))

    def _drop_the_dead(self) -> None:
        """What has died by now was let go of after the last call."""
        dead = self._sweep()
        if self._items and dead:
            self._items[-1] = replace(self._items[-1], drops=tuple(dead))

    def _sweep(self) -> list[int]:
        """Slots whose values have died since the last time."""
        dead = [slot for slot in self._alive if self._slots[slot]() is None]
        self._alive.difference_update(dead)
        return dead

    def _places(self, arguments: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, self._place, arguments)

    def _place(self, tensor: torch.Tensor) -> _Slot | _Outside | _Attribute:
        slot = self._slot_of.get(id(tensor), -1)
        if slot >= 0 and self._slots[slot]() is tensor:
            return _Slot(slot)
        if not tensor.is_leaf and tensor.requires_grad:
            for name, place in inside(self._model).items():
                if place.get() is tensor:
                    return _Attribute(name)
            self.fault = (
                f"it is made of a tensor of {list(tensor.shape)} that comes neither from the model's output "
                "nor from the batch"
            )
        for number, known in enumerate(self._outside):
            if known is tensor:
                return _Outside(number)
        self._outside.append(tensor)
        return _Outside(len(self._outside) - 1)

    def _note_size(self, *tensors: torch.Tensor) -> None:
        sizes = (tensor.untyped_storage().nbytes() for tensor in tensors if tensor.layout is torch.strided)
        self._largest_bytes = max(self._largest_bytes, *sizes, 0)


def _without_data(tensor: torch.Tensor | _Spec) -> torch.Tensor | _Spec:
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, nn.Parameter) or tensor.requires_grad:
        return tensor
    return _Spec(size=tuple(tensor.size()), stride=tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _nodes_outside(loss: torch.Tensor, outputs: set[Any]) -> Iterator[str]:
    """Names of the `autograd.Function`s between a loss and what the model returned."""
    seen, pending = set(outputs), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction) and node.name() not in _NOT_THE_LOOPS:
            yield node.name()
        pending += [following for following, _ in node.next_functions]
