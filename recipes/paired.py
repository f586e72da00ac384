"""How much slower the planned step is than the default compile's: both in one process, in alternation."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from dtr_integrations import auto_checkpoint
from dtr_integrations.report import PairedRatio, paired_ratio


def paired_steps(
    model: nn.Module,
    batch: tuple[torch.Tensor, torch.Tensor],
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    budget: str,
    plan: str,
    pairs: int = 30,
    warm_up: int = 2,
    console: Console,
) -> PairedRatio:
    """Time whole steps (forward, loss, backward, AdamW) of two copies of `model`, compiled by default and
    by `plan`.

    `plan` is the path of a plan file and `budget` the budget that it was made for. Which of the two goes
    first changes from pair to pair, since the first finds colder caches. The model that is passed in is not
    changed.
    """
    default, planned = copy.deepcopy(model).train(), copy.deepcopy(model).train()
    default.compile(dynamic=False)
    optimizer = torch.optim.AdamW(planned.parameters())
    step = training_step(planned, optimizer, batch, loss_fn)
    # Measuring memory slows a step down: only one of the warm-up is measured.
    never = {"log_every_n_steps": warm_up + pairs + 1}
    with auto_checkpoint(planned, optimizer=optimizer, budget=budget, plan=plan, **never) as session:
        steps = (
            training_step(default, torch.optim.AdamW(default.parameters()), batch, loss_fn),
            lambda: session.step(step),
        )
        times: tuple[list[float], list[float]] = ([], [])
        for number in track(range(-warm_up, pairs), f"timing {pairs} pairs", console=console, transient=True):
            if not console.is_terminal and number % 10 == 0:
                console.print(f"pair {number} of {pairs}")  # no bar is drawn into a log file
            for which in (0, 1) if number % 2 else (1, 0):
                elapsed = timed_ms(steps[which])
                if number >= 0:
                    times[which].append(elapsed)
    return paired_ratio(*times)


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss_fn: Callable[..., torch.Tensor]
) -> Callable[[], None]:
    """One whole step as a function, in Lightning's order: old gradients go between forward and backward."""
    inputs, targets = batch

    def step() -> None:
        loss = loss_fn(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def timed_ms(step: Callable[[], Any]) -> float:
    """Wall time of one call in milliseconds."""
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3
