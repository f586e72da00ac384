"""The search for what to evict: the scan of every candidate, and the scan of a sample."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Protocol

from .heuristics import Score
from .values import Storage

Pool = dict[Storage, None]
"""Evictable storages, in the order in which they became so."""


class Search(Protocol):
    """Finds the candidate with the lowest score.

    Attributes:
        accesses: records of candidates that were read.
    """

    accesses: int

    def added(self, storage: Storage) -> None:
        """`storage` has become evictable."""

    def forget(self, storage: Storage) -> None:
        """`storage` will never be evictable again."""

    def choose(self, pool: Pool, clock: int) -> Storage:
        """The storage of the non-empty `pool` to evict at `clock` (nanoseconds)."""


class ExactScan:
    """Scores the whole pool. With tie-break "last", a later storage wins over an equal earlier one."""

    def __init__(self, score: Score, tie_break: str) -> None:
        self.accesses = 0
        self._score = score
        self._last = tie_break == "last"

    def added(self, storage: Storage) -> None:
        """See `Search`."""

    def forget(self, storage: Storage) -> None:
        """See `Search`."""

    def choose(self, pool: Pool, clock: int) -> Storage:
        """See `Search`."""
        return self._lowest(pool, clock)

    def _lowest(self, candidates: Iterable[Storage], clock: int) -> Storage:
        score, last = self._score, self._last
        lowest, best = math.inf, None
        for storage in candidates:
            self.accesses += 1
            found = score(storage, clock)
            if found < lowest or (last and found == lowest) or best is None:
                lowest, best = found, storage
                if found == 0:
                    break
        assert best is not None
        return best


class SampledScan(ExactScan):
    """Scores ⌈√n⌉ random candidates of n."""

    def __init__(self, score: Score, tie_break: str, seed: int) -> None:
        super().__init__(score, tie_break)
        self._random = random.Random(seed)

    def choose(self, pool: Pool, clock: int) -> Storage:
        """See `Search`."""
        count = math.isqrt(len(pool) - 1) + 1
        return self._lowest(self._random.sample(tuple(pool), count), clock)
