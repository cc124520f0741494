"""A state in a folder, for a command that judges it."""

from __future__ import annotations

from pathlib import Path

from tlora_fx.bisect.states import State
from tlora_fx.graph_file import save_graphs
from tlora_fx.inspect.instruments import state_source
from tlora_fx.inspect.node_entries import make_program
from tlora_fx.inspect.program import FILE
from tlora_fx.model.source import group_source

PROGRAM = "program.py"


def write_state(state: State, folder: Path, name: str, base: str) -> None:
    """Write graph files, the code, and the data of every node.

    name      of the last pass, "trace" before the first
    base      as the job file names it
    raises    GraphNotStorable, OSError
    """
    save_graphs(state.group, folder)
    fused = state.group.fused
    code = group_source(state.group, base) if fused else state_source(state.group)
    (folder / PROGRAM).write_text(code, encoding="utf-8")
    program = make_program(state.group, name, base)
    (folder / FILE).write_text(program.to_json(), encoding="utf-8")
