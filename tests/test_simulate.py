from __future__ import annotations

import dataclasses

import pytest
from graphs import Builder, calibrate, joint_graphs, save_sets, saveable, step_of, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from dtr_integrations.core.fusion import fusion_tables, is_buffer
from dtr_integrations.core.graph import JointGraph, OpKind, Phase, RegionKind
from dtr_integrations.core.plan import GraphSchedule, Recompute
from dtr_integrations.core.schedule import (
    Program,
    backward_program,
    default_schedule,
    default_schedules,
    forward_program,
    is_tangent,
    must_save,
    schedule_for,
    validate,
)
from dtr_integrations.core.simulate import (
    NO_CORRECTION,
    Correction,
    Observation,
    correct,
    default_cost_ms,
    entry_weights,
    held_at_peak,
    simulate_graph,
    simulate_step,
)
from dtr_integrations.planner.state import GraphState, StepState

EXAMPLES = settings(max_examples=150, deadline=None)


def schedulable(graph: JointGraph, saved: list[int]) -> GraphSchedule | None:
    """The schedule, or None for a random graph whose backward reads what can neither be kept nor redone."""
    try:
        return schedule_for(graph, saved)
    except ValueError:
        return None


# -- brute force: run the program event by event, kernel by kernel
# ---------------------------------------------------


def brute_rise(graph: JointGraph, program: Program, direction: RegionKind) -> int:
    """Follow each kernel's reads down through inlined values; hold a storage until nothing touches it."""
    tables = fusion_tables(graph)
    known = tables.forward if direction is RegionKind.FORWARD else tables.backward
    n = len(program.ops)
    ops = [graph.ops[i] for i in program.ops]
    kinds = [tables.kinds[i] for i in program.ops]
    outputs = set(program.outputs)

    def users(k: int) -> list[int]:
        return [u for u in range(n) if k in program.reads[u]]

    def data_readers(k: int) -> list[int]:
        """Readers through views, sizes left out."""
        out = []
        for u in users(k):
            if kinds[u] is OpKind.VIEW:
                out += data_readers(u)
            elif kinds[u] is not OpKind.SYMBOL:
                out.append(u)
        return out

    def leaves_through_views(k: int) -> bool:
        return k in outputs or any(kinds[u] is OpKind.VIEW and leaves_through_views(u) for u in users(k))

    def buffered(k: int) -> bool:
        readers = data_readers(k)
        return is_buffer(
            kinds[k],
            known[ops[k].index],
            leaves=k in outputs,
            reuse=tables.reuse[ops[k].index],
            shared=tables.shared[ops[k].index],
            extern_read=leaves_through_views(k) or any(kinds[r] is OpKind.EXTERN for r in readers),
            readers=len(readers),
            kernels=len(reading(k)),
        )

    def reading(k: int) -> set[int]:
        """The kernels that read op `k`, at most two."""
        found = {n} if k in outputs else set()
        for u in users(k):
            if kinds[u] is not OpKind.SYMBOL:
                found |= kernels_of(u)
        return set(sorted(found)[-2:])

    def kernels_of(k: int) -> set[int]:
        """The kernels in which op `k` is evaluated; `n` is the world after the program."""
        if buffered(k):
            return {k}
        found = {n} if k in outputs else set()
        for u in users(k):
            if kinds[u] is not OpKind.SYMBOL:
                found |= kernels_of(u)
        return found or {k}

    made = [k for k in range(program.entries, n) if buffered(k)]
    weights = entry_weights(graph)
    touched: dict[tuple[int, int], set[int]] = {}  # (node that made it or −1, storage) -> kernels
    size: dict[tuple[int, int], int] = {}
    gradients = {op.value for op in graph.ops if is_tangent(op)}
    for k in range(program.entries):
        if direction is RegionKind.BACKWARD and ops[k].value >= 0:
            key = (-1, ops[k].value)
            size[key] = graph.storage_bytes[key[1]] if key[1] in gradients else weights[key[1]]
    for k in made:
        for storage in ops[k].storages:
            size[k, storage] = graph.storage_bytes[storage]
            touched.setdefault((k, storage), set()).add(k)

    def owner(k: int) -> int | None:
        """The node that made the storage in which the value of node `k` lives."""
        while k >= program.entries and kinds[k] is OpKind.VIEW:
            k = program.reads[k][0]
        return -1 if k < program.entries else k

    for k in range(n):
        if ops[k].value < 0:
            for u in users(k):  # a part of a tuple, read or not, is taken out where it stands
                if (k, ops[u].value) in size:
                    touched[k, ops[u].value].update(kernels_of(u))
            continue
        key = (owner(k), ops[k].value)
        if key not in size:
            continue
        for u in users(k):
            if kinds[u] is not OpKind.SYMBOL:
                touched.setdefault(key, set()).update(kernels_of(u))
        if k in outputs:
            touched.setdefault(key, set()).add(n)

    def no_sibling(key: tuple[int, int], k: int) -> bool:
        """The reader before kernel `k` is a library kernel, or `k` depends on it."""
        earlier = sorted(touched[key] - {k, key[0]})
        return (
            not earlier
            or kinds[earlier[-1]] is OpKind.EXTERN
            or depends(ops[k].index, ops[earlier[-1]].index)
        )

    def depends(i: int, on: int) -> bool:
        return any(j == on or depends(j, on) for j in graph.ops[i].inputs)

    alive = {key for key in size if key[0] == -1}
    at_entry = sum(size[key] for key in alive)
    alive = {key for key in alive if touched.get(key)}
    highest = at_entry
    for k in range(program.entries, n):
        new = {key for key in size if key[0] == k}
        dying = {key for key in alive | new if max(touched[key]) <= k}
        reusable = [
            key for key in dying - new if not (key[0] == -1 and key[1] in gradients) and no_sibling(key, k)
        ]
        extra = sum(size[key] for key in new)
        if new and kinds[k] is OpKind.POINTWISE and any(size[key] == extra for key in reusable):
            extra = 0
        if new:
            highest = max(highest, sum(size[key] for key in alive) + extra)
        alive = (alive | new) - dying
    return highest - at_entry


@EXAMPLES
@given(st.data())
def test_simulator_equals_brute_force(data: st.DataObject) -> None:
    graph = data.draw(joint_graphs())
    schedule = schedulable(graph, data.draw(save_sets(graph)))
    if schedule is None:
        return
    profile = simulate_graph(graph, schedule)
    forward, backward = forward_program(graph, schedule), backward_program(graph, schedule)
    assert profile.forward_rise_bytes == brute_rise(graph, forward, RegionKind.FORWARD)
    assert profile.backward_rise_bytes == brute_rise(graph, backward, RegionKind.BACKWARD)


@EXAMPLES
@given(st.data())
def test_several_copies_are_simulated_like_brute_force(data: st.DataObject) -> None:
    graph = data.draw(joint_graphs())
    schedule = schedulable(graph, data.draw(save_sets(graph)))
    if schedule is None or not schedule.recompute:
        return
    items = list(schedule.recompute)
    value = data.draw(st.sampled_from(items))
    later = [op.index for op in graph.ops if op.phase is Phase.BACKWARD and op.index > value.before]
    if not later:
        return
    again = dataclasses.replace(value, copy=1, before=data.draw(st.sampled_from(later)))
    schedule = dataclasses.replace(schedule, recompute=(*items, again))
    validate(graph, schedule)
    expected = brute_rise(graph, backward_program(graph, schedule), RegionKind.BACKWARD)
    assert simulate_graph(graph, schedule).backward_rise_bytes == expected


@EXAMPLES
@given(st.data())
def test_incremental_equals_full(data: st.DataObject) -> None:
    graph = data.draw(joint_graphs())
    if schedulable(graph, []) is None:
        return
    state = GraphState(graph, data.draw(save_sets(graph)))
    candidates = saveable(graph)
    for _ in range(4):
        if candidates and data.draw(st.booleans()):
            before = (state.saved(), state.cost_ms, state.saved_bytes, state.backward_rise_bytes)
            mark = state.mark()
            state.flip(*data.draw(st.lists(st.sampled_from(candidates), min_size=1, max_size=3, unique=True)))
            if data.draw(st.booleans()):
                assert state.backward_rise_bytes >= 0  # fills the cache that a rollback must not leave behind
                state.rollback(mark)
                assert (state.saved(), state.cost_ms, state.saved_bytes, state.backward_rise_bytes) == before
        else:
            state.assign(data.draw(save_sets(graph)))
        profile = simulate_graph(graph, state.schedule())
        assert state.forward_rise_bytes == profile.forward_rise_bytes
        assert state.backward_rise_bytes == profile.backward_rise_bytes
        assert state.saved_bytes == profile.saved_bytes
        assert state.cost_ms == pytest.approx(profile.cost_ms)
        assert state.recomputed() == tuple(sorted(r.value for r in state.schedule().recompute))


@EXAMPLES
@given(st.data())
def test_step_state_equals_simulate_step(data: st.DataObject) -> None:
    step = data.draw(steps())
    if any(schedulable(g, []) is None for g in step.graphs):
        return
    correction = calibrate(step)
    state = StepState(step, correction, [data.draw(save_sets(g)) for g in step.graphs])
    whole = simulate_step(step, state.schedules(), correction=correction)
    assert state.peak_bytes == whole.peak_bytes
    assert state.slowdown == pytest.approx(whole.slowdown)
    target = data.draw(st.integers(whole.peak_bytes - 5, whole.peak_bytes + 5))
    assert (state.excess_bytes(target) == 0) == (whole.peak_bytes <= target)


# -- schedules
# -------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(st.data())
def test_schedules_validate_and_are_pruned(data: st.DataObject) -> None:
    graph = data.draw(joint_graphs())
    wanted = data.draw(save_sets(graph))
    schedule = schedulable(graph, wanted)
    if schedule is None:
        return
    validate(graph, schedule)
    assert set(schedule.saved) <= set(wanted) | must_save(graph)
    program = backward_program(graph, schedule)
    read = {program.ops[j] for reads in program.reads for j in reads} | {
        program.ops[k] for k in program.outputs
    }
    assert set(schedule.saved) <= read
    assert {item.value for item in schedule.recompute} <= read
    for item in schedule.recompute[:1]:
        shorter = dataclasses.replace(
            schedule, recompute=tuple(r for r in schedule.recompute if r is not item)
        )
        with pytest.raises(ValueError, match="neither saved nor recomputed"):
            validate(graph, shorter)


def small() -> JointGraph:
    """x → a (matmul) → b (relu) → c (matmul); the backward reads b, then a."""
    g = Builder()
    x, w = g.input(8), g.input(4, static=True)
    t = g.tangent(8)
    a = g.add(OpKind.EXTERN, [x, w], 16, name="a", cost=5.0)
    b = g.add(OpKind.POINTWISE, [a], 16, name="b")
    c = g.add(OpKind.EXTERN, [b, w], 8, name="c", cost=5.0)
    gb = g.add(OpKind.EXTERN, [t, b], 16, name="gb")
    ga = g.add(OpKind.POINTWISE, [gb, a], 16, name="ga")
    gw = g.add(OpKind.EXTERN, [ga, x], 4, name="gw")
    return g.finish([c], [gw])


def test_numbers_of_a_small_graph() -> None:
    graph = small()
    _, _, _, a, b, _, gb, _, _ = range(9)
    assert graph.default_saved == (a, b)
    default = simulate_graph(graph, default_schedule(graph))
    # a and b are both saved; c comes on top.
    assert (default.forward_rise_bytes, default.saved_bytes, default.forward_out_bytes) == (40, 40, 8)
    # gb while b is still there; ga is written into gb (or a), gw on top of ga.
    assert (default.backward_rise_bytes, default.cost_ms, default.recompute_ms) == (16, 14.0, 0.0)

    less = schedule_for(graph, [a])
    assert less.recompute == (Recompute(value=b, copy=0, before=gb),)
    profile = simulate_graph(graph, less)
    assert (profile.forward_rise_bytes, profile.saved_bytes) == (40, 24)
    assert (profile.backward_rise_bytes, profile.recompute_ms) == (32, 1.0)

    none = simulate_graph(graph, schedule_for(graph, []))
    assert (none.saved_bytes, none.recompute_ms) == (8, 6.0)
    assert none.forward_rise_bytes == 24  # relu is written over a, c comes on top


def test_an_op_that_must_not_run_twice_is_saved() -> None:
    graph = small()
    ops = [dataclasses.replace(op, replayable=op.name != "a") for op in graph.ops]
    graph = dataclasses.replace(graph, ops=tuple(ops))
    schedule = schedule_for(graph, [])
    assert schedule.saved == (3,)
    assert [r.value for r in schedule.recompute] == [4]
    with pytest.raises(ValueError, match="cannot be recomputed"):
        validate(
            graph,
            GraphSchedule(fingerprint="graph", saved=(), recompute=(Recompute(value=3, copy=0, before=6),)),
        )


def test_a_saved_mask_that_only_the_backward_reads_is_made_in_the_forward() -> None:
    g = Builder()
    x = g.input(8)
    t = g.tangent(8)
    a = g.add(OpKind.EXTERN, [x], 8)
    out = g.add(OpKind.EXTERN, [a], 8)
    mask = g.add(OpKind.POINTWISE, [a], 1)
    grad = g.add(OpKind.POINTWISE, [t, mask], 8)
    graph = g.finish([out], [grad], default_saved=[mask])
    assert graph.ops[mask].phase is Phase.FREE
    saved = simulate_graph(graph, default_schedule(graph))
    assert (saved.saved_bytes, saved.forward_rise_bytes) == (1, 17)
    assert forward_program(graph, default_schedule(graph)).ops == (x, t, a, mask, out)
    assert schedule_for(graph, []).recompute == (
        Recompute(value=a, copy=0, before=grad),
        Recompute(value=mask, copy=0, before=grad),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "other"}, "for graph other"),
        ({"saved": (99,)}, "saves op 99"),
        ({"saved": (3, 3, 4)}, "twice"),
        ({"saved": (0, 3, 4)}, "cannot be saved"),
        ({"saved": (3,)}, r"op 6 \(gb\) reads op 4 \(b\), which is neither saved nor recomputed"),
        ({"recompute": (Recompute(value=4, copy=0, before=3),)}, "no op of the backward"),
        ({"recompute": (Recompute(value=4, copy=1, before=6),)}, "not numbered"),
        ({"recompute": (Recompute(value=6, copy=0, before=7),)}, "cannot be recomputed"),
    ],
)
def test_validate_names_what_is_wrong(change: dict[str, object], message: str) -> None:
    graph = small()
    good = default_schedule(graph)
    validate(graph, good)
    with pytest.raises(ValueError, match=message):
        validate(graph, dataclasses.replace(good, **change))  # type: ignore[arg-type]


# -- corrections and steps
# -------------------------------------------------------------------------------------------


def test_calibration_makes_the_default_exact_and_observations_shift_their_neighbourhood() -> None:
    graph = small()
    step = step_of([graph], error_bytes=5)
    correction = calibrate(step)
    assert correction.offset_bytes("graph", RegionKind.BACKWARD, 40) == 5
    lean = schedule_for(graph, [])
    exact = simulate_graph(graph, lean).backward_rise_bytes + 21
    seen = Observation(graph=graph, schedule=lean, direction=RegionKind.BACKWARD, rise_bytes=exact)
    better = correct(correction, [seen])
    assert better == correct(better, [seen])
    assert better.offset_bytes("graph", RegionKind.BACKWARD, 8) == 21
    assert better.offset_bytes("graph", RegionKind.BACKWARD, 24) == 13
    assert better.offset_bytes("graph", RegionKind.BACKWARD, 0) == 21
    assert better.offset_bytes("graph", RegionKind.FORWARD, 8) == 5
    assert NO_CORRECTION.offset_bytes("graph", RegionKind.BACKWARD, 8) == 0
    assert Correction().curve("graph", RegionKind.FORWARD) == ()


def test_a_step_adds_up_what_open_calls_hold() -> None:
    graph = small()
    step = step_of([graph], [0, 0, 0], base_bytes=1000, eager_rise=7, error_bytes=0)
    whole = simulate_step(step, default_schedules([graph]))
    entries = [level.entry_bytes for level in whole.levels]
    assert entries == [1000, 1040, 1080, 1120, 1120, 1080, 1040]
    assert whole.levels[3].rise_bytes == 7
    assert whole.peak_bytes == step.default_peak_bytes == 1136
    assert whole.peak_region == 4
    assert whole.slowdown == 1.0
    assert step.cost_ms == default_cost_ms(step) == 3 * 14.0 + 1.0
    lean = simulate_step(step, [schedule_for(graph, [])], correction=calibrate(step))
    assert lean.slowdown == pytest.approx((3 * 20.0 + 1.0) / (3 * 14.0 + 1.0))
    with pytest.raises(ValueError, match="no schedule for graph"):
        simulate_step(step, [])


def test_holders_add_up_to_the_peak() -> None:
    graph = small()
    schedule = default_schedule(graph)
    held = held_at_peak(graph, schedule, RegionKind.BACKWARD)
    profile = simulate_graph(graph, schedule)
    assert sum(size for _, size in held) == profile.saved_bytes + 8 + profile.backward_rise_bytes
