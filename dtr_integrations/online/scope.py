"""`DTR`: a module, or a whole step, under a byte budget."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._compat import never_traced, top_saved_tensors_hooks
from ..dtr.heuristics import Heuristic
from ..dtr.journal import online_policies
from ..dtr.policies import Policies
from ..measure import device_total_bytes
from ..units import parse_budget
from .runtime import Cost, Runtime

__all__ = ["DTR", "Stats"]

_active = threading.local()


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What the runtime has done so far.

    Attributes:
        budget_bytes: the budget.
        held_bytes, peak_bytes: bytes of the storages that it counts: now, and the most at once. An operator's
            own scratch memory is not among them.
        evictions, rematerialisations: counts.
        replay_ns, compute_ns: the cost of the replays and of the operators themselves, in nanoseconds.
    """

    budget_bytes: int
    held_bytes: int
    peak_bytes: int
    evictions: int
    rematerialisations: int
    replay_ns: int
    compute_ns: int


class DTR:
    """Runs `module`, or everything within ``with dtr:``, under a budget: what autograd saves is evicted when
    room is needed and computed again, bit by bit the same, when the backward asks for it.

        dtr = online.DTR(model, budget="2GB")
        for x, y in loader:
            optimizer.zero_grad()
            with dtr:
                loss_fn(model(x), y).backward()
            optimizer.step()

    Calling ``dtr(x)`` is ``module(x)`` in a scope of its own; attributes that it does not have itself are the
    module's (``dtr.parameters()``, ``dtr.state_dict()``, ``dtr.train()``). A backward outside of any scope
    computes again what it needs, but its own temporaries are not counted then. Scopes do not nest: an inner
    one, of another `DTR` too, does nothing.

    Args:
        module: its parameters, buffers and gradients count from the start.
        budget: of all tensors that the step holds at once: ``"2GB"``, ``"90%"``, ``"auto"``; see `units`.
        heuristic: a key of `dtr.HEURISTICS`, or a `Heuristic`.
        cost: nanoseconds of an operator from (function, args, kwargs, result). None: measured, for each
            operator and shapes. `online.record.modelled_cost` takes the same decisions on every run.
        policies: the other choices of the state machine.

    Raises:
        BudgetError: the budget cannot be read.
        OutOfBudget: later, where an operator does not fit whatever is evicted. It names the operator, the
            bytes that it needs, that are held, and that are missing. The module stays usable.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        budget: str,
        heuristic: str | Heuristic = "h_dtr_eq",
        cost: Cost | None = None,
        policies: Policies | None = None,
    ) -> None:
        self.module = module
        budget_bytes = parse_budget(budget, device_total_bytes=lambda: device_total_bytes(_device(module)))
        chosen = policies or Policies(search="indexed")
        self._runtime = Runtime(
            budget_bytes, online_policies(chosen, heuristic), cost, device_type=_device(module).type
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result, computed within a scope."""
        with self:
            return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("module", "_runtime"):  # not there yet: in a copy that is being made
            raise AttributeError(name)
        return getattr(self.module, name)

    def __enter__(self) -> DTR:
        scopes = _scopes()
        if scopes:
            scopes.append(None)
            return self
        runtime = self._runtime
        runtime.settle()
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            runtime.register(tensor, name)
            if tensor.grad is not None:
                runtime.register(tensor.grad, f"{name}.grad")
        scope = _Scope(runtime)
        scope.enter()
        scopes.append(scope)
        return self

    def __exit__(self, *exception: Any) -> None:
        scope = _scopes().pop()
        if scope is not None:
            scope.leave()
            self._runtime.settle()

    @property
    def budget_bytes(self) -> int:
        """May be set at any time; what is above a lower one is evicted when room is next needed."""
        return int(self._runtime.cache.budget_bytes)

    @budget_bytes.setter
    def budget_bytes(self, budget_bytes: int) -> None:
        self._runtime.cache.budget_bytes = budget_bytes

    @property
    def stats(self) -> Stats:
        """What has happened so far."""
        cache = self._runtime.cache
        return Stats(
            budget_bytes=self.budget_bytes,
            held_bytes=cache.held_bytes,
            peak_bytes=cache.peak_bytes,
            evictions=cache.evictions,
            rematerialisations=cache.replays,
            replay_ns=cache.replay_ns,
            compute_ns=cache.compute_ns,
        )


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # `never_traced` does the same and adds nothing to each call

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._call(function, args, kwargs or {})


for _entry in (_Mode.__torch_dispatch__, Runtime.pack, Runtime.unpack):
    never_traced(_entry)


class _Scope:
    def __init__(self, runtime: Runtime) -> None:
        self._mode = _Mode(runtime.call)
        self._pack, self._unpack = runtime.pack, runtime.unpack
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def enter(self) -> None:
        self._hooks.__enter__()
        self._mode.__enter__()
        _Transforms.enter()

    def leave(self) -> None:
        _Transforms.leave()
        self._mode.__exit__(None, None, None)
        self._hooks.__exit__(None, None, None)

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Tensors that are saved within are kept as they are. The user's own hooks, if any, stay."""
        top = top_saved_tensors_hooks()
        if top is None or top[0] != self._pack:
            yield
            return
        self._hooks.__exit__(None, None, None)
        try:
            yield
        finally:
            self._hooks.__enter__()


class _Transforms:
    # torch.func.grad refuses to run where saved tensors have hooks, ours too. While a scope is open on any
    # thread, what announces that takes ours off first.
    _lock = threading.Lock()
    _open = 0
    _original: Any = None

    @classmethod
    def enter(cls) -> None:
        with cls._lock:
            cls._open += 1
            if cls._open == 1:
                cls._original = torch.autograd.graph.disable_saved_tensors_hooks
                torch.autograd.graph.disable_saved_tensors_hooks = cls._disable

    @classmethod
    def leave(cls) -> None:
        with cls._lock:
            cls._open -= 1
            if cls._open == 0:
                torch.autograd.graph.disable_saved_tensors_hooks = cls._original

    @classmethod
    @contextmanager
    def _disable(cls, message: str) -> Iterator[None]:
        scope = _scopes()[0] if _scopes() else None
        with scope.without_hooks() if scope is not None else nullcontext(), cls._original(message):
            yield


def _scopes() -> list[_Scope | None]:
    if not hasattr(_active, "scopes"):
        _active.scopes = []
    return _active.scopes


def _device(module: torch.nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))
