"""Several policies tried in simulation on a recorded step, the best taken for the steps to come.

No heuristic wins everywhere: on a U-Net `msps` lives where `h_dtr_eq` runs out of memory, on long chains it
is the other way round. One recorded step is enough to tell. The variants against thrashing are MegEngine's
two rules: scores that rise with each recomputation, and storages too small to be worth one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .policies import Policies
from .program import Program
from .simulator import Log, ReplayResult, load, replay

_log = logging.getLogger(__name__)

# Shares of the budget on which the best few are tried: what only just works is none for the next batch.
_NEARBY = (1.0, 0.97, 1.03)
_FINALISTS = 4


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One policy on all the logs.

    Attributes:
        policies: what was tried.
        results: one for each log and budget that it was tried on.
    """

    policies: Policies
    results: tuple[ReplayResult, ...]

    @property
    def failures(self) -> int:
        """How many of the replays ran out of memory or thrashed."""
        return sum(result.outcome != "ok" for result in self.results)

    @property
    def slowdown(self) -> float:
        """The mean; of failed replays up to where they stopped."""
        return sum(result.slowdown for result in self.results) / len(self.results)

    @property
    def name(self) -> str:
        """The heuristic, and what was added against thrashing."""
        minimum = self.policies.minimum_bytes
        return self.policies.scorer.key + (f", at least {minimum} bytes" if minimum else "")

    def __str__(self) -> str:
        if self.failures:
            return f"{self.name}: fails in {self.failures} of {len(self.results)}"
        return f"{self.name}: ×{self.slowdown:.3f}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What to use, and why.

    Attributes:
        policies: of the best trial.
        trials: all, best first.
        reason: one sentence.
    """

    policies: Policies
    trials: tuple[Trial, ...]
    reason: str


def variants(
    heuristics: Iterable[str] = ("h_dtr_eq", "h_dtr", "msps", "h_local", "size"),
    *,
    minimum_bytes: int = 0,
    base: Policies | None = None,
) -> tuple[Policies, ...]:
    """Each heuristic plain, with a recompute penalty, and with that and a minimum size."""
    base = replace(base or Policies(), search="indexed")
    rules = [(0.0, 0), (0.5, 0)] + ([(0.5, minimum_bytes)] if minimum_bytes else [])
    return tuple(
        replace(base, heuristic=heuristic, recompute_penalty=penalty, minimum_bytes=least)
        for heuristic in heuristics
        for penalty, least in rules
    )


def choose(
    logs: Log | Sequence[Log],
    *,
    budget_ratio: float = 0.5,
    budget_bytes: int | None = None,
    candidates: Sequence[Policies] | None = None,
    limit: float = 2.0,
) -> Choice:
    """The policies under which the recorded steps go best.

    Args:
        logs: of the first step, or a list of the first steps'.
        budget_ratio, budget_bytes, limit: see `replay`.
        candidates: None: `variants`, with the hundredth part of the largest allocation as the minimum size.

    All are tried under the budget, the four best of them also under budgets 3 % to either side. Fewest
    failures first, then the lowest mean slowdown; of equals the earlier candidate. The choice is logged with
    its reason.

    Raises:
        ValueError: no logs, or no candidates.
    """
    programs = [load(log) for log in logs] if isinstance(logs, list) and _is_several(logs) else [load(logs)]
    if candidates is None and programs:
        candidates = variants(minimum_bytes=max(map(_largest, programs)) // 100)
    if not programs or not candidates:
        raise ValueError("a portfolio needs at least one log and one candidate")
    budgets = [
        int(program.peak_bytes * budget_ratio) if budget_bytes is None else budget_bytes
        for program in programs
    ]

    def attempt(policies: Policies, nearby: Sequence[float]) -> Trial:
        results = (
            _replay(program, policies, int(budget * share), limit)
            for program, budget in zip(programs, budgets, strict=True)
            for share in nearby
        )
        return Trial(policies=policies, results=tuple(results))

    first = sorted((attempt(policies, (1.0,)) for policies in candidates), key=_merit)
    finalists = sorted((attempt(trial.policies, _NEARBY) for trial in first[:_FINALISTS]), key=_merit)
    trials = [*finalists, *first[_FINALISTS:]]
    best = trials[0]
    reason = (
        f"{best} under {budgets[0]:,} bytes on {len(programs)} recorded step(s); "
        f"next {'; '.join(map(str, trials[1:3])) or 'none'}"
    )
    _log.info("online rematerialisation uses %s", reason)
    return Choice(policies=best.policies, trials=tuple(trials), reason=reason)


def _merit(trial: Trial) -> tuple[int, float]:
    return trial.failures, trial.slowdown


def _replay(program: Program, policies: Policies, budget_bytes: int, limit: float) -> ReplayResult:
    return replay(
        program,
        heuristic=policies.heuristic,
        search=policies.search,
        policies=policies,
        budget_bytes=budget_bytes,
        limit=limit,
    )


def _is_several(logs: list[object]) -> bool:
    # A list of logs, and not one log's list of instructions.
    return not logs or not isinstance(logs[0], tuple)


def _largest(program: Program) -> int:
    return max((max(sizes, default=0) for sizes in program.sizes()), default=0)
