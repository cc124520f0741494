"""A package of somebody else's with passes, as pip would have installed it."""

from __future__ import annotations

import sys
from importlib import invalidate_caches

import pytest

from tlora_fx.pipeline import REGISTRY

PLUGIN = '''
"""Passes of another package."""
from dataclasses import dataclass
from typing import ClassVar
from tlora_fx.pipeline import JobPass, register

@register
@dataclass(frozen=True, slots=True)
class CountNodes(JobPass):
    """Count nodes.

    at_least   how many there must be
    """
    name: ClassVar[str] = "count-nodes"
    at_least: int = 1

    def run(self, graph):
        assert len(graph.root.nodes) >= self.at_least
        return False

class NoPass:
    name = "no-pass"

@dataclass(frozen=True, slots=True)
class Wordy(CountNodes):
    name: ClassVar[str] = "wordy"
    preserves_numerics: ClassVar[str] = "Exact"

class Undecorated(CountNodes):
    name: ClassVar[str] = "undecorated"
    at_most: int = 3

@dataclass(frozen=True, slots=True)
class Unready(JobPass):
    name: ClassVar[str] = "unready"
'''
THIEF = """
from dataclasses import dataclass
from typing import ClassVar
from tlora_fx.pipeline import JobPass, register

@register
@dataclass(frozen=True, slots=True)
class TagRoles(JobPass):
    name: ClassVar[str] = "tag-roles"

    def run(self, graph):
        pass
"""
ENTRIES = """
[tlora_fx.passes]
count-nodes = strangers_passes:CountNodes
gone = strangers_lost_module:Gone
no-pass = strangers_passes:NoPass
other-name = strangers_passes:CountNodes
tag-roles = strangers_passes:CountNodes
wordy = strangers_passes:Wordy
undecorated = strangers_passes:Undecorated
unready = strangers_passes:Unready
leaves = strangers_exit:Leaves
thief = strangers_thief:TagRoles

[tlora_fx.planners]
lost = strangers_lost_module:Planner
no-planner = strangers_passes:NoPass

[tlora_fx.policies]
no-policy = strangers_passes:NoPass
"""


@pytest.fixture
def strangers(tmp_path, monkeypatch):
    """A folder with the package and its metadata, on the path."""
    (tmp_path / "strangers_passes.py").write_text(PLUGIN)
    (tmp_path / "strangers_exit.py").write_text("import sys; sys.exit(3)")
    (tmp_path / "strangers_thief.py").write_text(THIEF)
    info = tmp_path / "strangers-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strangers\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    invalidate_caches()
    yield tmp_path
    sys.modules.pop("strangers_passes", None)
    REGISTRY.pop("count-nodes", None)
