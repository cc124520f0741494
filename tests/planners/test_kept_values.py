"""Bytes that layers are taken to keep for their backward, beside those that a compiler keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from tests.models import base_of, job, ready, row_of, tokens
from tlora_fx.planners.builtin import activation_bytes

LENGTHS = [64, 32, 64, 48]


@pytest.mark.parametrize(
    ("family", "lora"),
    [("llama", {}), ("llama", {"use_dora": True}), ("gpt2", {}), ("lfm2", {})],
)
def test_compiled_layers_keep_no_more_than_is_counted(
    tmp_path: Path, family: str, lora: dict[str, Any]
) -> None:
    """As torch's partitioner cuts forward from backward; and they keep more than half of it."""
    base = base_of(tmp_path, family, dtype="float64")
    model = ready([job("a", base, r=2, target_modules="all-linear", **lora)])
    row = row_of(model, [tokens(LENGTHS)])

    kept = kept_bytes(model, row)

    assert kept <= activation_bytes(model, sum(LENGTHS), compiled=True) <= 2 * kept


def kept_bytes(model: Any, row: Any) -> int:
    """Bytes that autograd holds after the forward of a compiled model, without its parameters."""
    backend: Any = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    model.compile(backend=backend)
    own = {
        tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())
    }
    found: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.weighted(row, torch.ones(1, dtype=torch.float64))
    return sum(found.values())
