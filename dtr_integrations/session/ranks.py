"""What a session does together with those of the other ranks: begin, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import warnings
from collections.abc import Callable

from torch import nn

from ..core.plan import Plan
from ..distributed.agreement import agreement_for
from ..distributed.standing import Standing, difference, to_take_over, unplanned
from ..errors import PlanWarning, RankFailed
from ..pipeline import Planned

log = logging.getLogger("dtr_integrations")
_PLANNING, _COMPILING = "planning", "compiling"


class Ranks:
    """One session's part in the agreement of all ranks; does nothing on a single rank.

    No rank goes on before all have a first plan, and none begins the backward, where they wait for each other
    in collectives, before all have compiled. Plans that a run makes later are each rank's own.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._stage = _PLANNING
        self._agreement = agreement_for(rank, world_size)
        if self._agreement is not None:
            self._agreement.begin(_PLANNING)

    @property
    def is_to_agree(self) -> bool:
        """Whether the plan that is made next is to be agreed on."""
        return self._agreement is not None and self._stage == _PLANNING

    def check(self) -> None:
        """Raises `RankFailed` if another rank cannot go on."""
        if self._agreement is not None:
            self._agreement.check()

    def failed(self, error: BaseException) -> None:
        """This rank cannot go on; tell the others, and be ready to begin again."""
        if self._agreement is not None:
            self._agreement.fail(f"failed: {type(error).__name__}: {error}")
            self._again()

    def settle(self, standing: Standing, plan: Plan | None, take_over: Callable[[Plan], str]) -> None:
        """This rank has planned: wait for the others.

        Args:
            standing: what to tell them.
            plan: this rank's.
            take_over: adopts the plan of another rank with the same graphs, and returns the digest of the
                plan that is in force then.

        Raises:
            RankFailed: a rank has failed, is silent, or got another step.
        """
        agreement = self._agreement
        assert agreement is not None
        try:
            if plan is not None:
                agreement.write(f"plan-{self.rank}", plan.to_json())
            said = agreement.exchange(_PLANNING, standing.to_dict())
            standings = [Standing.from_dict(one) for one in said]
            fault = difference(standings)
            if fault is not None:
                agreement.give_up(_PLANNING)
                raise RankFailed(rank=fault[0], stage=_PLANNING, reason=fault[1])
        except RankFailed:
            self._again()
            raise
        self._stage = _COMPILING
        for other in unplanned(standings):
            warnings.warn(
                f"rank {other.rank} of {self.world_size} runs eagerly, outside of its budget, while others "
                f"are planned: {other.why_not}",
                PlanWarning,
                stacklevel=5,
            )
        leader = to_take_over(standings, self.rank)
        digest = standing.digest
        if leader is not None:
            digest = take_over(Plan.from_json(agreement.read(f"plan-{leader}")))
        log.info("rank %d of %d: all ranks are ready, plan %s", self.rank, self.world_size, digest or "none")

    def compiled(self) -> None:
        """The first step is compiled on this rank: wait for the others. Later calls do nothing.

        Raises `RankFailed`.
        """
        agreement = self._agreement
        if agreement is None or self._stage != _COMPILING:
            return
        self._agreement = None
        agreement.exchange(_COMPILING, {})
        agreement.end()

    def close(self) -> None:
        """The session is over."""
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            agreement.leave()

    def _again(self) -> None:
        """Whoever catches the error and plans again, does so on all ranks."""
        self._agreement = None
        with contextlib.suppress(RuntimeError):  # the store may be gone with the rank that failed
            self._agreement = agreement_for(self.rank, self.world_size)


def standing_of(rank: int, budget_bytes: int, model: nn.Module, planned: Planned | None) -> Standing:
    """What a rank says of its plan; `planned` is None where it runs eagerly."""
    parameters = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    graphs = planned.captured.step.graphs if planned is not None else ()
    return Standing(
        rank=rank,
        digest=planned.plan.digest if planned is not None else "",
        why_not="" if planned is not None else "its step could not be planned (its own log says why)",
        graphs=tuple(graph.fingerprint for graph in graphs),
        model=_digest(parameters),
        trained=_digest(planned.captured.trained if planned is not None else ()),
        collectives=tuple(op.target for graph in graphs for op in graph.ops if "c10d" in op.target),
        budget_bytes=budget_bytes,
    )


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
