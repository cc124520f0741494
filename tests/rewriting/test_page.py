"""What docs/rewriting.md shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import tlora_fx.rewriting

PAGE = (Path(__file__).parents[2] / "docs" / "rewriting.md").read_text(encoding="utf-8")


def test_the_examples_run_one_after_another():
    """In one namespace, each on what those before it left."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, object] = {}

    for block in blocks:
        exec(compile(block, "docs/rewriting.md", "exec"), names)

    assert len(blocks) > 5


def test_the_page_names_everything_public():
    """Each helper has a place on the page, types aside."""
    helpers = [name for name in tlora_fx.rewriting.__all__ if name[0].islower()]

    assert [name for name in helpers if name not in PAGE and name != "arguments_of"] == []
