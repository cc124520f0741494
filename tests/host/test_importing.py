"""While libraries are imported nothing is collected; before and after it is as it was."""

from __future__ import annotations

import gc

import pytest

from tlora_fx.host import phases
from tlora_fx.host.importing import importing


def broken_import():
    """What fails to be imported; whether garbage was collected meanwhile."""
    with importing():
        raise ImportError(gc.isenabled())


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_inside_and_is_then_what_it_was(enabled):
    """Also where an import fails; and the time counts as imports."""
    start = phases.begin()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ImportError, match="False"):
            broken_import()
        assert gc.isenabled() is enabled
        assert [each.phase for each in start.record().stretches] == ["imports"]
    finally:
        gc.enable()
        phases.end()
