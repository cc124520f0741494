"""Where the solo trainer's masks come from, word by word."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from tlora_fx import ops
from tlora_fx.errors import OracleError
from tlora_fx.ops.philox import philox
from tlora_fx.ops.tables import site_id
from tlora_fx.runtime.keyed_dropout import (
    EAGER,
    KeyedDropout,
    attend,
    has_attention_dropout,
    register_attention,
)

RATE, SEED, STEP = 0.3, 9, 4
THRESHOLD = round(RATE * 65536)
SCALE = 65536 / (65536 - THRESHOLD)


class Inner(nn.Module):
    """Drops once by a module and twice by calls of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(RATE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three dropouts of x."""
        return self.drop(x), F.dropout(x, RATE, self.training), F.dropout(x, p=RATE)


class Outer(nn.Module):
    """Gives the inner module a path."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Inner()])

    def forward(self, x: Tensor) -> Any:
        """Call the inner module."""
        return self.inner[0](x)


def kept(token: int, column: int, site: int, last: int = 0) -> bool:
    """Whether an element is kept, straight from the definition of the masks."""
    counter = [torch.tensor(word) for word in (token, column // 8, site, last)]
    word = philox(*counter, (SEED, STEP))[(column % 8) // 2].item()
    return (word >> 16 * (column % 2)) % 65536 >= THRESHOLD


@pytest.mark.parametrize("flat", [False, True], ids=["lines", "flat"])
def test_each_dropout_has_its_modules_path_as_site(flat):
    """The first call in a module draws at its path, the second at path#1, and so on."""
    model = Outer()
    index = torch.tensor([[0, 1, 2], [2, 3, 4]])
    x = torch.ones(2, 3, 19, dtype=torch.float64)
    keyed = KeyedDropout(model, SEED)

    with keyed.row(STEP, index):
        found = model(x.flatten(0, 1) if flat else x)

    for part, site in zip(found, ("inner.0.drop", "inner.0", "inner.0#1"), strict=True):
        expected = [
            [SCALE * kept(token, column, site_id(site)) for column in range(19)]
            for token in index.flatten().tolist()
        ]
        assert torch.equal(part.view(6, 19), torch.tensor(expected, dtype=torch.float64))


def test_pefts_wrapping_does_not_change_a_site():
    """The prefix and the adapter's name are no part of lora_dropout's path."""
    base = nn.Sequential(nn.Linear(4, 4))
    config = peft.LoraConfig(r=2, lora_dropout=RATE, target_modules=["0"])
    model = peft.get_peft_model(base, config)
    sites: list[str] = []
    keyed = KeyedDropout(model, SEED)
    original = keyed.site
    keyed.site = lambda: sites.append(original()) or sites[-1]  # type: ignore[method-assign]

    with keyed.row(STEP, torch.arange(3)[None]):
        model(torch.ones(1, 3, 4))

    assert sites == ["0.lora_dropout"]


def test_attention_draws_by_query_key_and_head():
    """The weight of a key is kept as the definition says; a line may begin anywhere."""
    weights = torch.ones(2, 3, 10, 10, dtype=torch.float64)
    index = torch.tensor([[5], [15]]) + torch.arange(10)
    keyed = KeyedDropout(nn.Identity(), SEED)

    with keyed.row(STEP, index):
        found = keyed.drop_attention(weights, RATE)

    site = site_id("dropout")
    expected = [
        [
            [[SCALE * kept(query, key, site, head + 1) for key in line] for query in line]
            for head in range(3)
        ]
        for line in index.tolist()
    ]
    assert torch.equal(found, torch.tensor(expected, dtype=torch.float64))


def test_the_fused_models_operators_draw_the_same_masks():
    """What the oracle drops, keyed_dropout, multi_lora_linear and packed_attention drop too."""
    torch.manual_seed(0)
    index = torch.arange(7, dtype=torch.int64)[None]
    row = {
        "segments": torch.tensor([0, 7], dtype=torch.int32),
        "keys": torch.tensor([[SEED, STEP]]),
        "token_index": index.to(torch.int32),
    }
    rates, site = torch.tensor([RATE], dtype=torch.float64), torch.tensor(site_id("dropout"))
    x = torch.randn(1, 7, 19, dtype=torch.float64)
    keyed = KeyedDropout(nn.Identity(), SEED)
    with keyed.row(STEP, index):
        dropped = keyed.drop(x, RATE)
    assert torch.equal(dropped, ops.keyed_dropout(x, rates, *row.values(), site, 2))

    w, a, b = (torch.randn(*s, dtype=torch.float64) for s in ((5, 19), (3, 19), (3, 5)))
    ranks, scales = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([2.0]).double()
    found = ops.multi_lora_linear(
        x, w, None, a, b, ranks, scales, rates, *row.values(), site, torch.float64
    )
    torch.testing.assert_close(found, x @ w.t() + 2 * (dropped @ a.t()) @ b)

    q, k, v = torch.randn(3, 7, 4, 8, dtype=torch.float64)
    bounds, longest = torch.tensor([0, 7], dtype=torch.int32), torch.tensor(7, dtype=torch.int32)
    found, _ = ops.packed_attention(
        q, k, v, bounds, longest, *row.values(), site, 0.5, True, -1, 0.0, None, RATE
    )
    mask = torch.full((7, 7), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with keyed.row(STEP, index):
        parts = (part.transpose(0, 1)[None] for part in (q, k, v))
        expected, _ = attend(nn.Identity(), *parts, mask, scaling=0.5, dropout=RATE)
    torch.testing.assert_close(found, expected[0])


def test_dropout_outside_of_training_is_nothing():
    """A module in evaluation mode keeps every value."""
    x = torch.ones(1, 3, 8)
    model = Outer().eval()
    keyed = KeyedDropout(model, SEED)

    with keyed.row(STEP, torch.arange(3)[None]):
        module, call, always = model(x)

    assert torch.equal(module, x)
    assert torch.equal(call, x)
    assert not torch.equal(always, x)


class Unkeyed(nn.Module):
    """Calls a function that drops values on its own."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        """The call's result."""
        result: Tensor = self.call(x)
        return result


def attention_of_torch(x: Tensor) -> Tensor:
    """nn.MultiheadAttention with dropout, in training mode."""
    found: Tensor = nn.MultiheadAttention(8, 2, dropout=0.1)(x, x, x)[0]
    return found


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
        lambda x: F.alpha_dropout(x, 0.1, True),
        lambda x: F.dropout2d(x, p=0.1),
        lambda x: F.dropout(x.transpose(1, 2), 0.1),
        attention_of_torch,
    ],
    ids=["attention", "alpha", "channels", "no-tokens", "module"],
)
def test_dropout_without_keyed_masks_is_refused(call):
    """What would draw from torch's generator is an error, not a false alarm of verify."""
    model = Unkeyed(call)
    keyed = KeyedDropout(model, SEED)

    with keyed.row(STEP, torch.arange(3)[None]), pytest.raises(OracleError, match="keyed mask"):
        model(torch.ones(1, 3, 8))


@pytest.mark.parametrize("kind", ["gemma2", "mistral"])
def test_our_eager_attention_is_that_of_transformers(kind):
    """Soft cap, window, grouped heads and padding give the logits of eager attention."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "sliding_window": 3,
        "attention_dropout": 0.5,
    }
    if kind == "gemma2":
        config = Gemma2Config(**sizes, attn_logit_softcapping=0.5, attn_implementation="eager")
        base: Any = Gemma2ForCausalLM(config)
    else:
        base = MistralForCausalLM(MistralConfig(**sizes, attn_implementation="eager"))
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).eval()
    ids = torch.randint(0, 31, (2, 8), generator=torch.Generator().manual_seed(1))
    attended = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    expected = model(ids, attention_mask=attended).logits

    register_attention()
    base.set_attn_implementation(EAGER)
    found = model(ids, attention_mask=attended).logits

    assert has_attention_dropout(base)
    torch.testing.assert_close(found[attended == 1], expected[attended == 1])
