"""`AutoCheckpoint(verify=True)`: a Lightning run proves its plan first and then trains as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning_models import fit, models
from torch.utils.checkpoint import checkpoint

import dtr_integrations
from dtr_integrations.apply import dispatch
from dtr_integrations.errors import VerificationFailed

lightning = pytest.importorskip("lightning.pytorch")


def test_the_proof_leaves_no_trace_in_the_run() -> None:
    runs = []
    for verify in (False, True):
        torch.manual_seed(3)
        module = models(lightning).Classifier()
        callback = dtr_integrations.AutoCheckpoint("1GB", progress=False, verify=verify)
        trainer = fit(lightning, module, callback, max_steps=3, gradient_clip_val=0.5, logger=False)
        assert callback.plan is not None
        runs.append((module, trainer))
    (one, trainer_of_one), (other, trainer_of_other) = runs
    assert one.losses == other.losses
    assert one.training_steps == other.training_steps == 3
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))
    assert trainer_of_one.fit_loop.state_dict() == trainer_of_other.fit_loop.state_dict()
    assert trainer_of_one.callback_metrics == trainer_of_other.callback_metrics


def test_a_run_that_fails_the_proof_ends_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def replayed(call: Any, *_: Any) -> Any:
        return lambda *args: checkpoint(call, *args, use_reentrant=False)

    monkeypatch.setattr(dispatch, "compile_call", replayed)
    module = models(lightning).Classifier()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    callback = dtr_integrations.AutoCheckpoint("1GB", progress=False, verify=True)
    with pytest.raises(VerificationFailed, match=r"buffer net\.norm\.running_mean"):
        fit(lightning, module, callback, max_steps=3)
    assert module.losses == []
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert module.net._compiled_call_impl is None
