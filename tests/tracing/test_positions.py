"""Positions that models make for themselves: a packed row hands the same over, or is not packed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from tests.models import FEW, assert_equals_peft, error_of, job, ready, tokens
from tests.tracing.test_masks import Masked, Ways
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import AttentionNotPackable
from tlora_fx.model.backbone import longest_sequence

WIDE = 1e-9


class Placed(Masked):
    """A model with positions of its own, and an offset where it looks them up."""

    def __init__(self, default, offset: int = 0) -> None:
        super().__init__(Ways())
        self.default, self.offset = default, offset
        self.places = nn.Embedding(200, 32)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
    ):
        """Logits, in an object as transformers gives them."""
        if position_ids is None:
            position_ids = self.default(input_ids)
        return super().forward(input_ids, attention_mask, position_ids + self.offset)


def counted(ids: Tensor) -> Tensor:
    """0 to n - 1, as OPT counts them."""
    ones = torch.ones(ids.shape, dtype=torch.int64, device=ids.device)
    return (torch.cumsum(ones, dim=1) * ones - 1).long()


def arange(ids: Tensor) -> Tensor:
    """0 to n - 1."""
    return torch.arange(ids.shape[1], device=ids.device)[None]


DEFAULTS = {
    "0 to n - 1": (arange, 0, "packed"),
    "0 to n - 1, for each line": (lambda ids: arange(ids).expand_as(ids), 0, "packed"),
    "0 to n - 1, counted": (counted, 0, "packed"),
    "0 to n - 1, with an offset where they are looked up": (arange, 2, "packed"),
    "1 to n": (lambda ids: arange(ids) + 1, 0, "batch"),
    "by the ids, as RoBERTa": (lambda ids: torch.cumsum(ids != 0, 1), 0, "packed"),
}


def jobs_on(default, offset: int, attention="auto"):
    """Two jobs on a model of float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = Placed(default, offset).double()
    base = BaseSpec(module=module, dtype="float64", attention=attention)
    return [
        job("one", base, r=4, target_modules=["qkv"]),
        job("two", base, r=2, target_modules=["out"]),
    ]


@pytest.mark.parametrize("what", DEFAULTS)
def test_a_model_trains_at_the_positions_that_it_has_alone(what):
    """Rows are packed where a packed row has these positions, else padded; both equal PEFT."""
    default, offset, form = DEFAULTS[what]
    model = ready(jobs_on(default, offset))

    assert model.group.form == form
    assert_equals_peft(model, [tokens([9, 4], seed=1), tokens([6], seed=2)], WIDE)


def test_a_row_ends_where_positions_behind_the_padding_end():
    """RoBERTa's 514 positions are of 512 tokens, BERT's 512 of as many."""
    few = {**FEW, "num_hidden_layers": 1, "pad_token_id": 1}
    found = [
        longest_sequence(
            AutoModel.from_config(
                AutoConfig.for_model(kind, **{**few, "max_position_embeddings": most})
            )
        )
        for kind, most in (("roberta", 514), ("bert", 512))
    ]

    assert found == [512, 512]


def test_the_refusal_says_what_is_read():
    """The operator that reads positions, and which ones it reads."""
    text = error_of(lambda: compile(jobs_on(lambda ids: arange(ids) + 1, 0, "packed")),
                    AttentionNotPackable)  # fmt: skip

    assert "embedding" in text
    assert "[1, 2, 3, 4, 5, 6, 7]" in text
