"""Memory that a rank needs besides the tensors of its step, line by line, in bytes.

On CPU every line is 0: the budget counts tensor storages and nothing else is known to the allocator. On CUDA:

* `nccl`: the communicators (`nccl.py`);
* `context`: driver, loaded kernels, library handles; 543 MiB for a process that has no more
  (pytorch issue 81257), about 300 MB with lazy loading (pytorch issue 107667);
* `workspace`: cuBLAS' and cuBLASLt's. They come from torch's allocator, so that they are in *allocated*,
  but no step makes them: 32 MiB on Hopper, 8,519,680 bytes before it (pytorch pull request 120925), one for
  each thread that multiplies matrices, which are two (training and autograd);
* `fragmentation`: what the caching allocator holds and nobody uses, as a share of the budget;
* `slack`: the user's own.

DDP's buckets and FSDP2's gathers are no lines: they are tensors of the step, in its prediction and its
breakdown. What a measured step says replaces the modelled lines (`calibration.py`), not those that the user
has set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .nccl import communicator_bytes, communicators

__all__ = ["Reserve", "reserve_for"]

_CONTEXT_BYTES = 500_000_000
_WORKSPACE_BYTES = 2 * (32 << 20)
_FRAGMENTATION_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """The reserve of one rank; `lines` by name, in bytes."""

    lines: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """The sum of the lines."""
        return sum(self.lines.values())


def reserve_for(
    device_type: str,
    budget_bytes: int,
    fixed: int | Mapping[str, int],
    *,
    world_size: int | None = None,
    backend: str = "nccl",
    communicators: int | Sequence[int] = 1,
) -> Reserve:
    """The modelled reserve of one rank within `budget_bytes`.

    Args:
        device_type: "cpu", "cuda".
        budget_bytes: total of the rank's device memory.
        fixed: what the user set: an int replaces the whole, a mapping single lines.
        world_size: ranks of the job that is asked about. None: the process groups of this process count, as
            they are.
        backend: of its collectives on the device; only NCCL takes memory there that no tensor has.
        communicators: how many there are of the whole job, or the ranks of each (a mesh of two dimensions has
            one for each dimension).
    """
    if isinstance(fixed, int):
        return Reserve(lines={"slack": fixed})
    lines = {"nccl": 0, "context": 0, "workspace": 0, "fragmentation": 0, "slack": 0}
    if device_type == "cuda":
        lines |= {
            "nccl": sum(map(communicator_bytes, _sizes(world_size, backend, communicators))),
            "context": _CONTEXT_BYTES,
            "workspace": _WORKSPACE_BYTES,
            "fragmentation": int(budget_bytes * _FRAGMENTATION_SHARE),
        }
    return Reserve(lines=lines | dict(fixed))


def _sizes(world_size: int | None, backend: str, of_job: int | Sequence[int]) -> Sequence[int]:
    if world_size is None:
        return tuple(communicators())
    if "nccl" not in backend:
        return ()
    return (world_size,) * of_job if isinstance(of_job, int) else of_job
