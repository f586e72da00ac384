"""Byte counts as text. Apart from `units`, because the error texts need it and `units` needs the errors."""

from __future__ import annotations

_DECIMAL = (("B", 1), ("KB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12))
_BINARY = (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40))


def format_bytes(n: int, binary: bool = False) -> str:
    """Write a byte count for a reader: at most two decimals, rounded to nearest.

    Args:
        n: Bytes; a negative count (a difference) keeps its sign.
        binary: Powers of 2 (KiB, MiB, ...) instead of powers of 10 (KB, MB, ...).

    Returns:
        The number, a space and a unit, such as ``"213.46 MB"`` or ``"203.57 MiB"``. `parse_bytes` reads it
        back, to within half of the last decimal.
    """
    units = _BINARY if binary else _DECIMAL
    hundredths = [_divided(abs(n) * 100, factor) for _, factor in units]
    chosen = 0
    # By the rounded value: 999,995 bytes are 1 MB, not 1000 KB.
    while chosen + 1 < len(units) and hundredths[chosen] * units[chosen][1] >= 100 * units[chosen + 1][1]:
        chosen += 1
    whole, rest = divmod(hundredths[chosen], 100)
    decimals = f".{rest:02d}".rstrip("0").rstrip(".")
    return f"{'-' if n < 0 else ''}{whole}{decimals} {units[chosen][0]}"


def budget_at_least(n: int) -> str:
    """A budget of at most three digits that is not below `n` bytes, such as ``"60.2MB"`` for 60,123,456."""
    n = max(n, 1)
    step = 10 ** max(len(str(n)) - 3, 0)
    rounded = -(-n // step) * step
    unit, factor = next(step for step in reversed(_DECIMAL) if rounded >= step[1])
    whole, rest = divmod(rounded, factor)
    decimals = f".{rest:0{len(str(factor)) - 1}d}".rstrip("0").rstrip(".") if factor > 1 else ""
    return f"{whole}{decimals}{unit}"


def _divided(n: int, by: int) -> int:
    # Rounded to nearest in integers: floats are exact up to 2**53 only.
    return (n + by // 2) // by
