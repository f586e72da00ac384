"""What counts as equal: `compare` two trainings, value by value.

Floating tensors are compared in norm, ‖a − b‖ / ‖b‖ per tensor (element by element a relative error means
nothing where an element happens to be near 0), everything else exactly. A difference is allowed up to

    tolerance(dtype) · ‖b‖  +  10 · noise

*Tolerance*: a plan moves op borders, so the compiler fuses, orders and rounds otherwise. In float32 that
is sums of thousands of terms in another order, which random rounding puts √n · eps apart: 1e-5 = 84 eps is
n = 7,000. Below float32 kernels add up in float32 and round once per value that they store: 4 eps. The
coarsest dtype that occurs in the step counts for all of it, since gradients of half-precision activations
may well be float32.

*Noise*: how far eager training moves that tensor in that step when every parameter is moved by at most one
rounding (eps) at the start. It is 0 to the eye for most, but a gradient that is nothing but rounding (a bias
in front of a BatchNorm) differs by all of itself, and Adam turns the sign of such a gradient into whole
steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .._randomness import same_random_state
from .run import Key, Trained, same_value

DEFAULT, EAGER, ITSELF = "default", "eager", "itself"

_ROUNDINGS = {torch.float64: 84, torch.float32: 84}
_ROUNDINGS_BELOW = 4
_NOISES = 10

Noise = Mapping[tuple[int, Key], float]


@dataclass(frozen=True, kw_only=True)
class VerifyRow:
    """One compared value, at the step where it is worst.

    Attributes:
        kind: "loss", "gradient", "buffer", "parameter", "optimizer state", "random state", "Python state" or
            "hook calls".
        name: whose, e.g. a parameter's dotted name.
        step: the optimizer step, from 1.
        against: "default" (the plan against torch's default compile), "eager" (against eager training) or
            "itself" (a step against the same step once more).
        error: ‖a − b‖ / ‖b‖; of what is compared exactly 0 or inf.
        allowed: the largest error that is in order.
        note: what differs, where a number cannot say it.
    """

    kind: str
    name: str
    step: int
    against: str
    error: float
    allowed: float
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the error is in order; NaN is not."""
        return self.error <= self.allowed

    @property
    def badness(self) -> float:
        """The error as a multiple of what is allowed: above 1 is not in order."""
        if not self.ok:
            return self.error / self.allowed if 0 < self.allowed < math.inf and self.error > 0 else math.inf
        return self.error / self.allowed if self.allowed else 0.0


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What `verify` found; `str(report)` is a table of the worst.

    Attributes:
        rows: every compared value, worst first.
        steps: optimizer steps that were trained.
        dtype: the coarsest floating dtype in the step.
        tolerance: the relative difference that this dtype allows, noise apart.
        notes: what else a reader should know.
    """

    rows: tuple[VerifyRow, ...]
    steps: int
    dtype: str
    tolerance: float
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True when every compared value is in order."""
        return all(row.ok for row in self.rows)

    def __str__(self) -> str:
        from ..report import verify_text  # rich is only needed when somebody looks

        return verify_text(self)


def tolerance_of(dtype: torch.dtype) -> float:
    """The relative difference in norm that a dtype's rounding explains; see the module's text."""
    return _ROUNDINGS.get(dtype, _ROUNDINGS_BELOW) * float(torch.finfo(dtype).eps)


def coarsest(dtypes: set[torch.dtype]) -> torch.dtype:
    """The floating dtype with the largest rounding error; float32 if there is none."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def noise_between(one: Trained, other: Trained) -> Noise:
    """‖a − b‖ of every floating tensor at every step."""
    return {
        (step, key): _distance(a[key], b[key])
        for step, (a, b) in enumerate(zip(one.steps, other.steps, strict=True))
        for key in a.keys() & b.keys()
        if a[key].is_floating_point() and a[key].shape == b[key].shape
    }


def compare(
    one: Trained, other: Trained, *, against: str, tolerance: float, noise: Noise, python: bool = True
) -> list[VerifyRow]:
    """A row for every value of `other`, at the step where `one` is farthest from it. `python`: with Python
    state."""
    worst: dict[Key, VerifyRow] = {}
    for step, (a, b) in enumerate(zip(one.steps, other.steps, strict=True)):
        for key in {**b, **a}:
            found = _tensor_row(key, step, a.get(key), b.get(key), against, tolerance, noise)
            if key not in worst or found.badness > worst[key].badness:
                worst[key] = found
    rows = list(worst.values())
    last = len(one.steps)

    def exact(kind: str, name: str, same: bool, note: str) -> None:
        error = 0.0 if same else math.inf
        rows.append(
            VerifyRow(
                kind=kind,
                name=name,
                step=last,
                against=against,
                error=error,
                allowed=0.0,
                note="" if same else note,
            )
        )

    for name in other.random:
        exact(
            "random state", name, same_random_state(one.random.get(name), other.random[name]), "another state"
        )
    for name in other.hook_calls | one.hook_calls:
        calls, others = one.hook_calls[name], other.hook_calls[name]
        exact("hook calls", name, calls == others, f"{calls} calls, not {others}")
    if python:
        for name in {**other.python, **one.python}:
            value, expected = one.python.get(name), other.python.get(name)
            same = same_value(value, expected, relative=_NOISES * tolerance)
            exact("Python state", name, same, f"{_short(value)}, not {_short(expected)}")
    return rows


def _tensor_row(
    key: Key,
    step: int,
    one: torch.Tensor | None,
    other: torch.Tensor | None,
    against: str,
    tolerance: float,
    noise: Noise,
) -> VerifyRow:
    error, allowed, note = math.inf, 0.0, ""
    if one is None or other is None:
        note = "is not there" if one is None else "should not be there"
    elif one.shape != other.shape or one.dtype != other.dtype:
        note = f"{_kind_of(one)}, not {_kind_of(other)}"
    elif not one.is_floating_point() and not one.is_complex():
        error = 0.0 if torch.equal(one, other) else math.inf
        note = "" if not error else f"{_value(one)}, not {_value(other)}"
    else:
        distance, norm = _distance(one, other), _norm(other)
        room = _NOISES * noise.get((step, key), 0.0)
        if norm:
            error, allowed = distance / norm, tolerance + room / norm
        else:
            error, allowed = (0.0, tolerance) if distance <= room else (math.inf, tolerance)
    return VerifyRow(
        kind=key.kind, name=key.name, step=step + 1, against=against, error=error, allowed=allowed, note=note
    )


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """‖a − b‖; elements that are the same infinity, or both NaN, do not differ."""
    same = (one == other) | ((one != one) & (other != other))
    return float(torch.where(same, 0, _wide(one) - _wide(other)).norm())


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.nan_to_num(_wide(tensor), nan=0.0, posinf=0.0, neginf=0.0).norm())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _kind_of(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _value(tensor: torch.Tensor) -> str:
    return str(tensor.item()) if tensor.numel() == 1 else "other elements"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
