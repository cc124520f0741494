"""Twelve passes, a culprit among them, and a rewrite inside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from tests.models import error_of
from tests.pipeline.graphs import aten, relu_of, small_graph
from tlora_fx.errors import BisectFails
from tlora_fx.graph_file import to_document
from tlora_fx.ir.graph import GroupGraph
from tlora_fx.pipeline import JobPass, Pipeline, rewrite_allowed
from tlora_fx.tools.bisect import Bisector, Check, CommandCheck, Judged, States

REWRITES = 3


@dataclass(frozen=True, slots=True)
class Mark(JobPass):
    """Puts an operator of its own behind relu, a few times.

    number   by which the operator is known
    """

    name: ClassVar[str] = "mark"

    number: int = 0
    rewrites: int = REWRITES

    def run(self, graph):
        """Each time is a rewrite."""
        for time in range(self.rewrites):
            if rewrite_allowed(f"mark {self.number} time {time}"):
                self._add(graph.root, relu_of(graph), time)

    def _add(self, root, relu, time):
        number = self.number + time / 10
        with root.inserting_after(relu):
            made = root.call_function(aten.add.Scalar, (relu, number))
        made.meta = {key: value for key, value in relu.meta.items() if key not in ("run", "origin")}
        relu.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


class HasMark(Check):
    """Bad where an operator with this number is in the graph."""

    def __init__(self, number):
        self.number = number

    def judge(self, state, folder):
        numbers = [node.args[1] for node in state.group.base.root.nodes if len(node.args) == 2]
        return Judged("bad" if self.number in numbers else "good")


class Always(Check):
    """The same verdicts over and over, in turn."""

    def __init__(self, *verdicts):
        self.verdicts = list(verdicts)

    def judge(self, state, folder):
        self.verdicts.append(self.verdicts.pop(0))
        return Judged(self.verdicts[-1])


def bisection(tmp_path, check, passes=12, rewrites=REWRITES):
    """A bisection of passes that each make a few marks, and all that it said."""
    group = GroupGraph(small_graph(with_ids=True), [])
    items = tuple(Mark(number, rewrites) for number in range(1, passes + 1))
    said = []
    states = States(Pipeline(items), to_document(group))
    bisector = Bisector(
        states, lambda place: states, check, tmp_path, "base", lambda *x: said.append(x)
    )
    return bisector, said


@pytest.mark.parametrize("culprit", range(1, 13))
def test_the_pass_is_named_in_five_runs(tmp_path, culprit):
    """For twelve passes, whichever it is; then the rewrite."""
    bisector, _ = bisection(tmp_path, HasMark(culprit + 0.1))

    found = bisector.find()

    assert (found.place, found.name) == (culprit, "mark")
    assert found.rewrite == f"mark {culprit} time 1"
    assert found.runs[0] <= 5
    assert found.runs[1] <= 5 + 2


def test_the_finding_names_the_nodes_that_the_rewrite_made(tmp_path):
    """With what they call."""
    bisector, said = bisection(tmp_path, HasMark(7.2))

    text = "\n".join(bisector.find().lines)

    assert "pass 7 'mark' breaks the check" in text
    assert "rewrite 3 of 3: mark 7 time 2" in text
    assert "made" in text
    assert "aten.add.Scalar" in text
    assert sum("run" in line[:3] for line, _ in said) == bisector.runs


def test_the_runs_are_told_beforehand(tmp_path):
    """As many as they can be if none is wasted on a state that cannot be judged."""
    bisector, said = bisection(tmp_path, HasMark(1), passes=1, rewrites=1)

    bisector.find()

    told = [line for line, _ in said if not line.startswith("run ")]
    assert told == [
        "1 pass: at most 3 runs of the check until the pass is named, if it can judge every state",
        "1 rewrite in it: at most 1 run more, if every state can be judged",
    ]


def test_a_pass_without_counted_rewrites_is_meant_as_a_whole(tmp_path):
    """And its nodes are told."""
    bisector, _ = bisection(tmp_path, HasMark(3), rewrites=1)
    bisector.states.pipeline = Pipeline(tuple(Unasked(n) for n in range(1, 13)))

    found = bisector.find()

    assert (found.place, found.rewrite) == (3, "")
    assert "asks for no single rewrites" in found.lines[1]


@dataclass(frozen=True, slots=True)
class Unasked(Mark):
    """Asks nobody."""

    def run(self, graph):
        """One mark."""
        self._add(graph.root, relu_of(graph), 0)


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ("bad", "fails before the first pass"),
        ("good", "never fails"),
        ("skip", "cannot tell"),
    ],
)
def test_a_check_that_always_says_the_same_blames_no_pass(tmp_path, verdict, said):
    """A wrong command must not look like a culprit."""
    bisector, _ = bisection(tmp_path, Always(verdict))

    found = bisector.find()

    assert found.place == 0
    assert said in found.lines[0]


def test_a_check_that_changes_its_mind_is_refused(tmp_path):
    """The state that was bad is judged twice."""
    bisector, _ = bisection(tmp_path, Always("bad", "good", "good", "good", "good"), passes=3)

    assert "not steady" in error_of(bisector.find, BisectFails)


@pytest.mark.parametrize(
    ("command", "verdict"), [("exit 0", "good"), ("exit 1", "bad"), ("exit 124", "bad"),
                             ("exit 125", "skip")]
)  # fmt: skip
def test_a_commands_exit_code_is_its_verdict(tmp_path, command, verdict):
    """As the help says."""
    assert CommandCheck(command).judge(None, tmp_path).verdict == verdict


@pytest.mark.parametrize("command", ["exit 126", "no-such-command-here", "kill -9 $$", "exit 255"])
def test_a_command_that_cannot_run_stops_the_bisection(tmp_path, command):
    """It is no verdict on the graphs."""
    check = CommandCheck(command)

    assert "cannot be run" in error_of(lambda: check.judge(None, tmp_path), BisectFails)


def test_a_command_gets_the_folder_in_both_ways(tmp_path):
    """Quoted, for a folder's name may hold blanks."""
    folder = tmp_path / "a state"

    judged = CommandCheck('echo {} "$TLORA_FX_STATE"').judge(None, folder)

    assert judged.output.strip() == f"{folder} {folder}"


def test_the_folder_holds_graphs_code_and_data(tmp_path):
    """What the command may look at."""
    bisector, _ = bisection(tmp_path, CommandCheck("ls {}"), passes=1)
    bisector.find()

    assert {path.name for path in (tmp_path / "01-mark").iterdir()} == {
        "graph.tfx",
        "program.json",
        "program.py",
    }
