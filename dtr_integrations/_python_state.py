"""Python state that a model's code can reach: attributes of its modules and of objects that they hold, and,
outside of them, globals, class attributes and closures.

A step is planned and compared on twins of the model, but of a global counter or a class attribute there is
only one: the model's code changes the real one, whatever it runs on. `preserved` puts all of it back. What
the code can reach is read off the names in it; none of it is run.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

try:
    import numpy
except ImportError:  # torch works without numpy
    numpy = None  # type: ignore[assignment]

_LIBRARIES = {
    *sys.stdlib_module_names,
    *("torch", "numpy", "lightning", "pytorch_lightning", __name__.partition(".")[0]),
} - {"__main__"}
_PACKAGES = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_PLAIN = (type(None), str, bytes, int, float, complex, types.ModuleType)
_CONTAINERS = (list, dict, set, deque)
_MOST_ITEMS = 10_000  # of a container that is looked into
_MOST_BYTES = 1 << 26  # of a tensor or array of which a copy is kept
_ABSENT: Any = object()


@dataclass(frozen=True, eq=False)
class Place:
    """A name that holds a value: in a dict (a module's globals, an object's attributes), or an attribute of a
    class, a closure's cell or a function."""

    owner: Any
    key: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self.owner is other.owner and self.key == other.key

    def __hash__(self) -> int:
        return hash((id(self.owner), self.key))

    def get(self, default: Any = None) -> Any:
        """What it holds now; `default` if there is nothing."""
        if isinstance(self.owner, dict):
            return self.owner.get(self.key, default)
        if isinstance(self.owner, type):
            return vars(self.owner).get(self.key, default)
        try:
            return getattr(self.owner, self.key)
        except ValueError:  # a cell that is not filled yet
            return default

    def set(self, value: Any) -> None:
        """Have it hold `value`."""
        if isinstance(self.owner, dict):
            self.owner[self.key] = value
        else:
            setattr(self.owner, self.key, value)

    def clear(self) -> None:
        """Have it hold nothing."""
        if isinstance(self.owner, dict):
            del self.owner[self.key]
        else:
            delattr(self.owner, self.key)


def inside(model: nn.Module) -> dict[str, Place]:
    """By dotted name: the attributes of every module and of the objects of the user's classes that they
    hold."""
    found: dict[str, Place] = {}
    own = vars(nn.Module()).keys() - {"training"}
    seen: set[int] = set()

    def attributes(names: dict[str, Any], path: str, leave_out: Any = ()) -> None:
        for name, value in names.items():
            if name in leave_out:
                continue
            found[f"{path}{name}"] = Place(names, name)
            if _is_users_object(value) and id(value) not in seen:
                seen.add(id(value))
                attributes(vars(value), f"{path}{name}.")

    for module_name, module in model.named_modules():
        attributes(vars(module), f"{module_name}." if module_name else "", own)
    return found


def outside(model: nn.Module, *functions: Any) -> dict[str, Place]:
    """By name: the globals, class attributes and closures to which the code of the model's classes and of
    `functions` refers, and the code that it calls in turn; that of libraries is left out."""
    reach = _Reach(_is_users)
    for module in model.modules():
        reach.classes_of(module)
    for function in functions:
        reach.code(function)
    return reach.finished()


@dataclass(frozen=True)
class Referred:
    """What a function and the code that it calls refer to. `places`: the globals, class attributes, closures
    and defaults, by name. `tensors`: those in them, in containers and in objects of the user's classes,
    without what `modules` and `optimizers` hold."""

    places: dict[str, Place]
    tensors: list[torch.Tensor]
    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]


def referred_to(function: Any) -> Referred:
    """What a function (or a method, partial or callable object) refers to. Code is found wherever it is held;
    that of installed packages is left out."""
    reach = _Referred(_is_here)
    reach.holds(function)
    places = reach.finished()

    def met(kind: Any) -> list[Any]:
        return [value for value in reach.values.values() if isinstance(value, kind)]

    tensors = [tensor for tensor in met(torch.Tensor) if not isinstance(tensor, nn.Parameter)]
    return Referred(places, tensors, met(nn.Module), met(torch.optim.Optimizer))


class _Reach:
    def __init__(self, is_own: Callable[[str | None], bool]) -> None:
        self.places: dict[str, Place] = {}
        self._is_own = is_own  # whether the code of a module (by name) is looked into
        self._seen: set[int] = set()  # ids of classes and functions
        self._read_names: set[tuple[int, str]] = set()  # ids of scopes, and names in them
        self._todo: list[Callable[[], None]] = []  # classes, functions and modules that were met

    def finished(self) -> dict[str, Place]:
        while self._todo:
            self._todo.pop()()
        return self.places

    def classes_of(self, thing: Any) -> None:
        for kind in type(thing).__mro__:
            self.kind(kind)

    def kind(self, kind: type) -> None:
        """A class: what it holds, and the code of its methods."""
        if id(kind) in self._seen or not self._is_own(kind.__module__):
            return
        self._seen.add(id(kind))
        self._todo.append(lambda: self._attributes(kind))

    def _attributes(self, kind: type) -> None:
        for name, value in list(vars(kind).items()):
            if isinstance(value, (types.FunctionType, staticmethod, classmethod, property)):
                self.code(value)
            elif not name.startswith("__") and not hasattr(value, "__get__"):
                self.places[f"{kind.__qualname__}.{name}"] = Place(kind, name)

    def code(self, function: Any) -> None:
        """A function: the globals that it names, and its closure."""
        if isinstance(function, property):
            for part in (function.fget, function.fset):
                self.code(part)
            return
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or id(function) in self._seen:
            return
        if not self._is_own(function.__module__):
            return
        self._seen.add(id(function))
        self._todo.append(lambda: self._read(function))

    def _read(self, function: types.FunctionType) -> None:
        names = _names_in(function.__code__)
        self._names(function.__globals__, names, function.__module__)
        for name in _new_globals(function.__code__) - function.__globals__.keys():
            self.places[f"{function.__module__}.{name}"] = Place(function.__globals__, name)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._value(f"{function.__qualname__}:{name}", Place(cell, "cell_contents"), names)

    def _names(self, scope: dict[str, Any], names: set[str], module: str) -> None:
        for name in names & scope.keys():
            if (id(scope), name) in self._read_names:
                continue
            self._read_names.add((id(scope), name))
            self._value(f"{module}.{name}", Place(scope, name), names)

    def _value(self, path: str, place: Place, names: set[str]) -> None:
        value = place.get()
        if isinstance(value, type):
            self.kind(value)
        elif isinstance(value, types.ModuleType):
            if self._is_own(value.__name__):
                self._todo.append(lambda: self._names(vars(value), names, value.__name__))
        elif isinstance(value, (types.FunctionType, types.MethodType)):
            self.code(value)
        else:
            self.places[path] = place
            if _is_users_object(value):
                self.classes_of(value)


class _Referred(_Reach):
    """Looks into what holds code, and at what calls leave to their defaults."""

    def __init__(self, is_own: Callable[[str | None], bool]) -> None:
        super().__init__(is_own)
        self.values: dict[int, Any] = {}  # what was met besides code, by id

    def holds(self, value: Any) -> None:
        """A value that may be code, or hold some."""
        if isinstance(value, type):
            self.kind(value)
        elif isinstance(value, (types.FunctionType, types.MethodType, staticmethod, classmethod, property)):
            self.code(value)
            self.holds(getattr(value, "__self__", None))
        elif id(value) not in self.values and not isinstance(value, _PLAIN):
            self.values[id(value)] = value
            self._todo.append(lambda: self._parts(value))

    def _parts(self, value: Any) -> None:
        parts: Any = ()
        if isinstance(value, functools.partial):
            parts = (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, types.BuiltinMethodType):
            parts = (value.__self__,)
        elif isinstance(value, dict):
            parts = dict.values(value)
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            parts = value
        elif isinstance(value, nn.Module):
            self.classes_of(value)
        elif _has_own_state(value):
            self.classes_of(value)
            parts = vars(value).values()
        if len(parts) <= _MOST_ITEMS:
            for part in list(parts):
                self.holds(part)

    def _read(self, function: types.FunctionType) -> None:
        super()._read(function)
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name):
                self._value(f"{function.__qualname__}.{name}", Place(function, name), set())

    def _value(self, path: str, place: Place, names: set[str]) -> None:
        super()._value(path, place, names)
        self.holds(place.get())


def _names_in(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _new_globals(code: types.CodeType) -> set[str]:
    """Names to which the code assigns as globals."""
    names: set[str] = set()
    if _STORE_GLOBAL in code.co_code[::2]:
        names |= {i.argval for i in dis.get_instructions(code) if i.opcode == _STORE_GLOBAL}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _new_globals(constant)
    return names


def _is_users(module: str | None) -> bool:
    return (module or "builtins").partition(".")[0] not in _LIBRARIES


def _is_here(module: str | None) -> bool:
    """Whether a module is the user's and lies in no folder of installed packages."""
    if not _is_users(module):
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is None or not file.startswith(_PACKAGES)


def _is_users_object(value: Any) -> bool:
    skipped = (type, nn.Module, torch.Tensor, torch.optim.Optimizer, torch.utils.data.Dataset)
    return hasattr(value, "__dict__") and not isinstance(value, skipped) and _is_users(type(value).__module__)


def _has_own_state(value: Any) -> bool:
    """An object in whose attributes a step may keep something: of the user's classes, or a scheduler or
    gradient scaler of torch's."""
    stateful = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
    return isinstance(value, stateful) or _is_users_object(value)


class Snapshot:
    """What places hold, to be put back: names hold the same objects then, and containers, generators, arrays,
    tensors and the user's objects the same contents. `data`: keep copies of tensors and arrays too."""

    def __init__(self, places: dict[str, Place], *, data: bool = True) -> None:
        classes = {id(p.owner): p.owner for p in places.values() if isinstance(p.owner, type)}
        self._classes = [(kind, set(vars(kind))) for kind in classes.values()]
        self._held = [(place, place.get(_ABSENT)) for place in places.values()]
        self._contents = _Contents(data=data)
        for _, value in self._held:
            self._contents.keep(value)

    def restore(self) -> None:
        """Put everything back."""
        for place, value in self._held:
            now = place.get(_ABSENT)
            if value is _ABSENT and now is not _ABSENT:
                place.clear()
            elif now is not value:
                place.set(value)
        for kind, names in self._classes:
            for name in [n for n in vars(kind) if n not in names and not n.startswith("__")]:
                delattr(kind, name)
        self._contents.restore()


@contextlib.contextmanager
def preserved(model: nn.Module, *functions: Any) -> Iterator[None]:
    """Python state outside of the model (see `outside`) is after the block what it was before."""
    before = Snapshot(outside(model, *functions))
    try:
        yield
    finally:
        before.restore()


class _Contents:
    """What mutable objects hold, all the way down."""

    def __init__(self, *, data: bool) -> None:
        self._data = data
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}  # the objects too: an id is theirs only while they live
        self._todo: list[Any] = []

    def keep(self, value: Any) -> None:
        self._todo.append(value)
        while self._todo:
            self._keep(self._todo.pop())

    def _keep(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        if isinstance(value, _CONTAINERS):
            self._seen[id(value)] = value
            self._keep_container(value)
        elif isinstance(value, (tuple, frozenset)):
            self._seen[id(value)] = value
            self._parts(value)
        elif isinstance(value, torch.Tensor):
            self._seen[id(value)] = value
            if self._data:
                self._keep_tensor(value)
        elif numpy is not None and isinstance(value, numpy.ndarray):
            self._seen[id(value)] = value
            if self._data:
                self._keep_array(value)
        elif (state := generator_state(value)) is not None:
            self._undo.append(lambda: _set_generator_state(value, state))
        elif _has_own_state(value):
            self._seen[id(value)] = value
            self._keep_container(vars(value))

    def restore(self) -> None:
        for undo in self._undo:
            undo()

    def _parts(self, parts: Any) -> None:
        if len(parts) <= _MOST_ITEMS:
            self._todo.extend(parts)

    def _keep_container(self, value: Any) -> None:
        before = _items(value)

        def undo() -> None:
            if _same_items(_items(value), before):
                return
            value.clear()
            if isinstance(value, (dict, set)):
                value.update(before)
            else:
                value.extend(before)

        self._undo.append(undo)
        self._parts(list(before.values()) if isinstance(before, dict) else before)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad or tensor.is_meta or tensor.layout is not torch.strided:
            return
        if tensor.numel() * tensor.element_size() > _MOST_BYTES:
            return
        before = tensor.clone()

        def undo() -> None:
            if tensor.shape != before.shape or not torch.equal(tensor, before):
                with torch.no_grad():
                    tensor.resize_(before.shape).copy_(before)

        self._undo.append(undo)

    def _keep_array(self, array: Any) -> None:
        if array.nbytes <= _MOST_BYTES and array.flags.writeable and array.dtype != object:
            before = array.copy()
            self._undo.append(lambda: numpy.copyto(array, before))


def _items(container: Any) -> Any:
    """What it holds, past whatever its class makes of `[]`."""
    return dict(dict.items(container)) if isinstance(container, dict) else list(container)


def _same_items(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(one[key] is other[key] for key in one)
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def generator_state(value: Any) -> Any:
    """The state of a random generator that is an object of its own; None for anything else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return value.get_state()
    return None


def _set_generator_state(value: Any, state: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, (torch.Generator, numpy.random.RandomState)):
        value.set_state(state)
    else:
        value.bit_generator.state = state
