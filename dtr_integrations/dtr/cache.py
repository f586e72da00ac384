"""The state machine of dynamic tensor rematerialisation: a cache of storages under a byte budget.

It knows operators by their costs and sizes alone, so one machine serves the simulator, which replays logs,
and a runtime, which has a `Driver` run and drop real tensors. Semantics: Kirisame et al., ICLR 2021, section
2 and appendix C, as their simulator has them:

* time is integer nanoseconds, starts at 1 and advances by each operator's cost, replays included;
* room is made before an operator runs, with its arguments locked; all its outputs are charged, and those that
  were resident already are freed again after a replay;
* an argument's last access is set whenever an operator is about to read it, an output's after its first
  computation only;
* evicting a storage undefines all its views, and making it resident again does not define them.

Replay is iterative: the depth of a chain of evicted storages is not bounded by the interpreter's stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..errors import OutOfBudget
from .index import IndexedSearch
from .neighborhood import neighborhood_for
from .policies import Policies
from .search import ExactScan, Pool, SampledScan, Search
from .values import NO_STORAGES, Operator, Storage, Tensor

NOT_A_VIEW = -1


class Driver(Protocol):
    """Does for real what the cache decides. Called with the cache's state already consistent."""

    def compute(self, operator: Operator, *, replay: bool) -> int | None:
        """Run `operator`, whose arguments are locked and whose outputs fit; nanoseconds, None to keep the
        operator's cost."""

    def evict(self, storage: Storage) -> None:
        """Drop the bytes of `storage`."""


class ReplayLimit(Exception):
    """The replays have cost more than `Cache.replay_limit` nanoseconds."""


class _Frame:
    # One operator under way: what it waits for, and what it has locked.
    __slots__ = ("locked", "missing", "operator", "target")

    def __init__(self, operator: Operator, target: Tensor | None) -> None:
        self.operator = operator
        self.target = target
        self.missing: list[Tensor] = []
        self.locked: list[Storage] = []


class Cache:
    """Storages under a budget.

    Args:
        budget_bytes: may be changed at any time; lowering it evicts nothing until room is next needed.
        policies: the named choices.
        driver: None to simulate.
        replay_limit: nanoseconds of replays after which `ReplayLimit` is raised.
        may_evict: asked about each storage that the search has chosen. One that is refused is asked about
            again the next time that room is needed. None: every candidate may go.

    Attributes:
        clock, compute_ns, replay_ns: nanoseconds: now, first computations, replays.
        held_bytes, peak_bytes: bytes that are resident, and the highest so far.
        evictions, replays: counts; eager ones at zero references are in `releases` instead.
        pool: what may be evicted.
        refused: what might be, had `may_evict` not refused it.
    """

    def __init__(
        self,
        budget_bytes: float = math.inf,
        policies: Policies | None = None,
        *,
        driver: Driver | None = None,
        replay_limit: float = math.inf,
        may_evict: Callable[[Storage], bool] | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.policies = policies or Policies()
        self.driver = driver
        self.replay_limit = replay_limit
        self._may_evict = may_evict
        self.clock = 1
        self.compute_ns = self.replay_ns = 0
        self.held_bytes = self.peak_bytes = 0
        self.evictions = self.replays = self.releases = 0
        self.pool: Pool = {}
        self.small: Pool = {}
        self.refused: Pool = {}
        heuristic = self.policies.scorer
        self.neighborhood = neighborhood_for(
            heuristic.needs, lazy=self.policies.is_lazy, seed=self.policies.seed
        )
        self._score = heuristic.score
        self.search: Search = self._searcher(heuristic.needs)
        self._minimum_bytes = self.policies.minimum_bytes
        self._eager = self.policies.deallocation == "eager"
        self._banish = self.policies.deallocation == "banish"
        self._forget = self.policies.forget_dead
        self._order = 0
        self._released_in_use: set[Storage] = set()

    @property
    def accesses(self) -> int:
        """Records read while candidates were scored and neighbourhoods kept."""
        return self.search.accesses + self.neighborhood.accesses

    # --- what the program does ---

    def constant(self, size_bytes: int, *, handle: Any = None) -> Tensor:
        """Bytes from outside: they cost nothing, cannot be computed again, and so stay."""
        self._make_room(size_bytes, "a constant")
        self._charge(size_bytes)
        return self._pinned(size_bytes, handle)

    def call(
        self,
        args: Sequence[Tensor],
        sizes: Sequence[int],
        aliases: Sequence[int] | None = None,
        *,
        cost: int = 0,
        name: str = "",
        handle: Any = None,
    ) -> Sequence[Tensor]:
        """Run a pure operator for the first time; its outputs, each with one external reference.

        Args:
            args: what it reads; rematerialised first where evicted.
            sizes: bytes of each output; of a view, anything.
            aliases: for each output the index of the argument that it is a view of, or -1. None: no views.
            cost: nanoseconds, unless the driver measures them.
            name, handle: kept with the operator.

        Raises:
            OutOfBudget: arguments and outputs do not fit together. Nothing stays locked.
        """
        return self._first_run(args, sizes, aliases, cost, name, handle, 0)

    def mutate(
        self,
        args: Sequence[Tensor],
        indices: Sequence[int],
        *,
        cost: int = 0,
        name: str = "",
        handle: Any = None,
    ) -> Sequence[Tensor]:
        """Run an operator that writes to ``args[i]`` for each i of `indices`; the new contents.

        One external reference to each old content is released. See `Policies.mutation`.
        """
        old = [args[i] for i in indices]
        sizes = [tensor.storage.size_bytes for tensor in old]
        taken = [tensor.storage for tensor in old if self._may_take_over(tensor.storage)]
        taken_bytes = sum(storage.size_bytes for storage in taken)
        new = self._first_run(args, sizes, None, cost, name, handle, taken_bytes)
        # The old bytes are the new ones: charged twice for a moment that no peak sees.
        self.held_bytes += taken_bytes
        for tensor in old:
            self.release(tensor)
        for storage in taken:
            if storage.resident:
                self._evict(storage)
        return new

    def adopt(
        self,
        args: Sequence[Tensor],
        sizes: Sequence[int],
        *,
        cost: int = 0,
        name: str = "",
        handle: Any = None,
        taken: Sequence[Tensor] = (),
        lineage: bool = True,
    ) -> Sequence[Tensor]:
        """Take in an operator that the owner of real tensors has run by itself, `make_room` before it; its
        outputs, each with one external reference.

        The outputs are no candidates for eviction until they are exposed.

        Args:
            args: what it has read, all of it resident.
            sizes: bytes of each output.
            cost: nanoseconds.
            name, handle: kept with the operator.
            taken: old contents whose bytes the first outputs are written to; released.
            lineage: False: it cannot be run again, so the outputs are constants.
        """
        before = self.clock
        self.clock = clock = before + cost
        self.compute_ns += cost
        size_bytes = sum(sizes)
        taken_bytes = sum([tensor.storage.size_bytes for tensor in taken]) if taken else 0
        self._charge(size_bytes - taken_bytes)
        for arg in args:
            arg.storage.last_access = before
        if not lineage:
            outputs = [self._pinned(size_bytes, None) for size_bytes in sizes]
        else:
            operator = Operator(name, tuple(args), size_bytes, cost, handle)
            outputs = []
            for size_bytes in sizes:
                storage = Storage(size_bytes, self.neighborhood)
                storage.cost = cost
                storage.last_access = clock
                storage.held = True
                storage.locks = storage.references = 1
                output = Tensor(operator, storage, size_bytes)
                storage.views.append(output)
                outputs.append(output)
                for arg in args:
                    parent = arg.storage
                    children = parent.children
                    if storage in children:
                        continue
                    storage.parents.append(parent)
                    if not children:
                        children = parent.children = {}
                    children[storage] = None
            operator.outputs = outputs
        if taken:
            self.held_bytes += taken_bytes
            for tensor in taken:
                self.release(tensor)
        return outputs

    def occupy(self, size_bytes: int, cost: int) -> None:
        """As `adopt` without a lineage, for bytes of which nothing else needs to be known; `vacate` follows.

        Args:
            size_bytes: what an operator has made.
            cost: its nanoseconds.
        """
        self.clock += cost
        self.compute_ns += cost
        self._charge(size_bytes)

    def vacate(self, size_bytes: int) -> None:
        """Bytes that were occupied are free."""
        self.held_bytes -= size_bytes

    def expose(self, tensor: Tensor) -> None:
        """An adopted output becomes a candidate for eviction, as far as `may_evict` agrees."""
        storage = tensor.storage
        if storage.held:
            self._reveal(storage)

    def retain(self, tensor: Tensor) -> None:
        """One more external reference."""
        assert tensor.storage.references > 0, "retained after its last release"
        tensor.references += 1
        tensor.storage.references += 1

    def release(self, tensor: Tensor) -> None:
        """One external reference less; at zero the deallocation policy acts."""
        storage = tensor.storage
        assert tensor.references > 0, "released more often than retained"
        tensor.references -= 1
        storage.references -= 1
        if not storage.references:
            self._unreferenced(storage)

    def materialize(self, tensor: Tensor) -> None:
        """Make `tensor` readable now, by replays where needed. It may be evicted again at once.

        Raises:
            OutOfBudget: not everything that must be resident together fits.
        """
        if not tensor.defined:
            assert not tensor.storage.banished, "a banished storage cannot come back"
            assert tensor.operator is not None
            self._run(tensor.operator, tensor)

    def lock(self, tensor: Tensor) -> None:
        """Make `tensor` readable and keep it so until `unlock`, called as often."""
        self.materialize(tensor)
        self._lock(tensor.storage)

    def unlock(self, tensor: Tensor) -> None:
        """End one use."""
        self._unlock(tensor.storage)

    def pin(self, tensor: Tensor) -> None:
        """Make `tensor` readable and keep its storage for good."""
        self.materialize(tensor)
        self._pin(tensor.storage)

    def make_room(self, size_bytes: int, what: str = "the caller") -> None:
        """Evict until `size_bytes` more would fit the budget.

        Raises:
            OutOfBudget: they cannot; `what` is named in it.
        """
        self._make_room(size_bytes, what)

    # --- running operators ---

    def _first_run(
        self,
        args: Sequence[Tensor],
        sizes: Sequence[int],
        aliases: Sequence[int] | None,
        cost: int,
        name: str,
        handle: Any,
        taken_bytes: int,
    ) -> Sequence[Tensor]:
        if aliases is None:
            output_bytes = sum(sizes)
        else:
            output_bytes = sum([s for s, a in zip(sizes, aliases, strict=True) if a == NOT_A_VIEW])
        operator = Operator(name, tuple(args), output_bytes, cost, handle)
        frame = self._begin(operator, None)
        try:
            if frame.missing:
                self._fetch([frame])
            if self.held_bytes + output_bytes > self.budget_bytes:
                self._make_room(output_bytes - taken_bytes, name)
            self._execute(operator, output_bytes - taken_bytes, replay=False)
        except BaseException:
            self._unlock_all(frame)
            raise
        operator.outputs = outputs = self._outputs(operator, sizes, aliases)
        self._unlock_all(frame)
        if self.replay_ns > self.replay_limit:
            raise ReplayLimit
        return outputs

    def _run(self, operator: Operator, target: Tensor) -> None:
        self._fetch([self._begin(operator, target)])

    def _begin(self, operator: Operator, target: Tensor | None) -> _Frame:
        frame = _Frame(operator, target)
        clock = self.clock
        locked = frame.locked
        for arg in operator.args:
            storage = arg.storage
            storage.last_access = clock
            if arg.defined:
                if not storage.locks:
                    self._withdraw(storage)
                storage.locks += 1
                locked.append(storage)
            else:
                frame.missing.append(arg)
        frame.missing.reverse()
        return frame

    def _fetch(self, stack: list[_Frame]) -> None:
        # Serves the bottom frame's missing arguments; a replay's own frame is finished here too.
        try:
            while stack:
                frame = stack[-1]
                missing = frame.missing
                while missing:
                    arg = missing[-1]
                    if not arg.defined:
                        assert arg.operator is not None
                        stack.append(self._begin(arg.operator, arg))
                        break
                    missing.pop()
                    self._lock(arg.storage)
                    frame.locked.append(arg.storage)
                else:
                    # Unlocked in the order of the arguments, whatever the order in which they came.
                    frame.locked = [arg.storage for arg in frame.operator.args]
                    if frame.target is None:
                        return
                    self._replay(frame, frame.target)
                    stack.pop()
                    if self.replay_ns > self.replay_limit:
                        raise ReplayLimit
        except BaseException:
            for frame in reversed(stack):
                if frame.target is not None:
                    self._unlock_all(frame)
            raise

    def _replay(self, frame: _Frame, target: Tensor) -> None:
        operator = frame.operator
        self._make_room(operator.output_bytes, operator.name)
        self._execute(operator, operator.output_bytes, replay=True)
        fresh: list[Storage] = []
        for output in [tensor for tensor in operator.outputs if tensor is not target] + [target]:
            storage = output.storage
            if output.defined or storage.banished:
                self.held_bytes -= output.allocates_bytes
                continue
            output.defined = True
            if self._banish:
                self._count_unready(output, -1)
            if not storage.resident:
                storage.resident = True
                storage.recomputes += 1
                fresh.append(storage)
        for storage in fresh:
            self.neighborhood.rematerialised(storage)
            self._offer(storage)
        self._unlock_all(frame)

    def _execute(self, operator: Operator, size_bytes: int, *, replay: bool) -> None:
        if self.driver is not None:
            measured = self.driver.compute(operator, replay=replay)
            if measured is not None and not replay:
                operator.cost = measured
        self.clock += operator.cost
        if replay:
            self.replays += 1
            self.replay_ns += operator.cost
        else:
            self.compute_ns += operator.cost
        self._charge(size_bytes)

    def _outputs(
        self, operator: Operator, sizes: Sequence[int], aliases: Sequence[int] | None
    ) -> Sequence[Tensor]:
        args, clock = operator.args, self.clock
        outputs: list[Tensor] = []
        fresh: list[Storage] = []
        counted: set[Storage] = set()
        for index, size_bytes in enumerate(sizes):
            alias = NOT_A_VIEW if aliases is None else aliases[index]
            if alias == NOT_A_VIEW:
                storage = self._storage(size_bytes, None)
                fresh.append(storage)
                storage.cost = operator.cost
                outputs.append(self._view(operator, storage, size_bytes))
            else:
                storage = args[alias].storage
                if storage not in counted:
                    counted.add(storage)
                    storage.cost += operator.cost
                outputs.append(self._view(operator, storage, 0))
            storage.last_access = clock
            for arg in args:
                parent = arg.storage
                children = parent.children
                if storage in children or parent is storage:
                    continue
                storage.parents.append(parent)
                if not children:
                    children = parent.children = {}
                children[storage] = None
        # The first output is the one that was asked for, as in a replay, so it comes last.
        if fresh and outputs[0].storage is fresh[0]:
            fresh.append(fresh.pop(0))
        for storage in fresh:
            self._offer(storage)
        return outputs

    # --- storages ---

    def _storage(self, size_bytes: int, handle: Any) -> Storage:
        storage = Storage(size_bytes, self.neighborhood)
        storage.handle = handle
        return storage

    def _pinned(self, size_bytes: int, handle: Any) -> Tensor:
        storage = self._storage(size_bytes, handle)
        storage.pinned, storage.locks = True, 1
        return self._view(None, storage, size_bytes)

    def _view(self, operator: Operator | None, storage: Storage, allocates_bytes: int) -> Tensor:
        tensor = Tensor(operator, storage, allocates_bytes)
        storage.views.append(tensor)
        storage.references += 1
        return tensor

    def _charge(self, size_bytes: int) -> None:
        self.held_bytes += size_bytes
        if self.held_bytes > self.peak_bytes:
            self.peak_bytes = self.held_bytes

    def _make_room(self, size_bytes: int, what: str) -> None:
        if self.refused and self.held_bytes + size_bytes > self.budget_bytes:
            self._ask_again()
        while self.held_bytes + size_bytes > self.budget_bytes:
            if self.pool:
                storage = self.search.choose(self.pool, self.clock)
            elif self.small:
                storage = min(self.small, key=lambda small: self._score(small, self.clock))
            else:
                raise OutOfBudget(
                    operator=what,
                    needed_bytes=size_bytes,
                    held_bytes=self.held_bytes,
                    budget_bytes=int(self.budget_bytes),
                )
            if self._may_evict is not None and not self._may_evict(storage):
                self._withdraw(storage)
                self.refused[storage] = None
                continue
            self.evictions += 1
            self._evict(storage)

    def _ask_again(self) -> None:
        assert self._may_evict is not None
        for storage in [storage for storage in self.refused if self._may_evict(storage)]:
            del self.refused[storage]
            self._offer(storage)

    def _evict(self, storage: Storage) -> None:
        assert not storage.locks, "evicted while in use"
        self._withdraw(storage)
        storage.resident = False
        storage.entry = 0
        self.held_bytes -= storage.size_bytes
        for view in storage.views:
            if view.defined:
                view.defined = False
                if self._banish:
                    self._count_unready(view, 1)
        self.neighborhood.evicted(storage)
        if self.driver is not None:
            self.driver.evict(storage)

    def _offer(self, storage: Storage) -> None:
        self._order += 1
        storage.order = self._order
        if storage.size_bytes < self._minimum_bytes:
            self.small[storage] = None
        else:
            self.pool[storage] = None
            if not storage.entry:
                self.search.added(storage)

    def _withdraw(self, storage: Storage) -> None:
        if storage in self.refused:
            del self.refused[storage]
        elif storage.size_bytes < self._minimum_bytes:
            del self.small[storage]
        else:
            del self.pool[storage]

    def _lock(self, storage: Storage) -> None:
        assert storage.resident, "locked while evicted"
        if not storage.locks:
            self._withdraw(storage)
        storage.locks += 1

    def _unlock(self, storage: Storage) -> None:
        storage.locks -= 1
        if not storage.locks:
            self._offer(storage)
            if self._released_in_use and storage in self._released_in_use:
                self._released_in_use.discard(storage)
                if not storage.references:
                    self._unreferenced(storage)

    def _unlock_all(self, frame: _Frame) -> None:
        for storage in frame.locked:
            self._unlock(storage)
        if self._banish or self._forget:
            for storage in frame.locked:
                if not storage.references:
                    self._try_discard(storage)

    def _reveal(self, storage: Storage) -> None:
        storage.held = False
        storage.locks -= 1
        if not storage.locks:
            self._offer(storage)

    def _pin(self, storage: Storage) -> None:
        if not storage.pinned:
            self._lock(storage)
            storage.pinned = True

    # --- letting go ---

    def _unreferenced(self, storage: Storage) -> None:
        if storage.held:
            self._reveal(storage)
        if storage.locks > storage.pinned:
            self._released_in_use.add(storage)
            return
        if self._forget and not storage.children:
            self._try_discard(storage)
            return
        if self._eager and storage.resident and not storage.pinned:
            self.releases += 1
            self._evict(storage)
        if self._banish or self._forget:
            self._try_discard(storage)

    def _try_discard(self, storage: Storage) -> None:
        waiting = [storage]
        while waiting:
            dead = waiting.pop()
            if dead.banished or dead.references or dead.locks > dead.pinned:
                continue
            if dead.unready_uses if self._banish else dead.children:
                continue
            waiting.extend(dead.parents)
            self._discard(dead)

    def _discard(self, storage: Storage) -> None:
        # Nothing evicted depends on it: its bytes go for good, and what was made from it can't be made again.
        if storage.resident:
            if not storage.pinned:
                self._withdraw(storage)
            self.held_bytes -= storage.size_bytes
            self.releases += 1
            storage.resident = False
            storage.entry = 0
            if self.driver is not None:
                self.driver.evict(storage)
        else:
            self.neighborhood.rematerialised(storage)
            if self._banish:
                for view in storage.views:
                    self._count_unready(view, -1)
        storage.banished = True
        for view in storage.views:
            view.defined = False
        for parent in storage.parents:
            del parent.children[storage]
        for child in storage.children:
            child.parents.remove(storage)
            if not child.banished:
                self._pin(child)
        storage.parents = []
        storage.children = storage.evicted_children = NO_STORAGES
        self.search.forget(storage)
        if self._forget:
            self._dismantle(storage)

    @staticmethod
    def _dismantle(storage: Storage) -> None:
        # Storages, tensors and operators refer to one another in circles. A run that never ends must not
        # leave it to the garbage collector when real memory hangs on them.
        for view in storage.views:
            operator, view.operator = view.operator, None
            if operator is not None and all(output.storage.banished for output in operator.outputs):
                operator.args = operator.outputs = ()
                operator.handle = None
        storage.views = []
        storage.handle = None

    def _count_unready(self, view: Tensor, by: int) -> None:
        if view.operator is not None:
            for arg in view.operator.args:
                if arg.storage is not view.storage:
                    arg.storage.unready_uses += by

    def _may_take_over(self, storage: Storage) -> bool:
        return self.policies.mutation == "in_place" and storage.references == 1 and not storage.pinned

    def _searcher(self, needs: frozenset[str]) -> Search:
        policies = self.policies
        if policies.search == "sampled":
            return SampledScan(self._score, policies.tie_break, policies.seed)
        if policies.search == "indexed" and "draw" not in needs:
            return IndexedSearch(self._score, policies.tie_break, self.neighborhood)
        return ExactScan(self._score, policies.tie_break)
