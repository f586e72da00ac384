"""Lightning runs that take longer: two ranks, and a batch of another size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lightning_models import BATCH, fit, loader, models
from torch.utils.data import DataLoader, Subset

pl = pytest.importorskip("lightning.pytorch")

pytestmark = pytest.mark.slow

RANK_SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import lightning.pytorch as pl
from lightning_models import fit, models
from dtr_integrations import AutoCheckpoint
callback = AutoCheckpoint("1GB", run_dir={run_dir!r}, log_every_n_steps=1, progress=False)
fit(pl, models(pl).Whole(), callback, strategy="ddp", devices=2, max_epochs=2)
assert "" not in callback.session.planned.captured.called
"""


def test_two_ranks_plan_alone_and_log_apart(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANK_SCRIPT.format(tests=str(Path(__file__).parent), run_dir=str(tmp_path)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        lines = [json.loads(line) for line in (tmp_path / f"peaks-rank{rank}.jsonl").read_text().splitlines()]
        assert {(line["rank"], line["world_size"]) for line in lines} == {(rank, 2)}
        assert json.loads((tmp_path / f"plan-rank{rank}.json").read_text())["budget_bytes"] == 10**9


def test_a_smaller_last_batch_is_trained_and_not_measured() -> None:
    from dtr_integrations import AutoCheckpoint

    callback = AutoCheckpoint("1GB", log_every_n_steps=1, progress=False)
    data = Subset(loader(2).dataset, range(BATCH + 300))
    trainer = fit(pl, models(pl).Classifier(), callback, train=DataLoader(data, BATCH), max_epochs=3)
    assert trainer.global_step == 6
    assert [report.step for report in callback.reports] == [3, 5]
    assert all(report.prediction_error <= 0.01 for report in callback.reports)
