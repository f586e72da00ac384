"""The one registry: partitioners are pickled and deep-copied by torch, so they carry an id and find their
plan here."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..core.plan import GraphSchedule

# (canonical joint graph, number of forward outputs, static input positions) -> its schedule; None: torch's
# own partition.
Decide = Callable[[fx.GraphModule, int, Any], GraphSchedule | None]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a partitioner needs: who decides, and by which route the decision is carried out ("schedule" or
    "tags")."""

    decide: Decide
    mode: str = "schedule"


_entries: dict[str, Entry] = {}
_ids = itertools.count()
_lock = threading.Lock()


def register(entry: Entry) -> str:
    """Keep `entry` until `unregister`; returns its id, unique in this process."""
    with _lock:
        plan_id = f"plan-{next(_ids)}"
        _entries[plan_id] = entry
    return plan_id


def unregister(plan_id: str) -> None:
    """Forget an entry; an id that is not there is fine."""
    with _lock:
        _entries.pop(plan_id, None)


def lookup(plan_id: str) -> Entry | None:
    """The entry of that id, or None once its session is closed."""
    return _entries.get(plan_id)
