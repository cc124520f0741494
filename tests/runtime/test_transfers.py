"""Small tensors that are moved together arrive as each by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tlora_fx.runtime import transfers

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensors_on(device: str) -> dict[str, Tensor]:
    """Rows of a bank and columns of its transpose, scalars, empty ones, and other dtypes."""
    torch.manual_seed(3)
    bank = torch.randn(12, 7, device=device)
    return {
        "a": nn.Parameter(bank[2:5]),
        "b": nn.Parameter(bank[2:5].t()),
        "step": torch.tensor(4.0, device=device),
        "gaps": bank[:, 1:4],
        "empty": bank[:0],
        "half": torch.randn(3, 5, device=device).bfloat16().t(),
        "vector": torch.arange(9, device=device),
    }


@pytest.mark.parametrize("device", DEVICES)
def test_copies_are_contiguous_and_nobody_elses(device: str) -> None:
    tensors = tensors_on(device)
    found = transfers.on_cpu(tensors)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].is_contiguous()
        assert torch.equal(found[name], tensor.detach().cpu())
        assert not found[name].requires_grad
        found[name].zero_()
    assert tensors["a"].abs().sum() > 0


@pytest.mark.parametrize("device", DEVICES)
def test_values_reach_tensors_of_any_layout(device: str) -> None:
    wanted = transfers.on_cpu(tensors_on(device))
    targets = tensors_on(device)
    for target in targets.values():
        target.detach().zero_()
    transfers.fill((targets[name], wanted[name]) for name in wanted)
    for name, target in targets.items():
        assert torch.equal(target.detach().cpu(), wanted[name])


def test_one_transfer_takes_what_lies_in_rows_and_in_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = [(name, each.detach()) for name, each in tensors_on("cpu").items()]
    floats = [(name, each) for name, each in named if each.dtype == torch.float32]
    for name, each in transfers._fetched(floats):
        assert each.is_contiguous()
        assert torch.equal(each, dict(floats)[name])
    values = [each.clone() for _, each in floats]
    for _, each in floats:
        each.zero_()
    # Overlapping ones agree on what they hold.
    transfers._send([(t, v) for (_, t), v in zip(floats, values, strict=True)], torch.device("cpu"))
    for (_, target), value in zip(floats, values, strict=True):
        assert torch.equal(target, value)
    monkeypatch.setattr(transfers, "_MOST", 100)
    sizes = [sum(t.nbytes for _, t in some) for some in transfers._portions(floats)]
    assert sum(sizes) == sum(each.nbytes for _, each in floats)
    assert len(sizes) > 2
