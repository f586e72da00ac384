"""The second seed's own route, kept as the baseline: tag the nodes and let torch's min-cut run again.

Each saved value gets MUST_SAVE, every other forward op MUST_RECOMPUTE, all under one `ac_graph_id` (with
several, torch's `cleanup_recompute_tags` turns tags at the borders into saves). Seeds are saved: tagging
`inductor_seeds` itself MUST_RECOMPUTE crashes on CPU, and recomputing it would draw other numbers. A value
computed twice, or an order, cannot be expressed.
"""

from __future__ import annotations

import operator
from typing import Any
from unittest import mock

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .._compat import partitioners
from ..core.graph import JointGraph, OpKind, Phase
from ..core.plan import GraphSchedule


def expressible(graph: JointGraph, schedule: GraphSchedule) -> bool:
    """Whether tags can say what the schedule says.

    Torch heeds MUST_SAVE only on ops of the forward that make a tensor: not on views (save what they view
    instead) and not on ops that serve the backward alone. The parts of a tuple op are saved or recomputed
    together, and each value is recomputed at most once.
    """
    recomputed = {step.value for step in schedule.recompute}
    for index in schedule.saved:
        op = graph.ops[index]
        if _is_part(graph, index):
            if recomputed & {op.inputs[0], *graph.users[op.inputs[0]]}:
                return False
        elif op.phase is not Phase.FORWARD or op.kind is OpKind.VIEW:
            return False
    return all(step.copy == 0 for step in schedule.recompute)


def _is_part(graph: JointGraph, index: int) -> bool:
    """Whether the op takes one tensor out of a tuple op's result."""
    return "getitem" in graph.ops[index].target and len(graph.ops[graph.ops[index].inputs[0]].storages) > 1


def partition_by_tags(
    joint: fx.GraphModule, joint_inputs: Any, schedule: GraphSchedule, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """(forward, backward) of the canonical joint graph by tags. Changes `joint`; `kwargs` as torch's
    partitioner gets them. What is not `expressible` comes out as torch sees fit."""
    nodes = [node for node in joint.graph.nodes if node.op != "output"]
    saved = {nodes[i] for i in schedule.saved}
    # A tuple op and its parts are tagged alike, or the partition fails.
    saved |= {n.args[0] for n in saved if n.target is operator.getitem}
    backward = {n for n in nodes if partitioners._is_tangent(n)}
    for node in nodes:
        if any(n in backward for n in node.all_input_nodes):
            backward.add(node)
        if node in backward or node.op == "placeholder":
            continue
        is_seed = "inductor_seed" in str(node.target) and "lookup" not in str(node.target)
        part_of_saved = node.target is operator.getitem and node.args[0] in saved
        keep = node in saved or is_seed or part_of_saved
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = 0
    # What is tagged MUST_RECOMPUTE is replayable as it is: no generator state has to be saved for it. Torch
    # would do so for attention kernels, which carry the random tag for a dropout that is 0.
    with mock.patch.object(partitioners, "has_recomputable_rng_ops", return_value=False):
        return partitioners.min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
