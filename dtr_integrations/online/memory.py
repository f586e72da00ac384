"""Where the bytes of the cache's storages are: the driver that evicts and replays for real.

A *value* is the contents of one storage between two writes; `Cache` knows it as a storage of its own. Its
bytes are where

* the program reaches them (a tensor of its own, or one within autograd): a weak reference tells when that
  storage dies, and nothing that the program can reach is ever freed;
* autograd has saved them: it holds a `Handle`, and a `Cell` here holds the tensor. Evicting drops the cells'
  tensors, and so is allowed only where nobody else uses the storage;
* a replay has brought them back: held here, or by the cells.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict, deque

import torch

from ..dtr.cache import Cache
from ..dtr.values import Operator, Storage, Tensor
from .handles import Cell
from .nodes import Anchor, Node, geometry_of, same_dispatch, view_of

__all__ = ["Memory", "Slot", "Tally", "Value"]

_use_count = torch._C._storage_Use_Count


class Slot(weakref.ref):  # type: ignore[type-arg]
    """A real storage for as long as it lives.

    Attributes:
        key: its address.
        value: what is in it; None where nothing but its size matters, as for what a backward computes.
        size_bytes: where there is no value, what it occupies.
    """

    __slots__ = ("key", "size_bytes", "value")
    key: int
    value: Value | None
    size_bytes: int


class Value:
    """Where a value's bytes are.

    Attributes:
        tensor: the cache's.
        slot: its real storage; None while evicted.
        base: the runtime's own hold on that storage; None where the program or cells hold it.
        cells: what autograd has saved of it; while it is resident each holds a tensor on its storage.
        anchor: of a constant that nodes read.
        constant: cannot be computed again.
        inside: made within the scope, so that writing it anew gives it a lineage.
    """

    __slots__ = ("anchor", "base", "cells", "constant", "inside", "slot", "tensor")

    def __init__(self, tensor: Tensor, *, constant: bool, inside: bool) -> None:
        self.tensor = tensor
        self.slot: Slot | None = None
        self.base: torch.UntypedStorage | None = None
        self.cells: dict[Cell, None] | None = None
        self.anchor: weakref.ref[Anchor] | None = None
        self.constant = constant
        self.inside = inside
        tensor.storage.handle = self

    def keep(self, cell: Cell) -> None:
        """Autograd has saved a tensor on it."""
        if self.cells is None:
            self.cells = {}
        self.cells[cell] = None


class Tally:
    """What became of the values of one origin.

    Attributes:
        evictions, rematerialisations: counts.
        replay_ns: nanoseconds that the replays took.
    """

    __slots__ = ("evictions", "rematerialisations", "replay_ns")

    def __init__(self) -> None:
        self.evictions = self.rematerialisations = self.replay_ns = 0


class Memory:
    """A `dtr.cache.Driver`.

    Args:
        device_type: storages elsewhere are followed, and do not count.

    Attributes:
        cache: whose driver it is; set by the owner.
        slots: the real storages that are known, by their address.
        gone: what has died since `settle`: storages, and cells that autograd has dropped.
        saved: how many cells there are.
        tallies: by `Node.origin`.
    """

    def __init__(self, device_type: str) -> None:
        self.cache: Cache
        self.device_type = device_type
        self._one_memory = device_type == "cpu" and not torch.accelerator.is_available()
        self.slots: dict[int, Slot] = {}
        self.gone: deque[Slot | Cell] = deque()
        self.saved = 0
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self._evictions = 0  # as the cache counts them
        self._on_death = self._died

    # --- what the cache decides ---

    def compute(self, operator: Operator, *, replay: bool) -> None:
        """See `Driver`: only replays come here."""
        node: Node = operator.handle
        start = time.perf_counter_ns()
        found = node.run([self._bytes_of(arg) for arg in operator.args])
        tally = self.tallies[node.origin]
        tally.rematerialisations += 1
        tally.replay_ns += time.perf_counter_ns() - start
        for output, storage in zip(operator.outputs, found, strict=True):
            if not output.defined and not output.storage.banished:
                self._restore(output.storage.handle, storage)

    def evict(self, storage: Storage) -> None:
        """See `Driver`."""
        value: Value | None = storage.handle
        if value is None:
            return
        if self.cache.evictions != self._evictions:  # else nobody refers to it any more
            self._evictions = self.cache.evictions
            operator = value.tensor.operator
            assert operator is not None, "a constant was evicted"
            self.tallies[operator.handle.origin].evictions += 1
        slot, value.slot = value.slot, None
        if slot is not None:
            slot.value = None
            if self.slots.get(slot.key) is slot:
                del self.slots[slot.key]
        value.base = None
        for cell in list(value.cells or ()):
            tensor, cell.tensor = cell.tensor, None
            if tensor is None:
                continue
            if tensor._version == cell.version:
                cell.geometry = geometry_of(tensor)
            else:
                cell.is_stale = True
                assert value.cells is not None
                del value.cells[cell]

    def may_evict(self, storage: Storage) -> bool:
        """Whether nobody but the runtime holds the bytes."""
        value: Value = storage.handle
        cells = value.cells
        if value.base is not None:
            held, real = 1, value.base
        elif cells:
            tensor = next(iter(cells)).tensor
            assert tensor is not None
            held, real = 1, tensor.untyped_storage()
        else:
            return False
        # The storage's own Python object counts as one.
        return bool(_use_count(real._cdata) == held + (len(cells) if cells else 0))

    def _restore(self, value: Value, storage: torch.UntypedStorage) -> None:
        self.place(value, storage)
        if not value.cells:
            value.base = storage
            return
        with same_dispatch():
            for cell in value.cells:
                assert cell.geometry is not None
                cell.tensor = view_of(storage, cell.geometry)
                cell.version = cell.tensor._version

    def _bytes_of(self, tensor: Tensor) -> torch.UntypedStorage:
        value: Value = tensor.storage.handle
        if value.base is not None:
            return value.base
        anchor = value.anchor() if value.anchor is not None else None
        if anchor is not None and anchor.version_now != anchor.version:
            raise RuntimeError(
                "online rematerialisation: a tensor that is needed to compute an evicted value again was "
                "modified in place outside of the scope (shape "
                f"{list(anchor.tensor.shape)}, version {anchor.version_now}, expected {anchor.version}). "
                "Run the backward before modifying it, or put the modification into the scope."
            )
        assert value.slot is not None
        storage = value.slot()
        assert storage is not None
        storage._fix_weakref()
        return storage

    # --- values and storages ---

    def bytes_in(self, storage: torch.UntypedStorage) -> int:
        """What `storage` counts."""
        counts = self._one_memory or storage.device.type == self.device_type
        return storage.nbytes() if counts else 0

    def value_of(self, storage: torch.UntypedStorage) -> Value:
        """The value in `storage`; one that is not known yet is a constant from outside.

        Raises:
            OutOfBudget: it does not fit.
        """
        slot = self.slots.get(storage._cdata)
        if slot is not None and slot.value is not None:
            return slot.value
        if slot is not None:
            self.cache.vacate(slot.size_bytes)
            slot.size_bytes = 0
        value = Value(self.cache.constant(self.bytes_in(storage)), constant=True, inside=slot is not None)
        if slot is not None:
            slot.value, value.slot = value, slot
        else:
            self.place(value, storage)
        return value

    def place(self, value: Value, storage: torch.UntypedStorage) -> None:
        """`value` is in `storage` from now on."""
        slot = Slot(storage, self._on_death)
        slot.key = key = storage._cdata
        slot.value = value
        slot.size_bytes = 0
        value.slot = slot
        self.slots[key] = slot

    def place_plain(self, size_bytes: int, storage: torch.UntypedStorage) -> None:
        """`storage` is in use; `Cache.occupy` has counted it."""
        slot = Slot(storage, self._on_death)
        slot.key = key = storage._cdata
        slot.value = None
        slot.size_bytes = size_bytes
        self.slots[key] = slot

    def attach(self, value: Value, tensor: Tensor, *, constant: bool) -> None:
        """`value` goes on as the cache's `tensor`, on the same bytes."""
        value.tensor = tensor
        value.constant = constant
        tensor.storage.handle = value
        if value.cells:
            self.cache.expose(tensor)

    def detach(self, value: Value) -> None:
        """The cache lets its tensor go; the bytes stay. `attach` follows."""
        old = value.tensor
        Value(old, constant=value.constant, inside=True)
        self.cache.release(old)

    def copy_before_write(self, value: Value) -> None:
        """Keep what a constant holds now, for the nodes that may read it again."""
        size_bytes = value.tensor.storage.size_bytes
        self.cache.make_room(size_bytes, "a copy of a constant before it is written to")
        assert value.slot is not None
        storage = value.slot()
        assert storage is not None
        storage._fix_weakref()
        old = Value(value.tensor, constant=True, inside=value.inside)
        old.base = storage.clone()
        value.anchor = None
        self.attach(value, self.cache.constant(size_bytes), constant=True)
        self.cache.release(old.tensor)

    def anchor(self, value: Value, tensor: torch.Tensor) -> Anchor:
        """What a node that reads the constant `value` holds on to."""
        anchor = value.anchor() if value.anchor is not None else None
        if anchor is None:
            anchor = Anchor(tensor)
            value.anchor = weakref.ref(anchor)
        return anchor

    # --- deaths ---

    def _died(self, slot: Slot) -> None:
        # Called wherever a storage dies, in the middle of anything: note it and leave.
        if self.slots.get(slot.key) is slot:
            del self.slots[slot.key]
        self.gone.append(slot)

    def settle(self) -> None:
        """Tell the cache of what has died."""
        gone = self.gone
        while gone:
            dead = gone.popleft()
            value = dead.value
            dead.value = None
            if value is None:
                if isinstance(dead, Slot) and dead.size_bytes:
                    self.cache.vacate(dead.size_bytes)
                continue
            if isinstance(dead, Slot):
                value.slot = None
                self.cache.release(value.tensor)
                continue
            self.saved -= 1
            cells = value.cells
            if cells is not None:
                cells.pop(dead, None)
            if not cells and value.slot is None and value.tensor.references:
                self.cache.release(value.tensor)

    def cut(self) -> None:
        """Make constants of all that is left. Nothing is saved any more, so nobody needs its lineage."""
        values = [slot.value for slot in list(self.slots.values())]
        ours = [v for v in values if v is not None and v.tensor.references and not v.constant]
        sizes = [value.tensor.storage.size_bytes for value in ours]
        for value in ours:
            self.detach(value)
        for value, size_bytes in zip(ours, sizes, strict=True):
            self.attach(value, self.cache.constant(size_bytes), constant=True)
