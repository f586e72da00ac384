"""A linear program as plain data: variables, rows and expressions (`bound` and `exact` solve it)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["ONE", "Expr", "Linear", "add", "increase"]

ONE = -1  # the key of an expression's constant
Expr = dict[int, float]  # variable -> factor, and `ONE` -> constant


def add(*terms: tuple[float, Mapping[int, float]]) -> Expr:
    """The sum of `factor × expression`."""
    out: Expr = {}
    for factor, expr in terms:
        increase(out, factor, expr)
    return out


def increase(total: Expr, factor: float, expr: Mapping[int, float]) -> None:
    """Add `factor × expr` to `total`."""
    for key, by in expr.items():
        total[key] = total.get(key, 0.0) + factor * by


@dataclass(kw_only=True)
class Linear:
    """Minimise `cost · x + constant` over `lower ≤ x ≤ upper` and `expression ≥ 0` for each of `rows`."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[Expr] = field(default_factory=list)
    constant: float = 0.0

    def variable(
        self, *, lower: float = 0.0, upper: float = 1.0, cost: float = 0.0, integer: bool = False
    ) -> int:
        """A new variable."""
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def require(self, *terms: tuple[float, Mapping[int, float]]) -> None:
        """The sum of the terms is not negative."""
        self.rows.append({key: by for key, by in add(*terms).items() if by or key == ONE})

    def largest(self, exprs: Iterable[Mapping[int, float]]) -> Expr:
        """An expression that is at least each of `exprs` and at least 0, as small as the rows allow."""
        kept: list[Expr] = []
        for expr in exprs:
            expr = {key: by for key, by in expr.items() if by}
            if expr and expr not in kept:
                kept.append(expr)
        if not kept:
            return {}
        if any(expr.keys() == {ONE} and expr[ONE] >= 1 for expr in kept):
            return {ONE: 1.0}
        if len(kept) == 1 and all(by > 0 for by in kept[0].values()):
            return kept[0]
        above = {self.variable(): 1.0}
        for expr in kept:
            self.require((1, above), (-1, expr))
        return above
