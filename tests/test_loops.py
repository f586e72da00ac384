"""Loops that make the loss themselves: what is seen of it in the first step, and what plans make of it."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import dtr_integrations
from dtr_integrations.capture.fake import FakeWorld
from dtr_integrations.capture.seen import LOSS_OUTSIDE, LoopWatch, SeenForward, Until, give_way
from dtr_integrations.capture.source import AssumedLoss
from dtr_integrations.capture.world import RealWorld
from dtr_integrations.errors import PlanWarning

BATCH, WIDTH, CLASSES = 256, 64, 256
LOGITS_BYTES = BATCH * CLASSES * 4


class Classifier(nn.Module):
    """Four blocks of 64 and a head; no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return self.head(x)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, WIDTH), torch.randint(0, CLASSES, (BATCH,))


# -- what is seen --------------------------------------------------------------------------------------------


def watched(model: nn.Module, loop: Callable[[Callable[..., Any]], Any]) -> tuple[LoopWatch, Any]:
    """`loop(call)` with its calls of the model watched, up to the next call."""
    watch = LoopWatch(model, lambda: None)

    def call(*args: Any, **kwargs: Any) -> Any:
        watch.called(args, kwargs)
        out = model(*args, **kwargs)
        watch.returned(out)
        return out

    result = loop(call)
    watch.stepped()
    return watch, result


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def cross_entropy(call: Any) -> None:
    x, y = batch()
    nn.functional.cross_entropy(call(x), y).backward()


def twice_in_place_and_weighted(call: Any) -> None:
    x, y = batch()
    first = call(x)
    second = call(x * 2)
    logits = torch.cat([first, second])
    logits = logits[:, :10].clone()
    logits[:, 0] = 0.0
    logits.mul_(2)
    criterion = nn.CrossEntropyLoss(weight=torch.arange(10.0) + 1)
    (criterion(logits, (y % 10).repeat(2)) / 3).backward()


@pytest.mark.parametrize("loop", [cross_entropy, twice_in_place_and_weighted])
def test_what_was_seen_is_done_again_over_twins(loop: Callable[..., None]) -> None:
    torch.manual_seed(0)
    model = Classifier()
    watch, _ = watched(model, loop)
    expected = gradients(model)
    seen = watch.seen()
    assert seen is not None, watch.fault
    assert not torch.overrides._get_current_function_mode_stack()

    world = RealWorld()
    copy = world.copy(model)
    copy.zero_grad()
    twin = seen.twin(world, copy)
    twin.forward()
    twin.backward()
    for got, wanted in zip(gradients(copy), expected, strict=True):
        assert torch.equal(got, wanted)


def test_the_batch_is_kept_and_nothing_else_until_it_is_forgotten() -> None:
    model = Classifier()
    watch, _ = watched(model, cross_entropy)
    seen = watch.seen()
    assert seen is not None
    assert [tuple(t.shape) for t in seen.outside] == [(BATCH, WIDTH), (BATCH,)]
    assert [tuple(t.shape) for t in seen.besides_the_model()] == [(BATCH,)]
    forgotten = seen.forget_batch()
    assert not any(isinstance(t, torch.Tensor) for t in forgotten.outside)
    world = FakeWorld()
    twin = forgotten.twin(world, world.copy(model))
    with world.active():
        twin.forward()
        twin.backward()
    assert [tuple(t.shape) for t in twin.outside] == [(BATCH, WIDTH), (BATCH,)]


def held(seen: SeenForward | None, slot: int) -> Until | None:
    assert seen is not None
    return seen.until.get(slot)


def test_how_long_the_loop_holds_the_output() -> None:
    model = Classifier()
    x, y = batch()
    kept: dict[str, Any] = {}

    def dropped(call: Any) -> None:
        nn.functional.cross_entropy(call(x), y).backward()

    def local(call: Any) -> None:
        logits = call(x)
        nn.functional.cross_entropy(logits, y).backward()

    def variable(call: Any) -> None:
        kept["logits"] = call(x)
        nn.functional.cross_entropy(kept["logits"], y).backward()

    def deleted(call: Any) -> None:
        logits = call(x)
        loss = logits.log_softmax(-1).mean()
        del logits
        loss.backward()

    expected = {dropped: None, local: Until.STEP, variable: Until.REPLACED, deleted: None}
    for loop, until in expected.items():
        watch, _ = watched(model, loop)
        assert held(watch.seen(), 0) is until, loop


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def of_its_own(call: Any) -> None:
    _Square.apply(call(batch()[0])).mean().backward()


def of_another_model(call: Any) -> None:
    x, _ = batch()
    other = nn.Linear(WIDTH, CLASSES)(x)
    (call(x) * other).mean().backward()


def without_tensor_backward(call: Any) -> None:
    torch.autograd.backward(call(batch()[0]).mean())


@pytest.mark.parametrize(
    ("loop", "fault"),
    [
        (of_its_own, "_SquareBackward, an autograd.Function"),
        (of_another_model, r"a tensor of \[256, 256\] that comes neither from the model's output"),
        (without_tensor_backward, "no backward was seen"),
    ],
)
def test_what_cannot_be_done_again_is_said(loop: Callable[..., None], fault: str) -> None:
    watch, _ = watched(Classifier(), loop)
    assert watch.seen() is None
    assert re.search(fault, watch.fault or "")


def test_an_auxiliary_loss_that_the_model_keeps_is_found() -> None:
    class WithAuxiliary(Classifier):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            self.auxiliary = out.square().mean()
            return out

    torch.manual_seed(0)
    model = WithAuxiliary()

    def loop(call: Any) -> None:
        x, y = batch()
        (nn.functional.cross_entropy(call(x), y) + model.auxiliary).backward()

    watch, _ = watched(model, loop)
    expected = gradients(model)
    seen = watch.seen()
    assert seen is not None, watch.fault
    model.auxiliary = None
    world = RealWorld()
    twin = seen.twin(world, copy := world.copy(model))
    copy.zero_grad()
    twin.forward()
    twin.backward()
    for got, wanted in zip(gradients(copy), expected, strict=True):
        assert torch.equal(got, wanted)


def test_an_assumed_loss_is_a_cross_entropy_over_the_output() -> None:
    assumed_loss = AssumedLoss()
    logits = torch.randn(3, 5, 7, requires_grad=True)
    loss = logits.mean()
    assert assumed_loss({"loss": loss, "logits": logits}) is loss
    assert assumed_loss(loss) is loss
    assert not assumed_loss.used
    expected = nn.functional.cross_entropy(logits.reshape(15, 7), torch.zeros(15, dtype=torch.long))
    assert torch.equal(assumed_loss({"logits": logits}), expected)
    assert assumed_loss.used


# -- what the plan makes of it -------------------------------------------------------------------------------

accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402

from dtr_integrations.accelerate import install  # noqa: E402

_STATES = (AcceleratorState, PartialState, GradientState)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Accelerate's state is the process's."""
    yield
    for state in _STATES:
        state._shared_state.clear()


def train(budget: str, make_loss: Callable[..., torch.Tensor], steps: int = 4) -> tuple[Any, list[float]]:
    """A loop of Accelerate's users, with variables as in a script."""
    for state in _STATES:
        state._shared_state.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = accelerate.Accelerator(cpu=True)
    installed = install(engine, budget=budget, progress=False, log_every_n_steps=1)
    torch.manual_seed(0)
    raw = Classifier()
    model, optimizer = engine.prepare(raw, torch.optim.AdamW(raw.parameters(), lr=1e-2))
    losses = []
    for _ in range(steps):
        x, y = batch()
        target = torch.randn(BATCH, CLASSES)
        optimizer.zero_grad()
        logits = model(x)
        loss = make_loss(model, logits, x, y, target)
        engine.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    installed.close()
    return installed, losses


def with_accuracy(model: Any, logits: Any, x: Any, y: Any, target: Any) -> torch.Tensor:
    (logits.argmax(-1) == y).float().mean().item()
    return nn.functional.cross_entropy(logits, y)


def dense(model: Any, logits: Any, x: Any, y: Any, target: Any) -> torch.Tensor:
    return (logits - target).square().mean()


def of_two_calls(model: Any, logits: Any, x: Any, y: Any, target: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(torch.cat([logits, model(x * 2)]), torch.cat([y, y]))


@pytest.mark.parametrize("make_loss", [with_accuracy, dense, of_two_calls])
def test_a_loss_outside_the_model_is_in_the_prediction(make_loss: Any) -> None:
    installed, _ = train("1GB", make_loss)
    assert [report.step for report in installed.reports] == [2, 3, 4]
    for report in installed.reports:
        assert report.prediction_error <= 0.005
    assert installed.plan.breakdown[LOSS_OUTSIDE] > 0


def test_a_budget_that_binds_is_kept_with_the_loss_in_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dtr_integrations")
    ample, default = train("1GB", with_accuracy)
    static, peak = ample.plan.static_bytes, ample.plan.default_allocated_bytes
    assert peak - static > 3 * LOGITS_BYTES  # the output, its log-softmax, a gradient of it
    installed, losses = train(f"{int(static + 0.8 * (peak - static))}B", with_accuracy)
    assert not installed.plan.is_default
    assert installed.reports
    for report in installed.reports:
        assert report.within_budget
        assert report.prediction_error <= 0.005
    assert losses == pytest.approx(default, rel=1e-5)
    assert "planning again with them" in caplog.text
    assert "262.14 KB" in caplog.text
    assert LOSS_OUTSIDE in installed.report


def test_a_loop_without_an_adapter_is_seen_too() -> None:
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    with dtr_integrations.auto_checkpoint(
        model, optimizer=optimizer, budget="1GB", progress=False
    ) as session:
        planned = []
        for _ in range(3):
            x, y = batch()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            planned.append(session.plan)
        assert planned[0] is not planned[1]
        assert planned[1] is planned[2]
        assert planned[1].breakdown[LOSS_OUTSIDE] >= LOGITS_BYTES


def test_where_it_cannot_be_done_again_a_cross_entropy_stays_assumed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    installed, _ = train("1GB", lambda model, logits, *_: _Square.apply(logits).mean(), steps=2)
    assert "is counted as large as a cross-entropy" in caplog.text
    assert "_SquareBackward" in caplog.text
    assert installed.plan is not None


def test_a_budget_without_room_for_an_assumed_loss(caplog: pytest.LogCaptureFixture) -> None:
    """The first step is planned without one. The second, which knows the real one, is refused no more."""
    model = nn.Sequential(nn.Linear(WIDTH, CLASSES), nn.Identity())
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = batch()
    without = dtr_integrations.plan(model, x, optimizer=optimizer, budget="1GB", progress=False)
    budget = f"{without.predicted_allocated_bytes}B"
    with dtr_integrations.auto_checkpoint(
        model, optimizer=optimizer, budget=budget, progress=False
    ) as session:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert "no room for a loss outside of Sequential" in caplog.text
        assert session.plan.predicted_allocated_bytes <= without.predicted_allocated_bytes
        with pytest.warns(PlanWarning, match="no plan fits"):
            nn.functional.cross_entropy(model(x), y).backward()
        assert session.plan.required_bytes > without.predicted_allocated_bytes


def test_watches_that_end_in_any_order_leave_nothing_behind() -> None:
    """Two models, called in turns before one backward: each call ends the other's watch, with its reason."""
    backward, stance = torch.Tensor.backward, torch._dynamo.eval_frame._stance
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    watches = [LoopWatch(model, lambda: None) for model in (first, second)]
    x = torch.randn(2, 4)
    for watch, model in zip((*watches, watches[0]), (first, second, first), strict=True):
        give_way(watch)
        watch.called((x,), {})
        assert torch.Tensor.backward is backward
        assert torch._dynamo.eval_frame._stance == stance
        x = model(x)
        watch.returned(x)
    x.sum().backward()
    assert torch.Tensor.backward is backward
    assert torch._dynamo.eval_frame._stance == stance
    assert not torch.overrides._get_current_function_mode_stack()
    for watch in watches:
        assert watch.over
        assert "another model" in (watch.fault or "")
        assert watch.seen() is None


def test_nothing_runs_eagerly_after_the_backward_of_a_watched_loop() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    watch = LoopWatch(model, lambda: None)
    x = torch.randn(2, 4)
    watch.called((x,), {})
    out = model(x)
    watch.returned(out)
    loss = out.square().mean()
    graphs: list[Any] = []
    compiled = torch.compile(other, backend=lambda graph, _: graphs.append(graph) or graph)
    compiled(x)
    assert not graphs  # in between it would be traced with the watch
    loss.backward()
    compiled(x)
    assert len(graphs) == 1
    assert watch.over
    assert watch.fault is None
    assert watch.seen() is not None
