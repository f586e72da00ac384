"""`AutoCheckpoint` in real loops of Fabric on one process, of both packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from front_doors import AMPLE, Blocks, assert_kept, binding
from torch import nn

from dtr_integrations.errors import BudgetInfeasible, ConfigError

fabric_module = pytest.importorskip("lightning.fabric")

from lightning.fabric.loggers import CSVLogger  # noqa: E402

from dtr_integrations.fabric import AutoCheckpoint  # noqa: E402


def whole(engine: Any, model: nn.Module, make: Callable[[Any], Any]) -> tuple[Any, Any]:
    return engine.setup(model, make(model))  # type: ignore[no-any-return]


def apart(engine: Any, model: nn.Module, make: Callable[[Any], Any]) -> tuple[Any, Any]:
    """As for strategies that replace parameters."""
    prepared = engine.setup_module(model)
    return prepared, engine.setup_optimizers(make(prepared))


def run(
    callback: Any,
    *,
    setup: Any = whole,
    micro_batches: int = 1,
    steps: int = 4,
    fabric: Any = None,
    **engine: Any,
) -> tuple[Any, list[float]]:
    """Losses of a loop that makes the loss itself."""
    torch.manual_seed(0)
    engine = (fabric or fabric_module.Fabric)(accelerator="cpu", devices=1, callbacks=[callback], **engine)
    model, optimizer = setup(engine, Blocks(), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
    batches = torch.randn(steps * micro_batches, 256, 32)
    losses = []
    for number, x in enumerate(batches):
        loss = model(x).float().square().mean() / micro_batches
        engine.backward(loss)
        if number % micro_batches == micro_batches - 1:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize(
    ("arguments", "tolerance"),
    [
        pytest.param({}, 1e-5, id="plain"),
        pytest.param(
            {"setup": apart, "micro_batches": 2, "precision": "bf16-mixed"},
            torch.finfo(torch.bfloat16).eps,
            id="set up apart, accumulating in bf16",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_loop_is_kept_under_its_budget(arguments: dict[str, Any], tolerance: float, tmp_path: Path) -> None:
    ample = AutoCheckpoint(AMPLE, progress=False, log_every_n_steps=1)
    _, default = run(ample, **arguments)
    ample.close()
    callback = AutoCheckpoint(binding(ample.plan), progress=False, log_every_n_steps=1)
    logger = CSVLogger(tmp_path)
    model, losses = run(callback, loggers=logger, **arguments)
    assert_kept(callback, losses, default, tolerance, Path(logger.log_dir))
    assert list(model.state_dict()) == list(Blocks().state_dict())
    logger.finalize("success")
    assert "dtr/peak_bytes/rank0" in (Path(logger.log_dir) / "metrics.csv").read_text()
    callback.close()
    assert model.module._compiled_call_impl is None


def test_the_package_of_its_own() -> None:
    other = pytest.importorskip("lightning_fabric")
    callback = AutoCheckpoint(AMPLE, progress=False)
    run(callback, fabric=other.Fabric, steps=1)
    assert callback.plan.is_default
    callback.close()


def test_no_plan_fits() -> None:
    callback = AutoCheckpoint("1KB", progress=False)
    with pytest.raises(BudgetInfeasible):
        run(callback)
    callback.close()


def test_a_model_that_is_compiled_is_refused() -> None:
    engine = fabric_module.Fabric(accelerator="cpu", devices=1, callbacks=AutoCheckpoint(AMPLE))
    with pytest.raises(ConfigError, match="is compiled with"):
        engine.setup(torch.compile(Blocks()))


def test_evaluation_and_models_without_an_optimizer_are_left_alone() -> None:
    callback = AutoCheckpoint(AMPLE)
    engine = fabric_module.Fabric(accelerator="cpu", devices=1, callbacks=callback)
    model = engine.setup(Blocks())
    assert callback.session is None
    assert callback.report == "nothing is prepared yet"
    optimizer = engine.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    assert callback.session.optimizers == [optimizer.optimizer]
    with torch.no_grad():
        model(torch.randn(2, 32))
    assert callback.plan is None
    callback.close()
