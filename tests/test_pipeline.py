"""The text form of pipelines, and the checks that run after each pass."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.models import error_of
from tlora_fx.driver import DEFAULT_PIPELINE, find_passes
from tlora_fx.errors import GraphInvalid, PipelineError
from tlora_fx.graph import JobGraph
from tlora_fx.passes.drop_export_noise import DropExportNoise
from tlora_fx.passes.fuse_backbone import FuseBackbone
from tlora_fx.pipeline import REGISTRY, JobPass, Pipeline, checked, parse_pipeline
from tlora_fx.shapes import fake_like


@dataclass(frozen=True, slots=True)
class Options(JobPass):
    """A pass with an option of every type; never run."""

    name: ClassVar[str] = "options"

    number: int = 3
    ratio: float = 0.5
    flag: bool = False
    some_text: str = "plain"
    maybe: int | None = None

    def run(self, graph: JobGraph) -> None:
        """Do nothing."""


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """The pass with options is known during a test."""
    find_passes()
    monkeypatch.setitem(REGISTRY, Options.name, Options)


OPTIONS = st.builds(
    Options,
    number=st.integers(),
    ratio=st.floats(allow_nan=False),
    flag=st.booleans(),
    some_text=st.text(max_size=12),
    maybe=st.none() | st.integers(),
)


@given(st.lists(OPTIONS, min_size=1, max_size=4))
def test_a_pipeline_reads_back_what_it_prints(passes):
    """Text and pipeline are two forms of one thing, whatever the options hold."""
    pipeline = checked(passes)

    assert parse_pipeline(str(pipeline)) == pipeline


def test_the_default_pipeline_reads_back():
    """What runs when nothing is named, with and without an option."""
    for text in (DEFAULT_PIPELINE, DEFAULT_PIPELINE.replace("backbone", "backbone{max-jobs=8}")):
        assert str(parse_pipeline(text)) == text


def test_options_at_their_default_are_left_out():
    """The text says what differs."""
    assert str(Options()) == "options"
    assert str(Options(number=4)) == "options{number=4}"
    assert parse_pipeline(" options{ number=4  flag=true } ").passes == (
        Options(number=4, flag=True),
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("drop-export-nose", "drop-export-noise"),
        ("options{numbr=3}", "number"),
        ("options{number=3", "separate passes by commas"),
        ("options options", "separate passes by commas"),
        ("tag-roles", "put drop-export-noise before tag-roles"),
        ("check-token-parallel,drop-export-noise", "job passes come first"),
        ("fuse-backbone", "token-parallel"),
        ("options{number=many}", "number"),
        ("options{flag=3}", "flag"),
    ],
)
def test_a_wrong_pipeline_says_how_to_mend_it(text, told):
    """Unknown names get the nearest known one, wrong orders what is missing."""
    assert told in error_of(lambda: parse_pipeline(text), PipelineError)


def test_every_pass_is_known_by_the_name_of_its_file():
    """passes/fuse_backbone.py holds FuseBackbone, which is `fuse-backbone`."""
    for name, cls in REGISTRY.items():
        if cls is Options:
            continue
        assert cls.__module__.rpartition(".")[2] == name.replace("-", "_")
        assert cls.__name__.lower() == name.replace("-", "")
        assert dataclasses.is_dataclass(cls)


def small_graph():
    """relu(x) as a job's graph."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = fake_like(FakeTensorMode(), (2, 3), torch.float32)
    made = graph.call_function(torch.ops.aten.relu.default, (x,))
    made.meta["val"] = x.meta["val"]
    graph.output(made)
    return JobGraph("one", graph, "packed")


@dataclass(frozen=True, slots=True)
class Breaks(JobPass):
    """Leaves a graph in which a value is used before it is made, or does not fit."""

    name: ClassVar[str] = "breaks"

    order: bool = True

    def run(self, graph: JobGraph) -> None:
        """Break it."""
        relu = next(node for node in graph.root.nodes if node.op == "call_function")
        with graph.root.inserting_before(relu if self.order else None):
            args = (relu, relu) if self.order else (relu, [7, 7])
            target = torch.ops.aten.add.Tensor if self.order else torch.ops.aten.view.default
            made = graph.root.call_function(target, args)
            made.meta["val"] = relu.meta["val"]


@pytest.mark.parametrize("order", [True, False])
def test_a_pass_that_breaks_a_graph_is_named(order):
    """Linting finds a wrong order, propagation a wrong shape."""
    pipeline = Pipeline((Breaks(order=order),))

    text = error_of(lambda: pipeline.run_job(small_graph()), GraphInvalid)

    assert "breaks" in text


def test_job_passes_and_group_passes_are_told_apart():
    """A pipeline knows which passes run on jobs and which on the group."""
    pipeline = Pipeline((DropExportNoise(), FuseBackbone()))

    assert pipeline.job_passes == (DropExportNoise(),)
    assert pipeline.group_passes == (FuseBackbone(),)
