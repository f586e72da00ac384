"""The peak of a step that we may run ourselves: twice, and the second run counts."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ProfilerActive
from ._recorder import CpuRecorder, profiler_in_use
from .address_ledger import MARK_PREFIX, AddressLedger, Event, Mark, live_bytes_over_time
from .cuda_window import CudaWindow

__all__ = ["StepPeak", "measure_step", "measured_device"]

_BEGIN = MARK_PREFIX + "second-step-begins"
_END = MARK_PREFIX + "second-step-ends"


@dataclass(frozen=True, kw_only=True)
class StepPeak:
    """The most that one step holds at once.

    Attributes:
        peak_bytes: above the bytes that were live before the step.
        exact: every birth and death was seen. False on CPU if a block from before the measurement died in the
            step: `peak_bytes` is then an upper bound.
        source: `cpu_profiler` (bytes of tensor storages) or `cuda_allocator` (blocks, rounded to 512 bytes).
        peak_reserved_bytes: CUDA only: the allocator's reserved peak, all that was reserved before included.
    """

    peak_bytes: int
    exact: bool
    source: str
    peak_reserved_bytes: int | None = None


def measure_step(
    step: Callable[[], Any],
    *,
    device: torch.device | str | None = None,
    cleanup: Callable[[], Any] | None = None,
) -> StepPeak:
    """Runs `step` twice and measures the second run: the steady state, with optimizer state and caches in
    place.

    On CPU both runs, and the cleanup after each, happen in one profiler session, which sees every block's
    birth and death: the same byte count every time. On CUDA the allocator's own statistics are read (and
    reset).

    Args:
        step: one whole step, called without arguments; its result is dropped.
        device: default: CUDA if there is one, else CPU.
        cleanup: called after each run, outside of what counts; mostly
            `lambda: optimizer.zero_grad(set_to_none=True)`. Whatever the first run leaves alive, gradients
            without a cleanup too, counts as live before the second and so not to its peak.

    Raises:
        ProfilerActive: on CPU, inside of a torch profiler or around one that `step` starts: only one can run.
        ValueError: a device that is neither CPU nor CUDA.
        Exception: whatever `step` or `cleanup` raises; the profiler is closed by then.
    """
    target = measured_device(device)
    cleanup = cleanup or (lambda: None)
    if target.type == "cuda":
        return _measure_on_cuda(step, target, cleanup)
    return _measure_on_cpu(step, cleanup)


def call_peak_bytes(call: Callable[[], Any]) -> int:
    """Bytes that one short call on CPU holds at most, its result included: milliseconds, where `measure_step`
    takes tenths of a second. `call` runs twice. Raises `ProfilerActive` as `measure_step` does."""
    reason = profiler_in_use()
    if reason is not None:
        raise ProfilerActive(f"the call's peak cannot be measured: {reason}.")
    call()  # what a library keeps from its first call on is not the call's
    recorder = CpuRecorder()
    recorder.start()
    try:
        result = call()
    except BaseException:
        recorder.discard()
        raise
    events = recorder.stop()
    del result
    if recorder.gave_way:
        raise ProfilerActive("the call's peak cannot be measured: it starts a torch profiler of its own.")
    return max((live for _, live in live_bytes_over_time(events, AddressLedger(), {})), default=0)


def measured_device(device: torch.device | str | None) -> torch.device:
    """The given device, else CUDA if there is one, else CPU. Raises ValueError for other kinds."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = torch.device(device)
    if target.type not in ("cpu", "cuda"):
        raise ValueError(f"peaks on device {target} cannot be measured; supported are 'cpu' and 'cuda'")
    return target


def _measure_on_cpu(step: Callable[[], Any], cleanup: Callable[[], Any]) -> StepPeak:
    reason = profiler_in_use()
    if reason is not None:
        raise ProfilerActive(
            f"the step's peak cannot be measured: {reason}. Stop it first, or measure outside of it."
        )
    recorder = CpuRecorder()
    recorder.start()
    try:
        step()
        cleanup()
        gc.collect()  # else the first run's cycles could die somewhere in the second, at the collector's whim
        recorder.mark(_BEGIN)
        step()
        recorder.mark(_END)
        cleanup()
    except BaseException:
        recorder.discard()
        raise
    events = recorder.stop()
    if recorder.gave_way:
        raise ProfilerActive(
            "the step's peak cannot be measured: the step starts a torch profiler of its own."
        )
    return _peak_between_marks(events)


def _peak_between_marks(events: list[Event]) -> StepPeak:
    begin = next(
        index for index, event in enumerate(events) if isinstance(event, Mark) and event.name == _BEGIN
    )
    end = next(index for index, event in enumerate(events) if isinstance(event, Mark) and event.name == _END)
    ledger = AddressLedger()
    for _ in live_bytes_over_time(events[:begin], ledger, {}):
        pass
    before_bytes, foreign_frees, unseen_frees = ledger.live_bytes, ledger.foreign_frees, ledger.unseen_frees
    peak_bytes = max(
        (live_bytes for _, live_bytes in live_bytes_over_time(events[begin:end], ledger, {})),
        default=before_bytes,
    )
    return StepPeak(
        peak_bytes=max(0, peak_bytes - before_bytes),
        exact=(ledger.foreign_frees, ledger.unseen_frees) == (foreign_frees, unseen_frees),
        source="cpu_profiler",
    )


def _measure_on_cuda(step: Callable[[], Any], device: torch.device, cleanup: Callable[[], Any]) -> StepPeak:
    step()
    cleanup()
    gc.collect()
    window = CudaWindow(device)
    window.open()
    step()
    peaks = window.close()
    cleanup()
    return StepPeak(
        peak_bytes=peaks.peak_allocated_bytes - peaks.allocated_before_bytes,
        exact=True,
        source="cuda_allocator",
        peak_reserved_bytes=peaks.peak_reserved_bytes,
    )
