"""A training loop of one's own: misuse is said, nothing real is used up, larger batches stay in budget."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtr_integrations
from dtr_integrations.errors import (
    BudgetInfeasible,
    CaptureError,
    ConfigError,
    NothingPlanned,
    PlanMismatch,
    PlanWarning,
)


class Net(nn.Module):
    """Six blocks of 32, dropout; activations outweigh gradients at 256 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        return x


def setup(rows: int = 256) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters()), torch.randn(rows, 32)


def one_step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"targets": ["nope"]}, "nope"),
        ({"targets": ["layers.0", "layers.0"]}, "named twice"),
        ({"targets": ["", "layers.0"]}, "inside"),
        ({"optimizer": "adam"}, "optimizer='adam'"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"device": "xpu"}, "device='xpu'"),
        ({"world_size": 2}, "world_size=2"),
        ({"loss_fn": 5}, "loss_fn=5"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)}, "no parameter of Net"),
    ],
)
def test_wrong_arguments_of_plan_name_themselves(arguments: dict[str, Any], says: str) -> None:
    model, _, x = setup()
    with pytest.raises(ConfigError, match=says):
        dtr_integrations.plan(model, x, budget="1GB", **arguments)


@pytest.mark.parametrize("text", [b"null", b"\xff\xfe", b"[]", b"{}"])
def test_a_file_that_holds_no_plan_is_refused(text: bytes, tmp_path: Path) -> None:
    model, _, x = setup()
    (tmp_path / "plan.json").write_bytes(text)
    with pytest.raises(PlanMismatch, match="plan"):
        dtr_integrations.plan(model, x, budget="1GB", plan=str(tmp_path / "plan.json"))


def test_a_module_has_one_compiler_at_a_time() -> None:
    model, _, _ = setup()
    with dtr_integrations.auto_checkpoint(model, budget="1GB"), pytest.raises(ConfigError, match="already"):
        dtr_integrations.auto_checkpoint(model, budget="1GB")
    model.compile()
    with pytest.raises(ConfigError, match="already"):
        dtr_integrations.auto_checkpoint(model, budget="1GB")


def test_a_closed_session_says_so() -> None:
    model, optimizer, x = setup()
    session = dtr_integrations.auto_checkpoint(model, optimizer=optimizer, budget="1GB")
    session.close()
    session.close()
    with pytest.raises(ConfigError, match="closed"):
        session.step(lambda: one_step(model, optimizer, x))


def test_training_in_eval_mode_is_never_a_silent_nothing() -> None:
    model, optimizer, x = setup()
    model.eval()
    with (
        dtr_integrations.auto_checkpoint(model, optimizer=optimizer, budget="1GB") as session,
        pytest.warns(NothingPlanned, match=r"model\.train\(\)"),
    ):
        one_step(model, optimizer, x)
    assert session.plan is None


def test_an_interrupt_while_planning_leaves_the_session_as_it_was() -> None:
    model, optimizer, x = setup()
    tries: list[int] = []

    class Impatient(nn.Module):
        def __deepcopy__(self, memo: Any) -> Any:
            tries.append(1)
            raise KeyboardInterrupt

    model.extra = Impatient()
    session = dtr_integrations.auto_checkpoint(model, optimizer=optimizer, budget="1GB")
    with pytest.raises(KeyboardInterrupt):
        session.step(lambda: one_step(model, optimizer, x))
    assert tries
    assert session.needs_plan
    del model.extra
    session.step(lambda: one_step(model, optimizer, x))
    assert session.plan is not None
    session.close()


def test_a_step_that_draws_from_an_iterator_draws_nothing_while_planning() -> None:
    model, optimizer, x = setup()
    drawn: list[int] = []

    def batches() -> Iterator[torch.Tensor]:
        while True:
            drawn.append(1)
            yield x

    stream = batches()
    with (
        dtr_integrations.auto_checkpoint(model, optimizer=optimizer, budget="1GB") as session,
        pytest.warns(NothingPlanned, match="outside of the function"),
    ):
        session.step(lambda: one_step(model, optimizer, next(stream)))
    assert len(drawn) == 1


def test_a_trainer_object_with_a_file_is_planned_all_the_same(tmp_path: Path) -> None:
    class Loop:
        def __init__(self) -> None:
            self.model, self.optimizer, self.x = setup()
            self.log = (tmp_path / "log").open("w")
            self.memory = io.StringIO()

        def step(self) -> None:
            one_step(self.model, self.optimizer, self.x)
            self.log.write("step\n")
            self.memory.write("step\n")

    loop = Loop()
    before = {k: v.clone() for k, v in loop.model.state_dict().items()}
    with dtr_integrations.auto_checkpoint(loop.model, optimizer=loop.optimizer, budget="1000B") as session:
        with pytest.raises(BudgetInfeasible):
            session.step(loop.step)
    assert all(torch.equal(v, before[k]) for k, v in loop.model.state_dict().items())
    with dtr_integrations.auto_checkpoint(loop.model, optimizer=loop.optimizer, budget="1GB") as session:
        session.step(loop.step)
        assert session.plan is not None
    loop.log.close()
    assert (tmp_path / "log").read_text() == loop.memory.getvalue() == "step\n"


class Own(torch.optim.Optimizer):
    """An optimizer with attributes of its own, one of them another optimizer."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.scale = torch.ones(())
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.scale)
        self.base.step()


def test_optimizers_with_attributes_of_their_own_are_planned() -> None:
    model, _, x = setup()
    for optimizer in (Own(model.parameters()), torch.optim.LBFGS(model.parameters(), max_iter=1)):

        def step(optimizer: Any = optimizer) -> None:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()

        with dtr_integrations.auto_checkpoint(model, optimizer=optimizer, budget="1GB") as session:
            session.step(step)
            assert session.plan is not None


def test_a_larger_batch_is_planned_again_before_it_runs() -> None:
    model, optimizer, x = setup()
    default = dtr_integrations.plan(model, x, budget="1GB", optimizer=optimizer)
    span = default.default_allocated_bytes - default.static_bytes
    budget = default.static_bytes + int(1.2 * span)
    with dtr_integrations.auto_checkpoint(model, optimizer=optimizer, budget=f"{budget}B") as session:
        for rows in (256, 256, 384, 384, 256):
            batch = x[:rows] if rows <= 256 else torch.cat([x, x[: rows - 256]])
            session.step(lambda batch=batch: one_step(model, optimizer, batch))
        assert not session.plan.is_default  # 384 rows need more than the budget
        assert len(session.reports) == 2
        assert all(report.within_budget for report in session.reports)
        assert max(report.prediction_error for report in session.reports) <= 0.01


@pytest.mark.slow
def test_a_larger_batch_for_which_no_plan_fits_gets_the_lowest() -> None:
    model, optimizer, x = setup()
    default = dtr_integrations.plan(model, x, budget="1GB", optimizer=optimizer)
    with dtr_integrations.auto_checkpoint(
        model, optimizer=optimizer, budget=f"{default.default_allocated_bytes}B"
    ) as session:
        session.step(lambda: one_step(model, optimizer, x))
        large = torch.cat([x] * 8)
        with pytest.warns(PlanWarning, match=r"no plan fits .*; using the lowest one"):
            session.step(lambda: one_step(model, optimizer, large))
        session.step(lambda: one_step(model, optimizer, large))
        report = session.reports[-1]
        assert report.peak_allocated_bytes == session.plan.predicted_allocated_bytes
    other, optimizer, _ = setup()
    with pytest.raises(BudgetInfeasible) as refused:
        dtr_integrations.plan(other, large, budget=f"{default.static_bytes}B", optimizer=optimizer)
    assert (
        report.peak_allocated_bytes <= 1.2 * refused.value.lowest_bytes
    )  # which depends on the budget a little


@pytest.mark.parametrize("whole_step", [True, False])
def test_a_bad_first_batch_does_not_end_the_budget(
    whole_step: bool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A loop that skips batches which fail: the step was at fault, not the planning or torch.compile, and
    what it raises itself says so without torch's log around it."""
    model, optimizer, x = setup()
    with dtr_integrations.auto_checkpoint(model, optimizer=optimizer, budget="1GB") as session:

        def step(batch: torch.Tensor) -> None:
            if whole_step:
                session.step(lambda: one_step(model, optimizer, batch))
            else:
                one_step(model, optimizer, batch)

        with (
            pytest.warns(NothingPlanned, match=r"in layers.0 \(Linear\): RuntimeError"),
            pytest.raises(RuntimeError, match=r"shapes|dimension"),
        ):
            step(x[:, :5])
        assert session.plan is None
        step(x)
        assert session.plan is not None
        with pytest.raises(RuntimeError, match=r"shapes|dimension"):  # and not a failure of torch.compile
            step(x[:, :5])
        step(x)
        assert len(session.reports) == whole_step
    assert not [record for record in caplog.records if record.name.startswith("torch")]
    assert "Traceback" not in capfd.readouterr().err


KEPT: Any = None


def keeps_in_closure(forward: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    kept = None

    def keeping() -> torch.Tensor:
        nonlocal kept
        kept = forward()
        return kept

    return keeping


def keeps_in_global(forward: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    def keeping() -> torch.Tensor:
        global KEPT
        KEPT = forward()
        return KEPT

    return keeping


def keeps_in_dict(forward: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    kept = {}

    def keeping() -> torch.Tensor:
        kept["last"] = forward()
        return kept["last"]

    return keeping


@pytest.mark.parametrize("keeps", [keeps_in_closure, keeps_in_global, keeps_in_dict])
def test_an_output_that_the_step_keeps_for_the_next_is_there_once(keeps: Any) -> None:
    """The one from the step before lives until the forward is through; no twin and no list of ours makes it
    live longer, and it is not taken for a larger batch."""
    model, optimizer, x = setup()
    forward = keeps(lambda: model(x))

    def step() -> None:
        optimizer.zero_grad()
        forward().square().mean().backward()
        optimizer.step()

    with dtr_integrations.auto_checkpoint(model, optimizer=optimizer, budget="1GB") as session:
        session.step(step)
        first = session.plan
        for _ in range(3):
            session.step(step)
            assert session.plan is first
        report = session.reports[0]
    assert report.peak_allocated_bytes == report.predicted_allocated_bytes
    assert session.planned.captured.step.static.batch_bytes == 2 * x.nbytes  # the input, and the output


@pytest.mark.parametrize(
    ("loss_fn", "says"),
    [
        (lambda out: out, r"loss_fn returned a tensor of float32\[8, 32\]"),
        (lambda out: None, "loss_fn returned NoneType"),
        (lambda out: out.argmax(), r"loss_fn returned a tensor of int64\[\]"),
        (lambda out: out.detach().sum(), "loss_fn detaches it"),
        (lambda out: 1 / 0, r"loss_fn fails on what the model returned \(a tensor of float32\[8, 32\]\)"),
    ],
)
def test_a_wrong_loss_function_is_named(loss_fn: Any, says: str) -> None:
    model, _, x = setup()
    with pytest.raises(CaptureError, match=says):
        dtr_integrations.plan(model, x[:8], budget="1GB", loss_fn=loss_fn)


def test_a_frozen_model_has_nothing_to_train() -> None:
    model, _, x = setup()
    with pytest.raises(CaptureError, match="all parameters are frozen"):
        dtr_integrations.plan(model.requires_grad_(False), x[:8], budget="1GB")


def test_gradients_that_live_on_are_planned_for_at_the_second_call() -> None:
    model, optimizer, x = setup()
    with dtr_integrations.auto_checkpoint(model, optimizer=optimizer, budget="1GB") as session:
        peaks = []
        for _ in range(3):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            peaks.append(session.plan.predicted_allocated_bytes)
    assert peaks[0] < peaks[1] == peaks[2]  # the loss, seen in the first step, is in it too
    assert session.zero_after_forward


def test_what_a_module_holds_from_the_step_before_is_measured_too() -> None:
    model, optimizer, x = setup()
    model.weights = [layer.weight for layer in model.layers]  # no memory of its own

    def step() -> None:
        optimizer.zero_grad()
        out = model(x)
        out.square().mean().backward()
        optimizer.step()
        model.kept = {"last": out.detach()}

    with dtr_integrations.auto_checkpoint(model, optimizer=optimizer, budget="1GB") as session:
        for _ in range(3):
            session.step(step)
    other, optimizer, _ = setup()
    plain = dtr_integrations.plan(other, x, budget="1GB", optimizer=optimizer)
    for report in session.reports:
        assert report.prediction_error <= 0.01
        assert report.peak_allocated_bytes > plain.predicted_allocated_bytes


def test_scratch_inside_kernels_is_predicted() -> None:
    """oneDNN's scratch for an odd width, the float32 copy under a bfloat16 mean."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(256, 10)), torch.randn(512, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).mean()
        loss.backward()
        optimizer.step()

    with dtr_integrations.auto_checkpoint(model, optimizer=optimizer, budget="1GB") as session:
        session.step(step)
        session.step(step)
    (report,) = session.reports
    assert report.prediction_error <= 0.01


def test_a_model_on_the_meta_device_is_planned_as_if_it_had_been_built() -> None:
    def build(device: str) -> tuple[nn.Module, torch.Tensor, torch.optim.Optimizer]:
        with torch.device(device):
            model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
            return model, torch.empty(128, 64), torch.optim.AdamW(model.parameters())

    peaks = []
    for device in ("meta", "cpu"):
        model, x, optimizer = build(device)
        peaks.append(
            dtr_integrations.plan(model, x, budget="1GB", optimizer=optimizer).default_allocated_bytes
        )
        assert all(p.device.type == device for p in model.parameters())
    assert peaks[0] == peaks[1]


def test_a_loss_that_closes_over_its_targets_can_be_planned() -> None:
    targets = torch.randint(0, 10, (32,))
    plan = dtr_integrations.plan(
        nn.Linear(8, 10),
        torch.randn(32, 8),
        budget="1GB",
        loss_fn=lambda out: nn.functional.cross_entropy(out, targets),
    )
    assert plan.is_default
