"""The figures of the paper authors' own simulator, on their logs."""

from __future__ import annotations

from typing import Any

import pytest
from dtr_logs import authors_data, authors_program, golden

from dtr_integrations.dtr import replay

# Seconds each; the others are `slow`.
_DEAR = {("transformer-10", "h_dtr"), ("transformer-10", "msps")}


def _quick(prefix: str, cell: dict[str, Any]) -> bool:
    if prefix == "unet-6":
        return True
    if prefix == "lstm-128":
        return cell["heuristic"] == "h_dtr_eq" and cell["ratio"] in (0.5, 0.2)
    return cell["ratio"] in (0.8, 0.5, 0.3, 0.2) and (prefix, cell["heuristic"]) not in _DEAR


CELLS = [
    pytest.param(
        prefix,
        cell,
        id=f"{prefix}-{cell['heuristic']}-{cell['ratio']}",
        marks=() if _quick(prefix, cell) else pytest.mark.slow,
    )
    for _, prefix, cell in golden()
] or [pytest.param("", {}, id="no-data")]


def test_the_data_is_there() -> None:
    authors_data()
    assert len(golden()) > 100


@pytest.mark.parametrize(("prefix", "cell"), CELLS)
def test_a_golden_cell(prefix: str, cell: dict[str, Any]) -> None:
    program = authors_program(prefix)
    exact = replay(program, heuristic=cell["heuristic"], budget_ratio=cell["ratio"])
    assert exact.outcome == cell["outcome"]
    # Where the run breaks off is reproduced too.
    assert exact.slowdown == pytest.approx(cell["slowdown"], abs=0.001)
    assert exact.peak_bytes <= exact.budget_bytes
    indexed = replay(program, heuristic=cell["heuristic"], budget_ratio=cell["ratio"], search="indexed")
    assert indexed.outcome == cell["outcome"]
    assert indexed.slowdown == pytest.approx(exact.slowdown, abs=0.001)


def test_sets_need_a_twentieth_of_the_metadata_of_the_exact_neighbourhood_on_resnet() -> None:
    program = authors_program("resnet32-56")
    sets, exact = (replay(program, heuristic=key, budget_ratio=0.5) for key in ("h_dtr_eq", "h_dtr"))
    assert sets.accesses * 20 <= exact.accesses
    assert sets.accesses <= 32_104


@pytest.mark.slow
def test_and_a_hundredth_on_the_transformer() -> None:
    program = authors_program("transformer-10")
    sets, exact = (replay(program, heuristic=key, budget_ratio=0.3) for key in ("h_dtr_eq", "h_dtr"))
    assert sets.accesses * 100 <= exact.accesses
    assert sets.accesses <= 93_304


def test_the_index_reads_a_tenth_for_the_same_evictions() -> None:
    """The index reads a fraction of what the scan reads, and both evict the same number of times."""
    results = {
        search: replay(authors_program("lstm-128"), budget_ratio=0.5, search=search)
        for search in ("exact", "indexed")
    }
    assert results["indexed"].accesses * 10 < results["exact"].accesses
    assert results["indexed"].evictions == results["exact"].evictions
    assert results["indexed"].replays == results["exact"].replays
