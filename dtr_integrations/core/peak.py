"""What one rank held at most during one measured optimizer step, beside what had been promised for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["NOT_TORCHS", "PeakReport"]

NOT_TORCHS = "not torch's"  # of the lines of `PeakReport.beside_prediction`


@dataclass(frozen=True, kw_only=True)
class PeakReport:
    """One measured optimizer step of one rank: one line of `peaks-rank{i}.jsonl`, field for field.

    All byte counts are of one rank. `allocated` counts tensor storages (static memory included), `reserved`
    what torch's caching allocator took from the device for them, `non_torch` what the process holds beside
    it.

    Attributes:
        rank: this process, `0 <= rank < world_size`.
        world_size: number of processes.
        step: number of the optimizer step, counted from 1.
        budget_bytes: total of one rank's device memory that the run may use.
        predicted_allocated_bytes: the plan's own promise; None while no plan is in force.
        peak_allocated_bytes: the measured peak of the whole step.
        peak_reserved_bytes: None on CPU, where nothing is reserved.
        non_torch_bytes: None on CPU.
        reserve_bytes: what the plan left for everything that is not a tensor.
        static_bytes: parameters + buffers + optimizer state, without gradients.
        default_allocated_bytes: predicted peak of the default compile; None where it is not known.
        plan_digest: the plan in force; None while there is none.
        source: what did the measuring, e.g. `cpu_profiler` or `cuda_allocator`.
    """

    rank: int
    world_size: int
    step: int
    budget_bytes: int
    predicted_allocated_bytes: int | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    non_torch_bytes: int | None
    reserve_bytes: int
    static_bytes: int
    default_allocated_bytes: int | None
    plan_digest: str | None
    source: str

    @property
    def prediction_error(self) -> float | None:
        """|predicted − measured| / (measured − static), a ratio.

        Static bytes are easy to predict and must not flatter, so they are left out below the line. None where
        nothing was predicted, or where the step held nothing beside its static memory.
        """
        dynamic_bytes = self.peak_allocated_bytes - self.static_bytes
        if self.predicted_allocated_bytes is None or dynamic_bytes <= 0:
            return None
        return abs(self.predicted_allocated_bytes - self.peak_allocated_bytes) / dynamic_bytes

    @property
    def used_bytes(self) -> int:
        """What the step took from the device: reserved + non-torch; on CPU, allocated."""
        if self.peak_reserved_bytes is None:
            return self.peak_allocated_bytes + (self.non_torch_bytes or 0)
        return self.peak_reserved_bytes + (self.non_torch_bytes or 0)

    @property
    def beside_prediction(self) -> dict[str, int]:
        """`used_bytes` less the predicted ones, by line of the reserve: context and NCCL together, what
        torch's allocator held and nobody used (fragmentation), what torch allocated and nobody predicted
        (workspaces). Empty on CPU, and where nothing was predicted."""
        if self.peak_reserved_bytes is None or self.predicted_allocated_bytes is None:
            return {}
        return {
            NOT_TORCHS: self.non_torch_bytes or 0,
            "workspace": max(0, self.peak_allocated_bytes - self.predicted_allocated_bytes),
            "fragmentation": self.peak_reserved_bytes - self.peak_allocated_bytes,
        }

    @property
    def within_budget(self) -> bool:
        """Whether `used_bytes`, caches and fragments included, stayed in the budget."""
        return self.used_bytes <= self.budget_bytes

    @property
    def metrics(self) -> dict[str, float]:
        """What goes to loggers and trackers, in bytes, under the same names from every front door."""
        return {
            f"dtr/peak_bytes/rank{self.rank}": float(self.peak_allocated_bytes),
            f"dtr/predicted_bytes/rank{self.rank}": float(self.predicted_allocated_bytes or 0),
            "dtr/budget_bytes": float(self.budget_bytes),
        }

    def to_dict(self) -> dict[str, Any]:
        """The fields, in their order, as values that JSON knows."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> PeakReport:
        """The inverse of `to_dict`. Raises ValueError if the keys are not exactly the fields."""
        names = {field.name for field in fields(cls)}
        if record.keys() != names:
            missing, unknown = sorted(names - record.keys()), sorted(record.keys() - names)
            raise ValueError(f"not a peak record: missing {missing}, unknown {unknown}")
        return cls(**record)
