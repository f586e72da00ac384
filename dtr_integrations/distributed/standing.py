"""What one rank says when it has planned, and what follows when all have. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Standing", "difference", "to_take_over", "unplanned"]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One rank after planning.

    Attributes:
        rank: whose.
        digest: of its plan; empty: it has none and runs eagerly.
        why_not: why it has none.
        graphs: fingerprints, in the order of their first call.
        model: digest of the names, shapes and dtypes of the model's parameters.
        trained: digest of the names of those that get a gradient.
        collectives: those in its graphs, in order.
        budget_bytes: of this rank.
    """

    rank: int
    digest: str
    why_not: str
    graphs: tuple[str, ...]
    model: str
    trained: str
    collectives: tuple[str, ...]
    budget_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> Standing:
        """The inverse of `to_dict`."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in said.items()}
        return cls(**values)


def difference(standings: Sequence[Standing]) -> tuple[int, str] | None:
    """(rank, why) of the first rank that would wait in a collective for others that never come; else None.

    That is a rank with the model of an earlier one that trains other parameters of it, or has other
    collectives in its graphs. Graphs that differ otherwise (by the shapes of the batch, by a branch) are no
    fault: each rank has its own plan for its own graphs.
    """
    for number, one in enumerate(standings):
        if not one.digest:
            continue
        for earlier in standings[:number]:
            if not earlier.digest or earlier.model != one.model:
                continue
            what = []
            if earlier.trained != one.trained:
                what.append("trains other parameters")
            if earlier.collectives != one.collectives:
                mine, theirs = len(one.collectives), len(earlier.collectives)
                what.append(f"has other collectives in its graphs ({mine} against {theirs})")
            if what:
                return one.rank, (
                    f"got another step: it {' and '.join(what)} than rank {earlier.rank}, of the same model. "
                    "One of them would wait for the other for good; let all ranks take the same branches"
                )
    return None


def to_take_over(standings: Iterable[Standing], rank: int) -> int | None:
    """The rank whose plan this one takes over: the first with the same graphs and budget, if that has
    another plan (its costs were measured on another machine)."""
    by_rank = {standing.rank: standing for standing in standings}
    mine = by_rank[rank]
    for other in sorted(by_rank.values(), key=lambda standing: standing.rank):
        same = (other.graphs, other.budget_bytes) == (mine.graphs, mine.budget_bytes)
        if mine.digest and other.digest and same:
            return other.rank if other.digest != mine.digest else None
    return None


def unplanned(standings: Sequence[Standing]) -> list[Standing]:
    """The ranks that run eagerly though others are planned."""
    without = [standing for standing in standings if not standing.digest]
    return without if len(without) < len(standings) else []
