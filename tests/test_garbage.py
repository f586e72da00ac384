"""Planning sees to its own garbage, and leaves everybody else's to everybody else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from dtr_integrations.capture.garbage import own_garbage


class Cycle:
    """Only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _collector_by_hand() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()


def test_what_was_made_inside_is_gone_afterwards_and_older_garbage_is_not_looked_at() -> None:
    older = weakref.ref(Cycle())

    @own_garbage()
    def plan() -> weakref.ref[Cycle]:
        made = weakref.ref(Cycle())
        gc.collect()
        assert made() is None
        assert older() is not None
        return weakref.ref(Cycle())

    assert plan()() is None
    assert older() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert older() is None


def test_an_error_leaves_nothing_frozen() -> None:
    with pytest.raises(ValueError), own_garbage():
        raise ValueError
    assert gc.get_freeze_count() == 0


def test_what_somebody_has_frozen_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with own_garbage():
        made = weakref.ref(Cycle())
    assert gc.get_freeze_count() == pytest.approx(frozen, rel=0.01)  # what dies leaves the count
    gc.collect()
    assert made() is None
