"""`configs/`: each yaml is one that Accelerate and this library take."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from accelerate.commands.config.config_args import load_config_from_file

from dtr_integrations._autoload import split_section
from dtr_integrations.config import DTRConfig

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_has_a_budget_and_is_accelerates(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    assert f"accelerate launch --config configs/{path.name} train.py" in text
    section, rest = split_section(text)
    (tmp_path / "dtr.yaml").write_text(section)
    (tmp_path / "rest.yaml").write_text(rest)
    config = DTRConfig.from_any(str(tmp_path / "dtr.yaml"))
    assert config.run_dir == f"runs/{path.stem.removesuffix('-70GB')}"
    accelerates = load_config_from_file(str(tmp_path / "rest.yaml"))
    processes, kind = path.stem.split("-")[1], path.stem.split("-")[0]
    assert processes.startswith(str(accelerates.num_processes))
    expected = {"cpu": "MULTI_CPU", "ddp": "MULTI_GPU", "fsdp2": "FSDP"}[kind]
    assert accelerates.distributed_type.value == expected
    if kind == "fsdp2":
        assert accelerates.fsdp_config["fsdp_version"] == 2
        assert not accelerates.fsdp_config["fsdp_activation_checkpointing"]
    if "70GB" in path.stem:
        assert config.budget == "70GB"


def test_there_is_one_for_each_kind() -> None:
    assert {path.stem.split("-")[0] for path in CONFIGS} == {"cpu", "ddp", "fsdp2"}
