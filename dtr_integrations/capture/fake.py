"""A world of fake tensors whose every storage is counted from birth to death.

A fake tensor has a shape, a dtype and a (meta) storage but no data: creating, viewing and dropping one is
what the real program does to the allocator, at no cost. `StorageCounter` writes each storage into a
`core.ledger.Ledger`: born when an op first returns it, dead when nothing holds it any more (a weak reference
on the storage, which outlives the Python object as long as C++ holds the storage, e.g. in autograd's saved
tensors).
"""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from .._compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    gathers_told,
)
from .._plain_tensors import plain_tensors
from .._randomness import preserved_randomness
from ..core.ledger import Ledger
from .scratch import Scratch
from .shards import FSDP_GATHERS, Shards
from .stand_ins import StandIns
from .world import World

_aten = torch.ops.aten
_DETACHING = (_aten.detach.default, _aten.alias.default)
_SCRATCH_KEY = -1  # no storage has this address, nor any below it
_NUMBER_BYTES = 8


class StorageCounter:
    """A `FakeTensorMode` (`mode`) that reports storages to a ledger.

    Only what the outermost op returns counts: what a decomposition makes on the way to a fake result exists
    in no real kernel. The mode's `dispatch` is wrapped on the instance: higher-order ops look their rule up
    by the mode's exact type, so a subclass would have none.
    """

    def __init__(self, ledger: Ledger, scratch: Scratch) -> None:
        self.ledger = ledger
        self.scratch = scratch
        self.counting = True
        self.making = "transient"  # the kind of what ops make now
        self._depth = 0
        self._kept_numbers = 0
        # (the operator, whether the shape of its result follows from data): told of each read of data.
        self.on_data: Callable[[str, bool], None] = lambda operator, shape: None
        self.stand_ins = StandIns()
        self._taken_in: Any = WeakIdKeyDictionary()
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._holders: dict[int, list[weakref.ref[Any]]] = {}
        self.mode = FakeTensorMode(allow_non_fake_inputs=False)
        self._inner = self.mode.dispatch
        self.mode.dispatch = self._dispatch
        # Dynamo skips every frame while a dispatch mode is active unless the mode says that it does not mind.
        self.mode.ignore_compile_internals = lambda: True

    def _dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._depth:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._take_in, (args, kwargs))
        self._depth += 1
        try:
            out = self._inner(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            self.on_data(str(func), isinstance(error, DynamicOutputShapeException))
            if func is torch.ops.aten._local_scalar_dense.default:
                return self.stand_ins.number(args[0])
            if func.namespace != "aten":
                raise
            out = self._data_dependent(func, args, kwargs)
        except RuntimeError as error:
            # Nobody wrote a fake implementation for a custom op, or it refuses what the kernel takes.
            if self._depth > 1 or not isinstance(func, torch._ops.OpOverload):
                raise
            try:
                out = self._data_dependent(func, args, kwargs)
            except Exception:
                raise error from None
        finally:
            self._depth -= 1
        if out is NotImplemented:  # the operands' own class knows what to do (DTensor)
            return out
        if isinstance(func, torch._ops.HigherOrderOperator):
            # The replay of a checkpointed attention kernel hands out the generator's real state.
            out = pytree.tree_map_only(torch.Tensor, self._faked, out)
        if not self._depth:
            self.stand_ins.follow(func, args, kwargs, out)
        if self.counting and not self._depth:
            out = self._count(func, args, kwargs, out)
            self._count_number(func, args, out)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """Write down what an op holds. Returns its result, in which a tensor whose length only the real
        kernel knows has that length."""
        packet = getattr(func, "overloadpacket", func)  # a higher-order op has no overloads
        tried = self.scratch.tried(packet.__name__, func, args, kwargs)
        leaves, spec = pytree.tree_flatten(out)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, FakeTensor):
                shape, size_bytes = (tried.results[i] if i < len(tried.results) else None) or (leaf.shape, 0)
                if not leaf.numel() and size_bytes:
                    with self.mode:
                        leaves[i] = leaf = leaf.new_empty(shape)
                self.watch(leaf, least_bytes=size_bytes)
                self._follow(func, leaf)
        self.flash(tried.scratch_bytes)
        return pytree.tree_unflatten(leaves, spec) if tried.results else out

    def _count_number(self, func: Any, args: Any, out: Any) -> None:
        """A number among the operands (`x * 2`; a mean's divisor) is a tensor to the kernel: a float64, and a
        copy of it in the result's dtype. A float64 that autograd keeps counts to the end of the step."""
        if not isinstance(func, torch._ops.OpOverload):  # a higher-order op has no tags and no kernel
            return
        pointwise = torch.Tag.pointwise in func.tags and any(isinstance(arg, (int, float)) for arg in args)
        if not (pointwise or func.overloadpacket is _aten.mean):
            return
        if isinstance(out, FakeTensor) and out.device.type == "cpu":
            kept = func.overloadpacket in (_aten.mul, _aten.div) and torch.is_grad_enabled()
            if kept and any(isinstance(arg, FakeTensor) and arg.requires_grad for arg in args):
                self._kept_numbers += 1
                self.ledger.birth(_SCRATCH_KEY - self._kept_numbers, _NUMBER_BYTES)
            self.flash(_NUMBER_BYTES + out.element_size())

    def forget_numbers(self) -> None:
        """A step is over: no autograd graph holds its numbers any more."""
        for number in range(1, self._kept_numbers + 1):
            self.ledger.death(_SCRATCH_KEY - number)
        self._kept_numbers = 0

    def _data_dependent(self, func: Any, args: Any, kwargs: Any) -> Any:
        real, known = self.stand_ins.result(func, args, kwargs)

        def fake(value: torch.Tensor) -> torch.Tensor:
            out = self.mode.from_tensor(value, static_shapes=True)
            if known:
                self.stand_ins.know(out, value)
            return out

        return pytree.tree_map_only(torch.Tensor, fake, real)

    def _take_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake twin of a real tensor that comes from outside of torch (`torch.from_numpy`); anything that
        may get a gradient is not taken in, so that a step over the real model is refused."""
        if type(tensor) is not torch.Tensor or tensor.requires_grad or tensor.device.type == "meta":
            return tensor
        if tensor not in self._taken_in:
            twin = self.mode.from_tensor(tensor, static_shapes=True)
            self.stand_ins.know(twin, tensor)
            self._taken_in[tensor] = twin
        return self._taken_in[tensor]

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor)

    def flash(self, size_bytes: int) -> None:
        """Bytes that come and go within one op."""
        if size_bytes:
            self.ledger.birth(_SCRATCH_KEY, size_bytes)
            self.ledger.death(_SCRATCH_KEY)

    def watch(self, tensor: torch.Tensor, kind: str = "", *, least_bytes: int = 0) -> None:
        """Count the tensor's storage from now until it dies, as `least_bytes` if it seems smaller."""
        for part in plain_tensors(tensor):
            self._watch(part, kind, least_bytes)

    def _watch(self, tensor: torch.Tensor, kind: str, least_bytes: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._watched:
            return
        ledger, watched = self.ledger, self._watched

        def died(_: object) -> None:
            del watched[key]
            self._holders.pop(key, None)
            if key in ledger:  # else it was resized to nothing before
                ledger.death(key)

        watched[key] = weakref.ref(storage, died)
        ledger.birth(key, max(storage.nbytes(), least_bytes), kind or self.making)

    def gathered(self, tensor: torch.Tensor) -> None:
        """The storage of a flat tensor was resized, to hold gathered parameters or nothing."""
        storage = tensor.untyped_storage()
        self.watch(tensor)
        self.ledger.resize(storage._cdata, storage.nbytes(), FSDP_GATHERS)

    def holders(self, tensor: torch.Tensor) -> list[weakref.ref[Any]]:
        """The tensors through which the program holds the storage: this one, and views made of it from now
        on. Autograd detaches what it keeps, so detached ones do not count."""
        return self._holders.setdefault(tensor.untyped_storage()._cdata, [weakref.ref(tensor)])

    def _follow(self, func: Any, result: torch.Tensor) -> None:
        if func in _DETACHING or result.layout is torch.sparse_coo or not self._holders:
            return
        holders = self._holders.get(result.untyped_storage()._cdata)
        if holders is not None:
            holders.append(weakref.ref(result))

    def label(self, tensor: torch.Tensor, kind: str) -> None:
        """Say what a tensor's storage is for; start counting it if it was not."""
        self.watch(tensor, kind)
        for part in plain_tensors(tensor):
            self.ledger.label(part.untyped_storage()._cdata, kind)


class FakeWorld(World):
    """Fake twins of real objects, all in one mode and one ledger."""

    def __init__(self, scratch: Scratch | None = None) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.counter = StorageCounter(self.ledger, scratch or Scratch(None))
        self.mode = self.counter.mode

    def copy(self, thing: Any, *, shared: tuple[Any, ...] = ()) -> Any:
        """See `World.copy`; every tensor of the copy is fake."""
        twin = super().copy(thing, shared=shared)
        for real in self._memo.get(id(self._memo), ()):  # what deepcopy has copied
            copied = self._memo.get(id(real))
            if isinstance(real, torch.Tensor) and isinstance(copied, FakeTensor):
                self.counter.stand_ins.know(copied, real)
        return twin

    def _sharded(self, module: nn.Module, shards: Shards) -> nn.Module:
        twin = shards.copied(module, self, self._memo)
        with self.mode:
            shards.shard(module, self._memo)
        return twin

    def place(self, thing: Any) -> None:
        """Tensors of `thing` (a module or a pytree) on the meta device get twins on the CPU: a model that was
        never built is planned as if it had been."""
        leaves = (
            [*thing.parameters(), *thing.buffers()]
            if isinstance(thing, nn.Module)
            else pytree.tree_leaves(thing)
        )
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta" and id(leaf) not in self._memo:
                with self.mode:
                    twin = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype)
                    if isinstance(leaf, nn.Parameter):
                        twin = nn.Parameter(twin, requires_grad=leaf.requires_grad)
                self._memo[id(leaf)] = twin

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """See `World.optimizer`."""
        twin = super().optimizer(optimizer)
        with self.mode:
            for state in twin.state.values():
                for name, value in state.items():
                    # A step counter is read as a number (`.item()`): a fake one must know its value.
                    if isinstance(value, torch.Tensor) and value.ndim == 0 and name == "step":
                        state[name] = torch.tensor(0.0, dtype=value.dtype)
        return twin

    def empty(
        self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """See `World.empty`."""
        with self.mode:
            return torch.empty_strided(size, stride, dtype=dtype, device=device)

    @contextlib.contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """See `World.making`."""
        before, self.counter.making = self.counter.making, kind
        try:
            yield
        finally:
            self.counter.making = before

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        with FakeCopyMode(self.mode):
            yield

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Run code in this world. The random state of Python, numpy and torch is put back at the end."""
        stand_ins = self.counter.stand_ins

        def numpy(tensor: Any, *, force: bool = False) -> Any:
            with _disable_current_modes():
                return stand_ins.real(tensor).contiguous().clone().numpy()

        with (
            preserved_randomness(),
            mock.patch.object(FakeTensor, "numpy", numpy, create=True),
            gathers_told(self.counter.gathered),
            self.mode,
        ):
            yield


def wind_to_medians() -> None:
    """Wind the generators of Python and numpy to where the next 312 draws are medians (`random() == 0.5`).

    A branch taken one time in ten is then not taken, and every run of the step draws the same numbers. It is
    a state of the Mersenne twister like any other: the draws after those are ordinary ones.
    """
    word = _untempered(1 << 31)
    random.setstate((3, (word,) * 624 + (0,), None))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(("MT19937", [word] * 624, 0, 0, 0.0))


def _untempered(output: int) -> int:
    """The word of the twister's state that comes out as `output` (Matsumoto and Nishimura 1998, table II)."""
    word = output ^ output >> 18
    word ^= word << 15 & 0xEFC60000
    shifted = word
    for _ in range(4):
        shifted = word ^ shifted << 7 & 0x9D2C5680
    word = shifted & 0xFFFFFFFF
    return word ^ word >> 11 ^ word >> 22
