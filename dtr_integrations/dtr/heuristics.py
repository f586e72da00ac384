"""Eviction heuristics: a score per resident storage; the lowest is evicted.

Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, section 4.1 and appendix D; `msps` is Peng et
al., "Capuchin", ASPLOS 2020, as the paper adapts it; `h_e_star` is the heuristic of Theorem 3.1.

A heuristic is a pure function of one candidate and the clock. It reads only the attributes that its registry
entry names, and a candidate may compute them when read: the sums over evicted neighbours are what makes
`h_dtr` dear and `h_dtr_eq` cheap. Every score falls or stays as the clock advances and nothing else happens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol


class Candidate(Protocol):
    """A resident storage that may be evicted. Costs and times are in nanoseconds, sizes in bytes."""

    @property
    def cost(self) -> float:
        """c0: the cost of all operators that produce a tensor of this storage, each counted once."""

    @property
    def size_bytes(self) -> int:
        """Bytes that an eviction frees."""

    @property
    def last_access(self) -> float:
        """The clock when the storage was last used."""

    @property
    def recomputes(self) -> int:
        """How often the storage was rematerialised so far."""

    @property
    def evicted_ancestors_cost(self) -> float:
        """The sum of c0 over the evicted storages that must be computed again before this one can be."""

    @property
    def evicted_descendants_cost(self) -> float:
        """The sum of c0 over the evicted storages whose recomputation would need this one."""

    @property
    def evicted_neighborhood_size(self) -> int:
        """How many evicted storages the two sums above run over."""

    @property
    def adjacent_sets_cost(self) -> float:
        """The sum over the distinct union-find sets of directly adjacent evicted storages."""

    @property
    def draw(self) -> float:
        """A fresh uniform number in [0, 1)."""


Score = Callable[[Candidate, float], float]
"""(candidate, clock) -> score."""


@dataclass(frozen=True, kw_only=True)
class Heuristic:
    """An entry of the registry.

    Attributes:
        key: the name that users and logs know it by.
        score: the pure function.
        needs: the attributes of a `Candidate` that `score` reads, and so what a cache has to track.
    """

    key: str
    score: Score
    needs: frozenset[str]


def h_dtr(candidate: Candidate, clock: float) -> float:
    """Cost of the exact evicted neighbourhood over size and staleness."""
    cost = candidate.cost + candidate.evicted_ancestors_cost + candidate.evicted_descendants_cost
    return _ratio(cost, candidate.size_bytes * (clock - candidate.last_access))


def h_dtr_eq(candidate: Candidate, clock: float) -> float:
    """`h_dtr` with the neighbourhood approximated by union-find sets, in near-constant time."""
    denominator = candidate.size_bytes * (clock - candidate.last_access)
    return (candidate.cost + candidate.adjacent_sets_cost) / denominator if denominator else math.inf


def h_local(candidate: Candidate, clock: float) -> float:
    """`h_dtr` that sees no neighbours."""
    return _ratio(candidate.cost, candidate.size_bytes * (clock - candidate.last_access))


def h_e_star(candidate: Candidate, clock: float) -> float:
    """Size of the exact evicted neighbourhood: `h_dtr` without staleness where every storage is a unit."""
    return candidate.evicted_neighborhood_size


def msps(candidate: Candidate, clock: float) -> float:
    """Memory saving per second, inverted: recompute cost per byte, without staleness."""
    return _ratio(candidate.cost + candidate.evicted_ancestors_cost, candidate.size_bytes)


def lru(candidate: Candidate, clock: float) -> float:
    """Least recently used first."""
    return candidate.last_access


def size(candidate: Candidate, clock: float) -> float:
    """Largest first."""
    return _ratio(1, candidate.size_bytes)


def random(candidate: Candidate, clock: float) -> float:
    """Any of them with the same probability: the lowest of independent draws."""
    return candidate.draw


_ANCESTORS, _DESCENDANTS = "evicted_ancestors_cost", "evicted_descendants_cost"
_AGE = ("size_bytes", "last_access")


def _registry(*rows: tuple[Score, tuple[str, ...]]) -> Mapping[str, Heuristic]:
    entries = {
        score.__name__: Heuristic(key=score.__name__, score=score, needs=frozenset(needs))
        for score, needs in rows
    }
    return MappingProxyType(entries)


HEURISTICS: Mapping[str, Heuristic] = _registry(
    (h_dtr, ("cost", _ANCESTORS, _DESCENDANTS, *_AGE)),
    (h_dtr_eq, ("cost", "adjacent_sets_cost", *_AGE)),
    (h_local, ("cost", *_AGE)),
    (h_e_star, ("evicted_neighborhood_size",)),
    (msps, ("cost", _ANCESTORS, "size_bytes")),
    (lru, ("last_access",)),
    (size, ("size_bytes",)),
    (random, ("draw",)),
)
"""The heuristics by the keys that users and logs know them by."""


def penalised(heuristic: Heuristic, weight: float) -> Heuristic:
    """`heuristic` with every score times (1 + weight · recomputes), against thrashing (MegEngine's rule).

    What was rematerialised often becomes dearer to evict again. A weight of 0 is `heuristic` itself.
    """
    if weight == 0:
        return heuristic
    score = heuristic.score
    return Heuristic(
        key=f"{heuristic.key}+{weight:g}r",
        score=lambda candidate, clock: score(candidate, clock) * (1 + weight * candidate.recomputes),
        needs=heuristic.needs | {"recomputes"},
    )


def ablation(neighborhood: str, *, by_size: bool, by_staleness: bool) -> Heuristic:
    """One cell of the paper's ablation (appendix D.1): cost over size and staleness, each in or out.

    Args:
        neighborhood: what the cost adds to c0: "exact" (e*), "sets" (union-find), "local" (nothing), or
            "none" (the cost itself is left out: 1 over size and staleness).
        by_size: divide by the size.
        by_staleness: divide by the staleness.
    """
    needs = {
        "exact": ("cost", _ANCESTORS, _DESCENDANTS),
        "sets": ("cost", "adjacent_sets_cost"),
        "local": ("cost",),
        "none": (),
    }
    if neighborhood not in needs:
        raise ValueError(f"neighborhood must be one of {', '.join(needs)}; got {neighborhood!r}")
    terms = needs[neighborhood]

    def score(candidate: Candidate, clock: float) -> float:
        numerator = sum(getattr(candidate, term) for term in terms) if terms else 1
        denominator = candidate.size_bytes if by_size else 1
        return _ratio(
            numerator, denominator * (clock - candidate.last_access) if by_staleness else denominator
        )

    divisors = ("size_bytes",) * by_size + ("last_access",) * by_staleness
    key = "/".join((neighborhood, *("size",) * by_size, *("staleness",) * by_staleness))
    return Heuristic(key=key, score=score, needs=frozenset((*terms, *divisors)))


def _ratio(numerator: float, denominator: float) -> float:
    # Touched this instant, or nothing to free: never the one to evict.
    return numerator / denominator if denominator else math.inf
