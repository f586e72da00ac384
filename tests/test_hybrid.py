"""`fallback="dtr"`: modules that torch.compile cannot take, or that depend on data, run under the online
runtime within what the compiled parts leave of one budget."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import lightning
import lightning_models
import pytest
import torch
from failing_models import Branches, Nonzero
from gate import Trained, train, worst
from hard_models import WIDTH, Tanh
from hybrid_models import ROWS, Between, Body, Chooses, Fails, Packs, Routes
from torch import nn

import dtr_integrations
from dtr_integrations.capture.called import reads_of_data
from dtr_integrations.capture.closure import FunctionStep
from dtr_integrations.core.ledger import Ledger
from dtr_integrations.core.profile import ONLINE, RegionProfile, StepProfile
from dtr_integrations.errors import BudgetInfeasible, CompileError, OutOfBudget
from dtr_integrations.own_loop import TrainerSession

TOLERANCE = 1e-5


def build(make: Callable[[], nn.Module]) -> tuple[nn.Module, Any, Callable[[], torch.Tensor]]:
    torch.manual_seed(0)
    model, x = make(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, lambda: model(x).square().mean()


def eager(make: Callable[[], nn.Module]) -> Trained:
    model, optimizer, loss_of = build(make)
    return train(model, optimizer, loss_of, lambda step: step())


def source_of(model: nn.Module, optimizer: Any, loss_of: Callable[[], torch.Tensor]) -> FunctionStep:
    def step() -> None:
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()

    return FunctionStep(fn=step, model=model, optimizers=(optimizer,))


def budget_at(make: Callable[[], nn.Module], share: float) -> str:
    """Static memory and `share` of what the step adds to it when nothing has to give way."""
    model, optimizer, loss_of = build(make)
    with dtr_integrations.auto_checkpoint(
        model, budget="4GB", optimizer=optimizer, fallback="dtr", progress=False
    ) as session:
        session.prepare(source_of(model, optimizer, loss_of))
        plan = session.plan
    return f"{int(plan.static_bytes + share * (plan.default_allocated_bytes - plan.static_bytes))} B"


@pytest.mark.parametrize(
    ("middle", "why"),
    [
        pytest.param(Fails, "no fake impl", marks=pytest.mark.slow),
        (Routes, r"shape .* \(nonzero"),
        pytest.param(Chooses, "reads a number", marks=pytest.mark.slow),
    ],
)
def test_compiled_online_compiled(middle: type[Body], why: str, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> nn.Module:
        return Between(middle())

    model, optimizer, loss_of = build(make)
    budget = budget_at(make, 0.65)
    with (
        caplog.at_level("INFO", "dtr_integrations"),
        dtr_integrations.auto_checkpoint(
            model, budget=budget, optimizer=optimizer, fallback="dtr", log_every_n_steps=1
        ) as session,
    ):
        trained = train(model, optimizer, loss_of, session.step)
        plan, text = session.plan, session.report
    assert len(plan.schedule) == 2
    (found,) = [report for report in session.online if report.module == "middle"]
    assert found.evictions > 0
    assert found.rematerialisations > 0
    assert found.added_seconds > 0
    assert re.search(why, found.why)
    assert sum(report.evictions for report in session.online) == session._online.stats.evictions
    assert session.reports
    assert all(report.peak_allocated_bytes <= plan.budget_bytes for report in session.reports)
    assert plan.required_bytes <= plan.budget_bytes < plan.default_allocated_bytes
    assert sum(plan.breakdown.values()) == plan.predicted_allocated_bytes
    error, where = worst(trained, eager(make))
    assert error <= TOLERANCE, where
    said = [record.getMessage() for record in caplog.records]
    assert any(re.search(rf"middle \({middle.__name__}\) runs under the online runtime", s) for s in said)
    assert any(
        re.search(r"online middle, over the run: \d+ evictions, \d+ remat.*s added; because", s) for s in said
    )
    assert re.search(r"Modules under the online runtime(.|\n)*middle +\d+ +\d+", text)


def test_a_budget_that_does_not_bind_evicts_nothing() -> None:
    model, optimizer, loss_of = build(lambda: Between(Fails(2), 1))
    with dtr_integrations.auto_checkpoint(
        model, budget="4GB", optimizer=optimizer, fallback="dtr", progress=False
    ) as session:
        trained = train(model, optimizer, loss_of, session.step)
        assert session.plan.is_default
    assert session._online.stats.evictions == session._online.stats.rematerialisations == 0
    error, where = worst(trained, eager(lambda: Between(Fails(2), 1)))
    assert error <= TOLERANCE, where


def unplannable() -> nn.Module:
    return nn.Sequential(Tanh(12), Packs())


@pytest.mark.parametrize("make", [Routes, Fails, unplannable])
def test_where_nothing_compiles_the_runtime_takes_the_whole_step(make: Callable[[], nn.Module]) -> None:
    model, optimizer, loss_of = build(make)
    free = dtr_integrations.online.DTR(model, budget="1TB")
    with free:
        loss_of().backward()
    static = sum(p.nbytes for p in model.parameters())
    budget = int(static + 0.6 * (free.stats.peak_bytes - static)) + 2 * static  # Adam's state
    model, optimizer, loss_of = build(make)
    with dtr_integrations.auto_checkpoint(
        model, budget=f"{budget} B", optimizer=optimizer, fallback="dtr", log_every_n_steps=1
    ) as session:
        trained = train(model, optimizer, loss_of, session.step)
    (found,) = session.online
    assert found.module == ""
    assert found.evictions > 0
    assert found.rematerialisations > 0
    assert session._online.stats.peak_bytes <= budget
    assert all(report.peak_allocated_bytes <= budget for report in session.reports)
    assert worst(trained, eager(make)) == (0.0, "")


def test_too_small_a_budget_is_an_error_that_leaves_the_model_as_it_was() -> None:
    model, optimizer, loss_of = build(Fails)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with (
        dtr_integrations.auto_checkpoint(
            model, budget="2.2MB", optimizer=optimizer, fallback="dtr", progress=False
        ) as session,
        pytest.raises((BudgetInfeasible, OutOfBudget)),
    ):
        session.step(lambda: loss_of().backward())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    loss_of().backward()


class AnyLength(nn.Module):
    """Another shape at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.rows = Tanh(1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += 8
        return self.body(x[: self.rows])


def test_what_is_compiled_without_end_goes_online(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, loss_of = build(AnyLength)
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        dtr_integrations.auto_checkpoint(
            model, budget="4GB", optimizer=optimizer, fallback="dtr", progress=False
        ) as session,
    ):
        trained = train(model, optimizer, loss_of, session.step, steps=4)
        assert session.plan.schedule == ()
    (found,) = session.online
    assert "compiled 2 times for different shapes" in found.why
    model, optimizer, loss_of = build(AnyLength)
    error, where = worst(trained, train(model, optimizer, loss_of, lambda step: step(), steps=4))
    assert error <= TOLERANCE, where


def test_which_modules_read_data() -> None:
    def found(make: Callable[[], nn.Module]) -> dict[str, bool]:
        return {name: why.shapes for name, why in reads_of_data(source_of(*build(make))).items()}

    assert found(lambda: Between(Nonzero())) == {"middle": True}
    assert found(lambda: Between(Branches())) == {"middle": False}
    assert found(lambda: Between(Tanh())) == {}


def test_fallback_error_and_eager_do_as_they_say() -> None:
    model, optimizer, loss_of = build(lambda: Between(Fails(1), 1))
    with (
        dtr_integrations.auto_checkpoint(
            model, budget="4GB", optimizer=optimizer, fallback="error"
        ) as session,
        pytest.raises(CompileError, match=r"cannot take middle \(Fails\)"),
    ):
        session.step(lambda: loss_of().backward())
    assert session.online == ()


def test_in_a_loop_that_somebody_else_runs() -> None:
    def make() -> nn.Module:
        return Between(Fails(4), 1)

    model, optimizer, loss_of = build(make)
    session = TrainerSession(
        dtr_integrations.DTRConfig(budget=budget_at(make, 0.9), fallback="dtr", log_every_n_steps=1),
        model,
        optimizers=[optimizer],
    )

    def run(step: Callable[[], Any]) -> Any:
        session.begin_step()
        out = step()
        session.end_step()
        return out

    trained = train(model, optimizer, loss_of, run)
    session.close()
    assert session.online[0].evictions > 0
    assert session.online[0].rematerialisations > 0
    assert all(report.within_budget for report in session.reports)
    error, where = worst(trained, eager(make))
    assert error <= TOLERANCE, where


def test_a_call_outside_of_any_step_is_a_scope_of_its_own() -> None:
    def make() -> nn.Module:
        return Between(Fails(6), 1)

    model, optimizer, loss_of = build(make)
    with dtr_integrations.auto_checkpoint(
        model, budget=budget_at(make, 0.75), optimizer=optimizer, fallback="dtr", progress=False
    ) as session:
        trained = train(model, optimizer, loss_of, lambda step: step())
    error, where = worst(trained, eager(make))
    assert error <= TOLERANCE, where
    assert session.online[0].module == "middle"


def test_a_profile_of_which_a_share_is_held() -> None:
    ledger = Ledger()
    ledger.birth(1, 100, "parameters")
    ledger.restart()
    ledger.birth(2, 40)
    for key in range(3, 13):
        ledger.birth(key, 20)
    ledger.label_since(0, ONLINE, but=frozenset({2}))
    ledger.birth(13, 10)
    for key in range(3, 13):
        ledger.death(key)
    ledger.birth(14, 30)
    region = RegionProfile(
        kind="backward", graph=0, call=0, entry_bytes=340, exit_bytes=150, peak_bytes=350, saved_bytes=0,
        start=12, end=23,
    )  # fmt: skip
    profile = StepProfile(
        peak_bytes=ledger.peak_bytes,
        static_bytes=100,
        breakdown=ledger.held_at_peak(),
        regions=(region,),
        timeline=tuple(ledger.curve),
        lifetimes=tuple(ledger.lifetimes),
    )
    assert profile.timeline[:4] == (100, 140, 160, 180)
    assert profile.peak_bytes == 350
    half = profile.holding(0.5)
    assert half.timeline[:7] == (100, 140, 160, 180, 200, 200, 200)  # three values are held in any case
    assert (half.peak_bytes, half.whole_peak_bytes) == (250, 350)
    assert half.breakdown == {"parameters": 100, "transient": 50, ONLINE: 100}
    (found,) = half.regions
    assert (found.entry_bytes, found.exit_bytes, found.peak_bytes) == (240, 150, 250)
    none = profile.holding(0.0)
    assert none.breakdown == {"parameters": 100, "transient": 50, ONLINE: 60}
    assert profile.holding(1.0) is profile


@pytest.mark.slow
def test_in_lightning() -> None:
    losses: list[float] = []

    class Hybrid(lightning_models.models(lightning).Classifier):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Tanh(4, width=lightning_models.WIDTH)
            self.middle = Fails(10, width=lightning_models.WIDTH)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.head(self.net(self.middle(x))), y)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(outputs["loss"].item())

    def fit(budget: str | None) -> Any:
        torch.manual_seed(0)
        losses.clear()
        made = Hybrid()
        if budget is None:
            lightning_models.fit(lightning, made)
            return None, list(losses)
        callback = dtr_integrations.AutoCheckpoint(
            budget=budget, fallback="dtr", log_every_n_steps=1, progress=False
        )
        lightning_models.fit(lightning, made, callback)
        return callback, list(losses)

    free, _ = fit("4GB")
    plan = free.plan
    budget = plan.static_bytes + 7 * (plan.default_allocated_bytes - plan.static_bytes) // 10
    bound, trained = fit(f"{budget} B")
    assert bound.online[0].module == "middle"
    assert sum(report.evictions for report in bound.online) > 0
    assert sum(report.rematerialisations for report in bound.online) > 0
    assert bound.reports
    assert all(report.within_budget for report in bound.reports)
    assert trained == pytest.approx(fit(None)[1], rel=TOLERANCE)
