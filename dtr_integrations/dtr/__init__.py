"""Dynamic tensor rematerialisation without torch: what to evict, decided over abstract storages.

Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021. Here so far: the eviction heuristics. The
exact neighbourhood, the cache with its policies, and the simulator that replays logs come on top of them.
"""

from __future__ import annotations

from .heuristics import HEURISTICS, Candidate, Heuristic

__all__ = ["HEURISTICS", "Candidate", "Heuristic"]
