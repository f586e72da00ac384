"""Every hard case under a budget, against plain eager: bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from online_cases import CASES, Case
from torch.utils._pytree import tree_leaves

from dtr_integrations import online
from dtr_integrations.online.record import modelled_cost

pytestmark = pytest.mark.usefixtures("one_thread")


def build(make: Callable[[], Case]) -> Case:
    torch.manual_seed(0)
    return make()


def outcome(module: torch.nn.Module, result: Any) -> list[torch.Tensor | None]:
    """Everything that a step leaves behind."""
    left = [*(p.grad for p in module.parameters()), *module.parameters(), *module.buffers()]
    return [
        t.to_dense() if t is not None and t.is_sparse else t
        for t in [*left, *tree_leaves(result), torch.get_rng_state()]
    ]


def same(one: list[torch.Tensor | None], other: list[torch.Tensor | None]) -> bool:
    return all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def peak_of(make: Callable[[], Case]) -> tuple[int, int]:
    """(peak, held afterwards) of the runtime without a budget."""
    module, step = build(make)
    dtr = online.DTR(module, budget="1TB", cost=modelled_cost)
    with dtr:
        step()
    assert dtr.stats.evictions == 0
    return dtr.stats.peak_bytes, dtr.stats.held_bytes


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_plain_eager(name: str) -> None:
    make = CASES[name]
    module, step = build(make)
    torch.manual_seed(1)
    plain = outcome(module, step())
    peak, static = peak_of(make)
    module, step = build(make)
    dtr = online.DTR(module, budget=f"{static + (peak - static) // 2}B", cost=modelled_cost)
    torch.manual_seed(1)
    gc.disable()
    try:
        with dtr:
            result = step()
        assert dtr.stats.evictions > 0
        assert dtr.stats.peak_bytes <= dtr.budget_bytes
        assert same(plain, outcome(module, result))
        del result
        dtr._runtime.settle()
    finally:
        gc.enable()
    assert dtr._runtime.memory.saved == 0
    assert all(s.value is None or s.value.constant for s in dtr._runtime.memory.slots.values())
    assert not dtr._runtime.cache.pool
