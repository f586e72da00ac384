"""The reserve of a run: modelled before its first step, measured after that.

What a step takes from the device beside its predicted bytes is, exactly: what is not torch's (context,
NCCL), what torch's allocator holds and nobody uses (fragmentation), and what torch allocates for no step
(workspaces). On CUDA a measured step says each; on CPU only the last is known, and learnt where it led over
the budget.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..core.peak import NOT_TORCHS, PeakReport
from .reserve import Reserve, reserve_for

__all__ = ["Calibration"]

_LEARNT = "learnt from measured steps"


class Calibration:
    """Of one rank, over its run.

    Args:
        device_type: "cpu", "cuda".
        fixed: what the user set of the reserve (`reserve_for`). It is never replaced.
    """

    def __init__(self, device_type: str, fixed: int | Mapping[str, int]) -> None:
        self._device_type = device_type
        self._fixed = fixed
        self._measured: dict[str, int] = {}  # the highest of each
        self._learnt_bytes = 0  # missing from the prediction, and in no line

    def reserve(self, budget_bytes: int) -> Reserve:
        """That of the plan that is made next."""
        lines = dict(reserve_for(self._device_type, budget_bytes, self._fixed).lines)
        if self._measured and not isinstance(self._fixed, int):
            own = self._fixed
            lines |= {name: size for name, size in self._measured.items() if name not in own}
            together = [name for name in ("nccl", "context") if name not in own]
            for name in together:  # which cannot be told apart
                del lines[name]
            lines[NOT_TORCHS] = max(0, lines[NOT_TORCHS] - own.get("nccl", 0) - own.get("context", 0))
        if self._learnt_bytes:
            lines[_LEARNT] = self._learnt_bytes
        return Reserve(lines=lines)

    def measure(self, report: PeakReport, *, known_bytes: int = 0) -> None:
        """A step was measured. `known_bytes`: how much of what it allocated besides the predicted bytes the
        next capture sees by itself."""
        lines = report.beside_prediction
        if lines:
            lines["workspace"] = max(0, lines["workspace"] - known_bytes)
        for name, size in lines.items():
            self._measured[name] = max(size, self._measured.get(name, 0))

    def learn(self, report: PeakReport, *, known_bytes: int = 0) -> None:
        """That step went over the budget. What no line of the reserve has is learnt; slack has nothing of it,
        since it is the user's own, unless it is all there is.

        `known_bytes`: how much of it the next capture sees by itself.
        """
        reserve = self.reserve(report.budget_bytes)
        slack_bytes = 0 if isinstance(self._fixed, int) else self._fixed.get("slack", 0)
        beside_bytes = report.used_bytes - (report.predicted_allocated_bytes or 0) - known_bytes
        self._learnt_bytes += max(0, beside_bytes - (reserve.total_bytes - slack_bytes))
