"""Find the pass, and the rewrite in it, that breaks a check.

The states of a compilation are the traced graphs after the first passes of its pipeline. A check
judges a state: a command of the user's, or the numbers that the state computes. Halving finds the
first bad state, then the first bad number of rewrites of the pass that made it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import ceil, log2
from pathlib import Path
from typing import Literal

from torch import fx

from tlora_fx.compiler import Prepared, fuse
from tlora_fx.cost.hardware import GIB
from tlora_fx.errors import BisectFails, NotFoldable, TloraError
from tlora_fx.graph_file import Document, from_document, save_graphs, to_document
from tlora_fx.host.environment import STATE
from tlora_fx.inspect.instruments import state_source
from tlora_fx.inspect.joint import joint_entries
from tlora_fx.inspect.joint_diff import joint_differences
from tlora_fx.inspect.program import make_program
from tlora_fx.inspect.schema import Program
from tlora_fx.inspect.wording import plural
from tlora_fx.ir.graph import GroupGraph, JobGraph, origin_of
from tlora_fx.ir.verifier import named_graphs, owners
from tlora_fx.model.backbone import Backbone
from tlora_fx.model.source import group_source
from tlora_fx.numerics.evaluate import StepOutcome, bound_of, evaluate, finite, worst
from tlora_fx.numerics.interpreter import CannotRun
from tlora_fx.numerics.memory import bytes_needed
from tlora_fx.numerics.rows import ProbeRows
from tlora_fx.numerics.tensors import Seeded, Unchecked, buffers_of
from tlora_fx.pipeline import Event, GroupPass, Instrument, JobPass, Pipeline, Runner
from tlora_fx.tools.check_command import run_check

Verdict = Literal["good", "bad", "skip"]
Key = tuple[str, str]

WORDS = {"good": "good", "bad": "BAD", "skip": "cannot tell"}
JOINT_WORDS = {"removed": "gone", "added": "made", "changed": "other arguments"}
CANNOT_TELL = 125
SHELLS_OWN = {126: "it may not be executed", 127: "there is no such command"}
PROGRAM = "program.py"
#: Of drawn weights and rows; and what a state may need to be judged by its numbers.
SEED, MAX_BYTES = 0, 4 * GIB
SHOWN = 8


@dataclass(frozen=True, slots=True)
class BisectionResult:
    """Result of a bisection.

    place      of the pass that breaks the check, counted from 1; 0 where none could be named
    rewrite    its rewrite that does, "" where none could be named
    runs       of the check until the pass was named, and all in all
    """

    lines: tuple[str, ...]
    place: int = 0
    name: str = ""
    rewrite: str = ""
    runs: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class Bisector:
    """One bisection.

    retrace    traces anew, so that a pass may leave all as it is: for rewrites held back
    say        told each run, and what the check printed
    """

    states: States
    retrace: Callable[[int], States]
    check: Check
    folder: Path
    base: str
    say: Callable[[str, str], None]
    runs: int = 0
    _kept: dict[int, PassState] = field(default_factory=dict)

    def find(self) -> BisectionResult:
        """Name the pass and the rewrite.

        raises    BisectFails where the check cannot be run, or changes its mind
        """
        self.check.begin(self.states.start)
        passes = len(self.states.pipeline.passes)
        most = ceil(log2(passes + 2)) + 1
        self.say(
            f"{plural(passes, 'pass')}: at most {plural(most, 'run')} of the check until the pass "
            "is named, if it can judge every state",
            "",
        )
        bracket = first_bad(passes + 1, self._judge_pass)
        if not bracket.sure or bracket.bad in (0, passes + 1):
            return BisectionResult(
                tuple(_unnamed(bracket, self._names())), runs=(self.runs, self.runs)
            )
        self._require_steady(bracket)
        place, named = bracket.bad, self.runs
        verdict = f"pass {place} '{self._names()[place]}' breaks the check"
        rewrite, more = self._find_rewrite(place)
        return BisectionResult(
            (verdict, *more), place, self._names()[place], rewrite, (named, self.runs)
        )

    def _names(self) -> list[str]:
        return ["trace", *(item.name for item in self.states.pipeline.passes)]

    def _judge_pass(self, place: int) -> Verdict:
        state = self.states.after(place)
        self._kept[place] = state
        return self._judge(state, f"after {place} {self._names()[place]}", f"{place:02}")

    def _judge(self, state: PassState, title: str, number: str) -> Verdict:
        self.runs += 1
        judged = self._verdict(state, number)
        reason = f" ({judged.reason})" if judged.reason else ""
        self.say(f"run {self.runs:<3} {title:<40} {WORDS[judged.verdict]}{reason}", judged.output)
        return judged.verdict

    def _verdict(self, state: PassState, number: str) -> Judged:
        name = self._names()[state.place]
        folder = self.folder / f"{number}-{name}"
        if self.check.needs_folder:
            write_state(state, folder, name, self.base)
        return self.check.judge(state, folder)

    def _require_steady(self, bracket: Bracket) -> None:
        state, name = self._kept[bracket.bad], self._names()[bracket.bad]
        if self._judge(state, f"after {bracket.bad} {name}, again", f"{bracket.bad:02}") != "bad":
            raise BisectFails(
                "the check is not steady: the same graphs were bad, and then were not",
                state=f"after pass {bracket.bad} '{name}'",
                help="seed what is random in the check",
            )

    def _find_rewrite(self, place: int) -> tuple[str, list[str]]:
        after = self._kept[place]
        if not after.rewrites:
            nodes = touched(self.states.after(place - 1).group, after.group)
            unasked = "it asks for no single rewrites, so all of it is meant"
            return "", [unasked, *lines(nodes)]
        try:
            self.states.after(place, 0)
        except NotFoldable:
            self.states = self.retrace(place)
            self.check.begin(self.states.start)
            after = self.states.after(place)
            if self._judge(after, f"after {place}, traced for holding back", "exact") != "bad":
                return "", ["traced so that rewrites can be held back, the check holds"]
        except TloraError as error:
            return "", [f"its rewrites cannot be held back: {error.what}"]
        total = len(after.rewrites)
        most = plural(ceil(log2(total + 1)), "run")
        self.say(
            f"{plural(total, 'rewrite')} in it: at most {most} more, if every state can be judged",
            "",
        )
        bracket = first_bad(
            total + 1, lambda n: self._judge_limit(place, n, total), last_is_bad=True
        )
        if bracket.bad == 0:
            held = plural(total, "rewrite")
            return "", [f"with its {held} held back, too: the fault is in the rest"]
        if not bracket.sure:
            between = after.rewrites[max(bracket.good, 0) : bracket.bad]
            return "", ["one of these rewrites, which could not be told apart:", *between[:20]]
        return self._describe(place, bracket, after.rewrites)

    def _describe(
        self, place: int, bracket: Bracket, rewrites: tuple[str, ...]
    ) -> tuple[str, list[str]]:
        rewrite = rewrites[bracket.bad - 1]
        before, after = (self.states.after(place, n).group for n in (bracket.good, bracket.bad))
        text = f"rewrite {bracket.bad} of {len(rewrites)}: {rewrite}"
        return rewrite, [text, *lines(touched(before, after))]

    def _judge_limit(self, place: int, limit: int, total: int) -> Verdict:
        title = f"{limit} of {total} rewrites"
        try:
            state = self.states.after(place, limit)
        except TloraError as error:
            self.say(f"        {title:<40} cannot tell ({error.what})", "")
            return "skip"
        return self._judge(state, title, f"{place:02}-{limit:04}")


def _unnamed(bracket: Bracket, names: list[str]) -> list[str]:
    if bracket.bad == 0:
        return [
            "the check fails before the first pass: no pass breaks it",
            "is the command right? `-v` shows what it prints, `--keep DIR` what it was given",
        ]
    if bracket.sure:
        return ["the check never fails: it holds after the last pass"]
    last = "the start" if bracket.good < 0 else f"pass {bracket.good} '{names[bracket.good]}'"
    if bracket.bad == len(names):
        return [f"no state is bad, and after {last} the check cannot tell"]
    blamed = ", ".join(
        f"{place} '{names[place]}'" for place in range(bracket.good + 1, bracket.bad + 1)
    )
    return [f"the check cannot tell apart which of these breaks it: {blamed}"]


@dataclass(frozen=True, slots=True)
class Bracket:
    """Interval in which a list of states turns bad.

    good    the last state that is known to be good, -1 where none is
    bad     the first state that is known to be bad, the number of states where none is
    """

    good: int
    bad: int

    @property
    def sure(self) -> bool:
        """Whether no state between the two was skipped."""
        return self.bad - self.good == 1


def first_bad(
    states: int, judge: Callable[[int], Verdict], *, last_is_bad: bool = False
) -> Bracket:
    """Find where states turn bad, in at most ceil(log2(states + 1)) runs where none is skipped.

    judge         the verdict on one; "skip" where it cannot be told
    last_is_bad   the last one need not be judged
    """
    good, bad = -1, states - 1 if last_is_bad else states
    skipped: set[int] = set()
    while True:
        left = [state for state in range(good + 1, bad) if state not in skipped]
        if not left:
            return Bracket(good, bad)
        middle = (good + bad) // 2
        state = min(left, key=lambda candidate: abs(candidate - middle))
        verdict = judge(state)
        if verdict == "good":
            good = state
        elif verdict == "bad":
            bad = state
        else:
            skipped.add(state)


@dataclass(frozen=True, slots=True)
class PassState:
    """The graphs after some passes.

    rewrites    what the last of them rewrote, or would have, held back ones too
    """

    place: int
    group: GroupGraph
    rewrites: tuple[str, ...] = ()


@dataclass(slots=True)
class States:
    """Makes states; the nearest one before is kept.

    No state is traced for itself: all are made from what was traced once, so all have its form.
    """

    pipeline: Pipeline
    start: Document
    _kept: dict[int, tuple[Document, tuple[str, ...]]] = field(default_factory=dict)

    def after(self, place: int, limit: int | None = None) -> PassState:
        """The graphs after this many passes.

        limit     rewrites that the last of them may make, None for all
        raises    TloraError, where a pass fails
        """
        limits = {} if limit is None else {place: limit}
        runner = Runner(self.pipeline, limits=limits)
        last = place if limit is None else place - 1
        start = max((known for known in self._kept if known <= last), default=0)
        document, rewrites = self._kept.get(start, (self.start, ()))
        group = from_document(document)
        assert isinstance(group, GroupGraph)
        for number in range(start + 1, place + 1):
            run_everywhere(runner, number, group)
        if place in runner.rewrites:
            rewrites = tuple(runner.rewrites[place].descriptions)
        elif start < place:
            rewrites = ()
        if limit is None and start < place:
            self._kept[place] = (to_document(group), rewrites)
        return PassState(place, group, rewrites)


class _Traced(Instrument):
    """Keeps the traced graphs of the last attempt."""

    def __init__(self) -> None:
        self.kept: list[tuple[JobGraph, Document]] = []

    def started(self, pipeline: Pipeline) -> None:
        self.kept = []

    def traced(self, subject: str, graphs: JobGraph) -> None:
        self.kept.append((graphs, to_document(graphs)))


def trace_states(
    prepared: Prepared, pipeline: Pipeline, limits: dict[int, int] | None = None
) -> States:
    """Compile once, and keep what was traced.

    limits    rewrites allowed by place: graphs that a pass may leave as they are need to be traced
              with every job's own numbers
    raises    TloraError, where compiling fails
    """
    traced = _Traced()
    group = fuse(prepared, Runner(pipeline, [traced], limits=limits))
    copies: dict[int, JobGraph] = {}
    for live, document in traced.kept:
        copy = from_document(document)
        assert isinstance(copy, JobGraph)
        copies[id(live.root)] = copy
    base = copies[id(group.base.root)]
    jobs = [copies[id(job.root)].for_job(job.name, job.sites) for job in group.jobs]
    start = GroupGraph(base, jobs, group.exact, group.compute)
    return States(pipeline, to_document(start))


def run_everywhere(runner: Runner, place: int, group: GroupGraph) -> None:
    """Run the pass at a place on all graphs that it is for, in the order in which the driver does.

    raises    TloraError, where it fails
    """
    item = runner.pipeline.passes[place - 1]
    if isinstance(item, GroupPass):
        runner.run_one(Event(place, item, "group", group))
        return
    assert isinstance(item, JobPass)
    structures: dict[int, list[JobGraph]] = {}
    for graph in (group.base, *group.jobs):
        structures.setdefault(id(graph.root), []).append(graph)
    for first, *others in structures.values():
        runner.run_one(Event(place, item, first.subject, first))
        for other in others:
            other.root, other.blocks = first.root, first.blocks
            other.plan, other.constants = first.plan, first.constants
            other.facts = dict(first.facts)


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict, and its reason in words."""

    verdict: Verdict
    reason: str = ""
    output: str = ""


class Check(ABC):
    """Judges a state, which is written into a folder first where it `needs_folder`."""

    needs_folder: bool = False

    def begin(self, start: Document) -> None:  # noqa: B027  (a command needs none)
        """States are made from these traced graphs from now on."""

    @abstractmethod
    def judge(self, state: PassState, folder: Path) -> Judged:
        """The verdict on a state.

        folder    holds the state, where the check needs one
        raises    BisectFails where there can be none on any state
        """


class CommandCheck(Check):
    """A command of the user's: exit 0 is good, 1 to 124 bad, 125 cannot tell, the rest stops.

    command    for the shell; {} stands for the state's folder, which is in TLORA_FX_STATE too
    """

    needs_folder = True

    def __init__(self, command: str) -> None:
        self.command = command

    def judge(self, state: PassState, folder: Path) -> Judged:
        command, code, output = run_check(self.command, folder, {STATE: str(folder)})
        if code < 0 or code > CANNOT_TELL:
            raise BisectFails(
                "the check cannot be run",
                command=command,
                found=f"exit {code}: {SHELLS_OWN.get(code, 'a signal ended it')}",
                output=output[-2000:].rstrip() or None,
                help="a check exits with 0 for good, 1 to 124 for bad, 125 where it cannot tell",
            )
        verdict: Verdict = "good" if code == 0 else "skip" if code == CANNOT_TELL else "bad"
        return Judged(verdict, f"exit {code}", output)


def write_state(state: PassState, folder: Path, name: str, base: str) -> None:
    """Write graph files, the code, and the data of every node.

    raises    GraphNotStorable, OSError
    """
    save_graphs(state.group, folder)
    fused = state.group.fused
    code = group_source(state.group, base) if fused else state_source(state.group)
    (folder / PROGRAM).write_text(code, encoding="utf-8")
    program = make_program(state.group, name, base)
    (folder / Program.FILE).write_text(program.to_json(), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Reference:
    start: GroupGraph
    outcome: StepOutcome
    layers: dict[frozenset[str], list[str]]
    rows: ProbeRows


class NumericsCheck(Check):
    """Good where losses and gradients are those of the traced graphs, up to rounding.

    backbone   whose buffers are taken as they are; weights are drawn
    """

    def __init__(self, backbone: Backbone) -> None:
        self.tensors = Seeded(SEED, buffers_of(backbone))
        self._start: GroupGraph | None = None
        self._known: _Reference | None = None

    def begin(self, start: Document) -> None:
        group = from_document(start)
        assert isinstance(group, GroupGraph)
        self._start, self._known = group, None

    def judge(self, state: PassState, folder: Path) -> Judged:
        try:
            known = self._reference()
            largest = max(
                (self._difference(known, state.group, layers) for layers in known.layers),
                default=0.0,
            )
        except Unchecked as reason:
            return Judged("skip", str(reason))
        except CannotRun as error:
            return Judged("bad" if error.refused else "skip", str(error))
        limit = bound_of(known.start, state.group) * max(1, state.place)
        verdict: Verdict = "good" if largest <= limit else "bad"
        return Judged(verdict, f"largest difference {largest:.1e}, limit {limit:.0e}")

    def _difference(self, known: _Reference, group: GroupGraph, layers: frozenset[str]) -> float:
        jobs = known.layers[layers]
        needed = bytes_needed([known.start, group], layers, known.rows)
        if needed > MAX_BYTES:
            raise Unchecked(f"needs {needed / GIB:.1f} GiB, limit {MAX_BYTES / GIB:.1f} GiB")
        outcome = evaluate(group, layers, known.rows, self.tensors)
        return worst(_of(known.outcome, jobs), _of(outcome, jobs)).relative

    def _reference(self) -> _Reference:
        if self._known is None:
            group = self._start
            assert group is not None
            rows = ProbeRows(group.job_names, group.form, SEED, None, group.vocabulary)
            layers: dict[frozenset[str], list[str]] = {}
            for job in group.jobs:
                traced = job.plan.traced() if job.plan is not None else ()
                layers.setdefault(frozenset(traced), []).append(job.name)
            # Traced graphs are flat: they run whole, whatever layers are named.
            outcome = evaluate(group, frozenset(), rows, self.tensors)
            if not finite(outcome):
                raise Unchecked("losses or gradients of the traced graphs are not finite")
            self._known = _Reference(group, outcome, layers, rows)
        return self._known


def _of(outcome: StepOutcome, jobs: list[str]) -> StepOutcome:
    losses = {job: loss for job, loss in outcome.losses.items() if job in jobs}
    gradients = {key: value for key, value in outcome.gradients.items() if key[0] in jobs}
    return StepOutcome(losses, gradients)


@dataclass(frozen=True, slots=True)
class Touched:
    """A node that a rewrite touched.

    kind      "gone", "made" or "other arguments"; of a joint graph what became of it too
    place     graph and name: "layers_0_3.linear_7", or "job a, linear_7" before jobs are fused
    source    the line of model code, "" where there is none
    """

    kind: str
    place: str
    target: str
    source: str

    def __str__(self) -> str:
        text = "  ".join(part for part in (self.place, self.target, self.source) if part)
        return f"  {self.kind:<15}  {text}"


def touched(before: GroupGraph, after: GroupGraph) -> list[Touched]:
    """Nodes in which two states differ, by their keys; not those that read what was replaced.

    Those of joint graphs, which have no keys, are lined up by their order.
    """
    old, new = dict(_keyed(before)), dict(_keyed(after))
    both = old.keys() & new.keys()
    differences = [_touched("gone", key, *node) for key, node in old.items() if key not in new]
    differences += [_touched("made", key, *node) for key, node in new.items() if key not in old]
    for key, node in new.items():
        if key in both and _code(key, old[key][1], both) != _code(key, node[1], both):
            differences.append(_touched("other arguments", key, *node))
    joint = joint_differences(joint_entries(before), joint_entries(after))
    return differences + [
        Touched(JOINT_WORDS.get(change.what, change.what), f"{diff.block}.{change.node.id}",
                change.node.target, "")
        for diff in joint for change in diff.changes
    ]  # fmt: skip


def lines(nodes: list[Touched]) -> list[str]:
    """Some nodes of each kind, a line each."""
    texts: list[str] = []
    for kind in dict.fromkeys(node.kind for node in nodes):
        members = [node for node in nodes if node.kind == kind]
        texts.extend(str(node) for node in members[:SHOWN])
        if len(members) > SHOWN:
            texts.append(f"  {kind:<15}  and {len(members) - SHOWN} more")
    return texts


def _keyed(group: GroupGraph) -> Iterator[tuple[Key, tuple[str, fx.Node]]]:
    for owner in owners(group):
        subject = ""
        if not isinstance(owner, GroupGraph):
            subject = f"job {owner.name}, " if owner.name else "base, "
        for where, graph in named_graphs(owner):
            for node in graph.nodes:
                origin = origin_of(node)
                if origin is not None and node.op != "output":
                    yield (subject, origin.key), (where, node)


def _code(key: Key, node: fx.Node, both: set[Key]) -> str:
    """What a node calls with what; nodes by their keys, those of one state only without."""

    def named(argument: fx.Node) -> str:
        origin = origin_of(argument)
        known = origin is not None and (key[0], origin.key) in both
        return f"%{origin.key}" if origin is not None and known else "%"

    return str((str(node.target), *fx.map_arg((node.args, node.kwargs), named)))


def _touched(kind: str, key: Key, where: str, node: fx.Node) -> Touched:
    name = f"{where}.{node.name}" if where else node.name
    source = str(node.meta.get("source") or "")
    return Touched(kind, key[0] + name, str(node.target), source)
