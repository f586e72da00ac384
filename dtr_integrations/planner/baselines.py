"""Save sets that others would choose: torch's min-cut at several strictnesses, everything, nothing.

Source: `torch/_functorch/partitioners.py` (`min_cut_rematerialization_partition`), whose save sets capture
writes down.

What it does not do: torch's own budget API (`activation_memory_budget`) is not among them; its knapsack knows
neither the true peak nor when a value is needed.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..core.graph import JointGraph, Phase
from .problem import Problem

__all__ = ["everything", "starts"]


def everything(graph: JointGraph) -> tuple[int, ...]:
    """Every forward value that the backward reads directly: roughly what eager autograd keeps."""
    read = {i for op in graph.ops if op.phase is Phase.BACKWARD for i in op.inputs}
    return tuple(i for i in sorted(read) if graph.ops[i].phase is Phase.FORWARD and graph.ops[i].saveable)


def starts(problem: Problem) -> Iterator[list[tuple[int, ...]]]:
    """Save sets for the whole step: the default first."""
    graphs = problem.step.graphs
    yield [graph.default_saved for graph in graphs]
    for name in dict.fromkeys(name for graph in graphs for name in graph.save_sets):
        yield [graph.save_sets.get(name, graph.default_saved) for graph in graphs]
    yield [everything(graph) for graph in graphs]
    yield [() for _ in graphs]
