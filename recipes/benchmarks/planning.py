"""How long planning takes at scale: Llama-3 shapes without a weight or a GPU, on tensors without data.

    python recipes/benchmarks/planning.py [SHAPE ...] [--layers N] [--share 0.5] [--json FILE]

For each shape, in a process of its own: capture, search of the whole frontier, and one certified plan at
`static + share · (default − static)`, in seconds; joint nodes, and the highest resident memory of the
process.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(path) for path in (Path(__file__).parent, ROOT / "tests", ROOT)]

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 2, "width": 128, "heads": 4, "groups": 2, "hidden": 384, "vocabulary": 512},
    "8b": {
        "layers": 32, "width": 4096, "heads": 32, "groups": 8, "hidden": 14_336, "vocabulary": 128_256
    },
    "70b": {
        "layers": 80, "width": 8192, "heads": 64, "groups": 8, "hidden": 28_672, "vocabulary": 128_256
    },
}  # fmt: skip
LENGTH = {"tiny": 128, "8b": 8192, "70b": 8192}
SHARE = 0.5


def measured(name: str, layers: int | None, share: float) -> dict[str, Any]:
    """One shape in this process."""
    import torch
    import torch.nn.functional as F
    from frontier_models import Llama

    from dtr_integrations.capture.source import ModuleStep
    from dtr_integrations.capture.step import capture
    from dtr_integrations.core.simulate import NO_CORRECTION
    from dtr_integrations.distributed import reserve_for
    from dtr_integrations.pipeline import make_plan
    from dtr_integrations.planner import Problem, search

    shape = SHAPES[name] | ({} if layers is None else {"layers": layers})
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = Llama(**shape)
        ids = torch.zeros(1, LENGTH[name], dtype=torch.long)

    def loss(out: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.flatten(0, 1), torch.zeros_like(out[..., 0], dtype=torch.long).flatten())

    source = ModuleStep(model=model, args=(ids,), loss_fn=loss)
    captured, capture_s = timed(lambda: capture(source))
    static, default = captured.default.static_bytes, captured.default.peak_bytes
    budget = static + int(share * (default - static))
    problem = Problem(step=captured.step, correction=NO_CORRECTION, focus_bytes=budget)
    frontier, search_s = timed(lambda: search(problem))
    planned, plan_s = timed(
        lambda: make_plan(source, budget_bytes=budget, reserve=reserve_for("cpu", budget, 0))
    )
    return {
        "shape": name,
        **shape,
        "length": LENGTH[name],
        "joint_nodes": sum(len(graph.ops) for graph in captured.step.graphs),
        "points": len(frontier.points),
        "capture_s": capture_s,
        "search_s": search_s,
        "search_share_of_capture": search_s / capture_s,
        "plan_s": plan_s,
        "plan_share_of_capture": plan_s / capture_s,
        "plan_seconds": dict(planned.seconds),
        "rounds": planned.rounds,
        "static_bytes": static,
        "default_bytes": default,
        "lowest_bytes": frontier.points[0].peak_bytes,
        "budget_bytes": budget,
        "predicted_bytes": planned.plan.predicted_allocated_bytes,
        "slowdown": planned.plan.slowdown,
        "slowdown_lower_bound": planned.plan.slowdown_lower_bound,
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "torch": torch.__version__,
    }


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """(what it gives, seconds)."""
    start = time.perf_counter()
    out = run()
    return out, time.perf_counter() - start


def line(row: dict[str, Any]) -> str:
    """One shape in words."""
    return (
        f"{row['shape']}, {row['layers']} layers: {row['joint_nodes']} joint nodes; capture "
        f"{row['capture_s']:.1f} s, search {row['search_s']:.1f} s ({row['search_share_of_capture']:.2f}), "
        f"one certified plan {row['plan_s']:.1f} s ({row['plan_share_of_capture']:.2f}, "
        f"{row['rounds']} rounds); "
        f"{row['rss_bytes'] / 1e9:.2f} GB resident; default {row['default_bytes'] / 1e9:.2f} GB, lowest "
        f"{row['lowest_bytes'] / 1e9:.2f} GB, {row['predicted_bytes'] / 1e9:.2f} of "
        f"{row['budget_bytes'] / 1e9:.2f} GB at ×{row['slowdown']:.3f}"
    )


def main() -> int:
    """Each shape in a process of its own, or, as a worker, the one that is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", default=["8b"], choices=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--share", type=float, default=SHARE)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measured(args.shapes[0], args.layers, args.share)))
        return 0
    rows = []
    for name in args.shapes:
        command = [sys.executable, __file__, name, "--worker", "--share", str(args.share)]
        command += [] if args.layers is None else ["--layers", str(args.layers)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(line(rows[-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
