"""Verify graphs of a text that was edited: nothing in it is taken on trust."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from tlora_fx.errors import GraphFileNotReadable, GraphInvalid, TagsBroken
from tlora_fx.ir.graph import Block, GroupGraph, JobGraph
from tlora_fx.ir.shapes import propagate, type_text
from tlora_fx.ir.verifier import adapted, check_tags, owners

_RUN = ("call_function", "call_module")


def verify_values(
    graph: fx.Graph, blocks: dict[str, Block], at: Callable[[fx.Node], object]
) -> None:
    """Run all operators on the values that stand in the text; theirs must be what stands there.

    blocks    whose layers the graph calls
    at        is called with the node that is looked at
    raises    GraphFileNotReadable
    """
    stated = {n: type_text(n.meta["val"]) for n in graph.nodes if n.op in _RUN and "val" in n.meta}
    last: list[fx.Node] = []

    def look(node: fx.Node) -> None:
        for before in last:
            _require_type(before, stated.get(before), at)
        last[:] = [node]
        at(node)

    try:
        propagate(graph, blocks, look)
    except GraphInvalid as error:
        raise GraphFileNotReadable(
            f"in the graph file {error.what}",
            help="correct the operator, or what it is given",
            **error.facts,
        ) from error


def _require_type(node: fx.Node, said: str | None, at: Callable[[fx.Node], object]) -> None:
    if said is None or said == (found := type_text(node.meta["val"])):
        return
    at(node)
    raise GraphFileNotReadable(
        "the graph file says another type of a value than its operator gives",
        node=node.name,
        expected=found,
        found=said,
        help="correct the line, or leave the type out: NAME = OPERATOR(...)",
    )


def verify_tags(graphs: JobGraph | GroupGraph, at: Callable[[str], object]) -> None:
    """Check tags, and that all sites of jobs have their adapters.

    at        is called with the name of the node that is looked at: "q_proj", "block.q_proj"
    raises    GraphFileNotReadable
    """
    try:
        check_tags(graphs)
    except TagsBroken as error:
        at(str(error.facts.get("node")))
        raise GraphFileNotReadable(
            "in the graph file a node's tags do not hold",
            help="correct what stands behind @; docs/graph-files.md says what tags there are",
            **error.facts,
        ) from error
    every = (graph for owner in owners(graphs) for graph in owner.graphs())
    if not any("site" in node.meta for graph in every for node in graph.nodes):
        return
    whole = adapted(graphs)
    for job in graphs.jobs if isinstance(graphs, GroupGraph) else [graphs]:
        lost = [path for path in job.sites if (job.name, path) not in whole]
        if lost:
            raise GraphFileNotReadable(
                "the graph file lacks adapters of a job",
                job=job.name,
                expected=f"nodes of an adapter at {lost[0]} that reach what the graph returns",
                help="write the nodes, or take the site out of the job's lines",
            )
