"""Steps as people write them: whatever names the model, the optimizer or a scheduler, planning moves nothing
real and sees all of it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dtr_integrations
from dtr_integrations.errors import PlanWarning

AMPLE = "1GB"


class Net(nn.Module):
    """Three blocks of 32; activations outweigh gradients at 128 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x


model: Any = None
optimizer: Any = None
scheduler: Any = None
x: Any = None


@pytest.fixture(autouse=True)
def _a_script_with_globals() -> Any:
    global model, optimizer, scheduler, x
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    x = torch.randn(128, 32)
    yield
    model = optimizer = scheduler = x = None


def session(**config: Any) -> Any:
    config = {"budget": AMPLE, "progress": False, "log_every_n_steps": 1, **config}
    return dtr_integrations.auto_checkpoint(model, optimizer=optimizer, **config)


def plainly() -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    scheduler.step()


def with_arguments(model: Any, optimizer: Any, scheduler: Any, x: Any) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    scheduler.step()


def in_an_inner_function() -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()

    def update() -> None:
        optimizer.step()
        scheduler.step()

    update()


def in_a_comprehension() -> None:
    optimizer.zero_grad()
    sum([model(half).square().mean() for half in x.chunk(2)]).backward()
    [thing.step() for thing in (optimizer, scheduler)]


def in_defaults(model: Any = None) -> Any:
    def step(model: Any = model, *, update: Any = (optimizer, scheduler)) -> None:
        model(x).square().mean().backward()
        for thing in update:
            thing.step()

    return step


class Loop:
    """Over globals, as a script's class may be."""

    def run(self) -> None:
        plainly()

    __call__ = run


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


WRITTEN: dict[str, Callable[[], Callable[[], Any]]] = {
    "a function": lambda: plainly,
    "an inner function": lambda: in_an_inner_function,
    "a comprehension": lambda: in_a_comprehension,
    "defaults": lambda: in_defaults(model),
    "a lambda": lambda: lambda: with_arguments(model, optimizer, scheduler, x),
    "a partial": lambda: functools.partial(with_arguments, model, optimizer, scheduler, x),
    "a method": lambda: Loop().run,
    "a callable object": Loop,
    "a table": lambda: lambda table={"step": plainly}: table["step"](),
    "a decorated function": lambda: decorated(plainly),
}


@pytest.mark.parametrize("form", WRITTEN)
def test_planning_moves_nothing_real_however_a_step_is_written(form: str) -> None:
    step = WRITTEN[form]()
    with session() as s:
        s.step(step)
        assert s.plan is not None
        assert s.plan.static_bytes > 2.5 * sum(p.nbytes for p in model.parameters())  # with the state
        assert scheduler.last_epoch == 1
        assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-3)
        states = list(optimizer.state.values())
        assert [state["step"].item() for state in states] == [1.0] * 6
        s.step(step)
        assert s.reports[0].prediction_error == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("zeroes", ["first", "last", "outside"])
@pytest.mark.parametrize("keeps", ["detached", "with its graph"])
def test_gradients_and_a_list_of_losses_are_counted_as_they_live(zeroes: str, keeps: str) -> None:
    losses: list[torch.Tensor] = []

    def step() -> None:
        if zeroes == "first":
            optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach() if keeps == "detached" else loss)
        optimizer.step()
        if zeroes == "last":
            optimizer.zero_grad()

    with session() as s:
        plans = set()
        for _ in range(4):
            if zeroes == "outside":
                optimizer.zero_grad()
            s.step(step)
            plans.add(s.plan.digest)
            assert s.planned.rounds == 0  # the default, as captured: never planned again
        assert len(plans) == 1
        assert [r.peak_allocated_bytes for r in s.reports] == pytest.approx(
            [s.plan.predicted_allocated_bytes] * 3, abs=16
        )


def test_gradients_that_are_zeroed_in_place_stay() -> None:
    """Which only the second step shows; it is planned with them before it runs."""

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()

    with session() as s:
        for _ in range(3):
            s.step(step)
        assert [r.prediction_error for r in s.reports] == pytest.approx([0, 0], abs=1e-3)


def test_what_is_there_besides_the_model_is_predicted_and_measured() -> None:
    teacher = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)]).requires_grad_(False)
    average = torch.optim.swa_utils.AveragedModel(model)
    given = torch.randn(64, 32, requires_grad=True)

    def step() -> None:
        optimizer.zero_grad()
        with torch.no_grad():
            target = teacher(torch.ones(4, 128)).mean()
        (model(given).square().mean() - target).square().backward()
        optimizer.step()
        average.update_parameters(model)

    with session() as s:
        for _ in range(3):
            s.step(step)
    other = sum(p.nbytes for p in [*teacher.parameters(), *average.parameters()]) + given.nbytes
    for report in s.reports:
        assert report.prediction_error == pytest.approx(0, abs=0.01)
        assert report.peak_allocated_bytes > report.static_bytes + other


def with_a_scaler() -> Callable[[], None]:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return step


def if_all_is_well(is_bad: Callable[[], Any]) -> Callable[[], Callable[[], None]]:
    def make() -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if is_bad():
                return
            optimizer.step()

        return step

    return make


@pytest.mark.parametrize(
    "make",
    [
        with_a_scaler,
        if_all_is_well(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1e4),
        if_all_is_well(lambda: model.layers[0].weight.grad.isnan().sum() > 0),
        if_all_is_well(lambda: model.layers[0].weight.grad.isnan().float().mean().item()),
    ],
    ids=["a gradient scaler", "a large norm", "a count of nan", "a share of nan"],
)
def test_a_step_that_may_be_skipped_is_planned_as_one_that_is_not(make: Any) -> None:
    step = make()
    with session() as s:
        for _ in range(2):
            s.step(step)
        assert s.plan.static_bytes > 2.5 * sum(p.nbytes for p in model.parameters())
        assert s.reports[0].prediction_error == pytest.approx(0, abs=0.05)


class Renormed(nn.Module):
    """An embedding that overwrites its weight in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32, max_norm=1.0)
        self.net = Net()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net(self.embedding(tokens))


def test_a_weight_that_the_forward_overwrites_is_not_read_again() -> None:
    global model, optimizer
    model = Renormed()
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    tokens = torch.randint(0, 40, (128,))

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(tokens).abs().square().mean().backward()
        optimizer.step()

    with session(budget="1B", on_infeasible="best_effort", fallback="error") as s:
        with pytest.warns(PlanWarning, match="no plan fits"):
            s.step(lambda: step(model, optimizer))
        s.step(lambda: step(model, optimizer))
        assert not s.plan.is_default
    for _ in range(2):
        step(other, plain)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
