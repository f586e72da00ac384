"""The comparisons that make up the gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from ..apply.partitioner import PlanPartitioner
from ..capture.source import StepSource
from ..capture.step import Parts
from ..errors import CaptureError, DTRError
from .compare import (
    DEFAULT,
    EAGER,
    ITSELF,
    Noise,
    VerifyReport,
    VerifyRow,
    coarsest,
    compare,
    noise_between,
    tolerance_of,
)
from .run import Trained, Way, by_default, by_plan, eagerly, train

# What carries a plan out, and Inductor's options for it.
Carrier = tuple[PlanPartitioner, Mapping[str, Any]]

# A planned run may be this much farther from eager than torch's default compile is.
_AS_FAR_AS_DEFAULT = 1.1
_MOST_CULPRITS = 16


def check(
    source: StepSource,
    carrier: Carrier,
    *,
    options: Mapping[str, Any],
    with_eagers_numbers: Callable[[Mapping[str, Any]], AbstractContextManager[Carrier]],
    steps: int,
    progress: Callable[[str], None],
    parts: Parts | None = None,
) -> VerifyReport:
    """Train `steps` steps of `source` by the plan that `carrier` carries out, and compare what they leave
    with

    * the compiled default at the same seed: the same random numbers, so everything has to agree, unless it is
      the default that is wrong (it differs from eager training and the plan does not);
    * eager training. Compiled random numbers are not eager's, so where the step draws any, plan and default
      are compiled with Inductor's `fallback_random` for this. What the default differs from eager, the plan
      may as well: it is torch's own doing;
    * the step itself, once more, when its modules' Python state has changed: a plan is made for one step, and
      a forward that changes from call to call is another step each time.

    Nothing real changes.

    Args:
        source: the step.
        carrier: carries the plan out.
        options: the user's options for Inductor.
        with_eagers_numbers: a carrier of a plan for the same step compiled with the given options.
        steps: optimizer steps, at least 1.
        progress: told what is being done.
        parts: what is compiled; None: the source's targets.

    Raises:
        CaptureError: the step cannot be run on copies of its objects.
    """
    lab = _Lab(source, steps, progress, parts)
    eager = lab.train(eagerly, "eagerly")
    dtype = coarsest(eager.dtypes)
    tolerance = tolerance_of(dtype)
    nudged = lab.train(eagerly, "eagerly, moved by one rounding", nudge=float(torch.finfo(dtype).eps))
    noise = noise_between(nudged, eager)
    del nudged
    default: Trained | None = lab.train(by_default(options, lab.parts), "by the default compile")
    assert default is not None
    planned = lab.train(by_plan(*carrier, parts), "by the plan")
    rows = compare(planned, default, against=DEFAULT, tolerance=tolerance, noise=noise)
    notes = []
    draws = eager.drew and not options.get("fallback_random")
    if not draws:
        rows = _without_faults_of_default(rows, planned, default, eager, tolerance, noise)
    if draws and not all(row.ok for row in rows):
        notes.append("not compared with eager training, which takes another plan: this one is wrong already")
    else:
        if draws:
            notes.append("the step draws random numbers: rows on eager are of a plan with eager's own")
            options, default = {**options, "fallback_random": True}, None
            with with_eagers_numbers(options) as other:
                planned = lab.train(by_plan(*other, parts), "by a plan with eager's random numbers")
        rows += _against_eager(lab, planned, default, eager, options, tolerance, noise)
    rows += _against_itself(lab, eager, tolerance, noise)
    return VerifyReport(
        rows=tuple(sorted(rows, key=lambda row: (row.ok, -row.badness))),
        steps=steps,
        dtype=str(dtype).removeprefix("torch."),
        tolerance=tolerance,
        notes=tuple(notes),
    )


class _Lab:
    """Trains one source in several ways."""

    def __init__(
        self, source: StepSource, steps: int, progress: Callable[[str], None], parts: Parts | None
    ) -> None:
        self.source, self.steps, self.progress, self.parts = source, steps, progress, parts

    def train(self, way: Way, words: str, *, steps: int | None = None, **changes: Any) -> Trained:
        self.progress(f"verifying: training {words}")
        try:
            return train(self.source, way, steps=steps or self.steps, **changes)
        except DTRError:
            raise
        except Exception as error:
            raise CaptureError(
                f"the step cannot be verified: trained {words}, on a copy of the model, it fails: "
                f"{type(error).__name__}: {error}"
            ) from error


def _without_faults_of_default(
    rows: list[VerifyRow],
    planned: Trained,
    default: Trained,
    eager: Trained,
    tolerance: float,
    noise: Noise,
) -> list[VerifyRow]:
    """`rows` (the plan against the default), in order where eager training says that the default is wrong."""
    if all(row.ok for row in rows):
        return rows

    def on_eager(one: Trained) -> dict[tuple[str, str], VerifyRow]:
        found = compare(one, eager, against=EAGER, tolerance=tolerance, noise=noise, python=False)
        return {(row.kind, row.name): row for row in found}

    ours, theirs = on_eager(planned), on_eager(default)

    def judged(row: VerifyRow) -> VerifyRow:
        name = row.kind, row.name
        if row.ok or not {name} <= ours.keys() & theirs.keys() or not ours[name].ok or theirs[name].ok:
            return row
        note = f"the default compile is wrong, {theirs[name].error:.1e} from eager"
        return replace(row, allowed=row.error, note=note)

    return [judged(row) for row in rows]


def _against_eager(
    lab: _Lab,
    planned: Trained,
    default: Trained | None,
    eager: Trained,
    options: Mapping[str, Any],
    tolerance: float,
    noise: Noise,
) -> list[VerifyRow]:
    def compared(one: Trained) -> list[VerifyRow]:
        return compare(one, eager, against=EAGER, tolerance=tolerance, noise=noise, python=False)

    rows = compared(planned)
    if all(row.ok for row in rows):
        return rows
    if default is None:
        default = lab.train(
            by_default(options, lab.parts), "by the default compile with eager's random numbers"
        )
    own = {
        (row.kind, row.name): row
        for row in compare(planned, default, against=DEFAULT, tolerance=tolerance, noise=noise)
    }
    theirs = {(row.kind, row.name): row for row in compared(default)}

    def judged(row: VerifyRow) -> VerifyRow:
        name = row.kind, row.name
        if row.ok or name not in theirs or name not in own or not own[name].ok:
            return row
        far = theirs[name].error * _AS_FAR_AS_DEFAULT
        return replace(row, allowed=max(row.allowed, far), note="as far as the default compile")

    return [judged(row) for row in rows]


def _against_itself(lab: _Lab, eager: Trained, tolerance: float, noise: Noise) -> list[VerifyRow]:
    """One step from the start again, but with the Python state that training left."""
    names = [name for name in eager.changed if name in eager.python]
    if not names:
        return []
    first = replace(eager, steps=eager.steps[:1])

    def worst(which: list[str]) -> VerifyRow:
        values = {name: eager.python[name] for name in which}
        again = lab.train(eagerly, "the first step again", steps=1, python=values)
        again.steps = [{key: again.steps[0][key] for key in first.steps[0] if key in again.steps[0]}]
        rows = compare(again, first, against=ITSELF, tolerance=tolerance, noise=noise, python=False)
        rows = [row for row in rows if row.kind in ("loss", "gradient", "buffer")]
        return max(rows, key=lambda row: (not row.ok, row.badness))

    def verdict(which: list[str], found: VerifyRow) -> VerifyRow:
        note = (
            "" if found.ok else f"{found.kind} {found.name} depends on it: it changes the step between calls"
        )
        return VerifyRow(
            kind="Python state",
            name=", ".join(which),
            step=found.step,
            against=ITSELF,
            error=found.error,
            allowed=found.allowed,
            note=note,
        )

    together = worst(names)
    if together.ok:
        return [verdict(names, together)]
    alone = [verdict([name], worst([name])) for name in names[:_MOST_CULPRITS]]
    return [row for row in alone if not row.ok] or [verdict(names, together)]
