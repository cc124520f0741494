"""The survey of architectures: its page and its result agree, and some of it really runs."""

from __future__ import annotations

import json
import random
from collections import Counter
from importlib.metadata import version
from typing import Any

import pytest

from benchmarks.results_file import RESULTS
from benchmarks.survey import NO_PEFT, PAGE, USED, held_of, with_table
from tests import fresh
from tests.sampled import sampled

RESULT: dict[str, Any] = json.loads(max(RESULTS.glob("survey-*.json")).read_text())
BASES: dict[str, dict[str, Any]] = RESULT["bases"]
ADAPTED = sorted(name for name, found in BASES.items() if found["verdict"] != NO_PEFT)
#: GIT runs in each test run: its mask looks a table of the row up. The others are slow: masks of
#: the base's own, an attention of a model's own, and what a seed chooses.
SAMPLE = ("git", "biogpt", "gemma4", *random.Random(59).sample(ADAPTED, 9))

with_the_same_versions = pytest.mark.skipif(
    any(version(name) != RESULT["versions"][name] for name in USED),
    reason="surveyed with other versions",
)


def test_the_page_has_the_tables_of_the_result():
    """`python -m benchmarks.survey` writes them."""
    page = PAGE.read_text(encoding="utf-8")

    assert page == with_table(page, RESULT)


@with_the_same_versions
def test_one_command_writes_the_page_of_a_result_that_is_whole(tmp_path):
    """Nothing that the file holds runs again."""
    page, text = tmp_path / "models.md", PAGE.read_text(encoding="utf-8")
    page.write_text(text.replace("| afmoe | trains |", "| afmoe | unknown |"), encoding="utf-8")

    fresh.run("-m", "benchmarks.survey", "--page", page)

    assert page.read_text(encoding="utf-8") == text


def test_results_of_other_versions_run_again(tmp_path):
    """The table is of one transformers."""
    other = RESULT | {"versions": RESULT["versions"] | {"transformers": "0"}}
    (tmp_path / "survey.json").write_text(json.dumps(other))

    assert held_of(tmp_path / "survey.json", RESULT) == {}
    assert held_of(max(RESULTS.glob("survey-*.json")), RESULT) == BASES


def test_no_architecture_trains_otherwise_or_ends_in_words_of_another_library():
    """And three of four that PEFT adapts train."""
    parts = [part for name in ADAPTED for part in (BASES[name], BASES[name].get("padded"))]
    verdicts = Counter(part["verdict"] for part in parts if part)

    assert verdicts.keys() == {"equal", "refused"}
    assert sum(BASES[name]["verdict"] == "equal" for name in ADAPTED) >= 0.75 * len(ADAPTED)


@with_the_same_versions
@pytest.mark.parametrize("name", sampled(SAMPLE, len(SAMPLE)))
def test_an_architecture_trains_or_is_refused_as_the_result_says(tmp_path, name):
    """In the same forms, by the same error."""
    out = tmp_path / "survey.json"

    fresh.run("-m", "benchmarks.survey", "--out", out, "--only", name)

    found = json.loads(out.read_text())["bases"][name]
    assert said(found) == said(BASES[name])


def said(found: dict[str, Any]) -> list[Any]:
    """What of a verdict is the same on each machine."""
    parts = [found, found.get("padded", {})]
    return [part.get(key) for part in parts for key in ("verdict", "form", "code")]
