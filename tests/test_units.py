from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtr_integrations._format import budget_at_least
from dtr_integrations.errors import BudgetError
from dtr_integrations.units import check_budget, format_bytes, parse_budget, parse_bytes

GB = 10**9
FACTORS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("70GB", 70_000_000_000),
        ("70 GB", 70_000_000_000),
        ("70gb", 70_000_000_000),
        ("70Gb", 70_000_000_000),
        ("70GiB", 75_161_927_680),
        ("70 gIb", 75_161_927_680),
        ("1.5GB", 1_500_000_000),
        ("1.5 GiB", 1_610_612_736),
        ("0.1MB", 100_000),
        ("0B", 0),
        ("007B", 7),
        ("1b", 1),
        ("2TB", 2_000_000_000_000),
        ("2tib", 2_199_023_255_552),
        ("0.3GB", 300_000_000),  # 0.3 * 10**9 in floats is 299999999.99999994
        ("4.35GB", 4_350_000_000),
        ("9007199254740993B", 9_007_199_254_740_993),  # 2**53 + 1: no float holds it
        ("1.9999B", 1),
        ("0.0000000001GB", 0),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected
    assert type(parse_bytes(text)) is int


@given(
    whole=st.integers(0, 10**15),
    fraction=st.none() | st.text("0123456789", min_size=1, max_size=20),
    space=st.sampled_from(["", " "]),
    unit=st.sampled_from(list(FACTORS)),
    change_case=st.sampled_from([str, str.lower, str.upper, str.swapcase]),
)
def test_every_text_of_the_grammar(
    whole: int, fraction: str | None, space: str, unit: str, change_case: Any
) -> None:
    number = str(whole) if fraction is None else f"{whole}.{fraction}"
    exact = Fraction(number) * FACTORS[unit]
    assert parse_bytes(f"{number}{space}{change_case(unit)}") == exact // 1


WRONG: list[tuple[Any, str]] = [
    ("70", 'did you mean "70GB"?'),
    (70, 'did you mean "70GB"?'),
    (1.5, 'did you mean "1.5GB"?'),
    (8_000_000_000, 'did you mean "8000000000B"?'),
    (8e9, 'did you mean "8000000000B"?'),
    (True, "a truth value"),
    (False, "a truth value"),
    (None, "nothing was given"),
    ([70], "a list is not text"),
    (b"70GB", 'did you mean "70GB"?'),
    (float("nan"), "bare number"),
    (float("inf"), "bare number"),
    (-1, "bare number"),
    ("-1GB", "not negative"),
    ("-0GB", "not negative"),
    ("+1GB", "not a number and a unit"),
    ("7 0GB", 'did you mean "70GB"?'),
    ("70  GB", 'did you mean "70GB"?'),
    ("70\tGB", 'did you mean "70GB"?'),
    ("70\u00a0GB", 'did you mean "70GB"?'),
    (" 70GB", 'did you mean "70GB"?'),
    ("70GB\n", 'did you mean "70GB"?'),
    ("lots", "for example"),
    ("110%", '"'),
    ("nanGB", "for example"),
    ("inf GB", "for example"),
    ("infinity", "for example"),
    ("", "the text is empty"),
    (" ", "the text is empty"),
    ("GB", "for example"),
    (".5GB", "for example"),
    ("5.GB", "for example"),
    ("1.2.3GB", "for example"),
    ("1e3GB", "for example"),
    ("0x10GB", "for example"),
    ("1,5GB", "for example"),
    ("1_000MB", 'did you mean "1000MB"?'),
    ("７０GB", 'did you mean "70GB"?'),
    ("٧٠GB", "for example"),
    ("70\u212aB", 'did you mean "70KB"?'),  # the Kelvin sign lower-cases to k
    ("70G", 'did you mean "70GB"?'),
    ("70Gi", 'did you mean "70GiB"?'),
    ("70 gigabytes", 'did you mean "70 GB"?'),
    ("70PB", "the units are"),
    ("9" * 5000 + "GB", "characters"),
]


@pytest.mark.parametrize(("value", "remedy"), WRONG, ids=[repr(value)[:20] for value, _ in WRONG])
def test_every_wrong_input_is_repeated_and_shown_right(value: Any, remedy: str) -> None:
    for read in (
        parse_bytes,
        check_budget,
        lambda text: parse_budget(text, device_total_bytes=80 * GB),
    ):
        with pytest.raises(BudgetError) as caught:
            read(value)
        message = str(caught.value)
        assert isinstance(caught.value, ValueError)
        assert repr(value)[:100] in message
        assert remedy in message
        assert '"' in message, "a right one is always shown"
        assert len(message) < 400


@given(st.text() | st.text("0123456789.KMGTkmgtiIbB% -", max_size=8))
def test_no_text_escapes_the_grammar(text: str) -> None:
    grammar = re.compile(r"[0-9]+(\.[0-9]+)? ?([kKmMgGtT]i?[bB]|[kKmMgGtT]I[bB]|[bB])")
    if grammar.fullmatch(text):
        assert parse_bytes(text) >= 0
    else:
        with pytest.raises(BudgetError):
            parse_bytes(text)


@pytest.mark.parametrize("value", ["70", "-1GB", "7 0GB", "lots", "70G"])
def test_what_an_error_suggests_can_be_read(value: str) -> None:
    with pytest.raises(BudgetError) as caught:
        parse_bytes(value)
    suggestion = re.findall(r'"([^"]+)"', str(caught.value))[0]
    assert parse_bytes(suggestion) > 0


def test_a_percentage_is_a_share_of_the_device() -> None:
    assert parse_budget("90%", device_total_bytes=80 * GB) == 72 * GB
    assert parse_budget("90 %", device_total_bytes=80 * GB) == 72 * GB
    assert parse_budget("92.5%", device_total_bytes=1001) == 925  # 925.925, rounded down
    assert parse_budget("100%", device_total_bytes=123) == 123
    assert parse_budget("auto", device_total_bytes=123) == 123
    assert parse_budget("AUTO", device_total_bytes=123) == 123


@pytest.mark.parametrize("text", ["110%", "100.0000001%", "0%", "0.0%", "-5%", "0GB", "0.1B", "%", "nan%"])
def test_a_share_beyond_the_device_or_a_budget_of_nothing(text: str) -> None:
    with pytest.raises(BudgetError, match=re.escape(repr(text))):
        parse_budget(text, device_total_bytes=80 * GB)
    with pytest.raises(BudgetError):
        check_budget(text)


def test_a_share_that_is_less_than_a_byte() -> None:
    with pytest.raises(BudgetError, match="less than one byte"):
        parse_budget("1%", device_total_bytes=99)
    assert parse_budget("1%", device_total_bytes=100) == 1


def test_a_fraction_as_other_tools_take_it_suggests_a_percentage() -> None:
    with pytest.raises(BudgetError, match='did you mean "90%"'):
        parse_budget(0.9, device_total_bytes=GB)  # type: ignore[arg-type]


def test_an_absolute_budget_asks_for_no_device() -> None:
    def no_device() -> int:
        raise AssertionError("asked for the device's total")

    assert parse_budget("1.5GB", device_total_bytes=no_device) == 1_500_000_000
    assert parse_budget("auto", device_total_bytes=lambda: 7) == 7


def test_a_size_is_no_percentage() -> None:
    with pytest.raises(BudgetError, match="a percentage stands only for a budget"):
        parse_bytes("90%")


@pytest.mark.parametrize(
    ("n", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1000, "1 KB", "1000 B"),
        (1024, "1.02 KB", "1 KiB"),
        (999_994, "999.99 KB", "976.56 KiB"),
        (999_995, "1 MB", "976.56 KiB"),
        (213_456_789, "213.46 MB", "203.57 MiB"),
        (70 * GB, "70 GB", "65.19 GiB"),
        (-5_250_000, "-5.25 MB", "-5.01 MiB"),
        (10**16, "10000 TB", "9094.95 TiB"),
    ],
)
def test_format(n: int, decimal: str, binary: str) -> None:
    assert format_bytes(n) == decimal
    assert format_bytes(n, binary=True) == binary


@given(n=st.integers(0, 10**16), binary=st.booleans())
def test_what_is_formatted_reads_back(n: int, binary: bool) -> None:
    text = format_bytes(n, binary)
    factor = FACTORS[text.split(" ")[1]]
    assert abs(parse_bytes(text) - n) <= factor // 200 + 1


@given(st.integers(1, 10**15))
def test_a_suggested_budget_suffices_and_is_close(n: int) -> None:
    suggested = parse_bytes(budget_at_least(n))
    assert n <= suggested <= n + n // 100 + 1
    check_budget(budget_at_least(n))
