"""The CUDA caching allocator's own peaks over a stretch of the run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["CudaPeaks", "CudaWindow"]


@dataclass(frozen=True, kw_only=True)
class CudaPeaks:
    """Bytes of one CUDA device over the window.

    `non_torch_bytes` is of the window's end, and other processes on the device count in it.
    """

    allocated_before_bytes: int
    allocated_after_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    non_torch_bytes: int


class CudaWindow:
    """`open()` resets the allocator's peak statistics (the process has one set), `close()` reads them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated_before_bytes = 0

    def open(self) -> None:
        """Waits for the device and starts counting."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._allocated_before_bytes = torch.cuda.memory_allocated(self._device)

    def close(self) -> CudaPeaks:
        """Waits for the device and reads."""
        torch.cuda.synchronize(self._device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return CudaPeaks(
            allocated_before_bytes=self._allocated_before_bytes,
            allocated_after_bytes=torch.cuda.memory_allocated(self._device),
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(self._device),
            non_torch_bytes=total_bytes - free_bytes - torch.cuda.memory_reserved(self._device),
        )
