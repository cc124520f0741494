"""What docs/inspecting.md shows is what comes out."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from tlora_fx.cli import main
from tlora_fx.inspect.dump import dump
from tlora_fx.inspect.schema import GraphEntry, Listing, NodeEntry, PassStage, Program

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/inspecting.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```\n\$ tlora-fx (.*?)\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def folder(quickstart, quickstart_stages, tmp_path_factory) -> Path:
    """A folder as the page has it: examples, and the dump of the quickstart."""
    path = tmp_path_factory.mktemp("page")
    (path / "examples").symlink_to(ROOT / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        dump(quickstart, path / "build/quickstart", quickstart_stages)
    return path


@pytest.mark.parametrize(
    ("command", "lines"), SHOWN, ids=[f"{number}" for number in range(len(SHOWN))]
)
def test_what_the_page_shows_is_what_comes_out(command, lines, folder, monkeypatch, capsys):
    """Every line but `...`, in its order."""
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as end:
        main(shlex.split(command))
    out = iter(line.rstrip() for line in capsys.readouterr().out.splitlines())

    assert end.value.code == 0
    for line in lines.splitlines():
        assert line == "..." or line in out, line


def test_the_python_examples_run(folder, monkeypatch, capsys):
    """They print the listing, name every pass, and the node that costs most."""
    printing, watching = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    monkeypatch.chdir(folder)
    exec(compile(printing, "inspecting.md", "exec"), {})
    out = capsys.readouterr().out

    assert "layers.0-3 ×4" in out
    assert "GroupGraph(['word-problems', 'small-talk', 'records'], packed rows, fused, " in out

    exec(compile(watching, "inspecting.md", "exec"), {})
    out = capsys.readouterr().out

    assert "9 lower-loss" in out
    assert "head:lm_head" in out


@pytest.mark.parametrize("kind", [NodeEntry, GraphEntry, Program, PassStage, Listing])
def test_the_page_names_every_field(kind):
    """The documented schema is the real one."""
    names = [field.name for field in fields(kind)]
    told = {"schema", "version", "form", "adapter_dtype"} if kind in (Listing, Program) else set()

    assert [name for name in names if f"`{name}`" not in PAGE and name not in told] == []
