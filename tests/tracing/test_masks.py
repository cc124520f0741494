"""Masks that models hand to attention: packed attention does the same, or does not run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, masking_utils

from tests.models import VOCABULARY, assert_equals_peft, error_of, job, ready, tokens
from tests.sampled import sampled
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import AttentionNotPackable, PaddingSeen
from tlora_fx.tracing.masks import MaskProbe, MaskRule, UnreadableMask

WIDE = 1e-9
FURTHEST = 1200


def windowed(size: int) -> Callable[..., Any]:
    """Only the last tokens are seen."""
    return lambda batch, head, query, key: key > query - size


def chunked(size: int) -> Callable[..., Any]:
    """Only tokens of the same chunk are seen."""
    return lambda batch, head, query, key: key // size == query // size


def prefix(size: int) -> Callable[..., Any]:
    """The first tokens are seen by all."""
    return lambda batch, head, query, key: key < size


def around(size: int) -> Callable[..., Any]:
    """Tokens on both sides are seen."""
    return lambda batch, head, query, key: abs(query - key) < size


def always(*_: Any) -> Tensor:
    """Every token is seen."""
    return torch.tensor(True)


CAUSAL = masking_utils.causal_mask_function
MAKERS = {"window": windowed, "chunk": chunked, "prefix": prefix, "around": around}


def mask_functions() -> st.SearchStrategy[Callable[..., Any]]:
    """Masks of two positions, joined by and, or."""
    leaves = st.one_of(
        st.just(CAUSAL),
        st.just(always),
        st.builds(
            lambda kind, size: MAKERS[kind](size),
            st.sampled_from(sorted(MAKERS)),
            st.integers(1, FURTHEST + 5),
        ),
    )
    joins = st.sampled_from([masking_utils.and_masks, masking_utils.or_masks])
    return st.recursive(
        leaves, lambda inner: st.builds(lambda f, a, b: f(a, b), joins, inner, inner), max_leaves=4
    )


@given(function=mask_functions(), use_vmap=st.booleans())
def test_a_rule_equals_its_mask_at_every_pair_of_positions(function, use_vmap):
    """Whatever is read as a rule hides and shows what the function does, near and far."""
    rule = MaskProbe(function, use_vmap, FURTHEST).rule()

    positions = torch.arange(FURTHEST + 1)
    pairs = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    expected = function(*pairs, positions[:, None], positions)
    if rule is not None:
        expected = expected.expand(FURTHEST + 1, FURTHEST + 1)
        assert torch.equal(rule.sees(positions[:, None], positions), expected)


@given(causal=st.booleans(), window=st.integers(2, FURTHEST), use_vmap=st.booleans())
def test_what_packed_attention_can_do_is_read(causal, window, use_vmap):
    """Causal or not, with each window; of one token they are the same."""
    side = windowed(window) if causal else around(window)
    function = masking_utils.and_masks(CAUSAL, side) if causal else side

    assert MaskProbe(function, use_vmap, FURTHEST).rule() == MaskRule(causal, window)


@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_without_a_window_is_read(causal):
    """Causal, and all of a sequence."""
    assert MaskProbe(CAUSAL if causal else always, False, FURTHEST).rule() == MaskRule(causal)


@pytest.mark.parametrize(
    "table", [torch.ones(9, device="meta"), torch.ones(2, dtype=torch.bool), torch.ones(())]
)
def test_a_mask_of_the_models_tensors_is_unreadable(table):
    """Neither values on meta, nor short tables, nor floats are taken for a mask."""

    def function(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return table[key] if table.dim() else table

    with pytest.raises(UnreadableMask):
        MaskProbe(function, False, FURTHEST).rule()


@dataclass
class Ways:
    """How a model makes its mask, and what it hands to attention.

    maker       one of masking_utils'
    config      of its config
    joined      further arguments of the maker
    keywords    further arguments of attention
    change      what is done with the mask on its way
    """

    maker: Callable[..., Any] = masking_utils.create_causal_mask
    config: dict[str, Any] = field(default_factory=dict)
    joined: dict[str, Any] = field(default_factory=dict)
    keywords: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any], Any] = lambda mask: mask


def eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' models have it, in the model's own dtype."""
    weights = query @ key.mT * query.shape[-1] ** -0.5
    if attention_mask is not None:
        weights = weights + attention_mask
    return (weights.softmax(-1) @ value).transpose(1, 2), None


class Layer(nn.Module):
    """Two heads of attention, handed to transformers' interface."""

    def __init__(self, config: LlamaConfig, ways: Ways) -> None:
        super().__init__()
        self.config, self.ways = config, ways
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, hidden: Tensor, mask: Any) -> Tensor:
        """Residual attention."""
        heads = self.qkv(self.norm(hidden)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        attention = AttentionInterface().get_interface(self.config._attn_implementation, eager)
        out, _ = attention(self, *heads, self.ways.change(mask), **self.ways.keywords)
        return hidden + self.out(out.reshape(hidden.shape))


class Masked(nn.Module):
    """A language model whose mask is made in one of several ways."""

    def __init__(self, ways: Ways, implementation: str = "eager") -> None:
        super().__init__()
        self.config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=64, **ways.config,
        )  # fmt: skip
        self.config._attn_implementation = implementation
        self.ways = ways
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.places = nn.Embedding(64, 32)
        self.layers = nn.ModuleList([Layer(self.config, ways)])
        self.head = nn.Linear(32, VOCABULARY)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
    ) -> Any:
        """Logits, in an object as transformers gives them."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        hidden = self.embed(input_ids) + self.places(position_ids)
        mask = self.ways.maker(
            config=self.config, inputs_embeds=hidden, attention_mask=attention_mask,
            past_key_values=None, position_ids=position_ids, **self.ways.joined,
        )  # fmt: skip
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return Logits(self.head(hidden))


class Logits(tuple):
    """What a model returns."""

    __slots__ = ()

    def __new__(cls, logits: Tensor) -> Logits:
        return super().__new__(cls, (logits,))

    @property
    def logits(self) -> Tensor:
        """The only one."""
        return self[0]


def jobs_on(ways: Ways, attention: Any = "auto", implementation: str = "eager"):
    """Two jobs on a model of float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = Masked(ways, implementation).double()
    base = BaseSpec(module=module, dtype="float64", attention=attention)
    return [
        job("one", base, r=4, target_modules=["qkv", "out"]),
        job("two", base, r=2, target_modules=["qkv"], lora_alpha=5),
    ]


PARTS = [tokens([23, 7], seed=1), tokens([12, 1, 5], seed=2)]
SLIDING = {"sliding_window": 4}
EXPRESSED = {
    "causal": Ways(),
    "sliding, without a keyword": Ways(
        masking_utils.create_sliding_window_causal_mask, SLIDING
    ),
    "sliding by and_mask_function": Ways(joined={"and_mask_function": windowed(5)}),
    "bidirectional by or_mask_function": Ways(joined={"or_mask_function": always}),
    "bidirectional by the config": Ways(config={"is_causal": False}),
    "bidirectional in a window": Ways(
        masking_utils.create_sliding_window_causal_mask,
        SLIDING,
        joined={"or_mask_function": around(4)},
    ),
    "bidirectional, sliding by the config": Ways(
        masking_utils.create_sliding_window_causal_mask, {**SLIDING, "is_causal": False}
    ),
    "causal with is_causal False": Ways(keywords={"is_causal": False}),
    "causal with a window as a keyword, which eager attention ignores": Ways(
        keywords={"sliding_window": 3}
    ),
    "a mask cut to the keys that there are": Ways(
        change=lambda mask: None if mask is None else mask[:, :, :, : mask.shape[-1]]
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", sampled(EXPRESSED, 6))
def test_masks_that_packed_attention_can_do_equal_peft(what):
    """Rows stay packed; losses and gradients of each job are those of PEFT alone."""
    model = ready(jobs_on(EXPRESSED[what]))

    assert model.group.form == "packed"
    assert_equals_peft(model, PARTS, WIDE)


def blocks(ids: Tensor) -> Tensor:
    """Block ids of tokens: those of even ids see each other."""
    return torch.where(ids % 2 == 0, 0, -1)


PADDED = {
    "chunks": Ways(masking_utils.create_chunked_causal_mask, {"attention_chunk_size": 4}),
    "chunks by and_mask_function": Ways(joined={"and_mask_function": chunked(4)}),
    "a window and some first tokens": Ways(
        masking_utils.create_sliding_window_causal_mask,
        SLIDING,
        joined={
            "or_mask_function": lambda b, h, q, k: (k < 2) & (k <= q),
        },
    ),
    "every second token": Ways(joined={"and_mask_function": lambda b, h, q, k: (q - k) % 2 == 0}),
    "a mask computed with": Ways(change=lambda mask: mask * 1.0),
    "an argument that changes nothing here": Ways(keywords={"block_indices": torch.arange(3)}),
}


@pytest.mark.parametrize("what", sampled(PADDED))
def test_causal_masks_that_packed_attention_cannot_do_run_padded(what):
    """`attention: auto` falls back to the model's own masks, `packed` refuses by name."""
    model = ready(jobs_on(PADDED[what]))

    assert model.group.form == "batch"
    assert any("padded, not packed" in note for _, note in model.group.notes)
    assert_equals_peft(model, PARTS, WIDE)
    text = error_of(lambda: compile(jobs_on(PADDED[what], "packed")), AttentionNotPackable)
    assert "attention: batch" in text


REFUSED = {
    "a prefix seen by all": Ways(joined={"or_mask_function": prefix(3)}),
    "bidirectional chunks": Ways(joined={"or_mask_function": chunked(3)}),
    "two tokens ahead": Ways(joined={"or_mask_function": lambda b, h, q, k: k <= q + 2}),
}


@pytest.mark.parametrize("what", sampled(REFUSED))
def test_masks_that_look_ahead_and_cannot_be_packed_are_refused(what):
    """In batch form such a token would see the padding behind its line."""
    text = error_of(lambda: compile(jobs_on(REFUSED[what])), PaddingSeen)

    assert "see later ones" in text
    assert "before that, in packed form" in text


def test_attention_without_its_mask_is_not_taken_for_causal():
    """Eager attention without a mask hides nothing, so it is not packed."""
    jobs = jobs_on(Ways(change=lambda mask: None), "packed")

    text = error_of(lambda: compile(jobs), AttentionNotPackable)

    assert "no mask" in text


@pytest.mark.parametrize(
    "ways",
    [
        Ways(),
        Ways(change=lambda mask: None),
        Ways(masking_utils.create_sliding_window_causal_mask, SLIDING),
    ],
)
def test_sdpa_goes_by_is_causal_where_there_is_no_mask(ways):
    """A base that attends by sdpa reads masks and is_causal as sdpa does."""
    model = ready(jobs_on(ways, implementation="sdpa"))

    assert model.group.form == "packed"
    assert_equals_peft(model, PARTS, WIDE)


def test_sdpa_whose_mask_contradicts_is_causal_is_not_packed():
    """It leaves out masks that it can, and then is_causal decides."""
    jobs = jobs_on(Ways(keywords={"is_causal": False}), "packed", "sdpa")

    text = error_of(lambda: compile(jobs), AttentionNotPackable)

    assert "bidirectional, by its arguments" in text
    assert "causal, by its mask" in text
