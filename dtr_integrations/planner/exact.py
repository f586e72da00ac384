"""The fastest save sets within a budget, exactly, on small graphs: a mixed-integer program, solved by HiGHS.

The rows of `relaxation` with whole numbers give save sets that no others are faster than, as far as the rows
know. The simulator has the last word: where it finds their peak over the budget, the program gets a row more
that says why (`witness`), and is solved again. The first save sets that pass are an optimum of the
simulator's own model, because every row holds for every schedule of the class.

Sources: logic-based Benders decomposition (Hooker and Ottosson 2003); rematerialisation as an integer program
(Jain et al. 2020, "Checkmate"), here with storages and fusion instead of values, and with one recomputation.

What it does not do: schedules that make a value twice; graphs of more than a few hundred ops.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.schedule import schedule_for
from ..errors import MissingExtra
from .bound import available, matrix, relaxation_of
from .problem import Problem
from .relaxation import Relaxation
from .witness import forbid

__all__ = ["Exact", "exact"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exact:
    """What the exact search found.

    Attributes:
        cost_ms: Modelled time of the fastest schedule within the budget; infinite when none fits.
        bound_ms: No schedule is faster; equal to `cost_ms` when solved.
        saved: Its save set for each graph (empty when none was found).
        solved: Whether the optimum is proved; else the time was up.
        rounds: Programs solved.
    """

    cost_ms: float
    bound_ms: float
    saved: tuple[tuple[int, ...], ...]
    solved: bool
    rounds: int


def exact(problem: Problem, budget_bytes: int, *, seconds: float = 60.0) -> Exact:
    """The fastest canonical schedule whose simulated peak is at most `budget_bytes`.

    The default's own graphs, whose peak is measured and not simulated, are not among them.

    Raises MissingExtra without scipy, ValueError where the policy charges inlined ops less than their cost.
    """
    if not available():
        raise MissingExtra(what="exact", package="scipy", extra="exact")
    if problem.policy.inlined_cost != 1.0:
        raise ValueError(
            "exact needs a cost that does not depend on fusion: the policy's inlined_cost is "
            f"{problem.policy.inlined_cost}, use FusionPolicy(inlined_cost=1.0)"
        )
    stop = time.monotonic() + seconds
    relaxation = relaxation_of(problem)
    bound_ms, rounds = 0.0, 0
    while (left := stop - time.monotonic()) > 0:
        rounds += 1
        solution, known_ms, over = _solve(relaxation, budget_bytes, left)
        bound_ms = max(bound_ms, known_ms)
        if solution is None:
            if over:
                return Exact(
                    cost_ms=float("inf"), bound_ms=float("inf"), saved=(), solved=True, rounds=rounds
                )
            break
        saved = relaxation.save_sets(solution)
        saved = [schedule_for(g, s).saved for g, s in zip(problem.step.graphs, saved, strict=True)]
        relaxation.state.assign(saved)
        if relaxation.state.peak_bytes <= budget_bytes:
            cost_ms = relaxation.state.cost_ms
            return Exact(cost_ms=cost_ms, bound_ms=cost_ms, saved=tuple(saved), solved=True, rounds=rounds)
        forbid(relaxation, saved, budget_bytes)
    return Exact(cost_ms=float("inf"), bound_ms=bound_ms, saved=(), solved=False, rounds=rounds)


def _solve(
    relaxation: Relaxation, budget_bytes: int, seconds: float
) -> tuple[Sequence[float] | None, float, bool]:
    """(an optimal solution or None, a bound in ms, whether there is none)."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    linear = relaxation.linear
    lower, upper = list(linear.lower), list(linear.upper)
    lower[relaxation.budget] = upper[relaxation.budget] = budget_bytes / relaxation.scale
    table, least = matrix(linear, linear.rows)
    result = milp(
        linear.cost,
        integrality=np.array(linear.integer, dtype=int),
        bounds=Bounds(np.array(lower), np.array(upper)),
        constraints=LinearConstraint(table, lb=least),
        options={"time_limit": max(seconds, 0.01), "mip_rel_gap": 0.0},
    )
    bound = getattr(result, "mip_dual_bound", None)
    bound_ms = 0.0 if bound is None or not np.isfinite(bound) else float(bound) + linear.constant
    if result.status == 2:
        return None, bound_ms, True
    if result.status != 0:
        return None, bound_ms, False
    return list(result.x), bound_ms, False
