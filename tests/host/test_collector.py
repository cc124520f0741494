"""A start collects garbage rarely, and the process goes on as before."""

from __future__ import annotations

import gc

import pytest

from tlora_fx.host import collector, phases


@pytest.fixture
def restored():
    """The thresholds are as before afterwards."""
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def _is_looked_at(it):
    return any(one is it for one in gc.get_objects())


def test_a_start_collects_rarely_until_its_first_step(restored):
    """What it has left is looked at no more."""
    left = [object()]
    collector.begin()
    assert gc.get_threshold() == collector.THRESHOLDS
    assert _is_looked_at(left)
    phases.begin()
    phases.end()

    assert gc.get_threshold() == restored
    assert not _is_looked_at(left)


def test_without_a_command_of_its_own_nothing_changes(restored):
    """A start within somebody else's process leaves the collector alone."""
    left = [object()]
    phases.begin()
    phases.end()

    assert gc.get_threshold() == restored
    assert _is_looked_at(left)


def test_compiling_collects_rarely_and_leaves_the_collector_as_it_was(restored):
    """Also where it fails."""
    gc.set_threshold(700, 10, 10)
    found = []

    @collector.rarely()
    def fail():
        found.append(gc.get_threshold())
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        fail()
    assert found == [collector.THRESHOLDS]
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("thresholds", [(0, 10, 10), (500_000, 5, 5)])
def test_who_collects_more_rarely_or_never_goes_on_to_do_so(restored, thresholds):
    """Whoever has switched the collector off has a reason."""
    gc.set_threshold(*thresholds)
    with collector.rarely():
        assert gc.get_threshold() == thresholds

    assert gc.get_threshold() == thresholds
