"""How much slower one step is than another, from runs in pairs, with an interval that assumes no
distribution."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PairedRatio", "paired_ratio"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedRatio:
    """A slowdown as measured: a ratio (1.04 = 4 % more time) with its 95 % interval.

    `base_ms` and `other_ms` are medians of one step; `coverage` is the interval's true confidence, 0.95 or
    more (0.0 with fewer than six pairs, of which none reaches it: the interval is then the whole range).
    """

    ratio: float
    low: float
    high: float
    pairs: int
    coverage: float
    base_ms: float
    other_ms: float


def paired_ratio(base_ms: Sequence[float], other_ms: Sequence[float]) -> PairedRatio:
    """The median of the pairs' ratios `other / base`, with the interval of its order statistics.

    A median, because other processes stall single steps by far more than what is to be seen; pairs, because
    a machine drifts. The interval runs from the k-th smallest to the k-th largest ratio, with the largest k
    whose binomial coverage is at least 95 % (sign test; e.g. 10th to 21st of 30).

    Raises ValueError when the two differ in length, are empty, or hold a time that is not positive.
    """
    if len(base_ms) != len(other_ms) or not base_ms:
        raise ValueError(f"pairs are needed: got {len(base_ms)} times and {len(other_ms)} times")
    if min(*base_ms, *other_ms) <= 0:
        raise ValueError("a time of one step is positive")
    ratios = sorted(other / base for base, other in zip(base_ms, other_ms, strict=True))
    n = len(ratios)
    k, coverage = 1, _coverage(n, 1)
    while k < n // 2 and _coverage(n, k + 1) >= 0.95:
        k, coverage = k + 1, _coverage(n, k + 1)
    return PairedRatio(
        ratio=statistics.median(ratios),
        low=ratios[k - 1],
        high=ratios[n - k],
        pairs=n,
        coverage=coverage if coverage >= 0.95 else 0.0,
        base_ms=statistics.median(base_ms),
        other_ms=statistics.median(other_ms),
    )


def _coverage(n: int, k: int) -> float:
    """Probability that the median lies between the k-th smallest and the k-th largest of n values."""
    return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n
