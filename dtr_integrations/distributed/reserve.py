"""Memory that a rank needs besides its tensors, line by line, in bytes.

On CPU every line is 0: the budget counts tensor storages and nothing else is known to the allocator. On CUDA
the lines that need no process group are modelled from what is known of the libraries (a CUDA context of about
500 MB, cuBLAS and cublasLt workspaces of 8.5 MB + 32 MiB) and a share of the budget for fragmentation of the
caching allocator. Each line can be overridden; NCCL's line is 0 on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_CONTEXT_BYTES = 500_000_000
_WORKSPACE_BYTES = 8_519_680 + (32 << 20)
_FRAGMENTATION_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """The reserve of one rank; `lines` by name, in bytes."""

    lines: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """The sum of the lines."""
        return sum(self.lines.values())


def reserve_for(device_type: str, budget_bytes: int, fixed: int | Mapping[str, int]) -> Reserve:
    """The reserve within `budget_bytes`. `fixed`: what the user set: an int replaces the whole, a mapping
    single lines."""
    if isinstance(fixed, int):
        return Reserve(lines={"slack": fixed})
    lines = {"nccl": 0, "context": 0, "workspace": 0, "fragmentation": 0, "slack": 0}
    if device_type == "cuda":
        lines |= {
            "context": _CONTEXT_BYTES,
            "workspace": _WORKSPACE_BYTES,
            "fragmentation": int(budget_bytes * _FRAGMENTATION_SHARE),
        }
    return Reserve(lines=lines | dict(fixed))
