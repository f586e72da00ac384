"""The online runtime where a test takes long: two ranks, next to compiled modules, a thousand steps."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from dtr_models import KINDS, TreeLSTM, syntax_tree
from test_online import runtime, tables
from torch import distributed, nn

from dtr_integrations.errors import DTRError

pytestmark = pytest.mark.slow


def _worker(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        _data_parallel(rank)
        _collectives_in_the_forward(rank)
    finally:
        distributed.destroy_process_group()


def _data_parallel(rank: int) -> None:
    torch.manual_seed(5 + rank)
    x = torch.rand(512, 32)

    def train(budget: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = (m for _ in range(8) for m in (nn.Linear(32, 32), nn.Dropout(0.2), nn.Tanh()))
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dtr = runtime(model, budget or "1TB")
        torch.manual_seed(rank)
        for _ in range(3):
            optimizer.zero_grad()
            if budget is None:
                model(x).square().mean().backward()
            else:
                with dtr:
                    model(x).square().mean().backward()
            optimizer.step()
        assert budget is None or dtr.stats.evictions > 0
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, train(None), train(1_100_000)))


def _collectives_in_the_forward(rank: int) -> None:
    from torch.distributed.nn.functional import all_reduce

    def forward(w: torch.Tensor) -> torch.Tensor:
        h = w
        for _ in range(4):
            h = (h * 1.01).sin().exp().tanh()
            shared = h.detach().clone()
            distributed.all_reduce(shared)
            h = h + all_reduce(h) * shared
        return h.sum()

    w = torch.full((1000,), 0.3 + rank, requires_grad=True)
    forward(w).backward()
    expected, w.grad = w.grad, None
    # Ranks evict differently: a collective that ran again would hang, or meet another one.
    dtr = runtime(nn.Linear(1, 1), 75_000 + 3_000 * rank)
    with dtr:
        forward(w).backward()
    assert dtr.stats.rematerialisations > 0
    assert torch.equal(expected, w.grad)


def test_two_ranks(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_worker, (str(tmp_path / "store"),), nprocs=2)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_between_compiled_modules(backend: str) -> None:
    torch.manual_seed(0)

    def block() -> nn.Module:
        return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh())))

    first, middle, last = block(), block(), block()
    net = nn.Sequential(first, middle, last)
    entry, exit_ = torch.compile(first, backend=backend), torch.compile(last, backend=backend)
    x = torch.rand(512, 32)

    def step() -> None:
        exit_(middle(entry(x))).square().mean().backward()

    step()
    expected = [p.grad for p in net.parameters()]
    net.zero_grad()
    free = runtime(net, "1TB")
    with free:
        step()
    peak, held = free.stats.peak_bytes, free.stats.held_bytes
    net.zero_grad()
    dtr = runtime(net, held + int(0.75 * (peak - held)))
    with dtr:
        step()
    assert dtr.stats.evictions > 0
    assert dtr.stats.rematerialisations > 0
    assert all(torch.equal(e, p.grad) for e, p in zip(expected, net.parameters(), strict=True))


def test_a_thousand_steps_of_changing_trees() -> None:
    torch.manual_seed(0)
    net = TreeLSTM(len(KINDS), 16, 64)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    trees = [syntax_tree(seed, 14) for seed in range(25)]
    dtr = runtime(net, "500KB")

    def train(tree: Any) -> None:
        optimizer.zero_grad()
        with dtr:
            nn.functional.cross_entropy(net.head(net(tree)[0]), torch.full((64,), tree[0])).backward()
            optimizer.step()

    seen, resident = [], []
    for number in range(1000):
        try:
            train(trees[number % len(trees)])
        except DTRError as error:
            raise AssertionError(f"step {number}") from error
        if number % 250 == 249:
            seen.append(tables(dtr))
            resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert dtr.stats.evictions > 1000
    assert len(set(seen)) == 1
    assert resident[-1] <= resident[0] + 4_000, resident  # kilobytes
