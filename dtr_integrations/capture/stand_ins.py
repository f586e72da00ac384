"""Values in a world of tensors without data: what is known, and what stands in for the rest.

A step may read numbers off tensors (`loss.item()`), branch on them, or ask for shapes that depend on them
(`x[mask]`). What does not depend on parameters is *known* and is computed for real beside the fake run:
small tensors of the batch, buffers and constants, and what follows from them. For the rest
there are stand-ins: numbers are 1, conditions are as in a run that goes well (values are finite, comparisons
hold), a mask selects everything, one random number is the median of its distribution (so that a layer that is
dropped one time in ten is there).
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from .._compat import FakeTensor

_aten = torch.ops.aten
_NEVER = (_aten.isnan.default, _aten.isinf.default)
_NOT = (_aten.logical_not.default, _aten.bitwise_not.default)
_OR = (_aten.logical_or.default, _aten.bitwise_or.Tensor)
_UNIQUE = ("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive")
_CHECK_FINITE = _aten._amp_foreach_non_finite_check_and_unscale_
_TOTALS = (_aten.sum, _aten.mean, _aten.count_nonzero, _aten.any, _aten.amax, _aten.max)
_COPIES = (_aten._to_copy, _aten.clone, _aten.detach, _aten.view, torch.ops.prims.convert_element_type)
_UNSET = (_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default)
_LARGEST_BYTES = 4 << 20  # of a tensor whose value is kept
_LARGEST_PASSING_BYTES = 256 << 20  # of one that is only on the way to a small one, inside a graph
_DRAWS = 31  # of which a lone random number is the median


class StandIns:
    """Follows values and conditions through the ops of a step; does not keep fake tensors alive."""

    def __init__(self) -> None:
        self.holds = True  # whether a condition does of which nothing is known
        self._false: Any = WeakIdKeyDictionary()  # conditions that do not hold anywhere, and zeros for them
        self._values: Any = WeakIdKeyDictionary()
        self._sharing: dict[int, list[weakref.ref[torch.Tensor]]] = {}  # fake tensors by their value's memory

    def know(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """The fake `tensor` stands for the real `value`; ignored if that is too large or has gradients to
        come."""
        if not isinstance(value, torch.nn.Parameter) and _is_small(value):
            with _real():
                self._note(tensor, value.detach().clone())

    def _note(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        self._values[tensor] = value
        sharing = self._sharing.setdefault(value.untyped_storage().data_ptr(), [])
        if len(sharing) % 64 == 63:  # memory is used again and again: most of these are gone
            sharing[:] = [ref for ref in sharing if ref() is not None]
        sharing.append(weakref.ref(tensor))

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The known value, not to be written to; None if there is none."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        known: torch.Tensor | None = self._values.get(tensor)
        return tensor.constant if known is None else known

    def number(self, tensor: torch.Tensor) -> float | int | bool:
        """What `tensor.item()` gives."""
        known = self.value(tensor)
        if known is not None:
            with _real():
                return known.item()
        if tensor.dtype is torch.bool:
            return self.holds and tensor not in self._false
        return 1.0 if tensor.dtype.is_floating_point else 1

    def real(self, tensor: torch.Tensor, fill: Callable[..., torch.Tensor] = torch.ones) -> torch.Tensor:
        """A real tensor in the place of `tensor`: its value, or ones."""
        known = self.value(tensor)
        if known is not None:
            return known
        return fill((), dtype=tensor.dtype).expand(tensor.shape)

    def result(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """What an op gives whose result's shape depends on data, and whether that is known: as if masks
        selected all."""
        tensors = _tensors((args, kwargs))
        distinct = func.overloadpacket.__name__ in _UNIQUE

        def real(tensor: torch.Tensor) -> torch.Tensor:
            if distinct and self.value(tensor) is None:
                return torch.arange(tensor.numel()).to(tensor.dtype).reshape(tensor.shape)
            return self.real(tensor)

        with _real():
            real_args, real_kwargs = pytree.tree_map_only(torch.Tensor, real, (args, kwargs))
            return func(*real_args, **real_kwargs), all(self.value(t) is not None for t in tensors)

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An op has given `out`."""
        outs = _tensors(out)
        values = self._computed(func, args, kwargs, outs)
        if values is None:
            self._forget_written(func, args, kwargs)
        else:
            for tensor, value in zip(outs, values, strict=True):
                if isinstance(tensor, FakeTensor):
                    self._note(tensor, value)
        if not isinstance(out, torch.Tensor):
            return
        if _is_zero(func, args, lambda t: t in self._false):
            self._false[out] = True
            if func.overloadpacket in _TOTALS and _is_small(out):
                with _real():
                    self._note(out, torch.zeros(out.shape, dtype=out.dtype))
        elif out.dtype is torch.bool and not self._holds(func, args):
            self._false[out] = True

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """What is known of a compiled graph's arguments: values, numbers, or None. Keeps no argument
        alive."""
        return [self.value(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]

    def follow_graph(self, graph: fx.Graph, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """A compiled graph was run without its kernels: find out what its small outputs are.

        Args:
            graph: the graph that was lowered.
            inputs: what `inputs` said before the call.
            outputs: fake tensors that the call returned; the first ones are enough.
        """
        nodes = list(graph.nodes)
        placeholders = (n for n in nodes if n.op == "placeholder")
        given = dict(zip(placeholders, inputs, strict=False))
        results = pytree.tree_leaves(nodes[-1].args)
        wanted = [
            (node, out)
            for node, out in zip(results, outputs, strict=False)
            if isinstance(node, fx.Node) and isinstance(out, FakeTensor) and _is_small(out)
        ]
        needed = _ancestors(node for node, _ in wanted)
        order = [node for node in nodes if node in needed]
        last_reader = {read: node for node in order for read in node.all_input_nodes}
        last_reader |= dict.fromkeys((node for node, _ in wanted), nodes[-1])
        known: dict[fx.Node, Any] = {}
        false: set[fx.Node] = set()
        with _real():
            for node in order:
                if node.op == "placeholder":
                    if given.get(node) is not None:
                        known[node] = given[node]
                elif node.op == "call_function":
                    value = self._node_value(node, known)
                    if value is not None:
                        known[node] = value
                    elif _is_zero(node.target, node.args, lambda n: n in false):
                        false.add(node)
                        total = node.meta.get("val")
                        if getattr(node.target, "overloadpacket", None) in _TOTALS and _is_small(total):
                            known[node] = torch.zeros(total.shape, dtype=total.dtype)
                    elif _fails(node.target, node.args, lambda n: n in false):
                        false.add(node)
                for read in node.all_input_nodes:
                    if last_reader[read] is node:
                        known.pop(read, None)
        for node, out in wanted:
            if isinstance(known.get(node), torch.Tensor) and known[node].shape == out.shape:
                self.know(out, known[node])
            elif node in false:
                self._false[out] = True

    def _node_value(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        if any(n not in known for n in node.all_input_nodes):
            return None
        args, kwargs = pytree.tree_map_only(fx.Node, known.__getitem__, (node.args, dict(node.kwargs)))
        target, value = node.target, node.meta.get("val")
        name = str(target)
        if "inductor_seed" in name or "inductor_lookup_seed" in name:
            return torch.zeros((), dtype=torch.int64)
        if "inductor_random" in name:
            draw = torch.randn if "randn" in args else torch.rand
            return _drawn(lambda: draw(value.shape, dtype=value.dtype)) if _is_small(value) else None
        if isinstance(value, torch.Tensor) and not _is_small(value, _LARGEST_PASSING_BYTES):
            return None
        if isinstance(target, torch._ops.OpOverload) and not _is_plain(target):
            return None
        try:
            return target(*args, **kwargs)
        except Exception:
            return None

    def _computed(
        self, func: Any, args: Any, kwargs: Any, outs: list[torch.Tensor]
    ) -> list[torch.Tensor] | None:
        """The values of an op's results, or None if they cannot be known."""
        if not outs or not _is_plain(func) or func in _UNSET or not all(_is_small(t) for t in outs):
            return None
        random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        written = _written(func, args, kwargs) if random else []
        if any(self.value(t) is None and not any(t is w for w in written) for t in _tensors((args, kwargs))):
            return None

        def run() -> Any:
            real_args, real_kwargs = pytree.tree_map_only(torch.Tensor, self.real, (args, kwargs))
            if written:
                real_args = (real_args[0].clone(), *real_args[1:])
            return func(*real_args, **_on_cpu(real_kwargs))

        try:
            with _real():
                values = _tensors(_drawn(run) if random else run())
        except Exception:  # no kernel for these dtypes, a device that is not there: then it is not known
            return None
        shapes_agree = len(values) == len(outs) and all(
            v.shape == t.shape and v.dtype == t.dtype for v, t in zip(values, outs, strict=True)
        )
        return values if shapes_agree else None

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        written = _written(func, args, kwargs)
        if getattr(func, "overloadpacket", None) is _CHECK_FINITE:
            written = _tensors(args[0])  # and not whether something was found to be infinite: nothing is
        for tensor in written:
            value = self._values.get(tensor)
            if value is not None:
                for ref in self._sharing.pop(value.untyped_storage().data_ptr(), ()):
                    if (other := ref()) is not None:
                        self._values.pop(other, None)

    def _holds(self, func: Any, args: Any) -> bool:
        return not _fails(func, args, lambda t: t in self._false)


def _fails(func: Any, args: Any, is_false: Callable[[Any], bool]) -> bool:
    """Whether a condition is one that does not hold in a run that goes well. Works on tensors and on
    nodes."""
    if func in _NEVER:
        return True
    if func is _aten.ne.Tensor and args[0] is args[1]:  # the other way to write isnan
        return True
    if func is _aten.eq.Scalar and isinstance(args[1], float) and math.isinf(args[1]):
        return True
    conditions = [not is_false(leaf) for leaf in pytree.tree_leaves(args) if _is_condition(leaf)]
    if func in _NOT:
        return all(conditions)
    return bool(conditions) and not (any(conditions) if func in _OR else all(conditions))


def _is_zero(func: Any, args: Any, is_false: Callable[[Any], bool]) -> bool:
    """Whether an op makes numbers, or another condition of the same kind, out of a condition that does not
    hold anywhere."""
    packet = getattr(func, "overloadpacket", None)
    return packet in (*_TOTALS, *_COPIES) and bool(args) and is_false(args[0])


def _is_condition(leaf: Any) -> bool:
    value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


@contextlib.contextmanager
def _real() -> Iterator[None]:
    """Real arithmetic inside a fake world."""
    with _disable_current_modes(), torch.no_grad():
        yield


def _drawn(draw: Callable[[], Any]) -> Any:
    """A draw that is the same every time and leaves no trace in the generator; a lone number is the
    median of several."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = draw()
        if not isinstance(first, torch.Tensor) or first.numel() != 1:
            return first
        return torch.stack([first, *(draw() for _ in range(_DRAWS - 1))]).median(0).values


def _is_plain(func: Any) -> bool:
    """Arithmetic: no collective, no custom op with effects of its own."""
    return getattr(func, "namespace", "") in ("aten", "prims")


def _is_small(tensor: torch.Tensor, limit: int = _LARGEST_BYTES) -> bool:
    if tensor.layout is not torch.strided or not all(isinstance(size, int) for size in tensor.shape):
        return False
    return tensor.numel() * tensor.element_size() <= limit


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an op writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    out: list[torch.Tensor] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            out += _tensors(given)
    return out


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found
