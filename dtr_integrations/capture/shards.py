"""Parameters that `fully_shard` (FSDP2) has sharded, beside twins of their module.

A twin is made of whole parameters and sharded as the real module was, by `fully_shard` itself: what FSDP2
gathers, prefetches, frees, flattens and reduces in a step is then its own doing, on tensors of the twin's
world. Only nothing is sent: the buffers of a collective are there, and stay as they are.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._compat import fully_sharded, original_class, shard_groups, without_composable_state
from ..errors import CaptureError

if TYPE_CHECKING:
    from .world import World

FSDP_GATHERS = "FSDP2 gathers"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# What a training loop or its user may have set on a group, by the name of its attribute.
_SETTINGS = (
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "unshard_in_backward",
    "unshard_async_op",
    "reduce_scatter_max_input_buffers",
    "reduce_scatter_unused_params",
)
_PREFETCHES = ("_states_to_forward_prefetch", "_states_to_backward_prefetch")


class Shards:
    """What `fully_shard` has made of one module and those in it: a state for each call of it."""

    def __init__(self, states: Sequence[Any]) -> None:
        self._states = states

    @classmethod
    def of(cls, module: nn.Module, memo: Mapping[int, Any]) -> Shards | None:
        """Those of `module` that `memo` has no copies of, or None if nothing else in it is sharded.

        Raises `CaptureError` for what cannot be done to a twin: parameters that were sharded in another way
        before (tensor parallelism).
        """
        found = (fully_sharded(part) for part in module.modules() if id(part) not in memo)
        states = list(dict.fromkeys(state for state in found if state is not None))
        if not states:
            return None
        for state in states:
            for group in shard_groups(state):
                if getattr(group.mesh_info, "is_spmd_mesh", False) or any(
                    parameter.is_dtensor for parameter in group.fsdp_params
                ):
                    raise CaptureError(
                        "parameters that were DTensors before fully_shard (tensor parallelism, or "
                        "dp_mesh_dims=) cannot be planned; shard the model over data-parallel ranks only"
                    )
        return cls(states)

    def copied(self, module: nn.Module, world: World, memo: dict[int, Any]) -> nn.Module:
        """A deep copy of `module` in `world` with whole parameters, as it was before `fully_shard`."""
        for parameter in self._parameters():
            sharded = parameter.sharded_param
            whole = nn.Parameter(
                world.empty(
                    parameter._orig_size, parameter._contiguous_orig_stride, sharded.dtype, parameter.device
                ),
                requires_grad=sharded.requires_grad,
            )
            for real in _registered(parameter):
                memo[id(real)] = whole
        shells = [part for state in self._states for part in state._modules]
        for part in shells:  # before any is filled: one may refer to another
            kind = original_class(part)
            memo[id(part)] = kind.__new__(kind)
        handles = {handle for state in self._states for handle in _handles(state)}
        for part in shells:
            memo[id(part)].__setstate__(copy.deepcopy(_bare(part, handles), memo))
        return copy.deepcopy(module, memo)

    def shard(self, module: nn.Module, memo: dict[int, Any]) -> None:
        """Shard the copy of `module` as that one is. From then on `memo` knows the twins of its shards."""
        from torch.distributed.fsdp import fully_shard

        managed = {id(p) for parameter in self._parameters() for p in _registered(parameter)}
        ignored = {memo[id(p)] for p in module.parameters() if id(p) not in managed and id(p) in memo}
        placements: dict[int, Any] = {}
        for parameter in self._parameters():
            placements[id(memo[id(parameter.sharded_param)])] = parameter
        twins: dict[int, Any] = {}
        for state in reversed(self._states):  # what is inside of another first
            parts = [memo[id(part)] for part in state._modules]
            groups = shard_groups(state)
            group, several = (groups or self._groups())[0], len(groups) > 1
            fully_shard(
                parts if len(parts) > 1 else parts[0],
                mesh=group.mesh_info.mesh,
                reshard_after_forward=_reshards(state),
                shard_placement_fn=lambda p, several=several: _placement(placements[id(p)], several),
                mp_policy=state._mp_policy,
                offload_policy=group.offload_policy,
                ignored_params=ignored,
            )
            twins[id(state)] = fully_sharded(parts[0])
        for state in self._states:
            self._set_as(state, twins[id(state)])
            for name in _PREFETCHES:
                setattr(twins[id(state)], name, [twins[id(other)] for other in getattr(state, name)])
        for parameter in self._parameters():
            info = parameter._module_info
            twin = memo[id(info.module)]._parameters[info.param_name]
            for real in _registered(parameter):
                memo[id(real)] = twin

    def _set_as(self, state: Any, twin: Any) -> None:
        for group, copied in zip(shard_groups(state), shard_groups(twin), strict=True):
            for name in _SETTINGS:
                if hasattr(group, name):
                    setattr(copied, name, getattr(group, name))
            copied._all_gather_comm = _Silent()
            copied._reduce_scatter_comm = _Silent()

    def _groups(self) -> list[Any]:
        return [group for state in self._states for group in shard_groups(state)]

    def _parameters(self) -> Iterator[Any]:
        for group in self._groups():
            yield from group.fsdp_params


def held_back(model: nn.Module) -> tuple[str, ...]:
    """The names of the sharded modules in `model` whose gradients stay whole for now: their loop accumulates,
    and reduces in the last micro-batch of a step only (`set_requires_gradient_sync`)."""
    states = ((name, fully_sharded(part)) for name, part in model.named_modules())
    return tuple(
        name
        for name, state in states
        if state is not None and any(not group.reduce_grads for group in shard_groups(state))
    )


class _Silent:
    """A collective that has its buffers and sends nothing (torch.distributed.fsdp's `AllGather` and
    `ReduceScatter`)."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


def _registered(parameter: Any) -> list[Any]:
    """What may stand for a parameter in its module: the shard, or what was gathered of it."""
    info = parameter._module_info
    found = [parameter.sharded_param, info.module._parameters[info.param_name]]
    return [*found, parameter._unsharded_param] if hasattr(parameter, "_unsharded_param") else found


def _reshards(state: Any) -> bool | int | None:
    """`reshard_after_forward` as it was given to `fully_shard`, or set since."""
    if state._auto_reshard_after_forward:
        return None
    for group in shard_groups(state):
        after = group.post_forward_mesh_info
        if after is None:
            return False
        return True if after is group.mesh_info else int(after.shard_mesh_size)
    return False


def _placement(parameter: Any, several: bool) -> Any:
    if not several:
        return parameter.fsdp_placement
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

    return ShardPlacementResult(placement=parameter.fsdp_placement, mesh_info=parameter.mesh_info)


def _handles(state: Any) -> Iterator[int]:
    """The keys of a state's own hooks."""
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        for one in getattr(handle, "handles", (handle,)):
            yield one.id


def _bare(module: nn.Module, handles: set[int]) -> dict[str, Any]:
    """What a module holds, but for what `fully_shard` has put there."""
    held = without_composable_state(module.__getstate__())
    for name in _HOOKS:
        for kind in (name, f"{name}_with_kwargs", f"{name}_always_called"):
            if kind in held:
                held[kind] = OrderedDict((k, v) for k, v in held[kind].items() if k not in handles)
    return held
