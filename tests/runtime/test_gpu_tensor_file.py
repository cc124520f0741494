"""On a GPU: what files hold goes there and comes back as it is, whatever its size."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tlora_fx.runtime.checkpoints import tensor_file
from tlora_fx.runtime.checkpoints.tensor_file import as_file, file_tensors, moved, tensor_bytes

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


def drawn(count: int) -> dict[str, torch.Tensor]:
    """Tensors of several types and layouts, some beside the GPU."""
    torch.manual_seed(count)
    return {
        "moment": torch.randn(count, 3, device=GPU).t(),
        "scalar": torch.tensor(2.5, device=GPU),
        "half": torch.randn(count + 1, dtype=torch.bfloat16, device=GPU),
        "step": torch.tensor(7.0),
        "none": torch.empty(0, 4, device=GPU),
    }


@pytest.mark.parametrize("count", [1, 5, 300, 4096, 70_000])
def test_tensors_come_and_go_in_pieces(monkeypatch, count):
    """In pieces of which there is one, or hundreds, whose last is not full."""
    monkeypatch.setattr(tensor_file, "STAGED", 4096)
    monkeypatch.setattr(tensor_file, "_stage_of", tensor_file._Stage)
    tensors = drawn(count)

    lying = as_file(tensors)
    there = moved(file_tensors(memoryview(bytearray(tensor_bytes(lying)))), GPU)

    for name, tensor in tensors.items():
        assert lying[name].device.type == "cpu"
        assert torch.equal(lying[name], tensor.cpu())
        assert there[name].device == GPU
        assert torch.equal(there[name], tensor.to(GPU))


def test_copies_of_several_threads_do_not_meet():
    """A checkpoint is made while another one's tensors still come."""
    given = [drawn(3_000_000 + index) for index in range(4)]
    torch.cuda.synchronize()

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(as_file, given))

    for tensors, lying in zip(given, found, strict=True):
        assert all(torch.equal(lying[name], tensor.cpu()) for name, tensor in tensors.items())
