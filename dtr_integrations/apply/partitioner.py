"""The `CustomPartitionerFn` that applies a plan."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._backend import name_graph
from .._compat import CustomPartitionerFn, canonical, get_hash_for_files, partitioners
from .._kernel_groups import mark_planned
from . import extract, registry, tags

# Inductor keeps a dead buffer for a later one of the same size as long as its own estimate of the peak
# allows, which is too high for a planned graph: GPT's lowest plan 121.2 MB with reuse, 115.1 MB without.
_PLANNED_OPTIONS = {"allow_buffer_reuse": False}


def planned_options(options: Mapping[str, Any], *, is_default: bool) -> dict[str, Any]:
    """Inductor's options for a plan: the user's, which win, over ours; a plan that is torch's default gets
    only the user's."""
    return dict(options) if is_default else {**_PLANNED_OPTIONS, **options}


class PlanPartitioner(CustomPartitionerFn):  # type: ignore[misc, unused-ignore]
    """Splits each joint graph as the plan registered under `plan_id` says.

    `digest` is the plan's; with the code of this package it makes the `uuid`, which is in torch's cache key:
    another plan or budget never meets this one's cached code. A plan that decides nothing for a graph leaves
    it to torch's own partitioner, called exactly as torch would: the default graphs, node by node.
    """

    def __init__(self, plan_id: str, digest: str) -> None:
        self.plan_id = plan_id
        self.digest = digest

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        entry = registry.lookup(self.plan_id)
        if entry is not None:
            joint = canonical(gm)
            outputs = kwargs["num_fwd_outputs"]
            schedule = entry.decide(joint, outputs, kwargs.get("static_lifetime_input_indices"))
            if schedule is not None and not schedule.default:
                if entry.mode == "tags":
                    parts = tags.partition_by_tags(joint, joint_inputs, schedule, **kwargs)
                else:
                    parts = extract.extract(joint, schedule, outputs)
                mark_planned(*parts)
                name_graph(schedule.fingerprint, *parts)
                return parts
            parts = partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
            if schedule is not None:
                name_graph(schedule.fingerprint, *parts)
            return parts
        return partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        here = Path(__file__).parent
        files = ("extract.py", "tags.py", "partitioner.py", "../_kernel_groups.py")
        code = get_hash_for_files(tuple(str(here / name) for name in files))
        return hashlib.sha256(code + self.digest.encode()).hexdigest()
