"""Train a few steps on twins and write down all that they leave: losses, gradients, buffers, parameters,
optimizer state, random state, Python state."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .._compat import compile_call, compile_fx, leave_out, never_donating
from .._python_state import Place, generator_state, inside, outside, preserved
from .._randomness import preserved_randomness, random_state
from ..apply.dispatch import InPlace
from ..apply.partitioner import PlanPartitioner
from ..capture.source import FakeStep, StepSource, batch_tensors, functions_of
from ..capture.step import Parts
from ..capture.world import RealWorld

# How a step's modules are run: compiled inside of the block, as they were after it.
Way = Callable[[FakeStep], AbstractContextManager[None]]

_PLAIN = (bool, int, float, str, bytes, type(None))
_MOST_ITEMS = 10_000  # of a container in a module's Python state


class Key(NamedTuple):
    """What a recorded value is: ``Key("gradient", "head.weight")``."""

    kind: str
    name: str


@dataclass(kw_only=True)
class Trained:
    """What training left, on the CPU.

    Attributes:
        steps: tensors after each step; the last one's has parameters and optimizer state as well.
        random: the random state afterwards, by generator.
        python: plain values afterwards that the model's code can reach, by name (see `_python_state`): of
            attributes all, of what is outside of the model those that were others before; `changed` names
            what was.
        hook_calls: how often each gradient hook on a parameter ran.
        drew: whether random numbers of torch's were drawn.
        dtypes: floating dtypes that ops of the first step returned (only for eager training).
    """

    steps: list[dict[Key, torch.Tensor]] = field(default_factory=list)
    random: dict[str, Any] = field(default_factory=dict)
    python: dict[str, Any] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    hook_calls: Counter[str] = field(default_factory=Counter)
    drew: bool = False
    dtypes: set[torch.dtype] = field(default_factory=set)


def train(
    source: StepSource,
    way: Way,
    *,
    steps: int,
    nudge: float = 0.0,
    python: Mapping[str, Any] | None = None,
) -> Trained:
    """`steps` optimizer steps of `source` on twins, from the real objects' state and today's random state.

    Args:
        source: the step; nothing real is changed by it.
        way: `eagerly`, `by_default(...)` or `by_plan(...)`.
        steps: optimizer steps, at least 1.
        nudge: parameters begin at (1 + nudge · u) times their value, u uniform in [−1, 1).
        python: values to set first, by name as in `Trained.python`.
    """
    world = RealWorld()
    trained = Trained()
    functions = functions_of(source)
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved_randomness())
        stack.enter_context(torch._dynamo.config.patch({"recompile_limit": 64}))
        step = source.build(world)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Seems like `optimizer.step", category=UserWarning)
        stack.enter_context(preserved(step.model, *functions))
        _nudge(step.model, nudge)
        reached = _Reached(step.model, functions)
        reached.set(python or {})
        _count_hooks(step.model, trained.hook_calls)
        before, drawn = reached.plain(), torch.get_rng_state()
        record = _Record(step, reached)
        with way(step), record.watching_backward():
            for number in range(steps):
                with _dtypes(trained.dtypes) if way is eagerly and not number else contextlib.nullcontext():
                    step.run()
                trained.steps.append(record.take())
        trained.steps[-1].update(_final(step))
        trained.random = random_state() | reached.generators()
        trained.python = {
            name: value
            for name, value in reached.plain().items()
            if name in reached.inside or not same_value(value, before.get(name, _ABSENT))
        }
        trained.changed = tuple(
            n for n, v in trained.python.items() if not same_value(v, before.get(n, _ABSENT))
        )
        trained.drew = not torch.equal(drawn, torch.get_rng_state())
    world.release()
    torch.clear_autocast_cache()
    return trained


# -- ways ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def eagerly(step: FakeStep) -> Iterator[None]:
    """Nothing is compiled."""
    with torch.compiler.set_stance("force_eager"):
        yield


def by_default(options: Mapping[str, Any], parts: Parts | None = None) -> Way:
    """Torch's default compile with these options, of `parts` (None: the step's targets). Shares no code with
    what carries out plans."""

    keeps = parts is not None and not parts.donates

    def backend(gm: Any, inputs: Any) -> Any:
        with never_donating() if keeps else contextlib.nullcontext():
            return compile_fx(gm, inputs, config_patches=dict(options))

    @contextlib.contextmanager
    def way(step: FakeStep) -> Iterator[None]:
        targets, excluded = _modules(step, parts)
        modules = list(targets.values())
        for module in modules:
            module._compiled_call_impl = _while_training(module, compile_call(module._call_impl, backend))
        left_out = [leave_out(module) for module in excluded.values()]
        try:
            yield
        finally:
            for undo in left_out:
                undo()
            for module in modules:
                module._compiled_call_impl = None

    return way


def by_plan(partitioner: PlanPartitioner, options: Mapping[str, Any], parts: Parts | None = None) -> Way:
    """As a session runs it; what does not compile is an error."""

    def failed(name: str, error: Exception, instead: str, *, gives_up: bool) -> None:
        raise error

    @contextlib.contextmanager
    def way(step: FakeStep) -> Iterator[None]:
        targets, excluded = _modules(step, parts)
        in_place = InPlace(targets, lambda name, args, kwargs: None, failed)
        donates = parts is None or parts.donates
        in_place.use(partitioner, options, targets=targets, excluded=excluded, donates=donates)
        try:
            yield
        finally:
            in_place.remove()

    return way


def _modules(step: FakeStep, parts: Parts | None) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """What is compiled, and what is left out of every graph."""
    parts = parts or Parts(targets=tuple(step.targets))
    found = step.model.get_submodule
    return {n: found(n) for n in parts.targets}, {n: found(n) for n in parts.excluded}


def _while_training(module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    eager = module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        training = module.training and torch.is_grad_enabled()
        return (compiled if training else eager)(*args, **kwargs)

    return call


# -- what is written down ------------------------------------------------------------------------------------


class _Record:
    """Losses and gradients as each backward leaves them: later code may zero them."""

    def __init__(self, step: FakeStep, reached: _Reached) -> None:
        self.step, self.reached = step, reached
        self.names = _names(step)
        self.tensors: dict[Key, torch.Tensor] = {}
        self.backwards = 0

    @contextlib.contextmanager
    def watching_backward(self) -> Iterator[None]:
        real = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self.backwards += 1
            for loss in pytree.tree_leaves(tensors):
                name = f"of backward {self.backwards}" if self.backwards > 1 else ""
                self.tensors[Key("loss", name)] = _kept(loss)
            real(tensors, *args, **kwargs)
            self._gradients()

        with mock.patch.object(torch.autograd, "backward", backward):
            yield

    def take(self) -> dict[Key, torch.Tensor]:
        """The step's tensors; begins the next step."""
        for name, buffer in self.step.model.named_buffers():
            self.tensors[Key("buffer", name)] = _kept(buffer)
        for name, tensor in self.reached.tensors():
            self.tensors[Key("attribute", name)] = _kept(tensor)
        tensors, self.tensors, self.backwards = self.tensors, {}, 0
        return tensors

    def _gradients(self) -> None:
        for tensor, name in self.names:
            if tensor.grad is not None:
                self.tensors[Key("gradient", name)] = _kept(tensor.grad)


def _names(step: FakeStep) -> list[tuple[torch.Tensor, str]]:
    """Every tensor that may get a gradient, once, with its name: parameters, what optimizers step, the
    batch."""
    named = [(parameter, name) for name, parameter in step.model.named_parameters()]
    for i, optimizer in enumerate(step.optimizers):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        named += [(p, f"parameter {j} of optimizer {i}") for j, p in enumerate(parameters)]
    leaves = [leaf for leaf in batch_tensors(step.batch()) if leaf.is_leaf]
    named += [(leaf, f"input {i}") for i, leaf in enumerate(leaves) if leaf.requires_grad]
    return list({id(tensor): (tensor, name) for tensor, name in reversed(named)}.values())[::-1]


def _final(step: FakeStep) -> dict[Key, torch.Tensor]:
    named = _names(step)
    names = {id(tensor): name for tensor, name in named}
    found = {Key("parameter", name): _kept(tensor) for tensor, name in named if not name.startswith("input ")}
    for i, optimizer in enumerate(step.optimizers):
        for parameter, state in optimizer.state.items():
            for path, leaf in pytree.tree_flatten_with_path(state)[0]:
                name = f"{names.get(id(parameter), f'optimizer {i}')}{pytree.keystr(path)}"
                if isinstance(leaf, (torch.Tensor, int, float)):
                    found[Key("optimizer state", name)] = _kept(leaf)
        for j, group in enumerate(optimizer.param_groups):
            if isinstance(group.get("lr"), (torch.Tensor, float)):
                found[Key("optimizer state", f"optimizer {i}, group {j}: lr")] = _kept(group["lr"])
    return found


def _kept(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return torch.tensor(value, dtype=torch.float64)
    value = value.detach()
    return (value.to_dense() if value.layout is not torch.strided else value).to("cpu", copy=True)


class _Reached:
    """What the model's code can reach besides parameters and buffers, as it is when asked."""

    def __init__(self, model: nn.Module, functions: Sequence[Any]) -> None:
        self.model, self.functions = model, functions
        self.inside: dict[str, Place] = {}
        self.known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def _values(self) -> Iterator[tuple[str, Place, Any]]:
        self.inside = inside(self.model)
        for name, place in {**outside(self.model, *self.functions), **self.inside}.items():
            if (value := place.get(_ABSENT)) is not _ABSENT:
                yield name, place, value

    def plain(self) -> dict[str, Any]:
        """Numbers, texts and containers of them, by name; copies."""
        return {name: _copied(value) for name, _, value in self._values() if _is_plain(value)}

    def generators(self) -> dict[str, Any]:
        """The state of every random generator that is an object of its own."""
        found = {name: generator_state(value) for name, _, value in self._values()}
        return {f"generator {name}": state for name, state in found.items() if state is not None}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors and numeric arrays, those in containers included, without parameters and buffers."""
        for name, _, value in self._values():
            if isinstance(value, nn.Module) or _is_plain(value):
                continue
            for path, leaf in pytree.tree_flatten_with_path(value)[0][:_MOST_ITEMS]:
                tensor = _as_tensor(leaf)
                if tensor is not None and id(leaf) not in self.known:
                    yield f"{name}{pytree.keystr(path)}", tensor

    def set(self, values: Mapping[str, Any]) -> None:
        """Have the names hold these values."""
        places = {name: place for name, place, _ in self._values()}
        for name, value in values.items():
            places[name].set(_copied(value))


def _as_tensor(leaf: Any) -> torch.Tensor | None:
    if isinstance(leaf, torch.Tensor):
        return None if isinstance(leaf, nn.Parameter) else leaf
    if type(leaf).__module__ == "numpy" and getattr(leaf, "dtype", None) is not None:
        with contextlib.suppress(TypeError):  # of objects or texts
            return torch.as_tensor(leaf)
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        parts = [*value, *value.values()] if isinstance(value, dict) else list(value)
        return len(parts) <= _MOST_ITEMS and all(_is_plain(part) for part in parts)
    return isinstance(value, _PLAIN)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple, set, frozenset) else value


_ABSENT = object()


def same_value(one: Any, other: Any, *, relative: float = 0.0) -> bool:
    """Whether two plain values are equal, floats to a relative difference."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) <= relative * abs(other) or (one != one and other != other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same_value(value, other[key], relative=relative) for key, value in one.items()
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(
            same_value(a, b, relative=relative) for a, b in zip(one, other, strict=True)
        )
    return bool(one == other)


# -- instruments ---------------------------------------------------------------------------------------------


def _nudge(model: nn.Module, size: float) -> None:
    if not size:
        return
    made = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.rand(parameter.shape, generator=made, dtype=torch.float64).mul_(2).sub_(1)
                parameter.copy_(parameter.double() * (1 + size * noise.to(parameter.device)))


def _count_hooks(model: nn.Module, calls: Counter[str]) -> None:
    """Let every gradient hook on a parameter count its calls."""

    def counted(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return hook(*args)

        return call

    for name, parameter in model.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(parameter, kind, None) or {}
            for key in hooks:
                hooks[key] = counted(hooks[key], name)


class _DtypesSeen(TorchDispatchMode):
    def __init__(self, seen: set[torch.dtype]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves(out)
        self.seen.update(t.dtype for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point())
        return out


@contextlib.contextmanager
def _dtypes(seen: set[torch.dtype]) -> Iterator[None]:
    with _DtypesSeen(seen):
        yield
