"""What a step reads off tensors without data: a run that goes well."""

from __future__ import annotations

import random
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dtr_integrations.capture.fake import FakeWorld, preserved_randomness, wind_to_medians
from dtr_integrations.capture.source import ModuleStep
from dtr_integrations.capture.step import capture

CONDITIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "isnan": (lambda x: torch.isnan(x).any(), False),
    "isinf": (lambda x: torch.isinf(x).any(), False),
    "either": (lambda x: (torch.isnan(x) | torch.isinf(x)).any(), False),
    "isfinite": (lambda x: torch.isfinite(x).all(), True),
    "not finite": (lambda x: (~torch.isfinite(x)).any(), False),
    "unequal to itself": (lambda x: (x != x).any(), False),
    "equal to itself": (lambda x: (x == x).all(), True),
    "not nan": (lambda x: torch.logical_not(torch.isnan(x)).all(), True),
    "a comparison": (lambda x: x.sum() > 0, True),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions(name: str) -> None:
    condition, expected = CONDITIONS[name]
    world = FakeWorld()
    x = world.copy(torch.nn.Parameter(torch.zeros(3)))  # nothing known
    with world.active():
        assert bool(condition(x.detach())) is expected


def test_numbers_of_the_batch_are_known() -> None:
    world = FakeWorld()
    lengths, weight = world.copy((torch.tensor([2, 3]), torch.nn.Parameter(torch.tensor(2.5))))
    with world.active():
        assert lengths.tolist() == [2, 3]
        assert (lengths + 1).max().item() == 4
        assert weight.item() == 1.0  # a parameter changes from step to step
        assert (lengths * weight).sum().item() == 1.0


def test_known_numbers_are_followed_through_writes_and_views() -> None:
    world = FakeWorld()
    real = torch.zeros(2, 3, dtype=torch.long)
    ids, weight = world.copy((real, torch.nn.Parameter(torch.ones(3))))
    with world.active():
        ids[0].fill_(7)
        assert ids.tolist() == [[7, 7, 7], [0, 0, 0]]
        ids[1].copy_(weight.detach())
        assert ids[0, 0].item() == 1  # the whole tensor is unknown once a part of it is
    assert not real.any()


def test_shapes_that_depend_on_data() -> None:
    world = FakeWorld()
    mask, x = world.copy((torch.tensor([True, False, True]), torch.nn.Parameter(torch.zeros(3, 4))))
    with world.active():
        assert x[mask].shape == (2, 4)
        assert x[x[:, 0] > 0].shape == (3, 4)  # unknown: as if it selected everything
        assert torch.masked_select(x, x > 0).shape == (12,)
        assert torch.unique((x > 0).long()).shape == (12,)
        assert mask.nonzero().tolist() == [[0], [2]]


def test_arrays() -> None:
    world = FakeWorld()
    ids, x = world.copy((torch.tensor([3, 4]), torch.nn.Parameter(torch.zeros(2, 2))))
    with world.active():
        assert np.asarray(ids).tolist() == [3, 4]
        assert np.asarray(x.detach()).tolist() == [[1.0, 1.0], [1.0, 1.0]]
        back = torch.as_tensor(np.arange(2), dtype=torch.int64)  # a real tensor, and its fake twin in an op
        assert (ids + back).tolist() == [3, 5]


def test_a_lone_random_number_is_a_median() -> None:
    world = FakeWorld()
    with world.active():
        for _ in range(20):
            assert 0.3 < torch.rand([]).item() < 0.7
            assert not bool(torch.empty(1).uniform_(0, 1) < 0.1)
        assert 0 < int((torch.rand(1000) < 0.5).sum()) < 1000


def test_generators_wound_to_medians() -> None:
    with preserved_randomness():
        before = random.getstate(), np.random.get_state()[1].tolist()
        with preserved_randomness():
            wind_to_medians()
            draws = [random.random() for _ in range(312)]
            assert {round(x, 3) for x in draws} == {0.5}
            assert abs(np.random.random() - 0.5) < 1e-3
            assert len({random.random() for _ in range(624)}) > 1  # no loop waits forever
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_small_outputs_of_compiled_graphs_are_known() -> None:
    """Compiled graphs run without their kernels: what follows from the batch alone, and from a lone random
    number, is known all the same."""
    queue: SimpleQueue[Any] = SimpleQueue()  # a list would be put back as it was

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            mask = (torch.arange(4) < lengths[:, None]).float()
            places = torch.nonzero(mask)[:, 1]
            kept = bool(torch.rand([]) < 0.1)
            wide = mask[:, None].expand(-1, 200_000, -1) - 1.0  # 6.4 MB: known only on the way
            hidden = (wide[:, 0] < 0).sum()
            torch._dynamo.graph_break()
            queue.put((tuple(places.shape), kept, bool(torch.isnan(x).any()), int(hidden)))
            return self.linear(x)

    capture(ModuleStep(model=Reads(), args=(torch.randn(2, 4), torch.tensor([1, 3]))))
    seen = [queue.get() for _ in range(queue.qsize())]
    assert seen == [((4,), False, False, 4)] * len(seen)
    assert seen
