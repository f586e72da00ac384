"""Measures the steps of a run that somebody else drives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .._python_state import inside
from ..measure import StepTrace, TracedPeak, static_bytes, tensors_in, trace_step
from ..measure.storages import storages_of


class StepPeaks:
    """Traces stretches of an optimizer step (its micro-batches, or all of it) and keeps the highest."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], device: torch.device
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._device = device
        self._static_at_open = 0
        self._highest: tuple[TracedPeak, int] | None = None

    @contextlib.contextmanager
    def tracing(self, batch: Any = ()) -> Iterator[None]:
        """Trace the block, which may let go of the batch."""
        trace = self.open(batch)
        del batch
        try:
            yield
        except BaseException:
            trace.abandon()
            raise
        self.close(trace)

    def open(self, batch: Any = ()) -> StepTrace:
        """Begin tracing; hand the result to `close`, or call its `abandon()`."""
        self._static_at_open = static_bytes([self._model], self._optimizers)
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        known = [*gradients, *_held_in_attributes(self._model), *tensors_in(batch)]
        trace = trace_step(device=self._device, known=known)
        del gradients, known
        trace.open()
        return trace

    def close(self, trace: StepTrace) -> None:
        """End tracing."""
        trace.close()
        peak = trace.peak
        if peak is not None and (self._highest is None or peak.peak_bytes > self._highest[0].peak_bytes):
            self._highest = (peak, self._static_at_open)

    def take(self) -> tuple[TracedPeak, int] | None:
        """The step is over: (its highest peak, static bytes when that was traced); None if nothing was."""
        highest, self._highest = self._highest, None
        return highest


def _held_in_attributes(model: nn.Module) -> list[torch.Tensor]:
    """Tensors that modules hold besides parameters and buffers: an earlier output, a cache."""
    own = {storage._cdata for storage in storages_of([*model.parameters(), *model.buffers()])}
    tensors = [tensor for place in inside(model).values() for tensor in tensors_in(place.get())]
    return [t for t in tensors if own.isdisjoint(storage._cdata for storage in storages_of([t]))]
