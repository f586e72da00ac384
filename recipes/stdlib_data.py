"""The source text of the running Python's standard library as a byte data set: real text, and always
there."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

# Not the library's own text: what was installed beside it, and its tests.
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib-dynload"}


def stdlib_text(limit_bytes: int = 4_000_000) -> bytes:
    """The first `limit_bytes` of the library's `.py` files, put together in the order of their paths.

    The same on every call with the same Python; another version has another text.
    """
    parts, total = [], 0
    for source in stdlib_sources():
        parts.append(source)
        total += len(source)
        if total >= limit_bytes:
            break
    return b"".join(parts)[:limit_bytes]


def stdlib_sources() -> Iterator[bytes]:
    """The library's `.py` files in the order of their paths, each as it is on disk."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if _SKIPPED.isdisjoint(path.relative_to(root).parts):
            yield path.read_bytes()


class ByteWindows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of `sequence` bytes, side by side, each with the bytes that follow it: two int64 tensors
    (sequence,)."""

    def __init__(self, text: bytes, sequence: int = 256) -> None:
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.sequence = sequence

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.sequence

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        window = self.data[index * self.sequence : (index + 1) * self.sequence + 1].long()
        return window[:-1], window[1:]


def stdlib_loader(*, batch: int = 8, sequence: int = 256, seed: int = 0) -> DataLoader:
    """Shuffled batches, in the same order for the same `seed` whatever else draws random numbers."""
    order = torch.Generator().manual_seed(seed)
    return DataLoader(
        ByteWindows(stdlib_text(), sequence), batch_size=batch, shuffle=True, drop_last=True, generator=order
    )
