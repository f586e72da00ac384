"""What users report about torch's own checkpointing and budgets, and that it does not happen here: peaks and
gradients.

Each test first shows the fault on torch's own API, or on a naive plan where torch has fixed it, and then that
ours does not have it. Inputs are the reported ones, scaled down. Steps in their entirety: `test_pains_steps`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Block
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from torchs_own import Split, mean_square, peak_bytes, split_of, torch_budget

import dtr_integrations
from dtr_integrations.capture.source import ModuleStep
from dtr_integrations.capture.step import capture, dry_step
from dtr_integrations.core.plan import Plan
from dtr_integrations.core.schedule import schedule_for
from dtr_integrations.distributed import reserve_for
from dtr_integrations.errors import BudgetInfeasible, PlanWarning
from dtr_integrations.pipeline import make_plan, planned_partitioner
from dtr_integrations.report import breakdown_rows
from dtr_integrations.units import parse_bytes

HOW = ("plain", "wrapped")


def plan_at(model: nn.Module, x: torch.Tensor, budget_bytes: int, **config: Any) -> Plan:
    """A plan for forward and backward alone."""
    return dtr_integrations.plan(
        model, x, budget=f"{budget_bytes}B", loss_fn=mean_square, progress=False, **config
    )


def bytes_at(default: Plan, share: float) -> int:
    """A budget at a share of what the default adds to static memory."""
    return default.static_bytes + int(share * (default.default_allocated_bytes - default.static_bytes))


def trained(
    model: nn.Module, x: torch.Tensor, budget_bytes: int, **config: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Two steps under a budget, each from the same seed as `gradients`; the session and the gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step() -> None:
        optimizer.zero_grad()
        torch.manual_seed(1)
        mean_square(model(x)).backward()
        optimizer.step()

    session = dtr_integrations.auto_checkpoint(
        model, optimizer=optimizer, budget=f"{budget_bytes}B", progress=False, **config
    )
    with session:
        session.step(step)
        session.step(step)
    return session, {name: p.grad.clone() for name, p in model.named_parameters()}


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    mean_square(model(x)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def off(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest ‖a − b‖ / ‖b‖ over all tensors."""
    return max(((one[n] - b).norm() / b.norm()).item() for n, b in other.items())


class Decoder(nn.Module):
    def __init__(self, layers: int = 2, times: int = 1, how: str = "plain") -> None:
        super().__init__()
        blocks = [Block(32, 2, dropout=0.0) for _ in range(layers)]
        self.blocks = nn.ModuleList(checkpoint_wrapper(b) if how == "wrapped" else b for b in blocks)
        self.times, self.checkpoints = times, how == "checkpointed"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


def made(*args: Any, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(*args, **kwargs)


def hidden() -> torch.Tensor:
    return torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(2))


def compiled(model: nn.Module) -> nn.Module:
    model.compile(dynamic=False)
    return model


@cache
def torchs_peak(ratio: float) -> int:
    with torch_budget(ratio):
        return peak_bytes(compiled(made()), hidden())


@cache
def decoder_default() -> Plan:
    return plan_at(made(), hidden(), 10**9)


@cache
def decoder_run() -> tuple[Any, dict[str, torch.Tensor]]:
    """Trained at half of the default's dynamic memory."""
    return trained(made(), hidden(), bytes_at(decoder_default(), 0.5))


@pytest.mark.slow
def test_01_a_smaller_budget_never_has_a_higher_peak() -> None:
    """Pain 1, pytorch#197838: a smaller ratio gives a higher peak. On torch 2.13 ratio 0 is far above 0.1.
    Here: asking for less gives less, measured."""
    assert torchs_peak(0.0) > 1.2 * torchs_peak(0.1), "torch's ratio 0 is no longer above its ratio 0.1"

    default, (session, ours) = decoder_default(), decoder_run()
    plans = [default, plan_at(made(), hidden(), bytes_at(default, 0.75)), session.plan]
    predicted = [plan.predicted_allocated_bytes for plan in plans]
    assert predicted == sorted(predicted, reverse=True)
    assert [plan.slowdown for plan in plans] == sorted(plan.slowdown for plan in plans)
    assert all(plan.required_bytes <= plan.budget_bytes for plan in plans)
    (report,) = session.reports
    assert report.peak_allocated_bytes <= session.budget_bytes
    assert off(ours, gradients(made(), hidden())) <= 1e-5


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(torch.relu(layer(x)), 0.5, self.training)
        return x


def test_02_recomputed_dropout_has_the_same_mask(tmp_path: Path) -> None:
    """Pain 2, pytorch#190758 and #190717: recomputed dropout draws anew, gradients are silently wrong. Input
    (64, 256), dropout 0.5, three matmuls, as reported. On torch 2.13: by 80 to 99 % in norm at ratio 0.
    Here: the same bits as the default's, with every draw repeated."""

    def torchs(ratio: float) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        with torch_budget(ratio):
            return gradients(compiled(Dropped()), x)

    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    default = torchs(1.0)
    assert off(torchs(0.0), default) > 0.5, "torch's ratio 0 has the right masks now"

    torch.manual_seed(0)
    model = Dropped()
    (graph,) = capture(ModuleStep(model=model, args=(x,), loss_fn=mean_square)).step.graphs
    everything = schedule_for(graph, ())  # nothing is saved but the seeds
    assert sum("inductor_random" in graph.ops[step.value].target for step in everything.recompute) == 3
    path = tmp_path / "plan.json"
    path.write_text(replace(plan_at(model, x, 10**9), schedule=(everything,)).to_json())
    session, ours = trained(model, x, 10**9, plan=str(path))
    assert session.plan.schedule == (everything,)
    assert off(ours, default) == 0.0


@pytest.mark.slow
def test_03_blocks_that_run_twice_are_simulated() -> None:
    """Pain 3, pytorch#193193: checkpointed blocks that are traversed twice in one step hold 2.3 to 3.5 times
    eager's memory in a compiled backward. On torch 2.13: 2.3 times with two blocks, 2.9 with three. Here:
    predicted to 1 %, and within a budget below that."""
    x = hidden()
    eager = peak_bytes(made(times=2, how="checkpointed"), x)
    torchs = peak_bytes(compiled(made(times=2, how="checkpointed")), x)
    assert torchs > 2 * eager, "torch's compiled checkpointing no longer holds more than twice eager's"

    model = made(times=2)
    static = sum(p.nbytes for p in model.parameters())
    session, ours = trained(model, x, static + x.nbytes + int(0.9 * torchs))
    (report,) = session.reports
    assert not session.plan.is_default
    assert report.prediction_error <= 0.01
    assert report.peak_allocated_bytes <= session.budget_bytes
    assert off(ours, gradients(made(times=2), x)) <= 1e-5


class Norms(nn.Module):
    """As in the report; a class of its own, since torch compiles no `nn.Sequential` in place."""

    def __init__(self, layers: int = 5, width: int = 128) -> None:
        super().__init__()
        parts = [(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(layers)]
        self.parts = nn.Sequential(*(part for block in parts for part in block))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(x)


def test_04_where_eager_is_lower_it_is_said() -> None:
    """Pain 4, pytorch#120381: compiled peaks above plain eager. 5×(Linear, LayerNorm, GELU); on torch 2.13
    with few rows and accumulated gradients, because a compiled backward holds all new gradients beside the
    old. Here: eager is looked at too; where only it fits, the refusal says so, with what it takes."""
    model, x = Norms(), torch.randn(32, 128)
    eager = peak_bytes(model, x, micro_batches=2)
    assert peak_bytes(compiled(Norms()), x, micro_batches=2) > eager

    static = sum(p.nbytes for p in model.parameters())
    budget = static + x.nbytes + eager
    with pytest.raises(BudgetInfeasible) as refused:
        make_plan(
            ModuleStep(model=model, args=(x,), loss_fn=mean_square, micro_batches=2),
            budget_bytes=budget,
            reserve=reserve_for("cpu", budget, {}),
        )
    said = re.search(r"without torch\.compile .* requires about ([\d.]+ KB)", str(refused.value))
    assert said is not None
    assert parse_bytes(said[1]) == pytest.approx(budget, rel=1e-3)  # what was measured is what is said


def test_05_wrapped_blocks_are_said_before_step_1() -> None:
    """Pain 5, pytorch#161889: checkpoint wrappers under compile, in the wrong order, cost ten times eager's
    memory per block. Torch 2.13 has lost that penalty but still obeys any wrapper silently: matrix products
    of the forward run twice, whatever the memory. Here: said before step 1, with the fix."""
    x = hidden()
    counts = [s.count("aten.mm") + s.count("aten.addmm") for s in (split_of(made(how=h), x) for h in HOW)]
    assert counts[1] > counts[0], "torch no longer recomputes what a wrapper tells it to"

    said = r"checkpoints activations by itself \(inside blocks\.0\S*, blocks\.1\S*\)\. .*checkpoint_wrapper"
    model = made(how="wrapped")
    with pytest.raises(PlanWarning, match=said):  # a warning that stops: nothing real has run by then
        trained(model, x, 10**9)
    assert all(p.grad is None for p in model.parameters())


class Tanh(nn.Module):
    def __init__(self, layers: int = 4, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.usefixtures("one_thread")
def test_09_copies_of_weights_are_recomputed() -> None:
    """Pain 9, pytorch#141881: a low-precision copy of every weight is saved. On torch 2.13 under bfloat16
    autocast, at ratio 1 and at 0.5 alike, for every layer but the first. Here: where the budget binds they
    are made again from the weights, which are there anyway."""
    model, x = Tanh(), torch.randn(48, 128)  # activations are smaller than a copy
    for layer in model.layers[1:]:
        layer.weight.requires_grad_(False)  # a frozen base, so that no gradients hide the copies
    for ratio in (1.0, 0.5):
        kept = split_of(model, x, ratio=ratio, context=autocast).saved()
        assert sum(v.shape == (128, 128) and v.dtype is torch.bfloat16 for v in kept) >= 3

    source = ModuleStep(model=model, args=(x,), loss_fn=mean_square, context=autocast)
    free = make_plan(source, budget_bytes=10**9, reserve=reserve_for("cpu", 10**9, {}))
    budget = free.plan.required_bytes - 5 * 128 * 128  # less than the three copies take
    bound = make_plan(source, budget_bytes=budget, reserve=reserve_for("cpu", budget, {}))
    (graph,), (schedule,) = bound.captured.step.graphs, bound.plan.schedule
    sizes = sorted((graph.value_bytes(i) for i in schedule.saved), reverse=True)
    assert bound.plan.required_bytes <= budget
    assert sizes[0] < 128 * 128 * 2, "a copy of a weight is saved"


class Rms(nn.Module):
    """Of 32 blocks in the report, 6."""

    def __init__(self, blocks: int = 6, width: int = 100) -> None:
        super().__init__()
        parts = [(nn.RMSNorm(width), nn.Linear(width, width), nn.Linear(width, width)) for _ in range(blocks)]
        self.parts = nn.Sequential(*(part for block in parts for part in block))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(x)


def test_10_a_budget_that_just_does_not_bind_gives_the_default() -> None:
    """Pain 10, pytorch#149258: ratio 0.99 gives another, slower save set than 1.0. Blocks of (RMSNorm,
    2×Linear 100). On torch 2.13: another still. Here: a budget that is the default's peak to the byte gives
    torch's graphs, node by node."""
    model, x = Rms(), torch.randn(64, 100)
    torchs = split_of(model, x)
    assert split_of(model, x, ratio=0.99).text() != torchs.text(), "torch's ratio 0.99 is its default now"

    source = ModuleStep(model=model, args=(x,), loss_fn=mean_square)
    default = plan_at(model, x, 10**9)
    plan = plan_at(model, x, default.default_allocated_bytes)
    assert plan.is_default
    assert (plan.slowdown, plan.required_bytes) == (1.0, default.default_allocated_bytes)
    with planned_partitioner(plan.schedule, mode="schedule") as partitioner:
        ours = Split(partitioner)
        dry_step(source, ours)
    assert ours.text() == torchs.text()


@pytest.mark.slow
def test_11_a_budget_is_in_bytes_and_the_breakdown_adds_up() -> None:
    """Pain 11, pytorch#161650: what is the ratio a ratio of? On torch 2.13 ratio 0.1 leaves more than a third
    of the default's peak above the parameters, and 0 as much as 1. Here: bytes, kept, and a table that adds
    up."""
    shares = {ratio: torchs_peak(ratio) / torchs_peak(1.0) for ratio in (0.1, 0.0)}
    assert all(abs(share - ratio) > 0.3 for ratio, share in shares.items()), "torch's ratio means bytes now"

    session, _ = decoder_run()
    rows = {row.name: row for row in breakdown_rows(session.plan, session.planned.captured.default)}
    held = [row for row in rows.values() if not row.is_total]
    assert sum(row.planned_bytes for row in held) == session.plan.required_bytes
    assert rows["left"].planned_bytes == session.budget_bytes - session.plan.required_bytes >= 0
    for name in ("parameters", "gradients", "saved activations", "budget"):
        assert re.search(rf"{name} +[\d.]+", session.report), name
    assert "1 MB = 1,000,000 bytes" in session.report
