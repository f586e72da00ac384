"""The lifecycle of one run under a budget: install, plan before the first real forward, measure, compare,
restore.

An adapter supplies a `StepSource` (how one step is run) and says when a step begins and ends; everything else
is here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._python_state import Referred, referred_to
from .._randomness import preserved_randomness
from ..apply import registry
from ..apply.dispatch import InPlace
from ..apply.partitioner import PlanPartitioner, planned_options
from ..capture.buckets import Buckets
from ..capture.closure import BetweenSteps, FunctionStep
from ..capture.source import StepSource
from ..capture.step import Captured, Parts, reason
from ..config import DTRConfig
from ..core.peak import PeakReport
from ..core.plan import Plan
from ..distributed import Calibration
from ..errors import (
    BudgetInfeasible,
    CaptureError,
    CertifyError,
    CompileError,
    ConfigError,
    DTRError,
    PlanMismatch,
    PlanWarning,
    VerificationFailed,
)
from ..gate import VerifyReport, check
from ..measure import (
    PeakLog,
    StepTrace,
    TracedPeak,
    device_total_bytes,
    is_measured,
    live_bytes,
    optimizer_state_tensors,
    tensors_in,
)
from ..online import OnlineReport, OnlineStep
from ..pipeline import Planned, Progress, make_plan, planned_partitioner, silent
from ..units import format_bytes
from .batches import Batches
from .decisions import Decisions
from .notices import (
    WHAT_TO_DO,
    say_online,
    say_plan,
    shown,
    warn_of_checkpointing,
    warn_of_excess,
    warn_of_last_graph,
    warn_of_nothing,
    why_nothing,
)
from .peaks import StepPeaks
from .ranks import Ranks, standing_of

log = logging.getLogger("dtr_integrations")
_MAX_REPLANS = 2


class BudgetSession:
    """One model trained under one budget on one rank.

    Made by `auto_checkpoint` or by an adapter; `plan` is None until the first training call (or `prepare`).

    Attributes:
        planned: the plan with all that led to it (`pipeline.Planned`), or None.
        reports: one `PeakReport` for each measured optimizer step.
        trace: the last measured step's `TracedPeak`, or None.
        buckets: of a `DistributedDataParallel` around the model, or None.
    """

    def __init__(
        self,
        config: DTRConfig,
        model: nn.Module,
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        device: torch.device | None = None,
        rank: int = 0,
        world_size: int = 1,
        progress: Progress | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.optimizers = list(optimizers)
        self.device = device or _device_of(model)
        self.rank, self.world_size = rank, world_size
        self.planned: Planned | None = None
        self.reports: list[PeakReport] = []
        self.trace: TracedPeak | None = None
        self.step_count = 0
        self._ranks = Ranks(rank, world_size)
        self._progress = progress or (shown if config.progress else silent)
        self._budget_bytes: int | None = None
        self._in_place: InPlace | None = None
        self._installed: tuple[str, ...] = ()
        self._registered = ""
        self._calibration = Calibration(self.device.type, config.reserve_bytes())
        self._replans = 0
        self._settled = False  # planned, or given up on
        self._closed = False
        self._parts: Parts | None = None  # what torch.compile can take, if that is not every target
        self._carried: tuple[str, Parts] | None = None  # the digest and the parts that are compiled by
        self._failed: dict[str, str] = {}  # targets that failed when they ran for real, since the last plan
        self._endless: dict[str, str] = {}  # targets that are compiled anew without end, likewise
        self._online: OnlineStep | None = None
        self._batches = Batches()
        self._gradients = BetweenSteps()
        self._grown = False  # the plan in force is for smaller batches
        self._unproven = False  # given up on because the dry run failed; the step may be at fault itself
        self._verified = False
        self._measured_before_plan = 0
        # There before a trace on the CPU begins and not known to it: of the batch, and DDP's buckets.
        self._unseen_batch_bytes = self._bucket_bytes = 0
        self.buckets: Buckets | None = None
        self._peaks = StepPeaks(model, self.optimizers, self.device)
        self._decisions = Decisions(self.device.type, self._measure_soon)
        self._log: PeakLog | None = None

    # -- what users read -------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first training call, or when nothing could be planned."""
        return self.planned.plan if self.planned is not None else None

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes; a share of the device's total is resolved when first asked for."""
        if self._budget_bytes is None:
            total = device_total_bytes(self.device, self._ranks_on_host())
            self._budget_bytes = self.config.budget_bytes(total)
            if self._budget_bytes > total:
                warnings.warn(
                    f"the budget {self.config.budget!r} is above the total of {self.device}: "
                    f"{format_bytes(total)}",
                    PlanWarning,
                    stacklevel=2,
                )
        return self._budget_bytes

    @property
    def report(self) -> str:
        """The plan and the measured peaks as text for people."""
        from ..report import session_text  # rich is only needed when somebody looks

        return session_text(self.planned, self.reports, self.online)

    @property
    def online(self) -> tuple[OnlineReport, ...]:
        """What the online runtime did so far, module by module; nothing where none runs under it."""
        return self._online.reports if self._online is not None else ()

    # -- lifecycle -------------------------------------------------------------------------------------------

    @property
    def needs_plan(self) -> bool:
        """True until planned; true again when a measured step showed the plan to be over the budget."""
        return not self._settled

    def plans_for(self, batch: Any) -> bool:
        """Whether `prepare` has to be called before a step with this batch: there is no plan yet, the batch
        is larger than any that was planned for, or it has other shapes than one that could not be planned (a
        bounded number of times; then graphs are planned on the spot, or not)."""
        tensors = list(tensors_in(batch))
        if self.plan is not None and self.plan.schedule and self.config.plan is None:
            left_bytes = self.plan.budget_bytes - self.plan.required_bytes
            if self._batches.outgrown_by(tensors, left_bytes=left_bytes):
                size = format_bytes(live_bytes(tensors))
                log.warning("the step comes with %s, more than was planned for: planning again", size)
                self._settled, self._grown = False, True
        if self._unproven and self._batches.differ_from(tensors):
            self._settled = False
        if self.needs_plan:
            self._batches.plan_for(tensors)
        return self.needs_plan

    def wrapped_in(self, parallel: Any) -> None:
        """The module around the model, as data parallelism has it. Of a DDP the buckets count from now on."""
        self.buckets = Buckets.of(parallel, self.model)
        self._bucket_bytes = self.buckets.bytes_of(self.model) if self.buckets is not None else 0
        self._peaks.gradients_are_buckets = self.buckets is not None and self.buckets.as_views

    def install(
        self,
        targets: Mapping[str, nn.Module],
        before_call: Callable[..., None] | None = None,
        after_call: Callable[[str, Any], None] | None = None,
    ) -> None:
        """Put the dispatchers into the target modules (names in `model`). Nothing is compiled yet.

        `before_call` and `after_call` are called around each training call of a target. By default the first
        step is taken to be `compiled` when a target has returned.
        """
        self._installed = tuple(targets)
        self._in_place = InPlace(
            targets, before_call or (lambda name, args, kwargs: None), self._compile_failed
        )
        self._in_place.last_graph = self._last_graph
        self._in_place.kept = self._graph_kept
        self._in_place.after_call = after_call or (lambda name, out: self.compiled())

    def prepare(self, source: StepSource) -> None:
        """Plan the step that `source` describes and compile by it from now on. Before any real forward.

        With several ranks the first plan is agreed on: this returns when all have one.

        Raises `BudgetInfeasible`, `PlanMismatch`, `RankFailed`; `CaptureError` only with `fallback="error"`,
        otherwise the modules run eagerly with a `NothingPlanned` warning. With `verify=True`, once:
        `VerificationFailed` when training by the plan differs, `CaptureError` when that cannot be found out.
        The model, gradients and random state are as before in every case.
        """
        if self._closed:
            raise ConfigError("this session is closed; make a new one to train under a budget again")
        if not self._ranks.is_to_agree:
            self._plan_and_adopt(source)
            return
        try:
            self._plan_and_adopt(source)
        except BaseException as error:
            self._ranks.failed(error)
            raise
        standing = standing_of(self.rank, self.budget_bytes, self.model, self.planned)
        try:
            self._ranks.settle(standing, self.plan, lambda plan: self._take_over(source, plan))
        except BaseException:
            self._unplan()
            raise

    def compiled(self) -> None:
        """All that the first step compiles before its backward is compiled on this rank: wait for the other
        ranks, once. Raises `RankFailed`."""
        self._ranks.compiled()

    def _plan_and_adopt(self, source: StepSource) -> None:
        self._settled, self._unproven = True, False
        try:
            planned = self._planned_for(
                source,
                options=self.config.compile_options,
                # The plan in force knows nothing of a larger batch: the lowest one is nearer to the budget.
                best_effort=self.config.on_infeasible == "best_effort" or self._grown,
                given=read_plan(self.config.plan),
            )
        except (CaptureError, CertifyError) as error:
            if self.planned is None and self.config.fallback == "error":
                raise
            if self.planned is None:
                self._give_up(f"the step could not be captured: {error}")
                self._unproven = True
            else:
                self._keep_plan(error)
            return
        except BudgetInfeasible as error:
            if self.planned is None:
                self._settled = False  # nothing was changed: the caller may try again
                raise
            self._keep_plan(error)
            return
        except DTRError:
            self._settled = False
            raise
        except Exception as error:
            # Ours, not the user's: it must not end a training that would go on without.
            if self.config.fallback == "error":
                raise CaptureError(f"planning failed: {reason(error)}") from error
            log.exception("planning failed; please report this")
            self._give_up(f"planning failed, please report it: {reason(error)}")
            return
        except BaseException:  # an interrupt too: the next call plans again
            self._settled = False
            raise
        self._say_what_is_left_out(planned.captured)
        if planned.captured.checkpointed:
            warn_of_checkpointing(planned)
        if not planned.captured.step.graphs:
            if self.config.fallback == "error":
                raise CaptureError(why_nothing(planned))
            if self.config.fallback == "eager":
                self._give_up(why_nothing(planned))
                return
        self._adopt(planned)
        if self.config.verify and not self._verified and planned.plan.schedule:
            self._prove(source)

    def verify(self, source: StepSource, *, steps: int = 3) -> VerifyReport:
        """Compare `steps` steps of training by the plan in force with training without it, on copies.

        `source` is the step that was planned. Nothing real changes. Raises `CaptureError` when the step
        cannot be run on copies of its objects.
        """
        if self.plan is None:
            raise ConfigError("there is no plan to verify: nothing was planned")
        options = self.config.compile_options

        @contextlib.contextmanager
        def with_options(other: Mapping[str, Any]) -> Iterator[Any]:
            planned = self._planned_for(source, options=dict(other), best_effort=True)
            with planned_partitioner(planned.plan.schedule, mode=planned.plan.mode) as partitioner:
                yield partitioner, planned_options(other, is_default=planned.plan.is_default)

        return check(
            source,
            self._carrier(),
            options=options,
            with_eagers_numbers=with_options,
            parts=self._parts,
            steps=steps,
            progress=self._progress,
        )

    def close(self) -> None:
        """Restore the modules. The plan and the reports stay readable; calling twice is fine."""
        if self._online is not None and not self._closed:
            self.leave_step()
            say_online(self.online, "over the run")
        self._closed = True
        self._ranks.close()
        if self._in_place is not None:
            self._in_place.remove()
            self._in_place = None
        registry.unregister(self._registered)

    def __enter__(self) -> BudgetSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- a step's scope --------------------------------------------------------------------------------------

    def enter_step(self, batch: Any = ()) -> None:
        """A step (or a micro-batch of one) with this batch begins; modules that run online need to see all of
        it. Nothing happens where none does, or if the step has begun."""
        if self._online is not None:
            self._online.open(tensors_in(batch))

    def leave_step(self) -> None:
        """It has ended, or was given up; calling twice is fine."""
        if self._online is not None:
            self._online.close()

    # -- measuring -------------------------------------------------------------------------------------------

    def should_measure(self, *, last_step: int | None = None) -> bool:
        """Whether the optimizer step that comes next is one to measure."""
        if self.buckets is not None and self.step_count == 1:  # DDP lays its buckets out anew in it
            return False
        return self.plan is not None and is_measured(
            self.step_count + 1,
            every=self.config.log_every_n_steps,
            measured_so_far=len(self.reports) - self._measured_before_plan,
            last_step=last_step,
        )

    def tracing(self, batch: Any = ()) -> contextlib.AbstractContextManager[None]:
        """Trace one stretch of a step (a micro-batch, or all of it) and keep the highest for
        `finish_step`."""
        return self._peaks.tracing(batch)

    def open_trace(self, batch: Any = ()) -> StepTrace:
        """Begin tracing; hand the result to `close_trace`, or call its `abandon()`."""
        return self._peaks.open(batch)

    def close_trace(self, trace: StepTrace) -> None:
        """End tracing; keeps the trace with the highest peak of the step."""
        self._peaks.close(trace)

    def finish_step(self) -> PeakReport | None:
        """An optimizer step is done. Returns its report if it was traced, after writing it to the peak
        log."""
        self.step_count += 1
        highest = self._peaks.take()
        if highest is None or self.plan is None:
            return None
        self.trace, static = highest
        report = PeakReport(
            rank=self.rank,
            world_size=self.world_size,
            step=self.step_count,
            budget_bytes=self.budget_bytes,
            predicted_allocated_bytes=self.plan.predicted_allocated_bytes,
            peak_allocated_bytes=self.trace.peak_allocated_bytes
            or static + self.trace.peak_bytes + self._unseen_batch_bytes + self._bucket_bytes,
            peak_reserved_bytes=self.trace.peak_reserved_bytes,
            non_torch_bytes=self.trace.non_torch_bytes,
            reserve_bytes=self.plan.reserve_bytes,
            static_bytes=static,
            default_allocated_bytes=self.plan.default_allocated_bytes,
            plan_digest=self.plan.digest,
            source=self.trace.source,
        )
        self.reports.append(report)
        self._calibration.measure(report, known_bytes=self._grown_bytes(report))
        say_online(self.online, f"to step {self.step_count}")
        if self._log is not None:
            self._log.append(report)
        if self._settled:  # else a module fell back in this step, and the next one is planned without it
            self._reconcile(report)
        return report

    def step(self, fn: Callable[[], Any]) -> Any:
        """Run `fn()`, one whole optimizer step (forward, loss, backward, optimizer), under the budget;
        returns its value.

        The first call plans from the whole of `fn`, loss and optimizer included: `fn` is run on fake twins of
        what it refers to (model, optimizers, batch, schedulers), so it should do nothing but the step.
        Numbers that it reads off tensors there (`loss.item()`) are stand-ins.
        """
        if self._closed:
            raise ConfigError("this session is closed; make a new one to train under a budget again")
        refers = referred_to(fn)
        if self._gradients.zeroed is True and any(p.grad is not None for p in self.model.parameters()):
            log.warning("old gradients are there when the step begins: planning again with them")
            self._gradients.zeroed, self._settled = False, False
        for module in refers.modules if self.plan is None else ():
            if Buckets.of(module, self.model) is not None:
                self.wrapped_in(module)
        if self.plans_for(refers.tensors):
            self.prepare(
                FunctionStep(
                    fn=fn,
                    model=self.model,
                    optimizers=tuple(self.optimizers),
                    targets=self._targets(),
                    between=self._gradients,
                )
            )
        measures = self.should_measure()
        tracing = self.tracing(_all_tensors(refers)) if measures else contextlib.nullcontext()
        self.enter_step(refers.tensors)
        del refers  # the step may let go of what is in it
        try:
            with tracing:
                result = fn()
        except Exception:
            # It failed on fake tensors and it fails for real: not a step that cannot be planned.
            self._settled = self._settled and not self._unproven
            raise
        finally:
            self.leave_step()
        self._unproven = False
        self.finish_step()
        return result

    # -- inside ----------------------------------------------------------------------------------------------

    def _targets(self) -> tuple[str, ...]:
        return tuple(self.config.targets) if self.config.targets else ("",)

    def _ranks_on_host(self) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def _planned_for(
        self, source: StepSource, *, options: dict[str, Any], best_effort: bool, given: Plan | None = None
    ) -> Planned:
        with preserved_randomness():
            return make_plan(
                source,
                budget_bytes=self.budget_bytes,
                reserve=self._calibration.reserve(self.budget_bytes),
                device=self.device.type,
                options=options,
                mode=self.config.mode,
                best_effort=best_effort,
                given=given,
                parts=self._parts,
                failed=self._failed,
                endless=self._endless,
                online=self.config.fallback == "dtr",
                progress=self._tell,
            )

    def _carrier(self) -> tuple[PlanPartitioner, dict[str, Any]]:
        """What carries out the plan in force, and Inductor's options for it."""
        plan = self.plan
        assert plan is not None
        digest = f"{plan.digest}-{plan.budget_bytes}"
        options = planned_options(self.config.compile_options, is_default=plan.is_default)
        return PlanPartitioner(self._registered, digest), options

    def _prove(self, source: StepSource) -> None:
        try:
            report = self.verify(source)
            if not report.ok:
                raise VerificationFailed(
                    "training by this plan is not the same training; nothing was trained yet", report=report
                )
        except BaseException:
            self._unplan()
            raise
        self._verified = True
        self._progress(f"verified: {len(report.rows)} values of {report.steps} steps are in order")

    def _unplan(self) -> None:
        """As before: the next call plans and verifies again."""
        self.planned, self._settled, self._carried = None, False, None
        self._run_online({}, {})
        registry.unregister(self._registered)
        if self._in_place is not None:
            self._in_place.run_eagerly()

    def _take_over(self, source: StepSource, plan: Plan) -> str:
        """Carry out the plan of a rank with the same graphs. Returns the digest of the plan in force then."""
        assert self.plan is not None
        try:
            planned = self._planned_for(
                source, options=self.config.compile_options, best_effort=False, given=plan
            )
        except DTRError as error:
            log.warning("rank %d keeps a plan of its own for the graphs it shares: %s", self.rank, error)
        else:
            self._adopt(planned)
        return self.plan.digest

    def _tell(self, message: str) -> None:
        self._ranks.check()
        self._progress(message)

    def _adopt(self, planned: Planned) -> None:
        self.planned, self._grown = planned, False
        self._batches.planned_bytes = planned.captured.step.static.batch_bytes
        self._decisions.adopt(planned)
        self._measure_soon()
        plan = planned.plan
        parts = planned.captured.parts or Parts(targets=self._installed)
        self._run_online(_why_online(planned) if self.config.fallback == "dtr" else {}, planned.rises)
        carried, self._carried = self._carried, (plan.digest, parts)
        if self._carried != carried:  # else what is compiled stays as it is
            self._compile_by_plan(parts)
        if self.config.run_dir is not None:
            directory = Path(self.config.run_dir)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / f"plan-rank{self.rank}.json").write_text(plan.to_json())
            if self._log is None:
                self._log = PeakLog(directory, self.rank)
                self._log.start()
        say_plan(plan)

    def _run_online(self, why: Mapping[str, str], rises: Mapping[tuple[str, bool], int]) -> None:
        """From the next step on these modules run online, in what the rest of the step leaves of the
        budget."""
        self.leave_step()
        if not why:
            self._online = None
            return
        budget_bytes = self.budget_bytes - self._calibration.reserve(self.budget_bytes).total_bytes
        if self.plan is not None:  # with on_infeasible="best_effort" the plan may need more
            budget_bytes = max(budget_bytes, self.plan.predicted_allocated_bytes)
        if self._online is None:
            self._online = OnlineStep(self.model, self.optimizers, budget_bytes=budget_bytes)
        self._online.use(why, rises=rises, budget_bytes=budget_bytes)

    def _compile_by_plan(self, parts: Parts) -> None:
        assert self.plan is not None
        registry.unregister(self._registered)
        self._registered = registry.register(registry.Entry(decide=self._decisions, mode=self.plan.mode))
        if self._in_place is not None:
            partitioner, options = self._carrier()
            self._in_place.use(
                partitioner,
                options,
                targets={name: self.model.get_submodule(name) for name in parts.targets},
                excluded={name: self.model.get_submodule(name) for name in parts.excluded},
                donates=parts.donates,
                around=self._online.around if self._online is not None else None,
                entering=self._online.entering if self._online is not None else None,
            )

    def _measure_soon(self) -> None:
        self._measured_before_plan = len(self.reports)

    def _say_what_is_left_out(self, captured: Captured) -> None:
        """Warn of modules that torch.compile cannot take, each once; an error with fallback="error"."""
        known = {**(self._parts.excluded if self._parts is not None else {}), **self._failed}
        self._failed, self._endless = {}, {}
        self._parts = captured.parts
        new = {name: why for name, why in captured.left_out.items() if name not in known}
        if self.config.fallback == "dtr":
            for name, why in new.items():
                log.warning(
                    "%s runs under the online runtime, in what the rest leaves of the budget: %s",
                    self._named(name),
                    why,
                )
            return
        texts = [f"torch.compile cannot take {self._named(name)}: {why}" for name, why in new.items()]
        if texts and self.config.fallback == "error":
            raise CompileError(f"{'; '.join(texts)}. {WHAT_TO_DO}")
        if captured.step.graphs:  # else there is one warning for all
            for text in texts:
                warnings.warn(
                    f"{text}. It runs eagerly, and the rest is planned around it.", PlanWarning, stacklevel=4
                )

    def _compile_failed(self, name: str, error: Exception, instead: str, *, gives_up: bool) -> None:
        text = f"torch.compile failed in {self._named(name)}: {reason(error)}"
        if self.config.fallback == "error":
            raise CompileError(f"{text}. {WHAT_TO_DO}") from error
        warnings.warn(f"{text}. Instead, {instead}. {WHAT_TO_DO}", PlanWarning, stacklevel=4)
        if gives_up:
            self._failed[name] = reason(error)
            self._settled = False  # the next step is planned without it

    def _last_graph(self, name: str, limit: int) -> None:
        warn_of_last_graph(self._named(name), limit, falls_back=self.config.fallback == "dtr")
        if self.config.fallback == "dtr":
            self._endless[name] = f"it was compiled {limit} times for different shapes or branches"
            self._settled = False

    def _graph_kept(self, name: str) -> None:
        warnings.warn(
            f"the graph of {self._named(name)} is kept for another backward (retain_graph=True), and what "
            "was compiled for the steps before may overwrite it. The next step is planned for that; if torch "
            "refuses this one, run it once more. To have it from the start, keep the graph in the first "
            "step.",
            PlanWarning,
            stacklevel=4,
        )
        parts = self._parts or Parts(targets=self._installed)
        self._parts, self._settled = replace(parts, donates=False), False

    def _named(self, name: str) -> str:
        kind = type(self.model.get_submodule(name)).__name__
        return f"{name} ({kind})" if name else kind

    def _keep_plan(self, error: DTRError) -> None:
        """A run that has begun is not ended by what was learnt in it: the plan in force stays."""
        self._replans = _MAX_REPLANS
        warnings.warn(f"no better plan was found, the one in force stays: {error}", PlanWarning, stacklevel=4)

    def _give_up(self, reason: str) -> None:
        self._carried = None
        if self.config.fallback == "dtr":
            log.warning(
                "%s runs under the online runtime, the whole step: %s", type(self.model).__name__, reason
            )
            self._run_online({"": reason}, {})
            if self._in_place is not None and self._online is not None:
                self._in_place.run_eagerly({"": self.model}, self._online.entering)
            return
        if self._in_place is not None:
            self._in_place.run_eagerly()
        warn_of_nothing(type(self.model).__name__, self.config.budget, reason)

    def _reconcile(self, report: PeakReport) -> None:
        """Compare a measured step with the budget; over it, learn the excess and ask for a new plan (bounded
        tries)."""
        assert self.plan is not None
        if report.within_budget or self.plan.required_bytes > self.plan.budget_bytes:
            return
        again = self._replans < _MAX_REPLANS
        warn_of_excess(report, self.plan.required_bytes, plans_again=again)
        if again:
            self._replans += 1
            self._calibration.learn(report, known_bytes=self._grown_bytes(report))
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # or what the old plan's blocks take would count for the new one
            self._settled = False

    def _grown_bytes(self, report: PeakReport) -> int:
        """What static memory has grown by since the plan: the next capture sees it by itself."""
        return max(0, report.static_bytes - self.plan.static_bytes) if self.plan is not None else 0


def _all_tensors(refers: Referred) -> list[torch.Tensor]:
    """What is referred to, with all that other modules (a teacher, an average) and optimizers hold."""
    modules = [t for module in refers.modules for t in (*module.parameters(), *module.buffers())]
    states = [t for optimizer in refers.optimizers for t in optimizer_state_tensors(optimizer)]
    return [*refers.tensors, *modules, *states]


def _why_online(planned: Planned) -> Mapping[str, str]:
    """The modules that are to run online; the whole step where nothing is compiled."""
    captured = planned.captured
    if captured.left_out or captured.step.graphs:
        return captured.left_out
    return {"": why_nothing(planned)}


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def read_plan(path: str | None) -> Plan | None:
    """The plan in a file, or None for None. Raises `PlanMismatch` when it cannot be read."""
    if path is None:
        return None
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanMismatch(
            f"plan={path!r} cannot be read: {error}. Make one with plan(...).to_json()."
        ) from error
    return Plan.from_json(text)
