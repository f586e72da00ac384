"""Tables whose numbers add up, an interval that covers, and a picture that is written."""

import builtins
import dataclasses
import itertools
import random
import types
import xml.etree.ElementTree as ElementTree

import pytest

from dtr_integrations.core.peak import PeakReport
from dtr_integrations.core.plan import GraphSchedule, Plan, Recompute
from dtr_integrations.core.profile import RegionProfile, StepProfile
from dtr_integrations.errors import MissingExtra
from dtr_integrations.report import (
    breakdown_rows,
    breakdown_table,
    paired_ratio,
    peaks_table,
    plot_step,
    session_text,
    slowdown_table,
    to_text,
    worst_per_rank,
)
from dtr_integrations.report.phases import aligned, phases

MB = 10**6
BREAKDOWN = {
    "parameters": 20 * MB,
    "gradients": 20 * MB,
    "optimizer": 40 * MB,
    "batch": 32_768,
    "saved activations": 80 * MB,
    "transient": 10 * MB,
}


def plan(**changes):
    values = {
        "budget_bytes": 175 * MB,
        "predicted_allocated_bytes": sum(BREAKDOWN.values()),
        "default_allocated_bytes": 250 * MB,
        "static_bytes": 60 * MB,
        "reserve_bytes": 3 * MB,
        "slowdown": 1.0725,
        "schedule": (
            GraphSchedule(fingerprint="g", saved=(1, 2), recompute=(Recompute(value=3, copy=0, before=9),)),
        ),
        "breakdown": BREAKDOWN,
        "reserve": {"nccl": 2 * MB, "slack": 1 * MB, "context": 0},
    }
    return Plan(**{**values, **changes})


def region(kind, start, end):
    return RegionProfile(
        kind=kind,
        graph=-1 if kind == "eager" else 0,
        call=-1 if kind == "eager" else 0,
        entry_bytes=0,
        exit_bytes=0,
        peak_bytes=0,
        saved_bytes=0,
        start=start,
        end=end,
    )


def profile(curve, *bounds):
    kinds = ("forward", "eager", "backward", "eager")
    edges = (1, *bounds, len(curve))
    return StepProfile(
        peak_bytes=max(curve),
        static_bytes=60 * MB,
        breakdown={"parameters": 20 * MB, "saved activations": max(curve) - 20 * MB},
        regions=tuple(region(k, a, b) for k, a, b in zip(kinds, edges, edges[1:], strict=False)),
        timeline=tuple(curve),
    )


DEFAULT = profile(
    [80 * MB, 120 * MB, 250 * MB, 240 * MB, 230 * MB, 150 * MB, 80 * MB, 81 * MB, 80 * MB], 3, 4, 7
)
PLANNED = profile(
    [80 * MB, 110 * MB, 170 * MB, 165 * MB, 160 * MB, 168 * MB, 120 * MB, 80 * MB, 81 * MB], 3, 4, 7
)


def report(**changes):
    values = {
        "rank": 0,
        "world_size": 2,
        "step": 3,
        "budget_bytes": 175 * MB,
        "predicted_allocated_bytes": 170 * MB,
        "peak_allocated_bytes": 171 * MB,
        "peak_reserved_bytes": None,
        "non_torch_bytes": None,
        "reserve_bytes": 0,
        "static_bytes": 60 * MB,
        "default_allocated_bytes": 250 * MB,
        "plan_digest": "abc",
        "source": "cpu_profiler",
    }
    return PeakReport(**{**values, **changes})


def by_name(rows):
    return {row.name: row for row in rows}


def test_the_breakdown_adds_up_to_the_plans_own_totals():
    made = plan()
    rows = breakdown_rows(made, DEFAULT)
    held = rows[: [row.name for row in rows].index("allocated")]
    named = by_name(rows)
    assert sum(row.planned_bytes for row in held) == named["allocated"].planned_bytes
    assert named["allocated"].planned_bytes == made.predicted_allocated_bytes
    assert sum(row.default_bytes for row in held) == named["allocated"].default_bytes == DEFAULT.peak_bytes
    reserve = [row for row in rows if row.name.startswith("reserve")]
    assert [row.name for row in reserve] == ["reserve: nccl", "reserve: slack"]
    assert sum(row.planned_bytes for row in reserve) == made.reserve_bytes
    assert named["required"].planned_bytes == made.required_bytes
    assert named["left"].planned_bytes == made.budget_bytes - made.required_bytes
    assert named["left"].default_bytes == made.budget_bytes - DEFAULT.peak_bytes - made.reserve_bytes < 0
    assert named["buffers"].planned_bytes == 0


def test_a_breakdown_with_a_gap_or_an_unknown_kind_still_adds_up():
    made = plan(predicted_allocated_bytes=sum(BREAKDOWN.values()) + 7, breakdown={**BREAKDOWN, "gather": 0})
    rows = by_name(breakdown_rows(made))
    assert rows["unattributed"].planned_bytes == 7
    assert "gather" in rows
    assert all(row.default_bytes is None for row in rows.values())


def test_reserve_lines_that_do_not_add_up_are_shown_as_one():
    rows = by_name(breakdown_rows(plan(reserve={"nccl": MB, "slack": MB})))
    assert rows["reserve"].planned_bytes == 3 * MB


def test_breakdown_table_text():
    text = to_text(breakdown_table(plan(), DEFAULT))
    for words in (
        "saved activations",
        "80.00",
        "required",
        "173.03",
        "default MB",
        "250.00",
        "-78.00",
        "98.9%",
    ):
        assert words in text
    assert "1 MB = 1,000,000 bytes" in text


def test_large_amounts_are_in_gigabytes():
    text = to_text(breakdown_table(plan(predicted_allocated_bytes=70 * 10**9)))
    assert "1 GB = 1,000,000,000 bytes" in text
    assert "70.00" in text
    # The unit is that of what is held: a budget that does not bind says nothing about it.
    assert "1 MB = 1,000,000 bytes" in to_text(breakdown_table(plan(budget_bytes=70 * 10**9)))


def test_the_worst_step_of_each_rank_and_the_fullest_rank():
    reports = [
        report(step=2),
        report(step=10, peak_allocated_bytes=172 * MB),
        report(rank=1, peak_allocated_bytes=176 * MB, peak_reserved_bytes=180 * MB, non_torch_bytes=MB),
    ]
    assert [(r.rank, r.step) for r in worst_per_rank(reports)] == [(0, 10), (1, 3)]
    lines = to_text(peaks_table(reports)).splitlines()
    first, second = (next(line for line in lines if line.split()[:1] == [rank]) for rank in "01")
    assert "172.00" in first
    assert "1.786%" in first  # |170 − 172| / (172 − 60)
    assert "–" in first
    assert "worst" not in first
    assert "180.00" in second
    assert "103.4%" in second
    assert "worst, over budget" in second
    assert "3 measured steps" in lines[0]


def test_peaks_table_without_measurement_or_prediction():
    assert "0 measured steps" in to_text(peaks_table([]))
    assert "–" in to_text(peaks_table([report(predicted_allocated_bytes=None)]))


def test_slowdown_table_text():
    measured = paired_ratio([100.0] * 30, [105.0] * 30)
    text = to_text(slowdown_table(plan(slowdown_lower_bound=1.01), measured))
    for words in (
        "×1.073",
        "×1.010",
        "the plan is at most 6.2% from optimal",
        "×1.050",
        "95 % interval ×1.050 to ×1.050, 30 paired steps",
        "105 ms planned",
    ):
        assert words in text
    assert "measured" not in to_text(slowdown_table(plan()))


@pytest.mark.parametrize(("n", "k"), [(6, 1), (10, 2), (30, 10), (40, 14)])
def test_the_interval_is_that_of_the_sign_test(n, k):
    ratio = paired_ratio([1.0] * n, [float(i) for i in range(1, n + 1)])
    assert (ratio.low, ratio.high) == (k, n + 1 - k)
    assert ratio.ratio == (n + 1) / 2
    assert 0.95 <= ratio.coverage < 1


def test_too_few_pairs_give_the_range_and_say_so():
    ratio = paired_ratio([1.0, 1.0, 1.0], [2.0, 1.0, 3.0])
    assert (ratio.low, ratio.ratio, ratio.high, ratio.coverage) == (1.0, 2.0, 3.0, 0.0)
    assert "range ×1.000 to ×3.000" in to_text(slowdown_table(plan(), ratio))


def test_the_interval_covers_the_true_ratio():
    draw = random.Random(0)
    hits = 0
    for _ in range(400):
        base = [draw.lognormvariate(0, 0.1) for _ in range(30)]
        other = [1.05 * b * draw.lognormvariate(0, 0.02) for b in base]
        ratio = paired_ratio(base, other)
        hits += ratio.low <= 1.05 <= ratio.high
    assert 0.93 <= hits / 400 <= 0.98


@pytest.mark.parametrize("times", [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0])])
def test_what_is_no_pair_is_refused(times):
    with pytest.raises(ValueError):
        paired_ratio(*times)


def test_phases_have_no_gaps_and_cover_the_step():
    assert [p.name for p in phases(PLANNED)] == ["forward", "loss", "backward", "optimizer"]
    found = phases(PLANNED)
    assert (found[0].start, found[-1].end) == (0, len(PLANNED.timeline) - 1)
    assert all(a.end == b.start for a, b in itertools.pairwise(found))


def test_phases_of_several_graphs_and_of_accumulation():
    f, b, e = "forward", "backward", "eager"
    kinds = (e, f, e, f, e, b, e, b, e, f, e, b, e)
    regions = tuple(region(kind, i, i + 1) for i, kind in enumerate(kinds))
    several = dataclasses.replace(PLANNED, regions=regions, timeline=tuple(range(len(kinds) + 1)))
    names = [p.name for p in phases(several)]
    assert names == ["forward", "loss", "backward", "forward", "loss", "backward", "optimizer"]
    nothing = dataclasses.replace(PLANNED, regions=(region("eager", 0, 8),))
    assert [p.name for p in phases(nothing)] == ["step"]


def test_aligned_curves_share_their_phases_and_keep_their_peaks():
    bands, default, planned = aligned(DEFAULT, PLANNED)
    assert (bands[0].start, bands[-1].end) == (0, 1)
    for curve, made in ((default, DEFAULT), (planned, PLANNED)):
        positions = [x for x, _ in curve]
        assert positions == sorted(positions)
        assert (positions[0], positions[-1]) == (0, pytest.approx(1))
        assert max(size for _, size in curve) == made.peak_bytes
    # Where phases differ, neither curve is bent to the other's.
    _, other, _ = aligned(dataclasses.replace(DEFAULT, regions=()), PLANNED)
    assert max(size for _, size in other) == DEFAULT.peak_bytes


def test_long_timelines_are_thinned_without_losing_the_peak():
    curve = [80 * MB] * 50_000
    curve[31_111] = 200 * MB
    long = profile(curve, 20_000, 25_000, 40_000)
    _, _, planned = aligned(long, long)
    assert len(planned) < 2_200
    assert max(size for _, size in planned) == 200 * MB


@pytest.mark.parametrize("measured", [(), [(1000, 80 * MB), (2_000_000, 169 * MB), (4_000_000, 80 * MB)]])
def test_the_picture_is_written_the_same_way_twice(tmp_path, measured):
    pytest.importorskip("matplotlib")
    paths = [
        plot_step(
            tmp_path / folder / "memory.svg",
            default=DEFAULT,
            planned=PLANNED,
            budget_bytes=175 * MB,
            measured=measured,
        )
        for folder in ("a", "b")
    ]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    text = " ".join(ElementTree.parse(paths[0]).getroot().itertext())
    for words in (
        "default compile, peak 250 MB",
        "planned, peak 170 MB",
        "budget 175 MB",
        "forward",
        "optimizer",
    ):
        assert words in text
    assert ("planned step, measured, peak 169 MB" in text) is bool(measured)


def test_a_picture_as_png(tmp_path):
    pytest.importorskip("matplotlib")
    path = plot_step(tmp_path / "memory.png", default=DEFAULT, planned=PLANNED, budget_bytes=175 * MB)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_names_the_extra(tmp_path, monkeypatch):
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(MissingExtra, match=r"pip install 'dtr-integrations\[plot\]'"):
        plot_step(tmp_path / "m.svg", default=DEFAULT, planned=PLANNED, budget_bytes=1)


def test_a_session_as_text():
    planned = types.SimpleNamespace(
        plan=plan(simulated_bytes=171 * MB),
        captured=types.SimpleNamespace(default=DEFAULT),
        rounds=2,
        seconds={"capture": 9.4},
    )
    text = session_text(planned, [report()])
    for words in (
        "saved activations",
        "2 values saved, 1 recomputations, 2 plans certified",
        "capture 9.4 s",
        "171.00",
    ):
        assert words in text
    assert "+0.88% of this plan's dynamic bytes" in text  # (171 − 170.03) / (170.03 − 60)
    default = plan(schedule=(dataclasses.replace(plan().schedule[0], default=True),))
    planned = types.SimpleNamespace(plan=default, captured=planned.captured, rounds=0, seconds={})
    assert "does not bind" in session_text(planned)
    assert "nothing is planned" in session_text(None)
