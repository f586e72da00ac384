"""Runs a program's operators under a byte budget: room is made before each, and each is taken down so that it
can be run again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..dtr.cache import Cache
from ..dtr.policies import Policies
from ..errors import OutOfBudget
from .handles import Cell, Handle, stale
from .memory import Memory, Value
from .nodes import Node, Ref
from .operators import OperatorKind, kind_of
from .reading import Reading, storage_of
from .sizes import Known, SizeTable

__all__ = ["Cost", "Runtime"]

log = logging.getLogger("dtr_integrations")

Cost = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], int]

_graph_task = torch._C._current_graph_task_id
_Made = tuple[int, torch.UntypedStorage]
_Drawn = tuple[torch.Generator, torch.Tensor]


class Runtime:
    """`call` is for each operator, `pack` and `unpack` for what autograd saves. May be used from several
    threads; operators then run one at a time.

    Args:
        budget_bytes: of all storages that it sees.
        policies: the cache's; see `online_policies`.
        cost: nanoseconds of an operator from (function, args, kwargs, result). None: measured, for each
            operator and shapes.
        device_type: of the memory that the budget is for.

    Attributes:
        cache: decides.
        memory: does what it decides.
        before_room: called where room may have to be made; None: nobody looks.
        origin: whose calls these are, for `Memory.tallies`.
    """

    def __init__(
        self, budget_bytes: float, policies: Policies, cost: Cost | None = None, *, device_type: str = "cpu"
    ) -> None:
        self.memory = memory = Memory(device_type)
        self.cache = memory.cache = Cache(budget_bytes, policies, driver=memory, may_evict=memory.may_evict)
        self.before_room: Callable[[], None] | None = None
        self.origin = ""
        self._aside = _Aside()
        self._state_bytes = torch.default_generator.get_state().nbytes if device_type == "cpu" else 0
        self._lock = threading.RLock()
        self._gone = memory.gone
        self._went_back = False  # since the last operator outside of a backward
        self._cost = cost
        self._kinds: dict[int, Any] = {}
        self._functions: list[Any] = []  # kept, so that none is replaced by another at its address
        self._sizes = SizeTable(device_type)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of the program."""
        # By identity: hashing an overload is a call of its own.
        kind = self._kinds.get(id(function), self)
        if kind is self:
            kind = self._kinds[id(function)] = kind_of(function)
            self._functions.append(function)
        if kind is None or kind.untracked or self._aside.depth:
            return function(*args, **kwargs)
        with self._lock:
            if self._gone:
                self.memory.settle()
            if self._went_back and _graph_task() == -1:
                self._went_back = False
                self.settle()
            return self._run(function, kind, args, kwargs)

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd is to keep instead of `tensor`."""
        with self._lock:
            if self._gone:
                self.memory.settle()
            with torch._C._DisableTorchDispatch():
                kept = tensor.detach()
            storage = storage_of(tensor)
            if storage is None:
                return kept
            slot = self.memory.slots.get(storage._cdata)
            value = (slot.value if slot is not None else None) or self.memory.value_of(storage)
            if value.constant and not value.inside:
                return Handle(Cell(None, kept), self._gone)
            cell = Cell(value, kept)
            value.keep(cell)
            self.memory.saved += 1
            if value.tensor.storage.held:
                self.cache.expose(value.tensor)
            return Handle(cell, self._gone)

    def unpack(self, packed: Any) -> torch.Tensor:
        """What `pack` was given, computed again where it was evicted."""
        if packed.__class__ is not Handle:
            return packed
        cell = packed.cell
        with self._lock:
            self._went_back = True
            if self._gone:
                self.memory.settle()
            tensor = cell.tensor
            if self.before_room is not None and cell.value is not None:
                self.before_room()
                self.cache.materialize(cell.value.tensor)
            if tensor is None:
                if cell.is_stale:
                    raise stale(cell)
                self.cache.materialize(cell.value.tensor)
                tensor = cell.tensor
            elif tensor._version != cell.version:
                raise stale(cell)
            return tensor

    def register(self, tensor: torch.Tensor, what: str) -> None:
        """Count what the program holds already. Raises OutOfBudget, naming `what`, if it does not fit."""
        with self._lock:
            storage = storage_of(tensor)
            if storage is not None and storage._cdata not in self.memory.slots:
                self.cache.make_room(self.memory.bytes_in(storage), what)
                self.memory.value_of(storage)

    @contextmanager
    def aside(self, size_bytes: int, what: str) -> Iterator[Callable[[Any], None]]:
        """For code that allocates by ways of its own, `size_bytes` at most at once: room is made for that, as
        far as there is any, and its operators are not looked at. Yields what is to be told its results, which
        count from then on."""
        with self._lock:
            self.memory.settle()
            try:
                self.cache.make_room(size_bytes, what)
            except OutOfBudget as error:  # who has planned this knows better what it needs
                log.debug("%s", error)
        self._aside.depth += 1
        try:
            yield self._take_results
        finally:
            self._aside.depth -= 1

    def _take_results(self, results: Any) -> None:
        with self._lock:
            self.memory.settle()
            for leaf in tree_leaves(results):
                storage = storage_of(leaf) if isinstance(leaf, torch.Tensor) else None
                if storage is not None and storage._cdata not in self.memory.slots:
                    size_bytes = self.memory.bytes_in(storage)
                    self.cache.occupy(size_bytes, 0)
                    self.memory.place_plain(size_bytes, storage)

    def settle(self) -> None:
        """Take note of what has died, and cut the lineage of what is left if nothing is saved any more: no
        table then grows with the number of steps."""
        with self._lock:
            self.memory.settle()
            if not self.memory.saved:
                self.memory.cut()

    def _run(self, function: Any, kind: OperatorKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cache = self.cache
        # What a backward computes is saved by nobody, unless it is to be differentiated again.
        lineage = kind.replayable and (_graph_task() == -1 or torch.is_grad_enabled())
        written: Sequence[Value] = ()
        unread: Sequence[torch.Tensor] = ()
        if kind.writes:
            written, unread = self._targets(kind, args, kwargs, lineage)
        reading = Reading(self.memory, kind, args, kwargs, unread, lineage)
        known = self._sizes.look_up(reading.key, function, args, kwargs)
        if self.before_room is not None:
            self.before_room()
        if written:
            lineage = self._about_to_write(kind, written, unread, reading, lineage)
        random = self._drawn(kind, args, kwargs) if kind.random and lineage else None
        if known.bytes and cache.held_bytes + known.bytes > cache.budget_bytes:
            cache.make_room(known.bytes, kind.name)
        if known.to_measure:
            result, drew = self._run_measured(function, kind, known, args, kwargs)
            lineage = lineage and not drew
        else:
            result = function(*args, **kwargs)
        made, sizes = self._made(result, known, kind)
        if lineage and reading.is_whole:
            if written and not kind.statistics:
                self._take_write(function, kind, reading, written, made, sizes, known, random)
            elif made:
                self._take_in(function, kind, reading, made, sizes, known, random)
        elif made or kind.writes:
            self._take_constants(kind, reading, written, made, sizes, known)
        return result

    def _drawn(self, kind: OperatorKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Drawn:
        # The state of the generator that is drawn from. On the CPU it is as large as a small activation
        # (5 KB), and counts for as long as a node keeps it.
        self.cache.make_room(self._state_bytes, kind.name)
        generator = _generator_of(args, kwargs)
        state = generator.get_state()
        self.memory.value_of(state.untyped_storage())
        return generator, state

    def _run_measured(
        self,
        function: Any,
        kind: OperatorKind,
        known: Known,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, bool]:
        # One of an operator's first runs; its result, and whether it turned out to draw random numbers and
        # not say so. Its state is kept from then on.
        watched = known.is_new and kind.replayable and not kind.random
        state = torch.default_generator.get_state() if watched else None
        start = time.perf_counter_ns()
        result = function(*args, **kwargs)
        took = time.perf_counter_ns() - start
        if self._cost is None:
            known.measured(took)
        else:
            known.cost = self._cost(function, args, kwargs, result)
            known.to_measure = 0
        if state is None or torch.equal(state, torch.default_generator.get_state()):
            return result, False
        kind.random = True
        return result, True

    def _made(self, result: Any, known: Known, kind: OperatorKind) -> tuple[list[_Made], list[int]]:
        # (leaf of the result, storage) of each storage that is new, and their sizes.
        slots = self.memory.slots
        if result.__class__ is torch.Tensor:
            storage = storage_of(result)
            if storage is None or storage._cdata in slots:
                return [], []
            size_bytes = self.memory.bytes_in(storage)
            if known.bytes != size_bytes:
                known.bytes = size_bytes
                self.cache.make_room(size_bytes, kind.name)
            return [(0, storage)], [size_bytes]
        found: dict[int, _Made] = {}
        for index, leaf in enumerate(tree_leaves(result)):
            storage = storage_of(leaf)
            if storage is not None and storage._cdata not in slots:
                found.setdefault(storage._cdata, (index, storage))
        made = list(found.values())
        sizes = [self.memory.bytes_in(storage) for _, storage in made]
        if known.bytes != sum(sizes):
            known.bytes = sum(sizes)
            self.cache.make_room(known.bytes, kind.name)
        return made, sizes

    def _take_in(
        self,
        function: Any,
        kind: OperatorKind,
        reading: Reading,
        made: list[_Made],
        sizes: list[int],
        known: Known,
        random: _Drawn | None,
    ) -> None:
        # A call that can be run again, and has written to nothing that it read.
        leaves = [leaf for leaf, _ in made]
        node = Node(function, reading.args, reading.kwargs, reading.anchors, leaves, (), random, self.origin)
        args = [value.tensor for value in reading.values]
        outputs = self.cache.adopt(args, sizes, cost=known.cost, name=kind.name, handle=node)
        place = self.memory.place
        for (_, storage), output in zip(made, outputs, strict=True):
            place(Value(output, constant=False, inside=True), storage)

    def _take_write(
        self,
        function: Any,
        kind: OperatorKind,
        reading: Reading,
        written: Sequence[Value],
        made: list[_Made],
        sizes: list[int],
        known: Known,
        random: _Drawn | None,
    ) -> None:
        # A call that can be run again on copies of what it has written to.
        values = reading.values
        # A target that is not read has the one negative position among the arguments.
        positions = [values[v] if v in values else _unread_position(reading.args) for v in written]
        old = [value.tensor for value in written]
        for value in written:
            # What becomes of the old contents has no bytes of its own from here on.
            Value(value.tensor, constant=value.constant, inside=True)
        leaves = [leaf for leaf, _ in made]
        node = Node(
            function, reading.args, reading.kwargs, reading.anchors, leaves, positions, random, self.origin
        )
        outputs = self.cache.adopt(
            [value.tensor for value in values],
            [tensor.storage.size_bytes for tensor in old] + sizes,
            cost=known.cost,
            name=kind.name,
            handle=node,
            taken=old,
        )
        for value, output in zip(written, outputs, strict=False):
            self.memory.attach(value, output, constant=False)
        for (_, storage), output in zip(made, outputs[len(old) :], strict=True):
            self.memory.place(Value(output, constant=False, inside=True), storage)

    def _take_constants(
        self,
        kind: OperatorKind,
        reading: Reading,
        written: Sequence[Value],
        made: list[_Made],
        sizes: list[int],
        known: Known,
    ) -> None:
        # What cannot be computed again: its outputs, and what it has written to.
        memory, cache = self.memory, self.cache
        if self.before_room is None:
            for value in reading.values:
                value.tensor.storage.last_access = cache.clock
            cache.occupy(known.bytes or 0, known.cost)
            for (_, storage), size_bytes in zip(made, sizes, strict=True):
                memory.place_plain(size_bytes, storage)
        else:
            # Whoever looks wants to know each by name.
            args = [value.tensor for value in reading.values]
            outputs = cache.adopt(args, sizes, cost=known.cost, name=kind.name, lineage=False)
            for (_, storage), output in zip(made, outputs, strict=True):
                memory.place(Value(output, constant=True, inside=True), storage)
        for value in written:
            storage = value.slot() if value.slot is not None else None
            if storage is None:
                continue
            storage._fix_weakref()
            size_bytes = memory.bytes_in(storage)
            if not value.constant or size_bytes != value.tensor.storage.size_bytes:
                memory.detach(value)
                memory.attach(value, cache.constant(size_bytes), constant=True)

    def _targets(
        self, kind: OperatorKind, args: tuple[Any, ...], kwargs: dict[str, Any], lineage: bool
    ) -> tuple[list[Value], list[torch.Tensor]]:
        # The values that a call writes to, each once, and the tensors among its arguments that it only
        # writes.
        found: dict[Value, None] = {}
        tensors = [leaf for leaf in tree_leaves(kind.written(args, kwargs)) if isinstance(leaf, torch.Tensor)]
        slots = self.memory.slots
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is None:
                continue
            slot = slots.get(storage._cdata)
            if slot is not None and slot.value is None and not (lineage or kind.reshapes):
                continue
            found[self.memory.value_of(storage)] = None
        if kind.statistics:
            return list(found), tensors
        if lineage and kind.overwrites and len(found) == len(tensors) == 1:
            # A constant made within the scope that is written whole: what it holds then follows from the
            # operator alone.
            (value,), (tensor,) = found, tensors
            size_bytes = tensor.untyped_storage().nbytes()
            whole = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == size_bytes
            if value.constant and value.inside and whole:
                return list(found), tensors
        return list(found), []

    def _about_to_write(
        self,
        kind: OperatorKind,
        written: Sequence[Value],
        unread: Sequence[torch.Tensor],
        reading: Reading,
        lineage: bool,
    ) -> bool:
        # Copies constants whose old contents may be needed again; whether the call can be run again.
        for value in written:
            if value.constant and value.tensor.storage.children:
                self.memory.copy_before_write(value)
        if kind.statistics:
            return lineage and all(value.constant for value in written)
        if unread:
            return lineage and written[0] not in reading.values
        return lineage and not any(value.constant for value in written)


class _Aside(threading.local):
    depth = 0


def _generator_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    # What a call draws from: the generator that it is given, or else its device's default.
    given = [*args, *kwargs.values()]
    for arg in given:
        if isinstance(arg, torch.Generator):
            return arg
    devices = [arg.device if isinstance(arg, torch.Tensor) else arg for arg in given]
    device = next((d for d in devices if isinstance(d, torch.device)), None)
    if device is not None and device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _unread_position(args: Sequence[Any]) -> int:
    return next(arg[0] for arg in args if arg.__class__ is Ref and arg[0] < 0)
