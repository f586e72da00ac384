"""Ranks begin together or not at all: the agreement alone, over a real store, each rank a thread."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from dtr_integrations.distributed import Agreement, Limits, Standing
from dtr_integrations.distributed.standing import difference, to_take_over, unplanned
from dtr_integrations.errors import ConfigError, RankFailed

LIMITS = Limits(
    silent_seconds=1.0, begin_seconds=2.0, finish_seconds=20.0, read_seconds=2.0, beat_seconds=0.05
)


@pytest.fixture
def store() -> Any:
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))


def at_once(*ranks: Callable[[], Any]) -> list[Any]:
    """What each rank returned or raised, all run at the same time."""
    results: list[Any] = [None] * len(ranks)

    def run(number: int) -> None:
        try:
            results[number] = ranks[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return results


def agreements(store: Any, world_size: int, limits: Limits = LIMITS) -> list[Agreement]:
    return [Agreement(store, rank=r, world_size=world_size, limits=limits) for r in range(world_size)]


def test_every_rank_learns_what_all_say(store: Any) -> None:
    ranks = agreements(store, 3)

    def run(one: Agreement) -> Any:
        time.sleep(0.1 * one.rank)
        first = one.exchange("planning", {"rank": one.rank})
        one.write(f"plan-{one.rank}", f"plan of {one.rank}")
        second = one.exchange("compiling", {"done": True})
        one.end()
        return first, second, one.read("plan-2")

    expected = ([{"rank": 0}, {"rank": 1}, {"rank": 2}], [{"done": True}] * 3, "plan of 2")
    assert at_once(*(lambda one=one: run(one) for one in ranks)) == [expected] * 3


def test_slow_is_not_dead(store: Any) -> None:
    """A rank that takes four times as long as one may be silent, but whose heart beats."""
    first, slow = agreements(store, 2, replace(LIMITS, silent_seconds=0.3))
    slow.begin("planning")

    def later() -> Any:
        time.sleep(1.2)
        return slow.exchange("planning", {})

    assert at_once(lambda: first.exchange("planning", {}), later) == [[{}, {}], [{}, {}]]
    for one in (first, slow):
        one.end()


@pytest.mark.parametrize("failing", [0, 2])
def test_one_that_fails_is_everybodys_error(store: Any, failing: int) -> None:
    ranks = agreements(store, 3)
    for one in ranks:
        one.begin("planning")

    def run(one: Agreement) -> Any:
        if one.rank == failing:
            return one.fail("failed: BudgetInfeasible: no plan fits")
        return one.exchange("planning", {})

    results = at_once(*(lambda one=one: run(one) for one in ranks))
    assert results.pop(failing) is None
    texts = {str(error) for error in results}
    assert texts == {
        f"rank {failing} cannot go on, found while planning; no rank trains. "
        "It failed: BudgetInfeasible: no plan fits"
    }
    assert all(isinstance(error, RankFailed) and error.rank == failing for error in results)


@pytest.mark.parametrize("silent", [0, 1])
def test_one_that_falls_silent_is_everybodys_error(store: Any, silent: int) -> None:
    ranks = agreements(store, 3)
    for one in ranks:
        one.begin("planning")
    time.sleep(0.3)
    ranks[silent]._own.set()  # its heart stops
    living = [one for one in ranks if one.rank != silent]
    begun = time.monotonic()
    results = at_once(*(lambda one=one: one.exchange("planning", {}) for one in living))
    assert time.monotonic() - begun < 10
    for error in results:
        assert isinstance(error, RankFailed)
        assert error.rank == silent
        assert "no sign of life for 1 s" in error.reason


def test_one_that_never_begins(store: Any) -> None:
    first, _ = agreements(store, 2)
    (error,) = at_once(lambda: first.exchange("planning", {}))
    assert isinstance(error, RankFailed)
    assert (error.rank, error.reason) == (1, "has not begun within 2 s")


def test_one_that_is_alive_and_never_done(store: Any) -> None:
    first, other = agreements(store, 2, replace(LIMITS, finish_seconds=0.5))
    other.begin("planning")
    (error,) = at_once(lambda: first.exchange("planning", {}))
    other.end()
    assert isinstance(error, RankFailed)
    assert (error.rank, error.reason) == (1, "is alive, and after 0 s not done with planning")


def test_planning_ends_early_when_another_has_failed(store: Any) -> None:
    first, other = agreements(store, 2)
    for one in (first, other):
        one.begin("planning")

    def plan() -> None:
        for _ in range(200):
            first.check()
            time.sleep(0.05)

    error, _ = at_once(plan, lambda: other.fail("failed: it"))
    assert isinstance(error, RankFailed)


def test_who_gives_up_waits_until_all_have_read_why(store: Any) -> None:
    first, other = agreements(store, 2)
    order = []

    def give_up(one: Agreement) -> None:
        one.exchange("planning", {})
        one.give_up("planning")
        order.append(one.rank)

    def late() -> None:
        other.begin("planning")
        other._store.set(other._key("planning/1"), "{}")
        other._store.add(other._key("planning/count"), 1)
        time.sleep(0.5)
        order.append("read")
        other._store.add(other._key("planning/read"), 1)

    at_once(lambda: give_up(first), late)
    assert order == ["read", 0]


def test_a_session_that_is_over_is_an_error_for_those_that_wait(store: Any) -> None:
    first, other = agreements(store, 2)
    other.begin("planning")
    error, _ = at_once(lambda: first.exchange("planning", {}), other.leave)
    assert isinstance(error, RankFailed)
    assert error.reason == "has ended"


def test_the_store_is_gone() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    guest = torch.distributed.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=5))
    other = Agreement(guest, rank=1, world_size=2, limits=LIMITS)
    other.begin("planning")
    del store
    (error,) = at_once(lambda: other.exchange("planning", {}))
    assert isinstance(error, RankFailed)
    assert "the process group's store does not answer" in error.reason


def test_limits_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DTR_RANK_TIMEOUT", raising=False)
    assert Limits.from_environment() == Limits()
    monkeypatch.setenv("DTR_RANK_TIMEOUT", "2")
    assert Limits.from_environment() == Limits(silent_seconds=2.0, beat_seconds=0.4)
    monkeypatch.setenv("DTR_RANK_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="DTR_RANK_TIMEOUT='soon' is no number of seconds"):
        Limits.from_environment()


# -- what follows from what they say -------------------------------------------------------------------------

ONE = Standing(
    rank=0,
    digest="aa",
    why_not="",
    graphs=("g",),
    model="m",
    trained="t",
    collectives=(),
    budget_bytes=10,
)


def test_a_standing_is_the_same_after_its_way_through_the_store() -> None:
    one = replace(ONE, collectives=("c10d.a", "c10d.b"))
    assert Standing.from_dict(json.loads(json.dumps(one.to_dict()))) == one


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({}, None),
        ({"graphs": ("other",), "digest": "bb"}, None),  # another batch shape
        ({"model": "another", "trained": "u", "collectives": ("c",)}, None),  # a stage of a pipeline
        ({"digest": "", "trained": "u"}, None),  # runs eagerly
        ({"graphs": ("other",), "trained": "u"}, "it trains other parameters than rank 0"),
        ({"collectives": ("c10d.all_reduce",)}, r"it has other collectives in its graphs \(1 against 0\)"),
    ],
)
def test_what_would_leave_a_rank_waiting_is_a_fault(other: dict[str, Any], why: str | None) -> None:
    found = difference([ONE, replace(ONE, rank=1, **other), replace(ONE, rank=2)])
    if why is None:
        assert found is None
    else:
        assert found is not None
        assert found[0] == 1
        assert why.replace("\\", "") in found[1]


def test_ranks_with_the_same_graphs_and_budget_get_one_plan() -> None:
    others = [
        replace(ONE, rank=1, digest="bb"),
        replace(ONE, rank=2),
        replace(ONE, rank=3, digest="bb", graphs=("h",)),
        replace(ONE, rank=4, digest="bb", budget_bytes=11),
        replace(ONE, rank=5, digest=""),
    ]
    taken = [to_take_over([ONE, *others], rank) for rank in range(6)]
    assert taken == [None, 0, None, None, None, None]


def test_ranks_without_a_plan_are_named_where_others_have_one() -> None:
    eager = replace(ONE, rank=1, digest="", why_not="it could not be planned")
    assert unplanned([ONE, eager]) == [eager]
    assert unplanned([eager, eager]) == []
