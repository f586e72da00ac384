"""A compiled forward whose backward never runs, because its output is detached."""

from __future__ import annotations

import torch
from torch import nn

from dtr_integrations.capture.closure import FunctionStep
from dtr_integrations.capture.step import capture
from dtr_integrations.core.graph import RegionKind


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = (nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))


def test_it_is_open_for_no_later_region() -> None:
    model, x = Pair(), torch.randn(64, 32)

    def step() -> None:
        model.zero_grad()
        made = model.maker(x).detach()
        (model.judge(x) + model.judge(made)).sum().backward()

    captured = capture(FunctionStep(fn=step, model=model, targets=("maker", "judge"))).step
    forward = [(r.graph, r.call) for r in captured.regions if r.kind is RegionKind.FORWARD]
    backward = [(r.graph, r.call) for r in captured.regions if r.kind is RegionKind.BACKWARD]
    assert sorted(forward) == sorted(backward) == [(0, 1), (0, 2)]  # one graph, since the modules are alike
    assert captured.regions[-1].open_bytes == 0
    assert all(region.base_bytes >= captured.static.static_bytes for region in captured.regions)
