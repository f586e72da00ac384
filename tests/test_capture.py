"""The fake step: exact where it can be checked, and without a trace on anything real."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import CASES, Broken
from torch import nn

from dtr_integrations._python_state import referred_to
from dtr_integrations.capture.closure import FunctionStep
from dtr_integrations.capture.source import ModuleStep, default_loss
from dtr_integrations.capture.step import Captured, capture, certify
from dtr_integrations.core.graph import OpKind, Phase, RegionKind
from dtr_integrations.core.schedule import schedule_for
from dtr_integrations.core.simulate import simulate_step
from dtr_integrations.errors import CaptureError
from dtr_integrations.pipeline import planned_partitioner


class Small(nn.Module):
    """Convolution, BatchNorm, dropout and a Python counter: everything that a real run would change."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)
        self.calls = 0

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(F.dropout(F.relu(self.norm(self.conv(image))), 0.2, self.training).mean((2, 3)))


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, torch.Tensor, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Small()
    image = torch.randn(4, 3, 16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(image).sum().backward()
    optimizer.step()  # real state, and gradients that must survive
    return model, image, optimizer


@pytest.fixture(scope="module")
def captured_small(small: Any) -> Captured:
    model, image, optimizer = small
    return capture(ModuleStep(model=model, args=(image,), optimizer=optimizer))


def bytes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tensors += [
        v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)
    ]
    return [t.detach().numpy().tobytes() for t in tensors]


def test_nothing_real_changes(small: Any) -> None:
    model, image, optimizer = small
    before = bytes_of(model, optimizer)
    keys, identity = list(model.state_dict()), [id(p) for p in model.parameters()]
    groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    states = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()
    calls, pixels = model.calls, image.clone()
    optimizer_step = optimizer.step
    capture(ModuleStep(model=model, args=(image,), optimizer=optimizer, zero_after_forward=True))
    assert bytes_of(model, optimizer) == before
    assert list(model.state_dict()) == keys
    assert [id(p) for p in model.parameters()] == identity
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tobytes() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert model.calls == calls
    assert torch.equal(image, pixels)
    assert optimizer.step == optimizer_step


def test_static_memory_is_what_the_real_objects_hold(small: Any, captured_small: Captured) -> None:
    model, image, optimizer = small
    static = captured_small.step.static
    assert static.parameter_bytes == sum(p.nbytes for p in model.parameters())
    assert static.buffer_bytes == sum(b.nbytes for b in model.buffers())
    assert static.optimizer_bytes == sum(v.nbytes for s in optimizer.state.values() for v in s.values())
    assert static.gradient_bytes == static.parameter_bytes
    assert static.batch_bytes == image.nbytes


def test_the_breakdown_adds_up_to_the_peak(captured_small: Captured) -> None:
    default = captured_small.default
    assert sum(default.breakdown.values()) == default.peak_bytes == max(default.timeline)


def test_regions_are_in_execution_order_and_cover_the_step(captured_small: Captured) -> None:
    kinds = [r.kind for r in captured_small.step.regions if r.kind is not RegionKind.EAGER]
    assert kinds == [RegionKind.FORWARD, RegionKind.BACKWARD]
    regions = captured_small.default.regions
    assert all(a.end <= b.start for a, b in itertools.pairwise(regions))
    assert max(r.peak_bytes for r in regions) == captured_small.default.peak_bytes


def test_batchnorm_statistics_and_seeds_are_never_computed_again(captured_small: Captured) -> None:
    (graph,) = captured_small.step.graphs
    seeds = [op for op in graph.ops if "inductor_seeds" in op.target]
    assert seeds
    assert not any(op.replayable for op in seeds)
    draws = [op for op in graph.ops if "inductor_random" in op.target]
    assert draws
    assert all(op.replayable for op in draws)


def test_parameters_buffers_and_batch_are_static(captured_small: Captured) -> None:
    (graph,) = captured_small.step.graphs
    inputs = [op for op in graph.ops if op.kind is OpKind.INPUT and "tangent" not in op.name]
    assert {op.value for op in inputs if op.value >= 0} <= graph.static
    assert not graph.static & {s for op in graph.ops if op.phase is Phase.FORWARD for s in op.storages}


def test_a_break_gives_two_graphs_in_order() -> None:
    captured = capture(ModuleStep(model=Broken(32), args=(torch.randn(64, 32),)))
    order = [(r.kind.value, r.graph) for r in captured.step.regions if r.graph >= 0]
    assert order == [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]
    paths = {op.module for op in captured.step.graphs[1].ops}
    assert any("second" in path for path in paths)


def test_accumulation_holds_old_and_new_gradients_at_once(small: Any) -> None:
    model, image, optimizer = small
    one = capture(ModuleStep(model=model, args=(image,), optimizer=optimizer))
    two = capture(ModuleStep(model=model, args=(image,), optimizer=optimizer, micro_batches=2))
    assert len([r for r in two.step.regions if r.kind is RegionKind.FORWARD]) == 2
    assert two.default.peak_bytes > one.default.peak_bytes


def test_the_function_of_a_whole_step_runs_on_twins(small: Any) -> None:
    model, image, optimizer = small
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    seen: list[float] = []
    before = bytes_of(model, optimizer), scheduler.last_epoch, optimizer.param_groups[0]["lr"], model.calls

    def step() -> float:
        optimizer.zero_grad()
        loss = model(image).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        seen.append(loss.item())
        return loss.item()

    captured = capture(FunctionStep(fn=step, model=model, optimizers=(optimizer,)))
    assert (
        bytes_of(model, optimizer),
        scheduler.last_epoch,
        optimizer.param_groups[0]["lr"],
        model.calls,
    ) == before
    assert seen == []
    assert captured.step.static.batch_bytes == image.nbytes
    assert [id(t) for t in referred_to(step).tensors] == [id(image)]


def test_what_cannot_run_without_data_says_so() -> None:
    def loss(out: torch.Tensor) -> torch.Tensor:
        return out.sum() * out.untyped_storage()[0]

    with pytest.raises(CaptureError, match="loss_fn fails on what the model returned"):
        capture(ModuleStep(model=nn.Linear(4, 4), args=(torch.randn(2, 4),), loss_fn=loss))


def test_default_loss_takes_the_first_thing_that_can_be_one() -> None:
    scalar, tensor = torch.tensor(2.0), torch.ones(3, dtype=torch.bfloat16)
    assert default_loss({"loss": scalar, "x": tensor}) is scalar
    assert default_loss(scalar) is scalar
    assert default_loss((torch.ones(2, dtype=torch.long), tensor)).dtype is torch.float32
    with pytest.raises(CaptureError, match="loss_fn="):
        default_loss(torch.ones(2, dtype=torch.long))


@pytest.mark.parametrize("name", ["mlp"])
def test_fingerprints_do_not_depend_on_the_capture(name: str) -> None:
    case = CASES[name]
    prints = []
    for _ in range(2):
        model, batch, _ = case.build()
        model.layers = model.layers[:2]
        prints.append(
            [g.fingerprint for g in capture(ModuleStep(model=model, args=(batch[:8],))).step.graphs]
        )
    assert prints[0] == prints[1]


def test_a_captured_model_can_be_freed() -> None:
    model = nn.Linear(8, 8)
    alive = weakref.ref(model)
    capture(ModuleStep(model=model, args=(torch.randn(2, 8),)))
    del model
    gc.collect()
    assert alive() is None


class WithExtras(nn.Module):
    """A loss, and beside it what the backward may read too: the hidden values, as they are and viewed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        a = torch.sigmoid(self.first(x))
        b = torch.sigmoid(self.second(a))
        return {"loss": self.third(b).square().mean(), "hidden": a, "last": b.view(-1, 8, 64)}


def _with_extras(keep: tuple[str, ...], save: str | None) -> tuple[Captured, list[tuple[int, int]]]:
    """The step in which the program holds the outputs named `keep` through the backward. For each region:
    bytes at entry by the search tier, and by the dry run, of the plan that saves what the op `save` makes
    (None: what the default saves)."""
    held: dict[str, Any] = {}

    def loss_fn(out: dict[str, torch.Tensor]) -> torch.Tensor:
        held.update({name: out[name] for name in keep})
        return out["loss"]

    torch.manual_seed(0)
    source = ModuleStep(model=WithExtras(), args=(torch.randn(512, 16),), loss_fn=loss_fn)
    captured = capture(source)
    (graph,) = captured.step.graphs
    saved = graph.default_saved
    if save is not None:
        saved = tuple(op.index for op in graph.ops if op.name.startswith(save) and op.saveable)
    schedule = schedule_for(graph, saved)
    with planned_partitioner([schedule], mode="schedule") as partitioner:
        profile = certify(source, partitioner).profile
    simulated = simulate_step(captured.step, [schedule])
    levels = zip(simulated.levels, profile.regions, strict=True)
    return captured, [(level.entry_bytes, region.entry_bytes) for level, region in levels]


@pytest.mark.parametrize("keep", [(), ("hidden",), ("hidden", "last")])
def test_an_output_that_the_program_lets_go_lives_on_only_if_it_is_saved(keep: tuple[str, ...]) -> None:
    size_bytes = 512 * 64 * 4
    captured, default = _with_extras(keep, None)
    (graph,) = captured.step.graphs
    dropped = sorted(graph.storage_bytes[s] for s in graph.dropped)
    assert [size for size in dropped if size == size_bytes] == [size_bytes] * (2 - len(keep))
    kinds = [region.kind for region in captured.step.regions]
    backward = kinds.index(RegionKind.BACKWARD)
    _, lean = _with_extras(keep, "mean")
    for levels in (default, lean):
        simulated, exact = levels[backward]
        assert simulated == exact
    # What the third layer makes is no output: the lean plan is without it either way.
    assert default[backward][1] - lean[backward][1] == size_bytes * (3 - len(keep))
