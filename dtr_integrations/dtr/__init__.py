"""Dynamic tensor rematerialisation without torch: what to evict, decided over abstract storages.

Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021. `cache` is the state machine, `heuristics`
score its candidates over the `neighborhood`, `search` and `index` find the lowest score; `oplog` reads and
writes operator logs, and `replay` runs one under a budget.
"""

from __future__ import annotations

from .cache import Cache, Driver
from .heuristics import HEURISTICS, Candidate, Heuristic
from .oplog import Instruction, read_log, write_log
from .policies import Policies
from .portfolio import Choice, choose
from .program import Program, resolve
from .simulator import ReplayResult, replay

__all__ = [
    "HEURISTICS",
    "Cache",
    "Candidate",
    "Choice",
    "Driver",
    "Heuristic",
    "Instruction",
    "Policies",
    "Program",
    "ReplayResult",
    "choose",
    "read_log",
    "replay",
    "resolve",
    "write_log",
]
