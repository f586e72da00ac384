"""Every exception and warning class of the library.

    Exception
    └── DTRError                   anything raised on purpose by this library
        ├── ConfigError            (ValueError)    a key or value of the configuration is wrong
        │   └── BudgetError        (ValueError)    a byte size or budget cannot be read
        ├── BudgetInfeasible       (ValueError)    no plan fits the budget
        ├── OutOfBudget            (MemoryError)   online: one operator does not fit, whatever is evicted
        ├── PlanMismatch           (ValueError)    a plan made earlier is not for this step
        ├── CaptureError           (RuntimeError)  the fake run of the step failed
        ├── CertifyError           (RuntimeError)  the dry run of a plan failed
        ├── CompileError           (RuntimeError)  torch.compile fails, and fallback="error"
        ├── VerificationFailed     (RuntimeError)  training by the plan differs from training without it
        ├── RankFailed             (RuntimeError)  another rank cannot go on, so none does
        ├── OperatorLogError       (ValueError)    an operator log cannot be read
        ├── ProfilerActive         (RuntimeError)  measuring would break somebody's profiler
        ├── UnsupportedTorch       (ImportError)   this torch lacks something we rely on
        └── MissingExtra           (ImportError)   an optional package is not installed

    UserWarning
    └── PlanWarning                a plan is in force, but not quite as asked
        └── NothingPlanned         no plan is in force

What to do about each stands in its docstring. All exceptions pickle with their attributes, because ranks send
theirs to one another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ._format import budget_at_least, format_bytes

__all__ = [
    "BudgetError",
    "BudgetInfeasible",
    "CaptureError",
    "CertifyError",
    "CompileError",
    "ConfigError",
    "DTRError",
    "MissingExtra",
    "NothingPlanned",
    "OperatorLogError",
    "OutOfBudget",
    "PlanMismatch",
    "PlanWarning",
    "ProfilerActive",
    "RankFailed",
    "UnsupportedTorch",
    "VerificationFailed",
]

_HOLDERS_SHOWN = 8


def _restore(cls: type[DTRError], args: tuple[Any, ...], state: dict[str, Any]) -> DTRError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class DTRError(Exception):
    """Base of everything that this library raises on purpose. Remedy: see the class that was raised."""

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException's own way calls cls(*args), which fails for every __init__ with keywords of its own.
        return _restore, (type(self), self.args, self.__dict__)


class ConfigError(DTRError, ValueError):
    """A key or value of the configuration is wrong.

    Remedy: the message names the key, repeats the value and shows a right one.
    """


class BudgetError(ConfigError):
    """A byte size, percentage or budget cannot be read.

    Remedy: a number with a unit (``"70GB"``, ``"65.2 GiB"``), and for a budget also ``"90%"`` or ``"auto"``.
    """


class BudgetInfeasible(DTRError, ValueError):
    """No plan keeps the step under the budget; raised before step 1.

    Remedy: a budget of `lowest_bytes` or more, a smaller batch, or a smaller reserve where it was
    overestimated; ``on_infeasible="best_effort"`` trains with the lowest plan all the same.

    Args:
        budget_bytes: The budget, in bytes of one rank's device.
        lowest_bytes: The lowest reachable required bytes: allocated peak of the lowest plan plus the reserve.
        reserve_bytes: The reserve's part of `lowest_bytes`.
        holders: ``(name, bytes)`` of what is held at the lowest plan's peak, by module name.
        would_fit: Further changes that would make the step fit, one sentence each (such as "a batch of 4
            instead of 8 requires 41 MB").

    Attributes:
        budget_bytes, lowest_bytes, reserve_bytes: As given.
        holders: As given, largest first.
        shortfall_bytes: ``lowest_bytes - budget_bytes``.
    """

    budget_bytes: int
    lowest_bytes: int
    reserve_bytes: int
    shortfall_bytes: int
    holders: tuple[tuple[str, int], ...]

    def __init__(
        self,
        *,
        budget_bytes: int,
        lowest_bytes: int,
        reserve_bytes: int = 0,
        holders: Iterable[tuple[str, int]] = (),
        would_fit: Iterable[str] = (),
    ) -> None:
        self.budget_bytes = budget_bytes
        self.lowest_bytes = lowest_bytes
        self.reserve_bytes = reserve_bytes
        self.shortfall_bytes = lowest_bytes - budget_bytes
        self.holders = tuple(sorted(holders, key=lambda holder: -holder[1]))
        super().__init__(self._message(tuple(would_fit)))

    def _message(self, would_fit: tuple[str, ...]) -> str:
        lines = [
            f"no plan fits the budget of {_both(self.budget_bytes)}: the lowest one requires "
            f"{_both(self.lowest_bytes)}, which is {format_bytes(self.shortfall_bytes)} too much "
            f"(reserve {format_bytes(self.reserve_bytes)} included)."
        ]
        if self.holders:
            lines.append("Held at that peak, largest first:")
            lines += [f"  {format_bytes(size):>12}  {name}" for name, size in self.holders[:_HOLDERS_SHOWN]]
            rest = self.holders[_HOLDERS_SHOWN:]
            if rest:
                lines.append(f"  {format_bytes(sum(size for _, size in rest)):>12}  in {len(rest)} more")
        lines.append("What would fit:")
        lines.append(f'  budget="{budget_at_least(self.lowest_bytes)}" with everything else as it is')
        lines += [f"  {sentence}" for sentence in would_fit]
        lines.append('To train over budget with the lowest plan: on_infeasible="best_effort".')
        return "\n".join(lines)


class OutOfBudget(DTRError, MemoryError):
    """Online rematerialisation has evicted all that may be evicted, and an operator still does not fit.

    Remedy: a budget larger by `short_bytes` at least, or a smaller batch.

    Args:
        operator: Name of the operator whose outputs did not fit.
        needed_bytes: Bytes of its outputs.
        held_bytes: Bytes that are resident and may not be evicted: constants, pinned values, and what the
            operators under way are reading.
        budget_bytes: The budget.

    Attributes:
        short_bytes: ``held_bytes + needed_bytes - budget_bytes``.
    """

    operator: str
    needed_bytes: int
    held_bytes: int
    budget_bytes: int
    short_bytes: int

    def __init__(self, *, operator: str, needed_bytes: int, held_bytes: int, budget_bytes: int) -> None:
        self.operator = operator
        self.needed_bytes = needed_bytes
        self.held_bytes = held_bytes
        self.budget_bytes = budget_bytes
        self.short_bytes = held_bytes + needed_bytes - budget_bytes
        super().__init__(
            f"{operator} needs {_both(needed_bytes)} for its outputs while {_both(held_bytes)} cannot be "
            f"evicted: {_both(self.short_bytes)} short of the budget of {_both(budget_bytes)}. "
            f'A budget of at least "{budget_at_least(held_bytes + needed_bytes)}" gets past this operator.'
        )


class PlanMismatch(DTRError, ValueError):
    """A plan file that was given does not belong to the step that was captured.

    Remedy: plan again (leave `plan` out), or restore what the message says has changed: model, shapes,
    dtypes, optimizer, or versions.

    Args:
        message: What was compared.
        differences: One sentence for each difference found.
    """

    differences: tuple[str, ...]

    def __init__(self, message: str, *, differences: Iterable[str] = ()) -> None:
        self.differences = tuple(differences)
        super().__init__("\n".join([message, *(f"  - {difference}" for difference in self.differences)]))


class CaptureError(DTRError, RuntimeError):
    """The fake run of the training step failed, or something in it cannot be planned.

    Remedy: the cause is chained (``raise ... from``). Name the modules that do compile with `targets`, or
    pass ``fallback="eager"`` to leave the failing one alone.
    """


class CertifyError(DTRError, RuntimeError):
    """The dry run of a plan failed, so its peak is not known exactly.

    Remedy: none on your side is expected; please report it with the chained cause. ``mode="tags"`` takes
    another way.
    """


class CompileError(DTRError, RuntimeError):
    """torch.compile cannot take a module, and ``fallback="error"`` asks for an error.

    Remedy: the message names the module; mark it with ``torch.compiler.disable`` or name others with
    `targets`. With another `fallback` it runs eagerly and the rest is planned around it.
    """


class VerificationFailed(DTRError, RuntimeError):
    """Training by the plan differs from training without it (``verify=True``); raised before step 1.

    Remedy: the table names what differs. Python state that changes the forward between calls belongs into a
    buffer, or its module out of `targets`. If nothing of yours explains it, please report it; the same
    training without this library, or with a budget that does not bind, is not affected.

    Args:
        message: What was compared.
        report: The `VerifyReport`, whose text ends the message.
    """

    report: Any

    def __init__(self, message: str, *, report: Any = None) -> None:
        self.report = report
        super().__init__(message if report is None else f"{message}\n{report}")


class RankFailed(DTRError, RuntimeError):
    """A rank of this run cannot go on, so none does. Every rank raises this, with the same text, but the one
    that failed, which raises its own error.

    Remedy: look at what that rank says itself. A rank that is slow and not dead gives signs of life; where
    something keeps Python from running for longer than ``DTR_RANK_TIMEOUT`` (seconds, 45 by default), raise
    that.

    Args:
        rank: The rank that cannot go on.
        stage: What was done when that came out: ``"planning"`` or ``"compiling"``.
        reason: Why it cannot.

    Attributes:
        rank, stage, reason: As given.
    """

    rank: int
    stage: str
    reason: str

    def __init__(self, *, rank: int, stage: str, reason: str) -> None:
        self.rank, self.stage, self.reason = rank, stage, reason
        super().__init__(f"rank {rank} cannot go on, found while {stage}; no rank trains. It {reason}")


class OperatorLogError(DTRError, ValueError):
    """A line of an operator log is not in the format.

    Remedy: the message names the line and what was expected there.
    """


class ProfilerActive(DTRError, RuntimeError):
    """A measurement needs the profiler while another one is running; two cannot.

    Remedy: leave the other profiler's scope first. Sampled measurements of a training run are skipped by
    themselves.
    """


class UnsupportedTorch(DTRError, ImportError):
    """The installed torch lacks a private part that this library relies on.

    Remedy: a torch version in the range of ``pyproject.toml``; the message names the missing part.
    """


class MissingExtra(DTRError, ImportError):
    """An optional package is not installed.

    Remedy: the ``pip install`` line in the message.

    Args:
        what: What was asked for, such as ``"AutoCheckpoint"``.
        package: The package that could not be imported.
        extra: The extra of ``dtr-integrations`` that brings it.
    """

    def __init__(self, *, what: str, package: str, extra: str) -> None:
        super().__init__(
            f"{what} needs {package}, which is not installed: pip install 'dtr-integrations[{extra}]'"
        )


class PlanWarning(UserWarning):
    """A plan is in force, but not quite as asked: over budget on purpose, or with a part left unplanned.

    Remedy: the message says what differs and how to get what was asked.
    """


class NothingPlanned(PlanWarning):
    """No plan is in force: nothing compiled, or it compiled to no graph. Memory is as without this library.

    Remedy: the message gives the reason; most often `targets` names modules that the step does not call.
    """


def _both(n: int) -> str:
    return f"{format_bytes(n)} ({n:,} bytes)"
