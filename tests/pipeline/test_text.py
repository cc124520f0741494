"""The text form of pipelines, and the options of passes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import error_of
from tlora_fx.compiler import DEFAULT_PIPELINE
from tlora_fx.errors import PipelineError
from tlora_fx.ir.graph import JobGraph
from tlora_fx.passes import find_passes
from tlora_fx.passes.lower_adapters import LowerAdapters
from tlora_fx.pipeline import REGISTRY, JobPass, checked, options_of, parse_pipeline


@dataclass(frozen=True, slots=True)
class Options(JobPass):
    """A pass with an option of every type; never run."""

    name: ClassVar[str] = "options"

    number: int = 3
    ratio: float = 0.5
    flag: bool = False
    some_text: str = "plain"
    maybe: int | None = None
    sizes: tuple[int, ...] = (1, 2)
    words: frozenset[str] = frozenset({"a"})
    folder: Path | None = None

    def run(self, graph: JobGraph) -> None:
        """Do nothing."""


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """The pass with options is known during a test."""
    find_passes()
    monkeypatch.setitem(REGISTRY, Options.name, Options)
    monkeypatch.setitem(REGISTRY, Needs.name, Needs)


OPTIONS = st.builds(
    Options,
    number=st.integers(),
    ratio=st.floats(allow_nan=False),
    flag=st.booleans(),
    some_text=st.text(max_size=12),
    maybe=st.none() | st.integers(),
    sizes=st.lists(st.integers(), max_size=3).map(tuple),
    words=st.frozensets(st.text(max_size=5), max_size=3),
    folder=st.none() | st.just(Path("some folder/with {braces}")),
)


@dataclass(frozen=True, slots=True)
class Needs(JobPass):
    """A pass with an option that must be given; never run."""

    name: ClassVar[str] = "needs"

    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("the number is below 0")

    def run(self, graph: JobGraph) -> None:
        """Do nothing."""


@given(st.lists(OPTIONS, min_size=1, max_size=4))
def test_a_pipeline_reads_back_what_it_prints(passes):
    """Text and pipeline are two forms of one thing, whatever the options hold."""
    pipeline = checked(passes)

    assert parse_pipeline(str(pipeline)) == pipeline


def test_the_default_pipeline_reads_back():
    """What runs when nothing is named, with and without an option."""
    for text in (DEFAULT_PIPELINE, DEFAULT_PIPELINE.replace("backbone", "backbone{max-jobs=8}")):
        assert str(parse_pipeline(text)) == text


def test_options_at_their_default_are_left_out():
    """The text says what differs."""
    assert str(Options()) == "options"
    assert str(Options(number=4)) == "options{number=4}"
    assert parse_pipeline(" options{ number=4  flag=true } ").passes == (
        Options(number=4, flag=True),
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("drop-export-nose", "drop-export-noise"),
        ("options{numbr=3}", "number"),
        ("options{number=3", "separate passes by commas"),
        ("options options", "separate passes by commas"),
        ("tag-roles", "put drop-export-noise before tag-roles"),
        ("check-token-parallel,drop-export-noise", "job passes come first"),
        ("fuse-backbone", "put fold-layers, check-token-parallel before fuse-backbone"),
        ("options{number=many}", "number"),
        ("options{flag=3}", "flag"),
        ("options{number=1 number=2}", "given twice"),
        ("options{sizes=3}", "sizes"),
        ("lower-adapters{compute=half}", "job | base | float32"),
        ("needs", "needs{number=...}"),
        ("needs{number=-1}", "the number is below 0"),
    ],
)
def test_a_wrong_pipeline_says_how_to_mend_it(text, told):
    """Unknown names get the nearest known one, wrong orders what is missing."""
    assert told in error_of(lambda: parse_pipeline(text), PipelineError)


def test_every_pass_is_known_by_the_name_of_its_file():
    """passes/fuse_backbone.py holds `fuse-backbone`, token_parallel/check.py the check of it."""
    for name, cls in REGISTRY.items():
        if cls in (Options, Needs):
            continue
        *folder, file = cls.__module__.removeprefix("tlora_fx.passes.").split(".")
        words = [file, *folder[0].split("_")] if folder else file.split("_")
        assert name.split("-") == words[: len(name.split("-"))]
        assert cls.__name__.lower() == name.replace("-", "")
        assert dataclasses.is_dataclass(cls)


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_pass_is_added_beside_another(side):
    """It stands right before or right after the pass that is named."""
    names = [item.name for item in parse_pipeline(DEFAULT_PIPELINE).passes]

    longer = parse_pipeline(DEFAULT_PIPELINE).adding(f"options{{number=4}}@{side}:tag-roles")

    place = names.index("tag-roles") + (side == "after")
    assert [item.name for item in longer.passes] == [*names[:place], "options", *names[place:]]
    assert longer.passes[place] == Options(number=4)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("options", "@after:"),
        ("options@behind:tag-roles", "@after:"),
        ("options@after:tag-rolls", "nearest  tag-roles"),
        ("optoins@after:tag-roles", "nearest  options"),
        ("options,options@after:tag-roles", "one pass is expected"),
        ("options@after:fuse-backbone", "job passes come first"),
    ],
)
def test_a_pass_that_cannot_be_added_says_why(text, told):
    """Unknown names get the nearest known one; the order is checked."""
    pipeline = parse_pipeline(DEFAULT_PIPELINE)

    assert told in error_of(lambda: pipeline.adding(text), PipelineError)


def test_a_pipeline_is_cut_off_after_a_pass():
    """`until` keeps the passes up to the named one, with it."""
    pipeline = parse_pipeline(DEFAULT_PIPELINE)

    assert [item.name for item in pipeline.until("fold-layers").passes] == [
        "drop-export-noise",
        "tag-roles",
        "fold-layers",
    ]


@pytest.mark.parametrize("value", ["cumsum,raw=true", "a=b", "[1,2"])
def test_a_value_that_is_neither_word_nor_json_is_refused(value):
    """Two options with a comma between them would be one long text."""
    with pytest.raises(PipelineError) as error:
        parse_pipeline(f"options{{number={value}}}")

    assert "cannot be read" in str(error.value)
    assert "separate options by blanks" in str(error.value)


def test_options_are_told_from_the_dataclass():
    """Name, type and default from the fields, what they do from the docstring."""
    option, other = options_of(LowerAdapters)

    assert other.name == "dora"
    assert (option.name, option.kind, option.default) == ("compute", "job | base | float32", "job")
    assert option.help.startswith("dtype in which adapters multiply")
