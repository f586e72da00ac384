"""What torch does by itself, measured: the other side of every comparison in `test_pains*.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from dtr_integrations._compat import CustomPartitionerFn, partitioners
from dtr_integrations.capture.source import ModuleStep
from dtr_integrations.capture.step import dry_step
from dtr_integrations.measure import measure_step


def mean_square(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def peak_bytes(model: nn.Module, x: torch.Tensor, micro_batches: int = 1) -> int:
    """Measured: what forward and backward of `model` (compiled in place or not) hold at most, above the
    parameters and the batch."""

    def step() -> None:
        for _ in range(micro_batches):
            mean_square(model(x)).backward()

    return measure_step(step, device="cpu", cleanup=model.zero_grad).peak_bytes


@contextlib.contextmanager
def torch_budget(ratio: float) -> Iterator[None]:
    """torch's own budget API, and a clean slate for its compiler."""
    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=ratio):
        yield
    torch._dynamo.reset()


class Split(CustomPartitionerFn):
    """A partition, torch's own if no other is given, kept to be looked at."""

    def __init__(self, inner: Any = partitioners.min_cut_rematerialization_partition) -> None:
        self.inner = inner
        self.forward: list[fx.Node] = []
        self.backward: list[fx.Node] = []

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        split = self.inner(gm, joint_inputs, **kwargs)
        self.forward, self.backward = (list(part.graph.nodes) for part in split)
        return split

    def uuid(self) -> Any:
        return None

    def text(self) -> list[str]:
        """Every node of both graphs with its arguments."""
        return [f"{n.op} {n.target} {n.name} {n.args} {n.kwargs}" for n in self.forward + self.backward]

    def count(self, target: str) -> int:
        """Calls of an op, such as "aten.mm", in both directions."""
        return sum(target in str(node.target) for node in self.forward + self.backward)

    def saved(self) -> list[torch.Tensor]:
        """Fakes of what the forward hands to the backward, parameters and batch left out."""
        nodes = [n for n in self.backward if n.op == "placeholder"]
        names = [n for n in nodes if not n.name.startswith(("primals", "tangents"))]
        return [n.meta["val"] for n in names if isinstance(n.meta.get("val"), torch.Tensor)]


def split_of(
    model: nn.Module, x: torch.Tensor, *, ratio: float = 1.0, context: Callable[[], Any] | None = None
) -> Split:
    """How torch would partition the step of `model`, at a ratio of its own budget API."""
    split = Split()
    with torch_budget(ratio):
        dry_step(ModuleStep(model=model, args=(x,), loss_fn=mean_square, context=context), split)
    return split
