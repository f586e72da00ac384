"""Memory over one step as a picture. matplotlib is an extra (`plot`) and is imported when a picture is
asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._format import format_bytes
from ..core.profile import StepProfile
from ..errors import MissingExtra
from .phases import Phase, aligned

__all__ = ["plot_step"]

_MB = 10**6
_PHASE_COLOURS = {"forward": "#dcebf7", "loss": "#fdf3d8", "backward": "#fbe3dc", "optimizer": "#e4f1e1"}
_DEFAULT, _PLANNED, _BUDGET, _STATIC = "#8a8f98", "#1f5fa8", "#b3202c", "#d9dbe0"


def plot_step(
    path: str | Path,
    *,
    default: StepProfile,
    planned: StepProfile,
    budget_bytes: int,
    measured: Sequence[tuple[int, int]] = (),
    title: str = "Memory over one training step",
) -> Path:
    """Draw the dry runs of the default and of the plan over one step, with the budget; write `path` and
    return it.

    Args:
        path: `.svg` or `.png` (or whatever matplotlib writes); its folder is made.
        default: profile of the default compile.
        planned: profile of the plan.
        budget_bytes: drawn as a line.
        measured: a real planned step as (nanoseconds, allocated bytes, static memory included). It has a
        panel of its
            own: its axis is time, that of a dry run is the sequence of births and deaths of storages.
        title: over the picture.

    Raises:
        MissingExtra: without matplotlib.
        OSError: where the file cannot be written.
    """
    figure_class, canvas_class, style = _matplotlib()
    out = Path(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    top = (
        1.12
        * max(default.peak_bytes, planned.peak_bytes, budget_bytes, *(size for _, size in measured))
        / _MB
    )
    # Text as text, and no date or random ids: the same values give the same file.
    with style({"svg.fonttype": "none", "svg.hashsalt": "dtr", "font.size": 9.5, "axes.titlesize": 10}):
        figure = figure_class(figsize=(9.5, 7.2 if measured else 4.8), layout="constrained")
        canvas_class(figure)
        panels = figure.subplots(
            2 if measured else 1, 1, squeeze=False, height_ratios=[1.3, 1] if measured else [1]
        )
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        _draw_dry_runs(panels[0][0], default, planned, budget_bytes, top)
        if measured:
            _draw_measured(
                panels[1][0], measured, planned.peak_bytes, planned.static_bytes, budget_bytes, top
            )
        metadata = {"Date": None} if out.suffix == ".svg" else None
        figure.savefig(out, dpi=160, metadata=metadata)
    return out


def _draw_dry_runs(
    axes: Any, default: StepProfile, planned: StepProfile, budget_bytes: int, top: float
) -> None:
    bands, default_curve, planned_curve = aligned(default, planned)
    _shade(axes, bands, top)
    axes.fill_between(
        [0, 1], 0, planned.static_bytes / _MB, color=_STATIC, lw=0, zorder=1, label="static memory"
    )
    for curve, colour, profile, name in (
        (default_curve, _DEFAULT, default, "default compile"),
        (planned_curve, _PLANNED, planned, "planned"),
    ):
        xs, ys = [x for x, _ in curve], [size / _MB for _, size in curve]
        axes.plot(
            xs, ys, color=colour, lw=1.5, zorder=3, label=f"{name}, peak {format_bytes(profile.peak_bytes)}"
        )
        at = ys.index(max(ys))
        axes.plot(xs[at], ys[at], "o", color=colour, ms=5, zorder=4)
    _budget_line(axes, budget_bytes)
    axes.set(xlim=(0, 1), ylim=(0, top), xticks=[], ylabel="live bytes, MB (10⁶)")
    axes.set_xlabel(
        "one step: in each phase allocations and frees in their order (its width is not its time)"
    )
    axes.set_title("Predicted: dry runs of the generated code", loc="left")
    _finish(axes)


def _draw_measured(
    axes: Any,
    measured: Sequence[tuple[int, int]],
    predicted_bytes: int,
    static_bytes: int,
    budget_bytes: int,
    top: float,
) -> None:
    start = measured[0][0]
    xs, ys = [(t - start) / 1e6 for t, _ in measured], [size / _MB for _, size in measured]
    peak_bytes = max(size for _, size in measured)
    axes.fill_between([0, xs[-1]], 0, static_bytes / _MB, color=_STATIC, lw=0, label="static memory")
    label = f"planned step, measured, peak {format_bytes(peak_bytes)}"
    axes.plot(xs, ys, color=_PLANNED, lw=1.3, drawstyle="steps-post", label=label)
    label = f"its predicted peak {format_bytes(predicted_bytes)}"
    axes.axhline(predicted_bytes / _MB, color=_PLANNED, lw=1, ls=":", zorder=3, label=label)
    _budget_line(axes, budget_bytes)
    axes.set(xlim=(0, xs[-1] or 1), ylim=(0, top), xlabel="milliseconds", ylabel="allocated bytes, MB (10⁶)")
    axes.set_title("Measured: allocator events of one real step", loc="left")
    _finish(axes)


def _shade(axes: Any, bands: Sequence[Phase], top: float) -> None:
    for band in bands:
        axes.axvspan(band.start, band.end, color=_PHASE_COLOURS.get(band.name, "#f2f2f2"), lw=0, zorder=0)
        if band.end - band.start > 0.05:
            axes.text(
                (band.start + band.end) / 2, 0.985 * top, band.name, ha="center", va="top", color="#555555"
            )


def _budget_line(axes: Any, budget_bytes: int) -> None:
    label = f"budget {format_bytes(budget_bytes)}"
    axes.axhline(budget_bytes / _MB, color=_BUDGET, lw=1.3, ls="--", zorder=2, label=label)


def _finish(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#ffffff", lw=0.8, zorder=0.5)
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.93), framealpha=0.85, edgecolor="none")


def _matplotlib() -> tuple[Any, Any, Any]:
    """The Agg canvas without pyplot: no global figure, no change of the user's backend."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise MissingExtra(what="plot_step", package="matplotlib", extra="plot") from error
    return Figure, FigureCanvasAgg, matplotlib.rc_context
