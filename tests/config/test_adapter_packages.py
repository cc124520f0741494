"""Kinds of adapters of other packages, found through their entry points."""

from __future__ import annotations

import sys
from importlib import invalidate_caches

import pytest

from tests.models import error_of
from tlora_fx.config.job import Job
from tlora_fx.config.other_kinds import (
    IA3Spec,
    kind_of,
    other_kind,
    other_kind_names,
    plugin_kinds,
    register_tuner,
)
from tlora_fx.errors import JobError, PluginBroken

SPECS = """
from typing import ClassVar
from tlora_fx.config.other_kinds import OtherKind

class GoodSpec(OtherKind):
    frozen: ClassVar[tuple[str, ...]] = (".good_still",)
    vectors: ClassVar[bool] = True
    r: int = 8

class LostSpec(OtherKind):
    tuner: ClassVar[str] = "strange_lost_tuner"

class ForgetfulSpec(OtherKind):
    tuner: ClassVar[str] = "strange_specs"

class NoSpec:
    pass
"""
ENTRIES = """
[tlora_fx.adapters]
strangegood = strange_specs:GoodSpec
strangelost = strange_specs:LostSpec
strangeforgetful = strange_specs:ForgetfulSpec
strangegone = strange_gone:Spec
strangenone = strange_specs:NoSpec
ia3 = strange_specs:GoodSpec
"""


@pytest.fixture
def strangers(tmp_path, monkeypatch):
    """A folder with the package and its metadata, on the path."""
    (tmp_path / "strange_specs.py").write_text(SPECS)
    info = tmp_path / "strange-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strange\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    invalidate_caches()
    yield tmp_path
    sys.modules.pop("strange_specs", None)


def job_of(**lora):
    """A job of a kind."""
    return Job.model_validate(
        {"name": "a", "base": {"model": "m"}, "lora": lora, "data": {"path": "x.jsonl"}}
    )


def test_a_job_names_a_kind_of_another_package(strangers):
    """Its fields are validated by the package's spec; capitals do not matter."""
    job = job_of(peft_type="StrangeGood", r=3)

    assert kind_of(job.lora_fields) == "STRANGEGOOD"
    assert not job.is_lora
    assert job.dropout_field is None
    said = error_of(lambda: job_of(peft_type="strangegood", rr=3), JobError)
    assert "unknown key 'rr' in 'lora' of the kind Good" in said


def test_names_are_known_without_an_import(strangers):
    """And a job of LoRA imports nothing of strangers."""
    assert "STRANGEGOOD" in other_kind_names()
    job_of(r=3)

    assert "strange_specs" not in sys.modules


def test_nobody_takes_the_name_of_our_kind(strangers):
    """Ours stays; the stranger's is listed as broken."""
    found = {plugin.name: plugin for plugin in plugin_kinds()}

    assert other_kind("IA3") is IA3Spec
    assert "that tlora-fx trains" in found["ia3"].broken
    assert found["strangegood"].broken == ""
    assert "No module named 'strange_gone'" in found["strangegone"].broken


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("strangegone", "No module named 'strange_gone'"),
        ("strangenone", "strange_specs:NoSpec is no OtherKind"),
    ],
)
def test_a_broken_kind_that_is_asked_for_says_why(strangers, kind, said):
    """Which package, which entry, which error."""
    text = error_of(lambda: job_of(peft_type=kind), PluginBroken)

    assert "strange 1.2" in text
    assert said in text


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("STRANGELOST", "No module named 'strange_lost_tuner'"),
        ("STRANGEFORGETFUL", "it does not register STRANGEFORGETFUL with PEFT"),
    ],
)
def test_a_kind_that_peft_does_not_know_is_broken(strangers, kind, said):
    """The module that should make PEFT know it is named."""
    job = job_of(peft_type=kind)

    assert said in error_of(job.lora_config, PluginBroken)
    assert said in error_of(lambda: register_tuner(kind), PluginBroken)


def test_a_kind_with_vectors_is_refused_by_an_optimizer_of_matrices(strangers):
    """As IA³ is."""
    fields = {"lora": {"peft_type": "strangegood"}, "data": {"path": "x.jsonl"}, "optim": "muon"}
    said = error_of(lambda: Job(name="a", base={"model": "m"}, **fields), JobError)

    assert "STRANGEGOOD trains vectors" in said


def test_an_unknown_kind_is_refused_as_ever():
    """With what tlora-fx trains."""
    assert "kinds of packages" in error_of(lambda: job_of(peft_type="nobodys"), JobError)
