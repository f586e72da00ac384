"""Bytes over time: every storage's birth and death on one clock, shared by compiled, eager and online
regions.

The clock is the event number. A ledger knows nothing of tensors: a storage is an int key, a kind is a word.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Lifetime:
    """One storage: its size, when it was born and when it died (−1: still alive), and what it was for."""

    size_bytes: int
    birth: int
    death: int = -1
    kind: str = "transient"
    region: int = -1  # index of the region (see `Ledger.mark`) in which it was born


@dataclass(slots=True)
class Mark:
    """A region's bounds on the ledger's clock, the live bytes at entry and exit, and the most in between."""

    name: str
    start: int
    entry_bytes: int
    peak_bytes: int
    end: int = -1
    exit_bytes: int = -1


@dataclass(slots=True)
class Ledger:
    """Counts bytes at each birth and death. Mutable: the one place where the dry run accumulates."""

    live_bytes: int = 0
    curve: list[int] = field(default_factory=list)  # live bytes after each event
    lifetimes: list[Lifetime] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    _current: dict[int, int] = field(default_factory=dict)  # key -> index of its live lifetime

    def __contains__(self, key: int) -> bool:
        return key in self._current

    def birth(self, key: int, size_bytes: int, kind: str = "transient") -> None:
        """A storage appears. A key that is alive already is the same storage: nothing happens."""
        if key in self._current:
            return
        self._current[key] = len(self.lifetimes)
        self.lifetimes.append(
            Lifetime(size_bytes=size_bytes, birth=len(self.curve), kind=kind, region=len(self.marks) - 1)
        )
        self._move(size_bytes)

    def death(self, key: int) -> None:
        """A storage is gone; its key may be used again by another."""
        life = self.lifetimes[self._current.pop(key)]
        life.death = len(self.curve)
        self._move(-life.size_bytes)

    def resize(self, key: int, size_bytes: int, kind: str) -> None:
        """A storage, alive or not, has this many bytes now and is of this kind; with none it is not alive."""
        if key in self._current and self.lifetimes[self._current[key]].size_bytes != size_bytes:
            self.death(key)
        if size_bytes:
            self.birth(key, size_bytes, kind)
            self.label(key, kind)

    def label(self, key: int, kind: str) -> None:
        """Say what a live storage is for (a gradient, a saved activation), once that is known."""
        if key in self._current:
            self.lifetimes[self._current[key]].kind = kind

    @property
    def now(self) -> int:
        """The clock: the next event's number."""
        return len(self.curve)

    def label_since(self, moment: int, kind: str, *, but: frozenset[int] = frozenset()) -> None:
        """Say what the transients are for that were born from `moment` on and are alive, `but` these keys."""
        for key, index in self._current.items():
            life = self.lifetimes[index]
            if life.birth >= moment and life.kind == "transient" and key not in but and key >= 0:
                life.kind = kind

    def kind_of(self, key: int) -> str:
        """What a live storage is for; the empty word when the key is not alive."""
        return self.lifetimes[self._current[key]].kind if key in self._current else ""

    def live_by_kind(self) -> dict[str, int]:
        """Bytes alive now, by kind."""
        held: dict[str, int] = {}
        for index in self._current.values():
            life = self.lifetimes[index]
            held[life.kind] = held.get(life.kind, 0) + life.size_bytes
        return held

    def mark(self, name: str) -> None:
        """The region before ends here and the region `name` begins."""
        self.close_mark()
        self.marks.append(
            Mark(name=name, start=len(self.curve), entry_bytes=self.live_bytes, peak_bytes=self.live_bytes)
        )

    def close_mark(self) -> None:
        """End the region that is open, if one is."""
        if self.marks and self.marks[-1].end < 0:
            self.marks[-1].end = len(self.curve)
            self.marks[-1].exit_bytes = self.live_bytes

    def restart(self) -> None:
        """Forget the history and keep what is alive: the next step is measured from here."""
        alive = {key: self.lifetimes[i] for key, i in self._current.items()}
        self.curve, self.marks, self.lifetimes = [self.live_bytes], [], []
        for key, life in alive.items():
            self._current[key] = len(self.lifetimes)
            self.lifetimes.append(Lifetime(size_bytes=life.size_bytes, birth=0, kind=life.kind))

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once since the (re)start."""
        return max(self.curve, default=self.live_bytes)

    def held_at_peak(self) -> dict[str, int]:
        """Bytes by kind at the first moment of the peak; the values add up to `peak_bytes`."""
        moment = self.curve.index(self.peak_bytes)
        held: dict[str, int] = {}
        for life in self.lifetimes:
            if life.birth <= moment and (life.death < 0 or life.death > moment):
                held[life.kind] = held.get(life.kind, 0) + life.size_bytes
        return held

    def _move(self, delta_bytes: int) -> None:
        self.live_bytes += delta_bytes
        self.curve.append(self.live_bytes)
        if self.marks and self.live_bytes > self.marks[-1].peak_bytes:
            self.marks[-1].peak_bytes = self.live_bytes
