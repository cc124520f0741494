"""A start collects garbage rarely, and the process goes on as before."""

from __future__ import annotations

import gc

import pytest

from tlora_fx.host import collector, phases


@pytest.fixture
def restored():
    """The thresholds, and what was frozen, are as before afterwards."""
    before = gc.get_threshold()
    yield before
    gc.unfreeze()
    gc.set_threshold(*before)


def test_a_start_collects_rarely_until_its_first_step(restored):
    """What it has left is looked at no more."""
    frozen = gc.get_freeze_count()
    collector.begin()
    assert gc.get_threshold() == collector.THRESHOLDS
    phases.begin()
    phases.end()

    assert gc.get_threshold() == restored
    assert gc.get_freeze_count() > frozen


def test_without_a_command_of_its_own_nothing_changes(restored):
    """A start within somebody else's process leaves the collector alone."""
    frozen = gc.get_freeze_count()
    phases.begin()
    phases.end()

    assert gc.get_threshold() == restored
    assert gc.get_freeze_count() == frozen
