"""Random modules under random budgets: nothing but memory and time changes, and the budget holds.

`python tests/test_fuzz.py FIRST END`, or `... SEED,SEED,...`, runs seeds without pytest and prints a line of
JSON for each.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from fuzz_modules import Sample, build
from gate import Trained, train, worst
from torch.utils.checkpoint import CheckpointPolicy

import dtr_integrations
from dtr_integrations._compat import CustomPartitionerFn, partitioners
from dtr_integrations.errors import BudgetInfeasible, NothingPlanned, PlanWarning

STEPS = 2  # the second one is measured
TOLERANCE = 1e-5  # in norm per tensor: float32 sums in another order
# bfloat16 keeps 8 bits, and the compiler rounds a value to it only where it is stored; a plan stores others.
LOW_PRECISION_TOLERANCE = 2e-2
# Of the whole gradient's norm: what the backward adds up on its way to a gradient is rounded no finer than
# that (a bias before BatchNorm or softmax has no gradient but rounding).
RESOLUTION = torch.finfo(torch.float32).eps
AS_FAR = 2  # times as far from float64 as the default is, where that is more than the tolerance
SEEDS, CHUNK = 300, 30
QUICK = (0, 7, 24)


@dataclass(kw_only=True)
class Outcome:
    """What became of a seed; `budget_bytes` is the one that was run with."""

    seed: int
    # "planned" or "default", also after "infeasible, then"; "eager": torch.compile makes no graph;
    # "torch": it fails
    kind: str
    note: str = ""
    budget_bytes: int = 0
    default_bytes: int = 0
    static_bytes: int = 0
    predicted_bytes: int = 0
    measured_bytes: int = 0
    prediction_error: float = 0.0
    difference: str = ""  # the worst that is rounding, or torch's fault


class Mismatch(AssertionError):
    """Numbers, budget or side effects are not as they must be."""


def run_seed(seed: int) -> Outcome:
    """Everything that must hold, for one seed. Raises `Mismatch`, or whatever crashed."""
    torch._dynamo.reset()
    gc.collect()
    before = graphs_made()
    try:
        reference, random_state = trained_by_torch(build(seed))
    except Exception as error:
        # Not ours, if eager is fine: plain torch.compile fails.
        trained(build(seed), lambda step: step())
        return Outcome(seed=seed, kind="torch", note=f"{type(error).__name__}: {str(error)[:200]}")
    if graphs_made() == before:
        with pytest.warns(NothingPlanned):
            ours, _, state = planned(build(seed), 10**9)
        check(torch.equal(state, random_state), "the random state afterwards differs")
        compare(seed, ours, reference, low_precision=False)
        return Outcome(seed=seed, kind="eager", note="torch.compile makes no graph of it")
    sample = build(seed)
    frontier = dtr_integrations.frontier(
        sample.model, sample.batch, optimizer=sample.optimizer, loss_fn=sample.loss
    )
    low, default = frontier.points[0].peak_bytes, frontier.default.peak_bytes
    budget = int(low + sample.budget_draw * (default - low))
    if low == default:
        budget = default + 1
    kind = ""
    try:
        ours, session, state = planned(build(seed), budget)
    except BudgetInfeasible as refused:
        check(refused.lowest_bytes > budget, "the lowest plan would have fitted")
        budget = refused.lowest_bytes
        kind = "infeasible, then "
        ours, session, state = planned(build(seed), budget)
    (report,) = session.reports
    check(report.peak_allocated_bytes <= budget, f"measured {report.peak_allocated_bytes:,} > {budget:,}")
    check(torch.equal(state, random_state), "the random state afterwards differs")
    if budget >= session.plan.default_allocated_bytes:
        check(
            session.plan.is_default or any("wrong gradients" in note for note in session.plan.notes),
            "the budget does not bind, but the plan is not the default",
        )
    try:
        difference = compare(seed, ours, reference, sample.autocast or sample.low_precision)
    except Mismatch as mismatch:
        difference = fault_of_torch(seed, ours, reference, mismatch)
    return Outcome(
        seed=seed,
        kind=kind + ("default" if session.plan.is_default else "planned"),
        budget_bytes=budget,
        default_bytes=session.plan.default_allocated_bytes,
        static_bytes=session.plan.static_bytes,
        predicted_bytes=report.predicted_allocated_bytes,
        measured_bytes=report.peak_allocated_bytes,
        prediction_error=report.prediction_error,
        difference=difference,
    )


def graphs_made() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def check(holds: bool, text: str) -> None:
    if not holds:
        raise Mismatch(text)


def trained(sample: Sample, run: Callable[[Any], Any]) -> Trained:
    model, batch, loss, autocast = sample.model, sample.batch, sample.loss, sample.autocast

    def loss_of() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss(model(**batch))

    return train(model, sample.optimizer, loss_of, run, steps=STEPS)


def trained_by_torch(sample: Sample) -> tuple[Trained, torch.Tensor]:
    """The compiled default without us, and the random state afterwards."""
    sample.model.compile(dynamic=False)
    return trained(sample, lambda step: step()), torch.get_rng_state()


def planned(sample: Sample, budget_bytes: int) -> tuple[Trained, Any, torch.Tensor]:
    """Under a budget. A refusal must leave everything as it was."""
    before = {k: v.clone() for k, v in sample.model.state_dict().items()}
    torch.manual_seed(1)  # as `train` begins
    state = torch.get_rng_state()
    session = dtr_integrations.auto_checkpoint(
        sample.model, budget=f"{budget_bytes}B", optimizer=sample.optimizer, progress=False
    )
    with session:
        try:
            ours = trained(sample, session.step)
        except BudgetInfeasible:
            after = sample.model.state_dict()
            check(all(torch.equal(before[k], after[k]) for k in before), "a refusal changed the model")
            check(all(p.grad is None for p in sample.model.parameters()), "a refusal left gradients")
            check(not sample.optimizer.state, "a refusal changed the optimizer")
            check(torch.equal(state, torch.get_rng_state()), "a refusal changed the random state")
            raise
        return ours, session, torch.get_rng_state()


def compare(seed: int, ours: Trained, reference: Trained, low_precision: bool) -> str:
    """Check all numbers. A difference above the tolerance has to be rounding: the plan is then not much
    farther from the same training in float64 than the default is. That training counts only if its loss is
    the default's: then it has drawn the same random numbers.

    Returns the worst of those.
    """
    tolerance = LOW_PRECISION_TOLERANCE if low_precision else TOLERANCE
    exact: Trained | None = None
    worst, found = 0.0, ""
    for step, (a, b) in enumerate(zip(ours.states, reference.states, strict=True)):
        check(a.keys() == b.keys(), f"tensors differ: {sorted(a.keys() ^ b.keys())}")
        for name in b:
            difference, norm = distance(a[name], b[name]), b[name].double().norm().item()
            if agree(name, a, b, tolerance):
                continue
            if exact is None:
                torch._dynamo.reset()
                exact, _ = trained_by_torch(build(seed, dtype=torch.float64))
            truth = exact.states[step]
            off, allowed = distance(a[name], truth[name]), distance(b[name], truth[name])
            where = (
                f"{name} at step {step}: {difference:.2e} of {norm:.2e} "
                f"(from float64: {off:.2e}, the default {allowed:.2e})"
            )
            same_draws = distance(b["loss"], truth["loss"]) <= tolerance * truth["loss"].norm().item()
            check(same_draws, f"{where}; float64 draws other numbers")
            check(off <= AS_FAR * allowed + tolerance * truth[name].norm().item(), where)
            if difference / (norm or 1.0) > worst:
                worst, found = difference / (norm or 1.0), where
    return found


def agree(name: str, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> bool:
    """Whether a tensor is the same in two states of a step, but for rounding."""
    allowed = tolerance * b[name].double().norm().item()
    if name.startswith("grad "):
        whole = sum(t.double().norm().item() ** 2 for n, t in b.items() if n.startswith("grad ")) ** 0.5
        allowed = max(allowed, RESOLUTION * whole)
    return distance(a[name], b[name]) <= allowed


class Repaired(CustomPartitionerFn):
    """Torch's own partitioner, told not to run again what reads an input that the forward overwrites."""

    def __call__(self, gm: Any, inputs: Any, **kwargs: Any) -> Any:
        overwritten = {n.args[0] for n in gm.graph.nodes if n.target is torch.ops.aten.copy_.default}
        for node in gm.graph.nodes:
            if node.op == "call_function" and not overwritten.isdisjoint(node.all_input_nodes):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return partitioners.min_cut_rematerialization_partition(gm, inputs, **kwargs)

    def uuid(self) -> Any:
        return None


def fault_of_torch(seed: int, ours: Trained, reference: Trained, mismatch: Mismatch) -> str:
    """Where the compiled default differs from itself without its known fault, while the plan does not.

    Raises `mismatch` when that is not so.
    """
    with torch._inductor.config.patch(custom_partitioner_fn=Repaired()):
        torch._dynamo.reset()
        right, _ = trained_by_torch(build(seed))
    error, where = worst(reference, right)
    pairs = zip(ours.states, right.states, strict=True)
    if error <= TOLERANCE or not all(agree(name, a, b, TOLERANCE) for a, b in pairs for name in b):
        raise mismatch
    return f"the default reads an overwritten buffer, and is {error:.1e} off in {where}; the plan is not"


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double() - b.double()).norm().item()


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Our own warnings are faults; those of third parties about a random module are not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", PlanWarning)
        yield


@pytest.mark.parametrize("seed", QUICK)
def test_a_random_module_under_a_random_budget(seed: int, record_property: Any) -> None:
    with strict():
        outcome = run_seed(seed)
    record_property("outcome", asdict(outcome))


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_random_modules_under_random_budgets(first: int, record_property: Any) -> None:
    faults = []
    for seed in range(first, first + CHUNK):
        try:
            with strict():
                record_property("outcome", asdict(run_seed(seed)))
        except Exception as error:
            faults.append(f"seed {seed}: {type(error).__name__}: {error}\n{build(seed).source}")
    assert not faults, "\n\n".join(faults)


def main(arguments: list[str]) -> None:
    """A line of JSON for each seed."""
    numbers = [int(n) for argument in arguments for n in argument.split(",")]
    run(list(range(*numbers)) if len(arguments) == 2 else numbers)


def run(seeds: list[int]) -> None:
    for seed in seeds:
        start, cpu = time.time(), time.process_time()
        try:
            with strict():
                result = asdict(run_seed(seed))
        except Exception as error:
            result = {"seed": seed, "kind": "fault", "note": f"{type(error).__name__}: {str(error)[:1500]}"}
            if not isinstance(error, Mismatch):
                result["trace"] = traceback.format_exc()[-3000:]
        result["seconds"], result["cpu"] = round(time.time() - start, 1), round(time.process_time() - cpu, 1)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
