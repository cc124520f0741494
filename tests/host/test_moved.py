"""Names that packages import under their old home are found there, with a warning."""

from __future__ import annotations

from importlib import import_module

import pytest


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("tlora_fx.runtime.adapters", "read_adapter", "tlora_fx.runtime.adapters.files"),
        ("tlora_fx.runtime.data", "JobData", "tlora_fx.runtime.data.samples"),
    ],
)
def test_an_old_name_is_the_new_one(old, name, new):
    """The warning says where it stands now; what never was there is no attribute."""
    with pytest.warns(DeprecationWarning, match=f"{new}.{name}"):
        found = getattr(import_module(old), name)

    assert found is getattr(import_module(new), name)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = import_module(old).nothing_such
