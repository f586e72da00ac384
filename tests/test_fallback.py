"""The fallback ladder: planned, planned in parts, eager with a warning that names the module, or one clear
error. Every failure here is torch's own, in a model of the kind that people write."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from failing_models import (
    Branches,
    Breaks,
    CallsOp,
    Disabled,
    Generates,
    Locks,
    Looped,
    Masked,
    Middle,
    Nonzero,
    Refuses,
    bad_lowering,
    no_fake,
    no_fake_in_backward,
    reads_gradient,
    wrong_fake,
)
from gate import STEPS, Trained, train, worst
from hard_models import ROWS, WIDTH, Tanh
from torch import nn

import dtr_integrations
from dtr_integrations.capture.closure import FunctionStep
from dtr_integrations.errors import CompileError, PlanWarning

TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _uncached() -> Iterator[None]:
    """A cached graph would not fail to compile again."""
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


def build(make: Callable[[], nn.Module]) -> tuple[nn.Module, Any, Callable[[], torch.Tensor]]:
    torch.manual_seed(0)
    model, x = make(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, lambda: model(x).square().mean()


def eager(make: Callable[[], nn.Module]) -> Trained:
    model, optimizer, loss_of = build(make)
    return train(model, optimizer, loss_of, lambda step: step())


def planned_graphs(make: Callable[[], nn.Module]) -> tuple[int, list[str]]:
    """(graphs in the plan, warnings), of a plan made before step 1 and never run."""
    model, optimizer, loss_of = build(make)

    def step() -> None:
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()

    with (
        warnings.catch_warnings(record=True) as caught,
        dtr_integrations.auto_checkpoint(model, budget="4GB", optimizer=optimizer) as session,
    ):
        warnings.simplefilter("always")
        session.prepare(FunctionStep(fn=step, model=model, optimizers=(optimizer,)))
        graphs = 0 if session.plan is None else len(session.plan.schedule)
    said = [str(w.message) for w in caught if issubclass(w.category, PlanWarning)]
    return graphs, said


@pytest.mark.parametrize("around", [Middle, Looped])
@pytest.mark.parametrize(
    ("inner", "graphs"),
    [
        (Breaks, 4),
        (Branches, 4),
        (Nonzero, 3),
        (Masked, 3),
        (Disabled, 2),
        (Generates, 1),
        (Locks, 2),
        (lambda: CallsOp(reads_gradient), 2),
    ],
)
def test_what_dynamo_breaks_its_graph_for_or_not_is_planned(
    around: Callable[..., nn.Module], inner: Callable[[], nn.Module], graphs: int
) -> None:
    found, said = planned_graphs(lambda: around(inner()))
    assert found == graphs
    assert said == []


@pytest.mark.parametrize(
    ("around", "name"), [(Middle, r"middle \(CallsOp\)"), (Looped, r"blocks\.1 \(CallsOp\)")]
)
@pytest.mark.parametrize("op", [no_fake, no_fake_in_backward, bad_lowering])
def test_a_module_that_cannot_be_compiled_is_named_and_planned_around(
    around: Callable[..., nn.Module], name: str, op: Any
) -> None:
    graphs, said = planned_graphs(lambda: around(CallsOp(op)))
    assert graphs == 2
    (text,) = said
    assert re.search(rf"torch.compile cannot take {name}: .*It runs eagerly, and the rest is planned", text)


def test_only_the_target_that_fails_falls_back() -> None:
    model, optimizer, loss_of = build(lambda: Middle(CallsOp(no_fake)))
    with (
        dtr_integrations.auto_checkpoint(
            model, budget="4GB", optimizer=optimizer, targets=["first", "middle", "last"]
        ) as session,
        pytest.warns(PlanWarning, match=r"cannot take middle \(CallsOp\)"),
    ):
        session.step(lambda: loss_of().backward())
    assert len(session.plan.schedule) == 2


def test_where_nothing_is_left_to_plan_there_is_one_warning_with_the_reason() -> None:
    graphs, said = planned_graphs(lambda: CallsOp(no_fake))
    assert graphs == 0
    (text,) = said
    assert "nothing was planned for CallsOp" in text
    assert "no fake impl" in text


def test_fallback_error_is_one_clear_error_before_step_1() -> None:
    model, optimizer, loss_of = build(lambda: Middle(CallsOp(no_fake)))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    with (
        dtr_integrations.auto_checkpoint(
            model, budget="4GB", optimizer=optimizer, fallback="error"
        ) as session,
        pytest.raises(CompileError, match=r"cannot take middle \(CallsOp\).*torch.compiler.disable"),
    ):
        session.step(lambda: loss_of().backward())
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class Counting(nn.Module):
    """Statistics, random numbers and counters before the part that fails: none may be taken twice."""

    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.middle = nn.BatchNorm1d(WIDTH), Tanh(), CallsOp(wrong_fake)
        self.last = Tanh()
        self.calls = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        Counting.total += 1
        x = self.first(self.norm(x + torch.randn(1)))
        torch._dynamo.graph_break()
        return self.last(self.middle(x))


def test_a_failure_in_the_first_real_call_loses_nothing_and_is_planned_around() -> None:
    """The fake implementation of an op lies, which only the generated code's own check finds."""
    options = {"fallback_random": True}
    model, optimizer, loss_of = build(Counting)
    Counting.total = 0
    with (
        warnings.catch_warnings(record=True) as caught,
        dtr_integrations.auto_checkpoint(
            model, budget="4GB", optimizer=optimizer, compile_options=options
        ) as session,
    ):
        warnings.simplefilter("always")
        trained = train(model, optimizer, loss_of, session.step)
    said = [str(w.message) for w in caught if issubclass(w.category, PlanWarning)]
    assert any(re.search(r"failed in Counting: AssertionError: .*runs eagerly from now on", s) for s in said)
    assert any(re.search(r"failed in middle \(CallsOp\): ", s) for s in said)
    assert len(said) == 2
    assert session.planned.captured.called == ("first", "last")
    assert (model.calls, Counting.total) == ([STEPS], STEPS)
    error, where = worst(trained, eager(Counting))
    assert error <= TOLERANCE, where


def test_a_failure_in_the_first_real_call_with_fallback_error() -> None:
    model, optimizer, loss_of = build(Counting)
    statistics = model.norm.running_mean.clone()
    random_state = torch.get_rng_state()
    with (
        dtr_integrations.auto_checkpoint(
            model, budget="4GB", optimizer=optimizer, fallback="error"
        ) as session,
        pytest.raises(CompileError, match="failed in Counting: AssertionError"),
    ):
        session.step(lambda: loss_of().backward())
    assert torch.equal(model.norm.running_mean, statistics)
    assert torch.equal(random_state, torch.get_rng_state())


def test_without_a_compiler_the_planned_graphs_run_op_by_op() -> None:
    def make() -> nn.Module:
        return Tanh()

    model, optimizer, loss_of = build(make)
    options = {"cpp.cxx": (None, "no-such-compiler")}
    with (
        warnings.catch_warnings(record=True) as caught,
        dtr_integrations.auto_checkpoint(
            model, budget="4GB", optimizer=optimizer, compile_options=options
        ) as session,
    ):
        warnings.simplefilter("always")
        trained = train(model, optimizer, loss_of, session.step)
    said = [str(w.message) for w in caught if issubclass(w.category, PlanWarning)]
    assert len(said) == 2
    assert re.search("failed in Tanh: .*a graph of it runs op by op", said[0])
    assert re.search("failed in Tanh: .*its backward runs op by op", said[1])
    error, where = worst(trained, eager(make))
    assert error <= TOLERANCE, where


def test_an_error_of_the_models_own_comes_out_as_it_is() -> None:
    model, optimizer, loss_of = build(lambda: Middle(Refuses()))
    with dtr_integrations.auto_checkpoint(model, budget="4GB", optimizer=optimizer) as session:
        session.step(lambda: loss_of().backward())
        optimizer.zero_grad()
        model.middle.allowed = False
        with pytest.raises(ValueError, match="this is not allowed"):
            session.step(lambda: loss_of().backward())
