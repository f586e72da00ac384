"""Everything that saves activation memory, side by side in one process: true peak and paired time of a step.

    python recipes/benchmarks/frontier.py MODEL [...] [--pairs 30] [--budgets 10] [--small] [--out DIR]

Peers (`frontier_peers.py`): eager, the default compile, torch's own `activation_memory_budget` over ratios
and solvers (each partition once), checkpointed blocks and selective checkpointing, eager and compiled. Ours
is asked for every peak that a peer reaches, and for budgets from the lowest to the default. A step is
forward, loss and backward; bytes are above parameters, buffers and batch. Writes JSON, a Markdown table and a
picture for each model. Needs `pip install 'dtr-integrations[plot]'`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(path) for path in (Path(__file__).parent, ROOT / "recipes", ROOT / "tests", ROOT)]

import torch  # noqa: E402
from frontier_models import Model, models  # noqa: E402
from frontier_peers import DEFAULT, RATIOS, Peer, peers  # noqa: E402
from side_by_side import Bench, Point  # noqa: E402

from dtr_integrations.errors import BudgetInfeasible  # noqa: E402

SLACK = 0.02  # by which the upper end of our interval may lie above a peer's ratio
ADDED_WORTH_RANKING = 0.05


def run_model(model: Model, *, pairs: int, budgets: int, ratios: tuple[float, ...]) -> dict[str, Any]:
    """Every peer and ours on one model."""
    bench = Bench(model, pairs)
    bench.cost_ms, saved = bench.model_of(DEFAULT)
    points = [Point(name=DEFAULT.name, modelled=1.0)]
    guarded(points[0], lambda: bench.run_peer(DEFAULT, points[0]))
    partitions = {saved: points[0]}
    for peer in peers(ratios=ratios):
        point = Point(name=peer.name)
        if peer.compiled:
            known = guarded(point, lambda peer=peer, point=point: _known(bench, peer, point, partitions))
            if known is not None:
                known.same_as.append(peer.name)
                continue
        if not point.error:
            guarded(point, lambda peer=peer, point=point: bench.run_peer(peer, point))
        points.append(point)
        show(point)
    for budget in budgets_of(points, bench.ends(), budgets):
        point = Point(name=f"ours, {budget / 1e6:.2f} MB", ours=True, budget_bytes=budget)
        guarded(point, lambda budget=budget, point=point: bench.run_ours(budget, point))
        points.append(point)
        show(point)
    return {
        "model": model.name,
        "random": bench.random,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "pairs": pairs,
        "points": [asdict(point) for point in points],
        **judged(points),
    }


def _known(bench: Bench, peer: Peer, point: Point, partitions: dict[Any, Point]) -> Point | None:
    """The earlier point with the very partition that the peer gives, if there is one."""
    cost_ms, saved = bench.model_of(peer)
    point.modelled = cost_ms / bench.cost_ms
    if saved in partitions:
        return partitions[saved]
    partitions[saved] = point
    return None


def guarded(point: Point, run: Callable[[], Any]) -> Any:
    """Run, time and note what went wrong: one peer's failure is a row of the table."""
    start = time.perf_counter()
    try:
        return run()
    except BudgetInfeasible as error:
        point.error = str(error).splitlines()[0]
    except Exception as error:
        point.error = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    finally:
        point.seconds += round(time.perf_counter() - start, 1)
        gc.collect()
    return None


def budgets_of(points: list[Point], ends: tuple[int, int], least: int) -> list[int]:
    """Every peak that a peer reaches, and as many between the lowest and the default as make `least`."""
    low, high = ends
    peaks = {p.peak_bytes for p in points if p.peak_bytes is not None and p.peak_bytes <= high}
    even = [low + (high - low) * k // max(least - 1, 1) for k in range(least)]
    return sorted({*peaks, *even}, reverse=True)


def judged(points: Iterable[Point]) -> dict[str, Any]:
    """Against each peer: our fastest point at or under its peak."""
    ran = [p for p in points if p.peak_bytes is not None and p.ratio is not None]
    ours = [p for p in ran if p.ours]
    errors = [abs(p.predicted_bytes - p.peak_bytes) / p.peak_bytes for p in ours]
    against = []
    for peer in (p for p in ran if not p.ours):
        below = [p for p in ours if p.peak_bytes <= peer.peak_bytes]
        best = min(below, key=lambda p: p.ratio, default=None)
        modelled = min((p.modelled for p in below), default=None)
        against.append(
            {
                "peer": peer.name,
                "peak_bytes": peer.peak_bytes,
                "peer_ratio": peer.ratio,
                "ours": best and best.name,
                "ours_peak_bytes": best and best.peak_bytes,
                "ours_ratio": best and best.ratio,
                "measured_ok": best is not None and best.ratio_95[1] <= peer.ratio + SLACK,
                "modelled_ok": (
                    None
                    if peer.modelled is None
                    else modelled is not None and modelled <= peer.modelled * (1 + 1e-9)
                ),
            }
        )
    lowest = [min((p.peak_bytes for p in ran if p.ours is which), default=None) for which in (True, False)]
    return {
        "against": against,
        "lowest_bytes": {"ours": lowest[0], "peers": lowest[1]},
        "over_budget": [p.name for p in ours if p.peak_bytes > p.budget_bytes],
        "prediction_error": max(errors, default=0.0),
        "rank_correlation": rank_correlation([p for p in ours if p.modelled - 1 > ADDED_WORTH_RANKING]),
    }


def rank_correlation(points: list[Point]) -> float | None:
    """Spearman's, of modelled and measured slowdowns; None for fewer than three points."""
    if len(points) < 3:
        return None
    ranks = []
    for key in ("modelled", "ratio"):
        order = sorted(points, key=lambda p, key=key: getattr(p, key))
        ranks.append([order.index(p) for p in points])
    n = len(points)
    return 1 - 6 * sum((a - b) ** 2 for a, b in zip(*ranks, strict=True)) / (n * (n * n - 1))


def show(point: Point) -> None:
    """One line on the terminal."""
    print("| " + " | ".join(cells(point)) + " |", flush=True)


HEAD = ("what", "peak MB", "slowdown measured (95 %)", "modelled", "gradients", "bound", "same partition")


def cells(point: Point) -> list[str]:
    """One row of the table."""
    if point.error:
        return [point.name, "–", point.error, "–", "–", "–", ""]
    low, high = point.ratio_95 or (0.0, 0.0)
    return [
        point.name,
        f"{(point.peak_bytes or 0) / 1e6:.2f}",
        f"{point.ratio:.3f} ({low:.3f}–{high:.3f})",
        "–" if point.modelled is None else f"{point.modelled:.3f}",
        "–" if point.gradients is None else f"{point.gradients:.1e}",
        "–" if point.lower_bound is None else f"{point.lower_bound:.3f}",
        "; ".join(point.same_as),
    ]


def table(found: dict[str, Any]) -> str:
    """One model in Markdown."""
    points = [Point(**point) for point in found["points"]]
    lines = [f"## {found['model']}", "", "| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(cells(point)) + " |" for point in points]
    lost = [row for row in found["against"] if not row["measured_ok"] or row["modelled_ok"] is False]
    low = {whose: (size or 0) / 1e6 for whose, size in found["lowest_bytes"].items()}
    ranks = found["rank_correlation"]
    lines += [
        "",
        f"Lowest measured peak: ours {low['ours']:.2f} MB, peers {low['peers']:.2f} MB. "
        f"Plans over their budget: {len(found['over_budget'])}. "
        f"Largest prediction error: {found['prediction_error']:.3%}. "
        f"Rank correlation of modelled and measured slowdown: {'–' if ranks is None else f'{ranks:.3f}'}. "
        f"Of {len(found['against'])} peers, ours is at or under the peak and not slower for "
        f"{len(found['against']) - len(lost)}.",
        "",
    ]
    for row in lost:
        ours = "nothing" if row["ours"] is None else f"{row['ours']} ×{row['ours_ratio']:.3f}"
        peer = f"{row['peer']}: {row['peak_bytes'] / 1e6:.2f} MB at ×{row['peer_ratio']:.3f}"
        lines.append(f"* {peer}; ours {ours}{', modelled slower' if row['modelled_ok'] is False else ''}")
    return "\n".join(lines) + "\n"


def draw(found: dict[str, Any], path: Path) -> None:
    """Peak against measured slowdown, ours as a line."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    points = [Point(**point) for point in found["points"] if point["ratio"] is not None]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    marks = itertools.cycle("osD^vP*X")
    families: dict[str, list[Point]] = {}
    for point in points:
        families.setdefault("ours" if point.ours else point.name.rsplit(", ", 1)[0], []).append(point)
    for name, group in families.items():
        group.sort(key=lambda p: p.peak_bytes or 0)
        x, y = [(p.peak_bytes or 0) / 1e6 for p in group], [p.ratio for p in group]
        if name == "ours":
            axes.plot(x, y, "k.-", label=name, zorder=3)
        else:
            axes.plot(x, y, next(marks), label=name)
    axes.set_xlabel("true peak of a step above parameters and batch, MB")
    axes.set_ylabel("time of a step / default compile")
    axes.set_title(found["model"])
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    """Run the models that were named, or all."""
    known = models()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(known))
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--budgets", type=int, default=10, help="of ours, at least")
    parser.add_argument("--ratios", nargs="+", type=float, default=RATIOS, help="of torch's budget API")
    parser.add_argument("--small", action="store_true", help="a few layers and pixels")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "frontier")
    args = parser.parse_args()
    if unknown := [name for name in args.models if name not in known]:
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(known)}")
    args.out.mkdir(parents=True, exist_ok=True)
    torch._dynamo.config.recompile_limit = 10**6
    for name in args.models or known:
        print(f"{name}\n| " + " | ".join(HEAD) + " |", flush=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            found = run_model(
                models(small=args.small)[name],
                pairs=args.pairs,
                budgets=args.budgets,
                ratios=tuple(args.ratios),
            )
        (args.out / f"{name}.json").write_text(json.dumps(found, indent=1))
        (args.out / f"{name}.md").write_text(table(found))
        draw(found, args.out / f"{name}.svg")
        print(table(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
