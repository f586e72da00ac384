"""capture → search → certify, as plain functions (design §1): from a `StepSource` to a certified `Plan`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from .apply import registry
from .apply.partitioner import PlanPartitioner, planned_options
from .capture.costs import measured_rates
from .capture.joint import describe, fingerprint
from .capture.parts import capture_parts
from .capture.scratch import Scratch
from .capture.source import StepSource
from .capture.step import Captured, DryRun, Parts, certify
from .capture.uncompiled import uncompiled_peak_bytes
from .core.graph import JointGraph, Phase, RegionKind, StepGraph
from .core.plan import GraphSchedule, Plan
from .core.profile import ONLINE, StepProfile
from .core.schedule import default_schedules, faithful_schedule, schedule_for
from .core.simulate import NO_CORRECTION, Correction, Observation, correct, simulate_step
from .distributed import Reserve
from .errors import BudgetInfeasible, CaptureError, CertifyError, PlanMismatch
from .measure import call_peak_bytes
from .planner import Frontier, FrontierPoint, Problem, search
from .planner.bound import bound_at, with_bounds
from .units import format_bytes

# Certifying costs about a compile's front half; the simulator is mostly within 2 %, so few rounds settle it.
_MAX_ROUNDS = 6
# A certified plan that leaves more than this share of the dynamic budget unused is worth one more round.
_SLACK_WORTH_A_ROUND = 0.03
# A lowest plan that is certified to be over by more than this share: no correction of the simulator saves it.
_HOPELESS = 0.25
# The lowest plan has been found when so many rounds bring it down by no more than this share of the default's
# dynamic peak.
_ROUNDS_IN_VAIN, _LOWER_WORTH_A_ROUND = 2, 0.005

# Measured once per op and shape, so for the whole process.
_SCRATCH = Scratch(call_peak_bytes)

_MORE_ONLINE = (
    "somewhat more than that: how little the modules under the online runtime can do with shows when they run"
)

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan with all that led to it. `profile` is the exact dry run of the plan, `rounds` the plans
    certified. `fingerprints`: of the graphs, by the index that the profile's regions use. With modules that
    run online, `profile` is of the step in which those hold `online_share` of what they may evict."""

    plan: Plan
    captured: Captured
    frontier: Frontier
    profile: StepProfile
    correction: Correction
    rounds: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    fingerprints: tuple[str, ...] = ()
    online_share: float = 1.0

    @property
    def rises(self) -> Mapping[tuple[str, bool], int]:
        """How far live bytes rise in each graph, by its fingerprint and whether it is the backward."""
        rises: dict[tuple[str, bool], int] = {}
        for region in self.profile.regions:
            if region.graph >= 0:
                key = self.fingerprints[region.graph], region.kind == RegionKind.BACKWARD
                rises[key] = max(rises.get(key, 0), region.rise_bytes)
        return rises


def silent(message: str) -> None:
    """The progress callback that shows nothing."""


def make_plan(
    source: StepSource,
    *,
    budget_bytes: int,
    reserve: Reserve,
    device: str = "cpu",
    options: dict[str, Any] | None = None,
    mode: str = "schedule",
    best_effort: bool = False,
    given: Plan | None = None,
    parts: Parts | None = None,
    failed: Mapping[str, str] | None = None,
    endless: Mapping[str, str] | None = None,
    online: bool = False,
    progress: Progress = silent,
) -> Planned:
    """Plan one step under `budget_bytes` (the rank's total; the reserve comes off it).

    Raises `BudgetInfeasible` with the lowest reachable bytes when nothing fits (`best_effort`: returns the
    lowest plan), `PlanMismatch` when `given` (a plan made earlier) is not for this step, `CaptureError` when
    the step cannot be captured. `parts`: what an earlier plan of this run left out (`Captured.parts`);
    `failed`: the targets that failed for real since then, and why; `endless`: those that are compiled anew
    without end. `online`: what is left out, and what depends on data, will run under the online runtime: it
    may evict there, and the compiled parts are planned for the share of the budget that is theirs.
    """
    clock = _Clock()
    progress("capturing the training step")
    whole = capture_parts(
        source,
        parts=parts,
        failed=failed,
        endless=endless,
        online=online,
        options=options,
        device=device,
        scratch=_SCRATCH,
    )
    clock.lap("capture")
    target = budget_bytes - reserve.total_bytes
    for share in _shares(whole, target):
        captured = whole.holding(share)
        bench = _Bench(
            source=source, captured=captured, share=share, options=options, mode=mode, progress=progress
        )
        problem = Problem(step=captured.step, correction=NO_CORRECTION, focus_bytes=target)
        if given is not None:
            best = bench.run(_given_schedules(given, captured.step))
            correction = bench.correction()
            frontier = search(replace(problem, correction=correction))
        else:
            progress("searching")
            best, frontier, correction = _search_certified(bench, problem, target)
        if best.peak_bytes <= target:
            break
    advice = _advice(source, whole, target, reserve, device)
    # Where nothing is compiled, or sizes are not known, the runtime finds out what fits.
    sized = whole.parts is None or whole.parts.sized
    decided_online = online and (not whole.step.graphs or not sized)
    if best.peak_bytes > target and not best_effort and not decided_online:
        raise _infeasible(captured, frontier, bench.promised or best, budget_bytes, reserve, advice)
    clock.lap("search and certify")
    allocated_bytes = best.peak_bytes + _more_online(best.profile, target)
    if decided_online:
        allocated_bytes = min(allocated_bytes, target)
    plan = Plan(
        budget_bytes=budget_bytes,
        predicted_allocated_bytes=allocated_bytes,
        default_allocated_bytes=whole.default.peak_bytes,
        static_bytes=whole.default.static_bytes,
        reserve_bytes=reserve.total_bytes,
        slowdown=best.slowdown,
        slowdown_lower_bound=_lower_bound(replace(problem, correction=correction), best),
        schedule=best.schedules,
        simulated_bytes=best.simulated_bytes,
        breakdown=_breakdown(best.profile, allocated_bytes),
        reserve=dict(reserve.lines),
        mode=mode,
        notes=(*advice, *_faults_of_default(captured)),
    )
    return Planned(
        plan=plan,
        captured=whole,
        frontier=frontier,
        profile=best.profile,
        correction=correction,
        rounds=bench.rounds,
        seconds=clock.laps,
        fingerprints=best.fingerprints,
        online_share=share,
    )


def _shares(whole: Captured, target: int) -> tuple[float, ...]:
    """What share of what they may evict modules that run online are taken to hold while the rest is planned:
    the share that the whole step has to come down to, so that both give up alike; if nothing fits then,
    less. What they really hold is what the others leave at each moment."""
    peak, static = whole.default.peak_bytes, whole.default.static_bytes
    if peak <= target or not whole.default.lifetimes:
        return (1.0,)
    share = max(target - static, 0) / max(peak - static, 1)
    return (share, share / 2, 0.0)


def _more_online(profile: StepProfile, target: int) -> int:
    """How much more than in `profile` online modules hold at the peak: they evict no more than they must."""
    return max(min(profile.whole_peak_bytes, target) - profile.peak_bytes, 0)


def _breakdown(profile: StepProfile, allocated_bytes: int) -> dict[str, int]:
    """Who holds `allocated_bytes` at the peak; nothing where only the step itself can say that."""
    more_bytes = allocated_bytes - profile.peak_bytes
    if not more_bytes:
        return dict(profile.breakdown)
    if more_bytes < 0:
        return {}
    return {**profile.breakdown, ONLINE: profile.breakdown.get(ONLINE, 0) + more_bytes}


def default_frontier(default: Certified) -> Frontier:
    """The frontier of which only the default is known."""
    point = FrontierPoint(peak_bytes=default.peak_bytes, slowdown=1.0, schedules=default.schedules)
    return Frontier(points=(point,))


def make_frontier(
    source: StepSource,
    *,
    device: str = "cpu",
    options: dict[str, Any] | None = None,
    focus_bytes: int | None = None,
) -> Frontier:
    """Capture the step and search it whole; peaks are the search tier's (exact for the default). Raises
    `CaptureError`."""
    captured = capture_parts(source, options=options, device=device, scratch=_SCRATCH)
    bench = _Bench(source=source, captured=captured, options=options, mode="schedule", progress=silent)
    bench.unchanged()
    problem = Problem(step=captured.step, correction=bench.correction(), focus_bytes=focus_bytes)
    return with_bounds(problem, search(problem))


@dataclass(frozen=True, kw_only=True)
class Certified:
    """One plan with its exact peak; `slowdown` is modelled, `simulated_bytes` what the search tier had
    thought."""

    schedules: tuple[GraphSchedule, ...]
    slowdown: float
    simulated_bytes: int
    profile: StepProfile
    fingerprints: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return self.profile.peak_bytes


@dataclass(kw_only=True)
class _Bench:
    """Certifies points of the frontier and remembers what it saw."""

    source: StepSource
    captured: Captured
    options: dict[str, Any] | None
    mode: str
    progress: Progress
    share: float = 1.0
    rounds: int = 0
    promised: Certified | None = None  # the lowest plan that is found whatever the budget is
    seen: dict[tuple[GraphSchedule, ...], Certified] = field(default_factory=dict)
    observations: dict[tuple[GraphSchedule, ...], list[Observation]] = field(default_factory=dict)

    def default(self) -> Certified:
        """Torch's own partition: certified by the capture itself, where it is carried out as it is."""
        schedules = tuple(map(faithful_schedule, self.captured.step.graphs))
        if not all(schedule.default for schedule in schedules):
            return self.run(schedules)
        return Certified(
            schedules=schedules,
            slowdown=1.0,
            simulated_bytes=self.captured.default.peak_bytes,
            profile=self.captured.default,
            fingerprints=tuple(graph.fingerprint for graph in self.captured.step.graphs),
        )

    def unchanged(self) -> Certified:
        """What the default saves, compiled as plans are: it frees buffers earlier, and recomputes no more."""
        graphs = self.captured.step.graphs
        return self.run(tuple(schedule_for(graph, graph.default_saved) for graph in graphs))

    def correction(self, of: Sequence[Certified] | None = None) -> Correction:
        """What the dry runs of plans (None: of all) say about the search tier. The default's own is no
        plan's: its kernels are grouped."""
        plans = self.observations if of is None else [certified.schedules for certified in of]
        return correct(NO_CORRECTION, [seen for plan in plans for seen in self.observations.get(plan, ())])

    def lowest(self, problem: Problem) -> Certified:
        """The lowest plan, found in the same way whatever the target is: what a refusal promises has to hold
        for a run that is given it."""
        default = self.captured.default
        focused = replace(problem, focus_bytes=default.static_bytes)
        least = _LOWER_WORTH_A_ROUND * (default.peak_bytes - default.static_bytes)
        seen = [self.unchanged()]
        lowest, in_vain = seen[0], 0
        for _ in range(_MAX_ROUNDS):
            certified = self.point(search(replace(focused, correction=self.correction(seen))).lowest)
            if certified in seen:
                break
            seen.append(certified)
            in_vain = 0 if lowest.peak_bytes - certified.peak_bytes > least else in_vain + 1
            lowest = min(lowest, certified, key=lambda certified: certified.peak_bytes)
            if in_vain == _ROUNDS_IN_VAIN:
                break
        return lowest

    def point(self, point: FrontierPoint) -> Certified:
        """The exact peak of a point of the frontier."""
        if all(schedule.default for schedule in point.schedules):
            self.seen[point.schedules] = self.default()
        known = self.seen.get(point.schedules)
        if known is None:
            run = self._dry(point.schedules)
            known = Certified(
                schedules=point.schedules,
                slowdown=point.slowdown,
                simulated_bytes=point.peak_bytes,
                profile=run.profile.holding(self.share),
                fingerprints=run.fingerprints,
            )
            self.seen[point.schedules] = known
            self._observe(known)
        return known

    def run(self, schedules: tuple[GraphSchedule, ...]) -> Certified:
        """The exact peak of schedules that the search did not find."""
        if all(schedule.default for schedule in schedules):
            return self.default()
        simulated = simulate_step(self.captured.step, schedules)
        return self.point(
            FrontierPoint(peak_bytes=simulated.peak_bytes, slowdown=simulated.slowdown, schedules=schedules)
        )

    def _dry(self, schedules: Sequence[GraphSchedule]) -> DryRun:
        self.rounds += 1
        self.progress(f"certifying plan {self.rounds}")
        with planned_partitioner(schedules, mode=self.mode) as partitioner:
            options = planned_options(self.options or {}, is_default=False)
            return certify(
                self.source, partitioner, options=options, scratch=_SCRATCH, parts=self.captured.parts
            )

    def _observe(self, certified: Certified) -> None:
        fingerprints = certified.fingerprints
        by_name = {schedule.fingerprint: schedule for schedule in certified.schedules}
        graphs = {graph.fingerprint: graph for graph in self.captured.step.graphs}
        if unknown := set(fingerprints) - graphs.keys():
            raise CertifyError(
                f"the dry run of the plan met {len(unknown)} graph(s) that the capture did not: the step is "
                "not the same when it is run twice (a Python-side condition that changes from call to call)"
            )
        self.observations[certified.schedules] = [
            Observation(
                graph=graphs[fingerprints[region.graph]],
                schedule=by_name[fingerprints[region.graph]],
                direction=RegionKind(region.kind),
                rise_bytes=region.rise_bytes,
            )
            for region in certified.profile.regions
            if region.graph >= 0
        ]


def _search_certified(bench: _Bench, problem: Problem, target: int) -> tuple[Certified, Frontier, Correction]:
    """The fastest plan whose *exact* peak is within `target`; when none is, the lowest that was found."""
    default = bench.default()
    if default.peak_bytes <= target:  # zero cost: nothing to search for
        return default, default_frontier(default), problem.correction
    lowest = bench.unchanged()
    best = lowest if lowest.peak_bytes <= target else None
    correction = bench.correction()
    frontier = search(replace(problem, correction=correction))
    if best is not None:  # nothing is faster
        return best, frontier, correction
    dynamic = max(target - bench.captured.default.static_bytes, 1)
    for _ in range(_MAX_ROUNDS):
        fits = frontier.at(target)
        point = fits or frontier.lowest
        if point.schedules in bench.seen:
            break
        certified = bench.point(point)
        lowest = min(lowest, certified, key=lambda c: c.peak_bytes)
        if certified.peak_bytes <= target and (best is None or certified.slowdown < best.slowdown):
            best = certified
        if best is certified and (target - certified.peak_bytes) / dynamic <= _SLACK_WORTH_A_ROUND:
            break
        if fits is None and (certified.peak_bytes - target) / dynamic > _HOPELESS:
            break
        correction = bench.correction()
        frontier = search(replace(problem, correction=correction))
    if best is not None:
        return best, frontier, correction
    # The simulator may stay wrong at the very bottom: what it calls lowest is the last word only after a dry
    # run.
    certified = bench.point(frontier.lowest)
    lowest = min(lowest, certified, key=lambda c: c.peak_bytes)
    if lowest.peak_bytes > target:
        bench.promised = bench.lowest(problem)
        lowest = min(lowest, bench.promised, key=lambda c: c.peak_bytes)
    return lowest, frontier, correction


def _lower_bound(problem: Problem, best: Certified) -> float | None:
    """What no schedule within the budget is faster than, in the search tier's model as the dry runs have
    corrected it. Where that model takes the plan to be over the budget, the plan's own bytes in it count."""
    if all(schedule.default for schedule in best.schedules):
        return best.slowdown
    assert problem.focus_bytes is not None
    simulated = simulate_step(problem.step, best.schedules, correction=problem.correction)
    return bound_at(problem, max(problem.focus_bytes, simulated.peak_bytes), most=best.slowdown)


class planned_partitioner:
    """A partitioner that carries out fixed schedules, registered for the length of a `with` block."""

    def __init__(self, schedules: Sequence[GraphSchedule], *, mode: str) -> None:
        self._by_name = {schedule.fingerprint: schedule for schedule in schedules}
        self._mode = mode
        self._id = ""

    def __enter__(self) -> PlanPartitioner:
        self._id = registry.register(registry.Entry(decide=self._decide, mode=self._mode))
        return PlanPartitioner(self._id, digest=self._id)

    def __exit__(self, *exc: object) -> None:
        registry.unregister(self._id)

    def _decide(self, joint: fx.GraphModule, num_outputs: int, static: Any) -> GraphSchedule | None:
        return self._by_name.get(fingerprint(joint, num_outputs))


def plan_unknown(
    joint: fx.GraphModule, num_outputs: int, static: Any, *, planned: Planned, device: str
) -> tuple[GraphSchedule, int, float]:
    """A schedule for a graph that the plan does not know, with the budget that the step leaves it.

    The rest of the step is taken to be as captured, and the new graph to stand in the place of the known one
    that it has the most in common with (another shape or branch of the same modules). Not certified (the
    step around it is not known): the search tier's peak, less the error it had on the known plan. Returns
    (schedule, simulated peak bytes, slowdown).
    """
    draft = describe(joint, num_outputs, static, measured_rates(device))
    draft.default_saved = _default_saved(joint, num_outputs, static, draft)
    draft.static = set(draft.input_storages) - {-1} | draft.static
    graph = draft.finish()
    step = _step_with(planned.captured.holding(planned.online_share).step, graph)
    target = planned.plan.budget_bytes - planned.plan.reserve_bytes
    known_error = planned.plan.predicted_allocated_bytes - (planned.plan.simulated_bytes or 0)
    problem = Problem(step=step, correction=Correction(), focus_bytes=target - max(known_error, 0))
    frontier = search(problem)
    point = frontier.at(target - max(known_error, 0)) or frontier.lowest
    schedule = next(s for s in point.schedules if s.fingerprint == graph.fingerprint)
    schedule = faithful_schedule(graph) if schedule.default else schedule
    return schedule, point.peak_bytes, point.slowdown


def _default_saved(joint: fx.GraphModule, num_outputs: int, static: Any, draft: Any) -> tuple[int, ...]:
    from ._compat import copied_graph, partitioners
    from .capture.joint import saved_indices

    copy = fx.GraphModule(joint, copied_graph(joint.graph))
    _, backward = partitioners.min_cut_rematerialization_partition(
        copy, None, num_fwd_outputs=num_outputs, static_lifetime_input_indices=static
    )
    return saved_indices(backward, draft)


def _nearest(step: StepGraph, graph: JointGraph) -> int:
    """Which graph of the step covers most of the same modules, by the bytes that both make there; among
    equals the one that saves most."""

    def by_module(g: JointGraph) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for op in g.ops:
            if op.phase is Phase.FORWARD:
                made = sum(g.storage_bytes[s] for s in op.storages)
                sizes[op.module] = sizes.get(op.module, 0) + made
        return sizes

    wanted = by_module(graph)

    def likeness(g: JointGraph) -> tuple[float, int]:
        sizes = by_module(g)
        names = wanted.keys() | sizes.keys()
        common = sum(min(wanted.get(n, 0), sizes.get(n, 0)) for n in names)
        either = sum(max(wanted.get(n, 0), sizes.get(n, 0)) for n in names)
        return common / max(either, 1), sum(g.value_bytes(i) for i in g.default_saved)

    return max(range(len(step.graphs)), key=lambda i: likeness(step.graphs[i]))


def _step_with(step: StepGraph, graph: JointGraph) -> StepGraph:
    """The captured step with `graph` in the place of its nearest; the rises of that are then simulated."""
    index = _nearest(step, graph)
    graphs = tuple(graph if i == index else g for i, g in enumerate(step.graphs))
    profile_of_default = default_schedules(graphs)
    uncalibrated = replace(step, graphs=graphs)
    simulated = simulate_step(
        uncalibrated, [replace(s, default=s.fingerprint != graph.fingerprint) for s in profile_of_default]
    )
    regions = tuple(
        replace(region, rise_bytes=level.rise_bytes) if region.graph == index else region
        for region, level in zip(step.regions, simulated.levels, strict=True)
    )
    return replace(uncalibrated, regions=regions, default_peak_bytes=simulated.peak_bytes)


def _given_schedules(plan: Plan, step: StepGraph) -> tuple[GraphSchedule, ...]:
    captured = {g.fingerprint for g in step.graphs}
    known = {s.fingerprint for s in plan.schedule}
    if captured != known:
        differences = tuple(
            [f"graph {f} of the plan is not in this step" for f in sorted(known - captured)]
            + [f"graph {f} of this step is not in the plan" for f in sorted(captured - known)]
        )
        raise PlanMismatch(
            f"the plan was made for another step: {len(known & captured)} of {len(known)} graphs match "
            f"(this step has {len(captured)}). The model, its shapes, dtypes or the compile options differ; "
            "plan again.",
            differences=differences,
        )
    return plan.schedule


def _infeasible(
    captured: Captured,
    frontier: Frontier,
    best: Certified,
    budget_bytes: int,
    reserve: Reserve,
    advice: tuple[str, ...],
) -> BudgetInfeasible:
    online = (_MORE_ONLINE,) if captured.default.lifetimes else ()
    nothing = "nothing in this step was compiled, so there was nothing to recompute; see targets="
    return BudgetInfeasible(
        budget_bytes=budget_bytes,
        lowest_bytes=best.peak_bytes + reserve.total_bytes,
        reserve_bytes=reserve.total_bytes,
        holders=frontier.holders,
        would_fit=(*advice, *online) if captured.step.graphs else (nothing,),
    )


def _faults_of_default(captured: Captured) -> tuple[str, ...]:
    """A note when torch's own partition would compute wrong gradients, so that the plan is never that one."""
    modules = {
        graph.ops[index].module or "the model"
        for graph in captured.step.graphs
        if not faithful_schedule(graph).default
        for index in graph.stale
    }
    if not modules:
        return ()
    return (
        f"{', '.join(sorted(modules))}: the forward reads a buffer and then overwrites it. torch.compile by "
        "itself reads it again in the backward, where it has its new value, and gets wrong gradients; the "
        "plan saves what was read",
    )


def _advice(
    source: StepSource, captured: Captured, target: int, reserve: Reserve, device: str
) -> tuple[str, ...]:
    """What a user should know who is told to recompute: the step may fit without torch.compile too."""
    if captured.default.peak_bytes <= target or not captured.step.graphs:
        return ()
    try:
        uncompiled_bytes = uncompiled_peak_bytes(source, device=device, scratch=_SCRATCH)
    except CaptureError:  # what runs compiled need not run eagerly on fake tensors; there is no advice then
        return ()
    if uncompiled_bytes > target:
        return ()
    required = format_bytes(uncompiled_bytes + reserve.total_bytes)
    return (f"the same step without torch.compile (eager, nothing recomputed) requires about {required}",)


class _Clock:
    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._start
        self._start = now
