"""`AutoCheckpoint` in real runs of the Hugging Face `Trainer`: under the budget, as predicted, and nothing
else is different."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from dtr_integrations.errors import BudgetInfeasible, ConfigError, PlanWarning

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from dtr_integrations.transformers import AutoCheckpoint  # noqa: E402

AMPLE = "1GB"
LENGTH = 64


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens, each its own label."""

    def __init__(self, rows: int, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, 96, (rows, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def model() -> Any:
    """Two layers, without dropout: eager and compiled runs draw nothing."""
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=96,
        max_position_embeddings=LENGTH,
    )
    return transformers.LlamaForCausalLM(config)


def trainer(directory: Path, *callbacks: Any, **arguments: Any) -> Any:
    arguments = {
        "output_dir": str(directory),
        "max_steps": 3,
        "per_device_train_batch_size": 16,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **arguments,
    }
    return transformers.Trainer(
        model(),
        transformers.TrainingArguments(**arguments),
        train_dataset=Rows(128),
        eval_dataset=Rows(8),
        callbacks=list(callbacks),
    )


def losses(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def binding(callback: AutoCheckpoint) -> str:
    """Seven tenths of what the default adds to static memory."""
    static, default = callback.plan.static_bytes, callback.plan.default_allocated_bytes
    return f"{int(static + 0.7 * (default - static))}B"


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="plain"),
        pytest.param(
            {"gradient_accumulation_steps": 2, "bf16": True},
            id="accumulating in bf16",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_is_kept_under_its_budget(arguments: dict[str, Any], tmp_path: Path) -> None:
    ample = AutoCheckpoint(AMPLE, progress=False, log_every_n_steps=1)
    default = trainer(tmp_path / "default", ample, **arguments)
    default.train()
    keys = list(default.model.state_dict())
    assert ample.plan.is_default
    assert all(report.prediction_error <= 0.01 for report in ample.reports)

    callback = AutoCheckpoint(binding(ample), progress=False, log_every_n_steps=1)
    run = trainer(tmp_path, callback, eval_strategy="steps", eval_steps=1, **arguments)
    run.train()
    assert not callback.plan.is_default
    assert [report.step for report in callback.reports] == [2, 3]
    for report in callback.reports:
        assert report.within_budget
        assert report.prediction_error <= 0.01
        assert report.peak_allocated_bytes < ample.reports[-1].peak_allocated_bytes
    assert losses(run) == pytest.approx(losses(default), rel=1e-5)
    assert list(run.model.state_dict()) == keys
    assert run.model._compiled_call_impl is None  # as it was
    logged = [entry for entry in run.state.log_history if "dtr/budget_bytes" in entry]
    assert [entry["step"] for entry in logged] == [2, 3]
    assert logged[0]["dtr/peak_bytes/rank0"] == callback.reports[0].peak_allocated_bytes
    lines = (tmp_path / "peaks-rank0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 3]
    assert (tmp_path / "plan-rank0.json").exists()


@pytest.mark.slow
def test_a_run_is_resumed_under_the_budget(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", AutoCheckpoint(AMPLE, progress=False))
    whole.train()
    first = trainer(tmp_path, AutoCheckpoint(AMPLE, progress=False), save_strategy="steps", save_steps=2)
    first.train()
    callback = AutoCheckpoint(AMPLE, progress=False)
    second = trainer(tmp_path, callback)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert second.state.global_step == 3
    assert losses(second) == pytest.approx(losses(whole), rel=1e-5)
    assert callback.plan is not None


def test_no_plan_fits() -> None:
    run = trainer(Path("never-written"), AutoCheckpoint("100KB", progress=False))
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    with pytest.raises(BudgetInfeasible):
        run.train()
    assert run.state.global_step == 0
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())


def test_compiling_twice_is_refused_when_the_trainer_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch_compile=True .* Leave it out"):
        trainer(tmp_path, AutoCheckpoint(AMPLE), torch_compile=True)


def test_the_users_own_checkpointing_is_said_before_step_1(tmp_path: Path) -> None:
    callback = AutoCheckpoint(AMPLE, progress=False)
    run = trainer(tmp_path, callback, activation_checkpointing=True, max_steps=1)
    with pytest.warns(PlanWarning, match="checkpoint"):
        run.train()


def test_wrong_configuration_is_named() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'run_dir'"):
        AutoCheckpoint(AMPLE, run_dri="x")
    with warnings.catch_warnings(), pytest.raises(ConfigError, match="70"):
        AutoCheckpoint("70")
