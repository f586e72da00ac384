"""What a user is told about a plan: warnings with their reason and what to do."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence

from ..core.peak import PeakReport
from ..core.plan import Plan
from ..errors import NothingPlanned, PlanWarning
from ..online import OnlineReport
from ..pipeline import Planned
from ..units import format_bytes

log = logging.getLogger("dtr_integrations")

WHAT_TO_DO = (
    "Mark it with torch.compiler.disable, name what does compile with targets=[...], or see the cause with "
    "torch.compile(module) alone."
)
_PATHS_SHOWN = 4


def shown(message: str) -> None:
    """One line on stderr: planning takes seconds, and nobody should wonder what they are for."""
    sys.stderr.write(f"dtr_integrations: {message}\n")


def say_plan(plan: Plan) -> None:
    """Log a plan that comes into force; a warning when it is over the budget."""
    if plan.required_bytes > plan.budget_bytes:
        warnings.warn(
            f"no plan fits {format_bytes(plan.budget_bytes)}; using the lowest one, which needs "
            f"{format_bytes(plan.required_bytes)} (on_infeasible='best_effort')",
            PlanWarning,
            stacklevel=4,
        )
    log.info(
        "planned: %s of %s, slowdown %.3f, %d graphs (default compile: %s)",
        format_bytes(plan.required_bytes),
        format_bytes(plan.budget_bytes),
        plan.slowdown,
        len(plan.schedule),
        format_bytes(plan.default_allocated_bytes),
    )


def warn_of_nothing(model: str, budget: str, reason: str) -> None:
    """Nothing was planned, and the run goes on without."""
    warnings.warn(
        f"nothing was planned for {model}, it runs eagerly and the budget {budget!r} is not enforced: "
        f"{reason}",
        NothingPlanned,
        stacklevel=4,
    )


def why_nothing(planned: Planned) -> str:
    """Why a captured step has no graph to plan."""
    captured = planned.captured
    if captured.left_out:
        texts = (
            f"torch.compile cannot take {n or 'the model'}: {why}" for n, why in captured.left_out.items()
        )
        return "; ".join(texts)
    if not captured.called:
        return (
            "no target module is called by the training step (a method other than forward, or another "
            "module, does the work). Name the modules that are called with targets=[...]."
        )
    return (
        f"compiling {', '.join(n or 'the model' for n in captured.called)} gave no graph with a backward "
        "(every frame was skipped by torch.compile, or no parameter needs a gradient)."
    )


def warn_of_checkpointing(planned: Planned) -> None:
    """The model checkpoints activations by itself."""
    paths = planned.captured.checkpointed
    outermost = [p for p in paths if not any(p != q and p.startswith(f"{q}.") for q in paths)]
    named = ", ".join(path or "the model" for path in outermost[:_PATHS_SHOWN])
    more = f" and {len(outermost) - _PATHS_SHOWN} more" if len(outermost) > _PATHS_SHOWN else ""
    in_force = (
        "The budget does not bind, so that stays in force; without it the step would be faster. "
        if planned.plan.is_default
        else "The plan decides alone what is recomputed, that checkpointing is not stacked on it. "
    )
    warnings.warn(
        f"the model checkpoints activations by itself (inside {named}{more}). {in_force}"
        "Take it out: no checkpoint_wrapper or checkpoint() around the modules, "
        "gradient_checkpointing_disable() in Hugging Face models.",
        PlanWarning,
        stacklevel=4,
    )


def say_online(reports: Sequence[OnlineReport], when: str) -> None:
    """Log what the online runtime did so far, module by module."""
    for report in reports:
        log.info(
            "online %s, %s: %d evictions, %d rematerialisations, %.3f s added; because %s",
            report.module or "(the model)",
            when,
            report.evictions,
            report.rematerialisations,
            report.added_seconds,
            report.why,
        )


def warn_of_last_graph(module: str, limit: int, *, falls_back: bool = False) -> None:
    """A module has got the last graph that torch's recompile limit allows. `falls_back`: the next step runs
    it online."""
    if falls_back:
        log.warning(
            "%s has been compiled %d times for different shapes or branches, as often as "
            "torch._dynamo.config.recompile_limit allows: the next step is planned with it online",
            module,
            limit,
        )
        return
    warnings.warn(
        f"{module} has been compiled {limit} times for different shapes or "
        "branches, as often as torch._dynamo.config.recompile_limit allows: whatever else comes runs "
        "eagerly, outside of the plan. Pad to few lengths, keep Python numbers that change from step to "
        "step out of forward, name the parts with constant shapes in targets=[...], or raise the limit.",
        PlanWarning,
        stacklevel=2,
    )


def warn_of_excess(report: PeakReport, predicted_bytes: int, *, plans_again: bool) -> None:
    """A measured step was over the budget."""
    then = (
        "Planning again with that added to the reserve." if plans_again else "Set reserve= to leave it room."
    )
    warnings.warn(
        f"step {report.step} used {format_bytes(report.used_bytes)}, "
        f"{format_bytes(report.used_bytes - report.budget_bytes)} above the budget "
        f"{format_bytes(report.budget_bytes)} (predicted: {format_bytes(predicted_bytes)}). {then}",
        PlanWarning,
        stacklevel=5,
    )
