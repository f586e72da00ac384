"""The second seed's own route, kept as the baseline: tag the nodes and let torch's min-cut run again.

Each saved value gets MUST_SAVE, every other forward op MUST_RECOMPUTE, all under one `ac_graph_id` (with several, torch's
`cleanup_recompute_tags` turns tags at the borders into saves). Seeds are saved: tagging `inductor_seeds` itself
MUST_RECOMPUTE crashes on CPU, and recomputing it would draw other numbers. A value computed twice, or an order, cannot be
expressed.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .._compat import partitioners
from ..core.plan import GraphSchedule


def expressible(schedule: GraphSchedule) -> bool:
    """Whether tags can say what the schedule says: every value recomputed at most once."""
    return all(step.copy == 0 for step in schedule.recompute)


def partition_by_tags(
    joint: fx.GraphModule, joint_inputs: Any, schedule: GraphSchedule, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """(forward, backward) of the canonical joint graph by tags. Changes `joint`; `kwargs` as torch's partitioner gets them."""
    saved = set(schedule.saved)
    nodes = [node for node in joint.graph.nodes if node.op != "output"]
    backward = {n for n in nodes if partitioners._is_tangent(n)}
    for index, node in enumerate(nodes):
        if any(n in backward for n in node.all_input_nodes):
            backward.add(node)
        if node in backward or node.op == "placeholder":
            continue
        keep = index in saved or ("inductor_seed" in str(node.target) and "lookup" not in str(node.target))
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = 0
    return partitioners.min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
