"""Every private name of torch that this package relies on, probed when this module is imported.

Each is listed with what it is for and the versions on which it was tried. A torch version that is not in
`TESTED` but has all of them gets one warning; one that lacks any is refused with their names
(`UnsupportedTorch`).

Upstream links: github.com/pytorch/pytorch, folders torch/_inductor, torch/_functorch, torch/_dynamo.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import operator
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from .errors import PlanWarning, UnsupportedTorch

TESTED = ("2.11", "2.13", "2.14", "2.15")

_NEEDED: dict[str, tuple[str, ...]] = {
    # the public route to a partitioner of one's own, and what it gets (torch/_inductor/custom_graph_pass.py)
    "torch._inductor.custom_graph_pass": ("CustomPartitionerFn", "get_hash_for_files"),
    # compile_fx(config_patches=...) carries the partitioner into the lazily compiled backward
    # (torch/_inductor/compile_fx.py)
    "torch._inductor.compile_fx": ("compile_fx", "compile_fx_inner"),
    # the dry run takes Inductor's wrapper source before any kernel is compiled (torch/_inductor/graph.py)
    "torch._inductor.graph": (
        "GraphLowering.compile_to_module",
        "GraphLowering.codegen",
        "GraphLowering.codegen_with_cpp_wrapper",
    ),
    "torch._inductor.ir": ("ExternKernel",),
    # the C++ backend: strides within a vector register, and which kernels share a function
    "torch._inductor.codegen.cpp": (
        "stride_at_vec_range",
        "CppScheduling.codegen_node",
        "CppScheduling.ready_to_flush",
    ),
    "torch._inductor.virtualized": ("V",),
    # ties ops of a graph to an order, down to the scheduler
    "torch._inductor.fx_passes.control_dependencies": ("preserve_node_ordering",),
    "torch._dynamo.repro.after_aot": ("save_graph_repro",),
    # how often a frame was compiled, against the recompile limit (torch/_guards.py)
    "torch._guards": ("CompileContext", "TracingContext.try_get"),
    "torch._inductor.config": (
        "custom_partitioner_fn",
        "allow_buffer_reuse",
        "fallback_random",
        "fx_graph_cache",
        "fx_graph_remote_cache",
    ),
    # a mode that is entered in one place and left in another (torch/overrides.py)
    "torch.overrides": ("_get_current_function_mode_stack", "_pop_mode", "_push_mode"),
    "torch._inductor.lowering": ("lowerings", "fallbacks"),
    # torch's own partition, and the last step of ours (torch/_functorch/partitioners.py)
    "torch._functorch.partitioners": (
        "min_cut_rematerialization_partition",
        "_extract_fwd_bwd_modules",
        "_extract_fwd_bwd_outputs",
        "_is_tangent",
        "_must_be_in_backward",
        "classify_nodes",
        "has_recomputable_rng_ops",
        "is_sym_node",
        "raise_getitems",
        "thread_graphsafe_rng_from_hops",
    ),
    "torch._functorch.compile_utils": ("fx_graph_cse",),
    # how strict torch's own partition is (torch/_functorch/config.py)
    "torch._functorch.config": (
        "aggressive_recomputation",
        "ban_recompute_long_fusible_chains",
        "ban_recompute_materialized_backward",
        "ban_recompute_used_far_apart",
        "donated_buffer",
        "enable_autograd_cache",
    ),
    "torch._dynamo": ("disable",),
    # held while a frame is compiled (torch/_dynamo/convert_frame.py)
    "torch._dynamo.convert_frame": ("compile_lock",),
    "torch._dynamo.config": ("recompile_limit",),
    # a fake tensor's storage is a meta storage: its bytes and its death can be seen
    # (torch/_subclasses/fake_tensor.py)
    "torch._subclasses.fake_tensor": (
        "FakeTensorMode.dispatch",
        "FakeTensorMode.from_tensor",
        "FakeCopyMode",
        "FakeTensor",
        "DataDependentOutputException",
        "DynamicOutputShapeException",
    ),
    "torch.utils._python_dispatch": ("TorchDispatchMode", "_disable_current_modes"),
    "torch.utils._pytree": ("keystr", "tree_flatten_with_path", "tree_map_only"),
    # every event of the CPU allocator (torch/csrc/profiler/python/init.cpp)
    "torch._C._profiler": ("_ExtraFields_Allocation", "_RecordFunctionFast"),
    # whether a graph's backward is its last (torch/csrc/autograd/init.cpp)
    "torch._C._autograd": ("_get_current_graph_task_keep_graph",),
    "torch.autograd": ("_profiler_enabled",),
    # the online runtime: who still holds a storage, and ways around the dispatcher's upper layers
    # (torch/csrc/Module.cpp, torch/csrc/autograd/init.cpp)
    "torch._C": (
        "_storage_Use_Count",
        "_DisableTorchDispatch",
        "_ExcludeDispatchKeyGuard",
        "_set_conj",
        "_set_neg",
        "_current_graph_task_id",
        "_autograd._top_saved_tensors_default_hooks",
    ),
    # keeps Dynamo out of the online runtime's own frames (torch/_dynamo/eval_frame.py)
    "torch._dynamo.eval_frame": ("OptimizedModule", "set_code_exec_strategy"),
    "torch._dynamo.types": ("FrameAction", "FrameExecStrategy"),
    # in whose forward torch.compile splits graphs at gradient buckets (torch/nn/parallel/distributed.py)
    "torch.nn.parallel": (
        "DistributedDataParallel._get_active_ddp_module",
        "DistributedDataParallel._inside_ddp_forward",
    ),
    # `nn.Module.__call__` hands over to `_compiled_call_impl` (torch/nn/modules/module.py)
    "torch.nn": ("Module._call_impl", "Module._compiled_call_impl"),
}


def _probe() -> None:
    missing = []
    for module_name, names in _NEEDED.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            missing.append(module_name)
            continue
        for name in names:
            try:
                operator.attrgetter(name)(module)
            except AttributeError:
                missing.append(f"{module_name}.{name}")
    version = torch.__version__
    if missing:
        raise UnsupportedTorch(
            f"torch {version} lacks what this package is built on: {', '.join(missing)}. "
            f"Tested versions: {', '.join(TESTED)}; install one of them: pip install torch=={TESTED[-1]}.*"
        )
    if not version.startswith(tuple(f"{v}." for v in TESTED)):
        warnings.warn(
            f"torch {version} is untested with this version of dtr_integrations "
            f"(tested: {', '.join(TESTED)}). "
            "Everything it needs was found; check the measured peaks that it logs.",
            PlanWarning,
            stacklevel=3,
        )


_probe()

# One thread at a time compiles; a dry run, which changes how torch compiles in the process, holds it too.
from torch._dynamo.convert_frame import compile_lock as compiler_lock  # noqa: E402
from torch._functorch import partitioners  # noqa: E402  (the probe comes first: its message beats an ImportError)
from torch._functorch.compile_utils import fx_graph_cse  # noqa: E402
from torch._inductor import config as inductor_config  # noqa: E402
from torch._inductor.codegen import cpp  # noqa: E402
from torch._inductor.codegen.cpp import CppScheduling  # noqa: E402
from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # noqa: E402
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files  # noqa: E402
from torch._inductor.fx_passes.control_dependencies import control_deps, preserve_node_ordering  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402
from torch._inductor.ir import ExternKernel  # noqa: E402
from torch._inductor.virtualized import V  # noqa: E402
from torch._subclasses.fake_tensor import (  # noqa: E402
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)

__all__ = [
    "COMPILED_ROOT",
    "ISOLATES_RECOMPILES",
    "CppScheduling",
    "CustomPartitionerFn",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "ExternKernel",
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorMode",
    "GraphLowering",
    "V",
    "active_ddp",
    "canonical",
    "compile_call",
    "compile_fx",
    "compile_fx_inner",
    "compiler_lock",
    "copied_graph",
    "cpp",
    "ddp_frames_without_modes",
    "default_store",
    "extracted",
    "forgetting_code",
    "fully_sharded",
    "gathers_told",
    "get_hash_for_files",
    "inductor_config",
    "inside_ddp_forward",
    "is_compile_error",
    "keeps_graph",
    "leave_out",
    "never_traced",
    "not_cached_whole",
    "original_class",
    "partitioners",
    "preserve_node_ordering",
    "process_groups",
    "remove_function_mode",
    "shard_groups",
    "top_saved_tensors_hooks",
    "without_composable_state",
]


# What orders nodes has no kernel for tensors that autograd knows in torch 2.11, and the lowering of some ops
# runs it (torch/_inductor/fx_passes/control_dependencies.py).
if torch._C.DispatchKey.Autograd not in control_deps.py_kernels:

    @control_deps.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)
    @control_deps.py_impl(torch._C.DispatchKey.Autograd)
    def _ordered(additional_deps: Any, subgraph: Any, *args: Any, **kwargs: Any) -> Any:
        return subgraph(*args, **kwargs)


# Whether each compiled callable counts its recompiles alone (torch 2.12 on).
ISOLATES_RECOMPILES = "isolate_recompiles" in inspect.signature(torch.compile).parameters


@contextlib.contextmanager
def forgetting_code() -> Iterator[None]:
    """Where what is compiled inside would count against the recompile limit of the same code outside (up to
    torch 2.11), it is forgotten at the end (torch/_dynamo/convert_frame.py, `input_codes`)."""
    if ISOLATES_RECOMPILES:
        yield
        return
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo import convert_frame

    outside, inside = convert_frame.input_codes, convert_frame.Tracker()
    convert_frame.input_codes = inside
    try:
        yield
    finally:
        convert_frame.input_codes = outside
        for reference in inside.seen:
            if (code := reference()) is not None:
                outside.add(code)
                reset_code(code)


def compile_call(
    call: Callable[..., Any], backend: Callable[..., Any], last: Callable[[int], None] | None = None
) -> Callable[..., Any]:
    """`torch.compile` of a module's bound `_call_impl`, behind an entry frame of its own.

    Dynamo skips frames of torch's own classes (`nn.Sequential` compiled in place gives no graph), so
    something has to stand in front of them. It keys its cache by code object, so the frame gets one of its
    own; `isolate_recompiles` (torch 2.12 on) keeps the recompile limit apart as well. Shapes are static: each
    shape is a graph of its own. At the recompile limit Dynamo runs further shapes eagerly and only logs it:
    `last(limit)` is called once, with the last graph that it compiles.
    """

    def planned_module(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    planned_module.__code__ = planned_module.__code__.replace()
    options = {"isolate_recompiles": True} if ISOLATES_RECOMPILES else {}
    compiled: Counter[Any] = Counter()  # by frame: a call with graph breaks has several

    def counted(gm: Any, inputs: Any) -> Any:
        limit = torch._dynamo.config.recompile_limit
        compile_id = torch._guards.CompileContext.current_compile_id()
        if last is not None and compile_id is not None and max(compiled.values(), default=0) < limit:
            compiled[compile_id.frame_id] += 1
            if compiled[compile_id.frame_id] >= limit:
                last(limit)
        return backend(gm, inputs)

    return torch.compile(planned_module, backend=counted, dynamic=False, **options)


def leave_out(module: torch.nn.Module, call: Callable[..., Any] | None = None) -> Callable[[], None]:
    """Have Dynamo break its graph where `module` is called, and run it as it is, or `call` in its place,
    which runs its `_call_impl`. Returns how to undo that.

    Dynamo inlines `forward` without a look at `_compiled_call_impl`, unless the instance has a `forward`
    of its own (torch/_dynamo/variables/nn_module.py): there it gets the very same one.
    """
    disabled = torch._dynamo.disable(call or module._call_impl)
    module._compiled_call_impl = disabled
    own_forward = "forward" not in vars(module)
    if own_forward:
        module.forward = module.forward

    def undo() -> None:
        if module._compiled_call_impl is disabled:
            module._compiled_call_impl = None
        if own_forward and "forward" in vars(module):
            del module.forward

    return undo


def never_traced(function: Callable[..., Any]) -> None:
    """Have Dynamo look neither at the frames of `function` nor at those that it calls."""
    skip = torch._dynamo.types.FrameAction.SKIP
    torch._dynamo.eval_frame.set_code_exec_strategy(
        function.__code__, torch._dynamo.types.FrameExecStrategy(skip, skip)
    )


def top_saved_tensors_hooks() -> Any:
    """The (pack, unpack) hooks that are in force on this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def is_compile_error(error: BaseException) -> bool:
    """Whether torch's compiler raised it (and not the program that was compiled)."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Without torch's log of each op that fails on fake tensors, with its stack, before it raises the same
    error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def keeps_graph() -> bool:
    """Inside a backward: whether what it reads is kept for another one (`retain_graph`, `create_graph`)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def active_ddp() -> Any:
    """The `DistributedDataParallel` in whose forward this runs, or None."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()


def inside_ddp_forward(parallel: Any) -> contextlib.AbstractContextManager[None]:
    """As inside of the forward of that `DistributedDataParallel`."""
    return parallel._inside_ddp_forward()  # type: ignore[no-any-return]


@contextlib.contextmanager
def ddp_frames_without_modes() -> Iterator[None]:
    """Inside, Dynamo compiles frames in a DDP's forward as it does all others: with the dispatch modes that
    are active set aside. Else an input that is a view is made anew in the mode of a dry run
    (torch/_dynamo/convert_frame.py, `CatchErrorsWrapper`; not probed: it matters only there)."""
    from torch._dynamo.convert_frame import ConvertFrame
    from torch.utils._python_dispatch import _disable_current_modes

    clone = getattr(vars(ConvertFrame).get("_clone_with_backend"), "fget", None)  # it is a property
    if clone is None:
        yield
        return

    def cloned(self: Any) -> Callable[[Any], Any]:
        def with_backend(backend: Any) -> Any:
            convert = clone(self)(backend)

            @functools.wraps(convert)
            def without_modes(*args: Any, **kwargs: Any) -> Any:
                with _disable_current_modes():
                    return convert(*args, **kwargs)

            return without_modes

        return with_backend

    with mock.patch.object(ConvertFrame, "_clone_with_backend", property(cloned)):
        yield


def default_store() -> Any:
    """The store of the default process group. (Not probed: a torch without distributed has none.)"""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def process_groups() -> list[tuple[str, list[int]]]:
    """(backends, global ranks) of each process group that this process is in. (Not probed, likewise.)"""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    from torch.distributed.distributed_c10d import _world, get_backend_config, get_process_group_ranks

    return [(get_backend_config(group), get_process_group_ranks(group)) for group in _world.pg_map]


def fully_sharded(module: torch.nn.Module) -> Any:
    """The state that `fully_shard` (FSDP2) keeps of a module, or None. (Not probed: a torch without
    distributed has none.)"""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return None
    return module._get_fsdp_state()


def shard_groups(state: Any) -> list[Any]:
    """Its groups of parameters that are gathered together: at most one up to torch 2.12
    (torch/distributed/fsdp/_fully_shard/_fsdp_state.py)."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def original_class(module: torch.nn.Module) -> Any:
    """The class of a module before `fully_shard` gave it another one."""
    kind = type(module)
    return kind.__mro__[kind._orig_cls_mro_index]  # type: ignore[attr-defined]


def without_composable_state(held: Mapping[str, Any]) -> dict[str, Any]:
    """A module's attributes without what `fully_shard` notes there (torch/distributed/_composable)."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    dropped = (STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params")
    return {name: value for name, value in held.items() if name not in dropped}


class _Unsent:
    """`torch.distributed` without its all-reduce."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    def all_reduce(self, *args: Any, **kwargs: Any) -> None:
        return None


@contextlib.contextmanager
def gathers_told(told: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Inside, FSDP2 says of which flat tensor it has resized the storage (to hold what is gathered, or to
    nothing), and sums no gradients over replicas (torch/distributed/fsdp/_fully_shard)."""
    if "torch.distributed.fsdp" not in sys.modules:
        yield
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group

    def telling(resize: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        def resized(tensor: torch.Tensor) -> None:
            resize(tensor)
            told(tensor)

        return resized

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(_fsdp_collectives, "dist", _Unsent()))
        for module in (_fsdp_param, _fsdp_param_group):
            for name in ("alloc_storage", "free_storage"):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, telling(getattr(module, name))))
        yield


def remove_function_mode(mode: Any) -> None:
    """Take a `TorchFunctionMode` off the stack, wherever in it it is; nothing if it is not there."""
    from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

    if all(other is not mode for other in _get_current_function_mode_stack()):
        return
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)


@contextlib.contextmanager
def never_donating() -> Iterator[None]:
    """Graphs that are compiled inside do not overwrite what their forward hands to their backward."""
    with torch._functorch.config.patch(donated_buffer=False):
        yield


@contextlib.contextmanager
def not_cached_whole() -> Iterator[None]:
    """Graphs that are compiled inside pass through the inner compiler each time; Inductor's own cache, which
    that one asks, stays."""
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def forget_donations() -> None:
    """While a graph is lowered: say that none of its backward's inputs may be overwritten. One that says
    nothing is refused when it is kept (torch/_functorch/_aot_autograd/runtime_wrappers.py)."""
    tracing = torch._guards.TracingContext.try_get()
    if tracing is not None and tracing.fw_metadata is not None:
        tracing.fw_metadata.bw_donated_idxs = []


def copied_graph(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy with its output and that output's meta; nodes keep their names."""
    new = torch.fx.Graph()
    new.output(new.graph_copy(graph, {})).meta = dict(next(iter(graph.find_nodes(op="output"))).meta)
    return new


def canonical(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy without dead code and common subexpressions, as torch's own partitioner begins.

    The form in which joint graphs are described, hashed and scheduled, at capture and at the real compile.
    """
    joint = torch.fx.GraphModule(gm, copied_graph(gm.graph))
    joint.graph.eliminate_dead_code()
    joint.graph = fx_graph_cse(joint.graph)
    return joint


def extracted(
    joint: torch.fx.GraphModule, saved: Sequence[torch.fx.Node], num_forward_outputs: int
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """The joint graph cut into (forward, backward) at the `saved` nodes: tensors, sizes and, from torch 2.12
    on, opaque objects, which are a kind of their own there."""
    sizes = [node for node in saved if partitioners.is_sym_node(node)]
    opaque, options = [], {}
    if hasattr(partitioners, "is_opaque_node"):
        opaque = [node for node in saved if partitioners.is_opaque_node(node)]
        options = {"saved_opaque_nodes": opaque}
    return partitioners._extract_fwd_bwd_modules(
        joint,
        [node for node in saved if node not in sizes and node not in opaque],
        saved_sym_nodes=sizes,
        num_fwd_outputs=num_forward_outputs,
        **options,
    )


# How Dynamo names the module that `compile_call` compiles, in `nn_module_stack`.
COMPILED_ROOT = "L['call'].__self__"
