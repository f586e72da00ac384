"""The ledger by address, on records made by hand."""

from hypothesis import given
from hypothesis import strategies as st

from dtr_integrations.measure.address_ledger import (
    AddressLedger,
    Alloc,
    Free,
    Mark,
    downsampled,
    live_bytes_over_time,
)


def walk(events, initial_bytes=0, deaths=None):
    ledger = AddressLedger(initial_bytes)
    return [live for _, live in live_bytes_over_time(events, ledger, deaths or {})], ledger


def test_births_and_deaths():
    live, ledger = walk([Alloc(1, 0xA, 100), Alloc(2, 0xB, 30), Free(3, 0xA), Alloc(4, 0xA, 5)])
    assert live == [100, 130, 30, 35]
    assert (ledger.live_bytes, ledger.foreign_frees, ledger.unseen_frees) == (35, 0, 0)


def test_a_death_of_a_block_that_was_not_born_here_changes_nothing():
    live, ledger = walk([Alloc(1, 0xA, 100), Free(2, 0xC), Free(3, 0xA), Free(4, 0xA)])
    assert live == [100, 100, 0, 0]
    assert ledger.foreign_frees == 2


def test_an_address_used_again_means_that_its_tenant_died_unseen():
    live, ledger = walk([Alloc(1, 0xA, 100), Alloc(2, 0xA, 30), Free(3, 0xA)])
    assert live == [100, 30, 0]
    assert ledger.unseen_frees == 1


def test_marks_stand_for_the_deaths_of_older_blocks():
    live, _ = walk([Mark(1, "x"), Alloc(2, 0xA, 10), Mark(3, "old"), Free(4, 0xA)], 50, {"old": 50})
    assert live == [60, 10, 0]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 100)), max_size=60))
def test_the_sum_of_the_living(steps):
    alive: dict[int, int] = {}
    events, expected = [], []
    for time, (birth, address, n_bytes) in enumerate(steps):
        events.append(Alloc(time, address, n_bytes) if birth else Free(time, address))
        if birth:
            alive[address] = n_bytes
        else:
            alive.pop(address, None)
        expected.append(sum(alive.values()))
    assert walk(events)[0] == expected


@given(
    st.lists(st.integers(0, 1000), max_size=50).map(lambda values: list(enumerate(values))),
    st.integers(0, 20),
)
def test_downsampling_keeps_the_peak_and_the_limit(points, limit):
    kept = downsampled(points, limit)
    assert len(kept) <= limit
    assert list(kept) == sorted(kept)
    assert set(kept) <= set(points)
    if points and limit:
        assert max(value for _, value in kept) == max(value for _, value in points)
