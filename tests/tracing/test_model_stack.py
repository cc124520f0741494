"""Traced nodes name the lines of model code that torch names."""

from __future__ import annotations

from contextlib import nullcontext

from tests.models import hand_written, plain
from tlora_fx.model.backbone import load_backbone
from tlora_fx.tracing import export, row_export


def test_nodes_have_the_stacks_that_torch_gives_them(monkeypatch):
    """The same text, from the row's forward to the line that calls the operator."""
    backbone = load_backbone(hand_written(plain(layers=2), "batch")[0].base)
    stacks = []

    def recorded(row, subject, make=export.export_row):
        module = make(row, subject)
        stacks.append([node.meta.get("stack_trace") for node in module.graph.nodes])
        return module

    monkeypatch.setattr(export, "export_row", recorded)
    export.trace_base(backbone, "batch")
    monkeypatch.setattr(row_export, "stacks_of_model", nullcontext)
    export.trace_base(backbone, "batch")

    ours, torchs = stacks
    assert ours == torchs
    assert any("scores = q @ k.transpose(1, 2)" in stack for stack in ours if stack)
