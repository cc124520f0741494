"""Dataclasses from JSON and back."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.inspect.programs import fused, lowered
from tlora_fx.inspect.program import Program, Stage
from tlora_fx.inspect.read_back import build


@dataclass(frozen=True)
class Inner:
    """A part."""

    size: int | str


@dataclass(frozen=True)
class Outer:
    """Of every kind of field."""

    by_name: dict[str, Inner]
    many: list[float]
    grown: list[int] = field(default_factory=list)


def test_mappings_lists_and_unions_are_read():
    """Each value by the type of its place."""
    data = {"by_name": {"a": {"size": "T"}, "b": {"size": 3}}, "many": [1, 2.5]}

    assert build(Outer, data) == Outer({"a": Inner("T"), "b": Inner(3)}, [1, 2.5])


@pytest.mark.parametrize(
    "data",
    [{}, [], {"by_name": [], "many": []}, {"by_name": {"a": 3}, "many": []},
     {"by_name": {}, "many": ["x"]}, {"by_name": {}, "many": [True]}],
    ids=["empty", "list", "no-mapping", "no-inner", "text", "truth"],
)  # fmt: skip
def test_what_does_not_fit_is_refused(data):
    """Missing fields by KeyError, wrong types by TypeError."""
    with pytest.raises((KeyError, TypeError)):
        build(Outer, data)


@pytest.mark.parametrize("program", [fused(), lowered()], ids=["fused", "lowered"])
def test_a_program_survives_json(program):
    """Nothing is lost or changed on the way."""
    assert Program.from_json(program.to_json()) == program


def test_a_stage_survives_json():
    """With the program in it."""
    stage = Stage(3, "fuse-backbone{max-jobs=8}", True, 0.25, fused())

    assert Stage.from_json(stage.to_json()) == stage


def test_a_program_of_another_schema_is_refused():
    """A field that changed its meaning raises the number."""
    text = lowered().to_json().replace('"schema": 1', '"schema": 2')

    with pytest.raises(ValueError, match="schema 2, expected 1"):
        Program.from_json(text)
