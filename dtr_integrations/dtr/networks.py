"""The networks of the paper's two theorems, every operator of unit cost and every tensor of unit size."""

from __future__ import annotations

from dataclasses import dataclass

from .cache import Cache
from .oplog import Call, Instruction, Release
from .policies import Policies
from .values import Tensor


def linear_network(n: int, *, size_bytes: int = 1, cost: int = 1) -> list[Instruction]:
    """The log of one step of a linear feed-forward network of `n` layers (Theorem 3.1, appendix A).

    2n operators: each layer's output from the one before it; then, last layer first, each gradient from the
    gradient after it and the output before it. An output is released before the gradient of its layer is
    computed, a gradient once the next one is there.
    """
    log: list[Instruction] = []

    def call(name: str, args: list[str]) -> None:
        log.append(Call("unit", args, [name], [size_bytes], [-1], cost))

    for i in range(n):
        call(f"f{i}", [f"f{i - 1}"] if i else [])
    for i in reversed(range(n)):
        log.append(Release(f"f{i}"))
        call(f"b{i}", [f"f{i - 1}"] * (i > 0) + [f"b{i + 1}"] * (i < n - 1))
        if i < n - 1:
            log.append(Release(f"b{i + 1}"))
    return log


@dataclass(frozen=True, kw_only=True)
class AdversaryResult:
    """Operators that ran against those that a static schedule needs.

    Attributes:
        operators: replays included.
        optimal: of a schedule that computes one path after the other: each operator once.
    """

    operators: int
    optimal: int

    @property
    def ratio(self) -> float:
        """How many times as much."""
        return self.operators / self.optimal


def adversary(n: int, budget: int, *, heuristic: str = "h_dtr_eq", search: str = "exact") -> AdversaryResult:
    """Theorem 3.2 (appendix B): `budget` paths from one common tensor, extended where it hurts most.

    The network is made while the cache runs. Each of `n` operators extends a path of which nothing but the
    common tensor is resident; there is one, since the other ``budget - 1`` units cannot hold a piece of each
    of `budget` paths. The whole path is computed again. A static schedule would take one path after the
    other.
    """
    cache = Cache(budget, Policies(heuristic=heuristic, search=search))
    root = cache.constant(1)
    paths: list[list[Tensor]] = [[] for _ in range(budget)]
    for _ in range(n):
        evicted = [path for path in paths if not any(tensor.storage.resident for tensor in path)]
        path = max(evicted, key=len) if evicted else min(paths, key=len)
        path += cache.call([path[-1] if path else root], [1], cost=1)
    return AdversaryResult(operators=n + cache.replays, optimal=n)
