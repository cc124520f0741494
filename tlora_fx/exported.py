"""Export a Shared Super-Model as one flat `torch.export` program.

The program runs where torch and `tlora_fx.ops` are, without transformers, PEFT and the graphs that
it was made of.
"""

from __future__ import annotations

from torch import nn
from torch.export import Dim, ExportedProgram, export

from tlora_fx.ir.graph import GroupGraph
from tlora_fx.model.batch import JobTokens, PackedBatch, pack, pad
from tlora_fx.model.compiled import row_sizes
from tlora_fx.model.loss import ChunkedLoss


def export_net(
    net: nn.Module, group: GroupGraph, loss: ChunkedLoss, max_targets: int
) -> ExportedProgram:
    """Trace a net over one row that stands for all others.

    net           the modules that run the group's root
    loss          the net's loss
    max_targets   the loss runs in as many chunks as so many targets need
    """
    device = next(net.parameters()).device
    row = _example(group).to(device)
    sizes = row_sizes(group.root)
    inputs = {name: getattr(row, name) for name in sizes}
    dynamic = {name: dict.fromkeys(places, Dim.DYNAMIC) for name, places in sizes.items()}
    loss.pieces = loss.pieces_for(max_targets)
    try:
        return export(net, (), inputs, dynamic_shapes=dynamic, strict=False)
    finally:
        loss.pieces = None


def _example(group: GroupGraph) -> PackedBatch:
    """A row in the group's form, in which no size is 0 or 1: torch makes constants of those."""
    sequences = [[0, 0, 0], [0, 0, 0]]
    tokens = [JobTokens(sequences, sequences) for _ in group.jobs]
    return pack(tokens) if group.form == "packed" else pad(tokens)
