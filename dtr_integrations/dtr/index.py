"""Indexed search: the decisions of the exact scan, at a cost that hardly grows with the pool.

(Exactly the same for every heuristic but `h_dtr_eq`, where a set's neighbours are told of a fall of its sum
only once it amounts to 2 %; see `SetNeighborhood`. Sets of less than fifty equal members tell every fall.)

Scores fall as the clock advances, so a heap of scores would be out of date at once. A heap here holds *lower
bounds*: each candidate's score at a horizon ahead of the clock. Until the clock is there, no candidate can
score below its bound unless its neighbourhood shrinks, and then the neighbourhood says so
(`Neighborhood.watch`). Uses and growing neighbourhoods only raise scores, so they cost nothing until a
candidate comes up.

A far horizon gives loose bounds, a near one is soon reached. So there is a ladder of heaps whose horizons lie
geometrically nearer. Candidates start in the farthest; the one with the lowest bound of all steps down a rung
and gets a tighter bound there, or has its true score taken on the last. The search ends when no bound is as
low as the lowest true score. A heap whose horizon is reached is built anew, with those below it: few
candidates are on the low rungs, so that what is built often is small.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush

from .heuristics import Score
from .neighborhood import Neighborhood
from .search import Pool
from .values import Storage

_MOST_RUNGS = 5
_NEARER = 6  # times nearer than the rung above; the first, than the pool's mean staleness
_ROUNDING = 1 + 1e-9

_Entry = tuple[float, int, Storage]


class IndexedSearch:
    """See the module and `search.Search`.

    Args:
        score: falls or stays as the clock advances, rises or stays with everything else but a shrinking
            neighbourhood.
        tie_break: see `Policies`.
        neighborhood: told to report falling sums here.
    """

    def __init__(self, score: Score, tie_break: str, neighborhood: Neighborhood) -> None:
        self.accesses = 0
        self._score = score
        self._last = tie_break == "last"
        # Rung 0 is the last one. `_ahead`: horizon minus clock when a rung is built.
        self._heaps: list[list[_Entry]] = [[]]
        self._horizons = [-math.inf]
        self._ahead = [0.0]
        self._waiting: dict[Storage, None] = {}
        self._stamp = 0
        self._neighborhood = neighborhood

    def added(self, storage: Storage) -> None:
        """See `Search`. Called for storages without an entry in a heap."""
        self._waiting[storage] = None

    def forget(self, storage: Storage) -> None:
        """See `Search`."""
        self._waiting.pop(storage, None)

    def choose(self, pool: Pool, clock: int) -> Storage:
        """See `Search`."""
        self._prepare(pool, clock)
        score, heaps, horizons = self._score, self._heaps, self._horizons
        lowest, best = math.inf, None
        losers: list[Storage] = []
        while True:
            bound, rung = min(
                [(heap[0][0], i) for i, heap in enumerate(heaps) if heap], default=(math.inf, -1)
            )
            if rung < 0 or bound > lowest * _ROUNDING:
                break
            _, stamp, storage = heappop(heaps[rung])
            if storage.entry != stamp:
                continue
            if storage not in pool:
                storage.entry = 0
                continue
            self.accesses += 1
            if rung:
                self._stamp = storage.entry = stamp = self._stamp + 1
                heappush(heaps[rung - 1], (score(storage, horizons[rung - 1]), stamp, storage))
                continue
            found = score(storage, clock)
            if best is None:
                lowest, best = found, storage
            elif found < lowest or (found == lowest and self._wins_tie(storage, best, found)):
                losers.append(best)
                lowest, best = found, storage
            else:
                losers.append(storage)
        assert best is not None, "every candidate has an entry"
        self._push(losers, 0)
        best.entry = 0
        self._waiting[best] = None  # should the caller not evict it after all
        return best

    def _wins_tie(self, storage: Storage, best: Storage, score: float) -> bool:
        return (storage.order > best.order) == (self._last and score != 0)

    def _outdated(self, storage: Storage) -> None:
        if storage.entry:
            storage.entry = 0
            self._waiting[storage] = None

    def _prepare(self, pool: Pool, clock: int) -> None:
        top = len(self._heaps) - 1
        if clock >= self._horizons[top] or len(self._heaps[top]) > 2 * len(pool) + 64:
            self._start(pool, clock)
            return
        rung = max((i for i in range(top) if clock >= self._horizons[i]), default=-1)
        if rung >= 0:
            entries = [entry for heap in self._heaps[: rung + 1] for entry in heap]
            self._build([s for _, stamp, s in entries if s.entry == stamp and s in pool], rung, clock)
        self._push([storage for storage in self._waiting if storage in pool], top)
        self._waiting.clear()

    def _start(self, pool: Pool, clock: int) -> None:
        for heap in self._heaps:
            self._disown(heap)
        self._neighborhood.watch = (
            self._outdated
        )  # from the first search on: there is nothing to outdate before
        # A rung for every factor in the pool's size, and none that would be reached at the next tick.
        mean = clock - sum([storage.last_access for storage in pool]) / len(pool)
        rungs = min(math.ceil(math.log(len(pool) + 1, _NEARER)), _MOST_RUNGS)
        ahead = [mean / _NEARER**i for i in range(1, rungs + 1)]
        self._ahead = [step for step in reversed(ahead) if step > 1] or [1.0]
        self._horizons = [0.0] * len(self._ahead)
        self._heaps = [[] for _ in self._ahead]
        self._waiting.clear()
        self._build(list(pool), len(self._ahead) - 1, clock)

    @staticmethod
    def _disown(heap: list[_Entry]) -> None:
        for _, stamp, storage in heap:
            if storage.entry == stamp:
                storage.entry = 0

    def _build(self, storages: list[Storage], rung: int, clock: int) -> None:
        # `storages` go to `rung`; it and the rungs below get new horizons and lose what they held. What is
        # locked just now has no entry from here on, and so is added again when it is unlocked.
        for heap in self._heaps[: rung + 1]:
            self._disown(heap)
        for i in range(rung + 1):
            self._horizons[i] = clock + self._ahead[i]
            self._heaps[i] = []
        score, horizon, stamp, heap = self._score, self._horizons[rung], self._stamp, self._heaps[rung]
        for storage in storages:
            stamp += 1
            storage.entry = stamp
            heap.append((score(storage, horizon), stamp, storage))
        self._stamp = stamp
        heapify(heap)

    def _push(self, storages: list[Storage], rung: int) -> None:
        score, horizon, heap = self._score, self._horizons[rung], self._heaps[rung]
        for storage in storages:
            self._stamp = storage.entry = stamp = self._stamp + 1
            heappush(heap, (score(storage, horizon), stamp, storage))
