"""`ssm.json`: read back what was written, and refuse what is something else."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tlora_fx.errors import DumpNotReadable
from tlora_fx.inspect.read_back import build
from tlora_fx.inspect.schema import Listing, load_listing


@pytest.mark.parametrize("name", ["quickstart", "odd", "many", "padded"])
def test_a_listing_survives_json(name, request):
    """Nothing is lost or changed on the way."""
    listing = request.getfixturevalue(f"{name}_listing")

    assert Listing.from_json(listing.to_json()) == listing


def test_the_data_is_as_accepted(quickstart_listing, golden):
    """The schema is a promise: a change of this file is a change of it."""
    data = json.loads(quickstart_listing.to_json())
    for block in data["blocks"]:
        for row in block["rows"]:
            row["source"] = ""  # a line of transformers, which moves with its version
    golden("inspect/quickstart.json", Listing.from_json(json.dumps(data)).to_json())


def test_fields_of_a_later_version_are_passed_over(quickstart_listing):
    """Within one schema number fields are only added."""
    data = json.loads(quickstart_listing.to_json())
    data["later"] = 1
    data["jobs"][0]["later"] = {}

    assert Listing.from_json(json.dumps(data)) == quickstart_listing


def test_a_field_that_came_later_has_its_default_in_an_older_file():
    """A reader that knows more reads what has less."""

    @dataclass(frozen=True)
    class Grown:
        old: int
        new: str = "default"

    assert build(Grown, {"old": 3}) == Grown(3)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1}', "null", "\0"])
def test_what_is_no_listing_is_refused(tmp_path, text):
    """By name, with what to do."""
    (tmp_path / "ssm.json").write_text(text)

    with pytest.raises(DumpNotReadable, match="tlora-fx compile"):
        load_listing(tmp_path)


def test_a_field_of_a_wrong_type_is_refused(quickstart_listing, tmp_path):
    """A number where a list belongs."""
    data = {**json.loads(quickstart_listing.to_json()), "jobs": 3}
    (tmp_path / "ssm.json").write_text(json.dumps(data))

    with pytest.raises(DumpNotReadable):
        load_listing(tmp_path)


def test_a_folder_without_a_dump_is_refused(tmp_path):
    """With the command that makes one."""
    with pytest.raises(DumpNotReadable, match="there is no compiled model here"):
        load_listing(tmp_path)


def test_rendering_needs_no_torch():
    """All views are made of the data alone."""
    code = (
        "import sys, tlora_fx.inspect.text, tlora_fx.inspect.report, tlora_fx.inspect.screen\n"
        "sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
