"""The operator log: JSON lines that the DTR paper's authors' prototype writes, read and written.

| line | meaning |
|---|---|
| ``ANNOTATE{ANNOTATION}`` | ``START``: what precedes it does not count; ``BACKWARD``: backward begins |
| ``CONSTANT{NAME}``, ``MEMORY{NAME, MEMORY}`` | a tensor from outside, and its bytes |
| ``CALL{NAME, ARGS, RESULT, TIME}`` | an operator, its nanoseconds; then for each result, in order: |
| ``MEMORY{NAME, MEMORY}``, ``ALIAS{NAME, ALIAS}`` | its bytes; the argument that it is a view of, or -1 |
| ``MUTATE{NAME, ARGS, MUTATE, TIME}`` | an operator that writes to those of its arguments |
| ``COPY{DST, SRC}`` | a second name for a tensor |
| ``COPY_FROM{DST, SRC}`` | the name DST is given up and names SRC's tensor |
| ``RELEASE{NAME}`` | the name is given up |

Numbers are strings, but for MUTATE's indices. A file may be gzipped.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from os import PathLike
from typing import Any, NamedTuple, TypeAlias

from ..errors import OperatorLogError


class Annotate(NamedTuple):
    """A mark: "START" or "BACKWARD"."""

    annotation: str


class Constant(NamedTuple):
    """A tensor from outside, of so many bytes."""

    name: str
    size_bytes: int


class Call(NamedTuple):
    """A pure operator. `sizes` in bytes; `aliases`: index into `args`, or -1 for a tensor of its own
    bytes."""

    name: str
    args: list[str]
    results: list[str]
    sizes: list[int]
    aliases: list[int]
    time: int


class Mutate(NamedTuple):
    """An operator that writes to ``args[i]`` for i in `mutated`."""

    name: str
    args: list[str]
    mutated: list[int]
    time: int


class Copy(NamedTuple):
    """`dst` becomes a second name of `src`'s tensor."""

    dst: str
    src: str


class CopyFrom(NamedTuple):
    """`dst` lets its tensor go and becomes a second name of `src`'s."""

    dst: str
    src: str


class Release(NamedTuple):
    """`name` is given up. A name that was never given is ignored."""

    name: str


Instruction: TypeAlias = Annotate | Constant | Call | Mutate | Copy | CopyFrom | Release
Path: TypeAlias = "str | PathLike[str]"


def read_log(path: Path) -> list[Instruction]:
    """The instructions of a log file, plain or gzipped.

    Raises:
        OperatorLogError: a line that is not in the format; the message has its number.
        OSError: no such file.
    """
    with open(path, "rb") as file:
        data = file.read()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    return parse_log(data.decode().splitlines())


def parse_log(lines: Iterable[str]) -> list[Instruction]:
    """The instructions that `lines` hold. See `read_log`."""
    source = _Lines(lines)
    instructions: list[Instruction] = []
    for record in source:
        try:
            instructions.append(_instruction(record, source))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, OperatorLogError):
                raise
            raise source.wrong(f"{type(error).__name__}: {error}") from error
    return instructions


def write_log(path: Path, instructions: Iterable[Instruction]) -> None:
    """Write a log that `read_log` reads back; gzipped, and the same bytes each time, if `path` ends in
    .gz."""
    data = "".join(line + "\n" for line in format_log(instructions)).encode()
    if str(path).endswith(".gz"):
        data = gzip.compress(data, mtime=0)
    with open(path, "wb") as file:
        file.write(data)


def format_log(instructions: Iterable[Instruction]) -> Iterator[str]:
    """The lines of a log, without line ends."""
    for instruction in instructions:
        for record in _records(instruction):
            yield json.dumps(record, separators=(",", ":"))


class _Lines:
    # The records of a log, with the number of the line that was read last.
    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = list(lines)
        self._next = 0
        self._records = self._all()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self._next < len(self._records):
            yield self.take()

    def take(self) -> dict[str, Any]:
        if self._next >= len(self._records):
            raise OperatorLogError("operator log: the file ends where a MEMORY or ALIAS line was expected")
        self._next += 1
        return self._records[self._next - 1]

    def expect(self, instruction: str, name: str) -> dict[str, Any]:
        record = self.take()
        if record.get("INSTRUCTION") != instruction or record.get("NAME") != name:
            raise self.wrong(f"expected the {instruction} line of {name}")
        return record

    def wrong(self, why: str) -> OperatorLogError:
        line = self._lines[self._next - 1].strip()
        return OperatorLogError(f"operator log, line {self._next}: {why}; got {line[:120]}")

    def _all(self) -> list[dict[str, Any]]:
        # One call of the decoder for the whole file: a call per line takes three times as long.
        self._lines = [line for line in self._lines if line.strip()]
        try:
            records = json.loads("[" + ",".join(self._lines) + "]")
            if len(records) == len(self._lines):
                return records  # type: ignore[no-any-return]
        except ValueError:
            pass
        records = []
        for number, line in enumerate(self._lines):
            self._next = number + 1
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise self.wrong(f"not JSON ({error})") from error
        self._next = 0
        return records


def _instruction(record: dict[str, Any], source: _Lines) -> Instruction:
    kind = record["INSTRUCTION"]
    if kind == "CALL":
        results = record["RESULT"]
        sizes, aliases = [], []
        for result in results:
            sizes.append(int(source.expect("MEMORY", result)["MEMORY"]))
            aliases.append(int(source.expect("ALIAS", result)["ALIAS"]))
        return Call(record["NAME"], record["ARGS"], results, sizes, aliases, int(record["TIME"]))
    if kind == "RELEASE":
        return Release(record["NAME"])
    if kind == "COPY":
        return Copy(record["DST"], record["SRC"])
    if kind == "CONSTANT":
        name = record["NAME"]
        return Constant(name, int(source.expect("MEMORY", name)["MEMORY"]))
    if kind == "MUTATE":
        return Mutate(record["NAME"], record["ARGS"], record["MUTATE"], int(record["TIME"]))
    if kind == "COPY_FROM":
        return CopyFrom(record["DST"], record["SRC"])
    if kind == "ANNOTATE":
        return Annotate(record["ANNOTATION"])
    raise source.wrong(f"unknown instruction {kind!r}")


def _records(instruction: Instruction) -> list[dict[str, Any]]:
    match instruction:
        case Annotate(annotation):
            return [{"INSTRUCTION": "ANNOTATE", "ANNOTATION": annotation}]
        case Constant(name, size_bytes):
            return [{"INSTRUCTION": "CONSTANT", "NAME": name}, _memory(name, size_bytes)]
        case Call(name, args, results, sizes, aliases, time):
            call = {"INSTRUCTION": "CALL", "NAME": name, "ARGS": args, "RESULT": results, "TIME": str(time)}
            records: list[dict[str, Any]] = [call]
            for result, size_bytes, alias in zip(results, sizes, aliases, strict=True):
                records.append(_memory(result, size_bytes))
                records.append({"INSTRUCTION": "ALIAS", "NAME": result, "ALIAS": str(alias)})
            return records
        case Mutate(name, args, mutated, time):
            return [
                {"INSTRUCTION": "MUTATE", "NAME": name, "ARGS": args, "MUTATE": mutated, "TIME": str(time)}
            ]
        case Copy(dst, src):
            return [{"INSTRUCTION": "COPY", "DST": dst, "SRC": src}]
        case CopyFrom(dst, src):
            return [{"INSTRUCTION": "COPY_FROM", "DST": dst, "SRC": src}]
        case Release(name):
            return [{"INSTRUCTION": "RELEASE", "NAME": name}]


def _memory(name: str, size_bytes: int) -> dict[str, Any]:
    return {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": str(size_bytes)}
