"""Facts hold until a pass touches what they rest on; then they are checked again, or lapse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from tests.pipeline.graphs import Does, add_relu, relu_of, small_graph
from tlora_fx.errors import FactLapsed
from tlora_fx.pipeline import Event, JobPass, Pipeline, Runner


@dataclass(frozen=True, slots=True)
class Sorts(JobPass):
    """Provides a fact that it cannot check."""

    name: ClassVar[str] = "sorts"
    provides: ClassVar[frozenset[str]] = frozenset({"sorted"})

    def run(self, graph):
        """Nothing."""


@dataclass(frozen=True, slots=True)
class SortsInputs(Sorts):
    """One that rests on the inputs alone."""

    name: ClassVar[str] = "sorts-inputs"

    def rests_on(self, graphs):
        """The inputs."""
        return [node for node in graphs.root.nodes if node.op == "placeholder"]


@dataclass(frozen=True, slots=True)
class SortsAgain(Sorts):
    """One that can be checked."""

    name: ClassVar[str] = "sorts-again"

    def recheck(self, graphs, by):
        """Holds while there are few nodes."""
        return len(graphs.root.nodes) < 5


@dataclass(frozen=True, slots=True)
class Keeps(Does):
    """Says that it keeps the fact."""

    name: ClassVar[str] = "keeps"
    preserves: ClassVar[frozenset[str]] = frozenset({"sorted"})


@dataclass(frozen=True, slots=True)
class Needs(JobPass):
    """Needs the fact."""

    name: ClassVar[str] = "needs"
    requires: ClassVar[frozenset[str]] = frozenset({"sorted"})

    def run(self, graph):
        """Nothing."""


def run(*items):
    """Run passes over a small graph, which is returned."""
    graph = small_graph()
    runner = Runner(Pipeline(()))
    for place, item in enumerate(items, 1):
        runner.run_one(Event(place, item, "job one", graph))
    return graph


def test_a_fact_stands_in_the_graph_with_its_provider():
    """It goes where the graph goes."""
    assert run(Sorts()).facts == {"sorts": "sorts", "sorted": "sorts"}


def test_a_fact_lapses_where_a_pass_touches_its_nodes():
    """Nobody has checked it since."""
    assert "sorted" not in run(Sorts(), Does(add_relu)).facts


def test_a_pass_that_needs_a_lapsed_fact_is_refused():
    """The error names the pass that let it lapse."""
    with pytest.raises(FactLapsed, match="pass 'does' changed"):
        run(Sorts(), Does(add_relu), Needs())


def test_a_pass_that_preserves_a_fact_keeps_it():
    """Its word counts where nobody can check."""
    run(Sorts(), Keeps(add_relu), Needs())


def test_a_fact_holds_while_its_nodes_stay():
    """A new node elsewhere leaves it alone."""
    run(SortsInputs(), Does(add_relu), Needs())


def test_a_fact_that_its_provider_can_check_holds_while_it_does():
    """Checked after each pass that touches it."""
    assert "sorted" in run(SortsAgain(), Does(add_relu)).facts
    assert "sorted" not in run(SortsAgain(), Does(add_relu), Does(add_relu)).facts


def test_that_a_pass_ran_never_lapses():
    """It is a fact of its own name, which graph files keep."""
    assert list(run(Sorts(), Does(add_relu)).facts) == ["sorts", "does"]


def test_a_lapsed_fact_may_be_provided_again():
    """Then it holds."""
    run(Sorts(), Does(add_relu), Sorts(), Needs())


def test_a_pass_that_changes_nothing_lets_no_fact_lapse():
    """Tags of a node are no code."""
    run(Sorts(), Does(lambda graph: relu_of(graph).meta.update(path="a.b")), Needs())
