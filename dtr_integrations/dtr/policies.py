"""The named choices of a cache: what is evicted, what happens when the program lets go, how to search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .heuristics import HEURISTICS, Heuristic, penalised

DEALLOCATION = ("eager", "banish", "ignore")
TIE_BREAK = ("last", "first")
MUTATION = ("copy_on_write", "in_place")
TRACKING = ("auto", "eager", "lazy")
SEARCH = ("exact", "indexed", "sampled")


@dataclass(frozen=True, kw_only=True)
class Policies:
    """How a cache behaves.

    Attributes:
        heuristic: a key of `HEURISTICS`, or a `Heuristic` of one's own.
        deallocation: what happens at zero external references. "eager": the storage is evicted at once (the
            paper's default; constants stay). "banish": it is freed for good, constants too, as soon as
            nothing evicted depends on it, and what was computed from it is pinned. "ignore": nothing.
        tie_break: of equal scores, the storage that became evictable "last" or "first". At score 0 the scan
            ends at once, so there the first is taken.
        mutation: "copy_on_write": an in-place operator makes a new storage and the old one is released
            after it. "in_place": the new one takes over the old one's bytes where nobody else holds them.
        search: "exact" scores every candidate at every eviction; "indexed" takes the same decisions at a cost
            that does not grow with the pool; "sampled" scores √n of them (appendix E.2).
        seed: of the sample and of the random heuristic.
        recompute_penalty: each rematerialisation of a storage raises its later scores by this share.
        minimum_bytes: smaller storages are evicted only when nothing else is left.
        tracking: of the exact neighbourhood: "eager" keeps every sum up to date (the paper's way), "lazy"
            walks when a score asks; same sums. "auto": eager for the exact scan, lazy for the others.
        forget_dead: a storage without references and without anything computed from it leaves the tables for
            good, and its bytes are freed even if it is a constant. A run that never ends needs this.
    """

    heuristic: str | Heuristic = "h_dtr_eq"
    deallocation: str = "eager"
    tie_break: str = "last"
    mutation: str = "copy_on_write"
    search: str = "exact"
    seed: int = 0
    recompute_penalty: float = 0.0
    minimum_bytes: int = 0
    tracking: str = "auto"
    forget_dead: bool = False

    def __post_init__(self) -> None:
        """Refuse what is not a choice.

        Raises:
            ValueError: names the field, the value and the choices.
        """
        if isinstance(self.heuristic, str):
            _one_of("heuristic", self.heuristic, tuple(HEURISTICS))
        for field, choices in (
            ("deallocation", DEALLOCATION),
            ("tie_break", TIE_BREAK),
            ("mutation", MUTATION),
            ("search", SEARCH),
            ("tracking", TRACKING),
        ):
            _one_of(field, getattr(self, field), choices)
        for field in ("recompute_penalty", "minimum_bytes"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must be 0 or more; got {getattr(self, field)!r}")

    @property
    def is_lazy(self) -> bool:
        """Whether e* is walked only when a score asks for it."""
        return self.tracking == "lazy" or (self.tracking == "auto" and self.search != "exact")

    @property
    def scorer(self) -> Heuristic:
        """The heuristic with the penalty applied."""
        heuristic = HEURISTICS[self.heuristic] if isinstance(self.heuristic, str) else self.heuristic
        return penalised(heuristic, self.recompute_penalty)


def _one_of(field: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{field} must be one of {', '.join(choices)}; got {value!r}")
