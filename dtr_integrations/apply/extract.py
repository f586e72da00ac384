"""Split a joint graph exactly as a schedule says: no solver runs here.

`extract` writes the schedule's recomputations into the joint graph as nodes of their own, each just before
the backward op that the schedule names, points the backward at them, and lets torch cut the graph at the
saved values. Unlike torch's tags (see `tags.py`) it can compute a value twice and it fixes the order.

Random ops: Inductor draws seeds once and each random op is a pure function of its seed, so a copy gives the
same bits as long as the seeds are saved; ops that draw from the generator themselves are never replayable
(`capture.joint`). Those that do run in the forward in the order and layout that the default's code has.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet

from .._compat import extracted, partitioners, preserve_node_ordering
from ..core.plan import GraphSchedule, Recompute
from ..errors import PlanMismatch

# Where torch pinned the original (a recompute copy runs in the backward whatever the original's tag says),
# and tags that would make torch's own solver act on the copy.
_NOT_COPIED = ("partitioner_tag", "recompute", "ac_graph_id", "has_backward_hook")


def extract(
    joint: fx.GraphModule, schedule: GraphSchedule, num_forward_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """(forward, backward) of the canonical joint graph `joint` under `schedule`. Changes `joint`.

    Raises `PlanMismatch` when the schedule reads a value that is neither saved nor computed before.
    """
    nodes = [node for node in joint.graph.nodes if node.op != "output"]
    backward_ops = _backward_ops(nodes)
    forward_names = {node.name for node in nodes if node not in backward_ops and node.op == "call_function"}
    _insert_copies(joint.graph, nodes, schedule, num_forward_outputs)
    joint.graph.lint()
    saved = [nodes[i] for i in schedule.saved]
    inputs = [node for node in nodes if node.op == "placeholder" and not partitioners._is_tangent(node)]
    forward, backward = extracted(joint, inputs + saved, num_forward_outputs)
    _drop_leftovers(backward, forward_names)
    _compute_early(forward, num_forward_outputs)
    forward, backward = partitioners.raise_getitems(forward), partitioners.raise_getitems(backward)
    forward = partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    backward = partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True)
    _draw_alike(forward, {nodes[draw.op].name: draw.strides for draw in schedule.draws})
    return forward, backward


def _insert_copies(
    graph: fx.Graph, nodes: list[fx.Node], schedule: GraphSchedule, num_forward_outputs: int
) -> None:
    position = {node: i for i, node in enumerate(nodes)}
    latest: dict[int, fx.Node] = {}
    output = next(iter(graph.find_nodes(op="output")))
    due: dict[int, list[Recompute]] = defaultdict(list)
    for step in schedule.recompute:
        due[step.before].append(step)

    def current(node: fx.Node) -> fx.Node:
        """The node that a backward op scheduled now reads in the place of `node`."""
        return latest.get(position.get(node, -1), node)

    for before in sorted(due):
        if not 0 <= before <= len(nodes):
            raise PlanMismatch(
                f"the schedule recomputes before op {before}, but the graph has {len(nodes)} ops"
            )
    backward = _backward_ops(nodes)
    for at in [*(i for i, node in enumerate(nodes) if node in backward), len(nodes)]:
        anchor = nodes[at] if at < len(nodes) else output
        for step in due.pop(at, ()):
            original = nodes[step.value]
            with graph.inserting_before(anchor):
                copied = graph.node_copy(original, current)
            copied.meta = copy.copy(original.meta)
            for key in _NOT_COPIED:
                copied.meta.pop(key, None)
            latest[step.value] = copied
        if at < len(nodes):
            _reads(anchor, current)
        else:
            _output_reads(output, current, num_forward_outputs)
    if due:
        raise PlanMismatch(
            f"the schedule recomputes before ops {sorted(due)}, which do not belong to the backward"
        )


def _drop_leftovers(backward: fx.GraphModule, forward_names: set[str]) -> None:
    """Erase originals of the forward from the backward graph.

    Extraction copies every op whose inputs are there and trusts dead-code elimination with the rest, but that
    keeps random ops even unused: the backward would draw from the generator, and the next step's numbers
    would differ from eager's. All that the backward reads by right is a copy of ours or a placeholder.
    """
    for node in reversed(list(backward.graph.nodes)):
        if node.op == "call_function" and node.name in forward_names and not node.users:
            backward.graph.erase_node(node)
    backward.recompile()


def _compute_early(forward: fx.GraphModule, num_forward_outputs: int) -> None:
    """Move ops that serve the backward alone (a saved mask, a slope) right behind their last input.

    They stand at the joint graph's end, where Inductor would compute them all together and hold their inputs
    until then.
    """
    nodes = list(forward.graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    outputs = pytree.tree_leaves(nodes[-1].args)
    needed: set[fx.Node] = set()
    todo = [leaf for leaf in outputs[:num_forward_outputs] if isinstance(leaf, fx.Node)]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    # (position of the last needed op that it waits for, own position): inputs always sort before their
    # readers.
    key: dict[fx.Node, tuple[int, int]] = {}
    for node in nodes:
        own = index[node]
        waits = [key[n][0] for n in node.all_input_nodes if n.op != "placeholder"]
        key[node] = (
            (max(waits), own + 1) if node not in needed and node.op == "call_function" and waits else (own, 0)
        )
    last = nodes[0]
    for node in sorted(nodes, key=key.__getitem__):
        if node is not last and node is not last.next:
            last.append(node)
        last = node
    forward.graph.lint()
    forward.recompile()


def _draw_alike(forward: fx.GraphModule, draws: dict[str, tuple[int, ...]]) -> None:
    """Tie the ops that draw from a generator to the order and the strides (none: left alone) of `draws`.

    The compiler would choose both anew, and another place in the stream of numbers is another mask.
    """
    by_name = {node.name: node for node in forward.graph.nodes}
    for name, strides in draws.items():
        if len(strides) > 1:
            drawn = by_name[name]
            # What is ordered is lowered as a graph of its own, whose output gets the strides that stand here.
            drawn.meta["val"] = drawn.meta["val"].as_strided(drawn.meta["val"].shape, strides)
            with forward.graph.inserting_after(drawn):
                laid_out = forward.graph.call_function(
                    torch.ops.prims.inductor_force_stride_order.default, (drawn, list(strides))
                )
            laid_out.meta = {"val": drawn.meta["val"]}
            drawn.replace_all_uses_with(laid_out, delete_user_cb=lambda user, new=laid_out: user is not new)
    _in_order(forward, [by_name[name] for name in draws])
    forward.recompile()


def _in_order(forward: fx.GraphModule, draws: list[fx.Node]) -> None:
    waits_for = {after: before for before, after in pairwise(draws)}
    if not waits_for:
        return
    order: dict[fx.Node, None] = {}
    for node in forward.graph.nodes:
        todo = [node]
        while todo:
            first = todo[-1]
            inputs = [*first.all_input_nodes, *([waits_for[first]] if first in waits_for else [])]
            if missing := [n for n in inputs if n not in order]:
                todo += missing
            else:
                order[todo.pop()] = None
    for before, after in pairwise(order):
        if before.next is not after:
            before.append(after)
    preserve_node_ordering(
        forward.graph, {after: OrderedSet([before]) for after, before in waits_for.items()}
    )
    forward.graph.lint()


def _backward_ops(nodes: list[fx.Node]) -> set[fx.Node]:
    """Ops that run in the backward only because they depend on a tangent or torch pinned them there."""
    out: set[fx.Node] = set()
    for node in nodes:
        if node.op != "placeholder" and (
            partitioners._must_be_in_backward(node)
            or any(n in out or partitioners._is_tangent(n) for n in node.all_input_nodes)
        ):
            out.add(node)
    return out


def _reads(node: fx.Node, current: Any) -> None:
    node.args = pytree.tree_map_only(fx.Node, current, node.args)
    node.kwargs = pytree.tree_map_only(fx.Node, current, dict(node.kwargs))


def _output_reads(output: fx.Node, current: Any, num_forward_outputs: int) -> None:
    """The backward's outputs read copies; the forward's outputs stay the originals."""
    leaves, spec = pytree.tree_flatten(output.args)
    mapped = [
        current(leaf) if i >= num_forward_outputs and isinstance(leaf, fx.Node) else leaf
        for i, leaf in enumerate(leaves)
    ]
    output.args = pytree.tree_unflatten(mapped, spec)
