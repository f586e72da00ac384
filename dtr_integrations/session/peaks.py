"""Measures the steps of a run that somebody else drives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .._python_state import inside
from ..measure import (
    StepTrace,
    TracedPeak,
    optimizer_state_tensors,
    static_bytes,
    tensors_in,
    trace_step,
)
from ..measure.storages import storages_of


class StepPeaks:
    """Traces stretches of an optimizer step (its micro-batches, or all of it) and keeps the highest."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], device: torch.device
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._device = device
        self.gradients_are_buckets = False  # DDP's, which are counted apart
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
        trace = trace_step(device=self._device, known=self._known(batch))
        trace.open()
        return trace

    def _known(self, batch: Any) -> list[torch.Tensor]:
        """What is there when a step begins, static memory aside: gradients, the batch, and what modules hold
        besides parameters and buffers (an earlier output, a cache)."""
        static = [*self._model.parameters(), *self._model.buffers()]
        for optimizer in self._optimizers:
            static += optimizer_state_tensors(optimizer)
        own = {storage._cdata for storage in storages_of(static)}
        held = [tensor for place in inside(self._model).values() for tensor in tensors_in(place.get())]
        tensors = [*held, *tensors_in(batch)]
        leaves = {id(leaf): leaf for leaf in (*static, *tensors) if leaf.is_leaf}
        if self.gradients_are_buckets:
            for tensor in static:
                leaves.pop(id(tensor), None)
        tensors += [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
        return [t for t in tensors if own.isdisjoint(storage._cdata for storage in storages_of([t]))]

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
