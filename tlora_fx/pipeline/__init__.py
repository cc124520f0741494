"""Passes, and the pipelines that run them.

A pass is a frozen dataclass whose fields are its options (passes.py). It is known by its name
(registry.py), stands in a pipeline that has a text form (text.py), and runs while instruments watch
(instrument.py). After every pass shapes are propagated and provenance is recorded. Unless checks
are off, graphs are linted, values that survive keep their type, tags hold, and what the pass says
of its change is compared with the graphs' fingerprint, and facts that it touched are checked again
(facts.py).
"""

from __future__ import annotations

import inspect
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
from torch import fx

from tlora_fx.config.plugins import Plugin
from tlora_fx.errors import GraphInvalid, PassFailed, PassMisreports, TloraError
from tlora_fx.ir.graph import TRACE, GroupGraph, JobGraph, record
from tlora_fx.ir.modules import owning_modules
from tlora_fx.ir.names import name_nodes
from tlora_fx.ir.shapes import propagate, remember_runs, type_text
from tlora_fx.ir.verifier import (
    Fingerprint,
    adapted,
    check_tags,
    check_tensors,
    fingerprint,
    named_graphs,
    owners,
)
from tlora_fx.pipeline.facts import Facts
from tlora_fx.pipeline.instrument import Change, Done, Event, Instrument
from tlora_fx.pipeline.joint import JointPass
from tlora_fx.pipeline.passes import GroupPass, JobPass, Numerics, Pass, PassOption, options_of
from tlora_fx.pipeline.registry import (
    REGISTRY,
    find_pass,
    load_extension,
    pass_names,
    plugin_passes,
    register,
)
from tlora_fx.pipeline.rewrites import (
    Rewrites,
    RuleStatistics,
    count,
    counting,
    rewrite_allowed,
    watched_rules,
)
from tlora_fx.pipeline.text import Pipeline, checked, parse_pass, parse_pipeline

__all__ = [
    "REGISTRY",
    "Change",
    "Done",
    "Event",
    "GroupPass",
    "Halted",
    "Instrument",
    "JobPass",
    "JointPass",
    "Numerics",
    "Pass",
    "PassOption",
    "Pipeline",
    "Plugin",
    "Rewrites",
    "RuleStatistics",
    "Runner",
    "Verify",
    "checked",
    "count",
    "counting",
    "find_pass",
    "load_extension",
    "options_of",
    "parse_pass",
    "parse_pipeline",
    "pass_names",
    "plugin_passes",
    "register",
    "rewrite_allowed",
    "watched_rules",
]


#: Where our own code lies, and the folder of libraries.
OURS = Path(__file__).parents[1]
INSTALLED = "site-packages"
GRAPH_MODULE = inspect.getfile(fx.GraphModule)
Verify = Literal["none", "structure", "numerics"]
Values = dict[fx.Node, torch.Tensor]


class Halted(Exception):
    """The run reached the event at which it was to halt; `event.graphs` are as they were before."""

    def __init__(self, event: Event) -> None:
        super().__init__(str(event))
        self.event = event


class Runner:
    """Runs one pipeline over the graphs of one compilation.

    verify     "none" propagates shapes and checks nothing else; "numerics" checks the structure
               here, and leaves the numbers to an instrument
    limits     rewrites allowed by the place of a pass in the pipeline (bisect)
    held       facts of graphs that other passes ran on before
    halt_at    number of the event, counted over the whole compilation, before which to halt
    failed     the event at which the last error came, and its number
    """

    def __init__(
        self,
        pipeline: Pipeline,
        instruments: Sequence[Instrument] = (),
        verify: Verify = "structure",
        *,
        limits: dict[int, int] | None = None,
        halt_at: int | None = None,
        held: Collection[str] = (),
    ) -> None:
        self.pipeline = checked(pipeline.passes, held)
        self.instruments = list(instruments)
        self.verify = verify
        self.limits = limits or {}
        self.halt_at = halt_at
        self.events = 0
        self.rewrites: dict[int, Rewrites] = {}
        self.failed: tuple[int, Event] | None = None
        self._seen: tuple[object, Fingerprint] | None = None
        self._adapted: tuple[object, set[tuple[str, str]]] | None = None
        self._facts = Facts()

    def start(self) -> None:
        """Begin a compilation, or begin again in another form."""
        self.rewrites = {}
        self.failed = None
        self._seen = self._adapted = None
        self._facts = Facts()
        for instrument in self.instruments:
            instrument.started(self.pipeline)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Tell instruments that a phase of compiling runs inside."""
        for instrument in self.instruments:
            instrument.entered(name)
        try:
            yield
        finally:
            for instrument in self.instruments:
                instrument.left(name)

    def run_job(self, graph: JobGraph) -> None:
        """Run the job passes on a graph that came from the tracer."""
        remember_runs(graph.root)
        record(named_graphs(graph), TRACE, graph.subject)
        name_nodes(graph, anew=True)
        for instrument in self.instruments:
            instrument.traced(graph.subject, graph)
        for place, item in enumerate(self.pipeline.passes, 1):
            if isinstance(item, JobPass):
                self.run_one(Event(place, item, graph.subject, graph))

    def run_group(self, group: GroupGraph) -> None:
        """Run the group passes."""
        for place, item in enumerate(self.pipeline.passes, 1):
            if isinstance(item, GroupPass):
                self.run_one(Event(place, item, "group", group))
        if self.verify == "none":
            self._facts.recheck(group, str(self.pipeline))
        for instrument in self.instruments:
            instrument.finished(group)

    def run_one(self, event: Event) -> None:
        """Run one pass and check what it leaves.

        raises    TloraError of the pass; PassFailed for any other; GraphInvalid and its kinds
                  for graphs that do not hold together
        """
        self.events += 1
        if self.events == self.halt_at:
            raise Halted(event)
        for instrument in self.instruments:
            instrument.before(event)
        try:
            done = self._run(event)
            for instrument in self.instruments:
                instrument.after(done)
        except TloraError as error:
            self._tell(event, error)
            line = author_line(event.item, error.__traceback__)
            error.add_note(f"in pass {event}" + (f", at {line}" if line else ""))
            raise

    def _run(self, event: Event) -> Done:
        item, graphs = event.item, event.graphs
        changed: Change
        rewrites = self.rewrites.setdefault(event.place, Rewrites(self.limits.get(event.place)))
        rewrites.rules = {} if any(one.watches_rules for one in self.instruments) else None
        measured = _Measured(_nodes(graphs), len(rewrites.descriptions), rewrites.statistics.copy())
        fused = isinstance(graphs, GroupGraph) and graphs.fused
        self._facts.require(item, graphs)
        before, values = self._before(graphs)
        if self.verify != "none" and (self._adapted is None or self._adapted[0] is not graphs):
            self._adapted = graphs, adapted(graphs)
        resting = self._facts.before(item, graphs) if self.verify != "none" else {}
        measured.lap()
        try:
            with counting(rewrites), owning_modules(graphs):
                claim = item.run(graphs)  # type: ignore[attr-defined]
        except TloraError:
            raise
        except Exception as error:
            raise _failed(event, error) from error
        measured.lap()
        if fused and not graphs.fused:  # type: ignore[union-attr]
            raise GraphInvalid(
                f"pass '{item.name}' left no graph of the group",
                expected="nodes in group.root",
                found="none",
                help="this is a defect of the pass",
            )
        measured.shapes = self._propagate(event)
        measured.lap()
        record_all(graphs, item.name, event.subject)
        if self.verify == "none":
            self._facts.provide(item, graphs)
            changed = "code" if before is None else before.change_to(fingerprint(graphs))
            return measured.done(event, changed, rewrites)
        _check_values(event, values)
        check_tags(graphs)
        check_tensors(graphs)
        self._check_adapters(event)
        self._facts.after(item, graphs, resting)
        after = fingerprint(graphs)
        self._seen = (graphs, after)
        changed = before.change_to(after) if before is not None else "code"
        _check_claim(event, claim, changed)
        return measured.done(event, changed, rewrites)

    def _before(self, graphs: JobGraph | GroupGraph) -> tuple[Fingerprint | None, Values]:
        """Fingerprint and values of the graphs before a pass; the one after the last serves."""
        if self.verify == "none":
            return (fingerprint(graphs) if self.instruments else None), {}
        if self._seen is not None and self._seen[0] is graphs:
            before = self._seen[1]
        else:
            before = fingerprint(graphs)
        return before, _values(graphs)

    def _check_adapters(self, event: Event) -> None:
        """An adapter that reached the loss still does, unless the pass gives other numbers."""
        assert self._adapted is not None
        before, now = self._adapted[1], adapted(event.graphs)
        self._adapted = event.graphs, now
        jobs = event.graphs.jobs if isinstance(event.graphs, GroupGraph) else [event.graphs]
        own = {(job.name, path) for job in jobs for path in job.sites}
        lost = sorted((before - now) & own)
        if lost and event.item.preserves_numerics != "no":
            job, path = lost[0]
            raise GraphInvalid(
                f"pass '{event.item.name}' drops adapters",
                job=job,
                site=path,
                expected="all adapters that reached what the graphs return before it",
                found=f"{len(lost)} that do not",
                help='this is a defect of the pass, or it declares preserves_numerics = "no"',
            )

    def _propagate(self, event: Event) -> int:
        """Give nodes their values anew; the number of operators that ran for it."""
        ran = 0
        try:
            for owner in owners(event.graphs):
                for graph in owner.graphs() if self.verify != "none" else ():
                    _lint(event, graph)
                    _check_output(event, graph)
                for block in owner.blocks.values():
                    ran += propagate(block.graph)
                if len(owner.root.nodes):
                    ran += propagate(owner.root, owner.blocks)
        except TloraError:
            raise
        except Exception as error:
            raise GraphInvalid(
                f"pass '{event.item.name}' left a graph that does not hold together",
                found=f"{type(error).__name__}: {error}",
                help="this is a defect of the pass",
            ) from error
        return ran

    def _tell(self, event: Event, error: TloraError) -> None:
        self.failed = (self.events, event)
        for instrument in self.instruments:
            instrument.failed(event, error)


def _lint(event: Event, graph: fx.Graph) -> None:
    """Check that a graph holds together; raises GraphInvalid with the node, where there is one."""
    try:
        graph.lint()
    except RuntimeError as error:
        known: set[fx.Node] = set()
        early = None
        for node in graph.nodes:
            if not known.issuperset(node.all_input_nodes):
                early = node
                break
            known.add(node)
        raise GraphInvalid(
            f"pass '{event.item.name}' left a graph that does not hold together",
            **({} if early is None else {"node": early.format_node()}),
            # torch shows the whole graph behind what is wrong.
            found=f"{type(error).__name__}: {error}".partition("\ngraph():")[0],
            help="this is a defect of the pass",
        ) from error


def record_all(graphs: JobGraph | GroupGraph, made_by: str, subject: str) -> None:
    """Give every node of all graphs that a pass may have rewritten an origin and a name."""
    for owner in owners(graphs):
        record(named_graphs(owner), made_by, subject if owner is graphs else owner.subject)
        name_nodes(owner)


class _Measured:
    """What is measured of one run of a pass.

    nodes      before it
    asked      rewrites that it asked for on earlier graphs
    counted    its statistics of earlier graphs
    """

    def __init__(self, nodes: int, asked: int, counted: Counter[str]) -> None:
        self.nodes, self.asked, self.counted = nodes, asked, counted
        self.shapes = 0
        self._times = [time.perf_counter()]

    def lap(self) -> None:
        """The next part begins: the pass, shapes, checks."""
        self._times.append(time.perf_counter())

    def done(self, event: Event, changed: Change, rewrites: Rewrites) -> Done:
        """The run as instruments are told of it."""
        began, started, ran, shaped = self._times
        checked = time.perf_counter() - ran + started - began
        return Done(
            event.place,
            event.item,
            event.subject,
            event.graphs,
            seconds=ran - started,
            check_seconds=checked,
            changed=changed,
            rewrites=len(rewrites.descriptions) - self.asked,
            statistics=dict(rewrites.statistics - self.counted),
            shape_seconds=shaped - ran,
            shapes=self.shapes,
            nodes=(self.nodes, _nodes(event.graphs)),
            rules=rewrites.rules or {},
        )


def _nodes(graphs: JobGraph | GroupGraph) -> int:
    return sum(len(graph.nodes) for owner in owners(graphs) for graph in owner.graphs())


def _check_output(event: Event, graph: fx.Graph) -> None:
    """A graph ends in its one output; linting does not look at that."""
    nodes = list(graph.nodes)
    outputs = [node for node in nodes if node.op == "output"]
    if not nodes or (len(outputs) == 1 and nodes[-1] is outputs[0]):
        return
    behind = len(outputs) == 1
    raise GraphInvalid(
        f"pass '{event.item.name}' left a graph that does not end in one output",
        node=(nodes if behind else outputs or nodes)[-1].format_node(),
        found="a node behind the output" if behind else f"{len(outputs)} outputs",
        help="make nodes inside `with graph.inserting_before(node)`, or by a Rewriter"
        if behind
        else "this is a defect of the pass",
    )


def _values(graphs: JobGraph | GroupGraph) -> Values:
    return {
        node: value
        for owner in owners(graphs)
        for graph in owner.graphs()
        for node in graph.nodes
        if node.op == "call_function" and isinstance(value := node.meta.get("val"), torch.Tensor)
    }


def _check_values(event: Event, before: Values) -> None:
    """A node that survives keeps the shape and dtype of its value."""
    if event.item.preserves_numerics == "no":
        return
    for graph in (graph for owner in owners(event.graphs) for graph in owner.graphs()):
        for node in graph.nodes:
            was, now = before.get(node), node.meta.get("val")
            if was is None or was is now:
                continue
            if not isinstance(now, torch.Tensor) or type_text(was) != type_text(now):
                raise GraphInvalid(
                    f"pass '{event.item.name}' changed the type of a value that it kept",
                    node=node.format_node(),
                    source=node.meta.get("source"),
                    expected=type_text(was),
                    found=type_text(now) if isinstance(now, torch.Tensor) else now,
                    help='this is a defect of the pass, or it declares preserves_numerics = "no"',
                )


def _check_claim(event: Event, claim: bool | None, changed: str) -> None:
    if claim is None or claim is (changed == "code"):
        return
    if not isinstance(claim, bool):
        raise PassMisreports(
            f"pass '{event.item.name}' returned what is no claim",
            graphs=event.subject,
            expected="whether it changed the code: True, False or None",
            found=repr(claim)[:100],
            help="return what is true from run(), or nothing",
        )
    raise PassMisreports(
        f"pass '{event.item.name}' says that it {'changed' if claim else 'kept'} the graph",
        graphs=event.subject,
        expected="what the graph's fingerprint says",
        found="the code is the same" if claim else "the code is another",
        help="return what is true from run(), or nothing",
    )


def _failed(event: Event, error: Exception) -> PassFailed:
    node = _node_at(error.__traceback__)
    return PassFailed(
        f"pass '{event.item.name}' raised {type(error).__name__}",
        graphs=event.subject,
        at=author_line(event.item, error.__traceback__),
        node=node.format_node() if node is not None else "none that can be told",
        source=(node.meta.get("source") or None) if node is not None else None,
        found=error,
        help=_help_with(error),
    )


def _help_with(error: Exception) -> str:
    """What to do about an error of a pass; fx says nothing of the module that it lacks."""
    frames = traceback.extract_tb(error.__traceback__)
    if "GraphModule.__init__()" in str(error) or any(f.filename == GRAPH_MODULE for f in frames):
        return (
            "graphs name tensors and layers by path, which a module must have: write "
            "fx.GraphModule(graph.owning_module, graph); it shares the graph"
        )
    return "this is a defect of the pass"


def author_line(item: Pass, trace: TracebackType | None) -> str | None:
    """The line of a pass's own code at which an error came: "fuse_scale.py:31  x = y / 0".

    returns   the innermost line of the file that the pass stands in, or of its package; None where
              the error came from elsewhere
    """
    try:
        home = Path(inspect.getfile(type(item)))
    except (TypeError, OSError):
        return None
    for line in reversed(traceback.extract_tb(trace)):
        file = Path(line.filename)
        if file == home or _is_beside(file, home):
            return f"{file.name}:{line.lineno}  {line.line or ''}".rstrip()
    return None


def _is_beside(file: Path, home: Path) -> bool:
    """Whether a file lies in the folder of an author's pass, and is nobody else's."""
    ours = OURS in home.parents or OURS in file.parents
    if ours or INSTALLED in (home.parent.name, *file.parts[len(home.parent.parts) :]):
        return False
    return home.parent in file.parents


def _node_at(trace: TracebackType | None) -> fx.Node | None:
    """The node that the innermost frame with one was at: what it calls `node`, else the last."""
    innermost: fx.Node | None = None
    while trace is not None:
        names = trace.tb_frame.f_locals
        nodes = {name: value for name, value in names.items() if isinstance(value, fx.Node)}
        if nodes:
            innermost = nodes.get("node", next(reversed(nodes.values())))
        trace = trace.tb_next
    return innermost
