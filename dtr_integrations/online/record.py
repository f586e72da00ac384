"""Records the operator log of a real training step: what `dtr.replay` runs under a budget.

A `TorchDispatchMode` sees every operator, autograd's backward included. A name stands for the contents of one
storage; views cost nothing to make again and are not recorded. A name is released when its storage dies,
whoever held it last: a weak reference on the storage's own Python object says so, which torch keeps for as
long as the storage lives.

Not recorded: what an operator allocates and frees within itself, and randomness (a replay in the simulator
costs the same whatever it computes).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..dtr.oplog import Annotate, Call, Constant, Instruction, Mutate, Release

__all__ = ["modelled_cost", "record"]

Cost = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], int]

_FLOPS_PER_NS = 20
_BYTES_PER_NS = 8
_LAUNCH_NS = 2_000

# Write to arguments without saying so in their schema.
_UNDECLARED = {"aten::native_batch_norm": (3, 4), "aten::rrelu_with_noise": (1,)}


def record(step: Callable[[], Any], *, cost: Cost | None = None) -> list[Instruction]:
    """Run `step` once, for real, and return its log.

    Args:
        step: forward, loss and backward, with the optimizer's step if that is to be part of it. It runs with
            its own effects: gradients are there afterwards.
        cost: nanoseconds of an operator from (function, args, kwargs, result). None: measured.
            `modelled_cost` gives the same log on every machine.

    Whatever `step` reads and has not made itself is a constant of the log. Storages that live on afterwards
    (parameters, gradients, a loss that is kept) are still referenced at the log's end.
    """
    recorder = _Recorder(cost)
    with recorder:
        result = step()
    recorder.close()
    del result
    return recorder.log


def modelled_cost(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Nanoseconds by a fixed roofline: floating-point operations at 20 a nanosecond or bytes at 8, the
    greater, plus 2 µs."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
    moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors) // _BYTES_PER_NS
    packet = getattr(function, "overloadpacket", None)
    formula = flop_registry.get(packet)
    flops = formula(*args, **kwargs, out_val=result) // _FLOPS_PER_NS if formula else 0
    return _LAUNCH_NS + max(moved, int(flops))


class _Recorder(TorchDispatchMode):
    def __init__(self, cost: Cost | None) -> None:
        super().__init__()
        self.log: list[Instruction] = [Annotate("START")]
        self._cost = cost
        self._names: dict[int, str] = {}
        self._watches: dict[str, weakref.ref[torch.UntypedStorage]] = {}
        self._count = 0
        self._open = True

    def close(self) -> None:
        self._open = False
        self._watches.clear()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = _storages(tree_leaves((args, kwargs)))
        names = [self._name(storage) for storage in read]
        start = time.perf_counter_ns()
        result = function(*args, **kwargs)
        took = time.perf_counter_ns() - start
        made = [storage for storage in _storages(tree_leaves(result)) if storage._cdata not in self._names]
        written = [name for name in _written(function, args, kwargs, self._names) if name in names]
        if made or written:
            nanoseconds = self._cost(function, args, kwargs, result) if self._cost else took
            self._write(str(function.name()).removeprefix("aten::"), names, made, written, nanoseconds)
        return result

    def _write(
        self,
        name: str,
        args: list[str],
        made: list[torch.UntypedStorage],
        written: list[str],
        nanoseconds: int,
    ) -> None:
        if made:
            results = [self._new(storage) for storage in made]
            sizes = [storage.nbytes() for storage in made]
            self.log.append(Call(name, args, results, sizes, [-1] * len(made), nanoseconds))
            nanoseconds = 0
        if written:
            self.log.append(Mutate(name, args, [args.index(target) for target in written], nanoseconds))

    def _name(self, storage: torch.UntypedStorage) -> str:
        known = self._names.get(storage._cdata)
        if known is not None:
            return known
        name = self._new(storage)
        self.log.append(Constant(name, storage.nbytes()))
        return name

    def _new(self, storage: torch.UntypedStorage) -> str:
        name = f"x{self._count}"
        self._count += 1
        key = storage._cdata
        self._names[key] = name

        def dead(_: Any) -> None:
            if self._open and self._names.get(key) == name:
                del self._names[key]
                del self._watches[name]
                self.log.append(Release(name))

        self._watches[name] = weakref.ref(storage, dead)
        return name


def _storages(leaves: Iterable[Any]) -> list[torch.UntypedStorage]:
    # Strided tensors' storages, each once.
    found: dict[int, torch.UntypedStorage] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            storage = leaf.untyped_storage()
            found.setdefault(storage._cdata, storage)
    return list(found.values())


def _written(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: dict[int, str]
) -> list[str]:
    # Names of the storages that an operator writes to, in the order of its arguments, each once.
    schema = function._schema
    targets: list[Any] = []
    for index, argument in enumerate(schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or index in _UNDECLARED.get(schema.name, ()):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            targets.append(value)
    return list(dict.fromkeys(names[storage._cdata] for storage in _storages(tree_leaves(targets))))
