"""`AutoCheckpoint` in real Lightning runs: under the budget, as predicted, and nothing else is different."""

from __future__ import annotations

import copy
import inspect
import json
import random
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning_models import WIDTH, fit, loader, models
from torch import nn
from torch.utils._pytree import tree_flatten

import dtr_integrations
from dtr_integrations._compat import FakeTensor
from dtr_integrations._lightning_step import LightningStep
from dtr_integrations.capture.fake import FakeWorld
from dtr_integrations.capture.step import capture
from dtr_integrations.config import DTRConfig
from dtr_integrations.core.peak import PeakReport
from dtr_integrations.errors import BudgetInfeasible, CaptureError, ConfigError, NothingPlanned

lightning = pytest.importorskip("lightning.pytorch")
pytorch_lightning = pytest.importorskip("pytorch_lightning")

AMPLE = "1GB"
NAMESPACES = [lightning, pytorch_lightning]


def front_door(pl: Any) -> Any:
    if pl is lightning:
        return dtr_integrations.lightning.AutoCheckpoint
    return dtr_integrations.pytorch_lightning.AutoCheckpoint


def budgeted(pl: Any, share: float, **config: Any) -> Any:
    """An `AutoCheckpoint` whose budget is static + share · (default − static), found from the first batch."""

    class Budgeted(front_door(pl)):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if self.plan is None:
                step = LightningStep(namespace=pl, trainer=trainer, module=pl_module, batch=batch)
                step = LightningStep(
                    **{**vars(step), "targets": tuple(config.get("targets") or step.called())}
                )
                default = capture(step).default
                bytes_ = default.static_bytes + share * (default.peak_bytes - default.static_bytes)
                self.session.config = DTRConfig(
                    **{**self.session.config.to_dict(), "budget": f"{int(bytes_)}B"}
                )
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    return Budgeted(AMPLE, **{"progress": False, "log_every_n_steps": 1, **config})


def assert_as_predicted(callback: Any) -> None:
    assert callback.reports, "nothing was measured"
    for report in callback.reports:
        assert report.within_budget
        assert report.prediction_error <= 0.01


def snapshot(trainer: Any, module: Any) -> dict[str, Any]:
    """Everything that planning must leave alone, by value."""
    return copy.deepcopy(
        {
            "module": module.state_dict(),
            "gradients": [p.grad for p in module.parameters()],
            "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
            "progress": trainer.fit_loop.state_dict(),
            "logged": (dict(trainer.logged_metrics), dict(trainer.callback_metrics)),
            "counters": (module.training_steps, module.losses, module.net.eager_calls),
            "random": (random.getstate(), np.random.get_state(), torch.get_rng_state()),
            "configuration": (
                torch._inductor.config.get_config_copy(),
                torch._functorch.config.get_config_copy(),
                torch._dynamo.config.get_config_copy(),
            ),
        }
    )


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in one:
        (values, shape), (others, other_shape) = tree_flatten(one[name]), tree_flatten(other[name])
        assert shape == other_shape, name
        assert all(is_same(a, b) for a, b in zip(values, others, strict=True)), name


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


class Watch:
    """Takes a snapshot before the first training batch; also when the run fails.

    Not before later ones: behind an `AutoCheckpoint` that would be inside of what it measures.
    """

    def __init__(self) -> None:
        self.snapshots: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.snapshots:
            self.snapshots.append(snapshot(trainer, pl_module))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.snapshots.append(snapshot(trainer, pl_module))


def watch(pl: Any) -> Any:
    return type("Watching", (Watch, pl.Callback), {})()


# -- the class
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pl", NAMESPACES)
def test_is_a_callback_with_the_fields_of_the_configuration_as_keywords(pl: Any) -> None:
    assert issubclass(front_door(pl), pl.Callback)
    fields = DTRConfig(budget=AMPLE).to_dict()
    assert list(inspect.signature(front_door(pl)).parameters) == list(fields)
    assert front_door(pl)(AMPLE).config.to_dict() == fields


def test_the_package_gives_the_one_for_lightning() -> None:
    assert dtr_integrations.AutoCheckpoint is dtr_integrations.lightning.AutoCheckpoint


@pytest.mark.parametrize("pl", NAMESPACES)
def test_made_from_a_mapping_as_a_command_line_does(pl: Any) -> None:
    arguments = {"budget": "70GB", "targets": ["net"], "reserve": {"slack": "1GB"}, "log_every_n_steps": 5}
    callback = front_door(pl)(**arguments)
    assert callback.config == DTRConfig(**arguments)
    assert callback.session is None
    assert callback.plan is None
    assert callback.reports == []


def test_a_wrong_budget_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="70"):
        dtr_integrations.AutoCheckpoint("70")


# -- one run, looked at from all sides
# -------------------------------------------------------------------------


FULL = {
    "validate": loader(1),
    "max_epochs": 2,
    "limit_train_batches": 3,
    "val_check_interval": 2,
    "gradient_clip_val": 0.5,
}


def validated(pl: Any) -> Any:
    """A classifier with a validation step, which refuses a real training step until a file exists."""

    class Validated(models(pl).Classifier):
        must_exist: Path | None = None

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.must_exist is not None and not isinstance(batch[0], FakeTensor):
                assert self.must_exist.exists(), "a real forward before the plan stands"
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.head(self.net(batch[0])), batch[1]))

    return Validated


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Six optimizer steps at two thirds of the dynamic memory, with everything switched on."""
    directory = tmp_path_factory.mktemp("run")
    pl, run_dir = lightning, directory / "dtr"

    torch.manual_seed(3)
    module = validated(pl)()
    module.must_exist = run_dir / "plan-rank0.json"
    keys = list(module.state_dict())
    callback, before, after = budgeted(pl, 0.67, run_dir=str(run_dir)), watch(pl), watch(pl)
    trainer = fit(
        pl,
        module,
        before,
        callback,
        after,
        **FULL,
        logger=pl.loggers.CSVLogger(directory, "csv", "0"),
    )
    checkpoint = directory / "weights.ckpt"
    trainer.save_checkpoint(checkpoint)
    return SimpleNamespace(**{k: v for k, v in locals().items() if k != "directory"})


def test_every_measured_step_is_under_the_budget_and_as_predicted(run: Any) -> None:
    plan = run.callback.plan
    assert not plan.is_default
    assert plan.default_allocated_bytes > plan.budget_bytes
    assert [report.step for report in run.callback.reports] == [2, 3, 4, 5, 6]
    assert_as_predicted(run.callback)


def test_the_losses_are_those_of_the_default_compile(run: Any) -> None:
    class Compiled(lightning.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.net.compile(dynamic=False)

    torch.manual_seed(3)
    module = validated(lightning)()
    fit(lightning, module, Compiled(), **FULL)
    assert len(run.module.losses) == 6
    torch.testing.assert_close(run.module.losses, module.losses, rtol=1e-5, atol=0)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(run.module.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)


def test_planning_changes_nothing_real(run: Any) -> None:
    before, after = run.before.snapshots[0], run.after.snapshots[0]
    assert_same(before, after)


def test_validation_stays_eager_and_training_does_not(run: Any) -> None:
    validations = 1 + 2  # the sanity check; once an epoch of three batches, after the second
    assert run.module.net.eager_calls == validations


def test_the_checkpoint_has_the_keys_of_the_module(run: Any) -> None:
    saved = torch.load(run.checkpoint, weights_only=False)
    assert list(saved["state_dict"]) == run.keys
    assert list(run.module.state_dict()) == run.keys


def test_the_modules_are_restored_at_the_end(run: Any) -> None:
    assert all(part._compiled_call_impl is None for part in run.module.modules())


def test_the_peak_log_and_the_plan_file(run: Any) -> None:
    lines = [json.loads(line) for line in (run.run_dir / "peaks-rank0.jsonl").read_text().splitlines()]
    assert [PeakReport.from_dict(line) for line in lines] == run.callback.reports
    assert min(line["step"] for line in lines) <= 3
    assert {(line["rank"], line["world_size"], line["source"]) for line in lines} == {(0, 1, "cpu_profiler")}
    plan = json.loads((run.run_dir / "plan-rank0.json").read_text())
    assert plan["predicted_allocated_bytes"] == lines[0]["predicted_allocated_bytes"]
    assert plan["budget_bytes"] == lines[0]["budget_bytes"]


def test_the_peaks_reach_the_loggers(run: Any) -> None:
    text = (Path(run.trainer.logger.log_dir) / "metrics.csv").read_text()
    rows = [
        dict(zip(text.splitlines()[0].split(","), r.split(","), strict=True)) for r in text.splitlines()[1:]
    ]
    peaks = [row for row in rows if row["dtr/peak_bytes/rank0"]]
    assert [int(float(row["dtr/peak_bytes/rank0"])) for row in peaks] == [
        report.peak_allocated_bytes for report in run.callback.reports
    ]
    assert {float(row["dtr/budget_bytes"]) for row in peaks} == {run.callback.plan.budget_bytes}
    assert all(row["dtr/predicted_bytes/rank0"] for row in peaks)
    assert any(row["val_loss"] for row in rows)


def test_resumes_from_a_checkpoint_with_real_optimizer_state(run: Any, capsys: Any) -> None:
    module = validated(lightning)()
    callback = budgeted(lightning, 0.67, progress=True)
    trainer = fit(lightning, module, callback, ckpt_path=str(run.checkpoint), **{**FULL, "max_epochs": 3})
    assert trainer.global_step == 9
    assert len(module.losses) == 3
    assert_as_predicted(callback)
    assert callback.plan.digest == run.callback.plan.digest
    assert "allocated" in capsys.readouterr().out  # the summary


# -- other ways to train
# ---------------------------------------------------------------------------------------


def test_accumulation_in_the_other_namespace(tmp_path: Path) -> None:
    pl = pytorch_lightning
    callback = budgeted(pl, 0.67)
    logger = pl.loggers.CSVLogger(tmp_path)
    module = models(pl).Classifier()
    fit(pl, module, callback, accumulate_grad_batches=2, max_epochs=2, logger=logger)
    assert [report.step for report in callback.reports] == [2, 3, 4]
    assert_as_predicted(callback)
    assert (Path(logger.log_dir) / "peaks-rank0.jsonl").exists()  # no run_dir: the logger's


@pytest.mark.slow
def test_manual_optimization_with_two_optimizers() -> None:
    callback = budgeted(lightning, 0.67)
    trainer = fit(lightning, models(lightning).Adversarial(), callback)
    assert trainer.global_step == 8
    assert [report.step for report in callback.reports] == [2, 3, 4]
    assert_as_predicted(callback)


def test_bf16_autocast_and_clipping_by_value() -> None:
    # Large enough that what the CPU's bf16 matmul takes for itself (about 150 kB) is small.
    callback = budgeted(lightning, 0.67)
    fit(
        lightning,
        models(lightning).Classifier(),
        callback,
        train=loader(3, batch=16384),
        precision="bf16-mixed",
        gradient_clip_val=0.5,
        gradient_clip_algorithm="value",
    )
    assert_as_predicted(callback)
    assert 2 * 16384 * WIDTH * 6 < callback.plan.default_allocated_bytes < 4 * 4 * 16384 * WIDTH * 6


def test_a_module_that_calls_itself_is_compiled_whole() -> None:
    callback = budgeted(lightning, 0.67)
    fit(lightning, models(lightning).Whole(), callback)
    assert callback.session.planned.captured.called == ("",)
    assert_as_predicted(callback)


# -- what can go wrong
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pl", NAMESPACES)
def test_nothing_to_compile_is_said_and_training_goes_on(pl: Any) -> None:
    module = models(pl).Own()
    callback = front_door(pl)(AMPLE, progress=False)
    with warnings.catch_warnings(record=True) as said:  # not pytest.warns: it raises what the settings ignore
        warnings.simplefilter("always", NothingPlanned)
        trainer = fit(pl, module, callback)
    assert any("no target module is called" in str(warning.message) for warning in said)
    assert trainer.global_step == 4
    assert callback.plan is None


def test_nothing_to_compile_can_be_an_error() -> None:
    with pytest.raises(CaptureError, match="no target module is called"):
        fit(
            lightning, models(lightning).Own(), front_door(lightning)(AMPLE, fallback="error", progress=False)
        )


def test_an_infeasible_budget_leaves_everything_as_it_was() -> None:
    before = watch(lightning)
    module = models(lightning).Classifier()
    with pytest.raises(BudgetInfeasible) as caught:
        fit(lightning, module, before, front_door(lightning)("200KB", progress=False))
    assert caught.value.lowest_bytes > 200_000
    assert module.losses == []
    first, at_exception = before.snapshots
    assert_same(first, at_exception)
    assert all(part._compiled_call_impl is None for part in module.modules())


def test_an_exception_in_training_restores_everything() -> None:
    class Breaks(models(lightning).Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if self.training_steps == 3 and not isinstance(loss, FakeTensor):
                raise ZeroDivisionError("on purpose")  # while this step is being measured
            return loss

    before, module = watch(lightning), Breaks()
    with pytest.raises(ZeroDivisionError):
        fit(lightning, module, before, front_door(lightning)(AMPLE, log_every_n_steps=1, progress=False))
    assert before.snapshots[0]["configuration"] == before.snapshots[-1]["configuration"]
    assert all(part._compiled_call_impl is None for part in module.modules())
    assert not torch.autograd._profiler_enabled()
    calls = module.net.eager_calls
    module.net(torch.randn(4, WIDTH))
    assert module.net.eager_calls == calls + 1


def test_targets_that_are_not_there_and_modules_that_are_compiled_already() -> None:
    with pytest.raises(ConfigError, match="nett"):
        fit(lightning, models(lightning).Classifier(), front_door(lightning)(AMPLE, targets=["nett"]))
    module = models(lightning).Classifier()
    module.net.compile()
    with pytest.raises(ConfigError, match=r"net is compiled with torch\.compile already"):
        fit(lightning, module, front_door(lightning)(AMPLE))
    assert module.net._compiled_call_impl is not None


# -- the fake step alone
# ---------------------------------------------------------------------------------------


def step_of(pl: Any, module: Any, look: Any, **trainer: Any) -> None:
    """Call `look(step, trainer)` with the `LightningStep` of the first batch of a run."""

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                look(LightningStep(namespace=pl, trainer=trainer, module=pl_module, batch=batch), trainer)

    fit(pl, module, Look(), limit_train_batches=1, **trainer)


def called(module: Any) -> tuple[str, ...]:
    found: list[tuple[str, ...]] = []
    step_of(lightning, module, lambda step, _: found.append(step.called()))
    return found[0]


def test_the_outermost_modules_that_the_step_calls_are_found() -> None:
    kinds = models(lightning)
    assert called(kinds.Classifier()) == ("net", "head")
    assert called(kinds.Whole()) == ("",)
    assert called(kinds.Own()) == ()
    assert called(kinds.Adversarial()) == ("maker", "judge")


def test_a_forward_that_logs_is_not_compiled_but_what_it_calls_is() -> None:
    module = models(lightning).Whole(logs_in_forward=True)
    assert called(module) == tuple(f"layers.{i}" for i in range(6))


def test_metrics_and_methods_other_than_forward() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Metered(models(lightning).Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(10)
            self.teacher = nn.Linear(WIDTH, WIDTH)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            with torch.no_grad():
                x = self.teacher(x)
            for layer in self.net.layers[:2]:  # not through net's own forward
                x = layer(x)
            logits = self.head(x)
            self.log("accuracy", self.accuracy(logits, y))
            return nn.functional.cross_entropy(logits, y)

    module = Metered()
    assert called(module) == ("net.layers.0", "net.layers.1", "head")
    assert module.accuracy.update_called  # by the one real batch


@pytest.mark.parametrize("pl", NAMESPACES)
def test_the_twin_writes_to_nothing_real(pl: Any) -> None:
    class Writer(models(pl).Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if isinstance(batch[0], FakeTensor):
                assert isinstance(self.trainer, pl.Trainer)
                self.trainer.should_stop = True
                self.trainer.save_checkpoint("/nonexistent/never")
                self.trainer.logger.experiment.add_scalar("x", 1)
                self.logger.log_metrics({"x": 1})
                self.optimizers().param_groups[0]["lr"] = -1.0
                self.lr_schedulers().step()
                assert self.all_gather(batch[0]).shape == batch[0].shape
                self.print("never")
                seen.append((batch_idx, self.global_step, self.current_epoch))
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if any(isinstance(p, FakeTensor) for p in self.parameters()):
                hooks.append(type(optimizer).__name__)

    seen: list[tuple[int, int, int]] = []
    hooks: list[str] = []
    logger = pl.loggers.logger.DummyLogger()

    def look(step: LightningStep, trainer: Any) -> None:
        before = snapshot(trainer, step.module)
        world = FakeWorld()
        fake = step.build(world)
        with world.active():
            fake.run()
            fake.run()
        assert_same(before, snapshot(trainer, step.module))
        assert not trainer.should_stop
        assert step.module.trainer is trainer
        assert fake.model.training_steps == 4
        assert fake.model.losses

    step_of(pl, Writer(), look, accumulate_grad_batches=2, logger=logger)
    assert [number for number, _, _ in seen] == [2, 3, 4, 5]
    assert hooks == ["AdamW", "AdamW"]
