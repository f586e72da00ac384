"""Evicted neighbourhoods: what an eviction would add to the recomputation that is already due.

Two of them, and one that knows nothing for heuristics that don't look:

* `ExactNeighborhood` and `LazyNeighborhood`, e* of the paper's section 2: all evicted storages that would
  have to be computed again before this one, and all whose recomputation would need it. The first keeps every
  sum up to date, the second walks when asked.
* `SetNeighborhood`, the relaxation of section 4.1 and appendix C.3: directions are dropped, and each
  connected piece of evicted storages is a union-find set with a running sum. A set cannot be split, so a
  rematerialised storage leaves its cost behind: the sum is lowered and the storage detached, while its node
  stays where it hangs as a phantom. (Resetting that node instead loses the whole sum when it is the root.)

Every read of a storage's or set's record is counted in `accesses`, when a candidate is scored and when the
records are kept up to date.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

from .values import NOTHING, Reach, Storage

Watch = Callable[[Storage], None]
Edges: TypeAlias = Literal["parents", "children"]
LazyEdges: TypeAlias = Literal["parents", "evicted_children"]

# What a change reaches along the first is kept in the second.
_DIRECTIONS: tuple[tuple[Edges, str], ...] = (("children", "ancestors"), ("parents", "descendants"))


class Neighborhood:
    """The neighbourhood of heuristics that need none. Base of the others.

    Attributes:
        accesses: records read so far.
        watch: called with each resident storage whose sum may have fallen since it was last scored; an index
            that holds lower bounds of scores needs to know. None: nobody asks.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.accesses = 0
        self.watch: Watch | None = None
        self._random = random.Random(seed)

    def evicted(self, storage: Storage) -> None:
        """`storage` has just been evicted."""

    def rematerialised(self, storage: Storage) -> None:
        """`storage` has just become resident again, or has left the graph while evicted."""

    def draw(self) -> float:
        """A uniform number in [0, 1) from the seeded generator."""
        return self._random.random()

    def ancestors_cost(self, storage: Storage) -> int:
        """Nanoseconds of the evicted storages that must be recomputed before `storage` can be."""
        raise self._unknown("ancestors")

    def descendants_cost(self, storage: Storage) -> int:
        """Nanoseconds of the evicted storages whose recomputation would need `storage`."""
        raise self._unknown("descendants")

    def size(self, storage: Storage) -> int:
        """How many storages the two run over."""
        raise self._unknown("size")

    def sets_cost(self, storage: Storage) -> int:
        """Nanoseconds, over the distinct sets of directly adjacent evicted storages."""
        raise self._unknown("sets")

    def _unknown(self, what: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} does not track {what}: name it in the heuristic's needs"
        )


class _Adjacent(Neighborhood):
    # Keeps each storage's evicted_children, so that a score never looks at the resident ones.

    def evicted(self, storage: Storage) -> None:
        for parent in storage.parents:
            if not parent.evicted_children:
                parent.evicted_children = {}
            parent.evicted_children[storage] = None

    def rematerialised(self, storage: Storage) -> None:
        for parent in storage.parents:
            parent.evicted_children.pop(storage, None)


class LazyNeighborhood(_Adjacent):
    """e* that is walked when a score asks, and again once something within reach has changed."""

    def evicted(self, storage: Storage) -> None:
        """See `Neighborhood`. Sums within reach grow."""
        super().evicted(storage)
        self._outdate(storage, fallen=False)

    def rematerialised(self, storage: Storage) -> None:
        """See `Neighborhood`. Sums within reach fall."""
        super().rematerialised(storage)
        self._outdate(storage, fallen=True)
        storage.ancestors = storage.descendants = None

    def ancestors_cost(self, storage: Storage) -> int:
        """See `Neighborhood`."""
        if storage.ancestors is None:
            storage.ancestors = self._walk(storage, "parents")
        return storage.ancestors.cost

    def descendants_cost(self, storage: Storage) -> int:
        """See `Neighborhood`."""
        if storage.descendants is None:
            storage.descendants = self._walk(storage, "evicted_children")
        return storage.descendants.cost

    def size(self, storage: Storage) -> int:
        """See `Neighborhood`."""
        self.ancestors_cost(storage)
        self.descendants_cost(storage)
        assert storage.ancestors
        assert storage.descendants
        return len(storage.ancestors.members) + len(storage.descendants.members)

    def _walk(self, storage: Storage, edges: LazyEdges) -> Reach:
        reach, reads = _walk(storage, edges)
        self.accesses += reads
        return reach

    def _outdate(self, storage: Storage, *, fallen: bool) -> None:
        for along, kept in _DIRECTIONS:
            frontier, reads = _frontier(storage, along)
            self.accesses += reads
            for other in frontier:
                setattr(other, kept, None)
                if self.watch and fallen:
                    self.watch(other)


class ExactNeighborhood(Neighborhood):
    """e* of every storage that may be evicted, kept up to date: the paper's own way (appendix C.3), against
    which the others are measured.

    An eviction adds what it connects to every neighbourhood within reach; after a rematerialisation they are
    walked again, over all edges. A score then reads one record.
    """

    def evicted(self, storage: Storage) -> None:
        """See `Neighborhood`."""
        for along, kept in _DIRECTIONS:
            own: Reach = getattr(storage, kept)
            joined = own.members | {storage}
            for other in self._within_reach(storage, along):
                before: Reach = getattr(other, kept)
                added = joined - before.members
                self.accesses += len(added)
                cost = before.cost + sum([new.cost for new in added])
                setattr(other, kept, Reach(cost, before.members | added))
        storage.ancestors = storage.descendants = NOTHING

    def rematerialised(self, storage: Storage) -> None:
        """See `Neighborhood`."""
        for along, kept in _DIRECTIONS:
            against: Edges = "parents" if along == "children" else "children"
            for other in self._within_reach(storage, along):
                setattr(other, kept, self._walk(other, against))
                if self.watch:
                    self.watch(other)
            if storage.resident:
                setattr(storage, kept, self._walk(storage, against))

    def ancestors_cost(self, storage: Storage) -> int:
        """See `Neighborhood`."""
        assert storage.ancestors
        return storage.ancestors.cost

    def descendants_cost(self, storage: Storage) -> int:
        """See `Neighborhood`."""
        assert storage.descendants
        return storage.descendants.cost

    def size(self, storage: Storage) -> int:
        """See `Neighborhood`."""
        assert storage.ancestors
        assert storage.descendants
        return len(storage.ancestors.members) + len(storage.descendants.members)

    def _within_reach(self, storage: Storage, along: Edges) -> list[Storage]:
        frontier, reads = _frontier(storage, along)
        self.accesses += reads
        return [other for other in frontier if not other.pinned]

    def _walk(self, storage: Storage, edges: Edges) -> Reach:
        reach, reads = _walk(storage, edges)
        self.accesses += reads
        return reach


def _frontier(storage: Storage, along: Edges) -> tuple[list[Storage], int]:
    # The first resident storages that are met from `storage` over evicted ones, and the records read for it.
    frontier: list[Storage] = []
    seen = {storage}
    stack = [storage]
    reads = 0
    while stack:
        adjacent = getattr(stack.pop(), along)
        reads += len(adjacent)
        for other in adjacent:
            if other not in seen:
                seen.add(other)
                (frontier if other.resident else stack).append(other)
    return frontier, reads


def _walk(storage: Storage, edges: str) -> tuple[Reach, int]:
    # The evicted storages that are reached from `storage` over evicted ones, and the records read for it.
    seen = {storage}
    stack = [storage]
    cost = reads = 0
    while stack:
        adjacent = getattr(stack.pop(), edges)
        reads += len(adjacent)
        for other in adjacent:
            if not other.resident and other not in seen:
                seen.add(other)
                cost += other.cost
                stack.append(other)
    seen.discard(storage)
    return Reach(cost, frozenset(seen)), reads


class SetNode:
    """A node of the union-find forest; at a root also the set's running sum and who is in it."""

    __slots__ = ("highest", "members", "parent", "total")

    def __init__(self, storage: Storage) -> None:
        self.parent: SetNode | None = None
        self.total = storage.cost
        self.highest = storage.cost  # of `total`, since the set's neighbours were last told that it fell
        self.members: dict[Storage, None] = {storage: None}


class SetNeighborhood(_Adjacent):
    """Union-find sets of evicted storages.

    Args:
        told_below: `watch` is told of a set's neighbours once its sum is below this share of what it was.
            Telling costs a visit to each of them, and a large set loses a member often.
    """

    def __init__(self, *, seed: int = 0, told_below: float = 0.98) -> None:
        super().__init__(seed=seed)
        self.told_below = told_below

    def evicted(self, storage: Storage) -> None:
        """See `Neighborhood`: a new node, merged with every distinct adjacent set."""
        super().evicted(storage)
        root = storage.node = SetNode(storage)
        for adjacent in (storage.parents, storage.evicted_children):
            self.accesses += len(adjacent)
            for other in adjacent:
                if other.node is not None:
                    root = self._merge(root, self._root(other.node))

    def rematerialised(self, storage: Storage) -> None:
        """See `Neighborhood`: the set loses this storage's cost, and its node stays as a phantom."""
        super().rematerialised(storage)
        assert storage.node is not None
        root = self._root(storage.node)
        root.total -= storage.cost
        root.members.pop(storage, None)
        storage.node = None
        if self.watch:
            self._tell(self.watch, (storage,))
            if root.total < self.told_below * root.highest:
                self._tell(self.watch, root.members)
                root.highest = root.total

    def sets_cost(self, storage: Storage) -> int:
        """See `Neighborhood`."""
        parents, children = storage.parents, storage.evicted_children
        self.accesses += len(parents) + len(children)
        nodes = [other.node for other in parents if other.node is not None]
        if children:
            nodes += [other.node for other in children]  # type: ignore[misc]
        if not nodes:
            return 0
        if len(nodes) == 1:
            return self._root(nodes[0]).total
        return sum([root.total for root in {self._root(node) for node in nodes}])

    def set_of(self, storage: Storage) -> tuple[int, int]:
        """(sum, members) of an evicted storage's set."""
        assert storage.node is not None
        root = self._root(storage.node)
        return root.total, len(root.members)

    def _root(self, node: SetNode) -> SetNode:
        self.accesses += 1
        parent = node.parent
        while parent is not None:
            self.accesses += 1
            above = parent.parent
            if above is None:
                return parent
            node.parent = above
            node, parent = above, above.parent
        return node

    def _merge(self, one: SetNode, other: SetNode) -> SetNode:
        if one is other:
            return one
        large, small = (one, other) if len(one.members) >= len(other.members) else (other, one)
        small.parent = large
        large.total += small.total
        large.highest = max(large.highest + small.highest, large.total)
        large.members.update(small.members)
        small.members = {}
        return large

    def _tell(self, watch: Watch, storages: Iterable[Storage]) -> None:
        for storage in storages:
            for neighbours in (storage.parents, storage.children):
                for other in neighbours:
                    if other.resident:
                        watch(other)


def neighborhood_for(needs: frozenset[str], *, lazy: bool = False, seed: int = 0) -> Neighborhood:
    """A neighbourhood that supplies what a heuristic needs, and no more.

    Raises:
        ValueError: the heuristic needs both kinds at once.
    """
    exact = needs & {"evicted_ancestors_cost", "evicted_descendants_cost", "evicted_neighborhood_size"}
    sets = needs & {"adjacent_sets_cost"}
    if exact and sets:
        raise ValueError(f"a heuristic may need exact sums ({', '.join(sorted(exact))}) or sets, not both")
    if exact:
        return LazyNeighborhood(seed=seed) if lazy else ExactNeighborhood(seed=seed)
    return SetNeighborhood(seed=seed) if sets else Neighborhood(seed=seed)
