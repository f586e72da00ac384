from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest

from dtr_integrations.dtr import HEURISTICS, Policies
from dtr_integrations.dtr.heuristics import ablation, penalised
from dtr_integrations.dtr.neighborhood import neighborhood_for

CLOCK = 10.0
FIELDS = {
    "cost": 6.0,
    "size_bytes": 4,
    "last_access": 7.0,
    "recomputes": 3,
    "evicted_ancestors_cost": 10.0,
    "evicted_descendants_cost": 20.0,
    "evicted_neighborhood_size": 5,
    "adjacent_sets_cost": 18.0,
    "draw": 0.125,
}
SCORES = {
    "h_dtr": 3.0,
    "h_dtr_eq": 2.0,
    "h_local": 0.5,
    "h_e_star": 5,
    "msps": 4.0,
    "lru": 7.0,
    "size": 0.25,
    "random": 0.125,
}


def candidate(needs: frozenset[str], **changes: Any) -> Any:
    """A candidate that has only what the registry says that a heuristic needs."""
    return SimpleNamespace(**{name: {**FIELDS, **changes}[name] for name in needs})


def test_the_contracts_keys_and_no_others() -> None:
    assert set(HEURISTICS) == set(SCORES)
    assert all(key == heuristic.key for key, heuristic in HEURISTICS.items())


@pytest.mark.parametrize("key", HEURISTICS)
def test_scores_from_what_it_says_that_it_needs(key: str) -> None:
    heuristic = HEURISTICS[key]
    assert heuristic.score(candidate(heuristic.needs), CLOCK) == SCORES[key]


@pytest.mark.parametrize("key", HEURISTICS)
def test_needs_everything_that_it_names(key: str) -> None:
    heuristic = HEURISTICS[key]
    for name in heuristic.needs:
        with pytest.raises(AttributeError, match=name):
            heuristic.score(candidate(heuristic.needs - {name}), CLOCK)


@pytest.mark.parametrize("key", ["h_dtr", "h_dtr_eq", "h_local", "msps", "size"])
def test_nothing_to_free_is_never_chosen(key: str) -> None:
    heuristic = HEURISTICS[key]
    assert heuristic.score(candidate(heuristic.needs, size_bytes=0), CLOCK) == math.inf


@pytest.mark.parametrize("key", ["h_dtr", "h_dtr_eq", "h_local"])
def test_just_touched_is_never_chosen(key: str) -> None:
    heuristic = HEURISTICS[key]
    assert heuristic.score(candidate(heuristic.needs, last_access=CLOCK), CLOCK) == math.inf


def test_the_penalty_grows_with_each_recomputation() -> None:
    eq = HEURISTICS["h_dtr_eq"]
    assert penalised(eq, 0) is eq
    scored = penalised(eq, 0.5)
    assert scored.score(candidate(scored.needs), CLOCK) == SCORES["h_dtr_eq"] * 2.5
    assert scored.score(candidate(scored.needs, recomputes=0), CLOCK) == SCORES["h_dtr_eq"]


ABLATIONS = list(itertools.product(("exact", "sets", "local", "none"), (True, False), (True, False)))


@pytest.mark.parametrize(("neighborhood", "by_size", "by_staleness"), ABLATIONS)
def test_ablations(neighborhood: str, by_size: bool, by_staleness: bool) -> None:
    heuristic = ablation(neighborhood, by_size=by_size, by_staleness=by_staleness)
    numerator = {"exact": 36.0, "sets": 24.0, "local": 6.0, "none": 1.0}[neighborhood]
    expected = numerator / (4 if by_size else 1) / (3 if by_staleness else 1)
    assert heuristic.score(candidate(heuristic.needs), CLOCK) == pytest.approx(expected, rel=1e-12)


def test_the_full_cells_of_the_ablation_are_the_named_heuristics() -> None:
    for neighborhood, key in (("exact", "h_dtr"), ("sets", "h_dtr_eq"), ("local", "h_local")):
        cell = ablation(neighborhood, by_size=True, by_staleness=True)
        assert cell.needs == HEURISTICS[key].needs
        assert cell.score(candidate(cell.needs), CLOCK) == SCORES[key]


def test_wrong_names_are_answered_with_the_right_ones() -> None:
    with pytest.raises(ValueError, match=r"heuristic must be one of h_dtr, h_dtr_eq.*; got 'dtr'"):
        Policies(heuristic="dtr")
    with pytest.raises(ValueError, match="deallocation must be one of eager, banish, ignore; got 'lazy'"):
        Policies(deallocation="lazy")
    with pytest.raises(ValueError, match="minimum_bytes must be 0 or more; got -1"):
        Policies(minimum_bytes=-1)
    with pytest.raises(ValueError, match="neighborhood must be one of exact, sets, local, none; got 'e'"):
        ablation("e", by_size=True, by_staleness=True)
    with pytest.raises(ValueError, match="not both"):
        neighborhood_for(frozenset({"adjacent_sets_cost", "evicted_ancestors_cost"}))
