"""What users report about torch's own checkpointing and compiling, and that it does not happen here: whole
steps whose shapes, Python state, buffers or backwards are not the simplest.

Built as `test_pains`: first the fault, on torch's own API or on a naive plan, then ours.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning_models import fit, models
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointError, checkpoint

import dtr_integrations
from dtr_integrations.errors import NothingPlanned, PlanWarning

LIMIT = 3  # of compiles of one function, in the place of torch's 8
AMPLE = "1GB"


def checkpointed(model: nn.Module) -> Callable[..., Any]:
    return lambda *args: checkpoint(model, *args, use_reentrant=False)


def losses_and_gradients(
    model: nn.Module,
    batches: Iterable[tuple[Any, ...]],
    call: Callable[..., Any] | None = None,
    run: Callable[[Callable[[], None]], Any] = lambda step: step(),
) -> list[torch.Tensor]:
    """One SGD step a batch; the losses, then the last gradients and buffers. `run` performs each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    call = call or model
    seen: list[torch.Tensor] = []
    for batch in batches:

        def step(batch: tuple[Any, ...] = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = call(*batch).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        seen.append(run(step))
    return [*seen, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def ours(model: nn.Module, batches: Iterable[tuple[Any, ...]], budget: str = AMPLE) -> list[torch.Tensor]:
    with dtr_integrations.auto_checkpoint(model, budget=budget, progress=False) as session:
        return losses_and_gradients(model, batches, run=session.step)


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert (a - b).double().norm() <= 1e-5 * b.double().norm()


def said(record: Iterable[warnings.WarningMessage], text: str) -> int:
    return sum(text in str(warning.message) for warning in record)


@pytest.fixture
def few_compiles() -> Any:
    """A low recompile limit, and none of torch's caches: what comes out of one is not planned again."""
    torch._dynamo.reset()
    with (
        torch._dynamo.config.patch(recompile_limit=LIMIT),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield
    torch._dynamo.reset()


class Mixed(nn.Module):
    """A branch by length, and a part that is not always there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return torch.tanh(self.second(x)) if x.shape[1] > 4 else x


def lengths(*sizes: int) -> list[tuple[torch.Tensor]]:
    random = torch.Generator().manual_seed(3)
    return [(torch.randn(4, size, 8, generator=random),) for size in sizes]


def test_07_lengths_and_branches_are_counted(few_compiles: Any, caplog: Any) -> None:
    """Pain 7, pytorch#118984, #193194, #140229, #174704: sequence lengths and optional branches recompile to
    the limit, or crash. A naive plan, a static compile of each length, stops compiling at the limit and says
    so in a log line of torch's alone. Here: each new shape is planned on the spot and logged, no more than
    the limit, and the last one is a warning that says what happens to the next."""
    batches = lengths(12, 9, 6, 3, 11)
    model, counter = Mixed(), CompileCounter()
    reference = copy.deepcopy(model)
    naive = copy.deepcopy(model)
    naive.compile(dynamic=False, backend=counter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses_and_gradients(naive, batches)
    assert counter.frame_count == LIMIT < len(batches), "and nothing was said"

    with caplog.at_level(logging.WARNING, "dtr_integrations"), warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always", PlanWarning)
        got = ours(model, batches)
    assert_equal(got, losses_and_gradients(reference, batches))
    assert sum("planned on the spot" in line for line in caplog.messages) == LIMIT - 1  # one was captured
    assert said(record, f"compiled {LIMIT} times") == 1


class Sparse(nn.Module):
    """relu → nonzero → index, as reported."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x) - 1)
        return self.second(x[x.sum(1).nonzero().squeeze(1)])


def test_08_sizes_that_depend_on_data_work(few_compiles: Any) -> None:
    """Pain 8, pytorch#144095: unbacked sizes fail in the budget partitioner. Torch 2.13 partitions them; a
    naive plan, a static compile, makes a graph for each count of rows until the limit and then none, without
    a word. Here: the step works with eager's numbers, and that some of it is eager is said."""
    random = torch.Generator().manual_seed(4)
    torch.manual_seed(0)  # the counts of rows that pass depend on the weights
    batches = [(torch.randn(32, 8, generator=random),) for _ in range(5)]
    model, counter = Sparse(), CompileCounter()
    reference, naive = copy.deepcopy(model), copy.deepcopy(model)
    naive.compile(dynamic=False, backend=counter)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        losses_and_gradients(naive, batches)
    assert not said(record, "compile")
    assert counter.frame_count == 1 + LIMIT  # before the break once, after it to the limit
    torch._dynamo.reset()  # up to torch 2.11 the limit is that of the code, whatever model runs it

    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always", PlanWarning)
        got = ours(model, batches)
    assert_equal(got, losses_and_gradients(reference, batches))
    assert said(record, f"compiled {LIMIT} times") + said(record, "eager") >= 1


class Counting(nn.Module):
    """A counter that scales, and a value that is None at first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.tanh(self.linear(x) * (1 + self.calls % 2))
        if self.seen is not None:
            x = torch.tanh(x + self.seen)
        self.seen = x.detach().mean()
        return x


def test_14_python_state_is_not_replayed() -> None:
    """Pain 14, NeMo-Automodel#3247: Python state has changed by the time of the replay: a counter, None that
    became a tensor. torch.utils.checkpoint replays the Python code: gradients are silently wrong. Here:
    values are computed again, never Python code; each state is a graph of its own."""
    batches = lengths(6, 6, 6, 6)
    model = Counting()
    reference, naive = copy.deepcopy(model), copy.deepcopy(model)
    expected = losses_and_gradients(reference, batches)
    wrong = losses_and_gradients(naive, batches, checkpointed(naive))
    assert any((a - b).norm() > 0.1 * b.norm() for a, b in zip(wrong, expected, strict=True))

    got = ours(model, batches)
    assert_equal(got, expected)
    assert (model.calls, naive.calls) == (len(batches), 2 * len(batches))


class Cached(nn.Module):
    """Attends over what it has seen in earlier calls."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8)
        self.keys: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.keys.append(torch.tanh(self.key(x)))
        keys = torch.cat(self.keys, 1)
        self.keys[-1] = self.keys[-1].detach()
        return torch.softmax(x @ keys.transpose(1, 2), -1) @ torch.tanh(self.value(keys))


def test_18_a_cache_that_grows_does_not_break_the_backward() -> None:
    """Pain 18, transformers#34928: with a key-value cache the replay sees more keys than the forward did:
    shapes differ in the backward. torch.utils.checkpoint appends to the cache again and raises. Here: nothing
    is appended twice; each length is a graph of its own."""
    batches = lengths(4, 4, 4)
    model = Cached()
    reference, naive = copy.deepcopy(model), copy.deepcopy(model)
    with pytest.raises(CheckpointError, match="different metadata"):
        losses_and_gradients(naive, batches, checkpointed(naive))

    got = ours(model, batches)
    assert_equal(got, losses_and_gradients(reference, batches))
    assert len(model.keys) == len(batches)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
        self.layers = nn.Sequential(*(part for layer in layers for part in layer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_19_statistics_are_updated_once() -> None:
    """Pain 19, pytorch#96136: checkpointed BatchNorm updates its statistics twice. Conv + BN, 3 steps: on
    torch 2.13 eager checkpointing has counted 6. Here, under a budget that binds: buffers as in eager."""
    x = torch.randn(8, 8, 16, 16, generator=torch.Generator().manual_seed(5)).double()
    model = Normed().double()  # so that a statistic that is off by one update cannot hide in rounding
    reference, naive = copy.deepcopy(model), copy.deepcopy(model)
    losses_and_gradients(naive, [(x,)] * 3, checkpointed(naive))
    assert naive.layers[1].num_batches_tracked == 6

    lowest = dtr_integrations.plan(
        model,
        x,
        budget="1KB",
        on_infeasible="best_effort",
        loss_fn=lambda out: out.square().mean(),
        progress=False,
    )
    assert any(schedule.recompute for schedule in lowest.schedule)
    binding = (lowest.required_bytes + lowest.default_allocated_bytes) // 2
    got = ours(model, [(x,)] * 3, budget=f"{binding}B")
    assert_equal(got, losses_and_gradients(reference, [(x,)] * 3))
    assert model.layers[1].num_batches_tracked == 3


class Net(nn.Module):
    def __init__(self, out: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, out)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = Net(), Net(1)


def gan_step(model: Gan, optimizers: list[torch.optim.Optimizer], x: torch.Tensor) -> list[torch.Tensor]:
    """One generator pass, two losses over it: its graph is kept for the second backward."""
    making, judging = optimizers
    made = model.maker(x)
    verdict = model.judge(made)
    judging.zero_grad()
    judged = F.softplus(verdict).mean() + F.softplus(-model.judge(x)).mean()
    judged.backward(retain_graph=True)
    making.zero_grad()
    fooled = F.softplus(-verdict).mean()
    fooled.backward()
    making.step()
    judging.step()
    return [judged.detach(), fooled.detach()]


def test_20_several_backwards_are_counted() -> None:
    """Pain 20: a GAN that keeps its graph for a second backward. Compiled code may reuse what it saved
    (donated buffers), and a naive count frees it with the first backward: it is short of what is really
    held. Here: every backward of the step is in the prediction, and the numbers are eager's."""
    x = torch.randn(512, 32, generator=torch.Generator().manual_seed(6))
    torch.manual_seed(0)
    model = Gan()
    reference = copy.deepcopy(model)

    def optimizers(of: Gan) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (of.maker, of.judge)]

    own, theirs = optimizers(model), optimizers(reference)
    naive = dtr_integrations.plan(
        model.maker, x, budget=AMPLE, loss_fn=lambda made: model.judge(made).mean(), progress=False
    )
    with dtr_integrations.auto_checkpoint(
        model, budget=AMPLE, targets=["maker", "judge"], progress=False
    ) as session:
        session.optimizers = own
        got = [value for _ in range(3) for value in session.step(lambda: gan_step(model, own, x))]
    expected = [value for _ in range(3) for value in gan_step(reference, theirs, x)]
    assert_equal(got, expected)
    (report,) = session.reports
    assert report.prediction_error <= 0.01
    assert report.peak_allocated_bytes - report.static_bytes > (
        naive.predicted_allocated_bytes - naive.static_bytes
    )


def test_21_logging_stays_outside_of_what_is_compiled() -> None:
    """Pain 21, lightning#17177, #18871: `self.log` breaks the graph of a compiled LightningModule. Here: its
    submodules are compiled, without a break."""
    pl = pytest.importorskip("lightning.pytorch")

    def run(module: Any, *callbacks: Any) -> dict[str, int]:
        torch._dynamo.reset()
        counters.clear()
        fit(pl, module, *callbacks, limit_train_batches=2)
        return dict(counters["graph_break"])

    whole = models(pl).Whole(logs_in_forward=True)
    whole.compile(backend=CompileCounter())
    assert run(whole), "torch compiles self.log without a break now"

    callback = dtr_integrations.AutoCheckpoint(AMPLE, progress=False)
    assert not run(models(pl).Whole(logs_in_forward=True), callback)
    assert callback.session.planned.captured.called == tuple(f"layers.{i}" for i in range(6))


class Methodical(nn.Module):
    """Trains by a method other than `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)).square().mean()


def test_22_nothing_planned_is_loud() -> None:
    """Pain 22, transformers#34656: torch.compile silently not applied. In-place compile of a module that
    trains by another method, and up to torch 2.13 of an `nn.Sequential`, makes no graph and says nothing.
    Here: the first is a warning that names the remedy, the second is compiled."""
    x = torch.randn(4, 8)
    counter = CompileCounter()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        methodical, sequential = Methodical(), nn.Sequential(nn.Linear(8, 8))
        methodical.compile(backend=counter)
        methodical.loss(x).backward()
        assert counter.frame_count == 0
        sequential.compile(backend=counter)
        sequential(x).sum().backward()
    assert counter.frame_count == (torch.torch_version.TorchVersion(torch.__version__) >= (2, 14))

    model = Methodical()
    with dtr_integrations.auto_checkpoint(model, budget=AMPLE, progress=False) as session:
        with pytest.warns(NothingPlanned, match=r"no target module is called.*targets=\["):
            session.step(lambda: model.loss(x).backward())
    sequential = nn.Sequential(nn.Linear(8, 8))
    with dtr_integrations.auto_checkpoint(sequential, budget=AMPLE, progress=False) as session:
        session.step(lambda: sequential(x).square().mean().backward())
        assert len(session.plan.schedule) == 1
