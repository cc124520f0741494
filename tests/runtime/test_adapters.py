"""Adapters where a process holds pieces of their tensors, or only some of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tlora_fx.errors import AdapterFolderError
from tlora_fx.ir.storage import Shard
from tlora_fx.runtime.adapters.files import load_adapter

STEM = "base_model.model.q_proj.lora_"
A, B = f"{STEM}A.default.weight", f"{STEM}B.default.weight"
FILE = {
    f"{STEM}A.weight": torch.arange(12.0).view(2, 6),
    f"{STEM}B.weight": torch.arange(8.0).view(4, 2),
}


def parameters(**shapes):
    names = {"a": A, "b": B}
    return {names[key]: nn.Parameter(torch.zeros(shape)) for key, shape in shapes.items()}


def test_a_piece_takes_its_part_of_a_file():
    """A is cut by columns over three processes, B whole."""
    mine = parameters(a=(2, 2), b=(4, 2))

    load_adapter(mine, FILE, "folder", {A: Shard(1, 2, 3), B: None})

    assert torch.equal(mine[A], FILE[f"{STEM}A.weight"][:, 4:])
    assert torch.equal(mine[B], FILE[f"{STEM}B.weight"])


def test_a_process_that_holds_some_layers_takes_theirs():
    """What others hold is no mistake there, and is one where all should be held."""
    mine = parameters(b=(4, 2))

    load_adapter(mine, FILE, "folder", whole=False)
    assert torch.equal(mine[B], FILE[f"{STEM}B.weight"])

    with pytest.raises(AdapterFolderError, match="lora_A"):
        load_adapter(mine, FILE, "folder")


def test_a_piece_of_another_size_is_refused_with_the_whole_shape():
    """Three pieces of two columns are six."""
    with pytest.raises(AdapterFolderError) as refused:
        load_adapter(parameters(a=(2, 3), b=(4, 2)), FILE, "folder", {A: Shard(1, 0, 3)})

    assert refused.value.facts["expected"] == "(2, 9)"
