"""The gate's models down a ladder of budgets: predicted, simulated and measured peak, modelled and measured
slowdown.

    python recipes/benchmarks/ladder.py [MODEL ...] [--shares 1.5 0.9 0.75 0.5 0.4] [--pairs 30] [--out DIR]

A share f asks for `static + f · (default − static)`; 1.5 does not bind. Slowdowns are medians of paired steps
in one process (default compile, plan), with a 95 % interval by bootstrap. Writes JSON and a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from models import CASES  # noqa: E402

import dtr_integrations  # noqa: E402


def step_of(case: Any, model: Any, batch: Any, optimizer: Any) -> Any:
    """One optimizer step as a function."""

    def step() -> None:
        optimizer.zero_grad()
        case.loss(model(batch)).backward()
        optimizer.step()

    return step


def paired(default: Any, planned: Any, pairs: int) -> tuple[float, float, float]:
    """Median of planned/default over `pairs`, and its 95 % bootstrap interval."""
    ratios = []
    for _ in range(pairs):
        times = []
        for step in (default, planned):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        ratios.append(times[1] / times[0])
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=pairs)) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[1950]


def rung(case: Any, share: float, pairs: int) -> dict[str, Any]:
    """One model at one budget."""
    model, batch, optimizer = case.build()
    free = dtr_integrations.plan(model, batch, budget="4GB", optimizer=optimizer, loss_fn=case.loss)
    budget = free.static_bytes + int(share * (free.default_allocated_bytes - free.static_bytes))
    reference, batch_r, optimizer_r = case.build()
    reference.compile(dynamic=False)
    default = step_of(case, reference, batch_r, optimizer_r)
    session = dtr_integrations.auto_checkpoint(
        model, budget=f"{budget}B", optimizer=optimizer, log_every_n_steps=10**9
    )
    step = step_of(case, model, batch, optimizer)
    for _ in range(3):
        session.step(step)
        default()
    (report,), plan = session.reports, session.plan
    ratio, low, high = paired(default, step, pairs)
    dynamic = report.peak_allocated_bytes - report.static_bytes
    return {
        "model": case.name, "share": share, "budget_bytes": budget, "rounds": session.planned.rounds,
        "static_bytes": report.static_bytes, "default_bytes": plan.default_allocated_bytes,
        "predicted_bytes": plan.predicted_allocated_bytes, "simulated_bytes": plan.simulated_bytes,
        "measured_bytes": report.peak_allocated_bytes, "within_budget": report.within_budget,
        "prediction_error": report.prediction_error,
        "simulation_error": abs(plan.simulated_bytes - report.peak_allocated_bytes) / dynamic,
        "slowdown_modelled": plan.slowdown, "slowdown_measured": ratio, "slowdown_95": [low, high],
        "seconds": dict(session.planned.seconds),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown; MB are 10^6 bytes and include static memory."""
    head = [
        "model",
        "f",
        "budget MB",
        "predicted MB",
        "measured MB",
        "prediction error",
        "search tier's error",
    ]
    head += ["slowdown modelled", "measured (95 %)"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        low, high = r["slowdown_95"]
        cells = [r["model"], f"{r['share']:g}"]
        cells += [f"{r[k] / 1e6:.2f}" for k in ("budget_bytes", "predicted_bytes", "measured_bytes")]
        cells += [
            f"{r['prediction_error']:.3%}",
            f"{r['simulation_error']:.2%}",
            f"{r['slowdown_modelled']:.3f}",
        ]
        lines.append(
            "| " + " | ".join([*cells, f"{r['slowdown_measured']:.3f} ({low:.3f}–{high:.3f})"]) + " |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the ladder and write what it found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(CASES))
    parser.add_argument("--shares", nargs="+", type=float, default=[1.5, 0.9, 0.75, 0.5, 0.4])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "ladder")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in args.models:
        for share in args.shares:
            rows.append(rung(CASES[name], share, args.pairs))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            (args.out / "ladder.json").write_text(json.dumps(rows, indent=1))
    (args.out / "ladder.md").write_text(table(rows))


if __name__ == "__main__":
    main()
