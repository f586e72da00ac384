"""The simulator takes the runtime's decisions, one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dtr_models import KINDS, Attention, Residual, TreeLSTM, syntax_tree
from online_cases import CASES, Case
from torch import nn
from torch.nn import functional

from dtr_integrations import online
from dtr_integrations.dtr.journal import predict
from dtr_integrations.online.journal import journal
from dtr_integrations.online.record import modelled_cost

pytestmark = pytest.mark.usefixtures("one_thread")


class Trace:
    """Writes down every eviction, release and replay, and passes it on to `driver`."""

    def __init__(self, driver: Any = None) -> None:
        self.driver = driver
        self.events: list[Any] = []

    def compute(self, operator: Any, *, replay: bool) -> None:
        self.events.append((operator.name, operator.cost, operator.output_bytes))
        if self.driver is not None:
            self.driver.compute(operator, replay=replay)

    def evict(self, storage: Any) -> None:
        if storage.cost:  # not a constant, whose bytes go when the program lets go
            self.events.append((storage.size_bytes, storage.cost, storage.last_access, storage.references))
        if self.driver is not None:
            self.driver.evict(storage)


def gpt() -> Case:
    net = nn.Sequential(nn.Embedding(64, 32), *(Attention(32, 4) for _ in range(6)), nn.Linear(32, 64))
    tokens = torch.randint(64, (8, 25))
    return net, lambda: functional.cross_entropy(
        net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    ).backward()


def resnet() -> Case:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *(Residual(8) for _ in range(6)), nn.Flatten(), nn.Linear(512, 10)
    )
    x, y = torch.rand(16, 3, 8, 8), torch.randint(10, (16,))
    return net, lambda: functional.cross_entropy(net(x), y).backward()


def treelstm() -> Case:
    net = TreeLSTM(len(KINDS), 16, 64)
    tree = syntax_tree(1, 30)
    return net, lambda: functional.cross_entropy(
        net.head(net(tree)[0]), torch.full((64,), tree[0])
    ).backward()


MODELS = {
    "gpt": gpt,
    "resnet": resnet,
    "treelstm": treelstm,
    "lstm": CASES["lstm_cell"],
    "in_place": CASES["in_place"],
    "higher_order": CASES["higher_order"],
    "routed": CASES["data_dependent"],
    "statistics": CASES["batch_norm_in_evaluation_then_training"],
}


@pytest.mark.parametrize("heuristic", ["h_dtr_eq", "h_local"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_sequence(name: str, heuristic: str) -> None:
    torch.manual_seed(0)
    module, step = MODELS[name]()
    torch.manual_seed(1)
    entries = journal(module, step, cost=modelled_cost)
    free = predict(entries, budget_bytes=10**12)
    for share in (0.7, 0.5):
        budget = int(share * free.unconstrained_bytes)
        module.zero_grad()
        real = online.DTR(module, budget=f"{budget}B", heuristic=heuristic, cost=modelled_cost)
        cache = real._runtime.cache
        cache.driver = done = Trace(real._runtime.memory)
        torch.manual_seed(1)
        with real:
            step()
            length = len(done.events)
        told = Trace()
        result = predict(entries, budget_bytes=budget, heuristic=heuristic, driver=told)
        assert result.outcome == "ok"
        assert result.evictions == cache.evictions > 0
        assert result.replays == cache.replays
        assert told.events == done.events[:length]
        assert result.peak_bytes == cache.peak_bytes
