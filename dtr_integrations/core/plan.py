"""A plan: for each graph an explicit schedule, and for the step its bytes and its slowdown."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """Run op `value` again in the backward, for the `copy`-th time (from 0), just before the backward op
    `before`.

    Every op scheduled after it reads the latest copy that stands before it. Several recomputations before one
    op run in the order in which the schedule lists them.
    """

    value: int
    copy: int
    before: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """An op of the forward that draws from a generator as it runs, and the strides in which it fills its
    result (none: they do not matter). Another place in the order, or another layout, gets other
    numbers."""

    op: int
    strides: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSchedule:
    """What one joint graph saves and what it recomputes, by op index.

    `default=True` means: exactly torch's own partition; `saved` and `recompute` then only describe it.
    `saved` holds activations only: inputs of the graph that the backward reads are handed over as well, for
    free. `draws`: the forward's ops that draw from a generator, in the order in which they have to run.
    """

    fingerprint: str
    saved: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    default: bool = False
    draws: tuple[Draw, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is done on one rank, and what it will take. Bytes are ints, `slowdown` is a ratio (1.04 = 4 % more
    time).

    `predicted_allocated_bytes`: the most bytes that tensors of one step hold at once, static memory included,
    from the dry run of the code that will run. `default_allocated_bytes`: the same for plain `torch.compile`.
    `required_bytes = predicted_allocated_bytes + reserve_bytes`. `breakdown`: the bytes held at the peak by
    kind. `slowdown_lower_bound`: no schedule of the search's kind within the budget is faster than this in
    the search tier's model (`planner.bound` has the assumptions); `None` when no bound was computed.
    """

    budget_bytes: int
    predicted_allocated_bytes: int
    default_allocated_bytes: int
    static_bytes: int
    reserve_bytes: int
    slowdown: float
    schedule: tuple[GraphSchedule, ...]
    slowdown_lower_bound: float | None = None
    simulated_bytes: int | None = (
        None  # what the search tier thought the peak would be: stated beside the exact one
    )
    breakdown: dict[str, int] = field(default_factory=dict)
    reserve: dict[str, int] = field(default_factory=dict)
    mode: str = "schedule"
    notes: tuple[str, ...] = ()

    @property
    def required_bytes(self) -> int:
        """`predicted_allocated_bytes + reserve_bytes`: what has to fit into the budget."""
        return self.predicted_allocated_bytes + self.reserve_bytes

    @property
    def is_default(self) -> bool:
        """True when every graph is torch's own partition (the budget does not bind)."""
        return all(g.default for g in self.schedule)

    @property
    def digest(self) -> str:
        """Hash of what is executed (schedules and mode, not the predictions): equal digests run equal
        code."""
        body = json.dumps([self.mode, [asdict(g) for g in self.schedule]], sort_keys=True)
        return hashlib.sha256(body.encode()).hexdigest()[:16]

    def for_graph(self, fingerprint: str) -> GraphSchedule | None:
        """The schedule of the graph with that fingerprint, or None when the plan does not know it."""
        return next((g for g in self.schedule if g.fingerprint == fingerprint), None)

    def to_json(self) -> str:
        """One JSON object, readable back with `from_json`."""
        data = asdict(self) | {"format": 1, "digest": self.digest, "required_bytes": self.required_bytes}
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Inverse of `to_json`. Raises `PlanMismatch` when the text is not a plan or its digest does not
        match."""
        from ..errors import PlanMismatch

        try:
            data: dict[str, Any] = dict(json.loads(text))
            stated = data.pop("digest")
            data.pop("required_bytes")
            if (version := data.pop("format")) != 1:
                raise PlanMismatch(f"plan format {version!r} is not known here (this version reads format 1)")
            data["schedule"] = tuple(
                GraphSchedule(
                    fingerprint=g["fingerprint"],
                    saved=tuple(g["saved"]),
                    recompute=tuple(Recompute(**r) for r in g["recompute"]),
                    default=g["default"],
                    draws=tuple(Draw(op=d["op"], strides=tuple(d["strides"])) for d in g["draws"]),
                )
                for g in data["schedule"]
            )
            data["notes"] = tuple(data["notes"])
            plan = cls(**data)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, PlanMismatch):
                raise
            raise PlanMismatch(
                f"not a plan written by this package: {error!r}. Make one with plan(...).to_json()"
            ) from error
        if plan.digest != stated:
            raise PlanMismatch(
                f"the plan was edited: its digest says {stated}, its schedules hash to {plan.digest}"
            )
        return plan
