"""Byte sizes and budgets as users write them.

    size    = number, at most one space, unit
    number  = digits, optionally a point and more digits                      "70", "1.5"
    unit    = B KB MB GB TB (powers of 10) or KiB MiB GiB TiB (powers of 2), in any case
    budget  = size, or a number and "%" of the device's total, or "auto" (= "100%")

Nothing else is read: no bare number (70 what?), no sign, exponent, underscore, comma, padding or foreign
    digit. All
arithmetic is on integers, and a fraction of a byte is rounded down, so that no budget grows by being read.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import NoReturn

from ._format import format_bytes
from .errors import BudgetError

__all__ = ["check_budget", "format_bytes", "parse_budget", "parse_bytes"]

_FACTORS = {
    "b": 1,
    **{f"{letter}b": 10 ** (3 * power) for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 2 ** (10 * power) for power, letter in enumerate("kmgt", start=1)},
}
_NUMBER = r"([0-9]{1,40})(?:\.([0-9]{1,40}))?"  # bounded: Python refuses to read ints of thousands of digits
# re.ASCII, or IGNORECASE would let the Kelvin sign pass for a k.
_SIZE = re.compile(_NUMBER + r" ?([KMGT]i?B|B)", re.ASCII | re.IGNORECASE)
_PERCENT = re.compile(_NUMBER + r" ?%", re.ASCII)
_BARE = re.compile(_NUMBER, re.ASCII)
_NUMBER_AND_WORD = re.compile(_NUMBER + r" ?([A-Za-z]+)", re.ASCII)

_SIZE_EXAMPLE = 'write a number and a unit, for example "70GB" or "65.2 GiB"'
_BUDGET_EXAMPLE = 'write for example "70GB", "65.2 GiB", "90%" or "auto"'


def parse_bytes(text: str) -> int:
    """Read a byte size such as ``"70GB"``, ``"1.5 GiB"`` or ``"0B"``.

    Args:
        text: A number, at most one space, and a unit: B, KB, MB, GB, TB (powers of 10) or KiB, MiB, GiB, TiB
            (powers of 2), in any case. ``"70gb"`` is 70 gigabytes; bits cannot be written.

    Returns:
        Bytes; a fraction of a byte is rounded down.

    Raises:
        BudgetError: For everything else (a `ValueError`); the message repeats the input and shows a right
            one.
    """
    if isinstance(text, str):
        if match := _SIZE.fullmatch(text):
            whole, fraction, unit = match.groups()
            return _scaled(whole, fraction, _FACTORS[unit.lower()])
        if _PERCENT.fullmatch(text):
            _refuse(text, "a percentage stands only for a budget", _SIZE_EXAMPLE)
    _refuse_unreadable(text, _SIZE_EXAMPLE)


def parse_budget(text: str, *, device_total_bytes: int | Callable[[], int]) -> int:
    """Read a budget: a byte size, or a share of the device's total memory.

    Args:
        text: What `parse_bytes` reads, or ``"90%"`` (decimals allowed), or ``"auto"``, which is ``"100%"``.
        device_total_bytes: The device's total in bytes, or a function that finds it out. It is called for a
            share only, so that an absolute budget needs no device.

    Returns:
        Bytes, at least 1; a fraction of a byte is rounded down. A size above the device's total is returned
        as it is: warning about that is the caller's.

    Raises:
        BudgetError: For a text outside this grammar, a budget of nothing, or more than 100 % (a
            `ValueError`); the message repeats the input and shows a right one.
    """
    share = _share(text)
    if share is None:
        budget_bytes = parse_bytes(text) if _is_size(text) else _refuse_unreadable(text, _BUDGET_EXAMPLE)
    else:
        numerator, denominator = share
        if numerator > denominator:
            _refuse(text, "more than 100 % of the device", 'the most is "100%", which "auto" means too')
        total_bytes = device_total_bytes if isinstance(device_total_bytes, int) else device_total_bytes()
        budget_bytes = total_bytes * numerator // denominator
    if budget_bytes < 1:
        _refuse(text, "a budget of less than one byte fits no step", _BUDGET_EXAMPLE)
    return budget_bytes


def check_budget(text: str) -> None:
    """Raise `BudgetError` where `parse_budget` would on every device: for texts read before there is one."""
    parse_budget(text, device_total_bytes=10**40)


def _is_size(text: object) -> bool:
    return isinstance(text, str) and _SIZE.fullmatch(text) is not None


def _share(text: object) -> tuple[int, int] | None:
    """A share of the device as (numerator, denominator), or None where the text is not one."""
    if not isinstance(text, str):
        return None
    if text.lower() == "auto":
        return 1, 1
    match = _PERCENT.fullmatch(text)
    if match is None:
        return None
    whole, fraction = match.group(1), match.group(2) or ""
    return int(whole + fraction), 100 * 10 ** len(fraction)


def _scaled(whole: str, fraction: str | None, factor: int) -> int:
    digits = fraction or ""
    divisor: int = 10 ** len(digits)
    return int(whole + digits) * factor // divisor


def _refuse_unreadable(value: object, example: str) -> NoReturn:
    """Say what is wrong with a value that is not in the grammar, with the likeliest right one."""
    if value is None:
        _refuse(value, "nothing was given", example)
    if isinstance(value, bool):
        _refuse(value, "a truth value is not a size", example)
    if isinstance(value, int | float):
        _refuse(value, "a bare number has no unit", _did_you_mean(_with_unit(value), example))
    if isinstance(value, bytes):
        _refuse(
            value, "bytes are not text", _did_you_mean(_tidied(value.decode("ascii", "replace")), example)
        )
    if not isinstance(value, str):
        _refuse(value, f"a {type(value).__name__} is not text", example)
    if not value.strip():
        _refuse(value, "the text is empty", example)
    if _BARE.fullmatch(value):
        number = float(value) if "." in value else int(value)
        _refuse(value, "a bare number has no unit", _did_you_mean(_with_unit(number), example))
    if match := _NUMBER_AND_WORD.fullmatch(value):
        word = match.group(3)
        reason = f"{word!r} is not a unit; the units are B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        _refuse(value, reason, _did_you_mean(_with_nearest_unit(value, word), example))
    if value.lstrip().startswith(("-", "−")):
        _refuse(value, "a size is not negative", example)
    _refuse(value, "it is not a number and a unit", _did_you_mean(_tidied(value), example))


def _with_unit(number: int | float) -> str | None:
    if isinstance(number, float) and 0 < number <= 1:
        return f"{round(number * 100, 4):g}%"  # other tools take a fraction of the device
    if 10**5 <= number < 10**15:
        return f"{int(number)}B"  # nobody has that many gigabytes
    return f"{number}GB" if _BARE.fullmatch(str(number)) else None


def _with_nearest_unit(text: str, word: str) -> str | None:
    """`70G`, `70Gi`, `70 gigabytes`: the first letter says which unit, a second i says of which kind."""
    letter = word[0].upper()
    if letter not in "KMGT":
        return None
    return f"{text[: -len(word)]}{letter}{'iB' if word[1:2].lower() == 'i' and len(word) == 2 else 'B'}"


def _tidied(text: str) -> str | None:
    """The text in plain characters without padding, if that is a size."""
    plain = re.sub(r"[\s_]", "", unicodedata.normalize("NFKC", text))
    return plain if _SIZE.fullmatch(plain) or _PERCENT.fullmatch(plain) else None


def _did_you_mean(candidate: str | None, example: str) -> str:
    if candidate is None:
        return example
    percent_where_none_is_read = candidate.endswith("%") and example is _SIZE_EXAMPLE
    return example if percent_where_none_is_read else f'did you mean "{candidate}"?'


def _refuse(value: object, reason: str, remedy: str) -> NoReturn:
    shown = repr(value)
    if len(shown) > 120:
        shown = f"{shown[:100]}... ({len(shown)} characters)"
    raise BudgetError(f"cannot read {shown} as a memory size: {reason}; {remedy}")
