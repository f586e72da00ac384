"""Run the code that Inductor generates without compiling or running a kernel.

Inductor ends in the source of a Python wrapper, `call(args)`, that states every allocation
(`empty_strided_*`), every reuse and every `del`, between launches of kernels. Here that source is executed
with the launches replaced by nothing and the allocations made on fake tensors, so a `StorageCounter` sees the
exact life of every buffer. It is the very code that will run: fusion, buffer reuse and in-place updates are
decided by then, which no model of the graph can promise.

Scratch memory inside library kernels is measured apart (`scratch`). Blind spot: numpy.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .._compat import ExternKernel, FakeTensor, GraphLowering, cpp
from .fake import StorageCounter

Call = Callable[[list[Any]], Any]


class _NoKernels:
    """In the place of `AsyncCompile`: every kernel is the empty one."""

    def wait(self, scope: dict[str, Any]) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: _NoKernel()


class _NoKernel:
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def run(self, *args: Any, **kwargs: Any) -> None:
        return None


class _ExternKernels:
    """In the place of `extern_kernels`: with `out=` nothing is allocated, without it the result is."""

    def __init__(self, real: Any, counter: StorageCounter) -> None:
        self._real = real
        self._counter = counter

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def launch(*args: Any, out: Any = None, **kwargs: Any) -> Any:
            run = getattr(self._real, name)
            if out is None:
                return run(*args, **kwargs)
            scratch = self._counter.scratch
            self._counter.flash(scratch.bytes_of(name, run, args, {**kwargs, "out": out}))
            return out

        return launch


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype, *, device: str) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    # As the real one: another tensor over the same storage, which is no view to autograd (a view made inside
    # of a custom function may not be written to later).
    assert isinstance(tensor, FakeTensor)
    with _disable_current_modes():
        out = torch.empty(0, dtype=tensor.dtype, device="meta")
        out.set_(tensor.untyped_storage(), tensor.storage_offset() + offset, size, stride)
        return FakeTensor(tensor.fake_mode, out, tensor.fake_device)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def dry_call(source: str, constants: dict[str, Any], counter: StorageCounter) -> Call:
    """`call(args)` of a wrapper's source, to be run under a `StorageCounter`."""
    scope: dict[str, Any] = {"__name__": "dtr_dry_wrapper", "_dtr_no_kernels": _NoKernels}
    source = source.replace("AsyncCompile()", "_dtr_no_kernels()")
    exec(compile(source, "<inductor wrapper, dry>", "exec"), scope)
    for name in list(scope):
        if name.startswith("empty_strided_"):
            device = name.removeprefix("empty_strided_").removesuffix("_pinned")
            scope[name] = functools.partial(_empty_strided, device=device)
    scope["reinterpret_tensor"] = _reinterpret
    scope["assert_size_stride"] = scope["assert_alignment"] = _nothing
    scope["extern_kernels"] = _ExternKernels(scope["extern_kernels"], counter)
    scope.update(constants)
    call: Call = scope["call"]
    return call


# Which strides an index has within a vector register: a good part of a dry run. Torch's own memo holds 128
# answers, fewer than one graph asks for; the next dry run asks for the same again.
_stride_at_vec_range = functools.lru_cache(1 << 16)(cpp.stride_at_vec_range.__wrapped__)


@contextlib.contextmanager
def dry_codegen(counter: StorageCounter, generated: Callable[[GraphLowering, Call], Call]) -> Iterator[None]:
    """Inside the block Inductor generates code but compiles and loads none.

    `generated(lowering, call)` gets each lowered graph with its dry `call` and returns the `call` to use
    instead.
    """

    def compile_to_module(self: GraphLowering) -> Any:
        counting, counter.counting = counter.counting, False
        try:
            wrapper, _ = self.codegen_with_cpp_wrapper() if self.cpp_wrapper else self.codegen()
            call = dry_call(wrapper.value, dict(self.constants), counter)
        finally:
            counter.counting = counting
        module = types.SimpleNamespace(__file__="<dry>", call=generated(self, call))
        self.cache_key, self.cache_path, self.cache_linemap = "dry", None, []
        return module

    with (
        mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
        mock.patch.object(cpp, "stride_at_vec_range", _stride_at_vec_range),
        # Only text for bug reports; it deep-copies every graph, and with it fake tensors whose storage has no
        # pointer.
        mock.patch("torch._dynamo.repro.after_aot.save_graph_repro", _nothing),
    ):
        yield


def draws_of(lowering: GraphLowering) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(name, strides of its result) of the FX nodes that draw from a generator as they run, seeds included.

    In the order of the generated code: nothing in a graph ties them together, so the scheduler may swap them,
    and it may lay out a result in another way.
    """
    found: dict[str, tuple[int, ...]] = {}
    for scheduled in lowering.scheduler.nodes:
        for part in scheduled.get_nodes():
            if isinstance(part.node, ExternKernel):
                names = [origin.name for origin in part.node.origins if _draws(origin)]
                found |= {name: _strides(part.node) for name in names if name not in found}
    return tuple(found.items())


def _strides(kernel: Any) -> tuple[int, ...]:
    """Of what the kernel fills: its own result, or the first of its inputs if it works in place."""
    filled = kernel.inputs[0] if kernel.get_mutation_names() else kernel
    try:
        strides = tuple(filled.get_stride())
    except NotImplementedError:  # several results
        return ()
    return tuple(int(s) for s in strides)  # sizes are static here


def _draws(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def buffer_names(lowering: GraphLowering) -> frozenset[str]:
    """Names of the FX nodes whose value Inductor really stores: its buffers less those that fusion
    removed."""
    gone = lowering.removed_buffers | lowering.inplaced_to_remove
    names = set()
    for buffer in lowering.buffers:
        name = buffer.get_name()
        origin = buffer.get_origin_node() if hasattr(buffer, "get_origin_node") else None
        if origin is not None and name not in gone:
            names.add(origin.name)
    return frozenset(names)
