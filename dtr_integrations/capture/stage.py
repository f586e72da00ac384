"""Runs a user's functions over twins of all that they refer to, without changing the functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from .._python_state import Place, referred_to

_ABSENT: Any = object()


class Stage:
    """The places to which functions refer (see `referred_to`), and what they hold in one world.

    While it is entered, the real places hold that; what the functions put into them is kept for the next
    time. Nothing else may run the functions meanwhile, such as another thread.
    """

    def __init__(self) -> None:
        self._held: dict[Place, Any] = {}
        self._depth = 0

    def add(self, function: Any, twin_of: Callable[[Any], Any]) -> None:
        """Let the places to which `function` refers hold twins here."""
        for place in referred_to(function).places.values():
            if place not in self._held:
                value = place.get(_ABSENT)
                self._held[place] = value if value is _ABSENT else twin_of(value)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The real places hold what they hold here."""
        self._depth += 1
        real = self._moved_in() if self._depth == 1 else {}
        try:
            yield
        finally:
            self._depth -= 1
            for place, value in real.items():
                self._held[place] = place.get(_ABSENT)
                _put(place, value)

    def _moved_in(self) -> dict[Place, Any]:
        """Put into the places what they hold here, and nowhere else: the functions may let go of it. Returns
        what they held."""
        real = {}
        for place in list(self._held):
            value = place.get(_ABSENT)
            try:
                _put(place, self._held.pop(place))
            except Exception:  # such as a member of an Enum, which cannot be set: there is no twin of it
                continue
            real[place] = value
        return real


def _put(place: Place, value: Any) -> None:
    if value is not _ABSENT:
        if place.get(_ABSENT) is not value:
            place.set(value)
    elif place.get(_ABSENT) is not _ABSENT:
        place.clear()
