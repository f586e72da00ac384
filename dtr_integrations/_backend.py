"""Inductor as a Dynamo backend in which one graph that fails to compile does not bring down the rest.

A graph is handed to Inductor after the partition: whatever it saves and recomputes, the plan has decided. If
Inductor cannot lower it, generate code or compile that, the graph can still be run op by op, with the same
values.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ._compat import (
    compile_fx,
    compile_fx_inner,
    compiler_lock,
    copied_graph,
    forget_donations,
    keeps_graph,
    never_donating,
    not_cached_whole,
)
from ._kernel_groups import freed_at_once

DIFFERENTIATED_AGAIN = (
    "its gradient is differentiated again (create_graph=True), which torch.compile cannot do"
)

# (what Inductor raised, is the graph a backward, does it draw from seeds) -> run it op by op? False: raise.
# Only Inductor's code draws from seeds: op by op, a mask that is computed again would not be the same.
GraphFailed = Callable[[Exception, bool, bool], bool]


# (the graph's fingerprint; "" if no plan knows it, is it a backward) -> what each call of it runs within.
Around = Callable[[str, bool], contextlib.AbstractContextManager[Callable[[Any], None]]]
_GRAPH = "dtr_graph"


def name_graph(fingerprint: str, *parts: fx.GraphModule) -> None:
    """Name the two halves of a joint graph, for `Around`."""
    for part in parts:
        part.meta[_GRAPH] = fingerprint


def inductor_backend(
    partitioner: Any,
    options: Mapping[str, Any],
    failed: GraphFailed,
    *,
    donates: bool = True,
    around: Around | None = None,
) -> Callable[[fx.GraphModule, Any], Any]:
    """A Dynamo backend: `compile_fx` with `partitioner` and Inductor's `options`. `donates`: a backward may
    overwrite what it was handed (it cannot run twice then). `around`: entered for each call of compiled code;
    what it gives is told the results."""
    patches = {**options, "custom_partitioner_fn": partitioner}

    def compile_graph(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        spare = fx.GraphModule(gm, copied_graph(gm.graph))  # Inductor's passes change what they are given
        if not donates:
            forget_donations()
        is_backward = bool(kwargs.get("is_backward"))
        try:
            with compiler_lock, freed_at_once(gm):  # a backward may be compiled when it first runs
                compiled = compile_fx_inner(gm, inputs, **kwargs)
        except Exception as error:
            if not failed(error, is_backward, _draws_from_seeds(spare)):
                raise
            compiled = _op_by_op(spare)
        if around is None:
            return compiled
        return _within(functools.partial(around, spare.meta.get(_GRAPH, ""), is_backward), compiled)

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if not donates:
                stack.enter_context(never_donating())
            if around is not None:
                stack.enter_context(not_cached_whole())
            return compile_fx(gm, inputs, inner_compile=compile_graph, config_patches=patches)

    return backend


def _within(
    around: Callable[[], contextlib.AbstractContextManager[Callable[[Any], None]]],
    compiled: Callable[[list[Any]], Any],
) -> Callable[[list[Any]], Any]:
    def call(args: list[Any]) -> Any:
        with around() as done:
            results = compiled(args)
            done(results)
            return results

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _draws_from_seeds(gm: fx.GraphModule) -> bool:
    return any("inductor_rand" in str(node.target) for node in gm.graph.nodes)


def _op_by_op(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    def call(args: list[Any]) -> Any:
        return fx.Interpreter(gm).boxed_run(args)  # frees each value after its last use

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def when_used_again(
    out: Any, *, differentiated: Callable[[], None], kept: Callable[[], None] | None = None
) -> None:
    """Watch the backwards through `out`, what a compiled call returned: call `differentiated` when one is
    itself recorded by autograd (torch refuses when that record is used), `kept` when another one is to
    follow."""

    def hook(gradients: Any) -> None:
        if torch.is_grad_enabled():
            differentiated()
        elif kept is not None and keeps_graph():
            kept()

    for leaf in pytree.tree_leaves(out):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.grad_fn.register_prehook(hook)
