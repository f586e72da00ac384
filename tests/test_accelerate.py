"""`AutoCheckpointPlugin`, `install` and the launcher, in real loops of Accelerate on one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from front_doors import AMPLE, WithLoss, assert_kept, binding
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dtr_integrations.errors import BudgetInfeasible, ConfigError, PlanWarning

accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402

from dtr_integrations.accelerate import AutoCheckpointPlugin, install  # noqa: E402


@pytest.fixture(autouse=True)
def _alone() -> Any:
    """Accelerate's state is the process's."""
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._shared_state.clear()


def accelerator(**arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return accelerate.Accelerator(cpu=True, **arguments)


def run(engine: Any, *, steps: int = 4) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model = WithLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(256 * steps, 32)), batch_size=256)
    model, optimizer, loader = engine.prepare(model, optimizer, loader)
    losses = []
    for (x,) in loader:
        with engine.accumulate(model):
            optimizer.zero_grad()
            loss = model(x)["loss"]
            engine.backward(loss)
            optimizer.step()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize(
    ("arguments", "tolerance"),
    [
        pytest.param({}, 1e-5, id="plain"),
        pytest.param(
            {"gradient_accumulation_steps": 2, "mixed_precision": "bf16"},
            torch.finfo(torch.bfloat16).eps,
            id="accumulating in bf16",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_loop_is_kept_under_its_budget(arguments: dict[str, Any], tolerance: float, tmp_path: Path) -> None:
    engine = accelerator(**arguments)
    ample = install(engine, budget=AMPLE, progress=False, log_every_n_steps=1)
    _, default = run(engine)
    ample.close()
    for state in (AcceleratorState, PartialState, GradientState):
        state._shared_state.clear()

    plugin = AutoCheckpointPlugin(
        budget=binding(ample.plan),
        progress=False,
        log_every_n_steps=1,
        run_dir=str(tmp_path),
    )
    engine = accelerator(dynamo_plugin=plugin, **arguments)
    model, losses = run(engine)
    installed = plugin.installed
    assert_kept(installed, losses, default, tolerance, tmp_path)
    assert list(engine.get_state_dict(model)) == list(WithLoss().state_dict())
    installed.close()
    assert model._compiled_call_impl is None


def test_no_plan_fits() -> None:
    engine = accelerator()
    installed = install(engine, budget="1KB", progress=False)
    with pytest.raises(BudgetInfeasible):
        run(engine)
    installed.close()


def test_an_accelerator_that_compiles_is_refused() -> None:
    with pytest.raises(ConfigError, match="compiles its models itself"):
        install(accelerator(dynamo_backend="inductor"), budget=AMPLE)


def test_a_second_model_is_named() -> None:
    engine = accelerator()
    first, second = WithLoss(), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    engine.prepare(first, second, *optimizers)
    with pytest.warns(PlanWarning, match="a second model, Linear, runs eagerly"):
        install(engine, budget=AMPLE, progress=False).close()


LOOP = """
import sys
import torch
from accelerate import Accelerator
from torch import nn
engine = Accelerator()
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = engine.prepare(model, optimizer)
for _ in range(3):
    optimizer.zero_grad()
    engine.backward(model(torch.ones(64, 32)).square().mean())
    optimizer.step()
"""


def test_accelerate_launch_with_a_section_and_an_unchanged_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f'{LOOP}assert sys.argv[1:] == ["--config", "mine.yaml"], sys.argv\n')
    (tmp_path / "dtr.yaml").write_text(
        f"dtr:\n  budget: 1GB\n  run_dir: {tmp_path}/logs\n"
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nuse_cpu: true\nnum_processes: 1\n"
        "mixed_precision: 'no'\n"
    )
    command = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config", "dtr.yaml", "train.py"]
    done = subprocess.run(
        [sys.executable, *command, "--config", "mine.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "logs" / "peaks-rank0.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["budget_bytes"] == 10**9
    assert record["plan_digest"]


def test_the_config_for_two_processes_starts_two(tmp_path: Path) -> None:
    """The literal command, with the file of this repository."""
    config = Path(__file__).parents[1] / "configs" / "cpu-2proc.yaml"
    is_two_on_cpu = "assert (engine.num_processes, engine.device.type) == (2, 'cpu'), engine.state\n"
    (tmp_path / "train.py").write_text(LOOP + is_two_on_cpu)
    launcher = Path(sys.executable).with_name("accelerate")
    done = subprocess.run(
        [str(launcher), "launch", "--config", str(config), "train.py"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peaks = [tmp_path / "runs" / "cpu-2proc" / f"peaks-rank{rank}.jsonl" for rank in range(2)]
    records = [json.loads(path.read_text().splitlines()[0]) for path in peaks]
    assert [record["rank"] for record in records] == [0, 1]
    assert len({record["plan_digest"] for record in records}) == 1
    for record in records:
        assert record["world_size"] == 2
        assert record["peak_allocated_bytes"] <= record["budget_bytes"]
