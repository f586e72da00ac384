"""A log with its names resolved: the steps that a cache is taken through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ..errors import OperatorLogError
from .oplog import Annotate, Call, Constant, Copy, CopyFrom, Instruction, Mutate, Release

# Tensors are numbered in the order in which they come to be.


class Make(NamedTuple):
    """A constant of so many bytes."""

    size_bytes: int


class Run(NamedTuple):
    """A pure operator; see `Cache.call`. `aliases` is None where no output is a view."""

    name: str
    args: tuple[int, ...]
    sizes: tuple[int, ...]
    aliases: tuple[int, ...] | None
    cost: int


class Write(NamedTuple):
    """An operator that writes to arguments; see `Cache.mutate`."""

    name: str
    args: tuple[int, ...]
    indices: tuple[int, ...]
    sizes: tuple[int, ...]
    cost: int


class Hold(NamedTuple):
    """One more reference to a tensor."""

    tensor: int


class Drop(NamedTuple):
    """One reference less."""

    tensor: int


Step: TypeAlias = Make | Run | Write | Hold | Drop


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a log says, ready to replay.

    Attributes:
        steps: in order.
        outputs: tensors that are still referenced at the end; all must be resident together then.
        operators: how many calls and mutations there are.
        compute_ns: their nanoseconds.
        peak_bytes: the peak without a budget, everything freed at its last release.
        constant_bytes: the constants' part, had none been released.
        names: of each tensor, for messages.
    """

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    operators: int
    compute_ns: int
    peak_bytes: int
    constant_bytes: int
    names: tuple[str, ...]

    def sizes(self) -> Iterator[tuple[int, ...]]:
        """Bytes of what each operator makes."""
        return (step.sizes for step in self.steps if isinstance(step, (Run, Write)))


def resolve(log: Iterable[Instruction]) -> Program:
    """Number the tensors of `log` and follow its names.

    Raises:
        OperatorLogError: a name is used that was never given, or given twice.
    """
    return _Resolver(_after_start(list(log))).program()


def _after_start(log: list[Instruction]) -> list[Instruction]:
    start = Annotate("START")
    return log[log.index(start) + 1 :] if start in log else log


class _Resolver:
    def __init__(self, log: list[Instruction]) -> None:
        self._log = log
        self._steps: list[Step] = []
        self._by_name: dict[str, int] = {}
        self._names: list[str] = []
        # Of each tensor: its storage, and the references to it. Of each storage: bytes and references.
        self._storage: list[int] = []
        self._references: list[int] = []
        self._bytes: list[int] = []
        self._uses: list[int] = []
        self._held = self._peak = self._constants = self._compute = self._operators = 0

    def program(self) -> Program:
        for instruction in self._log:
            try:
                self._take(instruction)
            except KeyError as error:
                raise OperatorLogError(
                    f"operator log: {instruction} uses {error}, which has no tensor"
                ) from None
        outputs = dict.fromkeys(tensor for tensor in self._by_name.values() if self._references[tensor] > 0)
        return Program(
            steps=tuple(self._steps),
            outputs=tuple(outputs),
            operators=self._operators,
            compute_ns=self._compute,
            peak_bytes=self._peak,
            constant_bytes=self._constants,
            names=tuple(self._names),
        )

    def _take(self, instruction: Instruction) -> None:
        by_name = self._by_name
        match instruction:
            case Call(name, args, results, sizes, aliases, time):
                tensors = tuple([by_name[arg] for arg in args])
                own = tuple([s if a == -1 else 0 for s, a in zip(sizes, aliases, strict=True)])
                views = None if set(aliases) == {-1} else tuple(aliases)
                self._run(time, sum(own))
                for result, size_bytes, alias in zip(results, own, aliases, strict=True):
                    self._new(result, size_bytes, None if alias == -1 else self._storage[tensors[alias]])
                self._steps.append(Run(name, tensors, own, views, time))
            case Release(name):
                if name in by_name:
                    self._drop(by_name[name])
            case Copy(dst, src):
                tensor = by_name[src]
                self._name(dst, tensor)
                self._hold(tensor)
            case Constant(name, size_bytes):
                self._charge(size_bytes)
                self._constants += size_bytes
                self._new(name, size_bytes, None)
                self._steps.append(Make(size_bytes))
            case Mutate(name, args, mutated, time):
                tensors = tuple([by_name[arg] for arg in args])
                own = tuple([self._bytes[self._storage[tensors[i]]] for i in mutated])
                self._run(time, sum(own))
                for index, size_bytes in zip(mutated, own, strict=True):
                    by_name.pop(args[index])
                    self._new(args[index], size_bytes, None)
                self._steps.append(Write(name, tensors, tuple(mutated), own, time))
                for index in mutated:
                    self._unhold(tensors[index])
            case CopyFrom(dst, src):
                old, new = by_name[dst], by_name[src]
                by_name[dst] = new
                self._hold(new)  # first: they may be the same
                self._drop(old)
            case Annotate():
                pass

    def _new(self, name: str, size_bytes: int, storage: int | None) -> None:
        if storage is None:
            storage = len(self._bytes)
            self._bytes.append(size_bytes)
            self._uses.append(0)
        self._name(name, len(self._storage))
        self._names.append(name)
        self._storage.append(storage)
        self._references.append(1)
        self._uses[storage] += 1

    def _name(self, name: str, tensor: int) -> None:
        if name in self._by_name:
            raise OperatorLogError(f"operator log: the name {name} is given to a second tensor")
        self._by_name[name] = tensor

    def _run(self, time: int, size_bytes: int) -> None:
        self._operators += 1
        self._compute += time
        self._charge(size_bytes)

    def _charge(self, size_bytes: int) -> None:
        self._held += size_bytes
        self._peak = max(self._peak, self._held)

    def _hold(self, tensor: int) -> None:
        self._references[tensor] += 1
        self._uses[self._storage[tensor]] += 1
        self._steps.append(Hold(tensor))

    def _drop(self, tensor: int) -> None:
        self._unhold(tensor)
        self._steps.append(Drop(tensor))

    def _unhold(self, tensor: int) -> None:
        if not self._references[tensor]:
            raise OperatorLogError(f"operator log: {self._names[tensor]} is released once too often")
        self._references[tensor] -= 1
        storage = self._storage[tensor]
        self._uses[storage] -= 1
        if not self._uses[storage]:
            self._held -= self._bytes[storage]
