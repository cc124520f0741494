"""Shrink a failing graph file: what the failure does not need is taken out, by delta debugging.

Each step knows parts of graphs: jobs, layers, sites, outputs, nodes, inputs. Of those that are
there, a smallest set is sought with which the failure stays (ddmin). Steps run in turn until none
takes out more. What no longer holds together is never judged: a candidate is read back as a text
that was edited, so that the parser and the verifier look at all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path

import torch
from torch import fx

from tlora_fx.errors import ReduceFails, TloraError
from tlora_fx.graph_file import Document, graph_text, graphs_of_text, save_document
from tlora_fx.graph_file.parser import STRANGE
from tlora_fx.inspect.wording import plural
from tlora_fx.ir.graph import GroupGraph, JobGraph, is_call, output_of
from tlora_fx.ir.lora_sites import is_lowered
from tlora_fx.ir.shapes import propagate, type_text
from tlora_fx.ir.verifier import WRITE, adapted, named_graphs, owners
from tlora_fx.rewriting import Rewriter
from tlora_fx.tools.check_command import HOLE, run_check

# Exit codes from which the command itself is wrong, and no verdict.
NO_VERDICT = 126
READ = torch.ops.tlora_fx.segment_read.default

Graphs = JobGraph | GroupGraph
#: Whether the failure is still there, in the text of a graph file.
Fails = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Step:
    """One kind of part.

    parts    those of graphs, by names that stay the same in a copy
    drop     takes some of them out of graphs
    """

    name: str
    parts: Callable[[Graphs], list[str]]
    drop: Callable[[Graphs, Set[str]], None]


@dataclass(slots=True)
class Reducer:
    """One reduction.

    fails    whether the failure is still there
    keep     told each smaller text that still fails
    say      told each step that took something out
    runs     of the check; equal texts are judged once
    """

    fails: Fails
    keep: Callable[[str], None] = lambda text: None
    say: Callable[[str], None] = lambda line: None
    runs: int = 0
    _known: dict[str, bool] = field(default_factory=dict)

    def reduce(self, text: str) -> str:
        """The smallest text that was found.

        raises    ReduceFails where the failure is not there at first; GraphFileNotReadable
        """
        graphs = graphs_of_text(text)
        if not self._judge(text):
            raise ReduceFails(
                "the failure is not there",
                expected="exit 0 of the check for the file as it is",
                help="exit with 0 where it fails, and with 1 where it does not",
            )
        self.say(f"{'at first':<10} {size_of(graphs)}")
        before = None
        while before != text:
            before = text
            for step in STEPS:
                text = self._without(step, text)
        return text

    def _without(self, step: Step, text: str) -> str:
        """The text without those of a step's parts that the failure does not need."""
        every = step.parts(graphs_of_text(text))
        smallest = text

        def still_fails(kept: list[str]) -> bool:
            nonlocal smallest
            candidate = _candidate(text, step, set(every) - set(kept))
            if candidate is None or not self._judge(candidate):
                return False
            smallest = candidate
            self.keep(candidate)
            return True

        kept = needed(every, still_fails)
        if smallest != text:
            told = f"{len(every)} → {len(kept)}"
            self.say(f"{step.name:<10} {told:<10} {size_of(graphs_of_text(smallest))}")
        return smallest

    def _judge(self, text: str) -> bool:
        if text not in self._known:
            self.runs += 1
            self._known[text] = self.fails(text)
        return self._known[text]


def needed(parts: list[str], still_fails: Callable[[list[str]], bool]) -> list[str]:
    """Parts none of which can be left out alone, such that it still fails (Zeller's ddmin).

    still_fails   whether it does with these parts only
    """
    if not parts or still_fails([]):
        return []
    pieces = 2
    while len(parts) > 1:
        size = ceil(len(parts) / pieces)
        for start in range(0, len(parts), size):
            rest = parts[:start] + parts[start + size :]
            if still_fails(rest):
                parts, pieces = rest, max(pieces - 1, 2)
                break
        else:
            if size == 1:
                break
            pieces = min(2 * pieces, len(parts))
    return parts


def _candidate(text: str, step: Step, dropped: Set[str]) -> str | None:
    """The text without these parts; None where it would not be valid, or is the same."""
    graphs = graphs_of_text(text)
    try:
        step.drop(graphs, dropped)
        _tidy(graphs)
        written = graph_text(graphs)
        lines = written.splitlines(keepends=True)
        graphs_of_text("".join([lines[0], *lines[2:]]))  # without the fingerprint: verified
    except (TloraError, *STRANGE):
        return None
    return None if written == text else written


def _tidy(graphs: Graphs) -> None:
    """Erase what nobody reads, and what is then of no use; give values anew."""
    for owner in owners(graphs):
        for graph in owner.graphs():
            Rewriter(graph).erase_dead()
        called = {str(node.target) for node in owner.root.nodes if node.op == "call_module"}
        for name, block in list(owner.blocks.items()):
            block.instances = tuple(layer for layer in block.instances if layer in called)
            if not block.instances:
                del owner.blocks[name]
        if isinstance(owner, JobGraph) and owner.plan is not None:
            layers = tuple(layer for layer in owner.plan.layers if layer in called)
            firsts = {layer: owner.plan.representative[layer] for layer in layers}
            first_left = {first: layer for layer, first in reversed(firsts.items())}
            stands = {layer: first_left[first] for layer, first in firsts.items()}
            owner.plan = replace(owner.plan, layers=layers, representative=stands)
        stored = {node.target for graph in owner.graphs() for node in graph.nodes}
        for name in owner.constants.keys() - stored:  # in place: jobs may share them
            del owner.constants[name]
        for block in owner.blocks.values():
            propagate(block.graph)
        propagate(owner.root, owner.blocks)
    whole = adapted(graphs)
    for job in graphs.jobs if isinstance(graphs, GroupGraph) else [graphs]:
        job.sites = {p: site for p, site in job.sites.items() if (job.name, p) in whole}


def size_of(graphs: Graphs) -> str:
    """How large graphs are: "2 jobs, 3 layers, 9 sites, 612 nodes"."""
    jobs = graphs.jobs if isinstance(graphs, GroupGraph) else [graphs]
    nodes = sum(len(graph.nodes) for owner in owners(graphs) for graph in owner.graphs())
    counts = {
        "job": len(jobs),
        "layer": len({name.partition(":")[2] for name in _layers(graphs)}),
        "site": sum(len(job.sites) for job in jobs),
        "node": nodes,
    }
    return ", ".join(plural(number, noun) for noun, number in counts.items())


# Steps: which parts there are, and how they are taken out.


def _nodes(graphs: Graphs) -> Iterator[tuple[str, fx.Node]]:
    """All nodes with names that no two have: "1:layers_0_2:q_proj"."""
    for index, owner in enumerate(owners(graphs)):
        for name, graph in named_graphs(owner):
            for node in list(graph.nodes):
                yield f"{index}:{name}:{node.name}", node


def _stand_in(node: fx.Node) -> fx.Node | None:
    """The nearest value behind a node that has its type."""
    wanted = node.meta.get("val")
    if not isinstance(wanted, torch.Tensor):
        return None
    left, seen = deque(node.all_input_nodes), {node}
    while left:
        behind = left.popleft()
        if behind not in seen:
            seen.add(behind)
            value = behind.meta.get("val")
            if isinstance(value, torch.Tensor) and type_text(value) == type_text(wanted):
                return behind
            left.extend(behind.all_input_nodes)
    return None


def _bypass(node: fx.Node) -> None:
    """Let readers of a node read a value behind it, where there is one of its type."""
    other = _stand_in(node)
    if other is not None:
        node.replace_all_uses_with(other)
        node.graph.erase_node(node)


def _earlier(graphs: Graphs) -> list[str]:
    """The graphs that a group was fused of."""
    return ["earlier"] if isinstance(graphs, GroupGraph) and graphs.fused else []


def _drop_earlier(graphs: Graphs, dropped: Set[str]) -> None:
    """Let the fused graph stand for them."""
    for job in (graphs.base, *graphs.jobs) if isinstance(graphs, GroupGraph) and dropped else ():
        job.root, job.blocks, job.plan = graphs.root, graphs.blocks, None
        job.constants, job.repeated = graphs.constants, frozenset()


def _jobs(graphs: Graphs) -> list[str]:
    """Names of jobs, but of a lone one; none of operators that serve several jobs in one."""
    if not isinstance(graphs, GroupGraph) or len(graphs.jobs) < 2:
        return []
    lowered = any(is_lowered(node) for graph in graphs.graphs() for node in graph.nodes)
    return [] if lowered else graphs.job_names


def _drop_jobs(graphs: Graphs, dropped: Set[str]) -> None:
    if not isinstance(graphs, GroupGraph):
        return
    kept = [name for name in graphs.job_names if name not in dropped] or graphs.job_names[:1]
    if graphs.fused:
        _leave_jobs(graphs, kept)
    graphs.jobs = [job for job in graphs.jobs if job.name in kept]
    if graphs.fused:
        return
    for owner in owners(graphs):  # equal jobs share a graph, which names the first of them
        for node in (node for graph in owner.graphs() for node in graph.nodes):
            if node.meta.get("jobs") and isinstance(owner, JobGraph):
                node.meta["jobs"] = (owner.name,)


def _leave_jobs(group: GroupGraph, kept: list[str]) -> None:
    """Take the branches of other jobs out of a fused graph, and number those that stay anew."""
    names = group.job_names
    for _, node in _nodes(group):
        if set(node.meta.get("jobs") or ()).isdisjoint(kept):
            _leave_branch(node)
    for _, node in _nodes(group):
        for target, place in ((READ, 2), (WRITE, 3)):
            job = node.args[place] if is_call(node, target) else None
            if isinstance(job, int) and names[job] in kept:
                node.update_arg(place, kept.index(names[job]))
        if node.meta.get("jobs"):
            node.meta["jobs"] = tuple(job for job in node.meta["jobs"] if job in kept)
        node.meta.pop("branches", None)


def _layers(graphs: Graphs) -> list[str]:
    """Calls of layers."""
    return [f"{key}={n.target}" for key, n in _nodes(graphs) if n.op == "call_module"]


def _drop_layers(graphs: Graphs, dropped: Set[str]) -> None:
    for key, node in _nodes(graphs):
        if f"{key}={node.target}" in dropped:
            _bypass(node)


def _leave_branch(node: fx.Node) -> None:
    """Read what the base computes, where a node adds a job's branch to it."""
    if node.meta.get("part") == "sum" or is_call(node, WRITE):
        _bypass(node)


def _site_of(key: str, node: fx.Node) -> str:
    """Name of the site whose branch a node adds."""
    adds = node.meta.get("part") == "sum" or is_call(node, WRITE)
    site = node.meta.get("site")
    return f"{key.rpartition(':')[0]}:{site}:{node.meta.get('jobs')}" if adds and site else ""


def _sites(graphs: Graphs) -> list[str]:
    """Adapters that stand as branches, of each job in each graph."""
    named = (_site_of(key, node) for key, node in _nodes(graphs))
    return list(dict.fromkeys(name for name in named if name))


def _drop_sites(graphs: Graphs, dropped: Set[str]) -> None:
    for key, node in _nodes(graphs):
        if _site_of(key, node) in dropped:
            _leave_branch(node)


def _outputs(graphs: Graphs) -> list[str]:
    """Values that a root returns, where they are several."""
    found = []
    for index, owner in enumerate(owners(graphs)):
        returned = output_of(owner.root).args[0]
        if isinstance(returned, (tuple, list)) and len(returned) > 1:
            found += [f"{index}:{number}" for number in range(len(returned))]
    return found


def _drop_outputs(graphs: Graphs, dropped: Set[str]) -> None:
    for index, owner in enumerate(owners(graphs)):
        output = output_of(owner.root)
        returned = output.args[0]
        if isinstance(returned, (tuple, list)):
            left = [item for n, item in enumerate(returned) if f"{index}:{n}" not in dropped]
            output.args = (type(returned)(left),)


def _calls(graphs: Graphs) -> list[str]:
    """Calls in whose place a value behind them may be read."""
    calls = ((key, node) for key, node in _nodes(graphs) if node.op == "call_function")
    return [key for key, node in calls if _stand_in(node) is not None]


def _drop_calls(graphs: Graphs, dropped: Set[str]) -> None:
    for key, node in _nodes(graphs):
        if key in dropped:
            _bypass(node)


def _inputs(graphs: Graphs) -> list[str]:
    """Inputs of roots and blocks that nobody reads."""
    return [key for key, n in _nodes(graphs) if n.op == "placeholder" and not n.users]


def _drop_inputs(graphs: Graphs, dropped: Set[str]) -> None:
    for index, owner in enumerate(owners(graphs)):
        for name, graph in named_graphs(owner):
            inputs = [node for node in graph.nodes if node.op == "placeholder"]
            kept = [f"{index}:{name}:{node.name}" not in dropped for node in inputs]
            for call in owner.root.nodes if name else ():
                if call.op == "call_module" and call.target in owner.blocks[name].instances:
                    call.args = tuple(a for a, keep in zip(call.args, kept, strict=True) if keep)
            for node in (node for node, keep in zip(inputs, kept, strict=True) if not keep):
                graph.erase_node(node)


STEPS = (
    Step("earlier", _earlier, _drop_earlier),
    Step("jobs", _jobs, _drop_jobs),
    Step("layers", _layers, _drop_layers),
    Step("sites", _sites, _drop_sites),
    Step("outputs", _outputs, _drop_outputs),
    Step("nodes", _calls, _drop_calls),
    Step("inputs", _inputs, _drop_inputs),
)


@dataclass(frozen=True, slots=True)
class Command:
    """The failure by a command for the shell, which exits with 0 where it is still there.

    command    {} stands for the graph file, which is the last argument where there is none
    file       that is written for it
    """

    command: str
    file: Path

    def __call__(self, text: str) -> bool:
        """Whether it is there; raises ReduceFails where the command cannot be run."""
        save_document(Document(text), self.file)
        holed = self.command if HOLE in self.command else f"{self.command} {HOLE}"
        command, code, output = run_check(holed, self.file)
        if code < 0 or code >= NO_VERDICT:
            raise ReduceFails(
                "the check cannot be run",
                command=command,
                found=f"exit {code}",
                output=output[-2000:].rstrip() or None,
                help="exit with 0 where the failure is still there, with 1 to 125 where it is not",
            )
        return code == 0
