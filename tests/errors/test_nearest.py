"""The name that a user most likely meant."""

from __future__ import annotations

import pytest

from tlora_fx.errors import nearest


@pytest.mark.parametrize(
    ("name", "expected"),
    [("ONE", "one"), ("Chat-R4", "chat-r4"), ("chat-r5", "chat-r4"), ("two", None), ("", None)],
)
def test_the_nearest_name_may_differ_in_case_alone(name, expected):
    """In which no letter is the same; a name that is like none has no nearest one."""
    assert nearest(name, ["other", "one", "chat-r4"]) == expected
