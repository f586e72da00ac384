"""Random modules under random budgets, two optimizer steps each, against plain eager: bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from fuzz_modules import build
from torch.utils._pytree import tree_leaves

from dtr_integrations import online
from dtr_integrations.errors import OutOfBudget
from dtr_integrations.online.record import modelled_cost

pytestmark = pytest.mark.usefixtures("one_thread")


def train(seed: int, budget: int | None) -> tuple[list[torch.Tensor | None], online.Stats | None]:
    """What two steps leave behind, and what the runtime did; without it where there is no budget."""
    sample = build(seed)
    model, batch = sample.model, sample.batch
    dtr = None if budget is None else online.DTR(model, budget=f"{budget}B", cost=modelled_cost)
    torch.manual_seed(seed)
    results: list[Any] = []

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=sample.autocast):
            output = model(**batch)
            loss = sample.loss(output)
        loss.backward()
        sample.optimizer.step()
        results.extend((output, loss))

    for _ in range(2):
        sample.optimizer.zero_grad()
        results.clear()
        if dtr is None:
            step()
        else:
            with dtr:
                step()
    left = [*(p.grad for p in model.parameters()), *model.parameters(), *model.buffers()]
    state = tree_leaves((results, batch, sample.optimizer.state_dict()))
    tensors = [leaf for leaf in state if isinstance(leaf, torch.Tensor)]
    return [*left, *tensors, torch.get_rng_state()], dtr.stats if dtr is not None else None


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other) or (
        one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
    )


def check(seed: int) -> int:
    """Evictions in all; 0 where the budget that was drawn is too small."""
    plain, _ = train(seed, None)
    free, stats = train(seed, 10**12)
    assert all(map(same, plain, free))
    assert stats is not None
    low, high = stats.held_bytes, stats.peak_bytes
    budget = low + int((high - low) * random.Random(seed).uniform(0.4, 0.95))
    try:
        found, stats = train(seed, budget)
    except OutOfBudget:
        return 0
    assert stats is not None
    assert stats.peak_bytes <= budget
    assert all(map(same, plain, found))
    return stats.evictions


@pytest.mark.filterwarnings("ignore")  # the modules are drawn, and so are torch's remarks on them
def test_random_modules() -> None:
    assert sum(check(seed) for seed in range(60)) > 100


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_more_random_modules() -> None:
    assert sum(check(seed) for seed in range(60, 1500)) > 2000
