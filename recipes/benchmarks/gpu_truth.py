"""Does the plan hold on a real GPU? One command, a few minutes, nothing to download.

    python recipes/benchmarks/gpu_truth.py [--fill 0.85] [--pairs 30] [--out DIR]
    python recipes/benchmarks/gpu_truth.py --device cpu --small     # the same on CPU, tiny

A GPT in bfloat16 autocast with AdamW whose default compile is predicted to fill `--fill` of the card; three
budgets, checkpointed blocks (eager, compiled) and torch's own budget API. For each: predicted and measured
allocated bytes, reserved and non-torch bytes, paired slowdown (CUDA events), gradients against the default.
Writes JSON and a Markdown table, named after the card and the day: please file them under docs/benchmarks/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(path) for path in (Path(__file__).parent, ROOT / "recipes", ROOT / "tests", ROOT)]

import torch  # noqa: E402
from frontier import cells, guarded, show  # noqa: E402
from frontier_models import Model, Transformer, token_loss, tokens  # noqa: E402
from frontier_peers import DEFAULT, peers  # noqa: E402
from side_by_side import Bench, Point  # noqa: E402

from dtr_integrations.capture.step import capture  # noqa: E402
from dtr_integrations.core.profile import StepProfile  # noqa: E402
from dtr_integrations.measure import device_total_bytes  # noqa: E402

SHARES = (0.75, 0.5, 0.3)  # of what the default adds to what lives for good
SIZES = {
    "small": {"layers": 2, "width": 64, "vocabulary": 256, "length": 64},
    "large": {"layers": 8, "width": 2048, "vocabulary": 32_000, "length": 2048},
}
HEAD = (
    "what", "peak MB", "slowdown measured (95 %)", "modelled", "gradients", "bound", "same partition",
    "predicted MB", "reserved MB", "non-torch MB",
)  # fmt: skip


def gpt(size: dict[str, int], batch: int) -> Model:
    """The model with so many sequences a step."""
    return Model(
        name="gpt",
        make=lambda: Transformer(**size, causal=True),
        batch=tokens(batch, size["length"], size["vocabulary"]),
        loss=token_loss,
    )


def fitting(size: dict[str, int], device: str, dtype: torch.dtype, total_bytes: int) -> int:
    """How many sequences the default compile can take within so many bytes beside the model that it is
    paired with: dry runs of one and of two, and a line through them."""
    one, two = (dry(gpt(size, batch), device, dtype) for batch in (1, 2))
    left = total_bytes - one.static_bytes - one.peak_bytes
    return max(1, 1 + left // max(two.peak_bytes - one.peak_bytes, 1))


def dry(model: Model, device: str, dtype: torch.dtype) -> StepProfile:
    """What the default compile is predicted to hold."""
    bench = Bench(model, 0, device=device, dtype=dtype, trains=True, warm=False)
    return capture(bench.source(DEFAULT), device=device).default


def run(bench: Bench) -> list[Point]:
    """The default, its peers and ours."""
    points = [Point(name=DEFAULT.name, modelled=1.0)]
    guarded(points[0], lambda: run_noted(bench, points[0], lambda: bench.run_peer(DEFAULT, points[0])))
    show(points[0])
    for peer in peers(ratios=(0.5, 0.1), solvers=("dp",)):
        if peer.name == "eager" or peer.name.startswith("selective"):
            continue
        points.append(point := Point(name=peer.name))
        guarded(point, lambda p=peer, point=point: run_noted(bench, point, lambda: bench.run_peer(p, point)))
        show(point)
    for share in SHARES:
        budget = int(share * (points[0].peak_bytes or 0))
        points.append(point := Point(name=f"ours, {share:g}", ours=True, budget_bytes=budget))
        guarded(
            point, lambda b=budget, point=point: run_noted(bench, point, lambda: bench.run_ours(b, point))
        )
        show(point)
    return points


def run_noted(bench: Bench, point: Point, measured: Any) -> None:
    """What the card says beside the allocator."""
    if bench.device == "cpu":
        measured()
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    measured()
    free, total = torch.cuda.mem_get_info()
    point.reserved_bytes = torch.cuda.max_memory_reserved()
    point.non_torch_bytes = total - free - torch.cuda.memory_reserved()


def row(point: Point) -> list[str]:
    """One line of the table."""
    sizes = (point.predicted_bytes, point.reserved_bytes, point.non_torch_bytes)
    return [*cells(point), *("–" if size is None else f"{size / 1e6:.2f}" for size in sizes)]


def table(found: dict[str, Any]) -> str:
    """In Markdown."""
    lines = [
        f"# GPT, {found['card']}, {found['date']}",
        "",
        f"`recipes/benchmarks/gpu_truth.py`: {found['size']}, batch {found['batch']}, bfloat16 autocast, "
        f"AdamW; torch {found['torch']}; {found['pairs']} pairs. Static memory "
        f"{found['static_bytes'] / 1e6:.2f} MB of {found['total_bytes'] / 1e6:.2f} MB; peaks are above it.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + "---|" * len(HEAD),
    ]
    lines += ["| " + " | ".join(row(Point(**point))) + " |" for point in found["points"]]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Size the model for the card, run, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--fill", type=float, default=0.85, help="of the card, by the default compile")
    parser.add_argument("--batch", type=int, help="sequences a step, instead of as many as fill it")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --small shows what would be run")
    size, dtype = SIZES["small" if args.small else "large"], torch.bfloat16
    total = device_total_bytes(args.device)
    batch = args.batch or (4 if args.small else fitting(size, args.device, dtype, int(args.fill * total)))
    bench = Bench(gpt(size, batch), args.pairs, device=args.device, dtype=dtype, trains=True)
    points = run(bench)
    card = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    today = datetime.date.today().isoformat()
    found = {
        "card": card, "date": today, "torch": torch.__version__, "size": size, "batch": batch,
        "pairs": args.pairs, "total_bytes": total, "static_bytes": bench.static_bytes(bench.default),
        "points": [asdict(point) for point in points],
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"gpt_{card.replace(' ', '-').lower()}_{today}"
    path.with_suffix(".json").write_text(json.dumps(found, indent=1))
    path.with_suffix(".md").write_text(table(found))
    print(table(found))
    ours = [point for point in points if point.ours]
    return 0 if all(p.peak_bytes is not None and p.peak_bytes <= (p.budget_bytes or 0) for p in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
