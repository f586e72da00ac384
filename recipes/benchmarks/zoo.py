"""Models that nobody here wrote: one optimizer step of each family of the zoo under a budget that binds.

    python recipes/benchmarks/zoo.py [FAMILY ...] [--json FILE] [--table FILE] [--skip eager torch]

The budget lies halfway between what the family's own `gradient_checkpointing_enable()` reaches, eager, and
what the default compile takes, both true peaks. Each family runs in a process of its own. Needs
`pip install 'dtr-integrations[transformers]'`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "tests"), str(ROOT)]

import torch  # noqa: E402
from gate import Trained, train, worst  # noqa: E402
from torch import nn  # noqa: E402
from torchs_own import Split  # noqa: E402
from zoo_families import Family, load  # noqa: E402

import dtr_integrations  # noqa: E402
from dtr_integrations.capture.source import ModuleStep  # noqa: E402
from dtr_integrations.capture.step import dry_step  # noqa: E402
from dtr_integrations.errors import DTRError  # noqa: E402
from dtr_integrations.measure import measure_step, static_bytes  # noqa: E402

RATIOS = (0.8, 0.5, 0.2)  # of torch's activation_memory_budget
SHARE_WITHOUT_CHECKPOINTING = 0.7
# A gradient whose norm is below this share of the whole gradient's is rounding (attention does not depend on
# the bias of its keys): both runs must say so, and its digits mean nothing.
ROUNDING = 1e-6

_NO_SETTINGS = ("_name_or_path", "architectures", "dtype", "id2label", "label2id", "transformers_version")


@dataclass(kw_only=True)
class Row:
    """What one family did. Bytes are true peaks of one whole step, static memory and batch included."""

    family: str
    model: str = ""  # its class
    config: dict[str, Any] = field(default_factory=dict)  # what differs from the class's defaults
    batch: dict[str, str] = field(default_factory=dict)  # shapes of the inputs
    outcome: str = "crashed"  # planned | planned in parts | eager | refused | crashed
    reason: str = ""
    parameters: int = 0
    static_bytes: int = 0
    default_bytes: int = 0
    checkpointing_bytes: int | None = None
    budget_bytes: int = 0
    budget_rule: str = ""
    predicted_bytes: int | None = None
    default_predicted_bytes: int | None = None
    measured_bytes: int | None = None
    within_budget: bool | None = None
    prediction_error: float | None = None
    slowdown_modelled: float | None = None
    graphs: int = 0
    breaks: int = 0
    break_reasons: list[str] = field(default_factory=list)
    rounds: int = 0
    random: bool | None = None
    error_default: float | None = None  # against the compiled default, same seed
    where_default: str = ""
    error_eager: float | None = None  # against eager with eager's random numbers
    where_eager: str = ""
    error_eager_of_default: float | None = None  # how far the compiled default is from eager
    torch_ratio: float | None = None  # of its activation_memory_budget, the nearest to the budget
    torch_bytes: int | None = None
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Ran under its budget with equal gradients."""
        eager_ok = self.error_eager is None or self.error_eager <= max(
            1e-4, 1.01 * (self.error_eager_of_default or 0.0)
        )
        return (
            self.outcome.startswith("planned")
            and bool(self.within_budget)
            and self.error_default is not None
            and self.error_default <= 1e-5
            and eager_ok
        )


class Bench:
    """Builds the family anew for each way of running it."""

    def __init__(self, family: Family) -> None:
        self.family = family

    def build(self) -> tuple[nn.Module, dict[str, Any], torch.optim.Optimizer]:
        """Model in training mode, batch and optimizer; the same ones every time."""
        torch._dynamo.reset()
        gc.collect()
        torch.manual_seed(0)
        model = self.family.make().train()
        torch.manual_seed(1)
        batch = self.family.batch()
        return model, batch, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def peak_bytes(self, model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
        """(true peak of a whole step, static memory)."""

        def step() -> None:
            model(**batch).loss.backward()
            optimizer.step()

        peak = measure_step(step, device="cpu", cleanup=lambda: optimizer.zero_grad(set_to_none=True))
        static = static_bytes([model], [optimizer])
        return static + batch_bytes(batch) + peak.peak_bytes, static

    def default(self, row: Row) -> Trained:
        """A few steps of the default compile, then its true peak and its graph breaks, noted in `row`."""
        model, batch, optimizer = self.build()
        model.compile(dynamic=False)
        torch._dynamo.utils.counters.clear()
        trained = train(model, optimizer, lambda: model(**batch).loss, lambda step: step())
        counted = torch._dynamo.utils.counters["graph_break"]
        row.break_reasons = [f"{count} × {text.splitlines()[0]}" for text, count in counted.items()]
        row.breaks = sum(counted.values())
        row.parameters = sum(p.numel() for p in model.parameters())
        optimizer.zero_grad(set_to_none=True)
        row.default_bytes, row.static_bytes = self.peak_bytes(model, batch, optimizer)
        return trained

    def checkpointing_bytes(self) -> int | None:
        """True peak with the family's own activation checkpointing, eager; None where it has none."""
        model, batch, optimizer = self.build()
        if not getattr(model, "supports_gradient_checkpointing", False):
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `use_cache` is switched off, says each layer
            model.gradient_checkpointing_enable()
            return self.peak_bytes(model, batch, optimizer)[0]

    def torch_bytes(self, ratio: float) -> int:
        """True peak of the default compile at one ratio of torch's own `activation_memory_budget`."""
        model, batch, optimizer = self.build()
        model.compile(dynamic=False)
        with torch._functorch.config.patch(activation_memory_budget=ratio):
            return self.peak_bytes(model, batch, optimizer)[0]

    def nearest_ratio(self, budget_bytes: int) -> float:
        """The ratio of `RATIOS` at which torch's own API comes nearest to the budget, by dry runs."""
        peaks = {}
        for ratio in RATIOS:
            model, batch, optimizer = self.build()
            source = ModuleStep(model=model, kwargs=batch, optimizer=optimizer)
            with torch._functorch.config.patch(activation_memory_budget=ratio):
                peaks[ratio] = dry_step(source, Split()).profile.peak_bytes
        return min(peaks, key=lambda ratio: abs(peaks[ratio] - budget_bytes))

    def trained(self, *, compiled: bool, fallback_random: bool = False) -> Trained:
        """A few steps without us."""
        model, batch, optimizer = self.build()
        if compiled:
            model.compile(dynamic=False)
        with torch._inductor.config.patch(fallback_random=fallback_random):
            return train(model, optimizer, lambda: model(**batch).loss, lambda step: step())

    def planned(self, budget_bytes: int, *, fallback_random: bool = False) -> tuple[Trained, Any]:
        """The same steps under the budget, and the session (closed)."""
        model, batch, optimizer = self.build()
        options = {"fallback_random": True} if fallback_random else {}
        session = dtr_integrations.auto_checkpoint(
            model, budget=f"{budget_bytes}B", optimizer=optimizer, compile_options=options, progress=False
        )
        with session, torch._inductor.config.patch(fallback_random=fallback_random):
            return train(model, optimizer, lambda: model(**batch).loss, session.step), session

    def is_random(self) -> bool:
        """Whether the loss in training mode depends on the seed."""
        model, batch, _ = self.build()
        losses = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            with torch.no_grad():
                losses.append(model(**batch).loss.item())
        return losses[0] != losses[1]


def batch_bytes(batch: Any) -> int:
    """Bytes of the batch's storages."""
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in leaves}.values())


def run_family(family: Family, *, skip: tuple[str, ...] = ()) -> Row:
    """Everything about one family. `skip`: "eager" (the comparison with eager), "torch" (its own budget)."""
    bench, row = Bench(family), Row(family=family.name)
    model, batch, _ = bench.build()
    row.model, row.config, row.batch = type(model).__name__, settings(model.config), shapes(batch)
    del model, batch
    with laps(row, "default"):
        default = bench.default(row)
    with laps(row, "checkpointing"):
        row.checkpointing_bytes = bench.checkpointing_bytes()
    row.budget_bytes, row.budget_rule = budget_of(row)
    with laps(row, "planned"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            trained, session = bench.planned(row.budget_bytes)
        except DTRError as error:
            row.outcome, row.reason = "refused", f"{type(error).__name__}: {error}"
            return row
    row.warnings = list(dict.fromkeys(f"{w.category.__name__}: {w.message}" for w in caught))
    describe(row, session)
    if session.plan is None:
        return row
    with laps(row, "compare"):
        row.error_default, row.where_default = worst(trained, default, rounding=ROUNDING)
        if "eager" not in skip:
            row.random = bench.is_random()
            if row.random:
                trained, _ = bench.planned(row.budget_bytes, fallback_random=True)
            eager = bench.trained(compiled=False)
            row.error_eager, row.where_eager = worst(trained, eager, rounding=ROUNDING)
            if row.error_eager > 1e-4:
                if row.random:
                    default = bench.trained(compiled=True, fallback_random=True)
                row.error_eager_of_default = worst(default, eager, rounding=ROUNDING)[0]
                error, where = worst(trained, default, rounding=ROUNDING)
                if error > row.error_default:
                    row.error_default, row.where_default = error, where
    if "torch" not in skip:
        with laps(row, "torch"):
            ratio = bench.nearest_ratio(row.budget_bytes)
            row.torch_ratio, row.torch_bytes = ratio, bench.torch_bytes(ratio)
    return row


def settings(config: Any) -> dict[str, Any]:
    """What of a model's configuration differs from its class's defaults, nested ones as `outer.inner`."""
    found: dict[str, Any] = {}

    def walk(own: dict[str, Any], default: dict[str, Any], path: str) -> None:
        for name, value in own.items():
            if isinstance(value, dict) and name not in _NO_SETTINGS:
                other = default.get(name)
                walk(value, other if isinstance(other, dict) else {}, f"{path}{name}.")
            elif name not in _NO_SETTINGS and default.get(name) != value:
                found[path + name] = value

    walk(config.to_dict(), type(config)().to_dict(), "")
    return found


def shapes(batch: Any) -> dict[str, str]:
    """The shapes of the tensors of a batch, by their names."""

    def shape(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return "×".join(map(str, value.shape)) or "scalar"
        return f"{len(value)} of different sizes" if isinstance(value, list) else repr(value)

    return {name: shape(value) for name, value in batch.items()}


def budget_of(row: Row) -> tuple[int, str]:
    """Halfway between the family's own checkpointing and the default; where there is none, or none that
    helps, a share of the default's dynamic memory."""
    if row.checkpointing_bytes is not None and row.checkpointing_bytes < row.default_bytes:
        return (row.checkpointing_bytes + row.default_bytes) // 2, "halfway to its own checkpointing"
    dynamic = row.default_bytes - row.static_bytes
    why = "none of its own" if row.checkpointing_bytes is None else "its own is above the default"
    return (
        row.static_bytes + int(SHARE_WITHOUT_CHECKPOINTING * dynamic),
        f"{SHARE_WITHOUT_CHECKPOINTING:g} of the dynamic memory ({why})",
    )


def describe(row: Row, session: Any) -> None:
    """Read plan and measured peak off a session."""
    if session.plan is None:
        row.outcome = "eager"
        row.reason = next((text for text in row.warnings if text.startswith("NothingPlanned")), "")
        return
    plan = session.plan
    row.graphs, row.rounds = len(session.planned.captured.step.graphs), session.planned.rounds
    row.outcome = "planned in parts" if row.graphs > 1 or row.breaks else "planned"
    row.predicted_bytes = plan.predicted_allocated_bytes
    row.default_predicted_bytes = plan.default_allocated_bytes
    row.slowdown_modelled = plan.slowdown
    row.seconds |= {f"plan: {name}": seconds for name, seconds in session.planned.seconds.items()}
    report = session.reports[-1]
    row.measured_bytes = report.peak_allocated_bytes
    row.within_budget = report.peak_allocated_bytes <= row.budget_bytes
    row.prediction_error = report.prediction_error


@contextlib.contextmanager
def laps(row: Row, name: str) -> Iterator[None]:
    """Note how long the block took."""
    start = time.perf_counter()
    try:
        yield
    finally:
        row.seconds[name] = round(time.perf_counter() - start, 1)


def in_a_process(name: str, skip: tuple[str, ...], timeout_s: float) -> Row:
    """`run_family` in a fresh process: no family's crash or compiled code reaches another."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--worker", name, str(out), "--skip", *skip]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return Row(family=name, reason=f"did not end within {timeout_s:.0f} s")
        if out.exists():
            return Row(**json.loads(out.read_text()))
        return Row(family=name, reason=f"the process ended with {done.returncode}: {done.stderr[-2000:]}")


def work(name: str, out: Path, skip: tuple[str, ...]) -> None:
    """One family in this process, its row written to `out`."""
    try:
        row = run_family(load()[name], skip=skip)
    except Exception:
        row = Row(family=name, reason=traceback.format_exc()[-6000:])
    out.write_text(json.dumps(asdict(row)))


COLUMNS: dict[str, Callable[[Row], str]] = {
    "family": lambda r: r.family,
    "outcome": lambda r: r.outcome,
    "graphs / breaks": lambda r: f"{r.graphs} / {r.breaks}",
    "parameters": lambda r: f"{r.parameters / 1e6:.2f} M",
    "static MB": lambda r: megabytes(r.static_bytes),
    "default MB": lambda r: megabytes(r.default_bytes),
    "own checkpointing, eager MB": lambda r: megabytes(r.checkpointing_bytes),
    "budget MB": lambda r: megabytes(r.budget_bytes),
    "measured MB": lambda r: megabytes(r.measured_bytes),
    "prediction error": lambda r: "–" if r.prediction_error is None else f"{r.prediction_error:.3%}",
    "gradients against default": lambda r: small(r.error_default),
    "against eager": lambda r: (
        small(r.error_eager)
        + (f" (default: {small(r.error_eager_of_default)})" if r.error_eager_of_default is not None else "")
    ),
    "torch's budget API, nearest MB (ratio)": lambda r: torchs_own(r),
    "slowdown, modelled": lambda r: "–" if r.slowdown_modelled is None else f"{r.slowdown_modelled:.3f}",
}


def megabytes(size_bytes: int | None) -> str:
    """Bytes as MB (10⁶)."""
    return "–" if size_bytes is None else f"{size_bytes / 1e6:.2f}"


def small(error: float | None) -> str:
    """A relative error."""
    return "–" if error is None else f"{error:.1e}"


def torchs_own(row: Row) -> str:
    """The peak of torch's own API at the ratio that comes closest to the budget."""
    return "–" if row.torch_bytes is None else f"{megabytes(row.torch_bytes)} ({row.torch_ratio:g})"


def parameters_table(rows: list[Row]) -> str:
    """What each family's model and batch are, in Markdown."""
    lines = [
        "| family | class | parameters | batch | configuration, besides its class's defaults |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        batch = ", ".join(f"{name} {shape}" for name, shape in row.batch.items())
        config = ", ".join(f"{name}={value}" for name, value in row.config.items())
        lines.append(f"| {row.family} | {row.model} | {row.parameters / 1e6:.2f} M | {batch} | {config} |")
    return "\n".join(lines) + "\n"


def table(rows: list[Row]) -> str:
    """The rows in Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cell(row) for cell in COLUMNS.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the families that were named, or all. Returns 1 if any of them did not pass."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--table", type=Path, help="write the Markdown table there")
    parser.add_argument("--skip", nargs="*", default=[], choices=["eager", "torch"])
    parser.add_argument("--timeout", type=float, default=1200.0, metavar="SECONDS", help="for each family")
    parser.add_argument("--worker", nargs=2, metavar=("FAMILY", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    skip = tuple(args.skip)
    if args.worker:
        work(args.worker[0], Path(args.worker[1]), skip)
        return 0
    known = load()
    if unknown := [name for name in args.families if name not in known]:
        parser.error(f"no such family: {', '.join(unknown)}; there are {', '.join(known)}")
    rows: list[Row] = []
    for name in args.families or known:
        row = in_a_process(name, skip, args.timeout)
        rows.append(row)
        print(table([row]).splitlines()[-1], flush=True)
        if not row.passed:
            print(row.reason or "did not pass", flush=True)
        if args.json:
            args.json.write_text(json.dumps([asdict(r) | {"passed": r.passed} for r in rows], indent=1))
        if args.table:
            args.table.write_text(f"{table(rows)}\n{parameters_table(rows)}")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
