"""Do the ranks of one run begin together, or not at all? Agreed over the process group's store.

No collective takes part: a rank that cannot plan must not leave the others in one. While it plans and
compiles, each rank's heartbeat (a thread) writes a number that grows, so that slow is not taken for dead;
rank 0 listens to all, and all listen to rank 0. Whoever cannot go on, or finds a rank silent, writes that
down once for everybody, and all raise the same error.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .._compat import default_store
from ..errors import ConfigError, RankFailed

__all__ = ["Agreement", "Limits", "agreement_for", "place_in_group"]

_TIMEOUT = "DTR_RANK_TIMEOUT"  # in the environment: `Limits.silent_seconds`


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long is waited, in seconds.

    Attributes:
        silent_seconds: for a sign of life from a rank that has given one before.
        begin_seconds: for the first one, from when rank 0 begins.
        finish_seconds: for a rank that is alive to be done with one stage.
        read_seconds: by a rank that fails, for the others to have read why.
        beat_seconds: between two signs of life.
    """

    silent_seconds: float = 45.0
    begin_seconds: float = 600.0
    finish_seconds: float = 3600.0
    read_seconds: float = 10.0
    beat_seconds: float = 1.0

    @classmethod
    def from_environment(cls) -> Limits:
        """The defaults, or `silent_seconds` from the variable `DTR_RANK_TIMEOUT`. Raises `ConfigError`."""
        text = os.environ.get(_TIMEOUT)
        if text is None:
            return cls()
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if not seconds > 0:
            raise ConfigError(f"{_TIMEOUT}={text!r} is no number of seconds; write for example {_TIMEOUT}=45")
        return cls(silent_seconds=seconds, beat_seconds=min(cls.beat_seconds, seconds / 5))


def place_in_group() -> tuple[int, int]:
    """(rank, number of ranks) of this process in the default process group; (0, 1) where there is none."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def agreement_for(rank: int, world_size: int) -> Agreement | None:
    """The agreement of the next session of every rank; None for a single rank, or without a process group.

    The ranks of a group make their sessions in the same order.
    """
    if world_size < 2 or place_in_group() != (rank, world_size):
        return None
    store = default_store()
    number = store.add(f"dtr/sessions/{rank}", 1)
    return Agreement(store, rank=rank, world_size=world_size, name=f"dtr/{number}")


@dataclass(kw_only=True)
class _Pulse:
    """What was last heard of a rank; `seen_at` on the clock of the one who listens."""

    beat: bytes = b""
    seen_at: float = field(default_factory=time.monotonic)


class Agreement:
    """One rank's part. From `begin` to `end` its heart beats.

    Args:
        store: of the process group; used through a connection of one's own where it can be cloned.
        rank, world_size: of this process.
        name: begins the keys; the same on every rank, and of no other agreement.
        limits: the same on every rank. None: `Limits.from_environment()`.
    """

    def __init__(
        self, store: Any, *, rank: int, world_size: int, name: str = "dtr", limits: Limits | None = None
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.limits = limits or Limits.from_environment()
        self._name = name
        self._store = _connection(store)
        self._own = threading.Event()  # set: this rank is done, or has failed
        self._fault: RankFailed | None = None
        self._thread: threading.Thread | None = None
        self._leave: Any = None
        self._at_work = ""

    def begin(self, stage: str) -> None:
        """Start the heartbeat, if it is not beating. `stage`: what is done now, for messages."""
        self._at_work = stage
        if self._thread is None and not self._own.is_set():
            self._thread = threading.Thread(
                target=_beats, args=(weakref.ref(self), _connection(self._store), self._own), daemon=True
            )
            self._thread.start()
            self._leave = _leaving(weakref.ref(self))
            atexit.register(self._leave)

    def check(self) -> None:
        """Raises `RankFailed` if it is known by now that some rank cannot go on."""
        if self._fault is not None:
            self._until_read()
            self._end()
            raise self._fault

    def fail(self, reason: str) -> None:
        """This rank cannot go on: let the others know why, and give them time to read it."""
        if self._own.is_set():
            return
        with contextlib.suppress(Exception):  # the caller's own error is on its way
            self._stop(self.rank, reason)
        self._until_read()
        self._end()

    def exchange(self, stage: str, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What every rank says at this stage, by rank. Waits until all have.

        Args:
            stage: names it in messages: "planning", "compiling". Each only once.
            mine: as JSON.

        Raises:
            RankFailed: the same on every rank that waits: a rank has failed or is silent, or is alive and
                still not there after `Limits.finish_seconds`.
        """
        self.begin(stage)
        everything = self._key(f"{stage}/all")
        try:
            self._store.set(self._key(f"{stage}/{self.rank}"), json.dumps(dict(mine)))
            self._store.add(self._key(f"{stage}/count"), 1)
            until, pause = time.monotonic() + self.limits.finish_seconds, 0.01
            while not self._store.check([everything]):
                if self.rank == 0 and self._number(f"{stage}/count") == self.world_size:
                    each = [self._store.get(self._key(f"{stage}/{r}")).decode() for r in self._ranks()]
                    self._store.set(everything, f"[{','.join(each)}]")
                    break
                self.check()
                if time.monotonic() > until:
                    self._stop(self._first_missing(stage), _STILL.format(self.limits.finish_seconds, stage))
                time.sleep(pause)
                pause = min(pause * 1.5, 0.2, self.limits.beat_seconds)
            said = list(json.loads(self._store.get(everything)))
            self._store.add(self._key(f"{stage}/read"), 1)
            return said
        except RuntimeError as error:  # DistNetworkError among them
            if isinstance(error, RankFailed):
                raise
            self._end()
            raise RankFailed(rank=0, stage=stage, reason=_NO_STORE.format(error)) from error

    def give_up(self, stage: str) -> None:
        """What was said at this stage ends the run on every rank. Returns when all have read it."""
        until = time.monotonic() + self.limits.read_seconds
        with contextlib.suppress(RuntimeError):  # the store is gone: so are others
            while time.monotonic() < until and self._number(f"{stage}/read") < self.world_size:
                time.sleep(self.limits.beat_seconds / 5)
        self._end()

    def write(self, name: str, text: str) -> None:
        """Leave a text for other ranks."""
        self._store.set(self._key(f"text/{name}"), text)

    def read(self, name: str) -> str:
        """A text that a rank has left before an `exchange` that is over."""
        return str(self._store.get(self._key(f"text/{name}")).decode())

    def leave(self) -> None:
        """This rank's session is over; an error for those that still wait for it."""
        if not self._own.is_set():
            with contextlib.suppress(Exception):
                self._stop(self.rank, _LEFT)
        self._end()

    def end(self) -> None:
        """All ranks have come through: no more signs of life."""
        self._end()

    # -- inside ----------------------------------------------------------------------------------------------

    def _ranks(self) -> range:
        return range(self.world_size)

    def _key(self, name: str) -> str:
        return f"{self._name}/{name}"

    def _number(self, name: str) -> int:
        return int(self._store.add(self._key(name), 0))

    def _first_missing(self, stage: str) -> int:
        missing = (r for r in self._ranks() if not self._store.check([self._key(f"{stage}/{r}")]))
        return next(missing, 0)

    def _until_read(self) -> None:
        """Wait until the others know why nobody goes on: the store may end with this process."""
        until = time.monotonic() + self.limits.read_seconds
        with contextlib.suppress(Exception):
            while time.monotonic() < until and self._number("read") < self.world_size - 1:
                time.sleep(self.limits.beat_seconds / 5)
            time.sleep(2 * self.limits.beat_seconds)  # one of those that have read may be this one

    def _stop(self, rank: int, reason: str) -> None:
        text = json.dumps({"rank": rank, "stage": self._at_work, "reason": reason})
        self._store.compare_set(self._key("stop"), "", text)  # the first one is everybody's

    def _end(self) -> None:
        self._own.set()
        if self._leave is not None:
            atexit.unregister(self._leave)
            self._leave = None


_STILL = "is alive, and after {:.0f} s not done with {}"
_SILENT = "has given no sign of life for {:.0f} s (killed, stopped, or its machine cannot be reached)"
_NEVER = "has not begun within {:.0f} s"
_NO_STORE = "cannot be heard: the process group's store does not answer, so it or the launcher is gone ({})"
_LEFT = "has ended"


def _beats(agreement: weakref.ref[Agreement], store: Any, over: threading.Event) -> None:
    """The heartbeat of one rank, and its ear for the others'."""
    pulses: dict[int, _Pulse] = {}
    number = 0
    while True:
        own = agreement()
        if own is None or over.is_set():
            return
        try:
            number += 1
            store.set(own._key(f"beat/{own.rank}"), str(number))
            own._fault = _heard(own, store) or own._fault
            if own._fault is not None:
                store.add(own._key("read"), 1)
                return
            _listen(own, store, pulses)
        except Exception as error:
            if not over.is_set():
                own._fault = RankFailed(rank=0, stage=own._at_work, reason=_NO_STORE.format(error))
            return
        pause = own.limits.beat_seconds
        del own
        over.wait(pause)


def _heard(own: Agreement, store: Any) -> RankFailed | None:
    """What some rank has written down for everybody."""
    if not store.check([own._key("stop")]):
        return None
    said = json.loads(store.get(own._key("stop")))
    return RankFailed(rank=said["rank"], stage=said["stage"], reason=said["reason"])


def _listen(own: Agreement, store: Any, pulses: dict[int, _Pulse]) -> None:
    """Write down for everybody which of the ranks that are listened to is silent."""
    limits = own.limits
    for rank in own._ranks() if own.rank == 0 else (0,):
        if rank == own.rank:
            continue
        pulse, key = pulses.setdefault(rank, _Pulse()), own._key(f"beat/{rank}")
        beat = store.get(key) if store.check([key]) else b""
        now = time.monotonic()
        if beat != pulse.beat:
            pulses[rank] = _Pulse(beat=beat)
            continue
        limit = limits.silent_seconds if beat else limits.begin_seconds
        if now - pulse.seen_at > limit:
            own._stop(rank, (_SILENT if beat else _NEVER).format(limit))
            return


def _leaving(agreement: weakref.ref[Agreement]) -> Any:
    """What a process does that ends while the others still wait for it."""

    def leave() -> None:
        own = agreement()
        if own is not None and not own._own.is_set():
            own.fail(_LEFT)

    return leave


def _connection(store: Any) -> Any:
    """A connection of one's own: a call that waits holds up all others of its connection."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError):  # a store that cannot be cloned is used as it is
        return store
