"""Which schedule each graph of a run gets: the plan's, an earlier plan's, or one made on the spot."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

from torch import fx

from ..capture.joint import fingerprint
from ..core.plan import GraphSchedule
from ..errors import PlanWarning
from ..pipeline import Planned, plan_unknown
from ..units import format_bytes

log = logging.getLogger("dtr_integrations")


class Decisions:
    """What the partitioner of a session asks.

    Args:
        device_type: of the costs, for graphs that are planned on the spot.
        not_certified: called when a graph was planned on the spot, so that it is measured soon.
    """

    def __init__(self, device_type: str, not_certified: Callable[[], None]) -> None:
        self._device_type = device_type
        self._not_certified = not_certified
        self._planned: Planned | None = None
        self._earlier: dict[str, GraphSchedule] = {}  # of plans that this run has outgrown
        self._unknown: dict[str, GraphSchedule] = {}

    def adopt(self, planned: Planned) -> None:
        """From now on by this plan; graphs that only an earlier one knows keep what they had."""
        if self._planned is not None:
            self._earlier |= {schedule.fingerprint: schedule for schedule in self._planned.plan.schedule}
        self._planned, self._unknown = planned, {}

    def __call__(self, joint: fx.GraphModule, num_outputs: int, static: Any) -> GraphSchedule | None:
        """The schedule of a joint graph in its canonical form."""
        assert self._planned is not None
        name = fingerprint(joint, num_outputs)
        known = self._planned.plan.for_graph(name) or self._earlier.get(name) or self._unknown.get(name)
        return known or self._on_the_spot(name, joint, num_outputs, static, self._planned)

    def _on_the_spot(
        self, name: str, joint: fx.GraphModule, num_outputs: int, static: Any, planned: Planned
    ) -> GraphSchedule:
        schedule, peak_bytes, slowdown = plan_unknown(
            joint, num_outputs, static, planned=planned, device=self._device_type
        )
        self._unknown[name] = schedule
        self._not_certified()
        text = (
            "a graph that the plan does not know (another input shape or branch) was planned on the "
            f"spot (number {len(self._unknown)}): about {format_bytes(peak_bytes)}, slowdown "
            f"{slowdown:.3f}, not certified"
        )
        plan = planned.plan
        if peak_bytes > plan.budget_bytes - plan.reserve_bytes:
            budget = format_bytes(plan.budget_bytes)
            warnings.warn(f"{text}; over the budget {budget}", PlanWarning, stacklevel=3)
        else:
            log.warning("%s", text)
        return schedule
