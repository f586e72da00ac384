"""What the state machine offers to an owner of real tensors: adopt, expose, refuse, occupy."""

from __future__ import annotations

import pytest

from dtr_integrations.dtr import Cache, Policies
from dtr_integrations.dtr.values import Storage, Tensor
from dtr_integrations.errors import OutOfBudget

FORGETFUL = Policies(heuristic="lru", forget_dead=True)


def adopted(cache: Cache, args: list[Tensor], size_bytes: int = 4) -> Tensor:
    cache.make_room(size_bytes, "op")
    return cache.adopt(args, [size_bytes], cost=1, name="op")[0]


def test_only_what_is_exposed_is_evicted() -> None:
    cache = Cache(12, FORGETFUL)
    x = cache.constant(4)
    hidden, exposed = adopted(cache, [x]), adopted(cache, [x])
    cache.expose(exposed)
    cache.expose(exposed)
    adopted(cache, [x])
    assert hidden.defined
    assert not exposed.defined
    with pytest.raises(OutOfBudget):
        adopted(cache, [x])
    cache.release(hidden)
    cache.materialize(exposed)
    assert exposed.defined
    assert (cache.held_bytes, cache.peak_bytes) == (12, 12)


def test_what_is_refused_is_asked_about_again() -> None:
    pinned: set[Storage] = set()
    cache = Cache(12, FORGETFUL, may_evict=lambda storage: storage not in pinned)
    x = cache.constant(4)
    old, new = adopted(cache, [x]), adopted(cache, [x])
    for tensor in (old, new):
        cache.expose(tensor)
    pinned.add(old.storage)
    last = adopted(cache, [x])
    assert old.defined
    assert not new.defined
    assert list(cache.refused) == [old.storage]
    cache.release(last)
    cache.materialize(new)  # there is room
    assert list(cache.refused) == [old.storage]
    pinned.clear()
    adopted(cache, [x])
    assert not old.defined
    assert new.defined
    assert not cache.refused
    cache.lock(old)
    assert cache.held_bytes == 12


def test_the_bytes_of_old_contents_are_taken_over() -> None:
    cache = Cache(8, FORGETFUL)
    x = cache.constant(4)
    old = adopted(cache, [x])
    (new,) = cache.adopt([old], [4], cost=1, name="write", taken=[old])
    assert (cache.held_bytes, cache.peak_bytes) == (8, 8)
    assert not old.defined
    cache.expose(new)
    assert list(cache.pool) == [new.storage]
    cache.release(new)
    assert (cache.held_bytes, len(cache.pool)) == (4, 0)
    assert not x.storage.children


def test_a_discarded_operator_holds_nothing() -> None:
    """The runtime's real tensors hang on handles: they must go without a garbage collector."""
    cache = Cache(policies=FORGETFUL)
    x = cache.constant(4)
    outputs = cache.adopt([x], [4, 4], cost=1, name="two", handle=object())
    operator = outputs[0].operator
    assert operator is not None
    cache.release(outputs[0])
    assert operator.handle is not None
    cache.release(outputs[1])
    assert operator.handle is None
    assert operator.args == operator.outputs == ()
    assert cache.held_bytes == 4


def test_bytes_of_which_only_the_size_matters() -> None:
    cache = Cache(10, FORGETFUL)
    x = cache.constant(4)
    saved = adopted(cache, [x])
    cache.expose(saved)
    cache.make_room(6, "backward")
    cache.occupy(6, cost=3)
    assert not saved.defined
    assert (cache.held_bytes, cache.clock, cache.compute_ns) == (10, 5, 4)
    cache.vacate(6)
    cache.materialize(saved)
    assert (cache.held_bytes, cache.peak_bytes) == (8, 10)
