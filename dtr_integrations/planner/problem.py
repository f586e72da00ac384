"""What a planner is asked: one step, what exact dry runs have said so far, and where the budget lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.fusion import DEFAULT_POLICY, FusionPolicy
from ..core.graph import StepGraph
from ..core.simulate import NO_CORRECTION, Correction

__all__ = ["Problem", "SaveSets"]

SaveSets = Sequence[Sequence[int]]  # one save set (op indices) for each graph of a step, in their order


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A search problem. Solvers see ints, floats and names only.

    Attributes:
        step: The captured step.
        correction: What to add to simulated rises, as dry runs of plans say.
        focus_bytes: The peak that the step will be asked to stay under, if known: the search looks hardest
            there.
        policy: The rule of what becomes a buffer.
    """

    step: StepGraph
    correction: Correction = NO_CORRECTION
    focus_bytes: int | None = None
    policy: FusionPolicy = DEFAULT_POLICY
