"""Planned graphs free what is dead; the default compile holds it until the end of a group of kernels."""

from __future__ import annotations

import torch
from gate import train, worst
from torch import nn

import dtr_integrations
from dtr_integrations.capture.source import ModuleStep
from dtr_integrations.capture.step import capture
from dtr_integrations.core.schedule import schedule_for

SIZE, WIDE = 64, 16


class Widening(nn.Module):
    """Values that are wide for a moment, between reductions: many kernels, and no library call."""

    def __init__(self, turns: int = 4) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDE)) for _ in range(turns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            wide = torch.softmax(x.unsqueeze(-1) * weight, dim=0)
            x = torch.softmax(wide * SIZE, dim=1).sum(-1)
        return x


def make() -> tuple[nn.Module, torch.Tensor, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Widening()
    return model, torch.randn(SIZE, SIZE), torch.optim.SGD(model.parameters(), lr=1e-3)


def test_buffers_that_die_within_a_group_are_freed_without_recomputing_more() -> None:
    model, x, _ = make()
    captured = capture(ModuleStep(model=model, args=(x,), loss_fn=lambda out: out.square().mean()))
    (graph,) = captured.step.graphs
    wide_bytes = 4 * SIZE * SIZE * WIDE
    model, x, optimizer = make()
    budget = captured.default.peak_bytes - wide_bytes
    with dtr_integrations.auto_checkpoint(
        model, budget=f"{budget}B", optimizer=optimizer, progress=False
    ) as session:
        planned = train(model, optimizer, lambda: model(x).square().mean(), session.step)
    assert session.plan.slowdown == 1.0
    assert session.plan.schedule == (schedule_for(graph, graph.default_saved),)
    assert session.reports[0].peak_allocated_bytes == session.plan.predicted_allocated_bytes <= budget
    model, x, optimizer = make()
    model.compile(dynamic=False)
    default = train(model, optimizer, lambda: model(x).square().mean(), lambda step: step())
    error, where = worst(planned, default)
    assert error <= 1e-5, where
