"""Compile modules in place: state-dict keys, type and attributes of the module stay what they were.

`nn.Module.__call__` hands over to `_compiled_call_impl` when that is set (as `module.compile()` does). A
small callable there runs evaluation and `no_grad` calls eagerly and compiles training calls; the first of
them may have to plan first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .._compat import compile_call, compile_fx
from .partitioner import PlanPartitioner

# (module's name, args, kwargs): called before each training call, e.g. to plan.
BeforeCall = Callable[[str, tuple[Any, ...], dict[str, Any]], None]


class InPlace:
    """Modules of one session, compiled in place; `remove()` makes them as they were."""

    def __init__(self, modules: Mapping[str, nn.Module], before_call: BeforeCall) -> None:
        self._before_call = before_call
        self._backend: Callable[..., Any] | None = None
        self._calls = {name: _PlannedCall(name, module, self) for name, module in modules.items()}
        for name, module in modules.items():
            module._compiled_call_impl = self._calls[name]

    def use(self, partitioner: PlanPartitioner, options: Mapping[str, Any]) -> None:
        """From now on compile with this partitioner; what was compiled before is dropped."""

        def backend(gm: Any, inputs: Any) -> Any:
            return compile_fx(gm, inputs, config_patches={**options, "custom_partitioner_fn": partitioner})

        self._backend = backend
        for call in self._calls.values():
            call.compiled = None

    def run_eagerly(self) -> None:
        """From now on nothing is compiled."""
        self._backend = None

    def remove(self) -> None:
        """Take the callables out again."""
        for call in self._calls.values():
            if call.module._compiled_call_impl is call:
                call.module._compiled_call_impl = None


class _PlannedCall:
    def __init__(self, name: str, module: nn.Module, owner: InPlace) -> None:
        self.name = name
        self.module = module
        self.eager = module._call_impl
        self.owner = owner
        self.compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.module.training or not torch.is_grad_enabled():
            return self.eager(*args, **kwargs)
        self.owner._before_call(self.name, args, kwargs)
        if self.compiled is None:
            if self.owner._backend is None:
                return self.eager(*args, **kwargs)
            self.compiled = compile_call(self.eager, self.owner._backend)
        return self.compiled(*args, **kwargs)
