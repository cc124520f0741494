"""Facts: what a pass provides, later passes rely on, and other passes may break.

A fact stands in `facts` of the graphs of which it holds, with the pass that provides it. After
every pass that touches the nodes on which a fact rests, its provider checks it again (`recheck`).
A fact that its provider cannot check lapses, unless the pass that ran preserves it. A pass that
requires a lapsed fact is refused, with the name of the pass that let it lapse. That a pass ran is a
fact too, of its own name, and never lapses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tlora_fx.errors import FactLapsed, PipelineError
from tlora_fx.ir.graph import GroupGraph, JobGraph
from tlora_fx.ir.verifier import owners
from tlora_fx.pipeline.passes import Pass
from tlora_fx.pipeline.text import parse_pass

Graphs = JobGraph | GroupGraph
#: Nodes, and what each computes.
Code = dict[fx.Node, tuple[Any, ...]]


@dataclass(slots=True)
class Facts:
    """The facts of one compilation.

    providers    passes by the facts that they provide
    lapsed       facts that held, by the pass that let them lapse
    """

    providers: dict[str, Pass] = field(default_factory=dict)
    lapsed: dict[str, str] = field(default_factory=dict)

    def require(self, item: Pass, graphs: Graphs) -> None:
        """Refuse a pass that needs what has lapsed; raises FactLapsed."""
        for fact in sorted(item.requires & self.lapsed.keys() - graphs.facts.keys()):
            by = self.lapsed[fact]
            raise FactLapsed(
                f"pass '{item.name}' needs '{fact}', which no longer holds",
                found=f"pass '{by}' changed nodes on which it rests",
                help=f"provide it again behind '{by}', or let '{by}' say that it "
                f'preserves = frozenset({{"{fact}"}})',
            )

    def before(self, item: Pass, graphs: Graphs) -> dict[str, Code]:
        """Code that a pass must leave alone so that facts need not be verified again."""
        self._take_over(graphs)
        return {
            fact: code_of(self._rests_on(provider, graphs))
            for fact, name in graphs.facts.items()
            if fact not in item.provides
            and not _is_name(fact, name)
            and (provider := self._provider(fact, name)) is not None
        }

    def after(self, item: Pass, graphs: Graphs, before: dict[str, Code]) -> None:
        """Settle which facts hold behind a pass; raises what a provider's `recheck` raises."""
        for fact, name in list(graphs.facts.items()):
            if fact in item.provides or _is_name(fact, name):
                continue
            provider = self._provider(fact, name)
            if provider is not None:
                if code_of(self._rests_on(provider, graphs)) == before.get(fact):
                    continue
                if provider.recheck(graphs, item.name):
                    continue
            if fact not in item.preserves:
                del graphs.facts[fact]
                self.lapsed[fact] = item.name
        self.provide(item, graphs)

    def provide(self, item: Pass, graphs: Graphs) -> None:
        """Enter what a pass provides, and that it ran."""
        for fact in (item.name, *sorted(item.provides)):
            graphs.facts[fact] = _text(item)
            self.providers[fact] = item
            self.lapsed.pop(fact, None)

    def recheck(self, graphs: Graphs, by: str) -> None:
        """Check all facts that can be checked, once, for runs that checked nothing in between."""
        self._take_over(graphs)
        for fact, name in list(graphs.facts.items()):
            provider = None if _is_name(fact, name) else self._provider(fact, name)
            if provider is not None:
                provider.recheck(graphs, by)

    def _take_over(self, graphs: Graphs) -> None:
        """What holds of the base and of every job holds of the group that they make."""
        for fact, name in held_facts(graphs).items():
            if fact not in self.lapsed:
                graphs.facts.setdefault(fact, name)

    def _provider(self, fact: str, name: str) -> Pass | None:
        """The pass behind a fact, also of graphs that were read from a file; None: not known."""
        if fact not in self.providers:
            try:
                self.providers[fact] = parse_pass(name)
            except PipelineError:
                return None
        return self.providers[fact]

    def _rests_on(self, provider: Pass, graphs: Graphs) -> Iterable[fx.Node]:
        nodes = provider.rests_on(graphs)
        if nodes is not None:
            return nodes
        return [n for owner in owners(graphs) for graph in owner.graphs() for n in graph.nodes]


def held_facts(graphs: Graphs) -> dict[str, str]:
    """Facts that hold of graphs, by the pass that provides each.

    Of a group that is not fused, also what holds of the base and of every job.
    """
    if isinstance(graphs, JobGraph) or graphs.fused:
        return graphs.facts
    shared = set(graphs.base.facts).intersection(*(job.facts for job in graphs.jobs))
    return {fact: by for fact, by in graphs.base.facts.items() if fact in shared} | graphs.facts


def _is_name(fact: str, provider: str) -> bool:
    """Whether a fact says no more than that a pass ran."""
    return fact == provider.partition("{")[0]


def code_of(nodes: Iterable[fx.Node]) -> Code:
    """Code of nodes, by which a change of one is seen."""
    return {
        node: (
            node.op,
            node.target,
            node.args,
            node.kwargs,
            *map(node.meta.get, ("jobs", "tensor")),
        )
        for node in nodes
        if not node._erased
    }


def _text(item: Pass) -> str:
    """A pass as pipelines spell it; its name where an option has no text."""
    try:
        return str(item)
    except PipelineError:
        return item.name
