"""The peak of one step in the middle of a run that somebody else drives.

No second run is possible here, and the profiler sees no death of a block older than its session. So the
tensors that are alive at the start and may die inside (`known`: old gradients, the batch) get a death notice:
a weak reference to the storage, whose callback drops a mark into the profiler's record at the moment that the
storage dies, even if only C++ held it. All else is counted by address from birth to death (`address_ledger`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch

from ._recorder import CpuRecorder, profiler_in_use
from .address_ledger import MARK_PREFIX, AddressLedger, Mark, downsampled, live_bytes_over_time
from .cuda_window import CudaWindow
from .step_peak import measured_device
from .storages import storages_of

__all__ = ["StepTrace", "TracedPeak", "trace_step"]


@dataclass(frozen=True, kw_only=True)
class TracedPeak:
    """What one traced step held, in bytes.

    Attributes:
        peak_bytes: the most, over the step, of (known bytes alive + bytes born inside and alive). Without
            what lives for good; the caller adds its `static_bytes`. Optimizer state that is made in the step
            counts as born inside, so the first step's is both here and in `static_bytes` as taken afterwards.
        known_bytes: of the `known` tensors at the start.
        end_bytes: alive at the end, known or born inside.
        exact: every death was seen. If not, `peak_bytes` is an upper bound.
        source: `cpu_profiler` or `cuda_allocator`.
        peak_allocated_bytes: CUDA only: the allocator's own total, static memory included.
        peak_reserved_bytes: CUDA only.
        non_torch_bytes: CUDA only: taken from the device but not by torch's allocator, at the end of the
            step.
        timeline: CPU only: (nanoseconds since the first point, live bytes), the highest point of each
            stretch.
    """

    peak_bytes: int
    known_bytes: int
    end_bytes: int
    exact: bool
    source: str
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    non_torch_bytes: int | None = None
    timeline: tuple[tuple[int, int], ...] = ()


def trace_step(
    *,
    device: torch.device | str | None = None,
    known: Iterable[torch.Tensor] = (),
    timeline_points: int = 512,
) -> StepTrace:
    """A context manager around one step; or call `open()` before the step and `close()` after it.

        with trace_step(known=[*gradients, *tensors_in(batch)]) as trace:
            ...
        trace.peak  # TracedPeak, or None: trace.skipped says why

    Args:
        device: default: CUDA if there is one, else CPU.
        known: the tensors alive now, apart from static memory, that may die inside: gradients and batch. Each
            storage counts once. Not parameters, buffers or optimizer state. No reference is kept.
        timeline_points: at most so many points of the timeline are kept; 0 for none.

    Raises:
        ValueError: a device that is neither CPU nor CUDA.
    """
    target = measured_device(device)
    storages = [storage for storage in storages_of(known) if storage.device.type == target.type]
    if target.type == "cuda":
        return StepTrace(_CudaWay(target), storages)
    return StepTrace(_CpuWay(timeline_points), storages)


class _Way(Protocol):
    """How the bytes of one kind of device are traced."""

    def open(self, known: list[torch.UntypedStorage]) -> str | None:
        """Starts; or says why not."""

    def close(self) -> TracedPeak | None:
        """Ends; None if somebody's profiler was started meanwhile."""

    def abandon(self) -> None:
        """Ends without a result."""


class StepTrace:
    """The trace of one step; made by `trace_step`.

    Attributes:
        peak: the result once closed; None before, when skipped, and when the step raised.
        skipped: why there is no result: somebody else's profiler was active at the start or started inside.
            Theirs goes on undisturbed.
    """

    peak: TracedPeak | None
    skipped: str | None

    def __init__(self, way: _Way, known: list[torch.UntypedStorage]) -> None:
        self.peak = None
        self.skipped = None
        self._way = way
        self._known = known
        self._is_open = False

    def open(self) -> None:
        """Starts the trace; call it once, just before the step."""
        known, self._known = self._known, []  # or our own list would keep them alive
        self.skipped = self._way.open(known)
        self._is_open = self.skipped is None

    def close(self) -> None:
        """Ends the trace and works out `peak`. Does nothing if no trace is open."""
        if self._is_open:
            self._is_open = False
            self.peak = self._way.close()
            if self.peak is None:
                self.skipped = "a torch profiler was started inside of the step"

    def abandon(self) -> None:
        """Ends the trace without a result: for a step that has failed."""
        if self._is_open:
            self._is_open = False
            self._way.abandon()

    def __enter__(self) -> StepTrace:
        self.open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None:
            self.close()
        else:
            self.abandon()


class _CudaWay:
    def __init__(self, device: torch.device) -> None:
        self._window = CudaWindow(device)
        self._known_bytes = 0

    def open(self, known: list[torch.UntypedStorage]) -> str | None:
        # The allocator counts whole blocks, and so must we to compare.
        self._known_bytes = sum(-(-storage.nbytes() // 512) * 512 for storage in known)
        self._window.open()
        return None

    def close(self) -> TracedPeak | None:
        peaks = self._window.close()
        others_bytes = peaks.allocated_before_bytes - self._known_bytes
        return TracedPeak(
            peak_bytes=peaks.peak_allocated_bytes - others_bytes,
            known_bytes=self._known_bytes,
            end_bytes=peaks.allocated_after_bytes - others_bytes,
            exact=True,
            source="cuda_allocator",
            peak_allocated_bytes=peaks.peak_allocated_bytes,
            peak_reserved_bytes=peaks.peak_reserved_bytes,
            non_torch_bytes=peaks.non_torch_bytes,
        )

    def abandon(self) -> None:
        pass


class _DeathNotice(weakref.ref):
    __slots__ = ("marker", "n_bytes", "name")

    marker: Any
    name: str
    n_bytes: int


def _report_death(notice: _DeathNotice) -> None:
    # Runs wherever the storage dies, perhaps deep inside of autograd: it must touch as little as possible.
    with notice.marker:
        pass


class _CpuWay:
    def __init__(self, timeline_points: int) -> None:
        self._timeline_points = timeline_points
        self._recorder = CpuRecorder()
        self._notices: list[_DeathNotice] = []

    def open(self, known: list[torch.UntypedStorage]) -> str | None:
        reason = profiler_in_use()
        if reason is not None:
            return reason
        for number, storage in enumerate(known):
            notice = _DeathNotice(storage, _report_death)
            notice.name = f"{MARK_PREFIX}death-{number}"
            notice.marker = CpuRecorder.marker(notice.name)
            notice.n_bytes = storage.nbytes()
            self._notices.append(notice)
        self._recorder.start()
        return None

    def abandon(self) -> None:
        self._notices.clear()
        self._recorder.discard()

    def close(self) -> TracedPeak | None:
        dead = {notice.name for notice in self._notices if notice() is None}
        bytes_dying_at = {notice.name: notice.n_bytes for notice in self._notices}
        self._notices.clear()
        events = self._recorder.stop()
        if self._recorder.gave_way:
            return None
        seen = {event.name for event in events if isinstance(event, Mark)}
        known_bytes = sum(bytes_dying_at.values())
        ledger = AddressLedger(known_bytes)
        points = list(live_bytes_over_time(events, ledger, bytes_dying_at))
        if points:
            begin_ns = points[0][0]
            points = [
                (time_ns - begin_ns, live_bytes) for time_ns, live_bytes in [(begin_ns, known_bytes), *points]
            ]
        return TracedPeak(
            peak_bytes=max((live_bytes for _, live_bytes in points), default=known_bytes),
            known_bytes=known_bytes,
            end_bytes=ledger.live_bytes,
            exact=not ledger.unseen_frees and dead <= seen,
            source="cpu_profiler",
            timeline=downsampled(points, self._timeline_points),
        )
