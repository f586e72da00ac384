"""The paper's two theorems, on networks of unit cost and unit size."""

from __future__ import annotations

import itertools
import math

import pytest

from dtr_integrations.dtr import replay
from dtr_integrations.dtr.networks import adversary, linear_network


def per_operator(heuristic: str, n: int) -> float:
    """Operators that run at B = 2⌈√N⌉, over the 2N of the step."""
    budget = 2 * math.ceil(math.sqrt(n))
    result = replay(linear_network(n), heuristic=heuristic, budget_bytes=budget, limit=math.inf)
    assert result.outcome == "ok"
    return (result.clock_ns - 1) / (2 * n)


@pytest.mark.parametrize(
    ("heuristic", "bound", "expected"),
    [
        ("h_dtr_eq", 1.55, (1.383, 1.449, 1.482, 1.515)),
        ("h_dtr", 1.55, (1.383, 1.449, 1.482)),
        ("h_e_star", 2.0, (1.547, 1.705, 1.824)),
    ],
)
def test_theorem_3_1(heuristic: str, bound: float, expected: tuple[float, ...]) -> None:
    found = [per_operator(heuristic, 64 * 4**i) for i in range(len(expected))]
    assert found == pytest.approx(expected, abs=0.001)
    assert max(found) <= bound
    increments = [after - before for before, after in itertools.pairwise(found)]
    assert all(after <= before + 0.001 for before, after in itertools.pairwise(increments))


@pytest.mark.slow
@pytest.mark.parametrize(("heuristic", "bound"), [("h_dtr", 1.55), ("h_e_star", 2.0)])
def test_theorem_3_1_at_4096(heuristic: str, bound: float) -> None:
    assert per_operator(heuristic, 4096) <= bound


@pytest.mark.parametrize("heuristic", ["h_local", "lru"])
def test_without_neighbours_the_overhead_grows_without_bound(heuristic: str) -> None:
    found = [per_operator(heuristic, n) for n in (64, 256, 1024)]
    assert found == pytest.approx([2.258, 4.871, 13.990], abs=0.001)


@pytest.mark.parametrize("heuristic", ["h_dtr_eq", "h_dtr", "lru", "h_local"])
def test_theorem_3_2(heuristic: str) -> None:
    """The adversary's overhead is proportional to N at one budget, and falls as the budget grows."""
    ratios = [adversary(n, 8, heuristic=heuristic).ratio for n in (128, 256, 512)]
    assert ratios[1] / ratios[0] > 1.8
    assert ratios[2] / ratios[1] > 1.8
    assert adversary(512, 16, heuristic=heuristic).ratio < ratios[2]
