"""torch's CPU profiler as a recorder of allocator events that keeps out of everybody else's way.

Everything here that torch keeps private was checked on 2.13: `experimental_event_tree`,
`_ExtraFields_Allocation`, `_RecordFunctionFast`, `_prepare_profiler`, `_enable_profiler`,
`KinetoStepTracker`.

Why events with addresses and not the profiler's own sums: its reporter (c10 `ProfiledCPUMemoryReporter`)
learns a block's size only if the block is allocated while profiling. A block born before dies unseen. Worse,
an entry whose block was freed between two sessions stays in the table, and when the address is used again by
a block that is born unseen and dies inside a session, that death is reported with the size of the stale
entry: a phantom.

What cannot be seen: memory that is not torch's (numpy, malloc inside of kernels), and blocks born or freed on
threads that do not carry the profiler's thread-local state. Autograd's threads carry it, a DataLoader's do
not.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch
import torch.autograd.profiler as autograd_profiler

from ._quiet import CppWarnings, quiet_kineto
from .address_ledger import MARK_PREFIX, Alloc, Event, Free, Mark

__all__ = ["CpuRecorder", "profiler_in_use"]


def profiler_in_use() -> str | None:
    """Says which profiler would be harmed if one of ours were opened now; None if there is none."""
    if torch.autograd._profiler_enabled():
        return "a torch profiler is recording on this thread"
    if autograd_profiler._is_profiler_enabled:
        return "a torch profiler is recording on another thread"
    # A profiler that waits or warms up has no recording switched on yet: a session of ours inside its warm-up
    # would end what it has prepared, and its `step()` could start it in the middle of ours. It registers as
    # ProfilerStep, but deregisters only as a context manager, hence the second look, at the objects:
    # `step_rec_fn` is open from `start()` to `stop()`.
    if "ProfilerStep" in autograd_profiler.KinetoStepTracker._step_dict:
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.profiler.profile) and thing.step_rec_fn is not None:
                return "a torch profiler with a schedule is between two recordings"
    return None


class CpuRecorder:
    """One profiling session of the calling thread: `start()`, `mark()` at will, `stop()`.

    If somebody starts a profiler of theirs meanwhile, ours gives way: it ends first, `gave_way` turns true
    and `stop()` returns nothing. (Left alone, the two would share one session, and the first `stop` would end
    both.)
    """

    def __init__(self) -> None:
        self.gave_way = False
        self._profiler: Any = None
        self._thread_id = 0
        self._originals: dict[str, Any] = {}
        self._cpp_warnings = CppWarnings()

    def start(self) -> None:
        """Opens the session. The caller has made sure that `profiler_in_use()` is None."""
        assert self._profiler is None, "a recorder is started once"
        profiler = autograd_profiler.profile(use_kineto=True, use_cpu=True, profile_memory=True)
        with quiet_kineto():
            profiler.__enter__()
        self._profiler = profiler
        self._thread_id = threading.get_ident()
        self._watch()

    def mark(self, name: str) -> None:
        """Drops a named event (`MARK_PREFIX...`) into the record, on the calling thread."""
        with self.marker(name):
            pass

    @staticmethod
    def marker(name: str) -> Any:
        """A context manager that drops the named event into the record of whatever session is open then.

        It passes by torch's dispatcher, so that no dispatch mode sees it and it works while a storage dies.
        """
        return torch._C._profiler._RecordFunctionFast(name)

    def stop(self) -> list[Event]:
        """Closes the session and returns its CPU allocator events and its marks, in order of time."""
        profiler = self.discard()
        return [] if profiler is None else _events_of(profiler.kineto_results)

    def discard(self) -> Any:
        """Closes the session and leaves its record unread."""
        self._unwatch()
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.__exit__(None, None, None)
        return profiler

    def _watch(self) -> None:
        self._cpp_warnings.mute()
        for name in ("_prepare_profiler", "_enable_profiler"):
            self._originals[name] = original = getattr(autograd_profiler, name)
            setattr(autograd_profiler, name, self._giving_way_to(original))

    def _unwatch(self) -> None:
        self._cpp_warnings.unmute()
        for name, original in self._originals.items():
            setattr(autograd_profiler, name, original)
        self._originals.clear()

    def _giving_way_to(self, original: Any) -> Any:
        def start_theirs(*args: Any, **kwargs: Any) -> Any:
            # A session can only be ended on its own thread.
            if threading.get_ident() == self._thread_id:
                self.gave_way = True
                self.discard()
            return original(*args, **kwargs)

        return start_theirs


def _events_of(kineto_results: Any) -> list[Event]:
    events: list[Event] = []
    pending = kineto_results.experimental_event_tree()[::-1]
    while pending:
        node = pending.pop()
        pending.extend(node.children[::-1])
        # Most nodes are operators, and each attribute is a call into C++: the name alone must tell.
        name = node.name
        if name == "[memory]":
            fields = node.extra_fields
            if (
                not isinstance(fields, torch._C._profiler._ExtraFields_Allocation)
                or fields.device.type != "cpu"
            ):
                continue
            if fields.alloc_size > 0:
                events.append(Alloc(node.start_time_ns, fields.ptr, fields.alloc_size))
            else:
                events.append(Free(node.start_time_ns, fields.ptr))
        elif name.startswith(MARK_PREFIX):
            events.append(Mark(node.start_time_ns, name))
    events.sort(key=lambda event: event.time_ns)
    return events
