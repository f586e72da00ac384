from __future__ import annotations

import dataclasses
import itertools
import time
from itertools import pairwise

import pytest
from graphs import calibrate, chain, gpt_like, saveable, step_of, steps, training_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from dtr_integrations.core.graph import OpKind, Phase, RegionKind, StaticMemory, StepGraph
from dtr_integrations.core.schedule import (
    backward_program,
    default_schedules,
    is_tangent,
    must_save,
    schedule_for,
    validate,
)
from dtr_integrations.core.simulate import (
    Observation,
    correct,
    entry_weights,
    simulate_graph,
    simulate_step,
)
from dtr_integrations.planner import Frontier, Problem, blocks, greedy, holders, local, mincut, search
from dtr_integrations.planner.archive import Archive
from dtr_integrations.planner.state import StepState

EXAMPLES = settings(max_examples=60, deadline=None)


def problem_of(step: StepGraph, **changes: object) -> Problem:
    return Problem(step=step, correction=calibrate(step), **changes)  # type: ignore[arg-type]


def check(problem: Problem, frontier: Frontier) -> None:
    """What holds for every frontier."""
    step = problem.step
    assert frontier.points[-1].is_default
    assert frontier.default.peak_bytes == step.default_peak_bytes
    assert frontier.default.slowdown == 1.0
    assert frontier.default.schedules == default_schedules(step.graphs)
    for low, high in pairwise(frontier.points):
        assert low.peak_bytes < high.peak_bytes
        assert low.slowdown > high.slowdown or high.is_default
    for point in frontier.points[:-1]:
        for graph, schedule in zip(step.graphs, point.schedules, strict=True):
            validate(graph, schedule)
        whole = simulate_step(step, point.schedules, correction=problem.correction, policy=problem.policy)
        assert point.peak_bytes == whole.peak_bytes
        assert point.slowdown == pytest.approx(max(1.0, whole.slowdown))


@EXAMPLES
@given(st.data())
def test_frontier_on_random_steps(data: st.DataObject) -> None:
    step = data.draw(steps())
    try:
        problem = problem_of(step)
    except ValueError:
        return  # a random backward that reads what can neither be kept nor redone
    frontier = search(problem)
    check(problem, frontier)
    assert search(problem) == frontier
    budgets = sorted(data.draw(st.lists(st.integers(90, step.default_peak_bytes + 10), min_size=2)))
    chosen = [frontier.at(budget) for budget in budgets]
    for budget, point in zip(budgets, chosen, strict=True):
        assert point is None or point.peak_bytes <= budget
        assert (point is None) == (budget < frontier.lowest.peak_bytes)
        assert budget < step.default_peak_bytes or point is frontier.default
    for less, more in pairwise(chosen):
        assert less is None or (more is not None and more.slowdown <= less.slowdown)


def test_greedy_stalls_where_block_starts_do_not() -> None:
    graph = chain()
    problem = problem_of(step_of([graph], error_bytes=0))
    default = problem.step.default_peak_bytes
    state = StepState(problem.step, problem.correction, [graph.default_saved])
    greedy.descend(state, Archive())
    stalled = state.peak_bytes
    assert stalled == default

    best = Archive()
    for saved in blocks.starts(problem):
        state.assign(saved)
        best.add(state)
    assert best.lowest is not None
    assert best.lowest.peak_bytes < stalled
    assert search(problem).lowest.peak_bytes <= best.lowest.peak_bytes


def test_search_reaches_what_block_checkpointing_reaches() -> None:
    graph = gpt_like(4)
    problem = problem_of(step_of([graph], error_bytes=0))
    frontier = search(problem)
    check(problem, frontier)
    ends = [op.index for op in graph.ops if op.module.count(".") == 1 and op.kind is OpKind.POINTWISE]
    by_block = {graph.ops[i].module: i for i in ends if graph.ops[i].phase == "forward"}
    by_hand = schedule_for(graph, list(by_block.values()))
    peak = simulate_step(problem.step, [by_hand], correction=problem.correction)
    point = frontier.at(peak.peak_bytes)
    assert point is not None
    assert point.slowdown <= peak.slowdown


def test_cuts_of_a_residual_network_lie_between_its_sublayers() -> None:
    graph = gpt_like(4)
    crossing = [
        [sum(graph.value_bytes(i) for i in kept) for kept in cuts.crossing]
        for cuts in blocks.cut_candidates(graph)
    ]
    # One residual stream and the random seeds, before and after each attention.
    assert [17] * 7 in crossing


def test_a_gpt_is_searched_in_seconds() -> None:
    graph = gpt_like(9)
    assert len(graph.ops) > 900
    started = time.perf_counter()
    frontier = search(problem_of(step_of([graph], error_bytes=0)))
    assert time.perf_counter() - started < 30  # about 2 s on an idle machine
    assert len(frontier.points) > 20


def test_a_graph_that_is_called_several_times_counts_each_time() -> None:
    graph = gpt_like(1, fingerprint="block")
    problem = problem_of(step_of([graph], [0, 0, 0, 0], error_bytes=0))
    frontier = search(problem)
    check(problem, frontier)
    default = simulate_graph(graph, default_schedules([graph])[0])
    assert frontier.lowest.peak_bytes < problem.step.default_peak_bytes - 2 * default.saved_bytes
    assert len(frontier.lowest.schedules) == 1


def test_a_correction_moves_the_frontier() -> None:
    graph = gpt_like(2)
    step = step_of([graph], error_bytes=0)
    problem = problem_of(step)
    before = search(problem)
    schedule = before.lowest.schedules[0]
    exact = simulate_graph(graph, schedule).backward_rise_bytes + 50
    seen = Observation(graph=graph, schedule=schedule, direction=RegionKind.BACKWARD, rise_bytes=exact)
    after = search(dataclasses.replace(problem, correction=correct(problem.correction, [seen])))
    assert after.lowest.peak_bytes > before.lowest.peak_bytes
    check(dataclasses.replace(problem, correction=correct(problem.correction, [seen])), after)


def test_focus_never_makes_it_worse() -> None:
    graph = gpt_like(2)
    step = step_of([graph], error_bytes=0)
    plain = search(problem_of(step))
    budget = (plain.lowest.peak_bytes + step.default_peak_bytes) // 2
    focused = search(problem_of(step, focus_bytes=budget)).at(budget)
    unfocused = plain.at(budget)
    assert focused is not None
    assert unfocused is not None
    assert focused.slowdown <= unfocused.slowdown


def test_local_descent_and_fill_respect_their_target() -> None:
    graph = gpt_like(2)
    problem = problem_of(step_of([graph], error_bytes=0))
    state = StepState(problem.step, problem.correction, [graph.default_saved])
    low, high = search(problem).lowest.peak_bytes, problem.step.default_peak_bytes
    target = (low + high) // 2
    assert local.descend(state, Archive(), target)
    assert state.peak_bytes <= target
    slow = state.cost_ms
    local.fill(state, Archive(), target)
    assert state.peak_bytes <= target
    assert state.cost_ms <= slow


def test_holders_name_modules() -> None:
    graph = gpt_like(2)
    problem = problem_of(step_of([graph], error_bytes=0))
    frontier = search(problem)
    named = holders(problem.step, frontier.lowest.schedules)
    assert named == frontier.holders
    assert [size for _, size in named] == sorted((size for _, size in named), reverse=True)
    assert any(name.startswith("blocks.") for name, _ in named)
    assert sum(size for _, size in named) == frontier.lowest.peak_bytes


def test_a_step_without_graphs_has_only_the_default() -> None:
    memory = StaticMemory(
        parameter_bytes=1, buffer_bytes=0, optimizer_bytes=0, gradient_bytes=0, batch_bytes=0
    )
    step = StepGraph(graphs=(), regions=(), static=memory, default_peak_bytes=7)
    frontier = search(Problem(step=step))
    assert len(frontier.points) == 1
    assert frontier.at(7) is frontier.default
    assert frontier.at(6) is None


@pytest.mark.parametrize("seed", [0, 8, 13, 19, 33])
def test_a_cut_is_the_best_save_set_at_its_price(seed: int) -> None:
    graph = training_graph(seed, 34, views=False)
    weights = entry_weights(graph)

    def scored(saved: tuple[int, ...]) -> tuple[float, int]:
        """(ms run again, bytes handed over and 1 for each value) of a save set."""
        schedule = schedule_for(graph, saved)
        program = backward_program(graph, schedule)
        entries = [graph.ops[i] for i in program.ops[: program.entries]]
        held = [
            op for op in entries if op.phase is not Phase.INPUT or (weights[op.value] and not is_tangent(op))
        ]
        again = sum(graph.ops[item.value].cost_ms for item in schedule.recompute)
        return again, sum(weights[op.value] + 1 for op in held)

    known = must_save(graph)
    choice = [i for i in saveable(graph) if i not in known]
    assert len(choice) < 15
    every = [
        scored(saved) for size in range(len(choice) + 1) for saved in itertools.combinations(choice, size)
    ]
    sets = list(mincut.cut_save_sets(graph))
    assert len(sets) > 2
    for saved in sets:
        again, size = scored(saved)
        # On the lower hull: no price at all would make it lose, so no other is lower and faster.
        assert not any(a < again - 1e-9 and s <= size for a, s in every)
        assert not any(a <= again + 1e-9 and s < size for a, s in every)
    for price in (0.01, 0.1, 1.0, 5.0):
        best = min(a + price * s for a, s in every)
        cut = mincut.cheapest(graph, price)
        again, size = scored(cut)
        assert again + price * size == pytest.approx(best)


@pytest.mark.parametrize("quarter", [1, 2, 3])
def test_tabu_search_leaves_where_fill_is_stuck(quarter: int) -> None:
    graph = gpt_like(2)
    step = step_of([graph], error_bytes=0)
    problem = problem_of(step)
    low = search(problem).lowest
    target = low.peak_bytes + (step.default_peak_bytes - low.peak_bytes) * quarter // 4
    state = StepState(step, problem.correction, [low.schedules[0].saved])
    archive = Archive()
    local.fill(state, archive, target)
    stuck = state.cost_ms
    local.escape(state, archive, target, effort=3000)
    best = archive.at(target)
    assert best is not None
    assert best.cost_ms < stuck - 1
    state.assign(best.saved)
    assert state.peak_bytes == best.peak_bytes <= target
    assert state.cost_ms == pytest.approx(best.cost_ms)
