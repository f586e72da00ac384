"""The correctness gate: train a few steps twice and compare loss, every gradient and every buffer, in norm
per tensor."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

STEPS = 3


@dataclass
class Trained:
    """What a few steps left: one dict of tensors a step."""

    states: list[dict[str, torch.Tensor]]


def seed(number: int) -> None:
    """Python's, numpy's and torch's generators: models draw from all three."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def train(
    model: nn.Module,
    optimizer: Any,
    loss_of: Callable[[], torch.Tensor],
    run: Callable[[Any], Any],
    *,
    steps: int = STEPS,
) -> Trained:
    """`steps` optimizer steps from one seed; `run(step)` performs each (a session's `step`, or a plain
    call)."""
    states: list[dict[str, torch.Tensor]] = []

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.detach()

    seed(1)
    for _ in range(steps):
        loss = run(step)
        state = {"loss": loss.clone()}
        state |= {f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        state |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
        states.append(state)
    return Trained(states)


def _is_zero(gradient: torch.Tensor) -> bool:
    return not gradient.count_nonzero()


def worst(one: Trained, other: Trained, *, rounding: float = 0.0) -> tuple[float, str]:
    """The largest ‖a − b‖ / ‖b‖ over all tensors and steps, and whose it is.

    A gradient whose norm is below the share `rounding` of the whole gradient's on both sides is left out: its
    digits mean nothing. No gradient is as good as one of zeros: where a graph ends, torch's compiler returns
    zeros for what the loss does not depend on.
    """
    found = (0.0, "")
    for step, (a, b) in enumerate(zip(one.states, other.states, strict=True)):
        alone = [n for n in a.keys() ^ b.keys() if not (n.startswith("grad ") and _is_zero({**a, **b}[n]))]
        if alone:
            return float("inf"), f"step {step}: {sorted(alone)[:3]} are on one side only"
        whole = sum(t.double().norm().item() ** 2 for name, t in b.items() if name.startswith("grad ")) ** 0.5
        for name in a.keys() & b.keys():
            x, y = a[name].double(), b[name].double()
            norm = y.norm().item()
            if name.startswith("grad ") and max(norm, x.norm().item()) < rounding * whole:
                continue
            error = (x - y).norm().item() / (norm or 1.0)
            if not error <= found[0]:  # NaN counts as worst
                found = (error, f"{name} at step {step}")
    return found
