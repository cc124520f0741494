"""Graphs at every stage of the pipeline, and one pass that runs on them under `Numerics`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from torch import fx

from tlora_fx.compiler import run_passes
from tlora_fx.numerics import Numerics
from tlora_fx.numerics.state import copy_state
from tlora_fx.pipeline import Event, GroupPass, Pass, Pipeline, Runner


@pytest.fixture
def verdicts():
    """Compile jobs; the verdict of each pass by (pass, subject)."""

    def run(jobs, pipeline=None, **options):
        watch = Numerics(**options)
        run_passes(jobs, pipeline, verify="numerics", instruments=[watch])
        return {(result.name, result.subject): result.verdict for result in watch.results}

    return run


@pytest.fixture
def verdict(backbone, group_after):
    """The verdict of passes that run on graphs at a stage: `verdict("tag-roles", [item], "plain")`.

    The last pass that ran decides whether jobs' own graphs are meant, or the group. `checked=False`
    leaves out the structural checks, so that numbers alone must find a fault.
    """

    def find(stage: str, items: list[Pass], *kinds: str, checked: bool = True, **options) -> str:
        group = group_after(stage, *kinds)
        if isinstance(items[0], GroupPass):
            graphs, subject = copy_state(group), "group"
        else:
            graphs, subject = copy_state(group.jobs[0]), f"job {kinds[0]}"
        watch = Numerics(**options)
        watch.know(backbone)
        runner = Runner(Pipeline(()), [watch], "numerics" if checked else "none")
        for place, item in enumerate(items, 1):
            runner.run_one(Event(place, item, subject, graphs))
        return watch.results[-1].verdict

    return find


def a_pass(spoil, kind=GroupPass, numerics="exact", right=None) -> Pass:
    """A pass that does something to graphs, after another pass has done its work."""

    @dataclass(frozen=True, slots=True)
    class Spoils(kind):
        """Does it."""

        name: ClassVar[str] = "spoils" if right is None else right.name
        preserves_numerics: ClassVar[str] = numerics

        def run(self, graphs) -> None:
            if right is not None:
                right.run(graphs)
            spoil(graphs)

    return Spoils()


def nodes(graphs, name: str, path: str = "", **meta: object) -> list[fx.Node]:
    """Nodes of all graphs by a part of their target, the end of their module path, and meta."""
    return [
        node
        for graph in graphs.graphs()
        for node in graph.nodes
        if name in str(node.target)
        and str(node.meta.get("path", "")).endswith(path)
        and all(node.meta.get(key) == value for key, value in meta.items())
    ]


def put_behind(node: fx.Node, target, *args: object, drop: tuple[str, ...] = ()) -> fx.Node:
    """Insert a call on a node's value between it and its users."""
    with node.graph.inserting_after(node):
        made = node.graph.call_function(target, (node, *args))
    made.meta = {k: v for k, v in node.meta.items() if k not in ("origin", "run", "part", *drop)}
    node.replace_all_uses_with(made, lambda user: user is not made)
    return made
