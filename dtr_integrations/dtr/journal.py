"""What the online runtime did with its cache, and what it would do under another budget.

An operator log says what a step computes. A journal says besides what autograd saved, when it was asked for
again, and what the program itself held on to: with it, the simulator takes the same decisions as the runtime,
one by one. `online.journal` writes one in a step without a budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from ..errors import OutOfBudget
from .cache import Cache, Driver
from .heuristics import Heuristic
from .policies import Policies
from .simulator import Outcome, ReplayResult
from .values import Storage, Tensor

__all__ = [
    "Entry",
    "Known",
    "Needed",
    "Pinned",
    "Ran",
    "Released",
    "Saved",
    "follow",
    "online_policies",
    "predict",
]

# Tensors are numbered in the order in which they come to be.


class Known(NamedTuple):
    """A constant of so many bytes."""

    size_bytes: int


class Ran(NamedTuple):
    """An operator; see `Cache.adopt`."""

    name: str
    args: tuple[int, ...]
    sizes: tuple[int, ...]
    cost: int
    taken: tuple[int, ...]
    lineage: bool


class Saved(NamedTuple):
    """Autograd keeps a tensor, so that it may be evicted from now on."""

    tensor: int


class Pinned(NamedTuple):
    """Whether the program can reach a saved tensor by other ways as well, which forbids to evict it."""

    tensor: int
    pinned: bool


class Needed(NamedTuple):
    """Autograd asks for a tensor that it has saved."""

    tensor: int


class Released(NamedTuple):
    """Nobody holds a tensor any more."""

    tensor: int


Entry: TypeAlias = Known | Ran | Saved | Pinned | Needed | Released


def online_policies(policies: Policies, heuristic: str | Heuristic) -> Policies:
    """What a runtime makes of the policies that it is given: tables that do not grow."""
    return replace(policies, heuristic=heuristic, deallocation="eager", forget_dead=True)


def follow(journal: Sequence[Entry], cache: Cache, pinned: set[Storage]) -> None:
    """Take `cache` through `journal`. `pinned` is kept up to date with what the program holds.

    Raises:
        OutOfBudget: something does not fit, whatever is evicted.
    """
    tensors: list[Tensor] = []
    for entry in journal:
        match entry:
            case Ran(name, args, sizes, cost, taken, lineage):
                old = [tensors[t] for t in taken]
                pinned.difference_update([t.storage for t in old])
                cache.make_room(sum(sizes) - sum(t.storage.size_bytes for t in old), name)
                tensors += cache.adopt(
                    [tensors[a] for a in args], sizes, cost=cost, name=name, taken=old, lineage=lineage
                )
            case Released(tensor):
                pinned.discard(tensors[tensor].storage)
                cache.release(tensors[tensor])
            case Needed(tensor):
                cache.materialize(tensors[tensor])
            case Saved(tensor):
                cache.expose(tensors[tensor])
            case Pinned(tensor, True):
                pinned.add(tensors[tensor].storage)
            case Pinned(tensor, False):
                pinned.discard(tensors[tensor].storage)
            case Known(size_bytes):
                tensors.append(cache.constant(size_bytes))


def predict(
    journal: Sequence[Entry],
    *,
    budget_bytes: int,
    heuristic: str | Heuristic = "h_dtr_eq",
    policies: Policies | None = None,
    driver: Driver | None = None,
) -> ReplayResult:
    """What a runtime with the same deterministic costs does in the journal's step under `budget_bytes`.

    Args:
        journal: of the step.
        heuristic, policies: as of `online.DTR`.
        driver: is told of every replay and eviction.
    """
    chosen = online_policies(policies or Policies(search="indexed"), heuristic)
    free = Cache(math.inf, chosen)
    follow(journal, free, set())
    pinned: set[Storage] = set()
    cache = Cache(budget_bytes, chosen, driver=driver, may_evict=lambda storage: storage not in pinned)
    outcome: Outcome = "ok"
    try:
        follow(journal, cache, pinned)
    except OutOfBudget:
        outcome = "oom"
    return ReplayResult.of(
        cache,
        outcome,
        budget_bytes=budget_bytes,
        unconstrained_ns=free.compute_ns,
        unconstrained_bytes=free.peak_bytes,
    )
