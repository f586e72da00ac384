"""Planned graphs on the CPU free what is dead at once.

Inductor's C++ backend gathers every kernel between two library calls in one function (`KernelGroup`). All
buffers of the group are allocated before the call and freed after it, also those that die inside: on Mamba's
scan that alone is a quarter of the peak of the step. In a planned graph a group ends as soon as it would
hold on to dead buffers that are large for this graph. Triton's kernels are never grouped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import fx

from ._compat import CppScheduling, V

_PLANNED = "dtr_planned"
# A group ends when this share of the largest buffer of the graph is dead in it. Each further function costs
# some microseconds a step and a second of compiling.
_SHARE = 1 / 16


def mark_planned(*parts: fx.GraphModule) -> None:
    """Mark the two halves of a planned graph."""
    for part in parts:
        part.meta[_PLANNED] = True


@contextlib.contextmanager
def freed_at_once(gm: fx.GraphModule) -> Iterator[None]:
    """While Inductor compiles `gm`, its kernel groups end early, if it is marked as planned."""
    if not gm.meta.get(_PLANNED):
        yield
        return
    codegen_node = CppScheduling.codegen_node
    most: dict[Any, float] = {}  # by scheduler: a graph may have others inside

    def codegen_and_end_group(self: Any, node: Any) -> None:
        codegen_node(self, node)
        if self.scheduler not in most:
            most[self.scheduler] = _SHARE * max(map(_bytes, self.scheduler.name_to_buf), default=0)
        if _dead_bytes(self.scheduler) > most[self.scheduler]:
            self._set_flush_status(True)

    with mock.patch.object(CppScheduling, "codegen_node", codegen_and_end_group):
        yield


def _dead_bytes(scheduler: Any) -> int:
    """What the group would free now. Parameters outlive the graph."""
    return sum(
        _bytes(name)
        for name in scheduler.buffer_names_to_free
        if not name.startswith("primals") and name not in V.graph.removed_buffers
    )


def _bytes(name: str) -> int:
    buffer = V.graph.try_get_buffer(name)
    if buffer is None or not buffer.has_tensor_output():
        return 0
    numel = V.graph.sizevars.optimization_hint(buffer.get_numel(), fallback=0)
    return int(numel) * int(buffer.get_dtype().itemsize)
