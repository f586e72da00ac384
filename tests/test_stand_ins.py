"""What a step reads off tensors without data: a run that goes well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dtr_integrations.capture.fake import FakeWorld

CONDITIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "isnan": (lambda x: torch.isnan(x).any(), False),
    "isinf": (lambda x: torch.isinf(x).any(), False),
    "either": (lambda x: (torch.isnan(x) | torch.isinf(x)).any(), False),
    "isfinite": (lambda x: torch.isfinite(x).all(), True),
    "not finite": (lambda x: (~torch.isfinite(x)).any(), False),
    "unequal to itself": (lambda x: (x != x).any(), False),
    "equal to itself": (lambda x: (x == x).all(), True),
    "not nan": (lambda x: torch.logical_not(torch.isnan(x)).all(), True),
    "a comparison": (lambda x: x.sum() > 0, True),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions(name: str) -> None:
    condition, expected = CONDITIONS[name]
    world = FakeWorld()
    x = world.fake(torch.zeros(3))
    with world.active():
        assert bool(condition(x)) is expected


def test_numbers() -> None:
    world = FakeWorld()
    with world.active():
        assert world.fake(torch.tensor(2.5)).item() == 1.0
        assert world.fake(torch.tensor(7)).item() == 1
