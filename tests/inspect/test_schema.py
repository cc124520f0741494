"""The JSON of a dump: read back what was written, and refuse what is something else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.inspect.programs import fused, lowered
from tests.sampled import sampled
from tlora_fx.errors import DumpNotReadable
from tlora_fx.inspect.schema import Listing, PassStage, Program


@pytest.mark.parametrize("name", sampled(["quickstart", "narrow", "odd", "padded"], 2))
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


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1}', "null", "\0"])
def test_what_is_no_listing_is_refused(tmp_path, text):
    """By name, with what to do."""
    (tmp_path / "ssm.json").write_text(text)

    with pytest.raises(DumpNotReadable, match="tlora-fx compile"):
        Listing.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"jobs": 3}, {"form": 1}, {"version": True}, {"notes": [{"by": "x"}]}, {"blocks": [[]]}],
    ids=["no-list", "no-text", "truth", "missing", "no-entry"],
)
def test_a_field_of_a_wrong_type_is_refused(change, quickstart_listing, tmp_path):
    """Lists, texts, numbers and entries each where they belong."""
    data = json.loads(quickstart_listing.to_json()) | change
    (tmp_path / "ssm.json").write_text(json.dumps(data))

    with pytest.raises(DumpNotReadable):
        Listing.load(tmp_path)


def test_a_folder_without_a_dump_is_refused(tmp_path):
    """With the command that makes one."""
    with pytest.raises(DumpNotReadable, match="there is no compiled model here"):
        Listing.load(tmp_path)


def test_rendering_needs_no_torch():
    """All views are made of the data alone."""
    code = (
        "import sys, tlora_fx.inspect.text, tlora_fx.inspect.diff, tlora_fx.tools.subject\n"
        "sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("program", [fused(), lowered()], ids=["fused", "lowered"])
def test_a_program_survives_json(program):
    """Nothing is lost or changed on the way."""
    assert Program.from_json(program.to_json()) == program


def test_a_stage_survives_json():
    """With the program in it."""
    stage = PassStage(3, "fuse-backbone{max-jobs=8}", True, 0.25, fused())

    assert PassStage.from_json(stage.to_json()) == stage


def test_a_program_of_another_schema_is_refused():
    """A field that changed its meaning raises the number."""
    text = lowered().to_json().replace('"schema": 1', '"schema": 2')

    with pytest.raises(ValueError, match="Input should be 1"):
        Program.from_json(text)
