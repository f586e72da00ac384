"""What the tests of front doors that prepare a model have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

AMPLE = "1GB"


class Blocks(nn.Module):
    """Six blocks of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x


class WithLoss(Blocks):
    """The same and the loss, as Hugging Face models return it."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(x).square().mean()}


def binding(plan: Any) -> str:
    """Seven tenths of what the default adds to static memory."""
    assert plan.is_default
    return f"{int(plan.static_bytes + 0.7 * (plan.default_allocated_bytes - plan.static_bytes))}B"


def assert_kept(
    holder: Any, losses: list[float], default: list[float], tolerance: float, directory: Path
) -> None:
    """Under a budget that binds, as predicted, written down, with the default's losses."""
    assert not holder.plan.is_default
    assert holder.reports
    for report in holder.reports:
        assert report.within_budget
        assert report.prediction_error <= 0.01
    assert losses == pytest.approx(default, rel=tolerance)
    assert (directory / "plan-rank0.json").exists()
    assert len((directory / "peaks-rank0.jsonl").read_text().splitlines()) == len(holder.reports)
    assert "budget" in holder.report
