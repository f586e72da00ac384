"""DDP on two gloo ranks, real processes: its buckets are in the prediction, and plans change no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks

pytest.importorskip("accelerate")
pytest.importorskip("lightning")

SCRIPT = Path(__file__).with_name("ddp_cases.py")


def launch(
    door: str, budget: str, directory: Path, *, views: bool = False, width: int = 64
) -> list[dict[str, Any]]:
    return two_ranks.launch(SCRIPT, door, budget, str(int(views)), str(directory), WIDTH=str(width))


def gradients(result: dict[str, Any]) -> list[torch.Tensor]:
    return [torch.tensor(values, dtype=torch.float64) for values in result["gradients"]]


@pytest.mark.parametrize(
    ("door", "views"),
    [
        ("accelerate", False),
        pytest.param("plain", False, marks=pytest.mark.slow),
        pytest.param("wrapped", True, marks=pytest.mark.slow),
        pytest.param("accelerate", True, marks=pytest.mark.slow),
        pytest.param("fabric", False, marks=pytest.mark.slow),
        pytest.param("lightning", False, marks=pytest.mark.slow),
        pytest.param("lightning", True, marks=pytest.mark.slow),
    ],
)
def test_buckets_are_predicted_and_plans_change_nothing(door: str, views: bool, tmp_path: Path) -> None:
    default = launch(door, "1GB", tmp_path, views=views)
    static, peak = default[0]["static_bytes"], default[0]["default_bytes"]
    planned = launch(door, f"{int(static + 0.7 * (peak - static))}B", tmp_path, views=views)
    for results in (default, planned):
        assert results[0]["digests"][0] == results[1]["digests"][0]
        for result in results:
            held = result["breakdown"]
            assert result["bucket_bytes"] == result["parameter_bytes"]  # as torch itself says
            assert held.get("DDP buckets", 0) + held.get("gradients", 0) >= result["bucket_bytes"]
            if not views:  # else they are the gradients as well
                assert held["DDP buckets"] == pytest.approx(result["allocated_for_buckets"], rel=0.05)
            assert result["measured"]
            assert all(result["within"])
            assert max(result["errors"]) <= 0.02
    for one, other in zip(default, planned, strict=True):
        assert one["is_default"]
        assert not other["is_default"]
        for expected, got in zip(gradients(one), gradients(other), strict=True):
            assert torch.linalg.norm(got - expected) <= 1e-5 * torch.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.parametrize("door", ["accelerate", "lightning"])
def test_graphs_are_planned_as_torch_splits_them_at_the_buckets(door: str, tmp_path: Path) -> None:
    results = launch(door, "1GB", tmp_path, width=256)
    for result in results:
        assert result["graphs"] == 2
        assert result["on_the_spot"] == 0
        assert max(result["errors"]) <= 0.02
