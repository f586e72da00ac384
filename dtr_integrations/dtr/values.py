"""What the cache keeps account of: operators, tensors (views) and the storages behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .neighborhood import Neighborhood, SetNode

NEVER = float("-inf")


class Operator:
    """One call of a pure function, as it can be replayed.

    Attributes:
        name: for messages and traces.
        args: the tensors that it reads.
        outputs: the tensors that it makes, after its first run.
        output_bytes: bytes that a run allocates; views count 0.
        cost: nanoseconds of one run; of the first where it is measured.
        handle: whatever the owner of the cache needs to run it; never looked at here.
    """

    __slots__ = ("args", "cost", "handle", "name", "output_bytes", "outputs")

    def __init__(
        self, name: str, args: tuple[Tensor, ...], output_bytes: int, cost: int, handle: Any
    ) -> None:
        self.name = name
        self.args = args
        self.outputs: Sequence[Tensor] = ()
        self.output_bytes = output_bytes
        self.cost = cost
        self.handle = handle

    def __repr__(self) -> str:
        return f"Operator({self.name}, {len(self.args)} args, {self.output_bytes} bytes, {self.cost} ns)"


class Tensor:
    """A view of a storage: one output of one operator.

    Attributes:
        operator: what makes it; None for a constant.
        storage: where its bytes are.
        allocates_bytes: the storage's size for the output that made the storage, 0 for a view of an argument.
        defined: whether it can be read now. A view stays undefined when only its base was rematerialised.
        references: external ones.
    """

    __slots__ = ("allocates_bytes", "defined", "operator", "references", "storage")

    def __init__(self, operator: Operator | None, storage: Storage, allocates_bytes: int) -> None:
        self.operator = operator
        self.storage = storage
        self.allocates_bytes = allocates_bytes
        self.defined = True
        self.references = 1

    def __repr__(self) -> str:
        name = self.operator.name if self.operator else "constant"
        return f"Tensor({name}, {'defined' if self.defined else 'undefined'} in {self.storage!r})"


class Reach(NamedTuple):
    """Evicted storages in one direction, and their costs together."""

    cost: int
    members: frozenset[Storage]


NOTHING = Reach(0, frozenset())


NO_STORAGES: dict[Storage, None] = {}
"""Shared by all that have none, and never written to: a dict each would be most of a storage's memory."""


class Storage:
    """The unit of eviction: bytes with all their views. A `heuristics.Candidate`.

    Attributes:
        size_bytes: bytes held while resident.
        cost: c0, nanoseconds: the operators that produce a tensor of this storage, each counted once.
        last_access: the clock of the last use as an argument, or of the first computation.
        recomputes: how often it was rematerialised.
        resident: whether its bytes are held.
        locks: uses in progress; a pin counts as one that never ends.
        references: external ones, over all views.
        banished: freed for good.
        pinned: never evicted.
        held: adopted and not exposed yet: counts as one lock.
        views: the tensors that share it.
        parents, children: adjacent storages in the operator graph, itself excluded, each once.
        evicted_children: those of them that are evicted, where the heuristic needs them. (A storage may have
            very many children, never very many parents.)
        handle: whatever the owner of the cache keeps with it.
    """

    __slots__ = (
        "ancestors",
        "banished",
        "children",
        "cost",
        "descendants",
        "entry",
        "evicted_children",
        "handle",
        "held",
        "last_access",
        "locks",
        "neighborhood",
        "node",
        "order",
        "parents",
        "pinned",
        "recomputes",
        "references",
        "resident",
        "size_bytes",
        "unready_uses",
        "views",
    )

    def __init__(self, size_bytes: int, neighborhood: Neighborhood) -> None:
        self.size_bytes = size_bytes
        self.cost = 0
        self.last_access: float = NEVER
        self.recomputes = 0
        self.resident = True
        self.locks = 0
        self.references = 0
        self.banished = False
        self.pinned = False
        self.held = False
        self.views: list[Tensor] = []
        self.parents: list[Storage] = []
        self.children = NO_STORAGES
        self.evicted_children = NO_STORAGES
        self.handle: Any = None
        # Of the cache's parts: the pool's order, the index's entry, the neighbourhood's own records.
        self.order = 0
        self.entry = 0
        self.unready_uses = 0
        self.neighborhood = neighborhood
        self.node: SetNode | None = None
        self.ancestors: Reach | None = NOTHING
        self.descendants: Reach | None = NOTHING

    @property
    def evicted_ancestors_cost(self) -> int:
        """See `heuristics.Candidate`."""
        return self.neighborhood.ancestors_cost(self)

    @property
    def evicted_descendants_cost(self) -> int:
        """See `heuristics.Candidate`."""
        return self.neighborhood.descendants_cost(self)

    @property
    def evicted_neighborhood_size(self) -> int:
        """See `heuristics.Candidate`."""
        return self.neighborhood.size(self)

    @property
    def adjacent_sets_cost(self) -> int:
        """See `heuristics.Candidate`."""
        return self.neighborhood.sets_cost(self)

    @property
    def draw(self) -> float:
        """See `heuristics.Candidate`."""
        return self.neighborhood.draw()

    def __repr__(self) -> str:
        state = "banished" if self.banished else "resident" if self.resident else "evicted"
        return f"Storage({self.size_bytes} bytes, {state}, {self.locks} locks, {self.references} references)"
