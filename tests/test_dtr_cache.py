"""The state machine: invariants on random logs, the union-find trap, policies, errors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from dtr_logs import logs
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dtr_integrations.dtr import HEURISTICS, Cache, Policies, Program, replay, resolve
from dtr_integrations.dtr.neighborhood import ExactNeighborhood, SetNeighborhood
from dtr_integrations.dtr.networks import linear_network
from dtr_integrations.dtr.oplog import Call, Constant, Copy, Mutate, Release
from dtr_integrations.dtr.program import Drop, Hold, Make, Run, Write
from dtr_integrations.dtr.simulator import run
from dtr_integrations.dtr.values import Operator, Storage, Tensor
from dtr_integrations.errors import OutOfBudget

# A failing log is small enough as it is found; shrinking one would take minutes.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)

CHOICES = st.builds(
    Policies,
    heuristic=st.sampled_from(sorted(HEURISTICS)),
    deallocation=st.sampled_from(("eager", "banish", "ignore")),
    tie_break=st.sampled_from(("last", "first")),
    mutation=st.sampled_from(("copy_on_write", "in_place")),
    search=st.sampled_from(("exact", "indexed", "sampled")),
    recompute_penalty=st.sampled_from((0.0, 0.5)),
    minimum_bytes=st.sampled_from((0, 4)),
    tracking=st.sampled_from(("auto", "eager", "lazy")),
)


class Machine:
    """A driver that holds real contents: for each storage that should be resident, its value.

    A value is the nested tuple of how it was computed, so a replay on anything but the right arguments
    differs.
    """

    def __init__(self) -> None:
        self.cache: Cache = None  # type: ignore[assignment]
        self.values: dict[Tensor, Any] = {}
        self.ran: Counter[str] = Counter()

    def compute(self, operator: Operator, *, replay: bool) -> None:
        assert self.cache.held_bytes + operator.output_bytes <= self.cache.budget_bytes or not replay
        for arg in operator.args:
            assert arg.defined
            assert arg.storage.resident
            assert arg.storage.locks, "an argument in use could be evicted"
        operator.handle = (operator.name, tuple(self.values[arg] for arg in operator.args))
        for index, output in enumerate(operator.outputs):
            self.values[output] = (*operator.handle, index)
        self.ran[operator.name] += 1

    def evict(self, storage: Storage) -> None:
        assert storage.locks <= storage.pinned
        for view in storage.views:
            self.values.pop(view, None)


def drive(program: Program, cache: Cache, machine: Machine) -> list[Tensor]:
    """The simulator's loop with every value checked against what the program alone computes."""
    machine.cache = cache
    tensors: list[Tensor] = []
    expected: list[Any] = []

    def define(new: Any, name: str, args: tuple[int, ...]) -> None:
        handle = (name, tuple(expected[arg] for arg in args))
        for index, tensor in enumerate(new):
            machine.values[tensor] = (*handle, index)
            tensors.append(tensor)
            expected.append((*handle, index))

    for number, step in enumerate(program.steps):
        match step:
            case Make(size_bytes):
                tensors.append(cache.constant(size_bytes))
                expected.append(("constant", number))
                machine.values[tensors[-1]] = expected[-1]
            case Run(name, args, sizes, aliases, cost):
                new = cache.call(
                    [tensors[i] for i in args], sizes, aliases, cost=cost, name=f"{name}{number}"
                )
                define(new, f"{name}{number}", args)
            case Write(name, args, indices, _, cost):
                new = cache.mutate([tensors[i] for i in args], indices, cost=cost, name=f"{name}{number}")
                define(new, f"{name}{number}", args)
            case Hold(tensor):
                cache.retain(tensors[tensor])
            case Drop(tensor):
                cache.release(tensors[tensor])
        check(cache, tensors)
        for tensor, value in zip(tensors, expected, strict=True):
            assert not tensor.defined or machine.values[tensor] == value
    for output in program.outputs:
        cache.pin(tensors[output])
        assert machine.values[tensors[output]] == expected[output]
    check(cache, tensors)
    return tensors


def check(cache: Cache, tensors: list[Tensor]) -> None:
    """Accounts that must balance between any two operators."""
    storages = {tensor.storage for tensor in tensors}
    assert cache.held_bytes == sum(s.size_bytes for s in storages if s.resident)
    assert cache.held_bytes <= cache.peak_bytes <= cache.budget_bytes
    assert {*cache.pool, *cache.small} == {s for s in storages if s.resident and not s.pinned}
    for storage in storages:
        assert storage.locks == storage.pinned, "a lock was left behind"
        assert storage.references == sum(view.references for view in storage.views)
        assert not storage.banished or not storage.resident
    if isinstance(cache.neighborhood, SetNeighborhood):
        evicted = {s for s in storages if not s.resident and not s.banished}
        roots = {cache.neighborhood._root(s.node): None for s in evicted if s.node}
        assert sum(root.total for root in roots) == sum(s.cost for s in evicted), "a set lost or kept a cost"


@settings(deadline=None, max_examples=150, phases=PHASES)
@given(log=logs(), policies=CHOICES, share=st.floats(0.3, 1.2))
def test_values_budget_locks_and_accounts(log: Any, policies: Policies, share: float) -> None:
    program = resolve(log)
    machine = Machine()
    cache = Cache(int(program.peak_bytes * share), policies, driver=machine)
    try:
        drive(program, cache, machine)
    except OutOfBudget:
        assert not {s for s in cache.pool if s.locks}


@settings(deadline=None, max_examples=150, phases=PHASES)
@given(log=logs())
def test_the_unconstrained_peak_is_that_of_banishing_without_a_budget(log: Any) -> None:
    program = resolve(log)
    cache = Cache(policies=Policies(deallocation="banish"))
    assert run(program, cache) == "ok"
    assert cache.peak_bytes == program.peak_bytes
    assert (cache.compute_ns, cache.replays, cache.evictions) == (program.compute_ns, 0, 0)
    assert cache.clock == 1 + program.compute_ns


class Trace:
    """A driver that writes down what the cache decides."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def compute(self, operator: Operator, *, replay: bool) -> None:
        self.events.append((operator.name, replay))

    def evict(self, storage: Storage) -> None:
        self.events.append((storage.size_bytes, storage.cost, len(storage.views)))


def decisions(log: Any, share: float, **policies: Any) -> list[Any]:
    """What a cache does on `log`, in order."""
    trace = Trace()
    program = resolve(log)
    cache = Cache(max(1, int(program.peak_bytes * share)), Policies(**policies), driver=trace)
    return [*trace.events, run(program, cache), *trace.events]


@settings(deadline=None, max_examples=150, phases=PHASES)
@given(
    log=logs(),
    share=st.floats(0.3, 1.0),
    heuristic=st.sampled_from(sorted(HEURISTICS)),
    tie_break=st.sampled_from(("last", "first")),
    penalty=st.sampled_from((0.0, 1.0)),
)
def test_the_index_takes_the_decisions_of_the_scan(
    log: Any, share: float, heuristic: str, tie_break: str, penalty: float
) -> None:
    same = {"heuristic": heuristic, "tie_break": tie_break, "recompute_penalty": penalty}
    assert decisions(log, share, search="indexed", **same) == decisions(log, share, search="exact", **same)


@settings(deadline=None, max_examples=150, phases=PHASES)
@given(log=logs(), share=st.floats(0.3, 1.0), heuristic=st.sampled_from(("h_dtr", "msps", "h_e_star")))
def test_kept_and_walked_neighbourhoods_are_the_same(log: Any, share: float, heuristic: str) -> None:
    eager = decisions(log, share, heuristic=heuristic, tracking="eager")
    assert eager == decisions(log, share, heuristic=heuristic, tracking="lazy")


@pytest.mark.parametrize("heuristic", ["h_dtr_eq", "h_dtr", "h_local", "lru"])
@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_the_index_on_a_long_chain(heuristic: str, ratio: float) -> None:
    log = linear_network(150)
    exact, indexed = (
        replay(log, heuristic=heuristic, budget_ratio=ratio, search=search, limit=20)
        for search in ("exact", "indexed")
    )
    assert (exact.clock_ns, exact.evictions) == (indexed.clock_ns, indexed.evictions)


def chain(cache: Cache, n: int) -> list[Tensor]:
    """`n` tensors of one byte and one nanosecond, each from the one before, the first from a constant."""
    tensors = [cache.constant(1)]
    for _ in range(n):
        tensors += cache.call(tensors[-1:], [1], cost=1)
    return tensors[1:]


@pytest.mark.parametrize("evictions", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
@pytest.mark.parametrize("back", [0, 1, 2])
def test_rematerialising_one_of_three_leaves_two(evictions: tuple[int, ...], back: int) -> None:
    """The trap: resetting the node of the one that comes back loses the whole sum where it is the root."""
    cache = Cache(policies=Policies(heuristic="h_dtr_eq"))
    neighborhood = cache.neighborhood
    assert isinstance(neighborhood, SetNeighborhood)
    tensors = chain(cache, 5)
    middle = tensors[1:4]
    for i in evictions:
        cache._evict(middle[i].storage)
    assert neighborhood.set_of(middle[0].storage) == (3, 3)
    storage = middle[back].storage
    storage.resident = True
    neighborhood.rematerialised(storage)
    for other in {0, 1, 2} - {back}:
        assert neighborhood.set_of(middle[other].storage) == (2, 2)
    # Both ends of the chain still see what is left of the set that they touch.
    assert tensors[0].storage.adjacent_sets_cost == (0 if back == 0 else 2)
    assert tensors[4].storage.adjacent_sets_cost == (0 if back == 2 else 2)


def test_a_storage_that_comes_back_is_evicted_as_a_new_one() -> None:
    cache = Cache(policies=Policies(heuristic="h_dtr_eq"))
    tensors = chain(cache, 5)
    for i in (1, 2, 3):
        cache._evict(tensors[i].storage)
    cache.materialize(tensors[2])  # brings 1 and 2 back
    assert cache.replays == 2
    assert tensors[4].storage.adjacent_sets_cost == 1
    cache._evict(tensors[2].storage)
    assert tensors[4].storage.adjacent_sets_cost == 2
    assert tensors[1].storage.adjacent_sets_cost == 2


def test_the_papers_figure_1() -> None:
    """Section 2: with t0, t2, t3, t6 resident, e*(t2) = {t1, t4} and e*(t3) = {t1, t4, t5}."""
    cache = Cache(policies=Policies(heuristic="h_dtr"))
    assert isinstance(cache.neighborhood, ExactNeighborhood)
    t0 = cache.constant(1)

    def op(*args: Tensor) -> Tensor:
        return cache.call(args, [1], cost=1)[0]

    t1 = op(t0)
    t2 = op(t1)
    t3 = op(t1)
    t4 = op(t2, t3)
    t5 = op(t3)
    t6 = op(t4, t5)
    for tensor in (t1, t4, t5):
        cache._evict(tensor.storage)
    assert t6.storage.resident

    def e_star(tensor: Tensor) -> frozenset[Storage]:
        storage = tensor.storage
        assert storage.ancestors
        assert storage.descendants
        return storage.ancestors.members | storage.descendants.members

    assert e_star(t2) == {t1.storage, t4.storage}
    assert e_star(t3) == {t1.storage, t4.storage, t5.storage}


def test_a_deep_chain_is_replayed_without_recursion() -> None:
    cache = Cache(policies=Policies(heuristic="h_local"))
    tensors = chain(cache, 20_000)
    for tensor in tensors[:-1]:
        cache._evict(tensor.storage)
    cache._evict(tensors[-1].storage)
    cache.materialize(tensors[-1])
    assert cache.replays == 20_000
    assert tensors[-1].defined


def test_too_small_a_budget_names_the_operator_and_leaves_the_cache_usable() -> None:
    cache = Cache(3)
    a, b = chain(cache, 2)
    with pytest.raises(OutOfBudget, match=r"conv needs 5 B .* for its outputs while 2 B") as caught:
        cache.call([b], [5], cost=1, name="conv")
    error = caught.value
    assert (error.operator, error.needed_bytes, error.held_bytes, error.budget_bytes) == ("conv", 5, 2, 3)
    assert error.short_bytes == 4
    assert isinstance(error, MemoryError)
    assert not b.storage.locks
    cache.budget_bytes = 20
    (c,) = cache.call([a, b], [5], cost=1)
    assert c.defined
    assert a.defined


def test_released_while_it_is_read_is_evicted_right_after() -> None:
    cache = Cache()
    a, b = chain(cache, 2)
    cache.lock(a)
    cache.release(a)
    assert a.defined
    cache.unlock(a)
    assert not a.storage.resident
    assert cache.held_bytes == 2
    cache._evict(b.storage)
    cache.materialize(b)
    assert cache.replays == 2


VIEWS = [
    Constant("x", 4),
    Call("mul", ["x"], ["a"], [4], [-1], 10),
    Call("view", ["a"], ["v"], [4], [0], 1),
    Call("mul", ["v"], ["b"], [4], [-1], 10),
]


def test_a_view_is_free_counts_its_operator_and_is_defined_anew_by_its_own() -> None:
    program = resolve(VIEWS)
    assert program.peak_bytes == 12
    cache = Cache()
    x = cache.constant(4)
    (a,) = cache.call([x], [4], cost=10)
    (v,) = cache.call([a], [4], [0], cost=1)
    assert v.storage is a.storage
    assert a.storage.cost == 11
    assert a.storage.references == 2
    cache._evict(a.storage)
    cache.materialize(a)
    assert a.defined
    assert not v.defined
    cache.materialize(v)
    assert v.defined
    assert cache.replay_ns == 11


@pytest.mark.parametrize(("mutation", "peak"), [("copy_on_write", 12), ("in_place", 8)])
def test_mutation(mutation: str, peak: int) -> None:
    log = [Constant("x", 4), Call("mul", ["x"], ["a"], [4], [-1], 10), Mutate("relu_", ["a"], [0], 5)]
    cache = Cache(policies=Policies(mutation=mutation))
    assert run(resolve(log), cache) == "ok"
    assert (cache.peak_bytes, cache.held_bytes) == (peak, 8)


def test_a_mutated_name_leaves_the_other_name_of_the_tensor_alone() -> None:
    log = [
        Constant("x", 4),
        Call("mul", ["x"], ["a"], [4], [-1], 10),
        Copy("b", "a"),
        Mutate("relu_", ["a"], [0], 5),
        Call("mul", ["b"], ["c"], [1], [-1], 1),
        Release("a"),
    ]
    for mutation in ("copy_on_write", "in_place"):
        cache = Cache(policies=Policies(mutation=mutation))
        assert run(resolve(log), cache) == "ok"
        assert (cache.peak_bytes, cache.held_bytes) == (13, 9)


def test_banishing_frees_constants_and_pins_what_came_from_them() -> None:
    cache = Cache(policies=Policies(deallocation="banish"))
    x = cache.constant(4)
    (a,) = cache.call([x], [2], cost=1)
    cache.release(x)
    assert x.storage.banished
    assert a.storage.pinned
    assert cache.held_bytes == 2


def test_banishing_waits_for_what_is_evicted() -> None:
    cache = Cache(policies=Policies(deallocation="banish"))
    a, b = chain(cache, 2)
    cache._evict(b.storage)
    cache.release(a)
    assert a.storage.resident
    cache.materialize(b)
    assert a.storage.banished
    assert b.storage.pinned


def test_small_storages_go_last() -> None:
    cache = Cache(12, Policies(heuristic="lru", minimum_bytes=4))
    x = cache.constant(1)
    (small,) = cache.call([x], [3], cost=1)
    (large,) = cache.call([x], [8], cost=1)
    (next_,) = cache.call([x], [8], cost=1)
    assert small.defined
    assert not large.defined
    (last,) = cache.call([next_], [3], cost=1)
    assert last.defined
    assert not small.defined
    assert next_.defined


def test_forgetting_keeps_the_tables_from_growing() -> None:
    cache = Cache(40, Policies(forget_dead=True))
    weight = cache.constant(4)
    for _ in range(50):
        x = cache.constant(4)
        (h,) = cache.call([x, weight], [4], cost=3)
        (y,) = cache.call([h, weight], [4], cost=3)
        cache.release(x)
        cache.release(h)
        cache.release(y)
        assert cache.held_bytes == 4
        assert not weight.storage.children
        assert not cache.pool
    assert weight.defined


@pytest.mark.parametrize("kind", ["h_dtr_eq", "h_dtr"])
def test_a_neighbourhood_says_what_it_does_not_track(kind: str) -> None:
    (a,) = chain(Cache(policies=Policies(heuristic=kind)), 1)
    with pytest.raises(NotImplementedError, match="name it in the heuristic's needs"):
        _ = a.storage.adjacent_sets_cost if kind == "h_dtr" else a.storage.evicted_ancestors_cost
