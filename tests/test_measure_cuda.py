"""The CUDA ways, against a stand-in for torch's allocator statistics, and on a real GPU if there is one."""

import pytest
import torch

from dtr_integrations.measure import StepPeak, TracedPeak, measure_step, trace_step


def test_on_cuda_the_allocator_is_asked(fake_cuda):
    def step():
        fake_cuda.allocated += 4096
        fake_cuda.peak = fake_cuda.allocated
        fake_cuda.allocated -= 4096

    peak = measure_step(step, device="cuda")
    assert peak == StepPeak(
        peak_bytes=4096, exact=True, source="cuda_allocator", peak_reserved_bytes=2_000_000
    )
    assert fake_cuda.resets == 1


def test_traced_on_cuda(fake_cuda, monkeypatch):
    known = torch.empty(300)  # 1200 B: three blocks of 512
    monkeypatch.setattr("dtr_integrations.measure.step_trace.storages_of", lambda tensors: [CudaStorage()])
    with trace_step(device="cuda", known=[known]) as trace:
        fake_cuda.peak = 1_500_000
        fake_cuda.allocated = 1_200_000
    assert trace.peak == TracedPeak(
        peak_bytes=501_536,
        known_bytes=1536,
        end_bytes=201_536,
        exact=True,
        source="cuda_allocator",
        peak_allocated_bytes=1_500_000,
        peak_reserved_bytes=2_000_000,
        non_torch_bytes=1_100_000,
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_real_device():
    def step():
        torch.empty(1 << 20, dtype=torch.uint8, device="cuda")

    assert measure_step(step).peak_bytes == 1 << 20
    old = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    with trace_step(known=[old]) as trace:
        del old
        step()
    assert trace.peak.peak_bytes == trace.peak.known_bytes == 1 << 20
    assert trace.peak.end_bytes == 0


class CudaStorage:
    """As much of a storage as the trace looks at."""

    device = torch.device("cuda", 0)

    def nbytes(self):
        return 1200


class FakeCuda:
    """The numbers that `torch.cuda` would give."""

    def __init__(self):
        self.allocated = 1_000_000
        self.peak = 0
        self.resets = 0

    def reset(self, device=None):
        self.peak = self.allocated
        self.resets += 1


@pytest.fixture
def fake_cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", fake.reset)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: fake.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: fake.peak)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 1_900_000)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device=None: 2_000_000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (97_000_000, 100_000_000))
    return fake
