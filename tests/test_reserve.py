"""The reserve: its lines by arithmetic, what the user sets, and what measured steps put in their place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import dtr_integrations
from dtr_integrations.core.peak import PeakReport
from dtr_integrations.distributed import Calibration, reserve_for
from dtr_integrations.distributed.nccl import communicator_bytes, communicators
from dtr_integrations.errors import PlanWarning
from dtr_integrations.measure import TracedPeak
from dtr_integrations.report import reserve_table, to_text

MIB = 1 << 20
GB = 10**9
LINES = {"nccl", "context", "workspace", "fragmentation", "slack"}


def report(**changes: Any) -> PeakReport:
    """Of a step of 60 GB on a GPU of 80, that took 1.2 GB besides torch and 2 GB of fragments."""
    values = {
        "rank": 0,
        "world_size": 8,
        "step": 2,
        "budget_bytes": 70 * GB,
        "predicted_allocated_bytes": 60 * GB,
        "peak_allocated_bytes": 60 * GB + 67_108_864,
        "peak_reserved_bytes": 62 * GB + 67_108_864,
        "non_torch_bytes": 1_200_000_000,
        "reserve_bytes": 3 * GB,
        "static_bytes": 16 * GB,
        "default_allocated_bytes": 90 * GB,
        "plan_digest": "abc",
        "source": "cuda_allocator",
    }
    return PeakReport(**{**values, **changes})


@pytest.mark.parametrize(
    ("ranks", "mib"),
    [
        (1, 0),
        (2, 24 * 2 * 12),  # channels, neighbours, a receive buffer of 10 MiB and flags of 2 MiB
        (4, 24 * 2 * 12 + 16 * 2 * 4),  # and of NVLink SHARP 2 MiB a channel and rank
        (8, 24 * 2 * 12 + 16 * 2 * 8),
        (64, 24 * 4 * 12 + 16 * 2 * 8),
        (512, 24 * 4 * 12 + 16 * 2 * 8),
    ],
)
def test_what_a_communicator_takes(ranks: int, mib: int) -> None:
    assert communicator_bytes(ranks, environment={}) == mib * MIB


@pytest.mark.parametrize(("ranks", "reported_mib"), [(2, 544), (4, 688)])
def test_what_was_reported_of_a_machine_is_within_a_tenth(ranks: int, reported_mib: int) -> None:
    """Four A100 (NVIDIA/nccl issue 964)."""
    modelled = communicator_bytes(ranks, environment={"NCCL_NVLS_ENABLE": "1"}) / MIB
    assert reported_mib <= modelled <= 1.1 * reported_mib


@pytest.mark.parametrize(
    ("environment", "mib"),
    [
        ({"NCCL_MAX_NCHANNELS": "8"}, 8 * 2 * 12 + 8 * 2 * 8),
        ({"NCCL_MIN_NCHANNELS": "32"}, 32 * 2 * 12 + 16 * 2 * 8),
        ({"NCCL_BUFFSIZE": str(1 << 20), "NCCL_NVLS_ENABLE": "0"}, 24 * 2 * 10),
        ({"NCCL_LL128_BUFFSIZE": "122880", "NCCL_NVLS_ENABLE": "0"}, 24 * 2 * 8),
        ({"LOCAL_WORLD_SIZE": "4"}, 24 * 4 * 12 + 16 * 2 * 4),
        ({"NCCL_BUFFSIZE": "many", "NCCL_MAX_NCHANNELS": ""}, 24 * 2 * 12 + 16 * 2 * 8),
    ],
)
def test_nccls_own_settings_count(environment: dict[str, str], mib: int) -> None:
    assert communicator_bytes(8, environment=environment) == mib * MIB


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A process group of four ranks of which this process is the first, and a group of two of them."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    torch.distributed.new_group([0, 1])
    torch.distributed.new_group([0])
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
def test_the_groups_that_exist_are_counted() -> None:
    assert sorted(communicators("fake")) == [2, 4]
    assert list(communicators("nccl")) == []
    assert reserve_for("cuda", 80 * GB, {}).lines["nccl"] == 0


def test_without_a_process_group_there_is_no_communicator() -> None:
    assert list(communicators()) == []
    assert reserve_for("cuda", 80 * GB, {}).lines["nccl"] == 0


def test_on_cpu_every_line_is_zero() -> None:
    reserve = reserve_for("cpu", GB, {}, world_size=8)
    assert reserve.lines == dict.fromkeys(LINES, 0)
    assert reserve.total_bytes == 0


def test_a_laptop_asks_for_a_job_of_eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    one = communicator_bytes(8, environment={})
    reserve = reserve_for("cuda", 80 * GB, {}, world_size=8)
    assert reserve.lines == {
        "nccl": one,
        "context": 500_000_000,
        "workspace": 64 * MIB,
        "fragmentation": 1_600_000_000,
        "slack": 0,
    }
    assert reserve.total_bytes == sum(reserve.lines.values())
    assert reserve_for("cuda", 80 * GB, {}, world_size=8, communicators=3).lines["nccl"] == 3 * one
    mesh = reserve_for("cuda", 80 * GB, {}, world_size=16, communicators=(8, 2)).lines["nccl"]
    assert mesh == one + communicator_bytes(2, environment={})
    assert reserve_for("cuda", 80 * GB, {}, world_size=8, backend="gloo").lines["nccl"] == 0
    assert reserve_for("cuda", 80 * GB, {}, world_size=1).lines["nccl"] == 0


def test_what_the_user_sets() -> None:
    assert reserve_for("cuda", GB, 5, world_size=8).lines == {"slack": 5}
    lines = reserve_for("cuda", 80 * GB, {"nccl": 7, "slack": 9}, world_size=8).lines
    assert (lines["nccl"], lines["slack"], lines["context"]) == (7, 9, 500_000_000)


def test_measured_lines_replace_modelled_ones() -> None:
    calibration = Calibration("cuda", {"slack": 9})
    before = calibration.reserve(70 * GB).lines
    assert before == reserve_for("cuda", 70 * GB, {"slack": 9}).lines
    calibration.measure(report())
    measured = {"not torch's": 1_200_000_000, "workspace": 64 * MIB, "fragmentation": 2 * GB, "slack": 9}
    assert calibration.reserve(70 * GB).lines == measured
    assert sum(report().beside_prediction.values()) == report().used_bytes - 60 * GB
    calibration.measure(report(non_torch_bytes=GB, peak_reserved_bytes=63 * GB))  # of each the highest
    fragments = 63 * GB - report().peak_allocated_bytes
    assert calibration.reserve(70 * GB).lines == {**measured, "fragmentation": max(fragments, 2 * GB)}


def test_static_memory_that_has_grown_is_not_counted_twice() -> None:
    calibration = Calibration("cuda", {})
    calibration.measure(report(), known_bytes=60 * MIB)
    assert calibration.reserve(70 * GB).lines["workspace"] == 4 * MIB


def test_measuring_replaces_no_line_of_the_users() -> None:
    calibration = Calibration("cuda", {"nccl": GB, "fragmentation": 3 * GB})
    calibration.measure(report())
    lines = calibration.reserve(70 * GB).lines
    assert lines["nccl"] == GB
    assert lines["fragmentation"] == 3 * GB
    assert lines["not torch's"] == 200_000_000  # what is left of 1.2 GB
    whole = Calibration("cuda", 2 * GB)
    whole.measure(report())
    assert whole.reserve(70 * GB).lines == {"slack": 2 * GB}


def test_what_no_line_has_is_learnt() -> None:
    over = report(non_torch_bytes=9 * GB)  # 71 GB and the workspaces, of 70
    modelled = Calibration("cuda", {})
    modelled.measure(over)
    modelled.learn(over)
    assert modelled.reserve(70 * GB).total_bytes == over.used_bytes - 60 * GB
    for fixed in ({"nccl": GB, "context": GB}, 2 * GB, {"slack": 0}):
        calibration = Calibration("cuda", fixed)
        calibration.measure(over)
        calibration.learn(over)
        assert calibration.reserve(70 * GB).total_bytes == over.used_bytes - 60 * GB
    slack = Calibration("cuda", {"slack": GB})
    slack.measure(over)
    slack.learn(over)
    assert slack.reserve(70 * GB).total_bytes == over.used_bytes - 59 * GB


def test_on_cpu_the_excess_is_learnt() -> None:
    over = report(peak_reserved_bytes=None, non_torch_bytes=None, peak_allocated_bytes=71 * GB)
    calibration = Calibration("cpu", {})
    calibration.measure(over)
    assert calibration.reserve(70 * GB).total_bytes == 0
    calibration.learn(over)
    assert calibration.reserve(70 * GB).total_bytes == 11 * GB
    again = dataclasses.replace(over, predicted_allocated_bytes=59 * GB)  # 12 GB are missing, not 23
    calibration.learn(again)
    assert calibration.reserve(70 * GB).total_bytes == 12 * GB


def test_a_session_plans_again_with_what_it_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of a CUDA step, handed to a session on the CPU."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(256, 64)
    budget = 1_500_000
    session = dtr_integrations.auto_checkpoint(
        model, optimizer=optimizer, budget=f"{budget}B", progress=False, log_every_n_steps=1
    )

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    session.step(step)
    first = session.plan
    assert first.reserve_bytes == 0
    excess = budget - first.predicted_allocated_bytes + 1
    peak = TracedPeak(
        peak_bytes=0,
        known_bytes=0,
        end_bytes=0,
        exact=True,
        source="cuda_allocator",
        peak_allocated_bytes=first.predicted_allocated_bytes,
        peak_reserved_bytes=first.predicted_allocated_bytes + excess // 2,
        non_torch_bytes=excess - excess // 2,
    )
    monkeypatch.setattr(session._peaks, "take", lambda: (peak, first.static_bytes))
    with pytest.warns(PlanWarning, match="above the budget"):
        session.step(step)
    monkeypatch.undo()
    session.step(step)
    assert session.plan.reserve["not torch's"] == excess - excess // 2
    assert session.plan.reserve["fragmentation"] == excess // 2
    assert session.plan.reserve_bytes == excess
    assert session.plan.required_bytes <= budget
    assert session.plan.digest != first.digest
    assert "Reserve" in session.report
    session.close()


def test_the_table() -> None:
    from test_report import plan

    assert reserve_table(plan(), [report(peak_reserved_bytes=None)]) is None
    text = to_text(reserve_table(plan(), [report(), report(non_torch_bytes=GB)]))
    for words in ("in the plan MB", "nccl", "not torch's", "1,200.00", "2,000.00", "67.11", "3.00"):
        assert words in text
