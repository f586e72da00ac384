"""Replays operator logs through the cache: what a training step would cost under a budget."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import singledispatch
from os import PathLike
from typing import Any, Literal, TypeAlias

from ..errors import OutOfBudget
from .cache import Cache, Driver, ReplayLimit
from .heuristics import Heuristic
from .oplog import Instruction, read_log
from .policies import Policies
from .program import Drop, Hold, Make, Program, Run, Write, resolve
from .values import Tensor

Outcome = Literal["ok", "oom", "thrash"]
Log: TypeAlias = "str | PathLike[str] | Iterable[Instruction] | Program"


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """How a log went under a budget.

    Attributes:
        outcome: "ok"; "oom": something did not fit whatever was evicted; "thrash": the replays cost more than
            allowed.
        slowdown: simulated clock over the cost of the log's own operators; where the outcome is not ok, up to
            the point where it stopped.
        peak_bytes: highest resident bytes, never above `budget_bytes`.
        budget_bytes, unconstrained_bytes: the budget, and the log's peak without one.
        accesses: records read while candidates were scored and neighbourhoods kept.
        evictions, replays: counts; releases by the program are no evictions.
        compute_ns, replay_ns: nanoseconds of first runs and of replays.
        clock_ns: the two together, plus 1.
        policies: the cache's.
    """

    outcome: Outcome
    slowdown: float
    peak_bytes: int
    budget_bytes: int
    unconstrained_bytes: int
    accesses: int
    evictions: int
    replays: int
    compute_ns: int
    replay_ns: int
    clock_ns: int
    policies: Policies

    @classmethod
    def of(
        cls,
        cache: Cache,
        outcome: Outcome,
        *,
        budget_bytes: int,
        unconstrained_ns: int,
        unconstrained_bytes: int,
    ) -> ReplayResult:
        """Read off a cache that was taken through a log; `unconstrained_ns`, `unconstrained_bytes`: the log's
        cost and peak without a budget."""
        return cls(
            outcome=outcome,
            slowdown=cache.clock / unconstrained_ns if unconstrained_ns else 1.0,
            peak_bytes=cache.peak_bytes,
            budget_bytes=budget_bytes,
            unconstrained_bytes=unconstrained_bytes,
            accesses=cache.accesses,
            evictions=cache.evictions,
            replays=cache.replays,
            compute_ns=cache.compute_ns,
            replay_ns=cache.replay_ns,
            clock_ns=cache.clock,
            policies=cache.policies,
        )


def replay(
    log: Log,
    *,
    heuristic: str | Heuristic = "h_dtr_eq",
    budget_ratio: float = 0.5,
    budget_bytes: int | None = None,
    search: str = "exact",
    limit: float = 2.0,
    policies: Policies | None = None,
    driver: Driver | None = None,
) -> ReplayResult:
    """Run `log` under a budget. Kirisame et al., ICLR 2021, section 4.2.

    Args:
        log: a file in the format of `oplog`, its instructions, or a `Program` made from them.
        heuristic: a key of `HEURISTICS`, or a `Heuristic`.
        budget_ratio: the budget as a share of the log's peak without one, rounded down to a byte.
        budget_bytes: the budget itself, instead of a share.
        search: "exact", "indexed" or "sampled"; see `Policies`.
        limit: the outcome is "thrash" once replays have cost more than ``limit - 1`` times the log's
        operators. policies: the other choices; its `heuristic` and `search` are replaced by the arguments
        above. driver: is told of every run and eviction.

    Raises:
        OperatorLogError: the log is not in the format.
        ValueError: an unknown heuristic or search, or a budget that is not positive.
    """
    with _collector_paused():
        program = load(log)
    if budget_bytes is None:
        budget_bytes = int(program.peak_bytes * budget_ratio)
    if budget_bytes <= 0 and program.peak_bytes:
        raise ValueError(
            f"the budget must be positive; got {budget_bytes} bytes (budget_ratio={budget_ratio})"
        )
    chosen = replace(policies or Policies(), heuristic=heuristic, search=search)
    cache = Cache(budget_bytes, chosen, driver=driver, replay_limit=(limit - 1) * program.compute_ns)
    with _collector_paused():
        outcome = run(program, cache)
    return ReplayResult.of(
        cache,
        outcome,
        budget_bytes=budget_bytes,
        unconstrained_ns=program.compute_ns,
        unconstrained_bytes=program.peak_bytes,
    )


def run(program: Program, cache: Cache) -> Outcome:
    """Take `cache` through `program`, to the point where it ends or fails."""
    try:
        tensors = _steps(program, cache)
        for output in program.outputs:
            cache.pin(tensors[output])
    except OutOfBudget:
        return "oom"
    except ReplayLimit:
        return "thrash"
    return "ok"


def _steps(program: Program, cache: Cache) -> list[Tensor]:
    tensors: list[Tensor] = []
    at = tensors.__getitem__
    for step in program.steps:
        kind = type(step)
        if kind is Drop:
            cache.release(tensors[step.tensor])  # type: ignore[union-attr]
        elif kind is Run:
            name, args, sizes, aliases, cost = step  # type: ignore[misc]
            tensors += cache.call([*map(at, args)], sizes, aliases, cost=cost, name=name)
        elif kind is Hold:
            cache.retain(tensors[step.tensor])  # type: ignore[union-attr]
        elif kind is Make:
            tensors.append(cache.constant(step.size_bytes))  # type: ignore[union-attr]
        else:
            assert isinstance(step, Write)
            args = [*map(at, step.args)]
            tensors += cache.mutate(args, step.indices, cost=step.cost, name=step.name)
    return tensors


@contextmanager
def _collector_paused() -> Iterator[None]:
    # Nothing becomes garbage before a replay ends, and looking for some would be a third of its time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@singledispatch
def load(log: Any) -> Program:
    """A `Program` from whatever names a log: a path, instructions, or itself."""
    return resolve(log)


@load.register(str)
@load.register(PathLike)
def _(log: str | PathLike[str]) -> Program:
    return resolve(read_log(log))


@load.register
def _(log: Program) -> Program:
    return log
