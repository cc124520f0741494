"""What the patterns of lower-adapters met, kept while the passes run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from tlora_fx.fingerprint import named_graphs
from tlora_fx.ir.graph import GroupGraph
from tlora_fx.passes.lora_pattern import FROZEN, match_nodes
from tlora_fx.passes.lower_adapters import LowerAdapters, chains
from tlora_fx.pipeline import Event, Instrument, Pipeline
from tlora_fx.rewriting import Match, Miss, nearest_match
from tlora_fx.tools.explain import Attempt


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a branch stands: the block ("" for the root), the site inside it, whose it is."""

    block: str
    site: str
    job: str


class Record(Instrument):
    """Tries the patterns itself, just before lower-adapters does.

    attempts   what was tried on each branch
    """

    def __init__(self) -> None:
        self.attempts: dict[Branch, tuple[Attempt, ...]] = {}

    def started(self, pipeline: Pipeline) -> None:
        """Compiling begins anew: what was seen is not what will be."""
        self.attempts = {}

    def before(self, event: Event) -> None:
        """Look at every branch that lower-adapters is about to look at."""
        if not isinstance(event.item, LowerAdapters) or not isinstance(event.graphs, GroupGraph):
            return
        for block, graph in named_graphs(event.graphs):
            for anchor, writes in chains(graph).items():
                frozen = nearest_match(list(FROZEN.values()), anchor)
                first = _attempt("a frozen linear", frozen, block)
                for write in writes:
                    place = Branch(block, str(write.meta["site"]), write.meta["jobs"][0])
                    found = self.attempts.get(place, ())
                    self.attempts[place] = (*found, first, *_second(write, anchor, frozen, block))


def _second(
    write: fx.Node, anchor: fx.Node, frozen: Match | Miss, block: str
) -> tuple[Attempt, ...]:
    """The branch is looked at only where the module is a frozen linear."""
    if isinstance(frozen, Miss):
        return ()
    found = match_nodes(write, anchor, frozen["x"])
    return (_attempt("a plain LoRA branch", found, block),)


def _attempt(what: str, found: Match | Miss, block: str) -> Attempt:
    held = tuple(dict.fromkeys(found.held))
    if isinstance(found, Match):
        return Attempt(what, True, str(found.pattern), held)
    return Attempt(
        what,
        False,
        str(found.pattern),
        held,
        found.failed,
        found.why,
        "" if found.node is None else node_text(found.node, block),
        "" if found.node is None else _source_of(found.node),
    )


def node_text(node: Any, block: str) -> str:
    """A node as people find it in a dump: "layers_0_3.linear_4 = aten.linear.default"."""
    return f"{f'{block}.' if block else ''}{node.name} = {node.target}"


def _source_of(node: fx.Node) -> str:
    """The line of model code; a node of ours has that of the nearest node that it reads."""
    stack, seen = [node], {node}
    while stack:
        here = stack.pop(0)
        if here.meta.get("source"):
            return str(here.meta["source"])
        stack.extend(n for n in here.all_input_nodes if n not in seen)
        seen.update(here.all_input_nodes)
    return ""
