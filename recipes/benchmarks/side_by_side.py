"""Two ways to run one model in one process: true peak, paired time and gradients of a step.

A step is forward, loss and backward, and the optimizer's where there is one. Bytes are above what lives for
good: parameters, buffers, optimizer state and batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from frontier_models import Model
from frontier_peers import DEFAULT, Peer
from paired import timed_ms
from torch import nn
from torch._inductor.compile_fx import compile_fx
from torch.utils import _pytree as pytree

import dtr_integrations
from dtr_integrations.capture.source import ModuleStep
from dtr_integrations.capture.step import capture
from dtr_integrations.measure import measure_step, static_bytes, tensors_in
from dtr_integrations.pipeline import make_frontier
from dtr_integrations.report import paired_ratio

WARM_UP = 3


@dataclass(kw_only=True)
class Point:
    """One way to run one model. Bytes are of one step, above parameters, buffers and batch."""

    name: str
    ours: bool = False
    error: str = ""  # why it did not run
    budget_bytes: int | None = None  # ours
    predicted_bytes: int | None = None  # ours
    peak_bytes: int | None = None
    modelled: float | None = None  # slowdown against the default compile, by the cost model
    lower_bound: float | None = None  # ours: what no plan under this budget can beat, by the same model
    ratio: float | None = None  # measured, paired with the default compile
    ratio_95: tuple[float, float] | None = None
    gradients: float | None = None  # largest relative difference to the default compile, in norm per tensor
    reserved_bytes: int | None = None  # on CUDA, by the caching allocator
    non_torch_bytes: int | None = None  # on CUDA: context, libraries and other processes
    same_as: list[str] = field(default_factory=list)  # other settings that give the same partition
    seconds: float = 0.0


class Bench:
    """One model, and its default compile to pair with.

    `device` and `dtype` (of autocast) are the step's; `trains`: AdamW is a part of it. Not `warm`: for dry
    runs only.
    """

    def __init__(
        self,
        model: Model,
        pairs: int,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        trains: bool = False,
        warm: bool = True,
    ) -> None:
        self.model, self.pairs = model, pairs
        self.device, self.dtype, self.trains = device, dtype, trains
        torch.manual_seed(1)
        self.batch = pytree.tree_map(lambda t: t.to(device), model.batch())
        self.cost_ms = 0.0
        torch._dynamo.reset()
        self.default = self.step(self.compiled(DEFAULT))
        if not warm:
            return
        self._warm(self.default)
        self.reference = self.default.gradients()
        self.random = not _agree(self.reference, self.default.gradients(seed=2))

    def compiled(self, peer: Peer) -> nn.Module:
        """The peer's model, compiled by a backend of its own: what Dynamo compiled for another model of the
        same code would be taken for it otherwise."""
        net = peer.build(self.model).to(self.device)
        if peer.compiled:
            net.compile(backend=lambda graph, inputs: compile_fx(graph, inputs), dynamic=False)
        return net

    def step(self, net: nn.Module) -> Step:
        """A step of `net` as a function."""
        # No learning: gradients are compared, and whoever steps more often than another must not differ.
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.0, weight_decay=0.0) if self.trains else None
        return Step(net, self.batch, self.model.loss, self.autocast(), optimizer)

    def source(self, peer: Peer) -> ModuleStep:
        """The peer's step for a dry run."""
        inputs, target = self.batch
        step = self.step(peer.build(self.model).to(self.device))
        return ModuleStep(
            model=step.net,
            args=(inputs,),
            loss_fn=lambda out: self.model.loss(out, target),
            optimizer=step.optimizer,
            context=self.autocast,
        )

    def autocast(self) -> torch.autocast:
        """In which a forward and its loss are computed."""
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.dtype is not None)

    def model_of(self, peer: Peer) -> tuple[float, Any]:
        """(modelled cost of a step in ms, what its partition saves)."""
        torch._dynamo.reset()
        with peer.settings():
            step = capture(self.source(peer), device=self.device).step
        return step.cost_ms, tuple((graph.fingerprint, graph.default_saved) for graph in step.graphs)

    def measure(self, point: Point, step: Step) -> None:
        """Peak, gradients and paired time of a step that has run already."""
        point.peak_bytes = measure_step(step, device=self.device, cleanup=step.net.zero_grad).peak_bytes
        point.gradients = _distance(step.gradients(), self.reference)
        self._warm(self.default)  # a dry run in between has made Dynamo forget it
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(self.pairs):
            for which in (0, 1) if number % 2 else (1, 0):
                times[which].append(self.timed_ms((self.default, step)[which]))
        timed = paired_ratio(*times)
        point.ratio, point.ratio_95 = timed.ratio, (timed.low, timed.high)

    def timed_ms(self, step: Callable[[], None]) -> float:
        """One step, in milliseconds; on CUDA by events."""
        if self.device == "cpu":
            return timed_ms(step)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def run_peer(self, peer: Peer, point: Point) -> None:
        """A peer, measured."""
        step = self.step(self.compiled(peer))
        with peer.settings():
            self._warm(step)
        self.measure(point, step)

    def run_ours(self, budget_bytes: int, point: Point) -> None:
        """Ours at one budget, measured."""
        step = self.step(DEFAULT.build(self.model).to(self.device))
        static = self.static_bytes(step)
        session = dtr_integrations.auto_checkpoint(
            step.net,
            budget=f"{static + budget_bytes}B",
            optimizer=step.optimizer,
            reserve="0B",
            log_every_n_steps=10**9,
            progress=False,
        )
        with session:
            for _ in range(WARM_UP):
                session.step(step)
            plan = session.plan
            point.predicted_bytes = plan.predicted_allocated_bytes - static
            point.modelled, point.lower_bound = plan.slowdown, plan.slowdown_lower_bound
            self.measure(point, step)

    def static_bytes(self, step: Step) -> int:
        """What lives for good: what our budgets contain and the peaks here do not."""
        batch = sum(t.untyped_storage().nbytes() for t in tensors_in(self.batch))
        # AdamW holds two numbers for each parameter, and one for each tensor.
        state = [p for p in step.net.parameters() if step.optimizer is not None]
        return static_bytes([step.net]) + batch + sum(2 * p.nbytes + 4 for p in state)

    def ends(self) -> tuple[int, int]:
        """(lowest, default) peak that the search tier knows of."""
        source = self.source(DEFAULT)
        found = make_frontier(source, device=self.device)
        static = self.static_bytes(self.step(source.model))
        return found.points[0].peak_bytes - static, found.points[-1].peak_bytes - static

    def _warm(self, step: Step) -> None:
        for _ in range(WARM_UP):
            step()


class Step:
    """Old gradients go, forward, loss, backward and the optimizer's step."""

    def __init__(
        self,
        net: nn.Module,
        batch: tuple[torch.Tensor, torch.Tensor],
        loss: Callable[..., torch.Tensor],
        autocast: torch.autocast,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.net, self.batch, self.loss = net, batch, loss
        self.autocast, self.optimizer = autocast, optimizer

    def __call__(self) -> None:
        self.net.zero_grad(set_to_none=True)
        inputs, target = self.batch
        with self.autocast:
            loss = self.loss(self.net(inputs), target)
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()

    def gradients(self, seed: int = 1) -> list[torch.Tensor]:
        """Of one step from a seed."""
        torch.manual_seed(seed)
        self()
        return [p.grad.clone() for p in self.net.parameters() if p.grad is not None]


def _distance(these: list[torch.Tensor], those: list[torch.Tensor]) -> float:
    """Largest ‖a − b‖ / ‖b‖; gradients that are rounding (below 1e-6 of the whole) count by the whole."""
    if len(these) != len(those):
        return float("inf")
    floor = 1e-6 * sum(t.double().norm().item() ** 2 for t in those) ** 0.5
    pairs = zip(these, those, strict=True)
    return max(
        (a.double() - b.double()).norm().item() / max(b.double().norm().item(), floor) for a, b in pairs
    )


def _agree(these: list[torch.Tensor], those: list[torch.Tensor]) -> bool:
    return _distance(these, those) < 1e-5
