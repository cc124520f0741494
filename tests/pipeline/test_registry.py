"""Passes of other packages, found through their entry points."""

from __future__ import annotations

import sys
from typing import ClassVar

import pytest

from tests.models import error_of
from tests.pipeline.graphs import small_graph
from tlora_fx.errors import PipelineError, PluginBroken
from tlora_fx.passes import find_passes
from tlora_fx.pipeline import (
    JobPass,
    Runner,
    find_pass,
    parse_pipeline,
    pass_names,
    plugin_passes,
    register,
)


@pytest.fixture(autouse=True)
def own():
    """Our own passes are known."""
    find_passes()


def test_a_pass_of_another_package_runs_by_its_name(strangers):
    """Options, text form and all."""
    pipeline = parse_pipeline("count-nodes{at-least=2}")

    Runner(pipeline).run_job(small_graph())

    assert str(pipeline) == "count-nodes{at-least=2}"


def test_names_are_known_without_an_import(strangers):
    """Listing names, and using our own passes, imports nothing of strangers."""
    assert "count-nodes" in pass_names()
    parse_pipeline("drop-export-noise,tag-roles")

    assert "strangers_passes" not in sys.modules


def test_a_broken_plugin_is_listed_with_its_reason(strangers):
    """It breaks nothing else."""
    found = {plugin.name: plugin for plugin in plugin_passes()}

    assert found["count-nodes"].broken == ""
    assert found["count-nodes"].package == "strangers 1.2"
    assert "No module named 'strangers_lost_module'" in found["gone"].broken
    assert "no JobPass or GroupPass" in found["no-pass"].broken
    assert "calls itself 'count-nodes'" in found["other-name"].broken
    assert "preserves_numerics is 'Exact'" in found["wordy"].broken
    assert "run(graphs)" in found["unready"].broken
    assert "it is no dataclass" in found["undecorated"].broken
    assert "SystemExit: 3" in found["leaves"].broken


def test_nobody_takes_the_name_of_our_pass(strangers):
    """Our own pass stays; the stranger's is listed as broken."""
    mine = find_pass("tag-roles")
    found = {plugin.name: plugin for plugin in plugin_passes()}

    assert mine.__module__ == "tlora_fx.passes.tag_roles"
    assert found["tag-roles"].found is None
    assert "two passes are called 'tag-roles'" in found["thief"].broken
    assert find_pass("tag-roles") is mine


def test_a_pass_whose_fields_are_no_options_is_refused():
    """`@dataclass` makes them options; above `@register` it makes them those of another class."""

    class Undecorated(JobPass):
        name: ClassVar[str] = "undecorated"
        number: int = 3

        def run(self, graph):
            """Do nothing."""

    text = error_of(lambda: register(Undecorated), PipelineError)

    assert "pass 'undecorated' is no dataclass" in text
    assert "between @register and the class" in text


def test_a_broken_plugin_that_is_asked_for_says_why(strangers):
    """Which package, which entry, which error."""
    text = error_of(lambda: parse_pipeline("gone"), PluginBroken)

    assert "strangers 1.2" in text
    assert "strangers_lost_module:Gone" in text
    assert "ModuleNotFoundError" in text


def test_the_nearest_name_may_be_a_strangers(strangers):
    """Unknown names are compared with all that are known."""
    assert "nearest  count-nodes" in error_of(lambda: find_pass("count-node"), PipelineError)
