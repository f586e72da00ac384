"""`verify` passes what is the same training and catches each planted fault; nothing real is changed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hard_models import CountsThenReads
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtr_integrations
from dtr_integrations.apply import dispatch
from dtr_integrations.capture.called import called_modules, calls_inside
from dtr_integrations.capture.source import ModuleStep
from dtr_integrations.capture.step import capture
from dtr_integrations.core.plan import Plan
from dtr_integrations.core.schedule import schedule_for
from dtr_integrations.errors import CaptureError, ConfigError, VerificationFailed
from dtr_integrations.gate import VerifyReport, VerifyRow

AMPLE = "1GB"


class Everything(nn.Module):
    """Dropout, BatchNorm, tied weights, a frozen layer, a buffer of one's own, a counter that changes nothing
    while compiled."""

    def __init__(self, width: int = 16, words: int = 20) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.2)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.eager_calls = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.eager_calls += 1
        self.seen += ids.numel()
        x = self.words(ids)
        for layer in self.layers:
            x = self.drop(F.gelu(layer(x)))
        return self.head(self.norm(x.flatten(0, 1)))


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, out.new_zeros(len(out), dtype=torch.long))


def everything() -> tuple[nn.Module, torch.Tensor, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model, ids = Everything(), torch.randint(0, 20, (16, 16))
    return model, ids, torch.optim.AdamW(model.parameters(), lr=1e-2)


@cache
def binding_plan() -> Plan:
    model, ids, optimizer = everything()
    arguments: dict[str, Any] = {"optimizer": optimizer, "loss_fn": loss_of, "progress": False}
    plan = dtr_integrations.plan(model, ids, budget=AMPLE, **arguments)
    budget_bytes = plan.static_bytes + (plan.default_allocated_bytes - plan.static_bytes) * 7 // 10
    plan = dtr_integrations.plan(model, ids, budget=f"{budget_bytes}B", **arguments)
    assert not plan.is_default
    return plan


class Normed(nn.Module):
    """Linear, BatchNorm, Linear: no random numbers. The bias in front of the BatchNorm has a gradient that is
    nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def normed(kind: type[nn.Module] = Normed) -> tuple[nn.Module, torch.Tensor, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind()
    return model, torch.randn(32, 8), torch.optim.AdamW(model.parameters(), lr=1e-2)


def verified(made: tuple[nn.Module, torch.Tensor, torch.optim.Optimizer], **arguments: Any) -> VerifyReport:
    model, x, optimizer = made
    return dtr_integrations.verify(
        model, x, optimizer=optimizer, **{"budget": AMPLE, "progress": False, **arguments}
    )


def wrong(report: VerifyReport, against: str = "default") -> set[tuple[str, str]]:
    return {(row.kind, row.name) for row in report.rows if not row.ok and row.against == against}


def state_of(model: nn.Module, optimizer: Any) -> Any:
    return copy.deepcopy(
        {
            "values": model.state_dict(),
            "gradients": [p.grad for p in model.parameters()],
            "optimizer": optimizer.state_dict(),
            "flags": [module.training for module in model.modules()],
            "python": [{k: v for k, v in vars(m).items() if isinstance(v, int)} for m in model.modules()],
            "compiled": [m._compiled_call_impl for m in model.modules()],
            "random": (random.getstate(), np.random.get_state(), torch.get_rng_state()),
        }
    )


def assert_same(one: Any, other: Any) -> None:
    (values, shape), (others, other_shape) = (torch.utils._pytree.tree_flatten(s) for s in (one, other))
    assert shape == other_shape
    for a, b in zip(values, others, strict=True):
        assert np.array_equal(a, b) if isinstance(a, (torch.Tensor, np.ndarray)) else a == b


# -- honest models -------------------------------------------------------------------------------------------


def test_a_binding_plan_is_the_same_training_and_nothing_real_changes() -> None:
    budget = f"{binding_plan().budget_bytes}B"
    model, ids, optimizer = everything()
    loss_of(model(ids)).backward()  # so that there are gradients, and optimizer state
    optimizer.step()
    model.norm.eval()
    before = state_of(model, optimizer)
    report = verified((model, ids, optimizer), budget=budget, loss_fn=loss_of, steps=2)
    assert report.ok, str(report)
    assert_same(state_of(model, optimizer), before)
    compared = {(row.kind, row.name, row.against) for row in report.rows}
    for against in ("default", "eager"):
        assert {
            ("loss", "", against),
            ("gradient", "words.weight", against),
            ("buffer", "norm.running_mean", against),
            ("buffer", "seen", against),
            ("parameter", "norm.bias", against),
            ("optimizer state", "layers.0.bias['exp_avg_sq']", against),
            ("random state", "torch", against),
            ("random state", "numpy", against),
        } <= compared
    assert ("Python state", "norm.training", "default") in compared
    assert not any(name.startswith("layers.1.") for kind, name, _ in compared if kind == "gradient")
    assert any("draws random numbers" in note for note in report.notes)


def test_a_wrong_default_is_told_from_a_wrong_plan() -> None:
    """Torch's own partition reads a buffer again that the forward has overwritten; the plan does not."""
    torch.manual_seed(0)
    model = CountsThenReads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = verified((model, torch.randn(8, 32), optimizer))
    assert report.ok, report
    assert any(row.note.startswith("the default compile is wrong") for row in report.rows), report


def test_rounding_is_told_from_faults() -> None:
    """Against eager: Adam makes whole steps of a gradient that is nothing but rounding."""
    report = verified(normed())
    assert report.ok, str(report)
    rows = {(row.kind, row.name): row for row in report.rows if row.against == "eager"}
    assert rows["gradient", "first.bias"].allowed > 1e-2  # rounding is all that it is
    assert rows["gradient", "last.weight"].allowed < 1e-3
    assert not report.notes
    assert "every value is in order" in str(report)


# -- planted faults ------------------------------------------------------------------------------------------


def test_a_replay_with_seeds_drawn_again_is_caught(tmp_path: Path) -> None:
    """What torch's own budget API does silently: another dropout mask in the backward."""
    plan = binding_plan()
    model, ids, optimizer = everything()
    (graph,) = capture(ModuleStep(model=model, args=(ids,), loss_fn=loss_of, optimizer=optimizer)).step.graphs
    seeds = {op.index for op in graph.ops if "inductor_seeds" in op.target}
    drawn = set(seeds)
    for op in graph.ops:
        if drawn.intersection(op.inputs):
            drawn.add(op.index)
    careless = replace(graph, ops=tuple(replace(op, replayable=True) for op in graph.ops))
    saved = [index for index in plan.schedule[0].saved if index not in drawn]
    careless_plan = replace(plan, schedule=(schedule_for(careless, saved),))
    assert seeds & {step.value for step in careless_plan.schedule[0].recompute}
    (tmp_path / "plan.json").write_text(careless_plan.to_json())
    report = verified((model, ids, optimizer), plan=str(tmp_path / "plan.json"), loss_fn=loss_of, steps=1)
    assert not report.ok
    assert ("gradient", "layers.0.weight") in wrong(report)
    assert ("loss", "") not in wrong(report)  # the forward is right: nobody would notice
    assert "NOT the same training" in str(report)


def replayed(call: Callable[..., Any], *_: Any) -> Callable[..., Any]:
    """In the place of a planned module: its Python code run again in the backward, as eager checkpointing
    does."""
    return lambda *args: checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False)


def hooks_twice(call: Callable[..., Any], *_: Any) -> Callable[..., Any]:
    """In the place of a planned module: every gradient hook registered once more."""
    for parameter in call.__self__.parameters():  # type: ignore[attr-defined]
        for hook in list((parameter._backward_hooks or {}).values()):
            parameter.register_hook(hook)
    return call


class Counting(Normed):
    """Counts its calls, and multiplies by nothing that depends on them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_batchnorm_statistics_updated_twice_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "compile_call", replayed)
    report = verified(normed(), steps=1)
    assert {
        ("buffer", "norm.running_mean"),
        ("buffer", "norm.running_var"),
        ("buffer", "norm.num_batches_tracked"),
    } == wrong(report)
    assert "2, not 1" in str(report)


def test_python_code_that_is_run_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "compile_call", replayed)
    report = verified(normed(Counting), steps=1)
    assert ("Python state", "calls") in wrong(report)
    assert not wrong(report, against="itself")  # the counter changes nothing


class Notes:
    """A plain object that a model writes to."""

    def __init__(self) -> None:
        self.calls = 0


class Everywhere(Normed):
    """Counts its calls in every place that Python has for it."""

    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.notes, self.tensor, self.array = Notes(), torch.zeros(1), np.zeros(2)
        self.box: dict[str, Any] = {"tensor": torch.zeros(1), "calls": [0]}
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)

    @torch.compiler.disable
    def count(self) -> None:
        global calls_of_everywhere
        calls_of_everywhere += 1
        Everywhere.total += 1
        LISTED.append(torch.ones(1))
        NAMED["calls"] += 1
        self.notes.calls += 1
        self.tensor = self.tensor + 1
        self.array += 1
        self.box["tensor"].add_(1)
        self.box["calls"][0] += 1
        self.python.random()
        self.numpy.random()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count()
        return super().forward(x)


calls_of_everywhere = 0
LISTED: list[torch.Tensor] = []
NAMED = {"calls": 0}


def _counted(model: Everywhere) -> list[Any]:
    """All that `Everywhere` counts."""
    return [
        *(calls_of_everywhere, Everywhere.total, len(LISTED), NAMED["calls"], model.notes.calls),
        *(model.tensor.item(), model.array.tolist(), model.box["tensor"].item(), model.box["calls"][0]),
        *(model.python.getstate(), model.numpy.bit_generator.state["state"]),
    ]


def test_planning_changes_nothing_that_the_model_counts() -> None:
    model, x, optimizer = normed(Everywhere)
    model(x)  # not everything is zero
    before = _counted(model)
    dtr_integrations.plan(model, x, budget=AMPLE, optimizer=optimizer, progress=False)
    assert _counted(model) == before
    source = ModuleStep(model=model, args=(x,), optimizer=optimizer)
    assert called_modules(source) == ("",)
    assert calls_inside(source)[""]
    assert _counted(model) == before
    assert all(type(item) is torch.Tensor for item in LISTED)


def test_python_code_that_is_run_again_is_caught_wherever_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    example = normed(Everywhere)
    before = _counted(example[0])
    monkeypatch.setattr(dispatch, "compile_call", replayed)
    report = verified(example, steps=1)
    assert _counted(example[0]) == before
    found = wrong(report)
    module = __name__
    assert found >= {
        *(("Python state", name) for name in ("notes.calls", "Everywhere.total", f"{module}.NAMED")),
        *(
            ("attribute", name)
            for name in ("tensor", "array", "box['tensor']", f"{module}.LISTED[{len(LISTED) + 1}]")
        ),
        *(("random state", f"generator {name}") for name in ("python", "numpy")),
        ("Python state", f"{module}.calls_of_everywhere"),
    }, found


def test_a_global_counter_that_changes_the_forward_is_caught() -> None:
    report = verified(normed(WarmingEverywhere), steps=2)
    assert ("Python state", "WarmingEverywhere.total") in wrong(report, against="itself")
    assert WarmingEverywhere.total == 0


class WarmingEverywhere(Normed):
    """A counter of its class changes the forward from call to call."""

    total = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        WarmingEverywhere.total += 1
        return super().forward(x) * min(WarmingEverywhere.total, 3)


class Drawing(Normed):
    """Has a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.rand(x.shape[0], 1, generator=self.generator)


def test_a_model_with_a_generator_of_its_own_is_planned_and_the_generator_stays_where_it_was() -> None:
    model, x, optimizer = normed(Drawing)
    state = model.generator.get_state()
    plan = dtr_integrations.plan(model, x, budget=AMPLE, optimizer=optimizer, progress=False)
    assert plan.schedule
    assert torch.equal(model.generator.get_state(), state)


class Warming(Normed):
    """A Python counter that changes the forward from call to call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * min(self.calls, 3)


def test_a_counter_that_changes_the_forward_is_caught() -> None:
    report = verified(normed(Warming), steps=2)
    assert wrong(report, against="itself") == {("Python state", "calls")}
    assert "depends on it" in str(report)


def test_a_gradient_hook_run_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def halve(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return gradient / 2

    def build() -> tuple[nn.Module, torch.Tensor, torch.optim.Optimizer]:
        model, x, optimizer = normed()
        model.first.weight.register_hook(halve)
        model.last.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        return model, x, optimizer

    report = verified(build(), steps=1)
    assert report.ok, str(report)
    assert ("hook calls", "first.weight") in {(row.kind, row.name) for row in report.rows}
    monkeypatch.setattr(dispatch, "compile_call", hooks_twice)
    report = verified(build(), steps=1)
    assert {("gradient", "first.weight"), ("hook calls", "first.weight")} <= wrong(report)
    assert ("gradient", "last.weight") not in wrong(report)
    assert "2 calls, not 1" in str(report)
    assert not calls  # the real list is left alone


# -- where it is asked for -----------------------------------------------------------------------------------


def test_a_session_verifies_before_step_one_and_then_trains_as_without() -> None:
    losses = []
    for verify in (False, True):
        model, x, optimizer = normed()

        def step(model: nn.Module = model, x: Any = x, optimizer: Any = optimizer) -> float:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        said: list[str] = []
        with dtr_integrations.auto_checkpoint(
            model, optimizer=optimizer, budget=AMPLE, verify=verify
        ) as session:
            session._progress = said.append
            losses.append([session.step(step) for _ in range(3)])
            assert session.plan is not None
        assert sum("verified:" in line for line in said) == verify
    assert losses[0] == losses[1]


def test_a_session_that_fails_the_proof_trains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, optimizer = normed()
    before = state_of(model, optimizer)
    with dtr_integrations.auto_checkpoint(
        model, optimizer=optimizer, budget=AMPLE, verify=True, progress=False
    ) as session:
        with monkeypatch.context() as planted:
            planted.setattr(dispatch, "compile_call", replayed)
            with pytest.raises(VerificationFailed, match=r"norm\.running_mean") as failed:
                model(x)
        assert not failed.value.report.ok
        assert session.plan is None
        assert session.needs_plan
        session._in_place.remove()
        assert_same(state_of(model, optimizer), before)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "3"])
def test_a_wrong_number_of_steps_says_so(steps: Any) -> None:
    with pytest.raises(ConfigError, match="steps="):
        verified(normed(), steps=steps)


def test_a_model_without_data_cannot_be_verified() -> None:
    with torch.device("meta"):
        made = normed()
    with pytest.raises(CaptureError, match="meta device"):
        verified(made)


def test_rows_and_reports() -> None:
    row = VerifyRow(kind="gradient", name="w", step=2, against="default", error=float("nan"), allowed=1e-5)
    assert not row.ok
    assert row.badness == float("inf")
    fine = replace(row, error=1e-6)
    assert fine.ok
    assert fine.badness == pytest.approx(0.1)
    assert replace(row, error=2e-5).badness == pytest.approx(2)
    report = VerifyReport(rows=(fine,), steps=2, dtype="float32", tolerance=1e-5)
    assert report.ok
    assert not replace(report, rows=(row, fine)).ok
