"""Tensors in pieces are what torch makes of them, whenever that is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import BaseNotLoadable
from tlora_fx.model import late_tensors
from tlora_fx.model.backbone import load_backbone
from tlora_fx.model.late_tensors import CannotWait, LoadedTensors, MergesLater
from tlora_fx.runtime.adapters import files


@pytest.fixture
def later(monkeypatch):
    """What leaves small tensors in pieces, too."""
    monkeypatch.setattr(late_tensors, "LATE_BYTES", 0)
    return MergesLater()


def parts(count, *shape):
    return [torch.randn(shape) for _ in range(count)]


@pytest.mark.parametrize("outer", [0, 1, 2, -1])
@pytest.mark.parametrize("inner", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacks_of_stacks_are_those_of_torch(later, outer, inner, dtype):
    """Along each dimension, from the front and from behind."""
    left, right = ([x.to(dtype) for x in parts(3, 4, 5)] for _ in range(2))
    with later:
        late = torch.cat([torch.stack(left, inner), torch.stack(right, dim=inner)], dim=outer)
        stacked = torch.stack([late, torch.ones_like(late, device="cpu")])

    whole = torch.cat([torch.stack(left, inner), torch.stack(right, inner)], outer)
    assert later.late(late).stand_in.is_meta
    assert torch.equal(later.late(late).whole(), whole)
    assert torch.equal(later.late(stacked).whole(), torch.stack([whole, torch.ones_like(whole)]))


def test_a_parameter_and_a_state_are_known_again(later):
    """As transformers keeps what it has loaded."""
    module, experts = nn.Linear(5, 4), parts(2, 2, 5)
    with later:
        weight = torch.cat(experts)
        module.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())

    state = module.state_dict()
    assert torch.equal(later.late(state["weight"]).whole(), torch.cat(experts))
    assert later.late(state["bias"]) is None


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.transpose(0, 1).contiguous(),
        lambda x: x * 2,
        lambda x: x.float().sum(),
        lambda x: x[1],
        lambda x: x.cpu(),
        lambda x: torch.tensor(x.tolist()),
        lambda x: torch.tensor(x.numpy().sum()),
        lambda x: torch.stack([x[0], x[1]]),
        lambda x: torch.cat([x, torch.zeros(1, 4, 5, dtype=torch.float64)]),
    ],
)
def test_what_reads_numbers_gets_them(later, read):
    """Some checkpoints are turned behind their stacks."""
    experts = parts(3, 4, 5)
    with later:
        found = read(torch.stack(experts))
        found = late.whole() if (late := later.late(found)) else found

    assert torch.equal(found, read(torch.stack(experts)))


def filled(x):
    x[0] = 2


def doubled(x):
    x *= 2


@pytest.mark.parametrize(
    "write",
    [
        filled,
        doubled,
        lambda x: x.mul_(2),
        lambda x: x.data.zero_(),
        nn.init.normal_,
        lambda x: torch.add(x, x, out=x),
        lambda x: torch.ones_like(x, device="cpu").copy_(x),
    ],
)
def test_what_writes_is_refused(later, write):
    """Nothing that was written may be lost."""
    with later, pytest.raises(CannotWait):
        write(torch.stack(parts(3, 4, 5)))


@pytest.mark.parametrize(
    "tensors",
    [
        parts(1, 4, 5),
        [torch.ones(4, 5), torch.ones(4, 5, dtype=torch.bfloat16)],
        [torch.ones(5, 4).t(), torch.ones(4, 5)],
        [torch.ones(4, 5, requires_grad=True), torch.ones(4, 5)],
    ],
)
def test_others_are_put_together_at_once(later, tensors):
    """One alone, of several dtypes, turned, or with gradients."""
    with later:
        found = torch.cat(tensors)

    assert not later.was_used
    assert torch.equal(found, torch.cat(tensors))


def test_small_ones_are_put_together_at_once():
    """Many small stacks would be more work than one large tensor."""
    with MergesLater() as later:
        torch.stack(parts(3, 4, 5))

    assert not later.was_used


# Checkpoints of mixtures, as transformers writes and reads them.

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 32,
}  # fmt: skip
QWEN = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}
MIXTURES = {
    "qwen3_moe": QWEN,
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(params=MIXTURES)
def checkpoint(request, tmp_path):
    """A base of random numbers with each expert's matrices by themselves, and its state."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **SIZES, **MIXTURES[request.param])
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "base")
    return BaseSpec(model=str(tmp_path / "base"), dtype="float32"), model.state_dict()


def test_experts_of_a_checkpoint_are_loaded_in_pieces(later, checkpoint):
    """With the numbers that were written, to the bit."""
    spec, state = checkpoint
    backbone = load_backbone(spec)
    loaded = files.base_tensors(backbone)

    assert isinstance(loaded, LoadedTensors)
    late = [name for name in loaded if loaded.late(name)]
    assert len(late) == 4
    assert all("experts" in name for name in late)
    canonical = files.canonical_names(backbone)
    for name, tensor in state.items():
        assert torch.equal(loaded[canonical[name]], tensor), name


def test_a_library_that_writes_into_pieces_loads_them_at_once(later, checkpoint, monkeypatch):
    """What it does then is done to the weights, as without pieces."""
    spec, state = checkpoint
    load = files._from_checkpoint

    def doubled(*given):
        model, info = load(*given)
        for parameter in model.parameters():
            parameter.data.mul_(2)
        return model, info

    monkeypatch.setattr(files, "_from_checkpoint", doubled)
    backbone = load_backbone(spec)
    loaded = files.base_tensors(backbone)

    assert not [name for name in loaded if loaded.late(name)]
    canonical = files.canonical_names(backbone)
    for name, tensor in state.items():
        assert torch.equal(loaded[canonical[name]], 2 * tensor), name


def test_a_damaged_expert_is_told_as_before(later, checkpoint, tmp_path):
    """A checkpoint whose last bytes are missing."""
    spec, _ = checkpoint
    [weights] = (tmp_path / "base").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])

    with pytest.raises(BaseNotLoadable):
        files.base_tensors(load_backbone(spec))
