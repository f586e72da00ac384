"""Bytes over time from a record of allocator events, kept by address. Knows no torch.

Only blocks born in the record count. A death at an address where nothing was born is somebody else's: the
block is older than the record, and the size that the recorder gives for it may be that of an earlier tenant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

__all__ = [
    "MARK_PREFIX",
    "AddressLedger",
    "Alloc",
    "Event",
    "Free",
    "Mark",
    "downsampled",
    "live_bytes_over_time",
]


# Begins the name of every mark, so that a recorder finds ours among all the operators.
MARK_PREFIX = "dtr_integrations.measure:"


class Alloc(NamedTuple):
    """A block of `n_bytes` is born at `address`."""

    time_ns: int
    address: int
    n_bytes: int


class Free(NamedTuple):
    """The block at `address` dies."""

    time_ns: int
    address: int


class Mark(NamedTuple):
    """A name that we put into the record ourselves."""

    time_ns: int
    name: str


Event: TypeAlias = Alloc | Free | Mark


class AddressLedger:
    """The blocks alive, by address."""

    def __init__(self, initial_bytes: int = 0) -> None:
        self.live_bytes = initial_bytes
        self.foreign_frees = 0
        self.unseen_frees = 0
        self._n_bytes_at: dict[int, int] = {}

    def alloc(self, address: int, n_bytes: int) -> None:
        """Notes a birth. A tenant that the address still has must have died unseen."""
        if address in self._n_bytes_at:
            self.unseen_frees += 1
            self.live_bytes -= self._n_bytes_at[address]
        self._n_bytes_at[address] = n_bytes
        self.live_bytes += n_bytes

    def free(self, address: int) -> None:
        """Notes a death; one of a block that was not born here changes nothing."""
        n_bytes = self._n_bytes_at.pop(address, None)
        if n_bytes is None:
            self.foreign_frees += 1
        else:
            self.live_bytes -= n_bytes


def live_bytes_over_time(
    events: Iterable[Event], ledger: AddressLedger, bytes_dying_at: Mapping[str, int]
) -> Iterator[tuple[int, int]]:
    """Walks `events` through `ledger` and yields (time_ns, live bytes) after each birth or death.

    Args:
        events: in order of time.
        ledger: starts with the bytes already alive; is left in its state at the end.
        bytes_dying_at: name of a mark -> bytes of the older block whose death it stands for.
    """
    for event in events:
        if isinstance(event, Alloc):
            ledger.alloc(event.address, event.n_bytes)
        elif isinstance(event, Free):
            ledger.free(event.address)
        elif event.name in bytes_dying_at:
            ledger.live_bytes -= bytes_dying_at[event.name]
        else:
            continue
        yield event.time_ns, ledger.live_bytes


def downsampled(points: Sequence[tuple[int, int]], limit: int) -> tuple[tuple[int, int], ...]:
    """At most `limit` of the (time_ns, bytes) points: the highest of each run of neighbours."""
    if limit <= 0:
        return ()
    run = max(1, -(-len(points) // limit))
    return tuple(
        max(points[start : start + run], key=lambda point: point[1]) for start in range(0, len(points), run)
    )
