"""Eviction heuristics: a score per resident storage; the lowest is evicted.

Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, section 4.1 and appendix D; `msps` is Peng et
al., "Capuchin", ASPLOS 2020, as the paper adapts it.

A heuristic is a pure function of one candidate. It reads only the attributes that it needs, and a candidate
may compute them when read: the sums over evicted neighbours are what makes `h_dtr` dear and `h_dtr_eq` cheap.

Not here: `random`, which needs a generator's state, and `h_e_star`, which counts storages of the exact
neighbourhood.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
    def staleness(self) -> float:
        """Clock minus last access."""

    @property
    def evicted_ancestors_cost(self) -> float:
        """The sum of c0 over the evicted storages that must be computed again before this one can be."""

    @property
    def evicted_descendants_cost(self) -> float:
        """The sum of c0 over the evicted storages whose recomputation would need this one."""

    @property
    def adjacent_sets_cost(self) -> float:
        """The sum over the distinct union-find sets of directly adjacent evicted storages."""


Heuristic = Callable[[Candidate], float]


def h_dtr(candidate: Candidate) -> float:
    """Cost of the exact evicted neighbourhood over size and staleness."""
    cost = candidate.cost + candidate.evicted_ancestors_cost + candidate.evicted_descendants_cost
    return _ratio(cost, candidate.size_bytes * candidate.staleness)


def h_dtr_eq(candidate: Candidate) -> float:
    """`h_dtr` with the neighbourhood approximated by union-find sets, in near-constant time."""
    cost = candidate.cost + candidate.adjacent_sets_cost
    return _ratio(cost, candidate.size_bytes * candidate.staleness)


def h_local(candidate: Candidate) -> float:
    """`h_dtr` that sees no neighbours."""
    return _ratio(candidate.cost, candidate.size_bytes * candidate.staleness)


def msps(candidate: Candidate) -> float:
    """Memory saving per second, inverted: recompute cost per byte, without staleness."""
    return _ratio(candidate.cost + candidate.evicted_ancestors_cost, candidate.size_bytes)


def lru(candidate: Candidate) -> float:
    """Least recently used first."""
    return candidate.last_access


def size(candidate: Candidate) -> float:
    """Largest first."""
    return _ratio(1, candidate.size_bytes)


HEURISTICS: Mapping[str, Heuristic] = MappingProxyType(
    {
        "h_dtr": h_dtr,
        "h_dtr_eq": h_dtr_eq,
        "h_local": h_local,
        "msps": msps,
        "lru": lru,
        "size": size,
    }
)
"""The heuristics by the keys that users and logs know them by."""


def _ratio(numerator: float, denominator: float) -> float:
    # Touched this instant, or nothing to free: never the one to evict.
    return numerator / denominator if denominator else math.inf
