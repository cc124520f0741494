"""Each row of docs/toolkits.md runs as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.test_compile import jobs, run  # noqa: F401  (`jobs` is a fixture)
from tlora_fx.compiler import run_passes
from tlora_fx.graph_file import graph_text, load_graphs, save_graphs

PAGE = (Path(__file__).parents[1] / "docs" / "toolkits.md").read_text(encoding="utf-8")
PAGE = PAGE.partition("## Where others are")[0]
ROWS = re.findall(r"^\|[^|`]+: `([^`]+)`\|", PAGE, flags=re.MULTILINE)
# What a command prints, or leaves in a file; those that compile jobs take their time.
SHOWS = {
    "opt fused.tfx --pipeline lower-adapters": "multi_lora_linear",
    "opt fused.tfx --print graph -o again.tfx": "again.tfx",
    "passes show lower-adapters": "compute",
    "opt fused.tfx --pipeline cse,dce --verify structure": "def forward",
    "opt fused.tfx --pipeline lower-adapters --time --print-after lower-adapters": "lower-adapters",
    "opt fused.tfx --pipeline lower-adapters --pass-statistics": "propagated",
    "replay build/replay": "does not work",
    "reduce fused.tfx --check 'grep -q silu {}'": "fused.reduced.tfx",
    "bisect --check 'python check.py {}' jobs.yaml": "lower-adapters",
    "opt fused.tfx --pipeline lower-adapters --verify numerics": "def forward",
    "explain jobs.yaml --node q_proj": "q_proj",
}
LONG = ("replay", "reduce", "bisect", "explain", "numerics")
PASS = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from tlora_fx.pipeline import GroupPass, register
from tlora_fx.rewriting import Rewriter, anything, call
"""
FAILS = '''
@register
@dataclass(frozen=True, slots=True)
class Fails(GroupPass):
    """Raise."""

    name: ClassVar[str] = "fails"

    def run(self, group):
        raise ValueError("does not work")
'''
WRONG = '''
MUL, ADD = torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor

@register
@dataclass(frozen=True, slots=True)
class Wrong(GroupPass):
    """Add a scale instead of multiplying with it."""

    name: ClassVar[str] = "wrong"

    def run(self, group):
        for graph in group.graphs():
            rewriter = Rewriter(graph)
            for found in rewriter.find(call(MUL, anything("x"), anything("scale"))):
                if isinstance(found["scale"], float):
                    rewriter.replace(found, lambda make: make(ADD, found["x"], found["scale"]))
'''
CHECK = """
import pathlib, sys
sys.exit("multi_lora_linear" in pathlib.Path(sys.argv[1], "program.py").read_text())
"""


@pytest.fixture(scope="module")
def fused(jobs):  # noqa: F811
    """The folder of the jobs, with what rows of the table read."""
    folder = jobs.parent
    save_graphs(run_passes(jobs, stop_after="fuse-backbone"), folder / "fused.tfx")
    (folder / "check.py").write_text(CHECK)
    (folder / "fails.py").write_text(PASS + FAILS)
    (folder / "wrong.py").write_text(PASS + WRONG)
    return folder


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(row, marks=[pytest.mark.slow] * any(word in row for word in LONG))
        for row in ROWS
    ],
)
def test_a_row_of_the_table_runs(command, fused, monkeypatch, capsys):
    """And shows what the row says; a pass that failed fails again."""
    monkeypatch.chdir(fused)
    failing = command.startswith("replay")
    if failing:
        words = "compile jobs.yaml -o build --load fails.py --add-pass fails@after:fuse-backbone"
        assert run(*words.split()) == 1

    assert run(*shlex.split(command)) == (1 if failing else 0)

    told = capsys.readouterr()
    assert SHOWS[command] in told.out + told.err + " ".join(p.name for p in fused.iterdir())
    if "numerics" in command:
        assert run(*shlex.split(command.replace("lower-adapters", "wrong")), "--load=wrong.py") == 1
        assert "T0219" in capsys.readouterr().err
    if "again.tfx" in command:
        assert graph_text(load_graphs(fused / "again.tfx")) == (fused / "fused.tfx").read_text()


def test_every_row_has_a_command_of_its_own():
    """None of the table is only said."""
    rows = [line for line in PAGE.splitlines() if line.startswith("|")][2:]

    assert list(SHOWS) == ROWS
    assert len(rows) == len(ROWS)
