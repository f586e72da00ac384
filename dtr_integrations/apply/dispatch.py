"""Compile modules in place: state-dict keys, type and attributes of the module stay what they were.

`nn.Module.__call__` hands over to `_compiled_call_impl` when that is set (as `module.compile()` does). A
small callable there runs evaluation and `no_grad` calls eagerly and compiles training calls; the first of
them may have to plan first. Modules that torch.compile cannot take get one that Dynamo leaves alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .._backend import DIFFERENTIATED_AGAIN, Around, inductor_backend, when_used_again
from .._compat import compile_call, is_compile_error, leave_out, unlogged
from .._python_state import Snapshot, inside, outside
from .._randomness import random_state, set_random_state
from .partitioner import PlanPartitioner

# (module's name, args, kwargs): called before each training call, e.g. to plan.
BeforeCall = Callable[[str, tuple[Any, ...], dict[str, Any]], None]

# (module's name) -> what each of its training calls runs within, of a module that is left out of every graph.
Entering = Callable[[str], AbstractContextManager[Any]]

# (module's name, what was raised, what is done instead, gives_up=whether it is no longer compiled): may raise
# an error of its own.
Failed = Callable[..., None]


class InPlace:
    """Modules of one session, compiled in place; `remove()` makes them as they were.

    A failure of torch.compile in the first call of a kind (a new shape) is told to `failed` and made up for:
    buffers and random state are put back and the module runs eagerly from then on.
    """

    def __init__(self, modules: Mapping[str, nn.Module], before_call: BeforeCall, failed: Failed) -> None:
        self._before_call = before_call
        self._failed = failed
        self._backend: Callable[..., Any] | None = None
        # (module's name, what it returned): called after each training call of a module.
        self.after_call: Callable[[str, Any], None] = lambda name, out: None
        # (module's name, torch's recompile limit): told once that a module gets its last graph.
        self.last_graph: Callable[[str, int], None] = lambda name, limit: None
        # (module's name): told once that a graph is kept for another backward though `donates` was in force.
        self.kept: Callable[[str], None] = lambda name: None
        self._calls = {name: _PlannedCall(name, module, self) for name, module in modules.items()}
        self._excluded: list[Callable[[], None]] = []
        for call in self._calls.values():
            call.outer = True
            call.module._compiled_call_impl = call

    def use(
        self,
        partitioner: PlanPartitioner,
        options: Mapping[str, Any],
        *,
        targets: Mapping[str, nn.Module],
        excluded: Mapping[str, nn.Module],
        donates: bool = True,
        around: Around | None = None,
        entering: Entering | None = None,
    ) -> None:
        """From now on compile `targets` with this partitioner, and leave `excluded` out of every graph; what
        was compiled before is dropped. `donates`: see `capture.step.Parts`. `around`: what compiled code runs
        within (see `_backend`), `entering`: what the excluded do."""
        self._include_all()
        for name, module in targets.items():
            if name not in self._calls:
                self._calls[name] = _PlannedCall(name, module, self)
                module._compiled_call_impl = self._calls[name]
        for name, call in self._calls.items():
            call.use(partitioner, options, compiles=name in targets, donates=donates, around=around)
        self._leave_out(excluded, entering)

    def run_eagerly(
        self, excluded: Mapping[str, nn.Module] | None = None, entering: Entering | None = None
    ) -> None:
        """From now on nothing is compiled; `excluded` and `entering` as in `use`."""
        self._include_all()
        for call in self._calls.values():
            call.backend = call.compiled = None
        self._leave_out(excluded or {}, entering)

    def _leave_out(self, excluded: Mapping[str, nn.Module], entering: Entering | None) -> None:
        for call in self._calls.values():
            call.entering = entering if call.name in excluded else None
        for name, module in excluded.items():
            if name not in self._calls:
                within = None if entering is None else _entered(module, functools.partial(entering, name))
                self._excluded.append(leave_out(module, within))

    def remove(self) -> None:
        """Take the callables out again."""
        self._include_all()
        for call in self._calls.values():
            if call.module._compiled_call_impl is call:
                call.module._compiled_call_impl = None

    def _include_all(self) -> None:
        for undo in self._excluded:
            undo()
        self._excluded = []


class _PlannedCall:
    def __init__(self, name: str, module: nn.Module, owner: InPlace) -> None:
        self.name = name
        self.module = module
        self.eager = module._call_impl
        self.owner = owner
        self.outer = False  # one of the modules that the session was installed in
        self.backend: Callable[..., Any] | None = None
        self.compiled: Callable[..., Any] | None = None
        self.proven: set[Any] = set()  # kinds of calls that have worked
        self.donates = True
        self.entering: Entering | None = None

    def use(
        self,
        partitioner: PlanPartitioner,
        options: Mapping[str, Any],
        *,
        compiles: bool,
        donates: bool,
        around: Around | None,
    ) -> None:
        self.compiled, self.proven, self.donates = None, set(), donates
        self.backend = None
        if compiles:
            self.backend = inductor_backend(
                partitioner, options, self._graph_failed, donates=donates, around=around
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.module.training or not torch.is_grad_enabled():
            return self.eager(*args, **kwargs)
        if not self.outer:
            return self._trained(args, kwargs)
        self.owner._before_call(self.name, args, kwargs)
        out = self._trained(args, kwargs)
        self.owner.after_call(self.name, out)
        return out

    def _trained(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.compiled is None:
            if self.backend is None:
                with contextlib.nullcontext() if self.entering is None else self.entering(self.name):
                    return self.eager(*args, **kwargs)
            self.compiled = compile_call(self.eager, self.backend, self._last_graph)
        kind = _kind_of(args, kwargs)
        if kind not in self.proven:
            return self._first(kind, args, kwargs)
        try:
            out = self.compiled(*args, **kwargs)
        except Exception as error:
            if is_compile_error(error):
                self._give_up(error, "the next step runs it eagerly; this one is lost")
            raise
        self._watch(out)
        return out

    def _first(self, kind: Any, args: Any, kwargs: Any) -> Any:
        """A call that may compile. If that fails the module runs eagerly, from the same state."""
        assert self.compiled is not None
        before = _Before(self.module)
        try:
            with unlogged():
                out = self.compiled(*args, **kwargs)
        except Exception as error:
            before.restore()
            out = self.eager(*args, **kwargs)  # if this raises too, the error is the model's own
            try:
                self._give_up(error, "it runs eagerly from now on")
            except Exception:
                before.restore()
                raise
            return out
        self.proven.add(kind)
        self._watch(out)
        return out

    def _give_up(self, error: Exception, instead: str) -> None:
        self.backend = self.compiled = None
        self.owner._failed(self.name, error, instead, gives_up=True)

    def _watch(self, out: Any) -> None:
        when_used_again(
            out, differentiated=self._differentiated_again, kept=self._kept if self.donates else None
        )

    def _kept(self) -> None:
        if self.donates:
            self.donates = False
            self.owner.kept(self.name)

    def _differentiated_again(self) -> None:
        if self.backend is not None:
            self._give_up(
                RuntimeError(DIFFERENTIATED_AGAIN), "the next step runs it eagerly; this one may be lost"
            )

    def _last_graph(self, limit: int) -> None:
        self.owner.last_graph(self.name, limit)

    def _graph_failed(self, error: Exception, is_backward: bool, draws_from_seeds: bool) -> bool:
        if draws_from_seeds:
            if is_backward:  # nothing can be made up for in the middle of a backward
                self._give_up(error, "the next step runs it eagerly; this one is lost")
            return False
        part = "its backward" if is_backward else "a graph of it"
        self.owner._failed(self.name, error, f"{part} runs op by op, as planned but unfused", gives_up=False)
        return True


def _entered(module: nn.Module, entering: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    """The module's call; if it trains, within what `entering` gives."""
    eager = module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        trains = module.training and torch.is_grad_enabled()
        with entering() if trains else contextlib.nullcontext():
            return eager(*args, **kwargs)

    return call


class _Before:
    """What a call of a module may change, as it is now."""

    def __init__(self, module: nn.Module) -> None:
        self._random = random_state()
        self._python = Snapshot({**outside(module), **inside(module)}, data=False)
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]

    def restore(self) -> None:
        set_random_state(self._random)
        self._python.restore()
        with torch.no_grad():
            for buffer, value in self._buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _kind_of(args: Any, kwargs: Any) -> Any:
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)
        for leaf in pytree.tree_leaves((args, kwargs))
    )
