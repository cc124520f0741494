"""Names that packages import under their old home are found there, with a warning."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tlora_fx.host.moved import MODULES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("tlora_fx.runtime.adapters", "read_adapter", "tlora_fx.runtime.adapters.files"),
        ("tlora_fx.runtime.data", "JobData", "tlora_fx.runtime.data.samples"),
        ("tlora_fx.batch", "pack", "tlora_fx.model.batch"),
        ("tlora_fx.driver", "resolve_pipeline", "tlora_fx.compiler"),
        ("tlora_fx.graph", "GroupGraph", "tlora_fx.ir.graph"),
        ("tlora_fx.inspect.recorder", "Recorder", "tlora_fx.inspect.program"),
        ("tlora_fx.runtime.weights", "base_tensors", "tlora_fx.runtime.adapters.files"),
        ("tlora_fx.scheduler.bases", "demand_of", "tlora_fx.cost.load"),
        ("tlora_fx.scheduler.cluster", "Cluster", "tlora_fx.cost.hardware"),
        ("tlora_fx.scheduler.demand", "Demand", "tlora_fx.cost.load"),
        ("tlora_fx.scheduler.estimator", "ProfileEstimator", "tlora_fx.cost.estimator"),
        ("tlora_fx.scheduler.estimator_explain", "table_of", "tlora_fx.cost.estimator"),
        ("tlora_fx.scheduler.estimator_profiles", "profiles_for", "tlora_fx.cost.profile_sources"),
        ("tlora_fx.scheduler.placement", "Placer", "tlora_fx.scheduler.search.placement"),
        ("tlora_fx.shapes", "propagate", "tlora_fx.ir.shapes"),
        ("tlora_fx.stored", "stored_as", "tlora_fx.ir.storage"),
    ],
)
def test_an_old_name_is_the_new_one(old, name, new):
    """The warning says where it stands now; what never was there is no attribute."""
    with pytest.warns(DeprecationWarning, match=f"{new}.{name}"):
        found = getattr(import_module(old), name)

    assert found is getattr(import_module(new), name)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = import_module(old).nothing_such


def test_every_module_that_is_gone_is_tried_above():
    """None is in the table that is there, or leads nowhere."""
    (mark,) = test_an_old_name_is_the_new_one.pytestmark
    tried = {old: new for old, _, new in mark.args[1]}

    assert MODULES.items() <= tried.items()
    for old in MODULES:
        assert not (ROOT / f"{old.replace('.', '/')}.py").exists()


def test_a_warning_points_to_the_line_that_imports():
    """So that whoever wrote it finds it."""
    with pytest.warns(DeprecationWarning, match="is_call") as caught:
        from tlora_fx.graph import is_call  # noqa: F401

    assert {warning.filename for warning in caught} == {__file__}
