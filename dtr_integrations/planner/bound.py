"""A lower bound on the time of every schedule within a budget: `relaxation`'s rows as a linear program.

Values may be saved and rerun in part. The optimum of that is at most the best schedule's time. It is convex
in the budget, so its slope (what a byte more is worth) bounds the time at every other budget too: a few
solved budgets bound a whole frontier.

The assumptions are those of `relaxation`: schedules that save a set of values and make each other one again
once, just before it is first needed; peak and time as the search's simulator scores them, corrected by the
dry runs so far. A schedule of another kind (a value made again twice, another order of the ops) or a kernel
that runs at another speed than modelled is not covered.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from .archive import Frontier
from .linear import ONE, Linear
from .problem import Problem
from .relaxation import Relaxation

__all__ = [
    "Tangent",
    "available",
    "bound_at",
    "lower_bounds",
    "matrix",
    "relaxation_of",
    "slowdown_bound",
    "solve",
    "solve_with_cuts",
    "with_bounds",
]

_FEWEST = 6  # places of a direction that are looked at, however large the graph
_SIZE = 10_000  # variables spent on places; six times as many raised bounds by 0.5 % of a step at most
_TANGENTS = 6  # points of a frontier that have a bound of their own
_SAFE = 1e-6  # share of the bound given up for the solver's tolerances


@dataclass(frozen=True, kw_only=True, slots=True)
class Tangent:
    """No schedule with a peak of `b` bytes takes less than `cost_ms + ms_per_byte × (b − budget_bytes)`.

    `cost_ms` is infinite where no schedule fits into the budget at all, and `ms_per_byte` minus infinity
    where no slope is known; then it bounds the budget itself and lower ones.
    """

    budget_bytes: int
    cost_ms: float
    ms_per_byte: float

    def at(self, budget_bytes: int) -> float:
        """The bound at another budget, in ms."""
        if float("inf") in (self.cost_ms, -self.ms_per_byte):
            return self.cost_ms if budget_bytes <= self.budget_bytes else 0.0
        return max(0.0, self.cost_ms + self.ms_per_byte * (budget_bytes - self.budget_bytes))


def available() -> bool:
    """Whether scipy is installed (`pip install 'dtr-integrations[exact]'`)."""
    return find_spec("scipy") is not None


def matrix(linear: Linear, rows: Iterable[dict[int, float]]) -> tuple[Any, np.ndarray[Any, Any]]:
    """(A, b) with `A x ≥ b` for rows."""
    from scipy.sparse import csr_array

    data: list[float] = []
    columns: list[int] = []
    starts = [0]
    least: list[float] = []
    for row in rows:
        for key, by in row.items():
            if key != ONE:
                columns.append(key)
                data.append(by)
        starts.append(len(data))
        least.append(-row.get(ONE, 0.0))
    shape = (len(least), len(linear.cost))
    return csr_array((data, columns, starts), shape=shape), np.array(least)


def solve(relaxation: Relaxation, budget_bytes: int, *, seconds: float) -> Tangent | None:
    """The relaxation's optimum at one budget; None when the time was not enough."""
    from scipy.optimize import linprog

    linear = relaxation.linear
    at = budget_bytes / relaxation.scale
    lower, upper = list(linear.lower), list(linear.upper)
    lower[relaxation.budget] = upper[relaxation.budget] = at
    table, least = matrix(linear, linear.rows)
    result = linprog(
        linear.cost,
        A_ub=-table,
        b_ub=-least,
        bounds=np.column_stack([lower, upper]),
        method="highs",
        options={"time_limit": max(seconds, 0.01)},
    )
    if result.status == 2:
        return Tangent(budget_bytes=budget_bytes, cost_ms=float("inf"), ms_per_byte=0.0)
    if result.status != 0:
        return None
    slope = float(result.lower.marginals[relaxation.budget] + result.upper.marginals[relaxation.budget])
    cost_ms = float(result.fun) + linear.constant
    return Tangent(
        budget_bytes=budget_bytes,
        cost_ms=cost_ms - _SAFE * abs(cost_ms),
        ms_per_byte=min(slope, 0.0) / relaxation.scale,
    )


def relaxation_of(problem: Problem, *, size: int | None = None) -> Relaxation:
    """Rows for the places of the step at which something is allocated: all, or (`size`: about how many
    variables may be spent) where most is alive whatever is saved, one in each stretch of the step."""
    relaxation = Relaxation(problem)
    for g, rows in enumerate(relaxation.graphs):
        backward, forward = rows.places, rows.forward_places()
        most = None
        if size is not None and len(backward) * sum(rows.needed) > size:
            count = max(_FEWEST, size // max(1, sum(rows.needed)))
            most = size // count
            backward = _fullest(backward, rows.certain_bytes(), count)
            forward = _fullest(forward, list(range(rows.end)), _FEWEST)
        for t in backward:
            relaxation.add_backward(g, t, most=most)
        for k in forward:
            relaxation.add_forward(g, k)
    return relaxation


def _fullest(places: Sequence[int], level: Sequence[int], count: int) -> list[int]:
    """Of each of `count` stretches of `places` the one with the highest level."""
    width = -(-len(places) // count)
    return [
        max(places[start : start + width], key=level.__getitem__)
        for start in range(0, len(places), width or 1)
    ]


def solve_with_cuts(relaxation: Relaxation, budget_bytes: int, *, seconds: float) -> Tangent | None:
    """A higher bound at one budget: the rows with whole numbers as far as the solver's own cutting planes go,
    without branching. Many times dearer than `solve`."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    linear = relaxation.linear
    lower, upper = np.array(linear.lower), np.array(linear.upper)
    lower[relaxation.budget] = upper[relaxation.budget] = budget_bytes / relaxation.scale
    table, least = matrix(linear, linear.rows)
    result = milp(
        linear.cost,
        integrality=np.array(linear.integer, dtype=int),
        bounds=Bounds(lower, upper),
        constraints=LinearConstraint(table, lb=least),
        options={"time_limit": max(seconds, 0.01), "node_limit": 1, "mip_rel_gap": 0.0},
    )
    if result.status == 2:
        return Tangent(budget_bytes=budget_bytes, cost_ms=float("inf"), ms_per_byte=0.0)
    known = getattr(result, "mip_dual_bound", None)
    if known is None or not np.isfinite(known):
        return None
    cost_ms = float(known) + linear.constant
    return Tangent(
        budget_bytes=budget_bytes, cost_ms=cost_ms - _SAFE * abs(cost_ms), ms_per_byte=float("-inf")
    )


def lower_bounds(
    problem: Problem, budgets: Sequence[int], *, seconds: float = 10.0, cuts: bool = False
) -> list[Tangent]:
    """Bounds at some budgets (bytes), the first ones first, as far as the time goes; none without scipy.

    `cuts`: a second, higher one for each budget (`solve_with_cuts`), from all rows; for graphs of up to a few
    hundred ops. Planning goes without.
    """
    if not available() or not problem.step.graphs:
        return []
    stop = time.monotonic() + seconds
    relaxation = relaxation_of(problem, size=None if cuts else _SIZE)
    found = []
    for budget in budgets:
        if (left := stop - time.monotonic()) <= 0:
            break
        solvers = (solve, solve_with_cuts) if cuts else (solve,)
        bounds = (solver(relaxation, budget, seconds=left) for solver in solvers)
        found += [tangent for tangent in bounds if tangent is not None]
    return found


def with_bounds(problem: Problem, frontier: Frontier, *, seconds: float = 3.0) -> Frontier:
    """`frontier` with a `slowdown_lower_bound` at each point, as far as `seconds` go.

    The focus of the problem has its own bound, and so have a few points along the frontier; what these imply
    bounds the others. Points stay as they are without scipy, or when the time did not reach for one bound.
    """
    points = frontier.points
    focus = problem.focus_bytes
    inside = [p.peak_bytes for p in points[:-1]]
    if not inside:
        return replace(frontier, points=(replace(points[-1], slowdown_lower_bound=1.0),))
    wanted = [] if focus is None or (at := frontier.at(focus)) is None else [at.peak_bytes, focus]
    wanted += [inside[k * (len(inside) - 1) // (_TANGENTS - 1)] for k in range(_TANGENTS)]
    wanted = [b for b in dict.fromkeys(wanted) if b < points[-1].peak_bytes]
    tangents = lower_bounds(problem, wanted, seconds=seconds)
    if not tangents:
        return frontier
    return replace(
        frontier,
        points=tuple(
            replace(p, slowdown_lower_bound=slowdown_bound(problem, p.peak_bytes, tangents, most=p.slowdown))
            for p in points
        ),
    )


def bound_at(problem: Problem, budget_bytes: int, *, most: float, seconds: float = 2.0) -> float | None:
    """The least slowdown of any schedule within a budget, `most` at most (a known plan's); None without scipy
    or when the time was not enough."""
    if budget_bytes >= problem.step.default_peak_bytes:
        return 1.0
    tangents = lower_bounds(problem, [budget_bytes], seconds=seconds)
    return slowdown_bound(problem, budget_bytes, tangents, most=most)


def slowdown_bound(
    problem: Problem, budget_bytes: int, tangents: Iterable[Tangent], *, most: float
) -> float | None:
    """The least slowdown that `tangents` leave at a budget, `most` at most (what a plan there has); None
    without tangents.

    1 where the budget does not bind: the default is no slower than itself, and a plan that models faster
    counts as 1.
    """
    default_ms = problem.step.cost_ms
    if budget_bytes >= problem.step.default_peak_bytes or not default_ms:
        return 1.0
    found = [tangent.at(budget_bytes) / default_ms for tangent in tangents]
    return min(most, max(1.0, *found)) if found else None
