from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from dtr_integrations.dtr import HEURISTICS

FIELDS = {
    "cost": 6.0,
    "size_bytes": 4,
    "last_access": 7.0,
    "staleness": 3.0,
    "evicted_ancestors_cost": 10.0,
    "evicted_descendants_cost": 20.0,
    "adjacent_sets_cost": 18.0,
}
READS = {
    "h_dtr": ("cost", "evicted_ancestors_cost", "evicted_descendants_cost", "size_bytes", "staleness"),
    "h_dtr_eq": ("cost", "adjacent_sets_cost", "size_bytes", "staleness"),
    "h_local": ("cost", "size_bytes", "staleness"),
    "msps": ("cost", "evicted_ancestors_cost", "size_bytes"),
    "lru": ("last_access",),
    "size": ("size_bytes",),
}


def candidate(key: str, **changes: Any) -> Any:
    """A candidate that has only what this heuristic may read."""
    return SimpleNamespace(**{name: {**FIELDS, **changes}[name] for name in READS[key]})


@pytest.mark.parametrize(
    ("key", "score"),
    [("h_dtr", 3.0), ("h_dtr_eq", 2.0), ("h_local", 0.5), ("msps", 4.0), ("lru", 7.0), ("size", 0.25)],
)
def test_scores(key: str, score: float) -> None:
    assert HEURISTICS[key](candidate(key)) == score


@pytest.mark.parametrize("key", [key for key in HEURISTICS if key != "lru"])
def test_nothing_to_free_is_never_chosen(key: str) -> None:
    assert HEURISTICS[key](candidate(key, size_bytes=0)) == math.inf


@pytest.mark.parametrize("key", ["h_dtr", "h_dtr_eq", "h_local"])
def test_just_touched_is_never_chosen(key: str) -> None:
    assert HEURISTICS[key](candidate(key, staleness=0.0)) == math.inf


def test_every_heuristic_is_tested() -> None:
    assert set(HEURISTICS) == set(READS)
