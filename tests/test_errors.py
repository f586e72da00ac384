from __future__ import annotations

import inspect
import pickle
import re

import pytest

from dtr_integrations import errors
from dtr_integrations.errors import (
    BudgetError,
    BudgetInfeasible,
    CaptureError,
    ConfigError,
    DTRError,
    MissingExtra,
    NothingPlanned,
    PlanMismatch,
    PlanWarning,
)
from dtr_integrations.units import parse_bytes

INFEASIBLE = BudgetInfeasible(
    budget_bytes=50_000_000,
    lowest_bytes=60_123_456,
    reserve_bytes=2_000_000,
    holders=[("blocks.0.attn", 10_000_000), ("blocks.1.mlp", 20_000_000)],
    would_fit=["a batch of 4 instead of 8 requires 41 MB"],
)


def test_an_infeasible_budget_says_every_number() -> None:
    assert str(INFEASIBLE) == (
        "no plan fits the budget of 50 MB (50,000,000 bytes): the lowest one requires 60.12 MB "
        "(60,123,456 bytes), which is 10.12 MB too much (reserve 2 MB included).\n"
        "Held at that peak, largest first:\n"
        "         20 MB  blocks.1.mlp\n"
        "         10 MB  blocks.0.attn\n"
        "What would fit:\n"
        '  budget="60.2MB" with everything else as it is\n'
        "  a batch of 4 instead of 8 requires 41 MB\n"
        'To train over budget with the lowest plan: on_infeasible="best_effort".'
    )
    assert INFEASIBLE.shortfall_bytes == 10_123_456
    assert INFEASIBLE.holders == (("blocks.1.mlp", 20_000_000), ("blocks.0.attn", 10_000_000))


def test_the_budget_that_it_suggests_is_enough() -> None:
    match = re.search(r'budget="([^"]+)"', str(INFEASIBLE))
    assert match is not None
    assert parse_bytes(match.group(1)) >= INFEASIBLE.lowest_bytes


def test_many_holders_are_summed() -> None:
    error = BudgetInfeasible(
        budget_bytes=1, lowest_bytes=100, holders=[(f"layer{i}", 10 + i) for i in range(12)]
    )
    assert "46 B  in 4 more" in str(error)  # 10 + 11 + 12 + 13
    assert len(error.holders) == 12


@pytest.mark.parametrize(
    "error",
    [
        INFEASIBLE,
        PlanMismatch("the plan is for another step", differences=["batch 8, not 4", "torch 2.13, not 2.12"]),
        MissingExtra(what="AutoCheckpoint", package="lightning", extra="lightning"),
        ConfigError("unknown key"),
        CaptureError("failed", 3),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_errors_cross_ranks(error: DTRError, protocol: int) -> None:
    error.add_note("on rank 1")
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.args == error.args
    assert again.__dict__ == error.__dict__


def test_users_can_catch_the_builtin_families() -> None:
    for family, classes in {
        ValueError: [ConfigError, BudgetError, BudgetInfeasible, PlanMismatch],
        RuntimeError: [CaptureError, errors.CertifyError, errors.ProfilerActive],
        ImportError: [errors.UnsupportedTorch, MissingExtra],
    }.items():
        for cls in classes:
            assert issubclass(cls, family)
            assert issubclass(cls, DTRError)
    assert issubclass(NothingPlanned, PlanWarning)
    assert issubclass(PlanWarning, UserWarning)
    assert issubclass(BudgetError, ConfigError)


def test_the_map_names_every_class_and_each_has_a_remedy() -> None:
    classes = [
        cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__
    ]
    assert {cls.__name__ for cls in classes} == set(errors.__all__)
    for cls in classes:
        assert f" {cls.__name__} " in (errors.__doc__ or ""), cls
        assert "Remedy:" in (cls.__doc__ or ""), cls


def test_a_missing_extra_says_what_to_install() -> None:
    error = MissingExtra(what="AutoCheckpoint", package="lightning", extra="lightning")
    assert str(error) == (
        "AutoCheckpoint needs lightning, which is not installed: pip install 'dtr-integrations[lightning]'"
    )
