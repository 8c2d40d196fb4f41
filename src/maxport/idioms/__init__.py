"""Recognise what a traced model does; each idiom is proposed by dataflow and proven by numbers."""

from __future__ import annotations

from maxport.idioms import activations, attention, dense, norms, positions, rotary, wiring
from maxport.idioms.base import Finding, Recogniser, Values
from maxport.ir import Graph

#: In this order: what is recognised early bounds the search of what comes later.
PASSES = (positions, dense, norms, activations, attention, rotary, wiring)

__all__ = ["PASSES", "Finding", "Values", "coverage", "recognise"]


def recognise(graph: Graph, values: Values) -> list[Finding]:
    """Replace every proven idiom in `graph` by one node, in place.

    Args:
        graph: The traced model; its nodes' names are those that `values` can run.
        values: The traced model in float64.

    Returns:
        What was accepted, and what nearly matched and why it was refused.
    """
    recogniser = Recogniser(graph, values)
    for idiom in PASSES:
        idiom.match(recogniser)
    graph.sweep()
    return recogniser.findings


def coverage(graph: Graph) -> tuple[int, int]:
    """(traced nodes inside proven idioms, traced nodes in all)."""
    plain = sum(not n.proof for n in graph.nodes if n.op not in ("input", "mask"))
    return graph.traced - plain, graph.traced
