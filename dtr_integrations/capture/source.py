"""How one training step is run: the only thing that an adapter has to supply.

A `StepSource` builds, in a `World`, twins of what the step uses and returns a `FakeStep`; running
that performs one whole optimizer step exactly as the framework would: forward, loss, (zeroing,) backward,
clipping, optimizer.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import CaptureError
from .world import World

if TYPE_CHECKING:
    from .buckets import Buckets
    from .seen import SeenForward


@dataclass(kw_only=True)
class FakeStep:
    """One training step on twins of the real objects.

    `targets` are the submodules (names in `model`; "" is the model itself) to compile. `run()` performs one
    whole optimizer step; afterwards gradients are as the framework leaves them between steps. `batch()`
    is the pytree of what the step refers to besides the model, as it stands: a step may put outputs there.
    `between()` does what the loop does between two steps; true if that takes another run to find out.
    """

    model: nn.Module
    targets: Sequence[str]
    run: Callable[[], None]
    optimizers: Sequence[torch.optim.Optimizer] = ()
    batch: Callable[[], Any] = tuple
    between: Callable[[], bool] = bool


class StepSource(Protocol):
    """What adapters implement (contract of the capture; see `ModuleStep` for the plain one)."""

    def build(self, world: World) -> FakeStep:
        """Twins of the model, the optimizers and the batch, and the step over them. Must not change the
        real ones."""
        ...


def functions_of(source: StepSource) -> list[Callable[..., Any]]:
    """The functions of the user's, besides the model's own code, that a step is made of."""
    return [value for value in vars(source).values() if callable(value) and not isinstance(value, nn.Module)]


def batch_tensors(batch: Any) -> list[torch.Tensor]:
    """The tensors in a batch (a pytree) that are no parameters."""
    leaves = pytree.tree_leaves(batch)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter)]


def split_inputs(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`example_inputs` of the public functions as (positional, keyword) arguments: a tensor, a tuple or list,
    or a dict."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def default_loss(output: Any) -> torch.Tensor:
    """What `loss_fn=None` means: the output's `.loss`, else the output if it is a scalar, else the mean of
    its first floating tensor in float32."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    if isinstance(output, torch.Tensor) and output.ndim == 0:
        return output
    for tensor in tensors_of(output):
        if tensor.is_floating_point():
            return tensor.float().mean()
    raise CaptureError(
        f"the model returned {type(output).__name__} without a floating tensor in it, "
        "so there is no loss to plan for. "
        "Pass loss_fn=, a function of the model's output that returns a scalar tensor."
    )


class AssumedLoss:
    """As `default_loss`; but where the output has no loss of its own, a cross-entropy over its last
    dimension, which holds as much as most losses do, or more. `used`: whether there was such an output."""

    used: bool = False

    def __call__(self, output: Any) -> torch.Tensor:
        loss = default_loss(output)
        if not is_outside(output):
            return loss
        self.used = True
        (tensor,) = itertools.islice(filter(torch.is_floating_point, tensors_of(output)), 1)
        rows = tensor.float().reshape(-1, tensor.shape[-1] if tensor.ndim else 1)
        return nn.functional.cross_entropy(rows, rows.new_zeros(len(rows), dtype=torch.long))


def is_outside(output: Any) -> bool:
    """Whether what a model returned has no loss in it (see `default_loss`), so that the loop makes one."""
    if isinstance(output, torch.Tensor):
        return output.ndim > 0
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return not isinstance(loss, torch.Tensor)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a call took or returned, in an order that is the same for a twin of it."""
    leaves = pytree.tree_leaves(vars(value) if hasattr(value, "__dataclass_fields__") else value)
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _scalar(loss_fn: Callable[[Any], Any], output: Any, *, given: bool) -> torch.Tensor:
    """The loss, which has to be a scalar that a backward can begin from."""
    try:
        loss = loss_fn(output)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"loss_fn fails on what the model returned ({_kind(output)}): {type(error).__name__}: {error}. "
            "It gets the model's output and returns the loss, a scalar tensor; while planning, no tensor has "
            "data."
        ) from error
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        who = "loss_fn returned" if given else "the loss in the model's output is"
        raise CaptureError(
            f"{who} {_kind(loss)}, and a backward begins from a scalar floating tensor: "
            "reduce it, e.g. by .mean()"
        )
    if not loss.requires_grad:
        culprit = "loss_fn detaches it, or " if given else ""
        raise CaptureError(
            f"the loss depends on nothing that requires a gradient, so there is nothing to train: {culprit}"
            "all parameters are frozen, or this is called inside torch.no_grad() or torch.inference_mode()"
        )
    return loss


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"{type(value).__name__}"


def zero_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """As `zero_grad(set_to_none=True)`."""
    for parameter in parameters:
        parameter.grad = None


@dataclass(frozen=True, kw_only=True)
class ModuleStep:
    """The plain training step: `loss_fn(model(*args, **kwargs))`, backward, optimizer step.

    `micro_batches` > 1: gradients accumulate over that many forward/backward pairs before the optimizer
    steps. `zero_after_forward`: old gradients are dropped between forward and backward (as Lightning does),
    so they live beside the activations; otherwise they are dropped before the forward. `context()` wraps
    forward and loss (autocast). `assumed_loss`: makes a loss where the output has none. `seen`: what a loop
    makes of the output and how long it holds it, seen in an earlier step; in the place of the call and of its
    loss. `buckets`: those of a DDP around the model. `unreduced`: names of the modules sharded by FSDP2 whose
    gradients are reduced in the last micro-batch only (`held_back`).
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    targets: Sequence[str] = ("",)
    micro_batches: int = 1
    zero_after_forward: bool = False
    context: Callable[[], Any] | None = None
    assumed_loss: AssumedLoss | None = None
    seen: SeenForward | None = None
    buckets: Buckets | None = None
    unreduced: Sequence[str] = ()

    def build(self, world: World) -> FakeStep:
        """See `StepSource.build`."""
        world.place(self.model)
        world.place((self.args, dict(self.kwargs)))
        model = world.copy(self.model)
        zero_gradients(model.parameters())
        if not model.training:
            model.train()
        optimizer = world.optimizer(self.optimizer) if self.optimizer is not None else None
        loop: _Loop = self.seen.twin(world, model) if self.seen is not None else self._plain(world, model)
        buckets = self.buckets.twin(world, model) if self.buckets is not None else None
        unreduced: list[Any] = [model.get_submodule(name) for name in self.unreduced]

        def run() -> None:
            for micro in range(self.micro_batches):
                last = micro == self.micro_batches - 1
                if buckets is not None:
                    buckets.reduces = last
                for part in unreduced:
                    part.set_requires_gradient_sync(last, recurse=False)
                if micro == 0 and not self.zero_after_forward:
                    zero_gradients(model.parameters())
                loop.forward()
                if micro == 0 and self.zero_after_forward:
                    zero_gradients(model.parameters())
                loop.backward()
            if optimizer is not None:
                optimizer.step()
            loop.stepped()

        return FakeStep(
            model=model,
            targets=self.targets,
            run=run,
            optimizers=() if optimizer is None else (optimizer,),
            batch=lambda: loop.outside,
        )

    def _plain(self, world: World, model: nn.Module) -> _PlainLoop:
        from .closure import twin_function  # which builds on this module

        batch = world.copy((self.args, dict(self.kwargs)))
        if self.loss_fn is not None:
            loss_fn = twin_function(self.loss_fn, world)
        else:
            loss_fn = self.assumed_loss or default_loss
        return _PlainLoop(
            model=model,
            outside=batch,
            loss_fn=loss_fn,
            given=self.loss_fn is not None,
            context=self.context or contextlib.nullcontext,
        )


class _Loop(Protocol):
    """One micro-batch of a training loop over twins. `outside`: a pytree of what it refers to besides the
    model."""

    @property
    def outside(self) -> Any: ...

    def forward(self) -> None:
        """The model's call and the loss."""

    def backward(self) -> None:
        """From the loss."""

    def stepped(self) -> None:
        """The optimizer has stepped."""


@dataclass(kw_only=True)
class _PlainLoop:
    model: nn.Module
    outside: Any
    loss_fn: Callable[[Any], Any]
    given: bool
    context: Callable[[], Any]
    loss: torch.Tensor | None = None

    def forward(self) -> None:
        args, kwargs = self.outside
        with self.context():
            self.loss = _scalar(self.loss_fn, self.model(*args, **kwargs), given=self.given)

    def backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()
        self.loss = None

    def stepped(self) -> None:
        """It holds nothing."""
