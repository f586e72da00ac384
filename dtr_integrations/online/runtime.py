"""Real tensors under the cache's decisions.

A *value* is the contents of one storage between two writes; `Cache` knows it as a storage of its own. Where
its bytes are is written here:

* the program reaches them (a tensor of its own, or one within autograd): a weak reference tells when that
  storage dies, and nothing that the program can reach is ever freed;
* autograd has saved them: `pack` leaves a `Handle` in its hands and keeps the tensor in a `Cell`. Evicting
  drops the cells' tensors, and so is allowed only where nobody else uses the storage;
* a replay has brought them back: the runtime holds them, or the cells do.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..dtr.cache import Cache
from ..dtr.policies import Policies
from ..dtr.values import Operator, Storage, Tensor
from .handles import Cell, Handle, stale
from .nodes import Anchor, Node, same_dispatch, view_of
from .operators import OperatorKind, kind_of
from .sizes import Known, SizeTable

__all__ = ["Runtime"]

Cost = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], int]

_use_count = torch._C._storage_Use_Count
_graph_task = torch._C._current_graph_task_id


class Slot(weakref.ref):  # type: ignore[type-arg]
    """A real storage for as long as it lives."""

    __slots__ = ("key", "value")
    key: int
    value: Value | None


class Value:
    """Where a value's bytes are.

    Attributes:
        tensor: the cache's.
        slot: its real storage; None while evicted.
        base: the runtime's own hold on that storage; None where the program or cells hold it.
        cells: what autograd has saved of it; while it is resident each holds a tensor on its storage.
        anchor: of a constant that nodes read.
        inside: made within the scope, so that writing it anew gives it a lineage.
    """

    __slots__ = ("anchor", "base", "cells", "inside", "slot", "tensor")

    def __init__(self, tensor: Tensor, slot: Slot | None, *, inside: bool) -> None:
        self.tensor = tensor
        self.slot = slot
        self.base: torch.UntypedStorage | None = None
        self.cells: dict[Cell, None] = {}
        self.anchor: weakref.ref[Anchor] | None = None
        self.inside = inside
        tensor.storage.handle = self


class Runtime:
    """Runs operators under a byte budget: `call` for each operator, `pack` and `unpack` for what autograd
    saves. May be used from several threads; operators then run one at a time.

    Args:
        budget_bytes: of all storages that it sees.
        policies: the cache's; `forget_dead` is set.
        cost: nanoseconds of an operator from (function, args, kwargs, result). None: measured once for each
            operator and shapes.
    """

    def __init__(self, budget_bytes: float, policies: Policies, cost: Cost | None = None) -> None:
        self.cache = Cache(budget_bytes, policies, driver=self, may_evict=self._may_evict)
        self.lock = threading.RLock()
        # Called where room may have to be made.
        self.before_room: Callable[[], None] | None = None
        self._cost = cost
        self._kinds: dict[Any, OperatorKind | None] = {}
        self._sizes = SizeTable()
        self._slots: dict[int, Slot] = {}
        self._gone: deque[Slot | Cell] = deque()
        self._saved = 0

    # --- what the program does ---

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of the program."""
        try:
            kind = self._kinds[function]
        except KeyError:
            kind = self._kinds[function] = kind_of(function)
        if kind is None or kind.untracked:
            return function(*args, **kwargs)
        with self.lock:
            if self._gone:
                self._settle()
            return self._run(function, kind, args, kwargs)

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd is to keep instead of `tensor`."""
        with self.lock:
            if self._gone:
                self._settle()
            storage = _storage_of(tensor)
            with torch._C._DisableTorchDispatch():
                kept = tensor.detach()
            if storage is None:
                return kept
            value = self._value(storage)
            if value.tensor.storage.pinned and not value.inside:
                return Handle(Cell(None, kept), self._gone)
            cell = Cell(value, kept)
            value.cells[cell] = None
            self._saved += 1
            self.cache.expose(value.tensor)
            return Handle(cell, self._gone)

    def unpack(self, packed: Any) -> torch.Tensor:
        """What `pack` was given, computed again where it was evicted."""
        if packed.__class__ is not Handle:
            return packed
        cell = packed.cell
        with self.lock:
            if self._gone:
                self._settle()
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
        with self.lock:
            storage = _storage_of(tensor)
            if storage is not None and storage._cdata not in self._slots:
                self.cache.make_room(storage.nbytes(), what)
                self._value(storage)

    def settle(self) -> None:
        """Take note of what has died, and cut the lineage of what is left if nothing is saved any more: no
        table then grows with the number of steps."""
        with self.lock:
            self._settle()
            if self._saved:
                return
            values = [slot.value for slot in self._slots.values() if slot.value is not None]
            ours = [v for v in values if v.tensor.references and not v.tensor.storage.pinned]
            sizes = [value.tensor.storage.size_bytes for value in ours]
            for value in ours:
                self._detach(value)
            for value, size_bytes in zip(ours, sizes, strict=True):
                self._attach(value, self.cache.constant(size_bytes))

    # --- the cache's driver ---

    def compute(self, operator: Operator, *, replay: bool) -> None:
        """See `dtr.cache.Driver`: only replays come here."""
        node: Node = operator.handle
        found = node.run([self._bytes_of(arg) for arg in operator.args])
        for output, storage in zip(operator.outputs, found, strict=True):
            if not output.defined and not output.storage.banished:
                self._restore(output.storage.handle, storage)

    def evict(self, storage: Storage) -> None:
        """See `dtr.cache.Driver`."""
        value: Value | None = storage.handle
        if value is None:
            return
        slot, value.slot = value.slot, None
        if slot is not None:
            slot.value = None
            if self._slots.get(slot.key) is slot:
                del self._slots[slot.key]
        for cell in list(value.cells):
            tensor, cell.tensor = cell.tensor, None
            if tensor is not None and tensor._version != cell.version:
                cell.is_stale = True
                del value.cells[cell]
        value.base = None

    def _may_evict(self, storage: Storage) -> bool:
        value: Value = storage.handle
        if value.base is not None:
            held, real = 1, value.base
        elif value.cells:
            tensor = next(iter(value.cells)).tensor
            assert tensor is not None
            held, real = 1, tensor.untyped_storage()
        else:
            return False
        # The storage's own Python object counts as one.
        return _use_count(real._cdata) == held + len(value.cells)

    def _restore(self, value: Value, storage: torch.UntypedStorage) -> None:
        self._place(value, storage)
        if not value.cells:
            value.base = storage
            return
        with same_dispatch():
            for cell in value.cells:
                cell.tensor = view_of(storage, cell.geometry)
                cell.version = cell.tensor._version

    def _bytes_of(self, tensor: Tensor) -> torch.UntypedStorage:
        value: Value = tensor.storage.handle
        if value.base is not None:
            return value.base
        anchor = value.anchor() if value.anchor is not None else None
        if anchor is not None and anchor.tensor._version != anchor.version:
            raise RuntimeError(
                "online rematerialisation: a tensor that is needed to compute an evicted value again was "
                "modified in place outside of the scope (shape "
                f"{list(anchor.tensor.shape)}, version {anchor.tensor._version}, expected {anchor.version}). "
                "Run the backward before modifying it, or put the modification into the scope."
            )
        assert value.slot is not None
        storage = value.slot()
        assert storage is not None
        storage._fix_weakref()
        return storage

    # --- one operator ---

    def _run(self, function: Any, kind: OperatorKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cache = self.cache
        tensors: list[torch.Tensor] = []
        for arg in args:
            _collect(arg, tensors)
        if kwargs:
            for arg in kwargs.values():
                _collect(arg, tensors)
        tracked = True
        values: list[Value] = []
        slots = self._slots
        for tensor in tensors:
            storage = _storage_of(tensor)
            if storage is None:
                tracked = False
                continue
            slot = slots.get(storage._cdata)
            value = slot.value if slot is not None else None
            values.append(value if value is not None else self._value(storage))
        known = self._sizes.look_up(function, kind, args, kwargs)
        if self.before_room is not None:
            self.before_room()
        written = self._about_to_write(kind.written(args, kwargs)) if kind.writes else []
        if known.bytes and cache.held_bytes + known.bytes > cache.budget_bytes:
            cache.make_room(known.bytes, kind.name)
        generator = state = None
        if kind.random:
            generator = next((a for a in kwargs.values() if isinstance(a, torch.Generator)), None)
            state = (generator or torch.default_generator).get_state()
        if known.cost is None:
            start = time.perf_counter_ns()
            result = function(*args, **kwargs)
            took = time.perf_counter_ns() - start
            known.cost = self._cost(function, args, kwargs, result) if self._cost else took
        else:
            result = function(*args, **kwargs)
        lineage = tracked and kind.replayable and (_graph_task() == -1 or torch.is_grad_enabled())
        self._take_in(
            function, kind, args, kwargs, tensors, values, written, result, known, lineage, state, generator
        )
        return result

    def _take_in(
        self,
        function: Any,
        kind: OperatorKind,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        values: list[Value],
        written: list[Value],
        result: Any,
        known: Known,
        lineage: bool,
        state: torch.Tensor | None,
        generator: torch.Generator | None,
    ) -> None:
        leaves = (result,) if isinstance(result, torch.Tensor) else tree_leaves(result)
        fresh: dict[int, tuple[int, torch.UntypedStorage]] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                storage = _storage_of(leaf)
                if storage is not None and storage._cdata not in self._slots:
                    fresh.setdefault(storage._cdata, (index, storage))
        made = list(fresh.values())
        sizes = [storage.nbytes() for _, storage in made]
        if known.bytes != sum(sizes):
            known.bytes = sum(sizes)
            self.cache.make_room(known.bytes, kind.name)
        taken, only_written = written, []
        if written:
            if kind.statistics:
                taken, only_written = [], list(args[3:5])
                lineage = lineage and all(value.tensor.storage.pinned for value in written)
            elif any(value.tensor.storage.pinned for value in written):
                target = kind.written(args, kwargs)[0]
                lineage = lineage and kind.overwrites and self._is_blank(target, written, tensors)
                only_written = [target]
        elif not made:
            return
        if not lineage:
            self._take_constants(values, written, made, sizes, known, kind)
            return
        order: dict[Value, int] = {}
        anchors: list[Anchor] = []
        positions: dict[int, int] = {}
        for tensor, value in zip(tensors, values, strict=True):
            if any(tensor is target for target in only_written):
                positions[id(tensor)] = -1 - len(positions)
                continue
            position = order.setdefault(value, len(order))
            positions[id(tensor)] = position
            if value.tensor.storage.pinned:
                anchors.append(self._anchor(value, tensor))
        node = Node(
            function,
            args,
            kwargs,
            positions,
            written=[order[v] if v in order else positions[id(only_written[0])] for v in taken],
            random_state=state,
            generator=generator,
            anchors=anchors,
        )
        node.leaves = tuple([index for index, _ in made])
        inputs = [value.tensor for value in order]
        old = []
        for value in taken:
            old.append(value.tensor)
            # What becomes of the old contents has no bytes of its own from here on.
            Value(value.tensor, None, inside=True)
        outputs = self.cache.adopt(
            inputs,
            [tensor.storage.size_bytes for tensor in old] + sizes,
            cost=known.cost or 0,
            name=kind.name,
            handle=node,
            taken=old,
        )
        for value, output in zip(taken, outputs, strict=False):
            self._attach(value, output)
        for (_, storage), output in zip(made, outputs[len(taken) :], strict=True):
            self._place(Value(output, None, inside=True), storage)

    @staticmethod
    def _is_blank(target: torch.Tensor, written: list[Value], tensors: list[torch.Tensor]) -> bool:
        # Whether a constant made within the scope is written whole by an operator that doesn't read it: what
        # it holds then follows from the operator alone.
        (value, *more) = written
        storage = target.untyped_storage()
        return (
            not more
            and value.inside
            and target.is_contiguous()
            and target.numel() * target.element_size() == storage.nbytes()
            and sum(tensor.untyped_storage() is storage for tensor in tensors) == 1
        )

    def _take_constants(
        self,
        values: list[Value],
        written: list[Value],
        made: list[tuple[int, torch.UntypedStorage]],
        sizes: list[int],
        known: Known,
        kind: OperatorKind,
    ) -> None:
        # What cannot be computed again: its outputs, and what it has written to.
        cache = self.cache
        outputs = cache.adopt(
            [value.tensor for value in values], sizes, cost=known.cost or 0, name=kind.name, lineage=False
        )
        for (_, storage), output in zip(made, outputs, strict=True):
            self._place(Value(output, None, inside=True), storage)
        for value in written:
            storage = value.slot() if value.slot is not None else None
            if storage is None:
                continue
            if not value.tensor.storage.pinned or storage.nbytes() != value.tensor.storage.size_bytes:
                self._detach(value)
                self._attach(value, cache.constant(storage.nbytes()))

    def _about_to_write(self, targets: list[Any]) -> list[Value]:
        # The values that are written, each once. A constant that something evicted may need is copied first.
        found: dict[Value, None] = {}
        tensors: list[torch.Tensor] = []
        for target in targets:
            _collect(target, tensors)
        for tensor in tensors:
            storage = _storage_of(tensor)
            if storage is None:
                continue
            value = self._value(storage)
            if value in found:
                continue
            found[value] = None
            cached = value.tensor.storage
            if cached.pinned and cached.children:
                self.cache.make_room(cached.size_bytes, "a copy of a constant before it is written to")
                old = Value(value.tensor, None, inside=value.inside)
                old.base = storage.clone()
                tensor_now = self.cache.constant(cached.size_bytes)
                value.anchor = None
                self._attach(value, tensor_now)
                self.cache.release(old.tensor)
        return list(found)

    # --- values and storages ---

    def _value(self, storage: torch.UntypedStorage) -> Value:
        slot = self._slots.get(storage._cdata)
        if slot is not None:
            assert slot.value is not None
            return slot.value
        value = Value(self.cache.constant(storage.nbytes()), None, inside=False)
        self._place(value, storage)
        return value

    def _place(self, value: Value, storage: torch.UntypedStorage) -> None:
        slot = Slot(storage, self._died)
        slot.key = storage._cdata
        slot.value = value
        value.slot = slot
        self._slots[slot.key] = slot

    def _attach(self, value: Value, tensor: Tensor) -> None:
        # `value` goes on as the cache's `tensor`, on the same bytes.
        value.tensor = tensor
        tensor.storage.handle = value
        if value.cells:
            self.cache.expose(tensor)

    def _detach(self, value: Value) -> None:
        # The cache lets its tensor go; the bytes stay.
        old = value.tensor
        Value(old, None, inside=True)
        self.cache.release(old)

    def _anchor(self, value: Value, tensor: torch.Tensor) -> Anchor:
        anchor = value.anchor() if value.anchor is not None else None
        if anchor is None:
            anchor = Anchor(tensor)
            value.anchor = weakref.ref(anchor)
        return anchor

    def _died(self, slot: Slot) -> None:
        # Called wherever a storage dies, in the middle of anything: note it and leave.
        if self._slots.get(slot.key) is slot:
            del self._slots[slot.key]
        self._gone.append(slot)

    def _settle(self) -> None:
        gone = self._gone
        while gone:
            dead = gone.popleft()
            if isinstance(dead, Slot):
                value = dead.value
                if value is not None:
                    value.slot = dead.value = None
                    self.cache.release(value.tensor)
                continue
            value = dead.value
            if value is not None:
                dead.value = None
                self._saved -= 1
                value.cells.pop(dead, None)
                if not value.cells and value.slot is None and value.tensor.references:
                    self.cache.release(value.tensor)


def _collect(arg: Any, found: list[torch.Tensor]) -> None:
    if isinstance(arg, torch.Tensor):
        found.append(arg)
    elif arg.__class__ is list or arg.__class__ is tuple:
        for element in arg:
            _collect(element, found)


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    # None where the bytes are not those of one plain storage (sparse, subclasses, wrapped by functorch).
    if tensor.layout is not torch.strided or tensor.__class__ not in _PLAIN:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


_PLAIN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
