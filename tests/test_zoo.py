"""Model families that nobody here wrote, each trained under a budget that binds: it holds and changes
nothing. All of them are in `recipes/benchmarks/zoo.py`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the zoo's models come from the extra `transformers`")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes" / "benchmarks"))

from gate import Trained, worst
from zoo import ROUNDING, Row, run_family, table
from zoo_families import Family, load, register

QUICK = ("gpt2", "llama", "phi", "bert", "electra", "vit")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in load()]
)
def test_a_family_trains_the_same_under_its_budget(name: str, record_property: Any) -> None:
    family = load()[name]
    if name in QUICK:
        row = run_family(replace(family, make=family.small or family.make), skip=("torch", "eager"))
    else:
        row = run_family(family, skip=("torch",))
    for key in ("outcome", "graphs", "breaks", "prediction_error", "error_default", "error_eager"):
        record_property(key, getattr(row, key))
    assert row.outcome.startswith("planned"), row.reason
    assert row.budget_bytes < row.default_bytes
    assert row.measured_bytes is not None
    assert row.measured_bytes <= row.budget_bytes
    assert row.prediction_error is not None
    assert row.prediction_error <= 0.01
    assert row.passed, (row.where_default, row.error_default, row.where_eager, row.error_eager)


def test_the_comparison_sees_one_wrong_gradient() -> None:
    good = {"loss": torch.tensor(1.0), "grad a": torch.ones(4), "grad b": torch.ones(4)}
    bad = {**good, "grad b": torch.tensor([1.0, 1.0, 1.0, 1.001])}
    error, where = worst(Trained([good, bad]), Trained([good, good]))
    assert error == pytest.approx(0.0005, rel=1e-3)
    assert where == "grad b at step 1"
    assert worst(Trained([good]), Trained([good])) == (0.0, "")
    assert worst(Trained([{"loss": torch.tensor(float("nan"))}]), Trained([good]))[0] == float("inf")


def test_a_gradient_that_is_rounding_on_both_sides_does_not_count() -> None:
    good = {"grad a": torch.ones(4), "grad zero": torch.full((4,), 1e-9)}
    noise = {**good, "grad zero": torch.full((4,), -3e-9)}
    wrong = {**good, "grad zero": torch.full((4,), 1e-3)}
    assert worst(Trained([noise]), Trained([good]), rounding=ROUNDING)[0] == 0.0
    assert worst(Trained([wrong]), Trained([good]), rounding=ROUNDING)[0] > 1


def test_no_gradient_is_as_good_as_zeros_and_nothing_else() -> None:
    good = {"loss": torch.tensor(1.0), "grad a": torch.ones(4)}
    assert worst(Trained([{**good, "grad b": torch.zeros(4)}]), Trained([good])) == (0.0, "")
    assert worst(Trained([good]), Trained([{**good, "grad b": torch.zeros(4)}])) == (0.0, "")
    for one, other in (
        ({**good, "grad b": torch.full((4,), 1e-12)}, good),
        (good, {**good, "buffer b": good["loss"]}),
    ):
        error, where = worst(Trained([one]), Trained([other]))
        assert error == float("inf")
        assert "b'] are on one side only" in where


def test_a_row_passes_only_with_everything_proven() -> None:
    good = Row(
        family="x", outcome="planned", within_budget=True, error_default=1e-6, error_eager=1e-5,
    )  # fmt: skip
    assert good.passed
    for change in (
        {"outcome": "refused"},
        {"outcome": "eager"},
        {"within_budget": False},
        {"error_default": 2e-5},
        {"error_default": None},
        {"error_default": float("nan")},
        {"error_eager": 1e-3},
        {"error_eager": 1e-3, "error_eager_of_default": 5e-4},
    ):
        assert not Row(**{**vars(good), **change}).passed, change
    assert Row(**{**vars(good), "error_eager": 1e-3, "error_eager_of_default": 1e-3}).passed
    assert "| x | planned |" in table([good])


def test_a_name_is_given_once() -> None:
    first = next(iter(load().values()))
    with pytest.raises(ValueError, match=f"'{first.name}'"):
        register(Family(name=first.name, make=first.make, batch=first.batch))
