"""Which plan serves a site, and where what was measured is read from."""

from __future__ import annotations

import json

import pytest

from tlora_fx.ops.kernels import select
from tlora_fx.ops.kernels.support import Site

SITE = Site(16, 32, "float32", "float32", 16, 16, 5, "out_in", False, 64, 90)


@pytest.fixture
def own_table(tmp_path, monkeypatch):
    """Writes the user's table of measurements."""
    path = tmp_path / "own.json"
    monkeypatch.setattr(select, "own_table", lambda gpu: path)

    def write(**document):
        path.write_text(json.dumps(document))
        select.forget()
        return path

    yield write
    select.forget()


def test_a_table_of_another_format_is_left_out_with_a_warning(own_table, caplog):
    """Kernels had other names when it was measured."""
    path = own_table(format=select.FORMAT - 1, entries=[])

    assert select.plan_times("some GPU", "forward", SITE, 128) == {}
    assert f"{path} has another format and is left out; tune again" in caplog.text


def test_the_nearest_measurement_of_a_family_counts(own_table):
    """By tokens, width and tail; another family's does not."""
    family = select.family("forward", SITE)
    points = {128: 1.0, 4096: 2.0}
    entries = [
        {"family": family, "at": [tokens, 16, 64], "plans": {"sidecar": {"us": time}}}
        for tokens, time in points.items()
    ]
    own_table(format=select.FORMAT, entries=entries)

    (measured,) = select.plan_times("some GPU", "forward", SITE, 2048).values()
    assert measured.microseconds == 2.0
    assert select.plan_times("some GPU", "input_gradient", SITE, 2048) == {}
